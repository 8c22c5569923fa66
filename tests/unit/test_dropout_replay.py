"""A recomputed forward draws the dropout masks of the forward: probes that are certain.

A loss curve can't tell. These can: ones sent through dropout, whose gradient has to be the output,
bit for bit; finite differences of the loss in float64, with the seed reset before each; and
gradients with and without a checkpoint. Each is seen to fail on a replay that is broken on purpose.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torchtitan.config import JobConfig

from models.bert import BertModel, BertModelArgs
from tests.unit.test_layer_wrap import make_config
from torchtitan_ext.distributed import checkpoint_policy, layer_wrap
from torchtitan_ext.distributed.checkpoint_policy import (
    DEFAULT_SAVE_OPS,
    SaveOps,
    draws_random_numbers,
)
from torchtitan_ext.distributed.layer_wrap import apply_layer_wrap

aten = torch.ops.aten

CHECKPOINTS = {
    "none": ("none", "2"),
    "full": ("full", "2"),
    "op": ("selective", "op"),
    "every_2nd": ("selective", "2"),
}
BACKENDS = [None, "aot_eager", "inductor"]
SITES = ["embedding", "attention", "residual"]


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests() -> None:
    torch._dynamo.reset()
    counters.clear()


def config_of(checkpoint: str, backend: str | None) -> JobConfig:
    job_config = make_config(*CHECKPOINTS[checkpoint], compile=backend is not None)
    if backend is not None:
        job_config.compile.backend = backend
    return job_config


# The mask probe ---------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)  # values are doubled, which is exact

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x) * 1.0


class Attention(nn.Module):
    """With a single key its weight is 1, and dropped or doubled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x.view(-1, 4, 1, 1)
        zeros = torch.zeros_like(values)
        out = F.scaled_dot_product_attention(zeros, zeros, values, dropout_p=0.5)
        return out.reshape(x.shape)


class KeptThenDrawn(nn.Module):
    """Two kinds of random operators; a policy could tell them apart."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.native_dropout(x, 0.5, True)[0] * 1.0, 0.5) * 1.0


class Layers(nn.Module):
    def __init__(self, block: type[nn.Module], num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): block() for i in range(num_layers)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def num_wrong_masks(block: type[nn.Module], job_config: JobConfig, num_layers: int = 3) -> int:
    model = Layers(block, num_layers)
    apply_layer_wrap(model, job_config)
    num_wrong = 0
    for seed in range(3):
        x = torch.ones(4096, requires_grad=True)
        torch.manual_seed(seed)
        y = model(x)
        assert 0 < (y > 0).sum() < 4096
        torch.rand(5)  # the backward must not go on from here
        y.sum().backward()
        num_wrong += int((x.grad != y).sum())
    return num_wrong


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("block", [Residual, Attention])
def test_gradient_of_ones_is_the_output(
    block: type[nn.Module], checkpoint: str, backend: str | None
) -> None:
    assert num_wrong_masks(block, config_of(checkpoint, backend)) == 0
    if backend is not None:
        # Layers that are wrapped alike share a graph.
        assert counters["stats"]["unique_graphs"] == (2 if checkpoint == "every_2nd" else 1)


# Gradients of a real model ----------------------------------------------------------------------


def build_bert(job_config: JobConfig, site: str) -> BertModel:
    rates = {f"{name}_dropout": 0.3 if site in (name, "all") else 0.0 for name in SITES}
    args = BertModelArgs(
        vocab_size=67, dim=16, n_layers=3, n_heads=2, hidden_dim=32, max_seq_len=12, **rates
    )
    model = BertModel(args).double()
    model.init_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # far from linear, or a wrong mask would hardly show
    apply_layer_wrap(model, job_config)
    return model.train()


def loss_of(model: BertModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 67, (3, 12), generator=generator)
    torch.manual_seed(1234)
    return F.cross_entropy(model(tokens).logits.flatten(0, 1), tokens.flatten())


def gradients_of(model: BertModel) -> list[torch.Tensor]:
    model.zero_grad()
    loss = loss_of(model)
    torch.rand(5)
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]


def finite_difference_error(model: BertModel) -> float:
    """Of the derivative along a random direction, relative."""
    gradients = gradients_of(model)
    generator = torch.Generator().manual_seed(7)
    directions = [torch.randn(g.shape, generator=generator, dtype=g.dtype) for g in gradients]
    expected = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True))
    epsilon, losses = 1e-6, []
    for sign in (1, -1):
        with torch.no_grad():
            for parameter, direction in zip(model.parameters(), directions, strict=True):
                parameter.add_(direction, alpha=sign * epsilon)
        losses.append(float(loss_of(model).detach()))
        with torch.no_grad():
            for parameter, direction in zip(model.parameters(), directions, strict=True):
                parameter.sub_(direction, alpha=sign * epsilon)
    return abs((losses[0] - losses[1]) / (2 * epsilon) - expected) / abs(expected)


def largest_difference(gradients: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    scale = max(float(g.abs().max()) for g in reference)
    pairs = zip(gradients, reference, strict=True)
    return max(float((g - r).abs().max()) for g, r in pairs) / scale


def cases() -> list[Any]:
    rows = []
    for backend in BACKENDS:
        for checkpoint in CHECKPOINTS:
            for site in [*SITES, "all"]:
                # On inductor each rate compiles anew.
                is_slow = backend == "inductor" and site != "all" and checkpoint != "full"
                marks = [pytest.mark.slow] if is_slow else []
                rows.append(pytest.param(checkpoint, backend, site, marks=marks))
    return rows


@pytest.mark.parametrize(("checkpoint", "backend", "site"), cases())
def test_gradients_are_those_of_the_loss_and_of_no_checkpoint(
    checkpoint: str, backend: str | None, site: str
) -> None:
    model = build_bert(config_of(checkpoint, backend), site)
    assert finite_difference_error(model) < 1e-6
    assert (counters["stats"]["unique_graphs"] > 0) == (backend is not None)
    gradients = gradients_of(model)
    torch._dynamo.reset()
    reference = gradients_of(build_bert(config_of("none", backend), site))
    assert largest_difference(gradients, reference) < 1e-12


# The checks can fail ----------------------------------------------------------------------------


def forget_random_state(monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    original = layer_wrap.checkpoint_wrapper

    def wrapper(block: nn.Module, **options: Any) -> nn.Module:
        return original(block, **{**options, "preserve_rng_state": False})

    monkeypatch.setattr(layer_wrap, "checkpoint_wrapper", wrapper)
    return config_of("full", None)


def compile_with_backend_eager(monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    return config_of("full", "eager")


def budget_memory(monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    return config_of("none", "inductor")


@pytest.mark.parametrize(
    "break_replay", [forget_random_state, compile_with_backend_eager, budget_memory]
)
def test_finite_differences_see_a_broken_replay(
    monkeypatch: pytest.MonkeyPatch, break_replay: Callable[[pytest.MonkeyPatch], JobConfig]
) -> None:
    job_config = break_replay(monkeypatch)
    budget = 0.0 if break_replay is budget_memory else 1.0
    # Not by monkeypatch, which takes a setting back by deleting it: no later test could compile.
    with torch._functorch.config.patch(activation_memory_budget=budget):
        assert finite_difference_error(build_bert(job_config, "all")) > 1e-3


@pytest.mark.parametrize("break_replay", [forget_random_state, compile_with_backend_eager])
def test_mask_probe_sees_a_broken_replay(
    monkeypatch: pytest.MonkeyPatch, break_replay: Callable[[pytest.MonkeyPatch], JobConfig]
) -> None:
    assert num_wrong_masks(Residual, break_replay(monkeypatch)) > 1000


def test_policy_that_kept_some_random_operators_would_shift_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = DEFAULT_SAVE_OPS | {aten.native_dropout.default}
    monkeypatch.setattr(checkpoint_policy, "DEFAULT_SAVE_OPS", kept)
    assert num_wrong_masks(KeptThenDrawn, config_of("op", None), num_layers=1) == 0
    monkeypatch.setattr(checkpoint_policy, "draws_random_numbers", lambda *_: False)
    assert num_wrong_masks(KeptThenDrawn, config_of("op", None), num_layers=1) > 1000


# Which operators draw ---------------------------------------------------------------------------

_FLASH = aten._scaled_dot_product_flash_attention.default
_EFFICIENT = aten._scaled_dot_product_efficient_attention.default


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "draws"),
    [
        (aten.mm.default, (None, None), {}, False),
        (aten.bernoulli.p, (None, 0.5), {}, True),
        (aten.native_dropout.default, (None, 0.5, True), {}, True),
        (_FLASH, (None, None, None), {}, False),
        (_FLASH, (None, None, None, 0.0), {}, False),
        (_FLASH, (None, None, None, 0.1), {}, True),
        (_FLASH, (None, None, None), {"dropout_p": 0.1}, True),
        (_EFFICIENT, (None, None, None, None, True, 0.1), {}, True),
        (_EFFICIENT, (None, None, None, None, True), {"is_causal": True}, False),
    ],
)
def test_operator_draws_random_numbers(op: Any, args: Any, kwargs: Any, draws: bool) -> None:
    assert draws_random_numbers(op, args, kwargs) is draws


def test_fused_attention_says_whether_it_draws() -> None:
    fused = [op for op in DEFAULT_SAVE_OPS if "scaled_dot_product" in op.name()]
    assert len(fused) == 4
    for op in fused:
        assert torch.Tag.nondeterministic_seeded in op.tags, op
        assert "dropout_p" in [argument.name for argument in op._schema.arguments], op


@pytest.mark.parametrize("name", ["aten.native_dropout", "aten.bernoulli.p", "aten.rand_like"])
def test_random_operator_cannot_be_kept(name: str) -> None:
    with pytest.raises(ValueError, match="draws random numbers") as refused:
        SaveOps([name])
    assert str(refused.value).startswith(f'[layer_wrap] save_ops = "{name}"')
