"""Checks of a configuration that the models share; see ExtTrainSpec.check_config."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from torchtitan.components.tokenizer import BaseTokenizer, build_hf_tokenizer
from torchtitan.config import JobConfig

from torchtitan_ext.components.routing import FOLDER, read_shape, recorded_steps, shape_of
from torchtitan_ext.config.error import as_toml
from torchtitan_ext.config.resume import resumes_after
from torchtitan_ext.data.dataset import sections_with_data
from torchtitan_ext.distributed.mesh import ExtParallelDims
from torchtitan_ext.moe import MoEArgs
from torchtitan_ext.moe.presets import check_preset


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
    routing = job_config.routing
    for key, value, default in (
        ("[debug] moe_force_load_balance", job_config.debug.moe_force_load_balance, False),
        ("[metrics] log_experts", job_config.metrics.log_experts, False),
        ("[routing] record", routing.record, False),
        ("[routing] replay", routing.replay, None),
        ("[routing] preset", routing.preset, "none"),
    ):
        if value != default:
            flavor = job_config.model.flavor
            raise ValueError(
                f'{key} = {as_toml(value)}: has no effect, as flavor "{flavor}" has no experts'
            )


def check_tensor_parallel(parallel_dims: ExtParallelDims, sizes: Mapping[str, int]) -> None:
    """Checks that what tensor parallelism splits comes apart evenly. Raises ValueError.

    Args:
        sizes: what each rank gets an equal part of, by its name.
    """
    tp = parallel_dims.tp
    for name, size in sizes.items():
        if size % tp:
            raise ValueError(
                f"[parallelism] tensor_parallel_degree = {tp}: must divide the model's "
                f"{size} {name}"
            )


def check_sequence_split(
    job_config: JobConfig, parallel_dims: ExtParallelDims, num_heads: int
) -> None:
    """Checks that context and tensor parallelism can split sequences. Raises ValueError."""
    tp, cp = parallel_dims.tp, parallel_dims.cp
    for name, section in sections_with_data(job_config).items():
        if cp > 1 and section.seq_len % (2 * cp):
            raise ValueError(
                f"[{name}] seq_len = {section.seq_len}: must be a multiple of {2 * cp} with "
                f"context_parallel_degree = {cp}: a rank has two equal chunks of a sequence"
            )
        if parallel_dims.pp > 1 and section.seq_len % (cp * tp):
            raise ValueError(
                f"[{name}] seq_len = {section.seq_len}: must be a multiple of {cp * tp} with "
                f"pipeline_parallel_degree = {parallel_dims.pp}: a later stage takes each rank's "
                "part for as long as its own"
            )
        if section.seq_len // cp < tp:
            raise ValueError(
                f"[{name}] seq_len = {section.seq_len}: must be at least {tp * cp}, a token for "
                "each rank of tensor and context parallelism"
            )
    method = job_config.parallelism.context_parallel_rotate_method
    if cp > 1 and method == "alltoall" and num_heads // tp % cp:
        raise ValueError(
            f'[parallelism] context_parallel_rotate_method = "alltoall": context_parallel_degree '
            f"= {cp} must divide the {num_heads // tp} heads of a rank; allgather needs no such "
            "thing"
        )


def check_routing(
    job_config: JobConfig, parallel_dims: ExtParallelDims, args: MoEArgs, moe_layers: int
) -> None:
    """Checks that expert ids which no router chose fit the model. Raises ValueError."""
    preset = job_config.routing.preset
    if preset != "none":
        try:
            check_preset(
                preset, num_experts=args.num_experts, top_k=args.top_k, num_ranks=parallel_dims.ep
            )
        except ValueError as error:
            raise ValueError(f'[routing] preset = "{preset}": {error}') from None
    if job_config.routing.replay is not None:
        try:
            _check_record(job_config, parallel_dims, args, moe_layers)
        except ValueError as error:
            raise ValueError(f'[routing] replay = "{job_config.routing.replay}": {error}') from None


def _check_record(
    job_config: JobConfig, parallel_dims: ExtParallelDims, args: MoEArgs, moe_layers: int
) -> None:
    folder = Path(job_config.routing.replay) / FOLDER
    recorded = asdict(read_shape(folder))
    shape = shape_of(job_config, parallel_dims.num_data_ranks, args, moe_layers)
    for name, value in asdict(shape).items():
        if recorded[name] != value:
            raise ValueError(
                f"was recorded with {name} = {recorded[name]}, and this run has {value}"
            )
    steps = recorded_steps(folder, recorded["global_batch_size"])
    first = resumes_after(job_config) + 1
    missing = set(range(first, job_config.training.steps + 1)) - set(steps)
    if missing:
        raise ValueError(
            f"step {min(missing)} was not recorded, or not all of it (steps "
            f"{min(steps, default=0)} to {max(steps, default=0)} were)"
        )
