"""Numbers that define a mixture-of-experts layer."""

from dataclasses import dataclass
from typing import Literal


@dataclass
class MoEArgs:
    """Settings of one mixture-of-experts (MoE) layer. Names follow torchtitan 0.2.2."""

    num_experts: int = 8
    """Routed experts of a layer."""

    num_shared_experts: int = 1
    """Experts that every token visits, held as one feed-forward of that many times the width."""

    top_k: int = 1
    """Routed experts per token."""

    score_func: Literal["softmax", "sigmoid"] = "sigmoid"
    """Turns the gate's logits into scores: "softmax" as in DeepSeek-V2, "sigmoid" as in V3."""

    route_norm: bool = False
    """Whether a token's top-k scores are divided by their sum."""

    route_scale: float = 1.0
    """Factor on the top-k scores, after the normalisation."""

    num_expert_groups: int = 1
    """Node-limited routing: the experts form this many equal groups."""

    num_limited_groups: int = 1
    """Node-limited routing: a token's experts come from this many groups."""

    load_balance_coeff: float = 1e-3
    """Step of the expert bias per optimizer step (arXiv:2408.15664); 0 turns balancing off."""

    def __post_init__(self) -> None:
        groups, limit = self.num_expert_groups, self.num_limited_groups
        assert 1 <= self.top_k <= self.num_experts, (self.top_k, self.num_experts)
        assert self.num_experts % groups == 0, (self.num_experts, groups)
        assert 1 <= limit <= groups, (limit, groups)
        assert self.top_k <= limit * (self.num_experts // groups), (self.top_k, limit)
