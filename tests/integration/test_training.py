"""Training from the command line, as a user does it, and what it leaves behind."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

SMALL = [
    "--training.seq_len=32",
    "--training.local_batch_size=1",
    # The schedule must not depend on the number of steps: a warmup ends with the run.
    "--lr_scheduler.warmup_steps=2",
    "--debug.deterministic",
]


def run_train(
    folder: Path, *flags: str, timeout: float = 600, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["./run_train.sh", f"--job.dump_folder={folder}", *SMALL, *flags],
        env={**os.environ, "NGPU": "2", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in metrics(folder)}


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps in one go, with everything that can be written."""
    folder = tmp_path_factory.mktemp("six_steps")
    done = run_train(
        folder,
        "--training.steps=6",
        "--metrics.enable_tensorboard",
        "--metrics.log_experts",
        "--profiling.enable_profiling",
        "--profiling.profile_freq=4",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_metrics_file_has_a_full_record_for_every_step(six_steps: Path) -> None:
    rows = metrics(six_steps)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert row["tokens_seen"] == row["step"] * 2 * 32
        assert row["tokens_per_second"] > 0
        assert row["peak_memory_gib"] > 0
        assert 0 <= row["data_seconds"] < row["step_seconds"]
        loads = row["tokens_per_expert"]
        assert [sum(experts) for experts in loads] == [2 * 32 * 3] * 5
        worst = max(max(experts) / (sum(experts) / len(experts)) for experts in loads)
        assert row["expert_load_max_over_mean"] == pytest.approx(worst)


def test_profiler_writes_a_trace_of_every_rank(six_steps: Path) -> None:
    for rank in (0, 1):
        trace = six_steps / "profile_traces" / "iteration_4" / f"rank{rank}_trace.json"
        names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
        assert "aten::mm" in names


def test_dump_folder_holds_what_is_promised_and_no_more(six_steps: Path) -> None:
    entries = {entry.name for entry in six_steps.iterdir()}
    assert entries == {"config.toml", "metrics.jsonl", "profile_traces", "tb"}
    assert list((six_steps / "tb").rglob("events.out.tfevents.*"))


def test_saved_config_gives_the_same_run_again(six_steps: Path, tmp_path: Path) -> None:
    again = run_train(tmp_path, "--training.steps=2", CONFIG_FILE=str(six_steps / "config.toml"))
    assert again.returncode == 0, again.stdout + again.stderr
    expected = losses(six_steps)
    assert losses(tmp_path) == {step: expected[step] for step in (1, 2)}


def test_resumed_run_equals_the_uninterrupted_one(six_steps: Path, tmp_path: Path) -> None:
    for num_steps in (3, 6):
        done = run_train(tmp_path, f"--training.steps={num_steps}", "--checkpoint.enable")
        assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path) == losses(six_steps)
