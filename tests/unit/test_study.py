"""Losses as a study reads them, its verdicts, and runs that do not get to their end."""

import fcntl
import json
import math
from pathlib import Path

import pytest

from torchtitan_ext.metrics_file import METRICS_FILE
from torchtitan_ext.study.curves import mean_of_last, read_curve, rolling_mean
from torchtitan_ext.study.runs import Run, RunFailedError, finish_runs
from torchtitan_ext.study.verdict import check_among, check_equal


def write_metrics(folder: Path, *records: dict, end: str = "\n") -> None:
    folder.mkdir(exist_ok=True)
    (folder / METRICS_FILE).write_text("\n".join(map(json.dumps, records)) + end)


def test_losses_of_a_resumed_run_are_the_later_ones(tmp_path: Path) -> None:
    steps = [(1, 4.0), (2, 3.0), (3, 9.0), (3, 2.0), (4, 1.0)]
    write_metrics(tmp_path, *({"step": step, "loss": loss} for step, loss in steps))
    assert read_curve(tmp_path) == {1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0}


def test_losses_leave_out_validation_and_a_line_cut_off(tmp_path: Path) -> None:
    records = [
        {"step": 1, "loss": 4.0},
        {"step": 1, "validation_loss": 5.0},
        {"step": 2, "loss": 3},
    ]
    write_metrics(tmp_path, *records, end='\n{"step": 3, "lo')
    assert read_curve(tmp_path) == {1: 4.0, 2: 3.0}


def test_loss_that_is_not_finite_stays_so(tmp_path: Path) -> None:
    write_metrics(tmp_path, {"step": 1, "loss": None, "nonfinite": True})
    assert math.isnan(read_curve(tmp_path)[1])


def test_no_losses_before_the_run(tmp_path: Path) -> None:
    assert read_curve(tmp_path) == {}


def test_mean_of_last_share() -> None:
    losses = {step: float(step) for step in range(10, 101, 10)}
    assert mean_of_last(losses, 0.2) == 95.0
    assert mean_of_last(losses, 0.01) == 100.0


def test_rolling_mean_starts_with_a_full_window() -> None:
    assert rolling_mean({1: 1.0, 2: 3.0, 3: 8.0}, window=2) == {2: 2.0, 3: 5.5}
    assert rolling_mean({1: 1.0, 2: 3.0}, window=5) == {2: 2.0}


@pytest.mark.parametrize(("loss", "passed"), [(5.0009, True), (5.0011, False), (math.nan, False)])
def test_equal_runs(loss: float, passed: bool) -> None:
    assert check_equal("x", loss, 5.0, tolerance=1e-3).passed == passed


def test_run_among_others_by_the_prediction_interval() -> None:
    others = [4.9, 5.1, 4.9, 5.1]
    deviation = math.sqrt(0.04 / 3)
    assert check_among("x", 5.0, others).limit == pytest.approx(5.841 * deviation * 1.118034)
    assert check_among("x", 5.7, others).passed
    assert not check_among("x", 5.8, others).passed
    assert not check_among("x", 4.2, others).passed
    assert not check_among("x", math.nan, others).passed


def test_verdict_is_said_in_the_line() -> None:
    assert str(check_equal("x", 2.0, 1.0, 0.5)) == "x: +1.00e+00 (at most 5.00e-01) NOT OK"


def test_done_runs_are_not_started(tmp_path: Path) -> None:
    write_metrics(tmp_path / "a", {"step": 5, "loss": 1.0})
    run = Run("a", tmp_path / "a", ("--no.such.flag",), 5)
    finish_runs([run], jobs=1, on_poll=lambda going: None)
    assert not run.log.exists()


def test_failed_run_is_named_with_its_log(tmp_path: Path) -> None:
    run = Run("a", tmp_path / "a", ("--no.such.flag",), 5)
    with pytest.raises(RunFailedError, match=r"a ended with status 2 at step 0 of 5; see .*txt"):
        finish_runs([run], jobs=1, on_poll=lambda going: None)
    assert "[no.such]: unknown section" in run.log.read_text()


def test_run_that_another_process_trains_is_left_to_it(tmp_path: Path) -> None:
    run = Run("a", tmp_path, (), 5)
    with open(run.log, "ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        with pytest.raises(RunFailedError, match="still being trained"):
            finish_runs([run], jobs=1, on_poll=lambda going: None)
