"""scripts/check_recompute.py: what it prints, and its status."""

import json
import subprocess
import sys

COMMAND = [sys.executable, "scripts/check_recompute.py"]


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=600)


def test_bert_compiled_with_full_checkpoint() -> None:
    done = check(
        "--job.config_file=train_configs/bert_tiny.toml",
        "--training.seq_len=32",
        "--training.local_batch_size=2",
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["faithful"] is True
    assert summary["graphs"] > 0
    *layers, other = summary["layers"]
    assert [layer["name"] for layer in layers] == ["layers.0", "layers.1"]
    for layer in layers:
        assert layer["checkpoint"] == "full"
        assert layer["compiled"] is layer["masks_equal"] is layer["routing_equal"] is True
        assert layer["masks"] == 3
        assert 0 <= layer["worst_gradient_error"] < 1e-4
        assert layer["worst_parameter"].startswith(layer["name"])
        assert layer["writes"] == []
        assert set(layer["collectives"]) == {"forward", "recomputation", "backward"}
    assert other["name"] == "other"
    table = done.stderr[done.stderr.index("layer  ") :]
    assert table.splitlines()[-1] == "faithful: every recomputation is its forward"
    assert max(map(len, table.splitlines())) <= 100


def test_bad_configuration_is_one_line_and_status_2() -> None:
    done = check("--job.config_file=train_configs/bert_tiny.toml", "--training.seq_len=1000")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: [training] seq_len = 1000: must be at")


def test_pipeline_is_refused_with_the_reason() -> None:
    pipeline = [
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.expert_parallel_degree=1",
    ]
    done = check("--job.config_file=train_configs/deepseek_v3_debug.toml", "--ngpu=2", *pipeline)
    assert done.returncode == 2
    message = "error: [parallelism] pipeline_parallel_degree = 2: in a pipeline, forwards of some"
    assert done.stderr.splitlines()[-1].startswith(message)


def test_step_that_fails_is_a_fault_with_its_reason() -> None:
    done = check(
        "--job.config_file=train_configs/bert_tiny.toml",
        "--compile.no-enable",
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
        "--layer_wrap.save_ops=aten.silu",
    )
    assert done.returncode == 1
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["faithful"] is False
    assert 'save_ops = "aten.silu": matches no operator' in summary["faults"][0]


def test_torchrun_may_start_it() -> None:
    """The check then runs on as many ranks; one JSON object is printed by the first of them."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [
            *[sys.executable, *torchrun, *COMMAND[1:]],
            "--job.config_file=train_configs/bert_tiny.toml",
            "--compile.no-enable",
            "--training.seq_len=16",
            "--training.local_batch_size=1",
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    summary = json.loads(line)
    assert (summary["faithful"], summary["ngpu"]) == (True, 2)
    # Two ranks, each with a forward that gathers nothing inside of its layers.
    assert summary["layers"][0]["masks"] == 2 * 3
