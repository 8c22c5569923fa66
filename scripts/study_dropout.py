#!/usr/bin/env python3
"""Trains BERT-tiny long, and shows that checkpointing and compiling change nothing but the speed.

    python scripts/study_dropout.py --output outputs/dropout_study

Seven runs: eager with four seeds, eager with a full activation checkpoint, compiled, and compiled
with a full checkpoint (the last three with the first seed). All have dropout. The verdict holds if

* a checkpoint leaves the final loss where it is, to --tolerance, eager and compiled;
* the final loss of the compiled run with a checkpoint lies where a further eager seed would, with
  a chance of 99% (Student's t prediction interval of the eager seeds).

"Final" is the mean over the last 5% of the steps. 40,000 steps of the default size take about
75 minutes on 2 cores. Started again after an end of any kind, it goes on from the checkpoints.

All other flags are the configuration's. Leaves losses.png and summary.json, and a dump folder for
each run. The last line printed is one JSON object; the status is 0 if the verdict holds, else 1.
"""

import argparse
import json
import os
import platform
import signal
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchtitan_ext.command_line import at_least_one, print_json, script_parser
from torchtitan_ext.config.error import ConfigError

EAGER_SEEDS = 4
LOGGED_STEPS = 4000

EAGER, COMPILED = ["--compile.no-enable"], ["--compile.enable"]
NONE, FULL = ["--activation_checkpoint.mode=none"], ["--activation_checkpoint.mode=full"]
RUNS = {
    "compiled": [*COMPILED, *NONE],
    "compiled_full": [*COMPILED, *FULL],
    "eager": [*EAGER, *NONE],
    "eager_full": [*EAGER, *FULL],
}
DEFAULTS = [
    "--job.config_file=train_configs/bert_tiny.toml",
    "--training.local_batch_size=2",
    "--training.seq_len=32",
]
SET_BY_THE_STUDY = (
    "job.dump_folder",
    "training.steps",
    "compile.enable",
    "compile.no-enable",
    "activation_checkpoint.mode",
    "checkpoint",
    "metrics.log_freq",
    "debug.seed",
)


def main() -> int:
    options, flags = _parse_args()
    # Imported late: --help need not wait for torch.
    from torchtitan_ext.study.runs import RunFailedError, finish_with_progress

    try:
        runs = _plan(options, flags)
        _keep_settings(options, flags)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # An exception, so that the runs are ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        finish_with_progress(list(runs.values()), options.jobs)
    except RunFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted; the same command goes on from here.", file=sys.stderr)
        return 130
    summary = _summary(runs, options, flags)
    (options.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print_json(summary)
    return 0 if summary["verdict"] == "faithful" else 1


def _parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = script_parser(__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/dropout_study"), help="folder of the results"
    )
    parser.add_argument("--steps", type=at_least_one, default=40_000, help="of each run (40000)")
    parser.add_argument(
        "--jobs",
        type=at_least_one,
        default=len(os.sched_getaffinity(0)),
        help="runs at a time (as many as there are cores)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-3,
        help="between the final losses of a run with and without a checkpoint (1e-3)",
    )
    return parser.parse_known_args()


def _plan(options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """The runs by name, checked; raises ConfigError."""
    from torchtitan_ext.launch import load_config
    from torchtitan_ext.study.runs import Run

    for flag in flags:
        key = flag.removeprefix("--").split("=")[0]
        if key in SET_BY_THE_STUDY or key.split(".")[0] in SET_BY_THE_STUDY:
            raise ConfigError(f"{flag}: the study sets this for each of its runs; leave it out")
    first_seed = load_config([*DEFAULTS, *flags], world_size=1).debug.seed
    settings = [*DEFAULTS, *flags, *_schedule(options.steps)]
    variants = {name: (mode, first_seed) for name, mode in RUNS.items()}
    for seed in range(first_seed + 1, first_seed + EAGER_SEEDS):
        variants[f"eager_seed_{seed}"] = (RUNS["eager"], seed)
    runs = {}
    for name, (mode, seed) in variants.items():
        run_flags = (*settings, *mode, f"--debug.seed={seed}")
        load_config([*run_flags], world_size=1)
        runs[name] = Run(name, options.output.resolve() / name, run_flags, options.steps)
    return runs


def _schedule(num_steps: int) -> list[str]:
    return [
        f"--training.steps={num_steps}",
        f"--metrics.log_freq={_log_freq(num_steps)}",
        "--checkpoint.enable",
        f"--checkpoint.interval={max(1, num_steps // 20)}",
        "--checkpoint.keep_latest_k=2",
    ]


def _log_freq(num_steps: int) -> int:
    """Such that about LOGGED_STEPS are logged, the last among them."""
    frequency = max(1, num_steps // LOGGED_STEPS)
    return next(f for f in range(frequency, 0, -1) if num_steps % f == 0)


def _keep_settings(options: argparse.Namespace, flags: list[str]) -> None:
    """Writes the settings down, or checks that the folder was begun with the same ones."""
    path = options.output / "settings.json"
    settings = {"steps": options.steps, "flags": flags}
    if path.is_file():
        begun = json.loads(path.read_text())
        if begun != settings:
            raise ConfigError(
                f"--output {options.output}: was begun with steps {begun['steps']} and flags "
                f"{' '.join(begun['flags']) or '(none)'}; take another folder for other settings"
            )
        return
    options.output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings) + "\n")


def _summary(runs: dict[str, Any], options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    from torchtitan_ext.study.comparison import FINAL_SHARE, compare
    from torchtitan_ext.study.curves import mean_of_last, read_curve
    from torchtitan_ext.study.figure import draw_pair

    losses = {name: read_curve(run.folder) for name, run in runs.items()}
    seeds = ["eager", *(name for name in runs if name.startswith("eager_seed"))]
    figure = options.output / "losses.png"
    draw_pair(
        figure,
        {
            "compiled, no checkpoint": losses["compiled"],
            "compiled, full checkpoint": losses["compiled_full"],
        },
        window=max(1, len(losses["eager"]) // 50),
        band=[losses[name] for name in seeds],
        band_name=f"eager, {EAGER_SEEDS} seeds",
    )
    final = {name: mean_of_last(curve, FINAL_SHARE) for name, curve in losses.items()}
    checks = _checks(final, seeds, options.tolerance)
    print("\n".join(map(str, checks)), file=sys.stderr)
    return {
        "verdict": "faithful" if all(check.passed for check in checks) else "not faithful",
        "checks": [{**check._asdict(), "passed": check.passed} for check in checks],
        "final_losses": final,
        "max_loss_difference": {
            mode: compare(losses[mode], losses[f"{mode}_full"]).max_difference
            for mode in ("eager", "compiled")
        },
        "first_losses": {name: next(iter(curve.values())) for name, curve in losses.items()},
        "figure": str(figure),
        "settings": {
            "steps": options.steps,
            "flags": [*DEFAULTS, *flags],
            "torch": version("torch"),
            "torchtitan": version("torchtitan"),
            "python": platform.python_version(),
            "machine": f"{os.cpu_count()} x {_processor()}",
        },
    }


def _checks(final: dict[str, float], seeds: list[str], tolerance: float) -> list[Any]:
    from torchtitan_ext.study.verdict import check_among, check_equal

    checks = [
        check_equal(f"checkpoint changes {mode} by", final[f"{mode}_full"], final[mode], tolerance)
        for mode in ("compiled", "eager")
    ]
    eager = [final[name] for name in seeds]
    name = "compiled with a checkpoint, from the mean of eager seeds"
    return [*checks, check_among(name, final["compiled_full"], eager)]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((x.split(": ")[1] for x in lines if x.startswith("model name")), "processor")


if __name__ == "__main__":
    sys.exit(main())
