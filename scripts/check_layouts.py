#!/usr/bin/env python3
"""Checks that layouts of a configuration compute what one process computes.

    python scripts/check_layouts.py --job.config_file=train_configs/deepseek_v3_debug.toml \\
        --ngpu 4 --layouts ep=2,dp_replicate=2:ep=2

--layouts is a list of "fsdp", degrees (dp_replicate, dp_shard, ep, etp, tp, cp, pp) joined by
colons, and zero=STAGE; or "all", every way to fill the ranks. A layout says all: degrees that it
does not name are 1, the stage is 3, whatever the configuration has. What is refused is listed with
the reason.

Each trains one step on the same global batch from the same weights, in float32, without clipping
and dropout, with plain SGD, as Adam divides a wrong scale away. Compared with one process are each
parameter's gradient, the new weights and buffers, loss, gradient norm and tokens per expert; and
replicas with one another. What counts as rounding is measured: one process sums the batch in
another order, too. A wrong gradient that is a multiple of the right one is said to be, with the
degree that the factor is.

All other flags are the configuration's; one that speaks of a parallelism, such as
--parallelism.disable_loss_parallel, is for the layouts that have it. The last line printed is one
JSON object; the status is 0 if no layout is wrong, else 1; 2 if there was nothing to check.
"""

import argparse
import os
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchtitan_ext.command_line import at_least_one, print_json, script_parser, show
from torchtitan_ext.config.error import ConfigError
from torchtitan_ext.launch import lead_torchrun, load_config
from torchtitan_ext.verify.tasks import Task, record_on_this_rank, record_tasks

SCRIPT = os.path.abspath(__file__)


def main() -> int:
    options, flags = _parse_args()
    if options.tasks is not None:
        record_on_this_rank(options.tasks, _record)
        return 0
    try:
        if not lead_torchrun(options):
            return 0
        summary = _check(options, flags)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_json(summary)
    return 1 if any(row["verdict"] == "wrong" for row in summary["layouts"]) else 0


def _parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = script_parser(__doc__)
    parser.add_argument("--ngpu", type=at_least_one, default=2, help="ranks of each layout (2)")
    parser.add_argument("--layouts", default="all", help="which ones (all)")
    parser.add_argument("--tasks", type=Path, help=argparse.SUPPRESS)
    return parser.parse_known_args()


def _check(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    # Imported late, as torch takes seconds; and the device before torchtitan, which binds it.
    import torchtitan_ext.device  # noqa: F401
    from torchtitan_ext.verify.layouts import Layout, failed, judge, norm_of

    alone = Layout("one process").applied_to(flags)
    try:
        training = load_config(alone, 1).training
    except ConfigError as error:
        load_config(flags, options.ngpu)  # raises if it is not the layout's fault
        raise ConfigError(f"one process, which layouts are compared with: {error}") from None
    batch = _global_batch(training, options.ngpu)
    # Not every layout has as many data ranks as it has ranks.
    flags_of_batch = [*flags, f"--training.global_batch_size={batch}"]
    layouts, refused = _accepted_layouts(options, flags_of_batch)
    for reason in dict.fromkeys(refused.values()):
        names = [name for name, why in refused.items() if why == reason]
        show(f"refused: {', '.join(names)}: {reason}")
    if not layouts:
        raise ConfigError(f"--layouts {options.layouts!r}: all are refused, so nothing was checked")
    reference, bounds = _one_process(alone, batch, batch // options.ngpu)
    tasks = [Task(name, layout.applied_to(flags_of_batch)) for name, layout in layouts.items()]
    show(
        f"one process: loss {reference.loss:.6f}; a gradient's rounding is up to "
        f"{statistics.median(bounds.values()):.1e} (median of the parameters)"
    )
    rows = []
    for task, step in record_tasks(SCRIPT, tasks, options.ngpu):
        layout = layouts[task.name]
        if isinstance(step, str):
            rows.append(failed(layout, step))
        else:
            rows.append(judge(layout, step, reference, bounds, options.ngpu))
        _show_row(rows[-1])
    return {
        "layouts": [asdict(row) for row in rows],
        "refused": [{"layout": name, "reason": reason} for name, reason in refused.items()],
        "one_process": {"loss": reference.loss, "grad_norm": norm_of(reference)},
        "ngpu": options.ngpu,
        "flags": flags,
    }


def _global_batch(training: Any, num_ranks: int) -> int:
    """Sequences of a step on that many ranks."""
    if training.global_batch_size > 0:
        return training.global_batch_size
    return training.local_batch_size * num_ranks


def _one_process(
    flags: list[str], batch: int, local_batch_size: int
) -> tuple[Any, dict[str, float]]:
    """The step of one process, and what is rounding of each gradient.

    It is made twice: with micro-batches as large as a rank's, and of another size, whose sums have
    another order.
    """
    from torchtitan_ext.verify.layouts import rounding_bounds

    batch_size, micro = "--training.global_batch_size", "--training.local_batch_size"
    tasks = [
        Task(f"one process, {size} at a time", [*flags, f"{batch_size}={batch}", f"{micro}={size}"])
        for size in dict.fromkeys((local_batch_size, 1 if local_batch_size > 1 else batch))
    ]
    steps = []
    for task, step in record_tasks(SCRIPT, tasks, 1):
        if isinstance(step, str):
            raise ConfigError(f"the step fails with {task.name}: {step}")
        steps.append(step)
    try:
        return steps[0], rounding_bounds(steps[0], steps[-1])
    except ValueError as error:
        raise ConfigError(f"{error}: there is nothing to compare with") from None


def _accepted_layouts(
    options: argparse.Namespace, flags: list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Layouts by name, and why others are refused."""
    from torchtitan_ext.verify.layouts import all_layouts, parse_layouts

    try:
        asked = (
            all_layouts(options.ngpu)
            if options.layouts == "all"
            else parse_layouts(options.layouts)
        )
    except ValueError as error:
        raise ConfigError(f"--layouts {error}") from None
    accepted, refused = {}, {}
    for layout in asked:
        try:
            load_config(layout.applied_to(flags), options.ngpu)
        except ConfigError as error:
            refused[layout.name] = str(error)
        else:
            accepted[layout.name] = layout
    return accepted, refused


def _record(task: Task, config: Any) -> Any:
    from torchtitan_ext.verify.layouts import for_comparison
    from torchtitan_ext.verify.step import record_step

    return record_step(for_comparison(config))


def _show_row(row: Any) -> None:
    start = f"{row.layout:<26}  {row.verdict:<8}  "
    show(start + (row.reason or f"at most {row.error:.1e}, {row.worst_parameter}"), len(start))


if __name__ == "__main__":
    sys.exit(main())
