"""Rules that single values and their combinations must keep, checked before any process group."""

import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from torchtitan_ext.config.effects import compiles_layers, recomputes
from torchtitan_ext.config.error import did_you_mean, listed, refusal
from torchtitan_ext.config.sections import RoutingPreset
from torchtitan_ext.config.values import get_value


@dataclass(frozen=True)
class Rule:
    """What a value must be."""

    holds: Callable[[Any], bool]
    text: str
    """How "must be ..." ends."""
    choices: tuple[str, ...] = ()
    """The valid names, to find the one that was meant."""


_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")
_NEEDS_ACCELERATOR = (
    "profiling.enable_memory_snapshot",
    "training.dataloader.pin_memory",
    "training.enable_cpu_offload",
    "validation.dataloader.pin_memory",
)


def _at_least(least: int) -> Rule:
    return Rule(lambda value: value is None or value >= least, f"at least {least}")


def _minus_one_or_at_least(least: int) -> Rule:
    return Rule(lambda value: value == -1 or value >= least, f"-1 or at least {least}")


def _one_of(*choices: str) -> Rule:
    return Rule(lambda value: value in choices, f"one of {', '.join(choices)}", choices)


def _all_of(*choices: str) -> Rule:
    return Rule(lambda values: set(values) <= set(choices), f"a list of {', '.join(choices)}")


_POSITIVE = Rule(lambda value: 0 < value < math.inf, "greater than 0")
_NOT_NEGATIVE = Rule(lambda value: 0 <= value < math.inf, "at least 0")
_FRACTION = Rule(lambda value: value is None or 0 <= value <= 1, "between 0 and 1")
_DECAY = Rule(lambda value: 0 <= value < 1, "at least 0 and below 1")
_NOT_EMPTY = Rule(lambda value: value != "", "a name, not empty")

RULES: dict[str, Rule] = {
    "job.dump_folder": _NOT_EMPTY,
    "profiling.profile_freq": _at_least(1),
    "profiling.profiler_active": _at_least(1),
    "profiling.profiler_warmup": _at_least(0),
    "metrics.log_freq": _at_least(1),
    "model.converters": _all_of(
        "quantize.linear.float8",
        "quantize.linear.mx",
        "quantize.grouped_mm.float8",
        "quantize.grouped_mm.mx",
    ),
    "optimizer.name": _one_of("Adam", "AdamW", "SGD"),
    "optimizer.lr": _POSITIVE,
    "optimizer.beta1": _DECAY,
    "optimizer.beta2": _DECAY,
    "optimizer.eps": _NOT_NEGATIVE,
    "optimizer.weight_decay": _NOT_NEGATIVE,
    "lr_scheduler.warmup_steps": _at_least(0),
    "lr_scheduler.total_steps": _at_least(1),
    "lr_scheduler.decay_ratio": _FRACTION,
    "lr_scheduler.min_lr_factor": _FRACTION,
    "training.local_batch_size": _at_least(1),
    "training.global_batch_size": _minus_one_or_at_least(1),
    "training.seq_len": _at_least(1),
    # Infinity is a way to log the norm and clip nothing.
    "training.max_norm": Rule(lambda value: value > 0, "greater than 0"),
    "training.steps": _at_least(1),
    "training.gc_freq": _at_least(1),
    "training.dataloader.num_workers": _at_least(0),
    "training.dataloader.prefetch_factor": _at_least(1),
    "parallelism.data_parallel_replicate_degree": _at_least(1),
    "parallelism.data_parallel_shard_degree": _minus_one_or_at_least(1),
    "parallelism.tensor_parallel_degree": _at_least(1),
    "parallelism.pipeline_parallel_degree": _at_least(1),
    "parallelism.pipeline_parallel_schedule": _one_of(
        *("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"),
        *("ZBVZeroBubble", "PipelineScheduleSingle", "PipelineScheduleMulti"),
    ),
    "parallelism.pipeline_parallel_microbatch_size": _at_least(1),
    "parallelism.pipeline_parallel_layers_per_stage": _at_least(1),
    "parallelism.pipeline_parallel_first_stage_less_layers": _at_least(0),
    "parallelism.pipeline_parallel_last_stage_less_layers": _at_least(0),
    "parallelism.context_parallel_degree": _at_least(1),
    "parallelism.context_parallel_load_balancer": Rule(
        lambda value: value == "headtail",
        "headtail: the other balancers belong to attention kernels that are not used here",
    ),
    "parallelism.expert_parallel_degree": _at_least(1),
    "parallelism.expert_tensor_parallel_degree": _at_least(1),
    "checkpoint.folder": _NOT_EMPTY,
    "checkpoint.interval": _at_least(1),
    "checkpoint.load_step": _minus_one_or_at_least(0),
    "checkpoint.keep_latest_k": Rule(
        lambda value: value == 0 or value > 1,
        "0 (keep all) or at least 2: the latest may still be being written",
    ),
    "checkpoint.exclude_from_loading": _all_of(
        "model", "optimizer", "lr_scheduler", "dataloader", "train_state"
    ),
    "activation_checkpoint.mode": Rule(
        lambda value: value != "memory_budget",
        "none, selective or full: with a memory budget the compiler picks what is recomputed, "
        "and nothing pins its random numbers",
    ),
    "activation_checkpoint.selective_ac_option": Rule(
        lambda value: value == "op" or (value.isdecimal() and int(value) > 0),
        '"op", or a positive integer n to checkpoint every n-th layer',
    ),
    "activation_checkpoint.determinism_check": _one_of("default", "none"),
    "compile.backend": _one_of("inductor", "aot_eager", "eager"),
    "compile.components": _all_of("model", "loss"),
    "comm.init_timeout_seconds": _at_least(1),
    "comm.train_timeout_seconds": _at_least(1),
    "comm.trace_buf_size": _at_least(0),
    "comm.mode": Rule(
        lambda value: value != "local_tensor",
        "default or fake_backend: local_tensor does not train",
    ),
    "experimental.custom_import": _NOT_EMPTY,
    "validation.local_batch_size": _at_least(1),
    "validation.seq_len": _at_least(1),
    "validation.freq": _at_least(1),
    "validation.steps": _minus_one_or_at_least(1),
    "validation.dataloader.num_workers": _at_least(0),
    "validation.dataloader.prefetch_factor": _at_least(1),
    "zero.stage": Rule(lambda value: value in (1, 2, 3), "1, 2 or 3"),
    "routing.preset": _one_of(*get_args(RoutingPreset)),
    "mlm.mask_probability": Rule(lambda value: 0 < value < 1, "greater than 0 and below 1"),
    "dropout.embedding": _DECAY,
    "dropout.attention": _DECAY,
    "dropout.residual": _DECAY,
    "debug.seed": Rule(
        lambda value: value is None or 0 <= value < 2**63, "at least 0 and below 2**63"
    ),
}
"""The rule of each key whose type allows more than its meaning does."""


def check_values(values: dict[str, Any]) -> None:
    """Check each value (by dotted key) against its rule in ``RULES``.

    Raises ConfigError.
    """
    for key, value in values.items():
        rule = RULES.get(key)
        if rule is not None and not rule.holds(value):
            raise refusal(key, value, f"must be {rule.text}{did_you_mean(value, rule.choices)}")


def check_combinations(config: Any) -> None:
    """Check what two keys demand of each other.

    Raises ConfigError.
    """
    profiling, checkpoint = config.profiling, config.checkpoint
    least = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < least:
        raise refusal(
            "profiling.profile_freq",
            profiling.profile_freq,
            f"must be at least profiler_warmup + profiler_active = {least}",
        )
    if config.compile.backend == "eager" and compiles_layers(config) and recomputes(config):
        raise refusal(
            "compile.backend",
            "eager",
            "must be inductor or aot_eager where layers are recomputed: this backend loses the "
            "random state of the forward, and gradients with dropout are wrong",
        )
    _check_routing(config)
    scheduler, steps = config.lr_scheduler, config.training.steps
    decays = scheduler.decay_ratio is None or scheduler.decay_ratio > 0
    if scheduler.total_steps is not None and scheduler.total_steps < steps and decays:
        raise refusal(
            "lr_scheduler.total_steps",
            scheduler.total_steps,
            f"must be at least [training] steps = {steps}: the decay has ended by then",
        )
    reshard = config.parallelism.fsdp_reshard_after_forward
    if config.zero.stage != 3 and reshard != "default":
        raise refusal(
            "parallelism.fsdp_reshard_after_forward",
            reshard,
            f"must be left out with [zero] stage = {config.zero.stage}, which says the same",
        )
    loads_from_hf = checkpoint.enable and checkpoint.initial_load_in_hf
    if loads_from_hf and not checkpoint.initial_load_model_only:
        raise refusal(
            "checkpoint.initial_load_model_only",
            False,
            "must be true with initial_load_in_hf: safetensors hold the model alone",
        )


def _check_routing(config: Any) -> None:
    routing = config.routing
    if routing.preset != "none" and routing.replay is not None:
        raise refusal("routing.preset", routing.preset, "must be none with [routing] replay")
    if routing.record and routing.replay is not None:
        own, replayed = (Path(p).resolve() for p in (config.job.dump_folder, routing.replay))
        if own == replayed:
            raise refusal(
                "routing.replay",
                routing.replay,
                "is this run's own dump folder, whose record [routing] record would write anew",
            )
    if config.debug.moe_force_load_balance and (routing.preset != "none" or routing.replay):
        raise refusal(
            "debug.moe_force_load_balance",
            True,
            'is another name of preset = "balanced": must be false with a preset or a replay',
        )


def check_device(config: Any, device_type: str) -> None:
    """Refuse on a CPU what only works on an accelerator.

    Raises ConfigError.
    """
    if device_type != "cpu":
        return
    for key in _NEEDS_ACCELERATOR:
        if get_value(config, key):
            raise refusal(key, True, "needs an accelerator, and this machine has none")
    if config.checkpoint.enable and config.checkpoint.async_mode == "async_with_pinned_mem":
        raise refusal(
            "checkpoint.async_mode",
            config.checkpoint.async_mode,
            'needs an accelerator for its pinned memory; use "async"',
        )


def check_installed(config: Any) -> None:
    """Refuse what needs an optional package that is not installed.

    Raises ConfigError.
    """
    if config.metrics.enable_wandb and not _is_installed("wandb"):
        raise refusal("metrics.enable_wandb", True, "needs the package wandb (pip install wandb)")


def check_folders(config: Any) -> None:
    """Check the folders that a run writes to, and the one it starts from.

    Raises ConfigError.
    """
    dump_folder = Path(config.job.dump_folder)
    there = next(p for p in (dump_folder, *dump_folder.absolute().parents) if p.exists())
    if not there.is_dir():
        raise refusal("job.dump_folder", config.job.dump_folder, "is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise refusal("job.dump_folder", config.job.dump_folder, f"{there} can't be written to")
    checkpoint = config.checkpoint
    # The run's own checkpoints come first, so an initial one may be gone when a run is resumed.
    initial_path = checkpoint.initial_load_path
    starts = checkpoint.enable and not (dump_folder / checkpoint.folder).exists()
    if not starts:
        return
    if initial_path and not Path(initial_path).is_dir():
        raise refusal("checkpoint.initial_load_path", initial_path, "no such folder")
    if checkpoint.initial_load_in_hf:
        folder = Path(initial_path or config.model.hf_assets_path)
        if not any(folder.glob("*.safetensors")):
            raise refusal("checkpoint.initial_load_in_hf", True, f"no .safetensors in {folder}")
    elif initial_path and not (Path(initial_path) / ".metadata").is_file():
        raise refusal(
            "checkpoint.initial_load_path",
            initial_path,
            "holds no checkpoint: a complete one has a file .metadata; name a folder step-N",
        )


def check_tokenizer(hf_assets_path: str) -> None:
    """Check that ``model.hf_assets_path`` is a folder with a tokenizer that torchtitan can read.

    Raises ConfigError.
    """
    folder = Path(hf_assets_path)
    if not folder.is_dir():
        raise refusal("model.hf_assets_path", hf_assets_path, "no such folder")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise refusal(
            "model.hf_assets_path",
            hf_assets_path,
            f"has no tokenizer: needs {listed(_TOKENIZER_FILES)}",
        )


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
