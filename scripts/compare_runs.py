#!/usr/bin/env python3
"""Compares two training runs, step by step.

    python scripts/compare_runs.py outputs/a outputs/b --tolerance 1e-3 --png difference.png

A and B are dump folders or their metrics.jsonl. Compared are the steps that both have logged: the
first at which loss or gradient norm differ in any bit, the largest differences, and the means over
the last 5%. The verdict is of the losses: "equal" in every bit, "within" the tolerance, or
"differs".

Of long runs that drift apart by rounding, compare a mean of several steps: --smooth.

Instead of two folders, two settings:

    python scripts/compare_runs.py --job.config_file=train_configs/bert_tiny.toml --ngpu 2 \\
        --training.steps=50 --flags-a=--compile.no-enable --flags-b="--compile.enable"

trains both, one after the other, every step logged, and compares them. What stands outside of
--flags-a and --flags-b holds for both.

The last line printed is one JSON object. The status is 0 unless the runs differ, then 1.
"""

import argparse
import math
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchtitan_ext.command_line import at_least_one, print_json, script_parser, show
from torchtitan_ext.config.error import ConfigError


def main() -> int:
    options, flags = _parse_args()
    try:
        runs = _trained(options, flags) if options.a is None else (options.a, options.b)
        return _compare(options, runs)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = script_parser(__doc__)
    parser.add_argument("a", type=Path, nargs="?", metavar="A", help="a run")
    parser.add_argument("b", type=Path, nargs="?", metavar="B", help="another run")
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
    parser.add_argument("--png", type=_png, help="draw both curves and their difference")
    settings = parser.add_argument_group("to train both")
    settings.add_argument("--flags-a", metavar="FLAGS", help="what A has of its own")
    settings.add_argument("--flags-b", metavar="FLAGS", help="what B has of its own")
    settings.add_argument("--ngpu", type=at_least_one, metavar="N", help="ranks of each (1)")
    settings.add_argument(
        "--output",
        type=Path,
        help="new folder for the two dump folders a and b (outputs/compare_runs/<time>)",
    )
    options, flags = parser.parse_known_args()
    to_train = (options.flags_a, options.flags_b, options.ngpu, options.output)
    if options.a is not None:
        if options.b is None:
            parser.error("the following arguments are required: B")
        if flags or any(option is not None for option in to_train):
            parser.error("A and B are there: flags, --ngpu and --output are for training them")
    elif options.flags_a is None and options.flags_b is None:
        parser.error("needs two runs, A and B, or two settings, --flags-a and --flags-b")
    return options, flags


def _trained(options: argparse.Namespace, flags: list[str]) -> tuple[Path, Path]:
    """Trains both settings, and returns their dump folders."""
    from torchtitan_ext.launch import load_config
    from torchtitan_ext.study.runs import Run, finish_with_progress

    output = options.output or Path(f"outputs/compare_runs/{time.strftime('%Y%m%d-%H%M%S')}")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output}: must be a new folder, or an empty one")
    num_ranks = options.ngpu or 1
    runs = []
    for name, own in (("a", options.flags_a), ("b", options.flags_b)):
        try:
            run_flags = [*flags, *shlex.split(own or ""), "--metrics.log_freq=1"]
        except ValueError as error:
            raise ConfigError(f"--flags-{name} {own}: {error}") from None
        num_steps = load_config(run_flags, num_ranks).training.steps
        runs.append(Run(name, output.resolve() / name, tuple(run_flags), num_steps, num_ranks))
    # An exception, so that the run is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    finish_with_progress(runs, jobs=1)
    return output / "a", output / "b"


def _compare(options: argparse.Namespace, runs: tuple[Path, Path]) -> int:
    # Imported late: --help need not wait for numpy.
    from torchtitan_ext.study.comparison import compare
    from torchtitan_ext.study.curves import read_curves

    try:
        curves = [read_curves(run, "loss", "grad_norm") for run in runs]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    losses, norms = map(list, zip(*curves, strict=True))
    for run, curve in zip(runs, losses, strict=True):
        if not curve:
            problem = "has no loss of any step" if run.exists() else "does not exist"
            raise ConfigError(f"{run}: {problem}; needs a dump folder or its metrics.jsonl")
    try:
        loss = compare(*losses, window=options.smooth)
        norm = compare(*norms, window=options.smooth, relative=True) if all(norms) else None
    except ValueError as error:
        raise ConfigError(f"{runs[0]} and {runs[1]}: {error}") from None
    if options.png is not None:
        _draw(options, runs, losses, loss.steps)
    only_in = [len(curve) - len(loss.steps) for curve in losses]
    summary = _summary(loss, norm, options) | {"only_in_a": only_in[0], "only_in_b": only_in[1]}
    _print_table(runs, losses, loss, norm)
    show(f"{summary['verdict']}: {_reason(loss, norm, options)}")
    print_json(summary)
    return 1 if summary["verdict"] == "differs" else 0


def _at_least_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _png(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".png" or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a file that ends with .png")
    return path


def _draw(
    options: argparse.Namespace,
    runs: tuple[Path, Path],
    losses: list[dict[int, float]],
    steps: list[int],
) -> None:
    from torchtitan_ext.study.figure import draw_pair

    a, b = ({step: curve[step] for step in steps} for curve in losses)
    try:
        options.png.parent.mkdir(parents=True, exist_ok=True)
        draw_pair(options.png, {f"A: {runs[0]}": a, f"B: {runs[1]}": b}, window=options.smooth)
    except OSError as error:
        raise ConfigError(f"--png {options.png}: {error.strerror}") from None


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
        "max_loss_difference": loss.max_difference,
        "max_loss_difference_step": loss.max_difference_step,
        "smoothed_final_difference": loss.final_difference,
        "max_grad_norm_difference": None if norm is None else norm.max_difference,
        "max_grad_norm_difference_step": None if norm is None else norm.max_difference_step,
        "steps": len(loss.steps),
        "tolerance": options.tolerance,
        "smooth": options.smooth,
        "png": None if options.png is None else str(options.png),
    }


def _reason(loss: Any, norm: Any, options: argparse.Namespace) -> str:
    num_steps = f"{len(loss.steps)} steps"
    if loss.first_difference_step is not None:
        return (
            f"losses by {_size(loss)} at step {loss.max_difference_step} "
            f"(tolerance {options.tolerance:g}), first at step {loss.first_difference_step}"
        )
    if norm is None:
        return f"every bit of the losses of {num_steps}; gradient norms are not logged by both"
    if norm.first_difference_step is None:
        return f"every bit of {num_steps}"
    return (
        f"losses of {num_steps} in every bit; gradient norms differ by {_size(norm)} relative at "
        f"step {norm.max_difference_step}, first at step {norm.first_difference_step}"
    )


def _size(comparison: Any) -> str:
    largest = comparison.max_difference
    return f"{largest:.2e}" if math.isfinite(largest) else "not finite in one"


def _print_table(
    runs: tuple[Path, Path], losses: list[dict[int, float]], loss: Any, norm: Any
) -> None:
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
