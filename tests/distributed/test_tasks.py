"""Steps of several configurations on ranks that are started once."""

import os
from pathlib import Path
from typing import Any

import pytest

from torchtitan_ext.verify.tasks import Task, record_tasks

# What a rank does with a task, in place of a training step.
SCRIPT = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {repository!r})
from torchtitan_ext.verify import tasks
tasks.load_config = lambda flags, world_size: (flags, world_size)

def record(task, config):
    import torch.distributed as dist
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    if task.name == "fails on rank 1" and rank == 1:
        raise ValueError("no such thing\\nsecond line")
    if task.name == "fails in two lines":
        raise ValueError("compiler raised:\\n\\nno such thing\\nthird line")
    if task.name.startswith("waits for"):
        path = Path(task.name.removeprefix("waits for ").replace("|", "/"))
        while not path.exists():
            time.sleep(0.01)
    if task.name == "dies":
        os._exit(3)
    dist.barrier()
    return {{"pid": os.getpid(), "flags": config[0][:-1], "ranks": config[1], "rank": rank}}

tasks.record_on_this_rank(Path(sys.argv[1].removeprefix("--tasks=")), record)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(repository=str(Path(__file__).parents[2])))
    return str(path)


def results_of(script: str, names: list[str]) -> dict[str, Any]:
    tasks = [Task(name, [f"--of={name}"]) for name in names]
    return {task.name: result for task, result in record_tasks(script, tasks, 2)}


def test_tasks_share_their_ranks(script: str) -> None:
    first, second = results_of(script, ["first", "second"]).values()
    assert first["pid"] == second["pid"]
    assert (first["rank"], first["ranks"]) == (0, 2)
    assert (first["flags"], second["flags"]) == (["--of=first"], ["--of=second"])


def test_tasks_after_one_that_fails_run_on_new_ranks(script: str) -> None:
    results = results_of(script, ["first", "fails on rank 1", "second", "dies", "third"])
    assert list(results) == ["first", "fails on rank 1", "second", "dies", "third"]
    assert results["fails on rank 1"] == "ValueError: no such thing"
    assert results["dies"] == "a rank crashed, see above"
    pids = [results[name]["pid"] for name in ("first", "second", "third")]
    assert len(set(pids)) == 3


def test_line_that_announces_another_is_shown_with_it(script: str) -> None:
    (failure,) = results_of(script, ["fails in two lines"]).values()
    assert failure == "ValueError: compiler raised: no such thing"


def test_result_is_there_before_the_next_task_has_ended(script: str, tmp_path: Path) -> None:
    waits = f"waits for {tmp_path / 'signal'}".replace("/", "|")
    results = record_tasks(script, [Task(name, []) for name in ("first", waits)], 2)
    assert next(results)[0].name == "first"
    (tmp_path / "signal").touch()  # the second ends only now
    assert next(results)[0].name == waits


def test_ranks_end_with_who_asked_for_their_results(script: str, tmp_path: Path) -> None:
    waits = f"waits for {tmp_path / 'signal'}".replace("/", "|")
    results = record_tasks(script, [Task(name, []) for name in ("first", waits)], 2)
    pid = next(results)[1]["pid"]
    results.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
