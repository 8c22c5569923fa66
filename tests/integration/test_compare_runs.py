"""scripts/compare_runs.py given two settings: trains both, then compares."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "scripts/compare_runs.py"]
BERT = [
    "--job.config_file=train_configs/bert_tiny.toml",
    "--compile.no-enable",
    "--training.seq_len=16",
    "--training.local_batch_size=1",
    "--training.steps=3",
]


def compare_runs(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=600
    )


def test_checkpoint_changes_no_bit(tmp_path: Path) -> None:
    own = (
        "--flags-a=--activation_checkpoint.mode=none",
        "--flags-b=--activation_checkpoint.mode=full",
    )
    done = compare_runs(*BERT, "--ngpu=2", *own, f"--output={tmp_path / 'new'}")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["verdict"], summary["steps"]) == ("equal", 3)
    for run, mode in (("a", "none"), ("b", "full")):
        config = (tmp_path / "new" / run / "config.toml").read_text()
        assert f'mode = "{mode}"' in config
    assert "equal: every bit of 3 steps" in done.stderr


@pytest.mark.slow
def test_one_setting_beside_none(tmp_path: Path) -> None:
    """B has what A has, and a flag of several words; the losses differ from the second step on."""
    own = "--flags-b=--optimizer.lr=0.01 --job.description='a larger rate'"
    done = compare_runs(*BERT, own, f"--output={tmp_path}", "--tolerance=1e-6")
    assert done.returncode == 1, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["verdict"], summary["first_difference_step"]) == ("differs", 2)
    assert 'description = "a larger rate"' in (tmp_path / "b" / "config.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "error: needs two runs, A and B, or two settings"),
        (("a", "b", "--ngpu=2"), "error: A and B are there: flags, --ngpu and --output are for"),
        (("a", "b", "--training.steps=2"), "error: A and B are there: flags, --ngpu and"),
        ((*BERT, "--flags-b=--training.seq_len=1000"), "error: [training] seq_len = 1000: must be"),
        (
            (*BERT, "--flags-b=", "--output=scripts"),
            "error: --output scripts: must be a",
        ),
        ((*BERT, "--flags-b=--a 'b"), "error: --flags-b --a 'b: No closing quotation"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(arguments: tuple[str, ...], message: str) -> None:
    done = compare_runs(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(message), done.stderr
    assert done.stderr.count("\n") == 1
