#!/usr/bin/env python3
"""Checks that a configuration's recomputed forwards are its forwards, layer by layer.

    python scripts/check_recompute.py --job.config_file=train_configs/bert_tiny.toml --ngpu 2

One step each, from the same weights, data and random state, in float32: eager with the configured
checkpoints, looking inside every layer, and eager without any; then both compiled, if the
configuration compiles. For each layer it says

* checkpoint: what is in force, found from the operators that were run again;
* masks: whether the recomputation dropped what the forward dropped, draw by draw;
* routing: whether it sent the tokens to the same experts;
* calls: collectives of all ranks in the forward, the recomputation and the backward;
* kept: what the eager forward computed inside the layer and kept for the backward;
* worst gradient error: over the largest element of a parameter's gradient, and the parameter.

Inside a compiled layer nothing can be seen: there a mask or a route counts as wrong if a gradient
is. All other flags are the configuration's. The last line printed is one JSON object; the status
is 0 if the recomputation is faithful, else 1.
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

EAGER, EAGER_PLAIN = "eager, checkpointed", "eager"
COMPILED, COMPILED_PLAIN = "compiled, checkpointed", "compiled"


def main() -> int:
    options, flags = _parse_args()
    try:
        if is_rank():
            _record(options, flags)
            return 0
        config = load_config(flags, options.ngpu)  # refused before any rank starts
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    summary = _check(options, flags, compiles=_compiles(config))
    print(json.dumps(summary), flush=True)
    return 0 if summary["faithful"] else 1


def _parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = script_parser(__doc__)
    parser.add_argument("--ngpu", type=at_least_one, default=1, help="ranks to start (1)")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    return parser.parse_known_args()


def _compiles(config: Any) -> bool:
    compiles = config.compile.enable and "model" in config.compile.components
    return compiles or any(rule.compile for rule in config.layer_wrap.rules)


def _check(options: argparse.Namespace, flags: list[str], *, compiles: bool) -> dict[str, Any]:
    variants = [EAGER, EAGER_PLAIN, *[COMPILED, COMPILED_PLAIN] * compiles]
    steps = {}
    for number, variant in enumerate(variants, start=1):
        print(f"[{number}/{len(variants)}] {variant} ...", file=sys.stderr)
        step = _record_on_new_ranks(options, flags, variant)
        if isinstance(step, str):
            fault = f"the step fails, {variant}: {step}"
            print(f"NOT faithful: {fault}", file=sys.stderr)
            return {"faithful": False, "faults": [fault], "layers": []}
        steps[variant] = step
    # Imported late, and after a configuration was loaded: torch's order of imports matters.
    from torchtitan_ext.verify.recompute import judge

    pairs = [(steps[EAGER], steps[EAGER_PLAIN])]
    if compiles:
        pairs.append((steps[COMPILED], steps[COMPILED_PLAIN]))
    layers = judge(steps[EAGER], pairs, compiled=steps.get(COMPILED))
    faults = [f"{layer.name}: {fault}" for layer in layers for fault in layer.faults]
    if compiles:
        faults += [f"graph break: {reason}" for reason in steps[COMPILED].graph_breaks]
    _print_table(layers)
    graphs = steps[COMPILED].num_graphs if compiles else 0
    print(f"{graphs} graphs compiled" if compiles else "nothing is compiled", file=sys.stderr)
    for fault in faults:
        print(f"NOT faithful: {fault}", file=sys.stderr)
    if not faults:
        print("faithful: every recomputation is its forward", file=sys.stderr)
    return {
        "faithful": not faults,
        "faults": faults,
        "layers": [asdict(layer) for layer in layers],
        "graphs": graphs,
        "graph_breaks": dict(steps[COMPILED].graph_breaks) if compiles else {},
        "ngpu": options.ngpu,
        "flags": flags,
    }


def _record_on_new_ranks(options: argparse.Namespace, flags: list[str], variant: str) -> Any:
    """The StepRecord, or what the step failed with."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step"
        args = [*flags, f"--variant={variant}", f"--record={path}"]
        try:
            run_on_ranks(os.path.abspath(__file__), args, options.ngpu)
        except subprocess.CalledProcessError as error:
            if not path.is_file():
                return f"status {error.returncode}, see above"
        return pickle.loads(path.read_bytes())


def _record(options: argparse.Namespace, flags: list[str]) -> None:
    """On a rank: takes the step, and leaves what it did, or failed with, in a file."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags, f"--job.dump_folder={folder}"]
        config = load_config(flags, int(os.environ["WORLD_SIZE"]))

        # Imported late: with a configuration that is refused, the wait would be for nothing.
        import torch.distributed as dist

        from torchtitan_ext.verify.recompute import (
            for_comparison,
            without_checkpoint,
            without_compile,
        )
        from torchtitan_ext.verify.step import record_step

        config = for_comparison(config)
        if options.variant in (EAGER, EAGER_PLAIN):
            config = without_compile(config)
        if options.variant in (EAGER_PLAIN, COMPILED_PLAIN):
            config = without_checkpoint(config)
        result: Any = None
        try:
            result = record_step(config, inside_blocks=options.variant == EAGER)
        except Exception as error:
            result = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            raise
        finally:
            if os.environ["RANK"] == "0" or isinstance(result, str):
                options.record.write_bytes(pickle.dumps(result))
        dist.destroy_process_group()


def _print_table(layers: list[Any]) -> None:
    header = (
        "layer      checkpoint  compile  masks     routing  calls    kept MiB  worst gradient error"
    )
    print(header, file=sys.stderr)
    for layer in layers:
        print(_line(layer), file=sys.stderr)


def _line(layer: Any) -> str:
    def equal(value: bool) -> str:
        return "equal" if value else "DIFFER"

    masks = f"{layer.masks} {equal(layer.masks_equal)}" if layer.masks else "none"
    calls = "/".join(str(sum(calls.values())) for calls in layer.collectives.values())
    parameter = (layer.worst_parameter or "").removeprefix(f"{layer.name}.")
    return (
        f"{layer.name:<9}  {layer.checkpoint:<10}  {'yes' if layer.compiled else 'no':<7}  "
        f"{masks:<8}  {equal(layer.routing_equal):<7}  {calls or '-':<7}  "
        f"{layer.saved_bytes / 2**20:>8.2f}  {layer.worst_gradient_error:.1e} {parameter}"
    )


if __name__ == "__main__":
    sys.exit(main())
