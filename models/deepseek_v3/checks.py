"""What a configuration must satisfy for this model; runs before any process group exists."""

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from torchtitan_ext.distributed.layer_wrap import resolve_layer_plans
from torchtitan_ext.distributed.save_ops import resolve_save_ops

from .args import DeepSeekV3ModelArgs
from .flavors import FLAVORS


def check_config(job_config: JobConfig, parallel_dims: ParallelDims) -> None:
    """Raises ValueError, as ``[section] key = value: rule``, for what the model can't do."""
    args = FLAVORS[job_config.model.flavor]
    layer_ids = list(range(args.n_layers))
    moe_layer_ids = set(layer_ids[args.n_dense_layers :])
    _check_expert_parallel(args, parallel_dims, has_moe=bool(moe_layer_ids))
    if job_config.debug.moe_force_load_balance and not moe_layer_ids:
        raise ValueError(
            "[debug] moe_force_load_balance = true: has no effect, as the flavor "
            f'"{job_config.model.flavor}" has no MoE layers'
        )
    resolve_layer_plans(job_config, layer_ids, moe_layer_ids)
    resolve_save_ops(job_config.layer_wrap.save_ops)


def _check_expert_parallel(
    args: DeepSeekV3ModelArgs, parallel_dims: ParallelDims, *, has_moe: bool
) -> None:
    ep, num_experts = parallel_dims.ep, args.moe_args.num_experts
    if ep > 1 and not has_moe:
        raise ValueError(
            f"[parallelism] expert_parallel_degree = {ep}: must be 1, as the model has no experts"
        )
    if num_experts % ep != 0:
        raise ValueError(
            f"[parallelism] expert_parallel_degree = {ep}: must divide the model's "
            f"{num_experts} experts"
        )
    efsdp = parallel_dims.dp_shard // ep if ep > 1 else 1
    if efsdp * ep > num_experts and args.moe_inter_dim % efsdp != 0:
        raise ValueError(
            f"[parallelism] data_parallel_shard_degree = {parallel_dims.dp_shard}: with "
            f"expert_parallel_degree = {ep} each expert's {args.moe_inter_dim} rows are shared by "
            f"{efsdp} ranks, which must divide them"
        )
