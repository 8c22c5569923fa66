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
* compiled: the graphs made for it, or "shared" if it uses those of a layer before it;
* kept: what its forward computed and kept for the backward;
* worst gradient error: over the largest element of a parameter's gradient, and the parameter,
  without ".weight".

Inside a compiled layer nothing can be seen: there a mask or a route counts as wrong if a gradient
is. All other flags are the configuration's. The last line printed is one JSON object; the status
is 0 if the recomputation is faithful, else 1.
"""

import argparse
import os
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
EAGER, EAGER_PLAIN = "eager, checkpointed", "eager"
COMPILED, COMPILED_PLAIN = "compiled, checkpointed", "compiled"


def main() -> int:
    options, flags = _parse_args()
    if options.tasks is not None:
        record_on_this_rank(options.tasks, _record)
        return 0
    try:
        if not lead_torchrun(options):
            return 0
        config = load_config(flags, options.ngpu)  # refused before any rank starts
        _refuse_pipeline(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    summary = _check(options, flags, compiles=_compiles(config))
    print_json(summary)
    return 0 if summary["faithful"] else 1


def _parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = script_parser(__doc__)
    parser.add_argument("--ngpu", type=at_least_one, default=1, help="ranks to start (1)")
    parser.add_argument("--tasks", type=Path, help=argparse.SUPPRESS)
    return parser.parse_known_args()


def _refuse_pipeline(config: Any) -> None:
    degree = config.parallelism.pipeline_parallel_degree
    if degree > 1:
        raise ConfigError(
            f"[parallelism] pipeline_parallel_degree = {degree}: in a pipeline, forwards of some "
            "micro-batches come between backwards of others, and what a layer runs again can't be "
            "told from what it runs next; check with 1, as layers are wrapped alike"
        )


def _compiles(config: Any) -> bool:
    compiles = config.compile.enable and "model" in config.compile.components
    return compiles or any(rule.compile for rule in config.layer_wrap.rules)


def _check(options: argparse.Namespace, flags: list[str], *, compiles: bool) -> dict[str, Any]:
    variants = [EAGER, EAGER_PLAIN, *[COMPILED, COMPILED_PLAIN] * compiles]
    steps = {}
    for task, step in record_tasks(SCRIPT, [Task(name, flags) for name in variants], options.ngpu):
        if isinstance(step, str):
            fault = f"the step fails, {task.name}: {step}"
            show(f"NOT faithful: {fault}")
            return {"faithful": False, "faults": [fault], "layers": []}
        steps[task.name] = step
    # Imported late, as torch takes seconds.
    from torchtitan_ext.verify.recompute import judge

    pairs = [(steps[EAGER], steps[EAGER_PLAIN])]
    if compiles:
        pairs.append((steps[COMPILED], steps[COMPILED_PLAIN]))
    layers = judge(steps[EAGER], pairs, compiled=steps.get(COMPILED))
    faults = [f"{layer.name}: {fault}" for layer in layers for fault in layer.faults]
    _print_table(layers)
    for fault in faults:
        show(f"NOT faithful: {fault}")
    if not faults:
        show("faithful: every recomputation is its forward")
    return {
        "faithful": not faults,
        "faults": faults,
        "layers": [asdict(layer) for layer in layers],
        "graphs": sum(layer.graphs for layer in layers),
        "graph_breaks": sum(layer.graph_breaks for layer in layers),
        "ngpu": options.ngpu,
        "flags": flags,
    }


def _record(task: Task, config: Any) -> Any:
    from torchtitan_ext.verify.recompute import for_comparison, without_checkpoint, without_compile
    from torchtitan_ext.verify.step import record_step

    config = for_comparison(config)
    if task.name in (EAGER, EAGER_PLAIN):
        config = without_compile(config)
    if task.name in (EAGER_PLAIN, COMPILED_PLAIN):
        config = without_checkpoint(config)
    return record_step(config, inside_blocks=task.name == EAGER)


def _print_table(layers: list[Any]) -> None:
    header = "layer      checkpoint  compiled  masks     routing  calls    kept MiB  "
    show(f"{header}worst gradient error")
    for layer in layers:
        show(_line(layer))


def _line(layer: Any) -> str:
    def equal(value: bool) -> str:
        return "equal" if value else "DIFFER"

    graphs = f"{layer.graphs} graph{'s' * (layer.graphs > 1)}" if layer.graphs else "shared"
    masks = f"{layer.masks} {equal(layer.masks_equal)}" if layer.masks else "none"
    routing = equal(layer.routing_equal) if layer.routers else "none"
    calls = "/".join(str(sum(calls.values())) for calls in layer.collectives.values())
    parameter = (layer.worst_parameter or "").removeprefix(f"{layer.name}.").removesuffix(".weight")
    return (
        f"{layer.name:<9}  {layer.checkpoint:<10}  {graphs if layer.compiled else 'no':<8}  "
        f"{masks:<8}  {routing:<7}  {calls or '-':<7}  "
        f"{layer.saved_bytes / 2**20:>8.2f}  {layer.worst_gradient_error:.1e} {parameter}"
    )


if __name__ == "__main__":
    sys.exit(main())
