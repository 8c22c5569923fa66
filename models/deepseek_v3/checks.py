"""What a configuration must satisfy for this model; runs before any process group exists."""

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from torchtitan_ext.data.text import check_text
from torchtitan_ext.distributed.checkpoint_policy import SaveOps
from torchtitan_ext.distributed.layer_wrap import resolve_layer_plans
from torchtitan_ext.model_checks import check_keys_of_experts, check_routing, load_tokenizer

from .args import DeepSeekV3ModelArgs
from .flavors import FLAVORS


def check_config(job_config: JobConfig, parallel_dims: ParallelDims) -> None:
    """Raises ValueError, as ``[section] key = value: rule``, for what the model can't do."""
    args = FLAVORS[job_config.model.flavor]
    layer_ids = list(range(args.n_layers))
    moe_layer_ids = set(layer_ids[args.n_dense_layers :])
    _check_expert_parallel(args, parallel_dims, has_moe=bool(moe_layer_ids))
    if moe_layer_ids:
        check_routing(job_config, parallel_dims, args.moe_args, len(moe_layer_ids))
    else:
        check_keys_of_experts(job_config)
    tokenizer = load_tokenizer(job_config, args.vocab_size)
    check_text(parallel_dims.dp_replicate * parallel_dims.dp_shard, tokenizer, job_config)
    resolve_layer_plans(job_config, layer_ids, moe_layer_ids)
    SaveOps(job_config.layer_wrap.save_ops)


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
    # With fewer experts than ranks each expert is shared, along its matrices' second dim.
    widths = (args.moe_inter_dim, args.dim)
    if efsdp * ep > num_experts and any(width % efsdp for width in widths):
        raise ValueError(
            f"[parallelism] data_parallel_shard_degree = {parallel_dims.dp_shard}: with "
            f"expert_parallel_degree = {ep} an expert is shared by {efsdp} ranks, which must "
            f"divide its widths {widths[0]} and {widths[1]}"
        )
