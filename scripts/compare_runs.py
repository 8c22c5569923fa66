#!/usr/bin/env python3
"""Compares two training runs, step by step.

    python scripts/compare_runs.py outputs/a outputs/b --tolerance 1e-3 --png difference.png

A and B are dump folders or their metrics.jsonl. Compared are the steps that both have logged: the
first at which loss or gradient norm differ in any bit, the largest differences, and the means over
the last 5%. The verdict is of the losses: "equal" in every bit, "within" the tolerance, or
"differs".

Of long runs that drift apart by rounding, compare a mean of several steps: --smooth.

The last line printed is one JSON object. The status is 0 unless the runs differ, then 1.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchtitan_ext.command_line import at_least_one, script_parser


def main() -> int:
    options = _parse_args()
    # Imported late: --help need not wait for numpy.
    from torchtitan_ext.study.comparison import compare
    from torchtitan_ext.study.curves import read_curve

    runs = (options.a, options.b)
    losses = [read_curve(run) for run in runs]
    norms = [read_curve(run, "grad_norm") for run in runs]
    for run, curve in zip(runs, losses, strict=True):
        if not curve:
            problem = "has no loss of any step" if run.exists() else "does not exist"
            return _refuse(f"{run}: {problem}; needs a dump folder or its metrics.jsonl")
    try:
        loss = compare(*losses, window=options.smooth)
    except ValueError as error:
        return _refuse(f"{runs[0]} and {runs[1]}: {error}")
    norm = compare(*norms, window=options.smooth, relative=True) if all(norms) else None
    if options.png:
        _draw(options, losses, loss.steps)
    summary = _summary(loss, norm, options)
    _print_table(runs, losses, loss, norm)
    print(f"{summary['verdict']}: {_reason(summary, options)}", file=sys.stderr)
    print(json.dumps(summary, allow_nan=False), flush=True)
    return 1 if summary["verdict"] == "differs" else 0


def _parse_args() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("a", type=Path, metavar="A", help="a run")
    parser.add_argument("b", type=Path, metavar="B", help="another run")
    parser.add_argument(
        "--tolerance",
        type=_at_least_zero,
        default=1e-3,
        help="largest difference of two losses (1e-3)",
    )
    parser.add_argument(
        "--smooth",
        type=at_least_one,
        default=1,
        metavar="N",
        help="compare means of N logged steps (1)",
    )
    parser.add_argument("--png", type=Path, help="draw both curves and their difference")
    return parser.parse_args()


def _at_least_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _draw(options: argparse.Namespace, losses: list[dict[int, float]], steps: list[int]) -> None:
    from torchtitan_ext.study.figure import draw_pair

    options.png.parent.mkdir(parents=True, exist_ok=True)
    a, b = ({step: curve[step] for step in steps} for curve in losses)
    draw_pair(options.png, {f"A: {options.a}": a, f"B: {options.b}": b}, window=options.smooth)


def _summary(loss: Any, norm: Any, options: argparse.Namespace) -> dict[str, Any]:
    first_differences = [
        comparison.first_difference_step
        for comparison in (loss, norm)
        if comparison is not None and comparison.first_difference_step is not None
    ]
    if not first_differences:
        verdict = "equal"
    else:
        verdict = "within" if loss.max_difference <= options.tolerance else "differs"
    return {
        "verdict": verdict,
        "first_difference_step": min(first_differences, default=None),
        "max_loss_difference": _finite(loss.max_difference),
        "max_loss_difference_step": loss.max_difference_step,
        "smoothed_final_difference": _finite(loss.final_difference),
        "max_grad_norm_difference": None if norm is None else _finite(norm.max_difference),
        "steps": len(loss.steps),
        "tolerance": options.tolerance,
        "smooth": options.smooth,
        "png": None if options.png is None else str(options.png),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _reason(summary: dict[str, Any], options: argparse.Namespace) -> str:
    if summary["verdict"] == "equal":
        return f"every bit of {summary['steps']} steps"
    largest = summary["max_loss_difference"]
    largest_text = "not finite in one" if largest is None else f"{largest:.2e}"
    return (
        f"losses by {largest_text} at step {summary['max_loss_difference_step']} "
        f"(tolerance {options.tolerance:g}), first at step {summary['first_difference_step']}"
    )


def _print_table(
    runs: tuple[Path, Path], losses: list[dict[int, float]], loss: Any, norm: Any
) -> None:
    def show(line: str) -> None:
        print(line, file=sys.stderr)

    for letter, run, curve in zip("AB", runs, losses, strict=True):
        alone = [step for step in curve if step not in set(loss.steps)]
        note = f"; {len(alone)} not in the other, the last is {alone[-1]}" if alone else ""
        show(f"{letter}: {run}")
        show(f"   {len(curve)} steps logged, {min(curve)} to {max(curve)}{note}")
    show("           first difference  largest difference     mean of the last 5%: A, B, B - A")
    for name, comparison in (("loss", loss), ("grad_norm", norm)):
        if comparison is None:
            show(f"{name:<9}  not logged by both")
            continue
        first = comparison.first_difference_step
        unit = "relative" if name == "grad_norm" else ""
        a, b = comparison.final
        show(
            f"{name:<9}  {'none' if first is None else f'step {first}':<16}  "
            f"{f'{comparison.max_difference:.2e} {unit}':<21}  {a:.6f}  {b:.6f}  {b - a:+.2e}"
        )


if __name__ == "__main__":
    sys.exit(main())
