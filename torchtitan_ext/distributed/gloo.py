"""A reduce-scatter for gloo, which has none: it all-reduces the whole input and keeps a part.

An all-to-all of the parts and a local sum move half the bytes, in half the processor time (docs/
performance.md).
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter


class AllToAllReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter, as an all-to-all and a sum in rank order."""

    def __call__(  # type: ignore[override]
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM and not async_op, (op, async_op)
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        first, *others = received.view(group.size(), -1)
        output_tensor.copy_(first)
        for part in others:
            output_tensor.add_(part)


def use_all_to_all_reduce_scatter(module: FSDPModule) -> None:
    """Makes ``module`` reduce its gradients by :class:`AllToAllReduceScatter`."""
    # FSDP2's setter refuses a module with a mesh per parameter, as one communication object may
    # not fit all its groups. This one has no group of its own, and fits.
    for group in module._get_fsdp_state()._fsdp_param_groups:
        group._reduce_scatter_comm = AllToAllReduceScatter()
