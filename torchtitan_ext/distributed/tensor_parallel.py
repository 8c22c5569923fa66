"""Tensor parallelism with split sequences (arXiv:1909.08053, arXiv:2205.05198), from outside.

Between a model's regions a rank has a part of the sequence. Inside of one it has the whole sequence
and a part of the weights: of the heads, of a feed-forward's width, of the vocabulary. A region
gathers its input and sums its output over ranks, each once.

A parameter that every rank holds whole meets a part of the positions, or serves a part of the
heads. So its gradient is partial on every rank, without an exception to remember.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torchtitan.tools.logging import logger

from torchtitan_ext.moe import GroupedExperts, moe_layers

from .local_parameters import distribute_parameters
from .names import matches, modules_named
from .split_sequence import SplitSequence, length_inside


@dataclass(frozen=True)
class TensorParallelPlan:
    """What of a model is split, by names of modules and parameters; ``*`` stands for any layer.

    Parameters that no pattern names are held whole by every rank.
    """

    column: tuple[str, ...]
    """Parameters that are split along their first dim, a linear layer's outputs."""

    row: tuple[str, ...]
    """Linear layers whose weights are split along the second dim, the inputs."""

    regions: tuple[str, ...]
    """Modules with the whole sequence inside: the first input is gathered, the output summed. MoE
    layers are no matter of the plan."""

    embedding: str
    """Looks up the tokens of this rank's part of the vocabulary; the output is summed."""

    logits: str
    """The module whose output is split along the vocabulary; its first input is gathered."""

    heads: tuple[str, ...] = ()
    """Further modules whose first input is gathered, and that every rank computes alike."""

    positions: tuple[str, ...] = ()
    """Embeddings that are looked up for this rank's positions alone."""


def apply_tensor_parallel(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    plan: TensorParallelPlan,
    *,
    splits_experts: bool,
    loss_parallel: bool,
) -> None:
    """Splits all of ``model`` but its routed experts over ``tp_mesh``.

    Args:
        model: on the meta device, or with the same weights on every rank.
        tp_mesh: one-dimensional, named "tp".
        splits_experts: whether ranks hold parts of the same experts, and so need the same tokens;
            otherwise each rank sends its own tokens, and only shared experts are a region.
        loss_parallel: whether logits stay split along the vocabulary, as a DTensor; otherwise they
            are gathered.
    """
    for name, module in model.named_modules():
        if not isinstance(module, GroupedExperts):
            _distribute(name, module, tp_mesh, plan)
    sequence = SplitSequence(tp_mesh.get_group())
    model.register_forward_pre_hook(functools.partial(_measure, sequence))
    gather, add_up = (functools.partial(hook, sequence) for hook in (_gather_input, _sum_output))
    regions = [module for _, module in modules_named(model, plan.regions)]
    for region in [*regions, *_moe_regions(model, splits_experts)]:
        region.register_forward_pre_hook(gather)
        region.register_forward_hook(add_up)
    for _, embedding in modules_named(model, [plan.embedding]):
        embedding.register_forward_hook(add_up)
    for _, head in modules_named(model, [plan.logits, *plan.heads]):
        head.register_forward_pre_hook(gather)
    for _, head in modules_named(model, [plan.logits]):
        head.register_forward_hook(functools.partial(_whole_logits, tp_mesh, loss_parallel))
    for _, embedding in modules_named(model, plan.positions):
        embedding.register_forward_pre_hook(functools.partial(_own_positions, sequence))
    split_loss = ", loss along the vocabulary" if loss_parallel else ""
    logger.info(f"Applied tensor parallelism (tp={tp_mesh.size()}{split_loss})")


def _distribute(
    name: str, module: nn.Module, tp_mesh: DeviceMesh, plan: TensorParallelPlan
) -> None:
    placements: dict[str, list[Placement]] = {}
    on_first_rank = set()
    for parameter, _ in module.named_parameters(recurse=False):
        if matches(f"{name}.{parameter}", plan.column) or matches(name, plan.column):
            placements[parameter] = [Shard(0)]
        elif matches(name, plan.row) and parameter == "weight":
            placements[parameter] = [Shard(1)]
        elif matches(name, plan.row):
            on_first_rank.add(parameter)
    if name == plan.embedding:
        placements["weight"] = [Shard(0)]
        _make_part_of_embedding(module, tp_mesh)
    distribute_parameters(module, tp_mesh, placements, frozenset(on_first_rank))


def _moe_regions(model: nn.Module, splits_experts: bool) -> Iterator[nn.Module]:
    for moe in moe_layers(model):
        if splits_experts:
            yield moe
        elif moe.shared_experts is not None:
            yield moe.shared_experts


def _make_part_of_embedding(module: nn.Module, tp_mesh: DeviceMesh) -> None:
    assert isinstance(module, nn.Embedding)
    first_row = tp_mesh.get_local_rank() * module.num_embeddings // tp_mesh.size()
    part = cast(_PartOfEmbedding, module)
    part.__class__, part.first_row = _PartOfEmbedding, first_row


class _PartOfEmbedding(nn.Embedding):
    """An embedding of which a rank holds some rows; for the others it gives zeros."""

    first_row: int

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        rows = ids - self.first_row
        is_here = (rows >= 0) & (rows < weight.shape[0])
        return F.embedding(rows * is_here, weight) * is_here.unsqueeze(-1)


def _measure(sequence: SplitSequence, model: nn.Module, args: tuple[Any, ...]) -> None:
    sequence.length = length_inside(args[0], sequence.num_ranks)


def _gather_input(sequence: SplitSequence, module: nn.Module, args: tuple[Any, ...]) -> Any:
    return (sequence.gather(args[0]), *args[1:])


def _sum_output(
    sequence: SplitSequence, module: nn.Module, args: tuple[Any, ...], output: Any
) -> Any:
    if isinstance(output, tuple):
        return (sequence.scatter_sum(output[0]), *output[1:])
    return sequence.scatter_sum(output)


def _own_positions(sequence: SplitSequence, module: nn.Module, args: tuple[Any, ...]) -> Any:
    return (sequence.own_part(args[0]), *args[1:])


def _whole_logits(
    tp_mesh: DeviceMesh,
    loss_parallel: bool,
    module: nn.Module,
    args: tuple[Any, ...],
    logits: torch.Tensor,
) -> torch.Tensor:
    whole = DTensor.from_local(logits, tp_mesh, [Shard(-1)], run_check=False)
    return whole if loss_parallel else whole.full_tensor()
