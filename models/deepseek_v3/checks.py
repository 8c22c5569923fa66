"""What a configuration must satisfy for this model; runs before any process group exists."""

from torchtitan.components.tokenizer import BaseTokenizer, build_hf_tokenizer
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from torchtitan_ext.data.text import check_text
from torchtitan_ext.distributed.checkpoint_policy import SaveOps
from torchtitan_ext.distributed.layer_wrap import resolve_layer_plans

from .args import DeepSeekV3ModelArgs
from .flavors import FLAVORS


def check_config(job_config: JobConfig, parallel_dims: ParallelDims) -> None:
    """Raises ValueError, as ``[section] key = value: rule``, for what the model can't do."""
    args = FLAVORS[job_config.model.flavor]
    layer_ids = list(range(args.n_layers))
    moe_layer_ids = set(layer_ids[args.n_dense_layers :])
    _check_expert_parallel(args, parallel_dims, has_moe=bool(moe_layer_ids))
    _check_keys_of_experts(job_config, has_moe=bool(moe_layer_ids))
    tokenizer = _load_tokenizer(job_config, args)
    check_text(parallel_dims.dp_replicate * parallel_dims.dp_shard, tokenizer, job_config)
    resolve_layer_plans(job_config, layer_ids, moe_layer_ids)
    SaveOps(job_config.layer_wrap.save_ops)


def _check_keys_of_experts(job_config: JobConfig, *, has_moe: bool) -> None:
    if has_moe:
        return
    for key, value in (
        ("[debug] moe_force_load_balance", job_config.debug.moe_force_load_balance),
        ("[metrics] log_experts", job_config.metrics.log_experts),
    ):
        if value:
            flavor = job_config.model.flavor
            raise ValueError(f'{key} = true: has no effect, as flavor "{flavor}" has no experts')


def _load_tokenizer(job_config: JobConfig, args: DeepSeekV3ModelArgs) -> BaseTokenizer:
    key = f'[model] hf_assets_path = "{job_config.model.hf_assets_path}"'
    try:
        tokenizer = build_hf_tokenizer(job_config)
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise ValueError(f"{key}: the tokenizer can't be read: {error}") from error
    num_tokens = tokenizer.get_vocab_size()
    if num_tokens > args.vocab_size:
        raise ValueError(
            f"{key}: the tokenizer has {num_tokens:,} tokens, but the model's vocabulary ends at "
            f"{args.vocab_size:,}"
        )
    return tokenizer


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
