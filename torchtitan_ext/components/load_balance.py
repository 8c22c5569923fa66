"""Load balancing without an auxiliary loss (arXiv:2408.15664), from exact counts.

Shapes: L MoE layers, E experts.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_ext.moe import moe_layers


class ExpertLoad:
    """Tokens per expert over one optimizer step, and the step of the expert biases.

    The trainer adds each micro-batch's counts, as the forward returned them: so a recomputation
    counts nothing twice, and evaluation nothing at all.

    Args:
        model_parts: modules whose MoE layers returned the counts, in the same order.
        mesh: the ranks that hold different tokens; None for one process.
    """

    def __init__(self, model_parts: list[nn.Module], mesh: DeviceMesh | None) -> None:
        self._moe_layers = [moe for part in model_parts for moe in moe_layers(part)]
        self._mesh = mesh
        self._sum_LE: torch.Tensor | None = None
        self.last_step_LE: torch.Tensor | None = None
        """Counts of the last finished step over all ranks, int64; None without MoE layers."""

    def add(self, tokens_per_expert_LE: torch.Tensor) -> None:
        """Adds the counts of one micro-batch of this rank."""
        assert tokens_per_expert_LE.shape[0] == len(self._moe_layers)
        previous = self._sum_LE
        self._sum_LE = tokens_per_expert_LE if previous is None else previous + tokens_per_expert_LE

    @torch.no_grad()
    def finish_step(self) -> None:
        """Sums the counts over ranks, moves the biases, and starts counting anew."""
        if self._sum_LE is None:
            return
        total_LE = self._sum_LE.clone()
        if self._mesh is not None:
            dist.all_reduce(total_LE, group=self._mesh.get_group())
        for moe, tokens_per_expert_E in zip(self._moe_layers, total_LE, strict=True):
            if moe.expert_bias is not None:
                moe.expert_bias += moe.load_balance_coeff * bias_direction(tokens_per_expert_E)
        self.last_step_LE, self._sum_LE = total_LE, None

    def max_over_mean_L(self) -> list[float]:
        """Each layer's largest load over its mean load, in the last step; 1 is balanced."""
        assert self.last_step_LE is not None, "no step has ended, or the model has no MoE layers"
        load_LE = self.last_step_LE.double()
        return (load_LE.amax(1) / load_LE.mean(1)).tolist()


def bias_direction(tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
    """+1 for experts below the mean load, -1 above, 0 on it; compared in exact integers."""
    num_experts = tokens_per_expert_E.shape[0]
    return torch.sign(tokens_per_expert_E.sum() - num_experts * tokens_per_expert_E)
