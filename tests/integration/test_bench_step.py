"""scripts/bench_step.py measures, and refuses as run_train.sh does."""

import json
import subprocess
import sys

COMMAND = [sys.executable, "scripts/bench_step.py"]
CONFIG = "--job.config_file=train_configs/deepseek_v3_debug.toml"


def bench(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=300)


def test_last_line_is_the_measurement_of_all_ranks() -> None:
    done = bench(
        CONFIG,
        "--ngpu=2",
        "--steps=2",
        "--warmup=1",
        "--training.seq_len=32",
        "--training.local_batch_size=1",
        "--training.global_batch_size=4",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    (run,) = result["runs"]
    assert run["tokens_per_step"] == 4 * 32
    assert result["tokens_per_second"] == run["tokens_per_step"] / run["step_seconds"]
    assert 0 < result["step_seconds"] < result["first_step_seconds"]
    assert result["tokens_per_cpu_second"] == run["tokens_per_step"] / run["cpu_seconds"]
    assert 0.1 < result["peak_memory_gib"] < 10
    assert result["settings"]["ngpu"] == 2


def test_refused_configuration_exits_2_with_one_line() -> None:
    done = bench(CONFIG, "--ngpu=3")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: [parallelism] expert_parallel_degree = 2:")


def test_bad_option_exits_2() -> None:
    done = bench(CONFIG, "--runs=0")
    assert done.returncode == 2
    assert "--runs" in done.stderr.splitlines()[-1]
