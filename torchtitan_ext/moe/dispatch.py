"""Dispatch of tokens to experts and back. What combine needs, dispatch returns.

Nothing is kept on an object between the two calls: inside a checkpointed region a write would be
a side effect, which torch.compile refuses and a recomputation would repeat.

Shapes: T tokens, D model, E experts, K top-k, N = T * K routed rows, P ranks of expert
parallelism, e = E / P local experts, R rows received (R = N without expert parallelism).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

from .permute import permute_rows, rank_major_to_expert_major, sort_by_expert
from .router import Routing


@dataclass(frozen=True)
class ExchangeState:
    """How rows travelled between ranks, so that they can travel back."""

    input_splits: list[int]
    output_splits: list[int]
    index_R: torch.Tensor
    """For each row in expert order, its place among the rows as they were received."""


@dataclass(frozen=True)
class DispatchState:
    """Everything that :meth:`Dispatcher.combine` has to know of the matching dispatch."""

    index_N: torch.Tensor
    """For each row in expert order, its place in token order."""
    exchange: ExchangeState | None = None


class Dispatcher(Protocol):
    """Moves tokens to their experts and the experts' outputs back to the tokens."""

    def dispatch(
        self, x_TD: torch.Tensor, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor, DispatchState]:
        """Returns the rows in expert order (R, D), rows per local expert (e,), and the state."""
        ...

    def combine(self, y_RD: torch.Tensor, routing: Routing, state: DispatchState) -> torch.Tensor:
        """Returns each token's outputs, weighted and summed (T, D)."""
        ...


class LocalDispatcher:
    """All experts live in this process: dispatch is a sort by expert."""

    def dispatch(
        self, x_TD: torch.Tensor, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor, DispatchState]:
        x_ND, index_N = _to_expert_order(x_TD, routing)
        return x_ND, routing.tokens_per_expert_E, DispatchState(index_N)

    def combine(self, y_RD: torch.Tensor, routing: Routing, state: DispatchState) -> torch.Tensor:
        return _to_token_order(y_RD, routing, state)


class AllToAllDispatcher:
    """Each rank of ``group`` holds E / P experts, in order: rows travel by all-to-all."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_ranks = group.size()

    def dispatch(
        self, x_TD: torch.Tensor, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor, DispatchState]:
        x_ND, index_N = _to_expert_order(x_TD, routing)

        received_Pe = self._exchange_counts(routing.tokens_per_expert_E)
        input_splits, output_splits = self._splits(routing.tokens_per_expert_E, received_Pe)
        x_RD = all_to_all_single_autograd(x_ND, output_splits, input_splits, self.group)

        index_R, inverse_R = rank_major_to_expert_major(received_Pe, x_RD.shape[0])
        x_RD = permute_rows(x_RD, inverse_R)
        exchange = ExchangeState(input_splits, output_splits, index_R)
        return x_RD, received_Pe.sum(0), DispatchState(index_N, exchange)

    def combine(self, y_RD: torch.Tensor, routing: Routing, state: DispatchState) -> torch.Tensor:
        exchange = state.exchange
        assert exchange is not None, "the state of a local dispatch"
        y_RD = permute_rows(y_RD, exchange.index_R)
        y_ND = all_to_all_single_autograd(
            y_RD, exchange.input_splits, exchange.output_splits, self.group
        )
        return _to_token_order(y_ND, routing, state)

    @staticmethod
    def for_group(group: dist.ProcessGroup) -> "AllToAllDispatcher":
        """The dispatcher for a group, real or faked."""
        is_fake = dist.get_backend(group) == "fake"
        return DryRunDispatcher(group) if is_fake else AllToAllDispatcher(group)

    def _exchange_counts(self, tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Tells each rank how many rows it will get for each of its experts: (P, e)."""
        received = all_to_all_single(tokens_per_expert_E, None, None, self.group)
        received = torch.ops._c10d_functional.wait_tensor(received)
        return received.view(self.num_ranks, -1)

    def _splits(
        self, tokens_per_expert_E: torch.Tensor, received_Pe: torch.Tensor
    ) -> tuple[list[int], list[int]]:
        """Rows to send to and to get from each rank, as numbers: one copy to the host for both."""
        sent_P = tokens_per_expert_E.view(self.num_ranks, -1).sum(1)
        splits = torch.cat([sent_P, received_Pe.sum(1)]).to("cpu").tolist()
        return splits[: self.num_ranks], splits[self.num_ranks :]


class DryRunDispatcher(AllToAllDispatcher):
    """For the fake backend, where one process plays a rank and nothing arrives.

    What an exchange leaves in its output then is no count. Instead the others are taken to send
    as many rows as this rank sends them, which keeps sizes those of a real step.
    """

    def _exchange_counts(self, tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        return tokens_per_expert_E.view(self.num_ranks, -1)


def _to_expert_order(x_TD: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    index_N, inverse_N = sort_by_expert(routing.topk_expert_ids_TK.flatten())
    top_k = routing.topk_expert_ids_TK.shape[1]
    x_ND = x_TD.unsqueeze(1).expand(-1, top_k, -1).flatten(0, 1)
    return permute_rows(x_ND, inverse_N), index_N


def _to_token_order(y_ND: torch.Tensor, routing: Routing, state: DispatchState) -> torch.Tensor:
    y_ND = permute_rows(y_ND, state.index_N)
    y_TKD = y_ND.unflatten(0, routing.topk_scores_TK.shape)
    # The weighted sum is made in float32: bf16 would round each of the K partial sums.
    return (y_TKD.float() * routing.topk_scores_TK.unsqueeze(-1)).sum(1).to(y_ND.dtype)
