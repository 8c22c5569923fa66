"""One training step of a configuration, as data that can be compared."""

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from torchtitan_ext.components.initialize import CHECKPOINT_PREFIX
from torchtitan_ext.distributed.checkpoint_policy import SaveOps
from torchtitan_ext.distributed.layer_wrap import LayerPlan, plans_of
from torchtitan_ext.trainer import ExtTrainer

from .graphs import CompiledBlock, GraphRecorder
from .regions import BlockRecord, RegionRecorder, hash_tensors

NEGLIGIBLE = 1e-4
"""Of the model's largest gradient: one this small may be rounding; attention's key bias has none.

Errors of such a gradient are taken relative to this size.
"""


@dataclass
class StepRecord:
    """What a step computed. Tensors are full ones, on the CPU, by parameter name."""

    loss: float
    grad_norm: float
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Before clipping; without the parameters that have none."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters and buffers, after the step."""
    unequal_gradients: list[str] = field(default_factory=list)
    """Of which ranks hold different values, though each holds or gathers all of it."""
    unequal_weights: list[str] = field(default_factory=list)
    counts: list[list[int]] | None = None
    """Tokens per expert, layers x experts, of all ranks."""
    plans: list[LayerPlan] = field(default_factory=list)
    blocks: dict[str, BlockRecord] = field(default_factory=dict)
    """Of eager blocks alone."""
    compiled_blocks: dict[str, CompiledBlock] = field(default_factory=dict)
    """Of rank 0."""
    num_graphs: int = 0


def in_float32(config: Any) -> Any:
    """The same configuration, as a step that is compared wants it.

    In float32 what is rounding and what is wrong lie far apart. Clipping is off, as one wrong
    gradient would scale all others, and so is what a step does not need.
    """
    config = copy.deepcopy(config)
    config.training.dtype = "float32"
    config.training.mixed_precision_param = config.training.mixed_precision_reduce = "float32"
    config.training.max_norm = float("inf")
    config.checkpoint.enable = config.validation.enable = False
    config.profiling.enable_profiling = config.profiling.enable_memory_snapshot = False
    config.metrics.enable_tensorboard = config.metrics.enable_wandb = False
    return config


def largest_gradient(record: StepRecord) -> float:
    """The largest element of all gradients."""
    return max(float(gradient.abs().max()) for gradient in record.gradients.values())


def relative_error(
    found: torch.Tensor | None, expected: torch.Tensor | None, least: float
) -> float:
    """Largest difference over the largest expected element, or over ``least`` if that is more.

    Infinite where :func:`obvious_fault` tells the reason.
    """
    if obvious_fault(found, expected):
        return float("inf")
    assert found is not None and expected is not None
    difference = (found.double() - expected).abs().max()
    return float(difference / expected.abs().max().double().clamp_min(least))


def obvious_fault(found: torch.Tensor | None, expected: torch.Tensor | None) -> str:
    """What is wrong with a tensor apart from an error; empty if nothing is."""
    if found is None:
        return "is missing"
    if expected is None:
        return "is there, and should not be"
    if found.shape != expected.shape:
        return f"has the shape {tuple(found.shape)} in place of {tuple(expected.shape)}"
    if not expected.isfinite().all():
        return "is not finite in what it is compared with"
    return "" if found.isfinite().all() else "is not finite"


def gradient_errors(actual: StepRecord, reference: StepRecord) -> dict[str, float]:
    """:func:`relative_error` of each gradient that is in either step, in the model's order."""
    least = largest_gradient(reference) * NEGLIGIBLE
    return {
        name: relative_error(actual.gradients.get(name), reference.gradients.get(name), least)
        for name in reference.weights
        if name in actual.gradients or name in reference.gradients
    }


def record_step(config: Any, *, inside_blocks: bool = False) -> StepRecord:
    """Trains one step on the ranks that exist.

    Args:
        config: a checked configuration.
        inside_blocks: record what eager blocks do, too.
    """
    torch._dynamo.reset()
    # Of a step before: its layouts name another mesh, equal to this one, and a compiled loss must
    # not get one mesh for its logits and the other for their gradient.
    _clear_sharding_prop_cache()
    counters.clear()
    trainer = ExtTrainer(config)
    try:
        return _record(trainer, config, inside_blocks)
    finally:
        trainer.close()


def _record(trainer: ExtTrainer, config: Any, inside_blocks: bool) -> StepRecord:
    parts = trainer.model_parts
    plans = [plan for part in parts for plan in plans_of(part, config)]
    record = StepRecord(loss=0.0, grad_norm=0.0, plans=plans)
    order = trainer.pipeline.tensor_names if trainer.pipeline is not None else ()

    forward_backward, micro_batches = trainer.forward_backward_step, itertools.count(1)

    def forward_backward_and_record(**batch: Any) -> torch.Tensor:
        loss = forward_backward(**batch)
        # Before they are clipped: one that is not finite would make all others so.
        if next(micro_batches) == trainer.gradient_accumulation_steps:
            gradients = {n: p.grad for part in parts for n, p in part.named_parameters()}
            record.gradients, record.unequal_gradients = full_tensors(gradients, order)
        return loss

    def log(step: int, loss: float, max_loss: float, grad_norm: float, *_: Any, **__: Any) -> None:
        record.loss, record.grad_norm = loss, grad_norm

    trainer.forward_backward_step = forward_backward_and_record  # type: ignore[method-assign]
    trainer.metrics_processor.log = log  # type: ignore[method-assign,assignment]
    graphs = GraphRecorder(*parts)
    batches = trainer.batch_generator(trainer.dataloader)
    trainer.step = 1
    if inside_blocks:
        (model,) = parts
        save_ops = SaveOps(config.layer_wrap.save_ops)
        recorder = RegionRecorder(model, save_ops.kept)
        model.register_forward_hook(lambda *_: recorder.end_of_forwards())
        with recorder:
            trainer.train_step(batches)
        record.blocks = _of_all_ranks(recorder.blocks)
    else:
        trainer.train_step(batches)
    weights: dict[str, torch.Tensor | None] = {}
    for part in parts:
        weights |= {**dict(part.named_parameters()), **dict(part.named_buffers())}
    record.weights, record.unequal_weights = full_tensors(weights, order)
    if trainer.expert_load.last_step_LE is not None:
        record.counts = trainer.expert_load.last_step_LE.tolist()
    record.compiled_blocks = graphs.blocks
    record.num_graphs = counters["stats"]["unique_graphs"]
    return record


def _of_all_ranks(blocks: dict[str, BlockRecord]) -> dict[str, BlockRecord]:
    """The visits of all ranks, one rank after another; the bytes of the rank with the most."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, blocks)
    merged = {name: BlockRecord() for name in blocks}
    for name, record in merged.items():
        for rank in ranks:
            record.forwards += rank[name].forwards
            record.recomputations += rank[name].recomputations
            record.backward_collectives += rank[name].backward_collectives
            record.saved_bytes = max(record.saved_bytes, rank[name].saved_bytes)
    return merged


def full_tensors(
    tensors: Mapping[str, torch.Tensor | None], order: Sequence[str] = ()
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Gathers tensors from all ranks; a collective.

    Args:
        tensors: of this rank's part of the model; None for a gradient that is not there.
        order: of the names in the result, if the ranks hold different parts.

    Returns:
        This rank's, on the CPU, on rank 0 also those of parts that it does not hold; and the names
        of those that are not the same on all ranks that hold them.
    """
    full: dict[str, torch.Tensor] = {}
    own: dict[str, str | None] = {}
    for name, tensor in tensors.items():
        name = name.replace(CHECKPOINT_PREFIX, "")
        own[name] = None
        if tensor is not None:
            value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            full[name] = value.detach().cpu().clone()
            # Of replicas, which DTensor believes to be equal, a rank gets its own.
            own[name] = hash_tensors(full[name])
    ranks: list[dict[str, str | None]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, own)
    full |= _of_other_parts(full, ranks)
    names = dict.fromkeys(name for rank in ranks for name in rank)
    unequal = [n for n in names if len({rank[n] for rank in ranks if n in rank}) > 1]
    return {name: full[name] for name in order or full if name in full}, unequal


def _of_other_parts(
    full: dict[str, torch.Tensor], ranks: list[dict[str, str | None]]
) -> dict[str, torch.Tensor]:
    """On rank 0, what only others hold; each comes from the first that does."""
    first = {name: i for i, rank in reversed(list(enumerate(ranks))) for name in rank}
    if not any(first.values()):
        return {}
    own = {name: tensor for name, tensor in full.items() if first[name] == dist.get_rank() > 0}
    is_first = dist.get_rank() == 0
    others: list[Any] | None = [None] * len(ranks) if is_first else None
    dist.gather_object(own, others)
    return {name: tensor for rank in others or () for name, tensor in rank.items()}
