"""Load balancing without an auxiliary loss (arXiv:2408.15664), from exact counts.

Shapes: L MoE layers, E experts.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_ext.device import DEVICE_TYPE
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
        self._stages = _MoELayersOfStages(model_parts, pp_mesh) if pp_mesh is not None else None
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
        if self._stages is not None:
            total_LE = self._stages.gather(total_LE)
        if total_LE is not None:
            self.last_step_LE = total_LE

    def max_over_mean_L(self) -> list[float]:
        """Each layer's largest load over its mean load, in the last step; 1 is balanced."""
        assert self.last_step_LE is not None, "no step has ended, or the model has no MoE layers"
        load_LE = self.last_step_LE.double()
        return (load_LE.amax(1) / load_LE.mean(1)).tolist()


class _MoELayersOfStages:
    """Which rows of the whole model's counts the stages on this rank have; a collective."""

    def __init__(self, model_parts: list[nn.Module], pp_mesh: DeviceMesh) -> None:
        self._group = pp_mesh.get_group()
        own = [layer for part in model_parts for layer in _numbered_moe_layers(part)]
        ranks: list[list[tuple[int, int]]] = [[] for _ in range(pp_mesh.size())]
        dist.all_gather_object(ranks, own, group=self._group)
        layers = sorted(layer for rank in ranks for layer in rank)
        self._rows = [layers.index(layer) for layer in own]
        self._shape = (len(layers), layers[0][1]) if layers else None

    def gather(self, own_LE: torch.Tensor | None) -> torch.Tensor | None:
        """The counts of all stages in the order of the layers, on every rank."""
        if self._shape is None:
            return None
        all_LE = torch.zeros(self._shape, dtype=torch.int64, device=DEVICE_TYPE)
        if own_LE is not None:
            all_LE[self._rows] = own_LE
        dist.all_reduce(all_LE, group=self._group)
        return all_LE


def _numbered_moe_layers(part: nn.Module) -> list[tuple[int, int]]:
    """The layer's number and its experts, for each MoE layer of ``part.layers``."""
    blocks = part.get_submodule("layers").named_children()
    return [(int(n), moe.router.args.num_experts) for n, b in blocks for moe in moe_layers(b)]


def bias_direction(tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
    """+1 for experts below the mean load, -1 above, 0 on it; compared in exact integers."""
    num_experts = tokens_per_expert_E.shape[0]
    return torch.sign(tokens_per_expert_E.sum() - num_experts * tokens_per_expert_E)
