#!/usr/bin/env python3
"""Measures what a rank holds and sends under each ZeRO stage, and under DDP.

    python scripts/measure_zero.py --job.config_file=train_configs/bert_tiny.toml --ngpu 4

Trains two steps for each of --stages, and prints the bytes of parameters, gradients and optimizer
state that rank 0 held, and the collectives of the second step. Below it stand the bytes that the
ZeRO paper (arXiv:1910.02054, section 5) computes for that many parameters in these types.

Two things differ by design. A shard lies beside the gathered parameters, as the copy that the
optimizer updates. And with one micro-batch a step stage 1 holds no full gradients: each is reduced
as soon as it is there.

All other flags are the configuration's. The last line printed is one JSON object.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchtitan_ext.command_line import at_least_one, print_json, script_parser
from torchtitan_ext.config.error import ConfigError
from torchtitan_ext.launch import lead_torchrun, load_config, run_on_ranks

Measurement = dict[str, Any]
STAGES = ("1", "2", "3", "ddp")


def main() -> int:
    options, flags = _parse_args()
    try:
        if options.rank:
            print_json(_measure(options.stages[0], flags))
            return 0
        if not lead_torchrun(options):
            return 0
        for stage in options.stages:  # refused before any rank starts
            load_config(_flags_of(stage, flags, options.ngpu), options.ngpu)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = []
    print(_header(), file=sys.stderr)
    for stage in options.stages:
        rows.append(_measure_on_new_ranks(stage, flags, options.ngpu))
        print(_line(rows[-1]), file=sys.stderr)
    print_json({"ngpu": options.ngpu, "stages": rows, "flags": flags})
    return 0


def _parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = script_parser(__doc__)
    parser.add_argument("--ngpu", type=at_least_one, default=2, help="ranks to start (2)")
    parser.add_argument(
        "--stages", nargs="+", choices=STAGES, default=STAGES, help="which to measure (all)"
    )
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_known_args()


def _flags_of(stage: str, flags: list[str], world_size: int) -> list[str]:
    if stage != "ddp":
        return [*flags, f"--zero.stage={stage}"]
    replicas = f"--parallelism.data_parallel_replicate_degree={world_size}"
    return [*flags, "--zero.stage=3", replicas]


def _measure_on_new_ranks(stage: str, flags: list[str], num_ranks: int) -> Measurement:
    args = [*flags, "--rank", "--stages", stage]
    output = run_on_ranks(os.path.abspath(__file__), args, num_ranks)
    return json.loads(output.splitlines()[-1])


def _measure(stage: str, flags: list[str]) -> Measurement:
    """Two steps on the ranks that exist: bytes in the first, collectives in the second."""
    world_size = int(os.environ["WORLD_SIZE"])
    with tempfile.TemporaryDirectory() as folder:
        flags = [*_flags_of(stage, flags, world_size), f"--job.dump_folder={folder}"]
        config = load_config(flags, world_size)
        # Imported late: with a configuration that is refused, the wait would be for nothing.
        import torch.distributed as dist

        from torchtitan_ext.distributed.collectives import CollectiveMeter
        from torchtitan_ext.trainer import ExtTrainer

        trainer = ExtTrainer(config)
        num_parameters = sum(p.numel() for m in trainer.model_parts for p in m.parameters())
        batches = trainer.batch_generator(trainer.dataloader)
        trainer.step = 1
        trainer.train_step(batches)
        with CollectiveMeter() as meter:
            trainer.step = 2
            trainer.train_step(batches)
        held, micro_batches = trainer.state_bytes, trainer.gradient_accumulation_steps
        paper = _paper_bytes(stage, num_parameters, config.training, world_size)
        trainer.close()
        dist.destroy_process_group()
    return {
        "stage": stage,
        "parameters": num_parameters,
        "micro_batches": micro_batches,
        "shard_bytes": held.shards,
        "gathered_bytes": held.gathered,
        "gradient_bytes": held.gradients,
        "optimizer_bytes": held.optimizer,
        "collectives": {kind: [meter.calls[kind], meter.bytes[kind]] for kind in meter.calls},
        "paper": paper,
    }


def _paper_bytes(stage: str, parameters: int, training: Any, num_ranks: int) -> dict[str, float]:
    """Section 5: what is shared out is divided by the number of ranks. The state is two moments."""
    from torchtitan.config import TORCH_DTYPE_MAP

    shared = {"ddp": 0, "1": 1, "2": 2, "3": 3}[stage]
    sizes = {
        "optimizer": 2 * TORCH_DTYPE_MAP[training.dtype].itemsize,
        "gradients": TORCH_DTYPE_MAP[training.mixed_precision_reduce].itemsize,
        "parameters": TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize,
    }
    return {
        name: parameters * size / (num_ranks if position < shared else 1)
        for position, (name, size) in enumerate(sizes.items())
    }


def _header() -> str:
    return (
        f"{'stage':>5}  {'own shard':>10}  {'gathered':>10}  {'gradients':>10}  {'optimizer':>10}"
        "  collectives of a step: calls, MiB"
    )


def _line(row: Measurement) -> str:
    sizes = [row[f"{part}_bytes"] for part in ("shard", "gathered", "gradient", "optimizer")]
    collectives = ", ".join(
        f"{kind} {calls} {size / 2**20:.2f}" for kind, (calls, size) in row["collectives"].items()
    )
    columns = "  ".join(f"{size / 2**20:>6.2f} MiB" for size in sizes)
    paper = [row["paper"][part] / 2**20 for part in ("parameters", "gradients", "optimizer")]
    return f"{row['stage']:>5}  {columns}  {collectives}\n{'paper':>5}  {'':>10}  " + "  ".join(
        f"{size:>6.2f} MiB" for size in paper
    )


if __name__ == "__main__":
    sys.exit(main())
