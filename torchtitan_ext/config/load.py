"""From a TOML file and flags to a checked configuration, before any process is started.

Precedence: flags, then the TOML file, then the defaults. Everything that can be known to go wrong
is refused here, in one line, and nothing that is set is ignored.
"""

import functools
import importlib
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

import torchtitan_ext.device  # noqa: F401  isort:skip  comes before any other part of torchtitan

from torchtitan.config import ConfigManager, JobConfig

from torchtitan_ext import config as own_sections
from torchtitan_ext.config.checks import (
    check_combinations,
    check_device,
    check_folders,
    check_installed,
    check_tokenizer,
    check_values,
)
from torchtitan_ext.config.degrees import (
    check_batch,
    check_degrees,
    check_offload,
    check_reshard,
    check_seed_checkpoint,
    check_zero,
)
from torchtitan_ext.config.effects import (
    check_effects,
    check_model_sections,
    check_refused,
    drop_unread,
)
from torchtitan_ext.config.error import ConfigError, did_you_mean, refusal
from torchtitan_ext.config.resume import check_resumable
from torchtitan_ext.config.values import (
    Settings,
    Source,
    build_config,
    check_settings,
    find_path,
    get_value,
    read_source,
)
from torchtitan_ext.distributed.mesh import ExtParallelDims
from torchtitan_ext.distributed.support import check_supported

if TYPE_CHECKING:
    from torchtitan.protocols.train_spec import TrainSpec

# What is assumed where neither the TOML file nor a flag says otherwise.
_DEFAULT_CONFIG_MODULE = "torchtitan_ext.config"
_DEFAULT_MODELS_MODULE = "models"


def load_job_config(args: list[str], *, world_size: int, device_type: str) -> JobConfig:
    """Read the TOML file and the flags in ``args``, and check the whole configuration.

    Besides torchtitan's sections the config has those of torchtitan_ext/config/sections.py. Input
    paths (``job.config_file``, ``model.hf_assets_path``, the dataset paths) are looked up in the
    current folder, then in the repository's root; ``job.dump_folder`` is relative to the current
    folder.

    Args:
        args: flags as ``--section.key=value``, ``--section.key value``, ``--section.flag`` or
            ``--section.no_flag``, with dashes or underscores; ``--help`` lists all and exits.
        world_size: number of ranks the run will have.
        device_type: "cpu", or the accelerator's type.

    Raises:
        ConfigError: in one line, why the configuration can't be run.
        SystemExit: after ``--help``, with status 0.
    """
    if "--help" in args or "-h" in args:
        _print_help()
    source = read_source(args)
    config_module = _find_setting(source, "job.custom_config_module") or _DEFAULT_CONFIG_MODULE
    config_cls = _merge_sections(config_module)
    settings = check_settings(source, config_cls)
    config = _build(settings, config_cls, config_module)
    parallel_dims = _check_layout(config, world_size)
    check_device(config, device_type)
    check_installed(config)
    check_folders(config)
    check_resumable(config, parallel_dims.num_data_ranks)
    _check_model(config, settings, parallel_dims)
    _check_datasets(config)
    return config


def save_resolved_config(config: JobConfig, path: str | Path) -> None:
    """Write every key that was used to a TOML file from which the same run can be started.

    Left out are ``job.config_file``, which is the file itself, keys that are None, and keys that
    would be refused as having no effect.
    """
    sections = _without_none(asdict(config))
    sections["job"].pop("config_file", None)
    drop_unread(config, _model_sections(_find_train_spec(config)), sections)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(tomli_w.dumps(sections), encoding="utf-8")


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def _print_help() -> None:
    ConfigManager(_merge_sections(_DEFAULT_CONFIG_MODULE)).parse_args(["--help"])


def _find_setting(source: Source, key: str) -> str | None:
    """Return a string of the unchecked source, for what is needed before it can be checked."""
    section, name = key.split(".")
    table = source.toml.get(section)
    value = dict(source.flags).get(key) or (table.get(name) if isinstance(table, dict) else None)
    return value if isinstance(value, str) else None


@functools.cache
def _merge_sections(module_name: str) -> type:
    """Return torchtitan's config class extended by the ``JobConfig`` of a module."""
    module = _import_setting("job.custom_config_module", module_name)
    custom = getattr(module, "JobConfig", None)
    names = {f.name for f in fields(custom)} if custom is not None else set()
    if not names >= {f.name for f in fields(own_sections.JobConfig)}:
        raise refusal(
            "job.custom_config_module",
            module_name,
            f"must have a dataclass JobConfig that extends the one of {_DEFAULT_CONFIG_MODULE}",
        )
    return ConfigManager._merge_configs(JobConfig, custom)


def _import_setting(key: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that exists and lacks one of its own imports is a bug, to be seen in full.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise refusal(key, module_name, "no such module") from None


def _build(settings: Settings, config_cls: type, config_module: str) -> JobConfig:
    if "job.config_file" in settings.toml:
        value = settings.toml["job.config_file"]
        raise refusal("job.config_file", value, "has no effect in a TOML file: give it as a flag")
    check_values(settings.values)
    values = {"experimental.custom_import": _DEFAULT_MODELS_MODULE} | settings.values
    values["job.custom_config_module"] = config_module
    try:
        config = build_config(config_cls, values)
    except ValueError as error:  # from a section's own __post_init__
        raise ConfigError(str(error)) from None
    check_refused(config, config_cls())
    check_effects(config, settings)
    check_combinations(config)
    _resolve_input_paths(config)
    return config


def _resolve_input_paths(config: JobConfig) -> None:
    for section, name in (
        (config.job, "config_file"),
        (config.model, "hf_assets_path"),
        (config.training, "dataset_path"),
        (config.validation, "dataset_path"),
        (config.routing, "replay"),
        (config.parallelism, "pipeline_parallel_schedule_csv"),
    ):
        path = getattr(section, name)
        if path:
            setattr(section, name, find_path(path) or path)


def _check_layout(config: JobConfig, world_size: int) -> ExtParallelDims:
    parallelism = config.parallelism
    shard_degree = check_degrees(parallelism, world_size)
    replicate_degree = parallelism.data_parallel_replicate_degree
    check_batch(config.training, replicate_degree * shard_degree)
    num_shards = shard_degree * parallelism.context_parallel_degree
    check_zero(config.zero.stage, replicate_degree, num_shards)
    check_reshard(parallelism.fsdp_reshard_after_forward, world_size, num_shards)
    check_seed_checkpoint(config, world_size)
    parallel_dims = ExtParallelDims(
        dp_replicate=replicate_degree,
        dp_shard=shard_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        pp=parallelism.pipeline_parallel_degree,
        ep=parallelism.expert_parallel_degree,
        etp=parallelism.expert_tensor_parallel_degree,
        world_size=world_size,
    )
    check_offload(config.training.enable_cpu_offload, parallel_dims.fsdp_enabled)
    return parallel_dims


def _check_model(config: JobConfig, settings: Settings, parallel_dims: ExtParallelDims) -> None:
    """Check what depends on the model, by its TrainSpec (see ExtTrainSpec)."""
    spec = _find_train_spec(config)
    check_model_sections(config.model.name, _model_sections(spec), settings)
    if config.validation.enable and spec.build_validator_fn is None:
        raise refusal("validation.enable", True, f"{config.model.name} has no validator")
    if config.checkpoint.enable and spec.state_dict_adapter is None:
        for key in ("checkpoint.initial_load_in_hf", "checkpoint.last_save_in_hf"):
            if get_value(config, key):
                rule = f"{config.model.name} has no conversion to Hugging Face's format"
                raise refusal(key, True, rule)
    if spec.build_tokenizer_fn is not None:
        check_tokenizer(config.model.hf_assets_path)
    check_supported(config, getattr(spec, "unsupported", {}))
    check_config = getattr(spec, "check_config", None)
    if check_config is not None:
        try:
            check_config(config, parallel_dims)
        except ValueError as error:
            raise ConfigError(str(error)) from None


def _find_train_spec(config: JobConfig) -> "TrainSpec":
    # Imported late, as it imports the datasets library: most refusals come before it.
    from torchtitan.protocols.train_spec import _extra_train_specs

    _import_setting("experimental.custom_import", config.experimental.custom_import)
    name, flavor = config.model.name, config.model.flavor
    # Only the models registered from outside torchtitan: its own don't go through our wrapping.
    spec = _extra_train_specs.get(name)
    if spec is None:
        raise _unknown_choice("model.name", name, list(_extra_train_specs))
    if flavor not in spec.model_args:
        raise _unknown_choice("model.flavor", flavor, list(spec.model_args))
    return spec


def _model_sections(spec: "TrainSpec") -> frozenset[str]:
    return getattr(spec, "sections", frozenset())


def _unknown_choice(key: str, value: str, choices: list[str]) -> ConfigError:
    hint = did_you_mean(value, choices)
    return refusal(key, value, f"must be one of {', '.join(sorted(choices))}{hint}")


def _check_datasets(config: JobConfig) -> None:
    from torchtitan_ext.data.corpora import check_dataset
    from torchtitan_ext.data.dataset import sections_with_data

    for name, section in sections_with_data(config).items():
        try:
            check_dataset(name, section.dataset, section.dataset_path)
        except ValueError as error:
            raise ConfigError(str(error)) from None
