"""Which keys a run reads: always, only behind a switch, only with some models, or never (then only
the default is legal).

The four tables hold every key of the merged config, each once. With them an option that would be
ignored is an error, in place of a run that silently isn't what its author thinks it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan_ext.config.error import refusal
from torchtitan_ext.config.values import Settings, get_value


@dataclass(frozen=True)
class Switch:
    """A condition under which keys are read."""

    keys: tuple[str, ...]
    """The keys by which a user turns it on or off."""

    is_on: Callable[[Any], bool]
    """Its state in a config."""

    off: str
    """Its off state, as the end of "has no effect ..."."""


def _flag(key: str) -> Switch:
    return Switch((key,), lambda c: get_value(c, key), f"while {key} is false")


def _degree(key: str) -> Switch:
    return Switch((key,), lambda c: get_value(c, key) > 1, f"while {key} is 1")


def _workers(section: str) -> Switch:
    key = f"{section}.num_workers"
    return Switch((key,), lambda c: get_value(c, key) > 0, f"while {key} is 0")


def _converter(name: str) -> Switch:
    key = "model.converters"
    return Switch((key,), lambda c: name in get_value(c, key), f'unless {key} has "{name}"')


def has_checkpoint_policy(config: Any, *policies: str) -> bool:
    """Whether some rule of [[layer_wrap.rules]] uses one of these checkpoint policies."""
    return any(rule.checkpoint in policies for rule in config.layer_wrap.rules)


def recomputes(config: Any) -> bool:
    """Whether some layer may be recomputed in the backward."""
    mode = config.activation_checkpoint.mode
    return mode != "none" or has_checkpoint_policy(config, "full", "op")


def compiles_layers(config: Any) -> bool:
    """Whether some layer may be compiled."""
    return config.compile.enable or any(rule.compile for rule in config.layer_wrap.rules)


_PROFILING = _flag("profiling.enable_profiling")
_SNAPSHOT = _flag("profiling.enable_memory_snapshot")
_PROFILING_OR_SNAPSHOT = Switch(
    keys=("profiling.enable_profiling", "profiling.enable_memory_snapshot"),
    is_on=lambda c: c.profiling.enable_profiling or c.profiling.enable_memory_snapshot,
    off="while profiling.enable_profiling is false",
)
_METRICS_FILES = Switch(
    keys=("metrics.enable_tensorboard", "metrics.enable_wandb"),
    is_on=lambda c: c.metrics.enable_tensorboard or c.metrics.enable_wandb,
    off="while metrics.enable_tensorboard and metrics.enable_wandb are false",
)
_ADAM = Switch(
    keys=("optimizer.name",),
    is_on=lambda c: c.optimizer.name in ("Adam", "AdamW"),
    off="unless optimizer.name is Adam or AdamW",
)
_LR_DECAY = Switch(
    keys=("lr_scheduler.decay_ratio",),
    is_on=lambda c: c.lr_scheduler.decay_ratio != 0.0,
    off="while lr_scheduler.decay_ratio is 0",
)
_NO_GC_DEBUG = Switch(
    keys=("training.gc_debug",),
    is_on=lambda c: not c.training.gc_debug,
    off="while training.gc_debug is true: it collects at every step",
)
_TP = _degree("parallelism.tensor_parallel_degree")
_PP = _degree("parallelism.pipeline_parallel_degree")
_CP = _degree("parallelism.context_parallel_degree")
_CHECKPOINT = _flag("checkpoint.enable")
_CHECKPOINT_SAVES = Switch(
    keys=("checkpoint.load_only",),
    is_on=lambda c: not c.checkpoint.load_only,
    off="while checkpoint.load_only is true",
)
_INITIAL_LOAD = Switch(
    keys=("checkpoint.initial_load_path", "checkpoint.initial_load_in_hf"),
    is_on=lambda c: bool(c.checkpoint.initial_load_path or c.checkpoint.initial_load_in_hf),
    off="unless checkpoint.initial_load_path or checkpoint.initial_load_in_hf is set",
)
_INITIAL_LOAD_IN_HF = _flag("checkpoint.initial_load_in_hf")
_LAST_SAVE_MODEL_ONLY = _flag("checkpoint.last_save_model_only")
_RECOMPUTES = Switch(
    keys=("activation_checkpoint.mode",), is_on=recomputes, off="while no layer is recomputed"
)
_SELECTIVE = Switch(
    keys=("activation_checkpoint.mode",),
    is_on=lambda c: c.activation_checkpoint.mode == "selective",
    off='unless activation_checkpoint.mode is "selective"',
)
_SELECTIVE_OR_OP_RULE = Switch(
    keys=("activation_checkpoint.mode",),
    is_on=lambda c: _SELECTIVE.is_on(c) or has_checkpoint_policy(c, "op"),
    off='while no layer uses "op" checkpointing',
)
_OP_OPTION_OR_RULE = Switch(
    keys=("activation_checkpoint.selective_ac_option",),
    is_on=lambda c: (
        c.activation_checkpoint.selective_ac_option == "op" or has_checkpoint_policy(c, "op")
    ),
    off='while no layer uses "op" checkpointing',
)
_MEMORY_BUDGET = Switch(
    keys=("activation_checkpoint.mode",),
    is_on=lambda c: False,
    off="as memory budgets are not supported (see activation_checkpoint.mode)",
)
_COMPILE = _flag("compile.enable")
_COMPILES_LAYERS = Switch(
    keys=("compile.enable",), is_on=compiles_layers, off="while nothing is compiled"
)
_INDUCTOR = Switch(
    keys=("compile.backend",),
    is_on=lambda c: c.compile.backend == "inductor",
    off='unless compile.backend is "inductor"',
)
_PACKS = Switch(
    keys=("mlm.next_sentence",),
    is_on=lambda c: not c.mlm.next_sentence,
    off="while mlm.next_sentence is true: pairs are not packed",
)
_REAL_COMM = Switch(
    keys=("comm.mode",),
    is_on=lambda c: c.comm.mode == "default",
    off='unless comm.mode is "default"',
)
_FLIGHT_RECORDER = Switch(
    keys=("comm.trace_buf_size",),
    is_on=lambda c: c.comm.trace_buf_size > 0,
    off="while comm.trace_buf_size is 0",
)
_MEMORY_ESTIMATION = _flag("memory_estimation.enable")
_FAULT_TOLERANCE = _flag("fault_tolerance.enable")
_VALIDATION = _flag("validation.enable")
_DETERMINISTIC = _flag("debug.deterministic")


def _keys(section: str, names: str) -> list[str]:
    return [f"{section}.{name}" for name in names.split()]


ALWAYS_READ: frozenset[str] = frozenset(
    _keys("job", "config_file dump_folder description print_config save_config_file")
    + _keys("job", "custom_config_module")
    + _keys("profiling", "enable_profiling enable_memory_snapshot")
    + _keys("metrics", "log_freq enable_tensorboard enable_wandb disable_color_printing")
    + _keys("metrics", "log_experts")
    + _keys("model", "name flavor hf_assets_path print_after_conversion")
    + _keys("optimizer", "name lr weight_decay implementation")
    + _keys("lr_scheduler", "warmup_steps total_steps decay_ratio")
    + _keys("training", "dataset dataset_path local_batch_size global_batch_size seq_len steps")
    + _keys("training", "max_norm dtype gc_debug enable_cpu_offload")
    + _keys("training", "mixed_precision_param mixed_precision_reduce")
    + _keys("training.dataloader", "num_workers pin_memory")
    + _keys("parallelism", "data_parallel_replicate_degree data_parallel_shard_degree")
    + _keys("parallelism", "fsdp_reshard_after_forward expert_parallel_degree")
    + _keys("parallelism", "tensor_parallel_degree expert_tensor_parallel_degree")
    + _keys("parallelism", "context_parallel_degree pipeline_parallel_degree")
    + _keys("checkpoint", "enable")
    + _keys("activation_checkpoint", "mode")
    + _keys("compile", "enable")
    + _keys("comm", "mode")
    + _keys("experimental", "custom_import")
    + _keys("validation", "enable")
    + _keys("debug", "seed deterministic moe_force_load_balance")
    + _keys("layer_wrap", "rules")
    + _keys("zero", "stage")
)

GOVERNED: dict[str, tuple[Switch, ...]] = {
    key: switches
    for switches, keys in (
        ((_PROFILING,), _keys("profiling", "save_traces_folder profiler_active profiler_warmup")),
        ((_PROFILING_OR_SNAPSHOT,), _keys("profiling", "profile_freq")),
        ((_SNAPSHOT,), _keys("profiling", "save_memory_snapshot_folder")),
        ((_METRICS_FILES,), _keys("metrics", "save_tb_folder save_for_all_ranks")),
        ((_ADAM,), _keys("optimizer", "beta1 beta2 eps")),
        ((_LR_DECAY,), _keys("lr_scheduler", "decay_type min_lr_factor")),
        ((_NO_GC_DEBUG,), _keys("training", "gc_freq")),
        (
            (_workers("training.dataloader"),),
            _keys("training.dataloader", "persistent_workers prefetch_factor"),
        ),
        ((_TP,), _keys("parallelism", "disable_loss_parallel")),
        (
            (_PP,),
            _keys("parallelism", "module_fqns_per_model_part")
            + _keys("parallelism", "pipeline_parallel_first_stage_less_layers")
            + _keys("parallelism", "pipeline_parallel_last_stage_less_layers")
            + _keys("parallelism", "pipeline_parallel_layers_per_stage")
            + _keys("parallelism", "pipeline_parallel_schedule pipeline_parallel_schedule_csv")
            + _keys("parallelism", "pipeline_parallel_microbatch_size"),
        ),
        (
            (_CP,),
            _keys("parallelism", "context_parallel_load_balancer context_parallel_rotate_method"),
        ),
        (
            (_CHECKPOINT,),
            _keys("checkpoint", "folder load_step load_only exclude_from_loading")
            + _keys("checkpoint", "initial_load_path initial_load_in_hf"),
        ),
        ((_CHECKPOINT, _INITIAL_LOAD), _keys("checkpoint", "initial_load_model_only")),
        ((_CHECKPOINT, _INITIAL_LOAD_IN_HF), _keys("checkpoint", "initial_load_in_hf_quantized")),
        (
            (_CHECKPOINT, _CHECKPOINT_SAVES),
            _keys("checkpoint", "interval keep_latest_k async_mode create_seed_checkpoint")
            + _keys("checkpoint", "last_save_model_only enable_first_step_checkpoint"),
        ),
        (
            (_CHECKPOINT, _CHECKPOINT_SAVES, _LAST_SAVE_MODEL_ONLY),
            _keys("checkpoint", "last_save_in_hf export_dtype"),
        ),
        (
            (_CHECKPOINT, _FAULT_TOLERANCE),
            _keys("checkpoint", "enable_ft_dataloader_checkpoints"),
        ),
        ((_SELECTIVE,), _keys("activation_checkpoint", "selective_ac_option")),
        (
            (_SELECTIVE_OR_OP_RULE, _OP_OPTION_OR_RULE),
            _keys("activation_checkpoint", "per_op_sac_force_recompute_mm_shapes_by_fqns")
            + _keys("layer_wrap", "save_ops"),
        ),
        (
            (_RECOMPUTES,),
            _keys("activation_checkpoint", "early_stop determinism_check"),
        ),
        (
            (_MEMORY_BUDGET,),
            _keys("activation_checkpoint", "memory_budget visualize_memory_budget_pareto"),
        ),
        ((_COMPILE,), _keys("compile", "components")),
        ((_COMPILES_LAYERS,), _keys("compile", "backend")),
        ((_COMPILES_LAYERS, _INDUCTOR), _keys("layer_wrap", "match_eager_rng")),
        ((_PACKS,), _keys("mlm", "packing")),
        (
            (_converter("quantize.linear.float8"),),
            _keys("quantize.linear.float8", "enable_fsdp_float8_all_gather recipe_name emulate")
            + _keys("quantize.linear.float8", "precompute_float8_dynamic_scale_for_fsdp")
            + _keys("quantize.linear.float8", "filter_fqns"),
        ),
        (
            (_converter("quantize.linear.mx"),),
            _keys("quantize.linear.mx", "mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns"),
        ),
        ((_converter("quantize.grouped_mm.float8"),), _keys("quantize.grouped_mm.float8", "fqns")),
        (
            (_converter("quantize.grouped_mm.mx"),),
            _keys("quantize.grouped_mm.mx", "recipe_name fqns"),
        ),
        ((_REAL_COMM,), _keys("comm", "init_timeout_seconds train_timeout_seconds trace_buf_size")),
        (
            (_REAL_COMM, _FLIGHT_RECORDER),
            _keys("comm", "save_traces_folder save_traces_file_prefix"),
        ),
        ((_MEMORY_ESTIMATION,), _keys("memory_estimation", "disable_fake_mode")),
        (
            (_FAULT_TOLERANCE,),
            _keys("fault_tolerance", "process_group process_group_timeout_ms replica_id")
            + _keys("fault_tolerance", "group_size min_replica_size semi_sync_method"),
        ),
        (
            (_VALIDATION,),
            _keys("validation", "dataset dataset_path local_batch_size seq_len freq steps")
            + _keys("validation.dataloader", "num_workers pin_memory"),
        ),
        (
            (_VALIDATION, _workers("validation.dataloader")),
            _keys("validation.dataloader", "persistent_workers prefetch_factor"),
        ),
        ((_DETERMINISTIC,), _keys("debug", "deterministic_warn_only")),
    )
    for key in keys
}

READ_BY_SOME_MODELS: frozenset[str] = frozenset(
    _keys("mlm", "mask_probability whole_word next_sentence")
    + _keys("dropout", "embedding attention residual")
    + _keys("routing", "record replay preset")
)
"""Keys of the sections that an ExtTrainSpec has to name for its model to read them."""

_SECTIONS_OF_MODELS = {key.split(".")[0] for key in READ_BY_SOME_MODELS}

REFUSED: dict[str, str] = {
    "model.tokenizer_path": "deprecated; use model.hf_assets_path",
    "experimental.custom_args_module": "deprecated; use job.custom_config_module",
    "model.converters": "not supported yet; leave it empty",
    "optimizer.early_step_in_backward": (
        "not supported: it steps on gradients that training.max_norm has not clipped yet"
    ),
    "parallelism.enable_async_tensor_parallel": "not supported yet; use false",
    "parallelism.pipeline_parallel_expert_parallel_overlap": (
        "has no effect: it is for the schedule DualPipeV, which is not supported"
    ),
    "parallelism.expert_parallel_comm_backend": 'not supported yet; use "standard"',
    "activation_checkpoint.debug": "not supported: torch has no debug mode for a policy",
    "activation_checkpoint.preserve_rng_state": (
        "must be true: otherwise the recomputation draws other dropout masks than the forward"
    ),
    "memory_estimation.enable": "not supported: torchtitan 0.2.2's trainer doesn't read it",
    "fault_tolerance.enable": "not supported: it needs torchtitan's own trainer for torchft",
}
"""Keys that may only be set to their default, with the reason."""


def check_effects(config: Any, settings: Settings) -> None:
    """Refuse a key that is set but would not be read.

    A key in the TOML file is let pass if a flag has turned its switch off, or if the file itself
    turns it off: then it keeps a preset ready (``enable = false`` above ``interval = 5``). A switch
    that names one of several ways, such as ``mode = "full"``, is no such off.

    Raises ConfigError.
    """
    for key, value in settings.values.items():
        for switch in GOVERNED.get(key, ()):
            if switch.is_on(config):
                continue
            if key in settings.flags or not _is_preset(switch, settings):
                raise refusal(key, value, f"has no effect {switch.off}")
            break


def check_model_sections(model_name: str, sections: frozenset[str], settings: Settings) -> None:
    """Refuse a key that is set in a section which this model does not read.

    Raises ConfigError.
    """
    for key, value in settings.values.items():
        section = key.split(".")[0]
        if section in _SECTIONS_OF_MODELS - sections:
            raise refusal(key, value, f'has no effect: model "{model_name}" has no use for it')


def drop_unread(config: Any, sections: frozenset[str], values: dict[str, Any]) -> None:
    """Take those keys out of nested ``values`` that a TOML file of the config must not set.

    ``sections`` are those that the model reads, of the sections that only some models do.
    """
    for section in _SECTIONS_OF_MODELS - sections:
        values.pop(section, None)
    for key, switches in GOVERNED.items():
        off = (switch for switch in switches if not switch.is_on(config))
        if any(all(isinstance(get_value(config, k), str) for k in switch.keys) for switch in off):
            *path, name = key.split(".")
            table = values
            for section in path:
                table = table.get(section, {})
            table.pop(name, None)


def _is_preset(switch: Switch, settings: Settings) -> bool:
    return any(
        key in settings.flags or (key in settings.toml and not isinstance(settings.toml[key], str))
        for key in switch.keys
    )


def check_refused(config: Any, defaults: Any) -> None:
    """Refuse what is not supported: a key of ``REFUSED`` that differs from its default.

    Raises ConfigError.
    """
    for key, reason in REFUSED.items():
        value = get_value(config, key)
        if value != get_value(defaults, key):
            raise refusal(key, value, reason)
