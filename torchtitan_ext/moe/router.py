"""Token-choice router: which experts each token visits, and with what weight.

Shapes: T tokens, D model, E experts, K top-k, G expert groups.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .args import MoEArgs


class Routing(NamedTuple):
    """What the router decided. The ids and counts are integers: they carry no gradient."""

    topk_scores_TK: torch.Tensor
    """Weight of each chosen expert's output, float32."""
    topk_expert_ids_TK: torch.Tensor
    """Chosen experts, int64, in 0..E-1."""
    tokens_per_expert_E: torch.Tensor
    """Tokens of this process that chose each expert, int64; sums to T * K."""


class TokenChoiceRouter(nn.Module):
    """Scores every expert for every token and picks the top-k (arXiv:2412.19437, 2.1.2).

    The choice is made on scores plus ``expert_bias``; the weights are the scores without it.
    """

    def __init__(self, args: MoEArgs, dim: int) -> None:
        super().__init__()
        self.args = args
        self.gate = nn.Linear(dim, args.num_experts, bias=False)

    def forward(
        self,
        x_TD: torch.Tensor,
        expert_bias_E: torch.Tensor | None,
        given_ids_TK: torch.Tensor | None = None,
    ) -> Routing:
        """Routes by score, or to the experts that are given; their weights are scores anyway."""
        # In float32, also under autocast: rounded to bf16, close scores would tie.
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = F.linear(x_TD.float(), self.gate.weight.float())
        if self.args.score_func == "sigmoid":
            scores_TE = logits_TE.sigmoid()
        else:
            scores_TE = logits_TE.softmax(dim=-1)

        ids_TK = given_ids_TK
        if ids_TK is None:
            ids_TK = self._choose(scores_TE.detach(), expert_bias_E)
        topk_scores_TK = scores_TE.gather(dim=1, index=ids_TK)
        if self.args.route_norm:
            topk_scores_TK = topk_scores_TK / (topk_scores_TK.sum(-1, keepdim=True) + 1e-20)
        topk_scores_TK = topk_scores_TK * self.args.route_scale
        return Routing(topk_scores_TK, ids_TK, count_tokens(ids_TK, self.args.num_experts))

    def _choose(self, scores_TE: torch.Tensor, expert_bias_E: torch.Tensor | None) -> torch.Tensor:
        choice_TE = scores_TE if expert_bias_E is None else scores_TE + expert_bias_E
        if self.args.num_limited_groups < self.args.num_expert_groups:
            choice_TE = self._limit_groups(choice_TE)
        return choice_TE.topk(self.args.top_k, dim=-1).indices

    def _limit_groups(self, choice_TE: torch.Tensor) -> torch.Tensor:
        """Rules out experts outside each token's best groups.

        A group is worth its best score (V2, softmax) or the sum of its best two (V3, sigmoid).
        """
        choice_TGe = choice_TE.unflatten(-1, (self.args.num_expert_groups, -1))
        num_best = 1 if self.args.score_func == "softmax" else min(2, choice_TGe.shape[-1])
        group_scores_TG = choice_TGe.topk(num_best, dim=-1).values.sum(-1)
        kept_groups = group_scores_TG.topk(self.args.num_limited_groups, dim=-1).indices
        dropped_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter(
            1, kept_groups, False
        )
        return choice_TGe.masked_fill(dropped_TG.unsqueeze(-1), float("-inf")).flatten(1)


def count_tokens(expert_ids_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """How many tokens chose each expert: int64 of shape (num_experts,)."""
    ids_N = expert_ids_TK.flatten()
    return ids_N.new_zeros(num_experts).scatter_add(0, ids_N, torch.ones_like(ids_N))
