"""The MoE layer against a double loop over tokens and experts."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torchtitan_ext.moe import MoE, MoEArgs

DIM, HIDDEN, NUM_EXPERTS = 16, 24, 8
DEFAULTS: dict[str, Any] = {
    "num_experts": NUM_EXPERTS,
    "num_shared_experts": 1,
    "top_k": 3,
    "score_func": "sigmoid",
    "route_norm": True,
    "route_scale": 2.5,
}
# Also for float64: scores, and sums weighted with them, are float32 in any case.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture
def grouped_mm_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.dtype]]:
    """The types in which the one-kernel product was used."""
    from torchtitan_ext.moe import experts

    calls: list[torch.dtype] = []
    product = experts.grouped_mm

    def counted(x: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        calls.append(x.dtype)
        return product(x, *args)

    monkeypatch.setattr(experts, "grouped_mm", counted)
    yield calls


def make_layer(dtype: torch.dtype = torch.float32, **changes: Any) -> MoE:
    layer = MoE(MoEArgs(**(DEFAULTS | changes)), DIM, HIDDEN)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer.to(dtype)


def swiglu(x: torch.Tensor, w1: Any, w2: Any, w3: Any) -> torch.Tensor:
    return w2 @ (F.silu(w1 @ x) * (w3 @ x))


def naive_moe(layer: MoE, x_BSD: torch.Tensor) -> torch.Tensor:
    """Each token's output as the paper writes it. Chooses with the layer's args and bias."""
    args, experts = layer.router.args, layer.experts
    out = []
    for x in x_BSD.flatten(0, 1):
        logits = layer.router.gate.weight @ x
        scores = logits.sigmoid() if args.score_func == "sigmoid" else logits.softmax(0)
        choice = scores.detach() + (layer.expert_bias if layer.expert_bias is not None else 0)
        order = sorted(range(args.num_experts), key=lambda expert: -float(choice[expert]))
        chosen = order[: args.top_k]
        total = sum(scores[expert] for expert in chosen) if args.route_norm else 1.0
        y = torch.zeros_like(x)
        for expert in chosen:
            weight = scores[expert] / total * args.route_scale
            y = y + weight * swiglu(x, experts.w1[expert], experts.w2[expert], experts.w3[expert])
        if layer.shared_experts is not None:
            shared = layer.shared_experts
            y = y + swiglu(x, shared.w1.weight, shared.w2.weight, shared.w3.weight)
        out.append(y)
    return torch.stack(out).view_as(x_BSD)


def gradients(layer: MoE, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*layer.named_parameters(), strict=True)
    loss = (y * torch.linspace(-1, 1, DIM, dtype=y.dtype)).sum()
    found = torch.autograd.grad(loss, [x, *parameters], materialize_grads=True)
    return dict(zip(["x", *names], found, strict=True))


def assert_equals_naive_moe(layer: MoE, x: torch.Tensor) -> None:
    x = x.requires_grad_()
    y = layer(x)[0]
    expected = naive_moe(layer, x)
    torch.testing.assert_close(y, expected, **TOLERANCE)
    found, wanted = gradients(layer, x, y), gradients(layer, x, expected)
    for name in wanted:
        torch.testing.assert_close(
            found[name], wanted[name], **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"score_func": "softmax", "route_norm": False, "route_scale": 1.0},
        {"num_shared_experts": 0},
        {"num_shared_experts": 2},
        {"top_k": 1},
        {"top_k": NUM_EXPERTS},
        {"load_balance_coeff": 0.0},
    ],
    ids=str,
)
def test_output_and_gradients_equal_the_double_loop(
    grouped_mm_calls: list[torch.dtype], changes: dict[str, Any], dtype: torch.dtype
) -> None:
    layer = make_layer(dtype, **changes)
    assert_equals_naive_moe(layer, torch.randn(2, 6, DIM, dtype=dtype))
    # float64 goes the other way, one product after the other
    assert grouped_mm_calls == ([dtype] * 3 if dtype == torch.float32 else [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("popular", [0, 4, NUM_EXPERTS - 1])
def test_one_expert_gets_every_token(popular: int, dtype: torch.dtype) -> None:
    layer = make_layer(dtype, top_k=1)
    layer.expert_bias[popular] = 10.0
    x = torch.randn(2, 6, DIM, dtype=dtype)
    assert layer(x)[1].tolist() == [12 if e == popular else 0 for e in range(NUM_EXPERTS)]
    assert_equals_naive_moe(layer, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_experts_without_tokens_get_a_gradient_of_exactly_zero(dtype: torch.dtype) -> None:
    layer = make_layer(dtype)
    empty, others = [0, 3, 7], [1, 2, 4, 5, 6]
    layer.expert_bias[empty] = -10.0
    x = torch.randn(2, 16, DIM, dtype=dtype)
    y, counts, _ = layer(x)
    assert counts[empty].tolist() == [0, 0, 0]
    assert counts[others].min() > 0
    y.square().sum().backward()
    for weight in layer.experts.parameters():
        assert torch.all(weight.grad[empty] == 0)
        assert all(torch.any(weight.grad[expert] != 0) for expert in others)
    assert_equals_naive_moe(layer, x)


@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (3, 1)])
def test_counts_are_int64_and_sum_to_tokens_times_top_k(shape: tuple[int, int]) -> None:
    layer = make_layer()
    y, counts, _ = layer(torch.randn(*shape, DIM))
    assert y.shape == (*shape, DIM)
    assert counts.shape == (NUM_EXPERTS,)
    assert counts.dtype == torch.int64
    assert counts.sum() == shape[0] * shape[1] * 3


def test_tokens_do_not_influence_each_other() -> None:
    layer = make_layer()
    x = torch.randn(1, 8, DIM)
    changed = x.clone()
    changed[0, 3] += 1
    before, after = layer(x)[0], layer(changed)[0]
    others = [token for token in range(8) if token != 3]
    torch.testing.assert_close(before[0, others], after[0, others])
    assert not torch.allclose(before[0, 3], after[0, 3])


def module_state(layer: MoE) -> dict[str, Any]:
    """Which objects each module holds, and the versions and values of its tensors."""
    objects = {
        f"{name}.{key}": id(value)
        for name, module in layer.named_modules()
        for values in (module.__dict__, module._parameters, module._buffers, module._modules)
        for key, value in values.items()
    }
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    values = {name: (tensor._version, tensor.tolist()) for name, tensor in tensors}
    dispatcher = {key: id(value) for key, value in vars(layer.dispatcher).items()}
    return {"objects": objects, "values": values, "dispatcher": dispatcher}


@pytest.mark.parametrize("training", [True, False])
def test_forward_and_backward_leave_the_module_as_it_was(training: bool) -> None:
    layer = make_layer().train(training)
    before = module_state(layer)
    y, counts, _ = layer(torch.randn(2, 6, DIM))
    assert module_state(layer) == before
    torch.autograd.grad(y.sum(), list(layer.parameters()))
    counts += 1  # what a forward returned is the caller's
    assert module_state(layer) == before


@pytest.mark.parametrize(("coefficient", "has_bias"), [(1e-3, True), (0.0, False)])
def test_expert_bias_exists_only_with_load_balancing(coefficient: float, has_bias: bool) -> None:
    layer = make_layer(load_balance_coeff=coefficient)
    assert (layer.expert_bias is not None) == has_bias
    assert ("expert_bias" in layer.state_dict()) == has_bias
