"""The routed experts of a layer, as three stacked matrices.

Shapes: R rows received, D model, F hidden, E experts (e of them local under expert parallelism).
"""

import torch
import torch.nn.functional as F
from torch import nn

from .grouped_mm import grouped_mm, grouped_mm_loop, has_grouped_mm


class GroupedExperts(nn.Module):
    """SwiGLU feed-forwards, one per expert: ``w2(silu(w1 x) * w3 x)``.

    ``w1`` and ``w3`` are (E, F, D), ``w2`` is (E, D, F), as in torchtitan's checkpoints.
    """

    def __init__(self, num_experts: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))

    def forward(self, x_RD: torch.Tensor, tokens_per_expert_e: torch.Tensor) -> torch.Tensor:
        """Rows in expert order in, rows in expert order out.

        Args:
            x_RD: the rows of expert 0, then those of expert 1, and so on.
            tokens_per_expert_e: rows of each local expert; zero is fine, for some or for all.
        """
        w1, w2, w3 = (w.transpose(-2, -1) for w in (self.w1, self.w2, self.w3))
        one_kernel = has_grouped_mm(x_RD.device, _dtype_of_products(x_RD), *w1.shape[1:])
        mm = grouped_mm if one_kernel else grouped_mm_loop
        h_RF = F.silu(mm(x_RD, w1, tokens_per_expert_e)) * mm(x_RD, w3, tokens_per_expert_e)
        return mm(h_RF, w2, tokens_per_expert_e)


def _dtype_of_products(x: torch.Tensor) -> torch.dtype:
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return x.dtype
