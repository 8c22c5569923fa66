"""What a configuration must satisfy for this model; runs before any process group exists."""

from torchtitan.config import JobConfig

from torchtitan_ext.data.dataset import sections_with_data
from torchtitan_ext.data.masked_lm import check_masked_lm
from torchtitan_ext.distributed.checkpoint_policy import SaveOps
from torchtitan_ext.distributed.layer_wrap import resolve_layer_plans
from torchtitan_ext.distributed.mesh import ExtParallelDims
from torchtitan_ext.model_checks import (
    check_keys_of_experts,
    check_sequence_split,
    check_tensor_parallel,
    load_tokenizer,
)

from .args import BertModelArgs
from .flavors import FLAVORS


def check_config(job_config: JobConfig, parallel_dims: ExtParallelDims) -> None:
    """Raises ValueError, as ``[section] key = value: rule``, for what the model can't do."""
    args = FLAVORS[job_config.model.flavor]
    sizes = {
        "attention heads": args.n_heads,
        "channels of a feed-forward": args.hidden_dim,
        "tokens of the vocabulary": args.vocab_size,
    }
    check_tensor_parallel(parallel_dims, sizes)
    check_sequence_split(job_config, parallel_dims, args.n_heads)
    check_keys_of_experts(job_config)
    _check_seq_len(job_config, args)
    tokenizer = load_tokenizer(job_config, args.vocab_size)
    check_masked_lm(parallel_dims.num_data_ranks, tokenizer, job_config)
    resolve_layer_plans(job_config, list(range(args.n_layers)), set())
    SaveOps(job_config.layer_wrap.save_ops)


def _check_seq_len(job_config: JobConfig, args: BertModelArgs) -> None:
    for name, section in sections_with_data(job_config).items():
        if section.seq_len > args.max_seq_len:
            raise ValueError(
                f"[{name}] seq_len = {section.seq_len}: must be at most {args.max_seq_len}, the "
                f'number of positions that flavor "{job_config.model.flavor}" has'
            )
