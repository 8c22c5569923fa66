"""Expert parallelism: each rank of the ep axis holds an equal part of every layer's experts.

Tensor parallelism splits experts in addition, along their width, if it is asked to (the etp axis),
and always where there is no ep axis.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torchtitan.tools.logging import logger

from torchtitan_ext.moe import AllToAllDispatcher, moe_layers

from .local_parameters import distribute_parameters
from .mesh import ExtParallelDims

# The dim of each weight that is the experts' width.
_WIDTH_DIM = {"w1": 1, "w2": 2, "w3": 1}


def apply_expert_parallel(model: nn.Module, parallel_dims: ExtParallelDims) -> None:
    """Shards the experts' weights, and sends tokens to them by all-to-all.

    Args:
        model: on the meta device, or with the same weights on every rank.
        parallel_dims: ep divides the number of experts, etp (or tp, if ep is 1) their width.
    """
    mesh = _expert_mesh(parallel_dims)
    if mesh is None:
        return
    axes = mesh.mesh_dim_names
    assert axes is not None
    placements: dict[str, list[Placement]] = {
        name: [Shard(0) if axis == "ep" else Shard(dim) for axis in axes]
        for name, dim in _WIDTH_DIM.items()
    }
    num_layers = 0
    for moe in moe_layers(model):
        assert moe.experts.num_experts % parallel_dims.ep == 0
        distribute_parameters(moe.experts, mesh, placements)
        if parallel_dims.ep_enabled:
            moe.dispatcher = AllToAllDispatcher.for_group(parallel_dims.get_mesh("ep").get_group())
        num_layers += 1
    if num_layers:
        degrees = ", ".join(f"{axis}={mesh.size(i)}" for i, axis in enumerate(axes))
        kind = "expert parallelism" if parallel_dims.ep_enabled else "tensor parallelism of experts"
        logger.info(f"Applied {kind} ({degrees}) to {num_layers} MoE layers")


def _expert_mesh(parallel_dims: ExtParallelDims) -> DeviceMesh | None:
    if not parallel_dims.ep_enabled:
        return parallel_dims.get_optional_mesh("tp")
    return parallel_dims.get_mesh(["ep", "etp"] if parallel_dims.etp_enabled else "ep")
