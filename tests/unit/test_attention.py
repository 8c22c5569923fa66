"""Causal attention: both ways agree with torch's reference, and nothing looks ahead."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan_ext.components import attention
from torchtitan_ext.components.attention import CausalAttention

KEY_WIDTH, VALUE_WIDTH, SCALE = 12, 8, 0.3
TOLERANCE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
}
# The explicit way's softmax is float32 in any case.
EXPLICIT_TOLERANCE = {dtype: {"rtol": 1e-4, "atol": 1e-5} for dtype in TOLERANCE}


causal_attention = CausalAttention(SCALE)


@pytest.fixture(params=["explicit", "fused"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Sends short sequences the explicit way, or the fused kernel's."""
    if request.param == "explicit":
        monkeypatch.setattr(attention.F, "scaled_dot_product_attention", forbidden)
    else:
        monkeypatch.setattr(attention, "_MAX_SEQ_LEN_EXPLICIT", 0)
        monkeypatch.setattr(attention, "_explicit", forbidden)
    return request.param


def forbidden(*args: object, **kwargs: object) -> torch.Tensor:
    raise AssertionError("the other way was taken")


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """The formula, one query position at a time."""
    rows = []
    for position in range(q.shape[-2]):
        seen = slice(0, position + 1)
        scores = (q[..., position : position + 1, :] * k[..., seen, :]).sum(-1) * scale
        rows.append((scores.softmax(-1).unsqueeze(-1) * v[..., seen, :]).sum(-2))
    return torch.stack(rows, dim=-2)


def make_inputs(dtype: torch.dtype, seq_len: int = 9) -> list[torch.Tensor]:
    widths = (KEY_WIDTH, KEY_WIDTH, VALUE_WIDTH)
    return [torch.randn(2, 3, seq_len, width, dtype=dtype, requires_grad=True) for width in widths]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seq_len", [1, 9])
def test_output_and_gradients_equal_the_formula(way: str, seq_len: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(dtype, seq_len)
    out, expected = causal_attention(*inputs), reference(*inputs, SCALE)
    tolerance = (EXPLICIT_TOLERANCE if way == "explicit" else TOLERANCE)[dtype]
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, **tolerance)
    factor = torch.randn_like(expected)
    found = torch.autograd.grad((out * factor).sum(), inputs)
    wanted = torch.autograd.grad((expected * factor).sum(), inputs)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seq_len", [512, 513])
def test_output_on_both_sides_of_the_limit_equals_torch_math(
    seq_len: int, dtype: torch.dtype
) -> None:
    q, k, v = (tensor.detach() for tensor in make_inputs(dtype, seq_len))
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), is_causal=True, scale=SCALE
        )
    out = causal_attention(q, k, v)
    assert out.shape == (2, 3, seq_len, VALUE_WIDTH)
    error = (out.double() - expected).abs().max()
    assert error <= (2e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize(
    ("seq_len", "explicit"), [(1, True), (511, True), (512, True), (513, False)]
)
def test_way_follows_the_sequence_length(
    monkeypatch: pytest.MonkeyPatch, seq_len: int, explicit: bool
) -> None:
    calls = []
    monkeypatch.setattr(attention, "_explicit", lambda q, k, v, scale: calls.append(q) or v)
    causal_attention(*(tensor.detach() for tensor in make_inputs(torch.float32, seq_len)))
    assert bool(calls) is explicit


def test_fused_way_pads_values_for_the_fast_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without padding the kernel refuses, and torch silently computes with products."""
    monkeypatch.setattr(attention, "_MAX_SEQ_LEN_EXPLICIT", 0)
    q, k, v = make_inputs(torch.float32)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert causal_attention(q, k, v).shape == v.shape


@pytest.mark.usefixtures("way")
def test_future_positions_have_no_influence() -> None:
    q, k, v = make_inputs(torch.float32)
    before = causal_attention(q, k, v)
    with torch.no_grad():
        k[..., 5:, :] += 1.0
        v[..., 5:, :] += 1000.0
    after = causal_attention(q, k, v)
    assert torch.equal(before[..., :5, :], after[..., :5, :])
    assert (after[..., 5:, :] - before[..., 5:, :]).abs().amin() > 10


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("position", [0, 4, 8])
def test_gradient_of_a_position_reaches_no_later_one(position: int) -> None:
    q, k, v = make_inputs(torch.float32)
    causal_attention(q, k, v)[..., position, :].square().sum().backward()
    for gradient in (k.grad, v.grad):
        reached = gradient.abs().sum((0, 1, 3)) > 0
        # with a single position to see, its key's gradient is 0: the softmax of one score is 1
        if position > 0 or gradient is v.grad:
            assert reached[: position + 1].all()
        assert not reached[position + 1 :].any()


@pytest.mark.usefixtures("way")
def test_runs_of_queries_see_what_comes_before_them() -> None:
    """As they lie on one of two ranks that share a sequence: its second and third quarter."""
    q, k, v = make_inputs(torch.float32, seq_len=8)
    expected = reference(q, k, v, SCALE)[..., 2:6, :]
    out = causal_attention(q[..., 2:6, :], k, v, query_starts=(2, 4))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    factor = torch.randn_like(expected)
    found = torch.autograd.grad((out * factor).sum(), [q, k, v])
    wanted = torch.autograd.grad((expected * factor).sum(), [q, k, v])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("way")
def test_ranks_that_share_a_sequence_run_the_same_operators() -> None:
    """Otherwise their compiled graphs differ in shape, and can order collectives differently."""
    q, k, v = make_inputs(torch.float32, seq_len=16)

    def operators(chunk: int, query_starts: tuple[int, ...]) -> tuple[str, ...]:
        own_q = q[..., : 2 * chunk, :]
        graph = make_fx(lambda *qkv: causal_attention(*qkv, query_starts))(own_q, k, v).graph
        return tuple(str(node.target) for node in graph.nodes)

    for degree in (2, 4):
        chunk = 16 // (2 * degree)
        starts = [(r * chunk, (2 * degree - 1 - r) * chunk) for r in range(degree)]
        assert len({operators(chunk, of_rank) for of_rank in starts}) == 1
