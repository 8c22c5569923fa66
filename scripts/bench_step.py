#!/usr/bin/env python3
"""Measures training steps of a configuration: speed, first step, memory.

    python scripts/bench_step.py --job.config_file=train_configs/deepseek_v3_debug.toml \\
        --ngpu 4 --runs 3 --compile.enable

Every run is a fresh start of --ngpu ranks; under torchrun the ranks that exist make one run. All
other flags are the configuration's, as for run_train.sh. The last line printed is one JSON object.
On a machine that others use, too, tokens_per_cpu_second is the steadier figure: it divides by the
processor time of all ranks.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchtitan_ext.command_line import at_least_one, print_json, script_parser
from torchtitan_ext.config.error import ConfigError
from torchtitan_ext.launch import is_rank, load_config, run_on_ranks

Measurement = dict[str, float]


def main() -> int:
    options, flags = _parse_args()
    try:
        if is_rank():
            runs = _measure_on_this_rank(options, flags)
        else:
            load_config(flags, options.ngpu)  # refused before any rank starts
            runs = [_measure_on_new_ranks(options, flags) for _ in range(options.runs)]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if runs:
        print_json(_summary(runs, options, flags))
    return 0


def _parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = script_parser(__doc__)
    parser.add_argument("--ngpu", type=at_least_one, default=1, help="ranks to start (1)")
    parser.add_argument("--runs", type=at_least_one, default=1, help="fresh starts (1)")
    parser.add_argument("--steps", type=at_least_one, default=10, help="measured steps (10)")
    parser.add_argument(
        "--warmup", type=at_least_one, default=4, help="steps before, the first included (4)"
    )
    return parser.parse_known_args()


def _measure_on_new_ranks(options: argparse.Namespace, flags: list[str]) -> Measurement:
    args = [*flags, f"--steps={options.steps}", f"--warmup={options.warmup}"]
    output = run_on_ranks(os.path.abspath(__file__), args, options.ngpu)
    (run,) = json.loads(output.splitlines()[-1])["runs"]
    print(_line(run), file=sys.stderr)
    return run


def _measure_on_this_rank(options: argparse.Namespace, flags: list[str]) -> list[Measurement]:
    """Trains on the ranks that exist; the first of them returns what was measured."""
    with tempfile.TemporaryDirectory() as folder:
        config = load_config([*flags, f"--job.dump_folder={folder}"], int(os.environ["WORLD_SIZE"]))
        # Imported late: with a configuration that is refused, the wait would be for nothing.
        import torch.distributed as dist

        from torchtitan_ext.trainer import ExtTrainer

        trainer = ExtTrainer(config)
        seconds, cpu_seconds = _time_steps(trainer, options.warmup + options.steps)
        memory = trainer.metrics_processor.device_memory_monitor.get_peak_stats().max_reserved_gib
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (cpu_seconds, memory))
        is_first_rank = dist.get_rank() == 0
        tokens = trainer.ntokens_seen / trainer.step * trainer.parallel_dims.dp_shard
        tokens *= trainer.parallel_dims.dp_replicate
        trainer.close()
        dist.destroy_process_group()
    cpu_of_all_ranks = [sum(step) for step in zip(*(cpu for cpu, _ in ranks), strict=True)]
    run = {
        "tokens_per_step": tokens,
        "first_step_seconds": seconds[0],
        "step_seconds": statistics.median(seconds[options.warmup :]),
        "cpu_seconds": statistics.median(cpu_of_all_ranks[options.warmup :]),
        "peak_memory_gib": max(memory for _, memory in ranks),
    }
    return [run] if is_first_rank else []


def _time_steps(trainer: Any, num_steps: int) -> tuple[list[float], list[float]]:
    """Wall and processor seconds of each step, on this rank."""
    import torch.distributed as dist

    batches = trainer.batch_generator(trainer.dataloader)
    seconds, cpu_seconds = [], []
    for _ in range(num_steps):
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        trainer.step += 1
        trainer.train_step(batches)
        trainer.synchronize()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    return seconds, cpu_seconds


def _line(run: Measurement) -> str:
    return (
        f"{run['tokens_per_step'] / run['step_seconds']:,.0f} tokens/s, "
        f"{run['tokens_per_step'] / run['cpu_seconds']:,.0f} tokens per CPU-second, "
        f"first step {run['first_step_seconds']:.1f} s, {run['peak_memory_gib']:.2f} GiB"
    )


def _summary(
    runs: list[Measurement], options: argparse.Namespace, flags: list[str]
) -> dict[str, Any]:
    from importlib.metadata import version

    def median(value: Any) -> float:
        return statistics.median(map(value, runs))

    return {
        "tokens_per_second": median(lambda run: run["tokens_per_step"] / run["step_seconds"]),
        "tokens_per_cpu_second": median(lambda run: run["tokens_per_step"] / run["cpu_seconds"]),
        "first_step_seconds": median(lambda run: run["first_step_seconds"]),
        "step_seconds": median(lambda run: run["step_seconds"]),
        "peak_memory_gib": max(run["peak_memory_gib"] for run in runs),
        "runs": runs,
        "settings": {
            **vars(options),
            "ngpu": int(os.environ.get("WORLD_SIZE", options.ngpu)),
            "flags": flags,
            "torch": version("torch"),
        },
    }


if __name__ == "__main__":
    sys.exit(main())
