"""Steps of several configurations, one after another, on ranks that are started once for all."""

import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_ext.launch import ignore_harmless_warnings, load_config, start_on_ranks

if TYPE_CHECKING:
    from .step import StepRecord

_LIST = "tasks.json"


@dataclass(frozen=True)
class Task:
    """A configuration whose step is to be recorded."""

    name: str
    flags: list[str]


def record_tasks(
    script: str, tasks: Sequence[Task], num_ranks: int
) -> Iterator[tuple[Task, "StepRecord | str"]]:
    """Yields each task with its step, or with what the step failed with.

    Args:
        script: a file that calls :func:`record_on_this_rank` with the folder that its argument
            ``--tasks`` names.
    """
    waiting = list(tasks)
    while waiting:
        with tempfile.TemporaryDirectory() as folder:
            _list_file(folder).write_text(json.dumps([asdict(task) for task in waiting]))
            args = [f"--tasks={folder}"]
            with start_on_ranks(script, args, num_ranks, stdout=subprocess.DEVNULL) as ranks:
                result: Any = None
                while waiting and _wait_for(_result_file(folder, waiting[0]), ranks):
                    path = _result_file(folder, waiting[0])
                    result = pickle.loads(path.read_bytes())
                    path.unlink()  # it may be as large as the model
                    yield waiting.pop(0), result
                ranks.wait()
        # Those after one that failed get new ranks.
        if waiting and not isinstance(result, str):
            yield waiting.pop(0), "a rank crashed, see above"


def _wait_for(path: Path, ranks: "subprocess.Popen[str]") -> bool:
    """Until the file is there, or won't come, as the ranks have ended."""
    while not path.is_file():
        with suppress(subprocess.TimeoutExpired):
            ranks.wait(timeout=0.1)
            return path.is_file()
    return True


def record_on_this_rank(folder: Path, record: Callable[[Task, Any], "StepRecord"]) -> None:
    """On each rank: records the steps of all tasks, until one fails.

    Args:
        record: takes a task and its checked configuration.
    """
    ignore_harmless_warnings()
    # torchtitan says that the process group of the first step is there for the second.
    logging.getLogger().setLevel(logging.ERROR)
    tasks = [Task(**task) for task in json.loads(_list_file(folder).read_text())]
    is_first = os.environ["RANK"] == "0"
    for number, task in enumerate(tasks, start=1):
        if is_first:
            print(f"[{number}/{len(tasks)}] {task.name}", file=sys.stderr, flush=True)
        result: Any = None
        try:
            with tempfile.TemporaryDirectory() as dump_folder:
                flags = [*task.flags, f"--job.dump_folder={dump_folder}"]
                result = record(task, load_config(flags, int(os.environ["WORLD_SIZE"])))
        except Exception as error:
            result = f"{type(error).__name__}: {_first_sentence(str(error))}"
            raise
        finally:
            if is_first or isinstance(result, str):
                _leave(result, _result_file(folder, task))
    import torch.distributed as dist

    dist.destroy_process_group()


def _first_sentence(message: str) -> str:
    """The first line; of a compiler's error, which says first who raises, also the next."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])


def _leave(result: Any, path: Path) -> None:
    if path.exists():
        return  # another rank failed before: what follows from that tells less
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps(result))
    os.replace(part, path)  # torchrun may end this rank at any time


def _list_file(folder: str | Path) -> Path:
    return Path(folder) / _LIST


def _result_file(folder: str | Path, task: Task) -> Path:
    return Path(folder) / f"{task.name}.step"
