"""Context parallelism: the ranks of an axis share each sequence, from outside of the model.

Everything but attention works on single positions. For attention either keys and values of all
ranks are gathered (arXiv:2407.21783, 3.3.2), or queries, keys and values are exchanged so that
each rank has all positions of some heads (arXiv:2309.14509).

A sequence is cut into twice as many chunks as there are ranks. Rank r holds chunk r and the one
that is r-th from the end: so every rank's queries have equally many keys before them.

Shapes: B batch, S sequence (s of it on this rank), H heads (h of them on this rank), D model, K
width of a head.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import (
    all_gather_single_autograd,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.tools.logging import logger

from torchtitan_ext.components.attention import CausalAttention

from .names import modules_named
from .split_sequence import length_inside


@dataclass(frozen=True)
class ContextParallelPlan:
    """Where a model looks at more than single positions, by names of modules."""

    attention: str
    """From queries, keys and values, (B, H, S, K) each, to outputs."""

    rotary: tuple[str, ...] = ()
    """Modules whose second input has a row for each position, from the sequence's start on."""

    positions: tuple[str, ...] = ()
    """Embeddings of positions, counted from the sequence's start."""

    heads: tuple[str, ...] = ()
    """Modules whose first input, (B, S, D), has to be the whole sequence."""


@dataclass
class SharedSequence:
    """Which positions of a sequence each rank holds."""

    group: dist.ProcessGroup
    length: int = 0
    """Positions of all ranks together; set before each forward."""

    def __post_init__(self) -> None:
        self.rank, self.num_ranks = self.group.rank(), self.group.size()

    @property
    def starts(self) -> tuple[int, int]:
        """Where this rank's two chunks begin."""
        return self.rank * self._chunk, (2 * self.num_ranks - 1 - self.rank) * self._chunk

    def own_positions(self, device: torch.device) -> torch.Tensor:
        """This rank's positions (s,), in the order in which it holds them."""
        return torch.cat([torch.arange(s, s + self._chunk, device=device) for s in self.starts])

    def in_order(self, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
        """The sequence in its own order, from each rank's positions along ``dim``."""
        heads, tails = zip(*(part.chunk(2, dim) for part in parts), strict=True)
        return torch.cat([*heads, *reversed(tails)], dim)

    def parts_of_ranks(self, x: torch.Tensor, dim: int) -> list[torch.Tensor]:
        """The reverse of :meth:`in_order`."""
        chunks = x.chunk(2 * self.num_ranks, dim)
        return [
            torch.cat([head, tail], dim)
            for head, tail in zip(
                chunks[: self.num_ranks], reversed(chunks[self.num_ranks :]), strict=True
            )
        ]

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole sequence, in its own order; gradients of all ranks are summed."""
        stacked = all_gather_single_autograd(x.contiguous(), 0, self.group)
        return self.in_order(list(stacked.chunk(self.num_ranks)), dim)

    @property
    def _chunk(self) -> int:
        return self.length // (2 * self.num_ranks)


def share_batch(
    inputs: dict[str, torch.Tensor], labels_BS: torch.Tensor, cp_mesh: DeviceMesh
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """This rank's part of a batch.

    ==================  ============================================================
    input, token_types  (B, S) to (B, s)
    masked_positions    (B, M), any ranks' positions, dealt out evenly
    labels              as the positions whose logits this rank computes
    others              whole: of sequences, or of keys
    ==================  ============================================================
    """
    sequence = SharedSequence(cp_mesh.get_group(), labels_BS.shape[1])
    own_s = sequence.own_positions(labels_BS.device)
    inputs = dict(inputs)
    for name in {"input", "token_types"} & inputs.keys():
        inputs[name] = inputs[name][:, own_s]
    if "masked_positions" in inputs:
        positions_BM = inputs["masked_positions"]
        inputs["masked_positions"] = positions_BM.tensor_split(sequence.num_ranks, 1)[sequence.rank]
        return inputs, labels_BS
    return inputs, labels_BS[:, own_s]


class _AcrossRanks(nn.Module):
    """Attention in a sequence that ranks share, around a model's own attention."""

    def __init__(self, attention: nn.Module, sequence: SharedSequence) -> None:
        super().__init__()
        self.attention = attention
        self.sequence = sequence


class GatheredKeys(_AcrossRanks):
    """Attention of this rank's queries to the keys of all ranks."""

    def forward(
        self, q_BHsK: torch.Tensor, k_BHsK: torch.Tensor, v_BHsK: torch.Tensor, *mask: Any
    ) -> torch.Tensor:
        # In one collective: two that don't depend on one another could come in another order on
        # ranks whose graphs differ.
        kv_BHSK = self.sequence.gather(torch.cat([k_BHsK, v_BHsK], -1), 2)
        k_BHSK, v_BHSK = kv_BHSK.split([k_BHsK.shape[-1], v_BHsK.shape[-1]], -1)
        if isinstance(self.attention, CausalAttention):
            return self.attention(q_BHsK, k_BHSK, v_BHSK, self.sequence.starts)
        return self.attention(q_BHsK, k_BHSK, v_BHSK, *mask)


class ExchangedHeads(_AcrossRanks):
    """Attention of some heads to the whole sequence, for which ranks trade positions for heads."""

    def forward(
        self, q_BHsK: torch.Tensor, k_BHsK: torch.Tensor, v_BHsK: torch.Tensor, *mask: Any
    ) -> torch.Tensor:
        qkv = (self._positions_for_heads(x) for x in (q_BHsK, k_BHsK, v_BHsK))
        return self._heads_for_positions(self.attention(*qkv, *mask))

    def _positions_for_heads(self, x_BHsK: torch.Tensor) -> torch.Tensor:
        received = self._exchange(list(x_BHsK.chunk(self.sequence.num_ranks, 1)))
        return self.sequence.in_order(received, 2)

    def _heads_for_positions(self, x_BhSK: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(self.sequence.parts_of_ranks(x_BhSK, 2)), 1)

    def _exchange(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        ones = [1] * len(parts)
        received = all_to_all_single_autograd(torch.stack(parts), ones, ones, self.sequence.group)
        return list(received.unbind(0))


_ATTENTION = {"allgather": GatheredKeys, "alltoall": ExchangedHeads}


def apply_context_parallel(
    model: nn.Module,
    cp_mesh: DeviceMesh,
    plan: ContextParallelPlan,
    *,
    method: str,
    tensor_parallel_degree: int,
) -> None:
    """Lets the ranks of ``cp_mesh`` share each sequence.

    Args:
        model: its sequences come from :func:`share_batch`.
        cp_mesh: one-dimensional, named "cp".
        method: "allgather" of keys and values, or "alltoall" over heads.
        tensor_parallel_degree: how many ranks split what is this rank's outside of regions.
    """
    sequence = SharedSequence(cp_mesh.get_group())
    model.register_forward_pre_hook(functools.partial(_measure, sequence, tensor_parallel_degree))
    for name, module in modules_named(model, [plan.attention]):
        model.set_submodule(name, _ATTENTION[method](module, sequence))
    for patterns, hook in (
        (plan.rotary, _own_rows),
        (plan.positions, _count_on),
        (plan.heads, _gather_input),
    ):
        for _, module in modules_named(model, patterns):
            module.register_forward_pre_hook(functools.partial(hook, sequence))
    logger.info(f"Applied context parallelism (cp={cp_mesh.size()}, {method})")


def _measure(sequence: SharedSequence, parts: int, model: nn.Module, args: tuple[Any, ...]) -> None:
    sequence.length = length_inside(args[0], parts) * sequence.num_ranks


def _own_rows(sequence: SharedSequence, module: nn.Module, args: tuple[Any, ...]) -> Any:
    x, table, *rest = args
    return (x, table[sequence.own_positions(table.device)], *rest)


def _count_on(sequence: SharedSequence, module: nn.Module, args: tuple[Any, ...]) -> Any:
    (ids_s,) = args
    return (sequence.own_positions(ids_s.device)[ids_s],)


def _gather_input(sequence: SharedSequence, module: nn.Module, args: tuple[Any, ...]) -> Any:
    return (sequence.gather(args[0], 1), *args[1:])
