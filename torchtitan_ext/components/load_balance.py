"""Load balancing without an auxiliary loss (arXiv:2408.15664), from exact counts.

Shapes: L MoE layers, E experts.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_ext.device import DEVICE_TYPE
from torchtitan_ext.distributed.routed_part import MoELayersOfStages
from torchtitan_ext.moe import moe_layers


class ExpertLoad:
    """Tokens per expert over one optimizer step, and the step of the expert biases.

    The trainer adds each micro-batch's counts, as the forward returned them: so a recomputation
    counts nothing twice, and evaluation nothing at all.

    Args:
        model_parts: modules whose MoE layers returned the counts, in the same order.
        meshes: whose ranks count different tokens; none for one process.
        pp_mesh: the ranks that hold the other stages of a pipeline.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        meshes: Sequence[DeviceMesh],
        pp_mesh: DeviceMesh | None = None,
    ) -> None:
        self._moe_layers = [moe for part in model_parts for moe in moe_layers(part)]
        self._meshes = list(meshes)
        self._pp_mesh = pp_mesh
        self._layers = MoELayersOfStages(model_parts, pp_mesh) if pp_mesh is not None else None
        self._sum_LE: torch.Tensor | None = None
        self.last_step_LE: torch.Tensor | None = None
        """Counts of the last finished step over all ranks and stages, int64; None without MoE
        layers.
        """

    def add(self, tokens_per_expert_LE: torch.Tensor) -> None:
        """Adds the counts of one micro-batch of this rank."""
        assert tokens_per_expert_LE.shape[0] == len(self._moe_layers)
        previous = self._sum_LE
        self._sum_LE = tokens_per_expert_LE if previous is None else previous + tokens_per_expert_LE

    @torch.no_grad()
    def finish_step(self) -> None:
        """Sums the counts over ranks, moves the biases, and starts counting anew."""
        total_LE, self._sum_LE = self._sum_LE, None
        if total_LE is not None:
            total_LE = total_LE.clone()
            for mesh in self._meshes:
                dist.all_reduce(total_LE, group=mesh.get_group())
            for moe, tokens_per_expert_E in zip(self._moe_layers, total_LE, strict=True):
                if moe.expert_bias is not None:
                    moe.expert_bias += moe.load_balance_coeff * bias_direction(tokens_per_expert_E)
        if self._layers is not None:
            total_LE = self._gather_stages(self._layers, total_LE)
        if total_LE is not None:
            self.last_step_LE = total_LE

    def _gather_stages(
        self, layers: MoELayersOfStages, own_LE: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The counts of all stages in the order of the layers, on every rank."""
        if layers.args is None:
            return None
        all_LE = torch.zeros(
            (layers.num_layers, layers.args.num_experts), dtype=torch.int64, device=DEVICE_TYPE
        )
        if own_LE is not None:
            all_LE[layers.rows] = own_LE
        assert self._pp_mesh is not None
        dist.all_reduce(all_LE, group=self._pp_mesh.get_group())
        return all_LE

    def max_over_mean_L(self) -> list[float]:
        """Each layer's largest load over its mean load, in the last step; 1 is balanced."""
        assert self.last_step_LE is not None, "no step has ended, or the model has no MoE layers"
        load_LE = self.last_step_LE.double()
        return (load_LE.amax(1) / load_LE.mean(1)).tolist()


def bias_direction(tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
    """+1 for experts below the mean load, -1 above, 0 on it; compared in exact integers."""
    num_experts = tokens_per_expert_E.shape[0]
    return torch.sign(tokens_per_expert_E.sum() - num_experts * tokens_per_expert_E)
