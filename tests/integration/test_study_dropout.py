"""scripts/study_dropout.py: 300 steps at a raised learning rate, ended once on the way."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan_ext.study.curves import read_curve

STEPS = 300
COMMAND = [sys.executable, "scripts/study_dropout.py"]
SIZE = [f"--steps={STEPS}", "--optimizer.lr=2e-3", "--lr_scheduler.warmup_steps=20"]


def study(output: Path, *arguments: str, timeout: int = 900) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, f"--output={output}", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def end_when_half_done(output: Path, run: str) -> int:
    """Starts the study, ends it when ``run`` has taken half of its steps; returns its status."""
    process = subprocess.Popen(
        [*COMMAND, f"--output={output}", *SIZE],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 300
    while max(read_curve(output / run), default=0) < STEPS // 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    return process.wait(timeout=60)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def finished(output: Path) -> subprocess.CompletedProcess[str]:
    assert end_when_half_done(output, "compiled") == 128 + signal.SIGTERM
    assert 0 < max(read_curve(output / "compiled")) < STEPS
    return study(output, *SIZE)


def test_verdict(finished: subprocess.CompletedProcess[str]) -> None:
    assert finished.returncode == 0, finished.stderr
    summary = json.loads(finished.stdout.splitlines()[-1])
    assert summary["verdict"] == "faithful"
    assert [check["passed"] for check in summary["checks"]] == [True] * 3
    assert summary["max_loss_difference"] == {"compiled": pytest.approx(0, abs=1e-5), "eager": 0}
    # The masks of a compiled run are others than eager's: the curves are not all one.
    assert summary["final_losses"]["compiled"] != summary["final_losses"]["eager"]
    for name, loss in summary["final_losses"].items():
        assert loss < summary["first_losses"][name] - 2


def test_every_step_of_every_run_is_there(
    finished: subprocess.CompletedProcess[str], output: Path
) -> None:
    folders = sorted(path.parent for path in output.glob("*/metrics.jsonl"))
    assert len(folders) == 7
    for folder in folders:
        assert list(read_curve(folder)) == list(range(1, STEPS + 1))
    # It was ended on the way, and went on from a checkpoint.
    assert "Loading the checkpoint" in (output / "compiled" / "log.txt").read_text()


def test_finished_study_trains_nothing_more(
    finished: subprocess.CompletedProcess[str], output: Path
) -> None:
    log = output / "compiled" / "log.txt"
    size = log.stat().st_size
    again = study(output, *SIZE)
    assert again.returncode == 0
    assert again.stdout == finished.stdout
    assert log.stat().st_size == size
    assert json.loads((output / "summary.json").read_text()) == json.loads(again.stdout)
    assert (output / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_other_settings_need_another_folder(
    finished: subprocess.CompletedProcess[str], output: Path
) -> None:
    done = study(output, "--steps=301")
    assert done.returncode == 2
    assert "was begun with steps 300" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "flag",
    ["--debug.seed=3", "--compile.no-enable", "--checkpoint.interval=5", "--training.steps=9"],
)
def test_what_the_study_sets_is_refused(tmp_path: Path, flag: str) -> None:
    done = study(tmp_path / "study", flag)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {flag}: the study sets this")
    assert not (tmp_path / "study").exists()


def test_bad_configuration_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = study(tmp_path / "study", "--training.seq_len=1000")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: [training] seq_len = 1000: must be at")
    assert not (tmp_path / "study").exists()
