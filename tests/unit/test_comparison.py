"""scripts/compare_runs.py on files with known differences."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchtitan_ext.metrics_file import METRICS_FILE, json_line
from torchtitan_ext.study.comparison import compare

LOSSES = [4.0, 3.0, 2.0, 1.0]


def write_run(folder: Path, losses: list[float], norms: list[float] | None = None) -> Path:
    folder.mkdir()
    lines = []
    for step, loss in enumerate(losses, start=1):
        norm = {} if norms is None else {"grad_norm": norms[step - 1]}
        lines.append(json_line({"step": step, "loss": loss, **norm}))
    (folder / METRICS_FILE).write_text("".join(lines))
    return folder


def compare_runs(*arguments: str | Path) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "scripts/compare_runs.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    summary = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    return done.returncode, summary, done.stderr


def curve(*values: float) -> dict[int, float]:
    return dict(enumerate(values, start=1))


def test_first_and_largest_difference_are_found() -> None:
    found = compare(curve(4.0, 3.0, 2.0, 1.0), curve(4.0, 3.5, 2.0, 3.0))
    assert found.first_difference_step == 2
    assert (found.max_difference, found.max_difference_step) == (2.0, 4)
    assert found.final == (1.0, 3.0)


def test_last_bit_is_a_difference() -> None:
    found = compare(curve(4.0, 3.0), curve(4.0, math.nextafter(3.0, 4.0)))
    assert found.first_difference_step == 2
    assert 0 < found.max_difference < 1e-15


def test_smoothing_averages_before_it_subtracts() -> None:
    found = compare(curve(1.0, 3.0, 1.0, 3.0), curve(3.0, 1.0, 3.0, 1.5), window=2)
    assert found.max_difference == 0.25
    assert found.first_difference_step == 1


def test_relative_differences_are_of_the_first_run() -> None:
    found = compare(curve(4.0, 0.0), curve(5.0, 0.1), relative=True)
    assert found.max_difference == 0.25


def test_equal_where_both_are_not_finite() -> None:
    assert compare(curve(1.0, math.nan), curve(1.0, math.nan)).first_difference_step is None
    assert compare(curve(1.0, math.nan), curve(1.0, 2.0)).max_difference == math.inf


def test_only_common_steps_count() -> None:
    found = compare({1: 1.0, 2: 2.0, 4: 4.0}, {2: 2.0, 3: 9.0, 4: 4.0})
    assert found.steps == [2, 4]
    assert found.max_difference == 0
    with pytest.raises(ValueError, match="no step"):
        compare({1: 1.0}, {2: 1.0})


def test_equal_runs(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", LOSSES, LOSSES)
    b = write_run(tmp_path / "b", LOSSES, LOSSES)
    status, summary, text = compare_runs(a, b / METRICS_FILE, "--png", tmp_path / "new" / "x.png")
    assert status == 0
    assert summary["verdict"] == "equal"
    assert summary["first_difference_step"] is None
    assert summary["max_loss_difference"] == summary["smoothed_final_difference"] == 0
    assert "equal: every bit of 4 steps" in text
    assert max(map(len, text.replace(str(tmp_path), "").splitlines())) <= 100
    assert (tmp_path / "new" / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("tolerance", "verdict"), [("0.24", "differs"), ("0.25", "within")])
def test_tolerance_decides(tmp_path: Path, tolerance: str, verdict: str) -> None:
    a = write_run(tmp_path / "a", LOSSES)
    b = write_run(tmp_path / "b", [4.0, 3.0, 2.25, 1.125])
    status, summary, _ = compare_runs(a, b, "--tolerance", tolerance)
    assert (status, summary["verdict"]) == (int(verdict == "differs"), verdict)
    assert summary["first_difference_step"] == 3
    assert summary["max_loss_difference"] == 0.25
    assert summary["smoothed_final_difference"] == 0.125
    assert summary["max_grad_norm_difference"] is None


def test_gradient_norm_alone_makes_runs_differ_in_bits(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", LOSSES, LOSSES)
    b = write_run(tmp_path / "b", LOSSES, [4.0, 6.0, 2.0, 1.0])
    status, summary, _ = compare_runs(a, b)
    assert (status, summary["verdict"]) == (0, "within")
    assert summary["first_difference_step"] == 2
    assert summary["max_grad_norm_difference"] == 1.0


def test_reason_is_of_what_differs(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", LOSSES, LOSSES)
    b = write_run(tmp_path / "b", LOSSES, [4.0, math.nan, 2.0, 1.0])
    _, summary, text = compare_runs(a, b)
    assert "within: losses of 4 steps in every bit; gradient norms differ by not finite" in text
    assert summary["max_grad_norm_difference"] is None
    assert summary["max_grad_norm_difference_step"] == 2
    _, summary, text = compare_runs(a, write_run(tmp_path / "c", LOSSES))
    assert "equal: every bit of the losses of 4 steps; gradient norms are not logged by" in text


def test_steps_of_one_run_alone_are_counted(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", LOSSES), write_run(tmp_path / "b", LOSSES[:2])
    _, summary, text = compare_runs(a, b)
    assert (summary["only_in_a"], summary["only_in_b"], summary["steps"]) == (2, 0, 2)
    assert "4 steps logged, 1 to 4; 2 not in the other, the last is 4" in text


def test_means_do_not_hide_which_step_is_not_finite() -> None:
    found = compare(curve(1.0, math.nan, 1.0), curve(1.0, 1.0, math.nan), window=3)
    assert (found.max_difference, found.max_difference_step) == (math.inf, 2)
    with pytest.raises(ValueError, match="a mean of 4 steps, but only 3 were logged by both"):
        compare(curve(1.0, 2.0, 3.0), curve(1.0, 2.0, 3.0), window=4)


def test_lines_that_are_no_records(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", LOSSES)
    b = write_run(tmp_path / "b", LOSSES)
    file = b / METRICS_FILE
    whole = file.read_text()
    file.write_text('{"step": 1, "lo\n' + whole + '{"step": 5, "l')
    status, summary, text = compare_runs(a, b)
    assert (status, summary["steps"]) == (0, 4)
    assert text.startswith(f"{file}, line 1: passed over, cut off\n")
    for line, message in (
        ('{"loss": 1.0}', "line 5: is not the record of a step"),
        ("3", "line 5: is not the record of a step"),
        ('{"step": 5, "loss": "x"}', "loss of step 5 is no number, but 'x'"),
    ):
        file.write_text(f"{whole}{line}\n")
        status, _, text = compare_runs(a, b)
        assert status == 2
        assert text.startswith("error: ") and message in text and text.count("\n") == 1


def test_loss_that_is_not_finite_differs(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", LOSSES)
    b = write_run(tmp_path / "b", [4.0, math.nan, 2.0, 1.0])
    status, summary, text = compare_runs(a, b, "--tolerance", "1e9")
    assert (status, summary["verdict"]) == (1, "differs")
    assert summary["max_loss_difference"] is None
    assert "not finite in one at step 2" in text


def test_bad_arguments_are_one_line_and_status_2(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", LOSSES)
    for arguments, problem in (
        ((run, tmp_path / "none"), "does not exist"),
        ((run, tmp_path), "has no loss of any step"),
        ((run, run, "--tolerance=-1"), "not a number of at least 0"),
        ((run, run, "--smooth=100"), "a mean of 100 steps, but only 4 were logged by both"),
        ((run, run, "--png=x.jpg"), "'x.jpg' is not the name of a file that ends with .png"),
        ((run, run, f"--png={run}"), "is not the name of a file that ends with .png"),
        ((run, run, "--png=/proc/none/x.png"), "--png /proc/none/x.png: No such file or"),
        ((run,), "required: B"),
    ):
        status, _, text = compare_runs(*arguments)
        assert status == 2
        assert text.startswith("error: ") and problem in text
        assert text.count("\n") == 1
