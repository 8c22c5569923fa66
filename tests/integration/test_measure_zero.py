"""scripts/measure_zero.py: what it prints, and that its figures are those of the stages."""

import json
import subprocess
import sys

COMMAND = [
    sys.executable,
    "scripts/measure_zero.py",
    "--job.config_file=train_configs/bert_tiny.toml",
    "--compile.no-enable",
    "--training.seq_len=16",
    "--training.local_batch_size=1",
    "--training.global_batch_size=8",
]


def measure(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=300)


def test_collectives_and_bytes_of_stages_are_printed() -> None:
    done = measure("--ngpu", "2", "--stages", "1", "2", "3")
    assert done.returncode == 0, done.stderr
    rows = {row["stage"]: row for row in json.loads(done.stdout.splitlines()[-1])["stages"]}
    groups, micro_batches, blocks = 3, 4, 2
    for stage, gathers, reductions in (
        ("1", groups, groups),  # once a step
        ("2", groups, groups * micro_batches),
        # A block is gathered for the forward and for the backward, the other group once.
        ("3", (groups + blocks) * micro_batches, groups * micro_batches),
    ):
        collectives = rows[stage]["collectives"]
        assert collectives["all_gather"][0] == gathers
        assert collectives["all_to_all"][0] == reductions  # gloo's reduce-scatter
        assert rows[stage]["optimizer_bytes"] == rows[stage]["paper"]["optimizer"]
    full = rows["1"]["parameters"] * 4
    assert rows["1"]["collectives"]["all_gather"][1] == full
    assert rows["1"]["gradient_bytes"] == rows["1"]["paper"]["gradients"] == full
    assert rows["2"]["gradient_bytes"] == rows["2"]["paper"]["gradients"] == full / 2
    assert "paper" in done.stderr


def test_bad_configuration_is_one_line_and_status_2() -> None:
    done = measure("--ngpu", "2", "--training.seq_len=1000")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: [training] seq_len = 1000: must be at")


def test_bad_stage_is_one_line_and_status_2() -> None:
    done = measure("--stages", "4")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
