"""What a configuration must satisfy for this model; runs before any process group exists."""

from torchtitan.config import JobConfig

from torchtitan_ext.data.text import check_text
from torchtitan_ext.distributed.checkpoint_policy import SaveOps
from torchtitan_ext.distributed.layer_wrap import resolve_layer_plans
from torchtitan_ext.distributed.mesh import ExtParallelDims
from torchtitan_ext.distributed.pipeline_checks import check_pipeline
from torchtitan_ext.model_checks import (
    check_keys_of_experts,
    check_routing,
    check_sequence_split,
    check_tensor_parallel,
    load_tokenizer,
)

from .args import DeepSeekV3ModelArgs
from .flavors import FLAVORS


def check_config(job_config: JobConfig, parallel_dims: ExtParallelDims) -> None:
    """Raises ValueError, as ``[section] key = value: rule``, for what the model can't do."""
    args = FLAVORS[job_config.model.flavor]
    layer_ids = list(range(args.n_layers))
    moe_layer_ids = set(layer_ids[args.n_dense_layers :])
    _check_expert_parallel(args, parallel_dims, has_moe=bool(moe_layer_ids))
    _check_validation(job_config, args)
    check_tensor_parallel(parallel_dims, _split_sizes(args, parallel_dims))
    check_sequence_split(job_config, parallel_dims, args.n_heads)
    if moe_layer_ids:
        check_routing(job_config, parallel_dims, args.moe_args, len(moe_layer_ids))
    else:
        check_keys_of_experts(job_config)
    tokenizer = load_tokenizer(job_config, args.vocab_size)
    check_text(parallel_dims.num_data_ranks, tokenizer, job_config)
    layer_plans = resolve_layer_plans(job_config, layer_ids, moe_layer_ids)
    check_pipeline(job_config, parallel_dims, layer_plans)
    SaveOps(job_config.layer_wrap.save_ops)


def _check_expert_parallel(
    args: DeepSeekV3ModelArgs, parallel_dims: ExtParallelDims, *, has_moe: bool
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
    sharded = parallel_dims.dp_shard * parallel_dims.cp * parallel_dims.tp
    efsdp = sharded // (ep * parallel_dims.etp) if ep > 1 else 1
    # With fewer experts than ranks each expert is shared, along its matrices' second dim.
    widths = (args.moe_inter_dim // parallel_dims.etp, args.dim)
    if efsdp * ep > num_experts and any(width % efsdp for width in widths):
        raise ValueError(
            f"[parallelism] expert_parallel_degree = {ep}: each expert is shared by {efsdp} of "
            f"{sharded} ranks, which must divide its widths {widths[0]} and {widths[1]}"
        )


def _check_validation(job_config: JobConfig, args: DeepSeekV3ModelArgs) -> None:
    longest, trained = args.original_seq_len, job_config.training.seq_len
    validation = job_config.validation
    if validation.enable and validation.seq_len > longest >= trained:
        raise ValueError(
            f"[validation] seq_len = {validation.seq_len}: must be at most {longest} with "
            f"[training] seq_len = {trained}: beyond, rotary angles are stretched in training, too"
        )


def _split_sizes(args: DeepSeekV3ModelArgs, parallel_dims: ExtParallelDims) -> dict[str, int]:
    """What tensor parallelism splits."""
    moe = args.moe_args
    sizes = {"attention heads": args.n_heads, "tokens of the vocabulary": args.vocab_size}
    if args.n_dense_layers > 0:
        sizes["channels of a dense feed-forward"] = args.inter_dim
    if args.n_dense_layers < args.n_layers:
        sizes["channels of the shared experts"] = args.moe_inter_dim * moe.num_shared_experts
        if not parallel_dims.tensor_parallel_splits_tokens:
            sizes["channels of an expert"] = args.moe_inter_dim
    return sizes
