"""Expert parallelism: each rank of the ep axis holds an equal part of every layer's experts."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torchtitan.tools.logging import logger

from torchtitan_ext.moe import AllToAllDispatcher, moe_layers


def apply_expert_parallel(model: nn.Module, ep_mesh: DeviceMesh) -> None:
    """Shards the experts' weights over ``ep_mesh`` and sends tokens to them by all-to-all.

    Args:
        model: on the meta device, or with the same weights on every rank.
        ep_mesh: one-dimensional, named "ep"; its size divides the number of experts.
    """
    num_layers = 0
    for moe in moe_layers(model):
        assert moe.experts.num_experts % ep_mesh.size() == 0
        for name, weight in list(moe.experts.named_parameters()):
            # Every rank has the whole weight: no need to send rank 0's.
            shard = distribute_tensor(weight, ep_mesh, [Shard(0)], src_data_rank=None)
            moe.experts.register_parameter(name, nn.Parameter(shard))
        moe.dispatcher = AllToAllDispatcher.for_group(ep_mesh.get_group())
        num_layers += 1
    logger.info(f"Applied expert parallelism (ep={ep_mesh.size()}) to {num_layers} MoE layers")
