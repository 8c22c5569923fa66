"""A model that can be configured and not built, and configurations of it."""

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from torchtitan_ext.config.error import ConfigError
from torchtitan_ext.config.load import load_job_config

# isort: split
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec


@dataclass
class CheckedSpec(TrainSpec):
    check_config: Callable[[Any, Any], None] | None = None


def refuse_many_ranks(job_config: Any, parallel_dims: Any) -> None:
    if parallel_dims.world_size == 64:
        raise ValueError("[model] name = fake: must have fewer than 64 ranks")


def fake_spec(**overrides: Any) -> CheckedSpec:
    names = ("model_cls", "parallelize_fn", "pipelining_fn", "build_optimizers_fn")
    names += ("build_lr_schedulers_fn", "build_dataloader_fn", "build_loss_fn")
    parts = dict.fromkeys(names) | {"model_args": {"small": None}, "build_tokenizer_fn": print}
    return CheckedSpec(**(parts | overrides), check_config=refuse_many_ranks)  # type: ignore[arg-type]


sys.modules["fake_models"] = types.ModuleType("fake_models")
register_train_spec("fake", fake_spec(build_validator_fn=print, state_dict_adapter=object))
register_train_spec("fake_bare", fake_spec())

MODEL = """
[model]
name = "fake"
flavor = "small"
hf_assets_path = "tokenizer"
[experimental]
custom_import = "fake_models"
"""


def load(
    *flags: str, toml: str | None = None, world_size: int = 4, device_type: str = "cpu"
) -> Any:
    """Load flags on top of TOML text (the model's sections are added to it)."""
    if toml is not None:
        Path("run.toml").write_text(toml + MODEL)
    args = ["--job.config_file=run.toml", *flags]
    return load_job_config(args, world_size=world_size, device_type=device_type)


def refusal_of(*flags: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        load(*flags, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)
