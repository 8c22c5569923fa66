"""The TOML sections that this project adds to torchtitan's.

torchtitan merges ``JobConfig`` below into its own when ``job.custom_config_module`` names this
module. The merge reads the annotations as types, so postponed evaluation of annotations
(``from __future__ import annotations``) would break it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from torchtitan_ext.config.error import as_toml, did_you_mean

CheckpointMode = Literal["none", "full", "op"]

_LAYER_GROUPS = ("*", "dense", "moe")
_LAYER_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class LayerRule:
    """How some layers are wrapped; a field left at None keeps what was decided before the rule."""

    layers: str
    """
    Which layers: numbers and inclusive ranges ("0", "0-3", "0,2,5-7"), "*" for all of them,
    "moe" for those with experts, "dense" for the others.
    """

    checkpoint: CheckpointMode | None = None
    """What the backward recomputes: "none", "full" (the whole layer) or "op" (all but some ops)."""

    compile: bool | None = None
    """Whether the layer is compiled, as one full graph."""


@dataclass
class LayerWrap:
    """Activation checkpointing and compilation, layer by layer."""

    save_ops: list[str] = field(default_factory=list)
    """
    Names of further ops whose outputs "op" checkpointing keeps, besides those it always keeps.
    A name that matches no op is an error. No effect unless some layer uses "op" checkpointing.
    """

    rules: list[LayerRule] = field(default_factory=list)
    """
    Exceptions to [activation_checkpoint] and [compile], written as [[layer_wrap.rules]]. They are
    applied in order, so the last that matches a layer wins; one that matches no layer is an error.
    """

    def __post_init__(self) -> None:
        # TOML's arrays of tables arrive as dictionaries.
        self.rules = [
            rule if isinstance(rule, LayerRule) else _read_rule(index, rule)
            for index, rule in enumerate(self.rules)
        ]


@dataclass
class Metrics:
    """Additions to torchtitan's [metrics]."""

    log_experts: bool = False
    """
    Log the number of tokens of each expert of each layer (``tokens_per_expert``) at every logged
    step. Needs a model with experts.
    """


@dataclass
class JobConfig:
    layer_wrap: LayerWrap = field(default_factory=LayerWrap)
    metrics: Metrics = field(default_factory=Metrics)


def match_layers(pattern: str, layer_ids: Iterable[int], moe_layer_ids: set[int]) -> list[int]:
    """Return those of ``layer_ids`` that ``pattern`` (see ``LayerRule.layers``) names, in order.

    Raises ValueError if the pattern is malformed; one that names no layer gives an empty list.
    """
    if pattern == "*":
        return list(layer_ids)
    if pattern in _LAYER_GROUPS:
        return [i for i in layer_ids if (i in moe_layer_ids) == (pattern == "moe")]
    ranges = _parse_ranges(pattern)
    return [i for i in layer_ids if any(i in layer_range for layer_range in ranges)]


def _parse_ranges(pattern: str) -> list[range]:
    ranges = []
    for part in pattern.split(","):
        match = _LAYER_RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                'must be layer numbers such as "0", "0-3" or "0,2,5-7", or one of '
                f"{', '.join(_LAYER_GROUPS)}{did_you_mean(pattern, _LAYER_GROUPS)}"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {part.strip()} ends before it starts")
        ranges.append(range(first, last + 1))
    return ranges


def _read_rule(index: int, table: Any) -> LayerRule:
    """Turn one [[layer_wrap.rules]] table into a rule, or say which key of it is wrong."""
    where = f"[layer_wrap] rules[{index}]"
    if not isinstance(table, dict):
        raise ValueError(f"{where} = {as_toml(table)}: must be a table, [[layer_wrap.rules]]")
    names = [f.name for f in fields(LayerRule)]
    for name in table:
        if name not in names:
            raise ValueError(f"{where}.{name}: unknown key{did_you_mean(name, names)}")
    if "layers" not in table:
        raise ValueError(f"{where}: needs the key layers")
    rule = LayerRule(**table)
    for name, problem in _rule_problems(rule):
        raise ValueError(f"{where}.{name} = {as_toml(table[name])}: {problem}")
    if rule.checkpoint is None and rule.compile is None:
        raise ValueError(f"{where}: needs checkpoint or compile, or it has no effect")
    return rule


def _rule_problems(rule: LayerRule) -> Iterable[tuple[str, str]]:
    policies = get_args(CheckpointMode)
    if not isinstance(rule.layers, str):
        yield "layers", "must be a string"
    else:
        try:
            match_layers(rule.layers, [], set())
        except ValueError as error:
            yield "layers", str(error)
    if rule.checkpoint is not None and rule.checkpoint not in policies:
        hint = did_you_mean(rule.checkpoint, policies)
        yield "checkpoint", f"must be one of {', '.join(policies)}{hint}"
    if rule.compile is not None and not isinstance(rule.compile, bool):
        yield "compile", "must be true or false"
