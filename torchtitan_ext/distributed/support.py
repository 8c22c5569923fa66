"""Which parts of a configuration don't go together: one table, for the check and for people."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_ext.config.error import refusal
from torchtitan_ext.config.values import get_value


@dataclass(frozen=True)
class Feature:
    """Something that a configuration may ask for."""

    key: str
    """The key that asks for it."""
    asks: Callable[[Any], bool]
    """Whether a value of the key does."""


def _above_one(value: Any) -> bool:
    return value > 1


PARALLELISMS: dict[str, Feature] = {
    "dp_replicate": Feature("parallelism.data_parallel_replicate_degree", _above_one),
    "dp_shard": Feature("parallelism.data_parallel_shard_degree", lambda degree: degree != 1),
    "zero": Feature("zero.stage", lambda stage: stage < 3),
    "ep": Feature("parallelism.expert_parallel_degree", _above_one),
    "etp": Feature("parallelism.expert_tensor_parallel_degree", _above_one),
    "tp": Feature("parallelism.tensor_parallel_degree", _above_one),
    "cp": Feature("parallelism.context_parallel_degree", _above_one),
    "pp": Feature("parallelism.pipeline_parallel_degree", _above_one),
}
"""By the short names of :mod:`torchtitan_ext.verify.layouts`; "zero" is stage 1 or 2."""

FEATURES: dict[str, Feature] = {
    **PARALLELISMS,
    "checkpoint": Feature("activation_checkpoint.mode", lambda mode: mode != "none"),
    "compile": Feature("compile.enable", bool),
    "validation": Feature("validation.enable", bool),
    "record": Feature("routing.record", bool),
    "replay": Feature("routing.replay", lambda folder: folder is not None),
    "preset": Feature("routing.preset", lambda preset: preset != "none"),
    "balance": Feature("debug.moe_force_load_balance", bool),
    "fake_backend": Feature("comm.mode", lambda mode: mode != "default"),
}
"""All that the table speaks of, in the order in which it is printed."""

UNSUPPORTED: dict[tuple[str, str], str] = {
    ("fake_backend", "pp"): "stages need real inputs",
}
"""Pairs of features, the one to be blamed first, and why they don't go together."""

CONDITIONS: dict[tuple[str, str], str] = {
    ("validation", "pp"): "but for the schedule ZBVZeroBubble, which can't run without a backward",
    ("zero", "pp"): "without gradient accumulation, where ranks share the gradients of a stage",
    ("record", "pp"): "but for a schedule from a file, which has micro-batches in any order",
    ("checkpoint", "pp"): "under a schedule that splits the backward, of compiled layers alone",
}
"""Pairs that go together to a part; the check is where the condition is (pipeline_checks.py)."""


def check_supported(config: Any, of_model: Mapping[str, str]) -> None:
    """Checks every pair of features that a configuration asks for.

    Args:
        of_model: features that the model does not go together with, and why.

    Raises ConfigError for the first that is not supported.
    """
    for name, reason in of_model.items():
        if _asks(config, name):
            raise _refusal(config, name, f'not supported by "{config.model.name}": {reason}')
    for (blamed, other), reason in UNSUPPORTED.items():
        if _asks(config, blamed) and _asks(config, other):
            section, _, key = FEATURES[other].key.rpartition(".")
            value = get_value(config, FEATURES[other].key)
            raise _refusal(
                config, blamed, f"not supported with [{section}] {key} = {value}: {reason}"
            )


def _asks(config: Any, feature: str) -> bool:
    return FEATURES[feature].asks(get_value(config, FEATURES[feature].key))


def _refusal(config: Any, feature: str, rule: str) -> Exception:
    key = FEATURES[feature].key
    return refusal(key, get_value(config, key), rule)
