"""scripts/check_layouts.py: what it prints, and its status."""

import json
import subprocess
import sys

COMMAND = [
    sys.executable,
    "scripts/check_layouts.py",
    "--job.config_file=train_configs/bert_tiny.toml",
]
SMALL = ["--compile.no-enable", "--training.local_batch_size=1", "--training.seq_len=16"]


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=600)


def test_layouts_of_bert() -> None:
    done = check(*SMALL, "--ngpu=2", "--layouts=zero=1,dp_replicate=2,ep=2")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    first, second = summary["layouts"]
    for row, layout in ((first, "zero=1"), (second, "dp_replicate=2")):
        assert row["layout"] == layout
        assert row["verdict"] in ("equal", "rounding")
        assert row["ratio"] is None
        assert abs(row["loss"] - summary["one_process"]["loss"]) < 1e-4
        assert row["worst_parameter"] and row["grad_norm"] > 0
    (refused,) = summary["refused"]
    assert refused["layout"] == "ep=2"
    assert "the model has no experts" in refused["reason"]
    assert "a gradient's rounding is up to" in done.stderr
    assert "Warning" not in done.stderr
    assert max(map(len, done.stderr.splitlines())) <= 100


def test_bad_arguments_are_one_line_and_status_2() -> None:
    for arguments, message in (
        (["--layouts=ep=2"], "error: --layouts 'ep=2': all are refused, so nothing was checked"),
        (["--layouts=ep"], "error: --layouts 'ep': must be fsdp, or degrees such as"),
        (["--training.seq_len=1000"], "error: [training] seq_len = 1000: must be at"),
    ):
        done = check(*arguments)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith(message)
