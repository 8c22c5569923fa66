"""Checks of a configuration that the models share; see ExtTrainSpec.check_config."""

from torchtitan.components.tokenizer import BaseTokenizer, build_hf_tokenizer
from torchtitan.config import JobConfig


def load_tokenizer(job_config: JobConfig, vocab_size: int) -> BaseTokenizer:
    """Builds the run's tokenizer, whose ids have to be in the model's vocabulary.

    Raises ValueError.
    """
    key = f'[model] hf_assets_path = "{job_config.model.hf_assets_path}"'
    try:
        tokenizer = build_hf_tokenizer(job_config)
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise ValueError(f"{key}: the tokenizer can't be read: {error}") from error
    num_tokens = tokenizer.get_vocab_size()
    if num_tokens > vocab_size:
        raise ValueError(
            f"{key}: the tokenizer has {num_tokens:,} tokens, but the model's vocabulary ends at "
            f"{vocab_size:,}"
        )
    return tokenizer


def check_keys_of_experts(job_config: JobConfig) -> None:
    """Raises ValueError for a key that has no effect on a model without experts."""
    for key, value in (
        ("[debug] moe_force_load_balance", job_config.debug.moe_force_load_balance),
        ("[metrics] log_experts", job_config.metrics.log_experts),
    ):
        if value:
            flavor = job_config.model.flavor
            raise ValueError(f'{key} = true: has no effect, as flavor "{flavor}" has no experts')
