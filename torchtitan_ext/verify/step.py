"""One training step of a configuration, as data that can be compared."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from torchtitan_ext.components.initialize import CHECKPOINT_PREFIX
from torchtitan_ext.distributed.checkpoint_policy import SaveOps
from torchtitan_ext.distributed.layer_wrap import LayerPlan, plans_of
from torchtitan_ext.trainer import ExtTrainer

from .graphs import CompiledBlock, GraphRecorder
from .regions import BlockRecord, RegionRecorder

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
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """After the step."""
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


def relative_error(found: torch.Tensor | None, expected: torch.Tensor, least: float) -> float:
    """Largest difference over the largest expected element, or over ``least`` if that is more.

    Infinite for a tensor that is missing or of another shape.
    """
    if found is None or found.shape != expected.shape:
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(least))


def record_step(config: Any, *, inside_blocks: bool = False) -> StepRecord:
    """Trains one step on the ranks that exist.

    Args:
        config: a checked configuration; gradients are as it clips them.
        inside_blocks: record what eager blocks do, too.
    """
    torch._dynamo.reset()
    counters.clear()
    trainer = ExtTrainer(config)
    try:
        return _record(trainer, config, inside_blocks)
    finally:
        trainer.close()


def _record(trainer: ExtTrainer, config: Any, inside_blocks: bool) -> StepRecord:
    (model,) = trainer.model_parts
    record = StepRecord(loss=0.0, grad_norm=0.0, plans=plans_of(model, config))

    def before_update(*_: Any) -> None:
        record.gradients = full_tensors(model, gradients=True)

    def log(step: int, loss: float, max_loss: float, grad_norm: float, *_: Any, **__: Any) -> None:
        record.loss, record.grad_norm = loss, grad_norm

    trainer.optimizers.register_step_pre_hook(before_update)
    trainer.metrics_processor.log = log  # type: ignore[method-assign,assignment]
    graphs = GraphRecorder(model)
    batches = trainer.batch_generator(trainer.dataloader)
    trainer.step = 1
    if inside_blocks:
        save_ops = SaveOps(config.layer_wrap.save_ops)
        recorder = RegionRecorder(model, save_ops.kept)
        model.register_forward_hook(lambda *_: recorder.end_of_forwards())
        with recorder:
            trainer.train_step(batches)
        record.blocks = _of_all_ranks(recorder.blocks)
    else:
        trainer.train_step(batches)
    record.weights = full_tensors(model)
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


def full_tensors(model: nn.Module, *, gradients: bool = False) -> dict[str, torch.Tensor]:
    """Every parameter, or its gradient, gathered from all ranks; a collective."""
    full = {}
    for name, parameter in model.named_parameters():
        value = parameter.grad if gradients else parameter.detach()
        if value is None:
            continue
        value = value.full_tensor() if isinstance(value, DTensor) else value
        full[name.replace(CHECKPOINT_PREFIX, "")] = value.detach().cpu().clone()
    return full
