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
RoutingPreset = Literal["none", "balanced", "hot_expert", "hot_rank", "empty_rank", "bursts"]

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
    A name that matches no op is an error, and so is one that draws random numbers. No effect unless
    some layer uses "op" checkpointing.
    """

    match_eager_rng: bool = False
    """
    Compiled layers draw the dropout masks that eager ones would (slower), so that the two can be
    compared step by step. For backend inductor, which otherwise has random numbers of its own.
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
class Zero:
    """What data parallel ranks share out (ZeRO, arXiv:1910.02054)."""

    stage: int = 3
    """
    1: the optimizer's state, and gradients are reduced once a step. 2: gradients too, reduced in
    every micro-batch. 3: parameters too, gathered anew for every use. In 1 and 2 parameters are
    gathered once a step. No effect on ranks that hold replicas (data_parallel_replicate_degree).
    """


@dataclass
class Mlm:
    """Masked language modelling (BERT, arXiv:1810.04805). For models trained by it."""

    mask_probability: float = 0.15
    """
    Share of a sequence's tokens to predict. Of these 80% are shown as [MASK], 10% as a random
    token, 10% as they are; anew in every epoch.
    """

    whole_word: bool = False
    """Mask all pieces of a word or none; needs a WordPiece tokenizer."""

    next_sentence: bool = False
    """
    Train on pairs of segments, and also predict whether the second follows the first. Adds the
    head for it to the model.
    """

    packing: bool = True
    """
    Cut sequences from the joined documents, all of full length. False: no sequence goes beyond its
    document, short ones are padded. No effect with next_sentence, whose pairs are padded.
    """


@dataclass
class Dropout:
    """Probabilities of dropping a value in training. For models with dropout."""

    embedding: float = 0.1
    """After the sum of the embeddings."""

    attention: float = 0.1
    """On the attention weights."""

    residual: float = 0.1
    """On what attention and feed-forward add to the residual."""


@dataclass
class Routing:
    """Where tokens go. For models with experts; validation always follows the routers."""

    record: bool = False
    """Write the experts of every token of every step to ``routing/`` in the dump folder."""

    replay: str | None = None
    """
    Dump folder of a run with ``record``: its choices are used instead of the routers'. The data,
    the global batch and the model's experts must be the same, the layout need not be.
    """

    preset: RoutingPreset = "none"
    """
    A load of a known shape, for benchmarks: "balanced", "hot_expert" (every token visits expert 0),
    "hot_rank" (and as many of the first rank's experts as it can), "empty_rank" (the last rank gets
    nothing), or "bursts" (a hot rank in every 4th step, balanced otherwise).
    """


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
    zero: Zero = field(default_factory=Zero)
    routing: Routing = field(default_factory=Routing)
    mlm: Mlm = field(default_factory=Mlm)
    dropout: Dropout = field(default_factory=Dropout)


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
