"""The recomputation check finds and names every planted fault, and raises no false alarm."""

import dataclasses
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
import torch
import torch.nn.functional as F

import models.bert.model as bert_model
from tests import bert, tiny
from tests.ranks import run_ranks
from torchtitan_ext.config.effects import compiles_layers
from torchtitan_ext.config.load import load_job_config
from torchtitan_ext.distributed import checkpoint_policy, layer_wrap
from torchtitan_ext.moe.router import TokenChoiceRouter
from torchtitan_ext.verify.recompute import (
    LayerVerdict,
    for_comparison,
    judge,
    without_checkpoint,
    without_compile,
)
from torchtitan_ext.verify.step import record_step

TP = ["--parallelism.tensor_parallel_degree=2"]
BERT = [*bert.CONFIG, "--training.seq_len=32", "--training.local_batch_size=2"]
MOE = [f"--job.config_file={tiny.CONFIG}", "--training.local_batch_size=2"]
FULL = ["--activation_checkpoint.mode=full"]
OP = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"]
EVERY_2ND = [OP[0], "--activation_checkpoint.selective_ac_option=2"]
NONE = ["--activation_checkpoint.mode=none"]
EAGER = ["--compile.no-enable"]


def check(
    flags: Sequence[str], folder: str, plant: Callable[[], None] = lambda: None
) -> list[LayerVerdict]:
    """On a rank: the verdicts on a configuration, with a fault planted in the code."""
    tiny.FLAVORS.add("tiny", tiny.tiny_args)
    plant()
    config = for_comparison(
        load_job_config(
            [*flags, f"--job.dump_folder={folder}"],
            world_size=torch.distributed.get_world_size(),
            device_type="cpu",
        )
    )
    eager = without_compile(config)
    inside = record_step(eager, inside_blocks=True)
    pairs = [(inside, record_step(without_checkpoint(eager)))]
    compiled = None
    if compiles_layers(config):
        compiled = record_step(config)
        pairs.append((compiled, record_step(without_checkpoint(config))))
        assert compiled.num_graphs > 0
    return judge(inside, pairs, compiled=compiled)


def verdicts_of(
    flags: Sequence[str], folder: Any, num_ranks: int = 1, plant: Callable[[], None] | None = None
) -> list[LayerVerdict]:
    planted = () if plant is None else (plant,)
    return run_ranks(check, num_ranks, flags, str(folder), *planted, timeout=600)[0]


def faults_of(verdicts: list[LayerVerdict]) -> list[str]:
    return [f"{verdict.name}: {fault}" for verdict in verdicts for fault in verdict.faults]


# No false alarm ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "num_ranks", "checkpoints"),
    [
        ([*BERT, *EAGER, *NONE], 1, ["none", "none"]),
        ([*BERT, *EAGER, *EVERY_2ND], 1, ["none", "full"]),
        ([*BERT, *EAGER, *OP], 2, ["op", "op"]),
        ([*BERT, "--compile.backend=inductor", *FULL], 1, ["full", "full"]),
        ([*BERT, "--compile.backend=aot_eager", *OP], 1, ["op", "op"]),
        ([*BERT, "--compile.backend=aot_eager", *FULL, *TP], 2, ["full", "full"]),
        ([*MOE, *FULL], 1, ["full", "full", "full"]),
        ([*MOE, *FULL, "--parallelism.expert_parallel_degree=2"], 2, ["full", "full", "full"]),
        ([*MOE, *OP, "--parallelism.expert_parallel_degree=2"], 2, ["op", "op", "op"]),
        ([*MOE, *EVERY_2ND, "--compile.enable", "--compile.backend=aot_eager"], 1, None),
    ],
)
def test_faithful_configuration_has_no_fault(
    tmp_path: Any, flags: list[str], num_ranks: int, checkpoints: list[str] | None
) -> None:
    verdicts = verdicts_of(flags, tmp_path, num_ranks)
    assert faults_of(verdicts) == []
    if checkpoints is not None:
        assert [verdict.checkpoint for verdict in verdicts] == [*checkpoints, "none"]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("checkpoint", [NONE, FULL, OP, EVERY_2ND])
@pytest.mark.parametrize("model", [BERT, MOE])
def test_product_has_no_fault(
    tmp_path: Any, model: list[str], checkpoint: list[str], backend: str | None, num_ranks: int
) -> None:
    compile_flags = EAGER if backend is None else ["--compile.enable", "--compile.backend=inductor"]
    layout = ["--parallelism.expert_parallel_degree=2"] * (model is MOE and num_ranks > 1)
    verdicts = verdicts_of([*model, *checkpoint, *compile_flags, *layout], tmp_path, num_ranks)
    assert faults_of(verdicts) == []


def test_what_is_seen_inside_layers(tmp_path: Any) -> None:
    flags = [*MOE, *FULL, "--parallelism.expert_parallel_degree=2"]
    dense, *moe, other = verdicts_of(flags, tmp_path, 2)
    assert dense.collectives["forward"] == dense.collectives["recomputation"] == {}
    for layer in moe:
        # Counts and rows go out, rows come back; the counts of the forward are kept.
        assert layer.collectives["forward"] == {"all_to_all": 3 * 2}
        assert layer.collectives["recomputation"] == {"all_to_all": 2 * 2}
    none = verdicts_of([*MOE, *NONE], tmp_path)
    full = verdicts_of([*MOE, *FULL], tmp_path)
    for kept, recomputed in zip(none[:-1], full[:-1], strict=True):
        assert 0 < recomputed.saved_bytes < kept.saved_bytes / 5
    assert other.worst_parameter is not None and not other.worst_parameter.startswith("layers.")


# Planted faults ---------------------------------------------------------------------------------


def lose_random_state() -> None:
    wrap = layer_wrap.checkpoint_wrapper

    def without_state(block: Any, **options: Any) -> Any:
        return wrap(block, **{**options, "preserve_rng_state": False})

    layer_wrap.checkpoint_wrapper = without_state


def count_calls() -> None:
    def forward(self: Any, x_BSD: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return self.w2(F.gelu(self.w1(x_BSD)))

    bert_model.FeedForward.forward = forward  # type: ignore[method-assign]


def count_calls_on_the_class() -> None:
    bert_model.FeedForward.calls = 0  # type: ignore[attr-defined]

    def forward(self: Any, x_BSD: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return self.w2(F.gelu(self.w1(x_BSD)))

    bert_model.FeedForward.forward = forward  # type: ignore[method-assign]


def count_calls_in_an_object() -> None:
    def forward(self: Any, x_BSD: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", SimpleNamespace(number=0))
        self.calls.number += 1
        return self.w2(F.gelu(self.w1(x_BSD)))

    bert_model.FeedForward.forward = forward  # type: ignore[method-assign]


def break_a_recomputed_gradient() -> None:
    forward = bert_model.Attention.forward

    def forward_wrongly(self: Any, *args: Any) -> torch.Tensor:
        weight = self.wq.weight
        if torch._C._current_graph_task_id() >= 0 and not hasattr(bert_model, "broken"):
            bert_model.broken = weight.register_hook(  # type: ignore[attr-defined]
                lambda gradient: gradient * torch.nan
            )
        return forward(self, *args)

    bert_model.Attention.forward = forward_wrongly  # type: ignore[method-assign]


def write_buffer() -> None:
    initialise = bert_model.FeedForward.__init__

    def init(self: Any, args: Any) -> None:
        initialise(self, args)
        self.register_buffer("total", torch.zeros(()), persistent=False)

    def forward(self: Any, x_BSD: torch.Tensor) -> torch.Tensor:
        self.total.nan_to_num_(0, 0, 0).remainder_(1000).add_(1)  # nothing has initialised it
        return self.w2(F.gelu(self.w1(x_BSD)))

    bert_model.FeedForward.__init__ = init  # type: ignore[method-assign]
    bert_model.FeedForward.forward = forward  # type: ignore[method-assign]


def route_otherwise_the_second_time() -> None:
    def choose(self: Any, scores_TE: torch.Tensor, bias_E: Any) -> torch.Tensor:
        is_recomputation = torch._C._current_graph_task_id() >= 0
        best_TK = scores_TE.argsort(dim=-1, descending=True)[:, : self.args.top_k]
        return (best_TK + is_recomputation) % self.args.num_experts

    TokenChoiceRouter._choose = choose  # type: ignore[method-assign]


def keep_one_of_two_dropouts() -> None:
    native_dropout = torch.ops.aten.native_dropout.default
    draws = checkpoint_policy.draws_random_numbers
    attend = bert_model.Attention.forward

    def forward(self: Any, x_BSD: torch.Tensor, is_token_B11S: Any) -> torch.Tensor:
        return torch.native_dropout(attend(self, x_BSD, is_token_B11S), 0.3, True)[0]

    bert_model.Attention.forward = forward  # type: ignore[method-assign]
    checkpoint_policy.DEFAULT_SAVE_OPS |= {native_dropout}  # type: ignore[misc]
    checkpoint_policy.draws_random_numbers = (  # as a policy that doesn't know of the rule
        lambda op, args, kwargs: op != native_dropout and draws(op, args, kwargs)
    )


def keep_what_should_be_recomputed() -> None:
    wrap = layer_wrap._checkpoint

    def keep(block: Any, plan: Any, *further: Any) -> Any:
        return wrap(block, dataclasses.replace(plan, checkpoint="op"), *further)

    layer_wrap._checkpoint = keep


def checkpoint_nothing() -> None:
    layer_wrap._checkpoint = lambda block, *further: block


@pytest.mark.parametrize(
    ("plant", "flags", "expected"),
    [
        (
            lose_random_state,
            [*BERT, *FULL],
            ["layers.0: the recomputation draws other dropout", "layers.1: gradient of layers.1."],
        ),
        (
            keep_one_of_two_dropouts,
            [*BERT, *OP],
            ["layers.0: the recomputation draws other dropout", "layers.0: gradient of layers.0."],
        ),
        (
            count_calls,
            [*BERT, *FULL],
            ["layers.1: feed_forward.calls is written in the forward and recomputation"],
        ),
        (
            count_calls_on_the_class,
            [*BERT, *FULL],
            ["layers.0: FeedForward.calls is written in the forward and recomputation"],
        ),
        (
            count_calls_in_an_object,
            [*BERT, *FULL],
            ["layers.0: feed_forward.calls is written in the forward and recomputation"],
        ),
        (
            write_buffer,
            [*BERT, *FULL],
            ["layers.0: feed_forward.total is written in the forward and recomputation"],
        ),
        (
            route_otherwise_the_second_time,
            [*MOE, *FULL],
            ["layers.1: the recomputation sends tokens to other experts than the forward"],
        ),
        (
            keep_what_should_be_recomputed,
            [*BERT, *FULL],
            ['layers.0: checkpoint "full" was asked for, "op" is in force: it keeps aten.addmm'],
        ),
        (
            checkpoint_nothing,
            [*BERT, *FULL],
            ['layers.1: checkpoint "full" was asked for, "none" is in force'],
        ),
    ],
)
def test_planted_fault_is_named(
    tmp_path: Any, plant: Callable[[], None], flags: list[str], expected: list[str]
) -> None:
    faults = faults_of(verdicts_of([*flags, *EAGER], tmp_path, plant=plant))
    for start in expected:
        assert any(fault.startswith(start) for fault in faults), faults


def test_gradient_that_is_not_finite_is_named_alone(tmp_path: Any) -> None:
    """Though clipping would make all of them so."""
    flags = [*BERT, *FULL, *EAGER, "--training.max_norm=1.0"]
    faults = faults_of(verdicts_of(flags, tmp_path, plant=break_a_recomputed_gradient))
    assert faults == ["layers.1: gradient of layers.1.attention.wq.weight is not finite"]


def test_rules_of_layers_are_taken_out_for_the_comparison(tmp_path: Any) -> None:
    rules = [
        {"layers": "0", "checkpoint": "op"},
        {"layers": "1", "checkpoint": "full", "compile": True},
    ]
    toml = tmp_path / "run.toml"
    sections = tomllib.loads(Path("train_configs/bert_tiny.toml").read_text())
    sections["layer_wrap"] = {"rules": rules}
    sections["compile"] |= {"enable": False, "backend": "aot_eager"}
    sections["activation_checkpoint"]["mode"] = "none"
    toml.write_text(tomli_w.dumps(sections))
    flags = ["--training.seq_len=32", "--training.local_batch_size=2"]
    verdicts = verdicts_of([f"--job.config_file={toml}", *flags], tmp_path)
    assert faults_of(verdicts) == []
    assert [(verdict.checkpoint, verdict.compiled) for verdict in verdicts] == [
        ("op", False),
        ("full", True),
        ("none", False),
    ]


def test_lost_random_state_in_a_compiled_block_shows_in_gradients(tmp_path: Any) -> None:
    flags = [*BERT, *FULL, "--compile.backend=inductor"]
    verdicts = verdicts_of(flags, tmp_path, plant=lose_random_state)
    assert not any(verdict.masks_equal for verdict in verdicts[:-1])
    assert all(verdict.worst_gradient_error > 0.05 for verdict in verdicts[:-1])


def run_eager_though_asked_to_compile() -> None:
    compile_block = torch.nn.Module.compile

    def compile_first(self: torch.nn.Module, **options: Any) -> None:
        compile_block(self, **options)
        if not hasattr(torch.nn.Module, "first"):
            torch.nn.Module.first = self  # type: ignore[attr-defined]
        else:
            self._compiled_call_impl = self._call_impl

    torch.nn.Module.compile = compile_first  # type: ignore[method-assign]


def test_layer_that_is_not_compiled_is_named(tmp_path: Any) -> None:
    flags = [*BERT, *FULL, "--compile.backend=aot_eager"]
    verdicts = verdicts_of(flags, tmp_path, plant=run_eager_though_asked_to_compile)
    assert faults_of(verdicts) == ["layers.1: compile was asked for, and the layer runs eager"]
    assert [verdict.compiled for verdict in verdicts] == [True, False, False]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_graphs_and_bytes_of_compiled_layers(tmp_path: Any, backend: str) -> None:
    flags = [*BERT, "--compile.enable", f"--compile.backend={backend}"]
    full = verdicts_of([*flags, *FULL], tmp_path)
    assert [verdict.graphs for verdict in full] == [1, 0, 0]
    assert [verdict.graph_breaks for verdict in full] == [0, 0, 0]
    none = verdicts_of([*flags, *NONE], tmp_path)
    for kept, recomputed in zip(none[:-1], full[:-1], strict=True):
        # Of a layer that is recomputed, at most the random state before each dropout is kept.
        assert recomputed.saved_bytes <= 3 * torch.get_rng_state().nbytes < kept.saved_bytes
