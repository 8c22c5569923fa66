"""Is a recomputed forward the same forward? Layer by layer, for a configuration."""

import copy
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from .graphs import CompiledBlock
from .regions import BlockRecord, Visit
from .step import StepRecord, gradient_errors, in_float32, obvious_fault

# Of a parameter's largest gradient. Fused kernels round otherwise in a graph that recomputes; a
# mask or a route that is not the forward's moves gradients by far more.
TOLERANCE = 1e-3


@dataclass
class LayerVerdict:
    """What was found out about a layer."""

    name: str
    checkpoint: str
    """In force: none, full or op."""
    compiled: bool
    masks_equal: bool = True
    routing_equal: bool = True
    outputs_equal: bool = True
    """In every bit, those of an eager recomputation and of its forward."""
    worst_gradient_error: float = 0.0
    """Largest difference over the largest gradient of a parameter, to no checkpoint at all."""
    worst_parameter: str | None = None
    worst_gradient_fault: str = ""
    """What is wrong with that gradient, if it is more than an error."""
    writes: list[str] = field(default_factory=list)
    """Attributes and buffers that it writes; a fault where there is a recomputation."""
    collectives: dict[str, dict[str, int]] = field(default_factory=dict)
    """Calls by kind, in the forward, the recomputation and the backward."""
    kept: dict[str, int] = field(default_factory=dict)
    """Operators whose results were kept, of those that a policy chooses among."""
    masks: int = 0
    """Random draws of the forward."""
    routers: int = 0
    """Choices of experts in the forward."""
    saved_bytes: int = 0
    """Computed in the forward inside the block and kept for the backward."""
    graphs: int = 0
    """Compiled for this layer; 0 if it uses those of a layer before it."""
    graph_breaks: int = 0
    faults: list[str] = field(default_factory=list)


def without_checkpoint(config: Any) -> Any:
    """The same configuration, with all activations kept."""
    config = copy.deepcopy(config)
    config.activation_checkpoint.mode = "none"
    config.layer_wrap.save_ops = []
    rules = config.layer_wrap.rules
    config.layer_wrap.rules = [replace(rule, checkpoint="none") for rule in rules]
    return config


def without_compile(config: Any) -> Any:
    """The same configuration, eager."""
    config = copy.deepcopy(config)
    config.compile.enable = False
    rules = config.layer_wrap.rules
    config.layer_wrap.rules = [replace(rule, compile=False) for rule in rules]
    return config


def for_comparison(config: Any) -> Any:
    """The same configuration in float32, with all of a block recomputed."""
    config = in_float32(config)
    # An early end would look like operators that are not recomputed.
    config.activation_checkpoint.early_stop = False
    return config


def judge(
    inside: StepRecord,
    pairs: Iterable[tuple[StepRecord, StepRecord]],
    *,
    compiled: StepRecord | None = None,
) -> list[LayerVerdict]:
    """One verdict a layer, and a last one named "other" for the parameters outside of them.

    Args:
        inside: the eager step with checkpoints, with its blocks recorded.
        pairs: steps with checkpoints, each with its like without.
        compiled: the compiled step with checkpoints, if the configuration compiles.
    """
    plans = (compiled or inside).plans
    verdicts = [
        _judge_layer(
            f"layers.{plan.layer_id}",
            plan.checkpoint,
            compiled is not None and plan.compile,
            inside.blocks[f"layers.{plan.layer_id}"],
        )
        for plan in plans
    ]
    for verdict in verdicts:
        if compiled is not None and verdict.compiled:
            _add_compiled(verdict, compiled.compiled_blocks.get(verdict.name))
    verdicts.append(LayerVerdict("other", "none", compiled=False))
    for actual, reference in pairs:
        _compare_gradients(actual, reference, verdicts)
    for verdict in verdicts:
        if not verdict.worst_gradient_error <= TOLERANCE:
            off = f"is off by {verdict.worst_gradient_error:.1e} of its largest element"
            fault = verdict.worst_gradient_fault or off
            verdict.faults.append(f"gradient of {verdict.worst_parameter} {fault}")
            if verdict.compiled and verdict.masks > 0:
                # Inside a compiled block this is all that shows of its masks.
                verdict.masks_equal = False
    return verdicts


def _judge_layer(name: str, asked: str, compiled: bool, record: BlockRecord) -> LayerVerdict:
    verdict = LayerVerdict(name, _in_force(record), compiled, saved_bytes=record.saved_bytes)
    forwards, recomputations = record.forwards, record.recomputations
    verdict.masks = sum(len(visit.masks) for visit in forwards)
    verdict.routers = sum(len(visit.routing) for visit in forwards)
    verdict.collectives = {
        "forward": _sum(visit.collectives for visit in forwards),
        "recomputation": _sum(visit.collectives for visit in recomputations),
        "backward": dict(record.backward_collectives),
    }
    faults = verdict.faults
    if recomputations and len(recomputations) != len(forwards):
        faults.append(f"{len(forwards)} forwards, but {len(recomputations)} recomputations")
    for forward, again in zip(forwards, recomputations, strict=False):
        verdict.masks_equal &= forward.masks == again.masks
        verdict.routing_equal &= forward.routing == again.routing
        verdict.outputs_equal &= forward.output == again.output
        verdict.kept = dict(Counter(verdict.kept) + _kept(forward, again))
    if verdict.checkpoint != asked:
        kept = ", ".join(f"{op} x{count}" for op, count in verdict.kept.items())
        faults.append(
            f'checkpoint "{asked}" was asked for, "{verdict.checkpoint}" is in force'
            + (f": it keeps {kept}" if kept else "")
        )
    if not verdict.masks_equal:
        faults.append("the recomputation draws other dropout masks than the forward")
    if not verdict.routing_equal:
        faults.append("the recomputation sends tokens to other experts than the forward")
    if not verdict.outputs_equal and verdict.masks_equal and verdict.routing_equal:
        faults.append("the recomputation's output is not the forward's")
    written = [
        (phase, name)
        for phase, visits in (("forward", forwards), ("recomputation", recomputations))
        for visit in visits
        for name in visit.writes
    ]
    verdict.writes = sorted({attribute for _, attribute in written})
    for attribute in verdict.writes if recomputations else []:
        phases = " and ".join(dict.fromkeys(phase for phase, name in written if name == attribute))
        faults.append(f"{attribute} is written in the {phases}")
    return verdict


def _add_compiled(verdict: LayerVerdict, block: CompiledBlock | None) -> None:
    if block is None or not block.runs_compiled:
        verdict.compiled = False
        verdict.faults.append("compile was asked for, and the layer runs eager")
        return
    verdict.graphs, verdict.graph_breaks = block.graphs, block.graph_breaks
    verdict.saved_bytes = block.saved_bytes
    if block.graph_breaks:
        verdict.faults.append(f"{block.graph_breaks} graph breaks")


def _in_force(record: BlockRecord) -> str:
    if not record.recomputations:
        return "none"
    kept = sum(
        (_kept(*pair) for pair in zip(record.forwards, record.recomputations, strict=False)),
        Counter[str](),
    )
    return "op" if kept else "full"


def _kept(forward: Visit, again: Visit) -> Counter[str]:
    """Operators of the forward that the recomputation did not run, the pinned ones apart."""
    return Counter(forward.ops) - forward.pinned - (Counter(again.ops) - again.pinned)


def _sum(counts: Iterable[Counter[str]]) -> dict[str, int]:
    return dict(sum(counts, Counter[str]()))


def _compare_gradients(
    actual: StepRecord, reference: StepRecord, verdicts: list[LayerVerdict]
) -> None:
    for name, error in gradient_errors(actual, reference).items():
        verdict = next((v for v in verdicts if name.startswith(v.name + ".")), verdicts[-1])
        if error > verdict.worst_gradient_error or verdict.worst_parameter is None:
            verdict.worst_gradient_error, verdict.worst_parameter = error, name
            verdict.worst_gradient_fault = obvious_fault(
                actual.gradients.get(name), reference.gradients.get(name)
            )
