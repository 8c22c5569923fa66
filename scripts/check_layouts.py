#!/usr/bin/env python3
"""Checks that layouts of a configuration compute what one process computes.

    python scripts/check_layouts.py --job.config_file=train_configs/deepseek_v3_debug.toml \\
        --ngpu 4 --layouts ep=2,dp_replicate=2:ep=2

--layouts is a list of "fsdp", degrees (dp_replicate, dp_shard, ep, tp, cp, pp) joined by colons,
and zero=STAGE; or "all", every way to fill the ranks. What the configuration or this project
refuses is listed with the reason.

Each trains one step on the same global batch from the same weights, in float32, without clipping
and dropout, with plain SGD, as Adam divides a wrong scale away. Compared with one process are each
parameter's gradient, the new weights, loss, gradient norm and tokens per expert. What counts as
rounding is measured: one process sums the batch in another order, too. A wrong gradient that is a
multiple of the right one is said to be, with the degree that the factor is.

All other flags are the configuration's. The last line printed is one JSON object; the status is 0
if no layout is wrong, else 1.
"""

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchtitan_ext.command_line import at_least_one, script_parser
from torchtitan_ext.config.error import ConfigError
from torchtitan_ext.launch import is_rank, load_config, run_on_ranks


def main() -> int:
    options, flags = _parse_args()
    try:
        if is_rank():
            _record(options, flags)
            return 0
        summary = _check(options, flags)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"error: a step failed with status {error.returncode}, see above", file=sys.stderr)
        return 1
    print(json.dumps(summary), flush=True)
    return 1 if any(row["verdict"] == "wrong" for row in summary["layouts"]) else 0


def _parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = script_parser(__doc__)
    parser.add_argument("--ngpu", type=at_least_one, default=2, help="ranks of each layout (2)")
    parser.add_argument("--layouts", default="all", help="which ones (all)")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    return parser.parse_known_args()


def _check(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    batch = _global_batch(flags, options.ngpu)
    # Imported late, and after a configuration was loaded: torch's order of imports matters.
    from torchtitan_ext.verify.layouts import judge, rounding_bound

    layouts, refused = _accepted_layouts(options, flags)
    one_process = [f"--training.global_batch_size={batch}", *_no_degrees(flags)]
    steps = [
        _record_on_new_ranks([*flags, *one_process, f"--training.local_batch_size={local}"], 1)
        # Micro-batches as large as a rank's, and one sequence at a time.
        for local in (batch // options.ngpu, 1)
    ]
    reference = steps[0]
    bound = rounding_bound(*steps)
    print(f"rounding is up to {bound:.1e}; one process: loss {reference.loss:.6f}", file=sys.stderr)
    rows = []
    for layout in layouts:
        step = _record_on_new_ranks([*flags, *layout.flags], options.ngpu)
        rows.append(judge(layout, step, reference, bound, options.ngpu))
        print(_line(rows[-1]), file=sys.stderr)
    for name, reason in refused.items():
        print(f"{name:<22}  refused   {reason}", file=sys.stderr)
    return {
        "layouts": [asdict(row) for row in rows],
        "refused": [{"layout": name, "reason": reason} for name, reason in refused.items()],
        "one_process": {"loss": reference.loss, "grad_norm": reference.grad_norm},
        "ngpu": options.ngpu,
        "flags": flags,
    }


def _global_batch(flags: list[str], num_ranks: int) -> int:
    """Sequences of a step on that many ranks; raises ConfigError for bad flags."""
    training = load_config([*flags, *_no_degrees(flags)], 1).training
    if training.global_batch_size > 0:
        return training.global_batch_size
    return training.local_batch_size * num_ranks


def _no_degrees(flags: list[str]) -> list[str]:
    """Flags that take back the degrees of the TOML file: one process has none."""
    from torchtitan_ext.verify.layouts import DEGREES

    return [f"--parallelism.{key}={-1 if 'shard' in key else 1}" for key in DEGREES.values()]


def _accepted_layouts(
    options: argparse.Namespace, flags: list[str]
) -> tuple[list[Any], dict[str, str]]:
    from torchtitan_ext.verify.layouts import all_layouts, parse_layouts

    try:
        asked = (
            all_layouts(options.ngpu)
            if options.layouts == "all"
            else parse_layouts(options.layouts)
        )
    except ValueError as error:
        raise ConfigError(f"--layouts {error}") from None
    accepted, refused = [], {}
    for layout in asked:
        try:
            load_config([*flags, *_no_degrees(flags), *layout.flags], options.ngpu)
        except ConfigError as error:
            refused[layout.name] = str(error)
        else:
            accepted.append(layout)
    return accepted, refused


def _record_on_new_ranks(flags: list[str], num_ranks: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step"
        run_on_ranks(os.path.abspath(__file__), [*flags, f"--record={path}"], num_ranks)
        return pickle.loads(path.read_bytes())


def _record(options: argparse.Namespace, flags: list[str]) -> None:
    """On a rank: takes the step; the first one leaves what it did in a file."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags, f"--job.dump_folder={folder}"]
        config = load_config(flags, int(os.environ["WORLD_SIZE"]))
        # Imported late: with a configuration that is refused, the wait would be for nothing.
        import torch.distributed as dist

        from torchtitan_ext.verify.layouts import for_comparison
        from torchtitan_ext.verify.step import record_step

        step = record_step(for_comparison(config))
        if os.environ["RANK"] == "0":
            options.record.write_bytes(pickle.dumps(step))
        dist.destroy_process_group()


def _line(row: Any) -> str:
    detail = row.reason or f"at most {row.error:.1e}, {row.worst_parameter}"
    return f"{row.layout:<22}  {row.verdict:<8}  {detail}"


if __name__ == "__main__":
    sys.exit(main())
