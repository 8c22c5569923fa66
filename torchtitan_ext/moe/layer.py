"""The mixture-of-experts layer.

Shapes: B batch, S sequence, T = B * S tokens, D model, E experts, K top-k, R rows received.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from .args import MoEArgs
from .dispatch import Dispatcher, LocalDispatcher
from .experts import GroupedExperts
from .router import TokenChoiceRouter


class FeedForward(nn.Module):
    """SwiGLU feed-forward: ``w2(silu(w1 x) * w3 x)`` (arXiv:2002.05202)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def moe_layers(model: nn.Module) -> Iterator["MoE"]:
    """The MoE layers of a model, in order."""
    return (module for module in model.modules() if isinstance(module, MoE))


class MoE(nn.Module):
    """Routed and shared experts. Returns what it counted: nothing is written on the module.

    ``expert_bias`` (E,) shifts the router's choice towards experts with few tokens
    (arXiv:2408.15664). It is a buffer, moved once per optimizer step from outside
    (:class:`torchtitan_ext.components.load_balance.ExpertLoad`); it exists only if balancing is on.
    """

    expert_bias: torch.Tensor | None

    def __init__(self, args: MoEArgs, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.router = TokenChoiceRouter(args, dim)
        self.experts = GroupedExperts(args.num_experts, dim, hidden_dim)
        self.shared_experts = (
            FeedForward(dim, hidden_dim * args.num_shared_experts)
            if args.num_shared_experts > 0
            else None
        )
        self.load_balance_coeff = args.load_balance_coeff
        bias = None
        if args.load_balance_coeff > 0:
            # float32 in any training type: in bf16 its small steps would be rounded away
            bias = torch.zeros(args.num_experts, dtype=torch.float32)
        self.register_buffer("expert_bias", bias)
        # Expert parallelism puts an AllToAllDispatcher here; the layer itself knows no ranks.
        self.dispatcher: Dispatcher = LocalDispatcher()

    def forward(
        self, x_BSD: torch.Tensor, given_ids_TK: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One layer.

        Args:
            x_BSD: hidden states.
            given_ids_TK: the experts to use in place of the router's choice, int64.

        Returns:
            The output (B, S, D), the tokens per expert (E,) and the experts per token (T, K),
            both int64.
        """
        x_TD = x_BSD.flatten(0, 1)
        routing = self.router(x_TD, self.expert_bias, given_ids_TK)
        x_RD, tokens_per_local_expert, state = self.dispatcher.dispatch(x_TD, routing)
        y_RD = self.experts(x_RD, tokens_per_local_expert)
        y_BSD = self.dispatcher.combine(y_RD, routing, state).view_as(x_BSD)
        if self.shared_experts is not None:
            y_BSD = y_BSD + self.shared_experts(x_BSD)
        return y_BSD, routing.tokens_per_expert_E, routing.topk_expert_ids_TK
