#!/usr/bin/env python3
"""Measures training steps of a configuration: speed, first step, memory.

    python scripts/bench_step.py --job.config_file=train_configs/deepseek_v3_debug.toml \\
        --ngpu 4 --runs 3 --compile.enable

Every run is a fresh start. Other flags are the configuration's, as for run_train.sh. On a machine
that others use too, tokens_per_cpu_second is the steadier figure: it divides by the processor time
of all ranks.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from torchtitan_ext import launch
from torchtitan_ext.config.load import ConfigError, load_job_config


def main() -> None:
    options, flags = _parse_args()
    if launch.is_rank():
        _measure_rank(options, flags)
        return
    try:  # before any rank starts
        _load(flags, options.ngpu)
    except ConfigError as error:
        sys.exit(_refuse(str(error)))
    runs = []
    for number in range(options.runs):
        arguments = [*flags, f"--steps={options.steps}", f"--warmup={options.warmup}"]
        output = launch.run_on_ranks(__file__, arguments, options.ngpu)
        runs.append(json.loads(output.splitlines()[-1]))
        print(f"run {number + 1} of {options.runs}: {_line(runs[-1])}", file=sys.stderr)
    print(json.dumps(_summary(runs, options, flags)))


def _parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ngpu", type=int, default=1, help="ranks to start (default 1)")
    parser.add_argument("--runs", type=int, default=1, help="fresh starts (default 1)")
    parser.add_argument("--steps", type=int, default=10, help="measured steps a run (default 10)")
    parser.add_argument(
        "--warmup", type=int, default=4, help="steps before, the first of them included (default 4)"
    )
    parser.add_argument(
        "--json", action="store_true", help="accepted: the last line is JSON anyway"
    )
    options, flags = parser.parse_known_args()
    for name in ("ngpu", "runs", "steps", "warmup"):
        if getattr(options, name) < 1:
            sys.exit(_refuse(f"--{name} = {getattr(options, name)}: must be at least 1"))
    return options, flags


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _load(flags: list[str], world_size: int) -> Any:
    from torchtitan_ext.device import DEVICE_TYPE

    return load_job_config(flags, world_size=world_size, device_type=DEVICE_TYPE)


def _measure_rank(options: argparse.Namespace, flags: list[str]) -> None:
    import torch
    import torch.distributed as dist

    from torchtitan_ext.trainer import ExtTrainer

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags, f"--job.dump_folder={folder}"]
        trainer = ExtTrainer(_load(flags, int(os.environ["WORLD_SIZE"])))
        batches = trainer.batch_generator(trainer.dataloader)
        seconds, cpu_seconds = [], []
        for _ in range(options.warmup + options.steps):
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            trainer.step += 1
            trainer.train_step(batches)
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
        memory = trainer.metrics_processor.device_memory_monitor.get_peak_stats().max_reserved_gib
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (cpu_seconds[options.warmup :], memory))
        if dist.get_rank() == 0:
            training = trainer.job_config.training
            steady = seconds[options.warmup :]
            result = {
                "first_step_seconds": seconds[0],
                "step_seconds": statistics.median(steady),
                "cpu_seconds": statistics.median(
                    map(sum, zip(*(r[0] for r in ranks), strict=True))
                ),
                "peak_memory_gib": max(r[1] for r in ranks),
                "tokens_per_step": trainer.gradient_accumulation_steps
                * training.local_batch_size
                * training.seq_len
                * trainer.parallel_dims.dp_replicate
                * trainer.parallel_dims.dp_shard,
            }
            print(json.dumps(result), flush=True)
        trainer.close()
    dist.destroy_process_group()


def _line(run: dict[str, float]) -> str:
    return (
        f"{run['tokens_per_step'] / run['step_seconds']:,.0f} tokens/s, "
        f"{run['tokens_per_step'] / run['cpu_seconds']:,.0f} tokens per CPU-second, "
        f"first step {run['first_step_seconds']:.1f} s, {run['peak_memory_gib']:.2f} GiB"
    )


def _summary(
    runs: list[dict[str, float]], options: argparse.Namespace, flags: list[str]
) -> dict[str, Any]:
    import torch

    tokens = runs[0]["tokens_per_step"]
    return {
        "tokens_per_second": statistics.median(tokens / run["step_seconds"] for run in runs),
        "tokens_per_cpu_second": statistics.median(tokens / run["cpu_seconds"] for run in runs),
        "first_step_seconds": statistics.median(run["first_step_seconds"] for run in runs),
        "step_seconds": statistics.median(run["step_seconds"] for run in runs),
        "peak_memory_gib": max(run["peak_memory_gib"] for run in runs),
        "runs": runs,
        "settings": {**vars(options), "flags": flags, "torch": torch.__version__},
    }


if __name__ == "__main__":
    main()
