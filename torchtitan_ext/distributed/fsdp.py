"""Data parallelism by FSDP2: sharded, hybrid, or replicated parameters.

One ``fully_shard`` call per block gives experts a mesh of their own: expert parallelism has
already split them, so that fewer ranks are left to shard them over. A nested call on the experts
would put hooks inside the block and break its graph.
"""

from collections.abc import Callable

from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)
from torch.distributed.tensor import Shard
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.tools.logging import logger

from torchtitan_ext.device import DEVICE_TYPE
from torchtitan_ext.moe import moe_layers

from .gloo import use_all_to_all_reduce_scatter
from .mesh import ExtParallelDims

ShardPlacementFn = Callable[[nn.Parameter], ShardPlacementResult]


def apply_data_parallel(
    model: nn.Module, parallel_dims: ExtParallelDims, job_config: JobConfig
) -> None:
    """Shards, or replicates, parameters over the data parallel ranks.

    Gradients are summed over ranks, not averaged: the loss is already divided by the number of
    tokens of the whole batch.
    """
    if not parallel_dims.data_parallel_enabled:
        return
    training = job_config.training
    mp_policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        # Hidden states already have the parameters' type; rotary angles have to stay float32.
        cast_forward_inputs=False,
    )
    if parallel_dims.fsdp_enabled:
        reshard = job_config.zero.stage == 3 and gives_up_parameters(job_config)
        offload = CPUOffloadPolicy() if training.enable_cpu_offload else OffloadPolicy()
        _fully_shard(model, parallel_dims, mp_policy, offload, reshard_after_forward=reshard)
    else:
        _replicate(model, parallel_dims.get_mesh("dp_replicate"), mp_policy)
    _sum_gradients(model)


def gives_up_parameters(job_config: JobConfig) -> bool:
    """Whether [parallelism] fsdp_reshard_after_forward lets blocks give parameters up.

    By default, as in torchtitan, not in a pipeline: it would gather them for each micro-batch.
    """
    choice = job_config.parallelism.fsdp_reshard_after_forward
    in_pipeline = job_config.parallelism.pipeline_parallel_degree > 1
    return choice == "always" or (choice == "default" and not in_pipeline)


def _fully_shard(
    model: nn.Module,
    parallel_dims: ExtParallelDims,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    *,
    reshard_after_forward: bool,
) -> None:
    replicated = ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []
    dp_mesh = parallel_dims.get_mesh([*replicated, "fsdp"])
    edp_mesh = parallel_dims.get_mesh([*replicated, "efsdp"]) if parallel_dims.ep_enabled else None

    place = _shard_placement(model, dp_mesh, edp_mesh, parallel_dims.ep)
    shared = {
        "mesh": dp_mesh,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "shard_placement_fn": place,
    }
    blocks, embedding, head = _groups(model)
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **shared)
    for module in embedding:
        fully_shard(module, reshard_after_forward=reshard_after_forward, **shared)
    # The backward starts with the head, and with what the model itself holds: gathering these again
    # right away would be for nothing.
    if head:
        fully_shard(head, reshard_after_forward=False, **shared)
    fully_shard(model, reshard_after_forward=False, **shared)
    experts = f", experts on {_describe(edp_mesh)}" if edp_mesh is not None else ""
    kind = "HSDP" if replicated else "FSDP"
    logger.info(f"Applied {kind} on {_describe(dp_mesh)}{experts} to {len(blocks)} blocks")


def _replicate(model: nn.Module, mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy) -> None:
    blocks, embedding, head = _groups(model)
    for module in [*blocks, *embedding, *head]:
        replicate(module, mesh=mesh, mp_policy=mp_policy)
    replicate(model, mesh=mesh, mp_policy=mp_policy)
    logger.info(f"Applied DDP on {_describe(mesh)} to {len(blocks)} blocks")


def _groups(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module], list[nn.Module]]:
    """The blocks, gathered one by one, then the embedding and the head's modules.

    A head that is tied to the embedding (there is no ``output``) shares a group with it and with
    all other modules: the model's own, which is gathered for the whole forward. A pipeline stage
    has None in place of what other stages hold.
    """
    children = dict(model.named_children())
    blocks = list(children["layers"].children())
    if not hasattr(model, "output"):
        return blocks, [], []
    embedding = [children[name] for name in ("tok_embeddings",) if name in children]
    return blocks, embedding, [children[name] for name in ("norm", "output") if name in children]


def _shard_placement(
    model: nn.Module, dp_mesh: DeviceMesh, edp_mesh: DeviceMesh | None, ep: int
) -> ShardPlacementFn:
    dense = ShardPlacementResult(placement=Shard(0), mesh_info=_mesh_info(dp_mesh))
    if edp_mesh is None:
        return lambda parameter: dense

    edp_mesh_info = _mesh_info(edp_mesh)
    placements: dict[nn.Parameter, ShardPlacementResult] = {}
    for moe in moe_layers(model):
        # With fewer experts than ranks, dim 0 would leave ranks with nothing but padding.
        too_few = edp_mesh_info.shard_mesh_size * ep > moe.experts.num_experts
        expert = ShardPlacementResult(Shard(1 if too_few else 0), edp_mesh_info)
        placements |= dict.fromkeys(moe.experts.parameters(), expert)
    return lambda parameter: placements.get(parameter, dense)


def _mesh_info(mesh: DeviceMesh) -> FSDPMeshInfo:
    if mesh.ndim == 2:
        return HSDPMeshInfo(mesh=mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0)


def _sum_gradients(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no reduction that scales; with a factor of 1 a plain sum is the same.
            module.set_force_sum_reduction_for_comms(True)
            if DEVICE_TYPE == "cpu":
                use_all_to_all_reduce_scatter(module)


def _describe(mesh: DeviceMesh) -> str:
    assert mesh.mesh_dim_names is not None
    return " x ".join(
        f"{name}={size}" for name, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True)
    )
