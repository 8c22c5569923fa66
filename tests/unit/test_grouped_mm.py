"""Grouped products: one kernel, the loop and plain matrix products give the same."""

from collections.abc import Callable, Iterator

import pytest
import torch

from torchtitan_ext.moe.grouped_mm import grouped_mm, grouped_mm_loop, has_grouped_mm

GroupedProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

WIDTH_IN, WIDTH_OUT = 16, 24
COUNTS = [
    [3, 5, 2],
    [0, 7, 3],
    [4, 0, 6],
    [6, 4, 0],
    [0, 0, 10],
    [1, 0, 0],
    [0, 0, 0],
]
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    # two bf16 roundings (of 8 bits) of sums of up to 24 products
    torch.bfloat16: {"rtol": 2e-2, "atol": 5e-2},
}


def make_inputs(
    counts: list[int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, weights in the layout of the experts' (e, O, I), and the rows of each group."""
    rows = torch.randn(sum(counts), WIDTH_IN, dtype=dtype)
    weight = torch.randn(len(counts), WIDTH_OUT, WIDTH_IN, dtype=dtype)
    return rows.requires_grad_(), weight.requires_grad_(), torch.tensor(counts)


def plain_products(
    rows: torch.Tensor, weight: torch.Tensor, tokens_per_expert: torch.Tensor
) -> torch.Tensor:
    """One row at a time, in float64."""
    groups = [group for group, count in enumerate(tokens_per_expert.tolist()) for _ in range(count)]
    products = [
        row.double() @ weight[group].double() for row, group in zip(rows, groups, strict=True)
    ]
    return torch.stack(products) if products else rows.double() @ weight[0].double()


def forward_and_gradients(
    product: GroupedProduct, counts: list[int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    rows, weight, tokens_per_expert = make_inputs(counts, dtype)
    out = product(rows, weight.transpose(-2, -1), tokens_per_expert)
    (out * torch.linspace(-1, 1, WIDTH_OUT)).sum().backward()
    return out.detach(), rows.grad, weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("product", [grouped_mm, grouped_mm_loop])
def test_product_and_gradients_equal_those_of_single_rows(
    product: GroupedProduct, counts: list[int], dtype: torch.dtype
) -> None:
    found = forward_and_gradients(product, counts, dtype)
    expected = forward_and_gradients(plain_products, counts, dtype)
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, wanted.to(dtype), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("product", [grouped_mm, grouped_mm_loop])
def test_gradient_of_an_empty_group_is_exactly_zero(
    product: GroupedProduct, counts: list[int], dtype: torch.dtype
) -> None:
    _, _, grad_weight = forward_and_gradients(product, counts, dtype)
    for gradient, count in zip(grad_weight, counts, strict=True):
        assert torch.any(gradient != 0) if count else torch.all(gradient == 0)


@pytest.mark.parametrize("product", [grouped_mm, grouped_mm_loop])
def test_gradient_of_sum_with_stride_zero_is_right(product: GroupedProduct) -> None:
    rows, weight, tokens_per_expert = make_inputs([3, 0, 2], torch.float32)
    product(rows, weight.transpose(-2, -1), tokens_per_expert).sum().backward()
    expected = torch.cat([weight[0].sum(0).expand(3, -1), weight[2].sum(0).expand(2, -1)])
    torch.testing.assert_close(rows.grad, expected)
    sums = torch.stack([rows[:3].sum(0), torch.zeros(WIDTH_IN), rows[3:].sum(0)])
    torch.testing.assert_close(weight.grad, sums.unsqueeze(1).expand(-1, WIDTH_OUT, -1))


@pytest.mark.parametrize(
    "rows",
    [
        torch.linspace(-1, 1, 5 * WIDTH_IN).view(WIDTH_IN, 5).t(),
        torch.linspace(-1, 1, WIDTH_IN).expand(5, -1),
        torch.linspace(-1, 1, 10 * WIDTH_IN).view(5, -1)[:, 1 : WIDTH_IN + 1],
    ],
    ids=["transposed", "expanded", "sliced"],
)
def test_rows_that_are_not_contiguous_give_the_same(rows: torch.Tensor) -> None:
    assert not rows.is_contiguous()
    counts, results = torch.tensor([3, 2]), []
    for x in (rows, rows.contiguous()):
        weight = torch.ones(2, WIDTH_IN, WIDTH_OUT).cumsum(1).requires_grad_()
        out = grouped_mm(x, weight, counts)
        out.square().sum().backward()
        results.append((out, weight.grad))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("backend", "dtype", "counts"),
    [
        ("aot_eager", torch.float32, [3, 0, 5]),
        ("aot_eager", torch.bfloat16, [3, 0, 5]),
        ("aot_eager", torch.float32, [0, 0, 0]),
        ("inductor", torch.bfloat16, [3, 0, 5]),
    ],
)
def test_compiled_product_equals_eager(backend: str, dtype: torch.dtype, counts: list[int]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(grouped_mm, fullgraph=True, backend=backend)
    found = forward_and_gradients(compiled, counts, dtype)
    expected = forward_and_gradients(grouped_mm, counts, dtype)
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, **TOLERANCE[dtype])


def test_compiled_product_with_other_counts_is_not_compiled_again() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(grouped_mm, fullgraph=True, backend=counter)
    for counts in ([3, 2, 5], [0, 10, 0], [10, 0, 0]):
        rows, weight, tokens_per_expert = make_inputs(counts, torch.float32)
        found = compiled(rows, weight.transpose(-2, -1), tokens_per_expert)
        expected = plain_products(rows, weight.transpose(-2, -1), tokens_per_expert)
        torch.testing.assert_close(found, expected.float(), **TOLERANCE[torch.float32])
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_grouped_mm_op_passes_opcheck(
    requires_grad: bool, counts: list[int], dtype: torch.dtype
) -> None:
    rows = torch.randn(sum(counts), WIDTH_IN, dtype=dtype, requires_grad=requires_grad)
    weight = torch.randn(3, WIDTH_IN, WIDTH_OUT, dtype=dtype, requires_grad=requires_grad)
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    torch.library.opcheck(torch.ops.torchtitan_ext.grouped_mm.default, (rows, weight, offsets))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 0]], ids=str)
def test_grouped_outer_op_passes_opcheck(counts: list[int], dtype: torch.dtype) -> None:
    x = torch.randn(sum(counts), WIDTH_IN, dtype=dtype)
    y = torch.randn(sum(counts), WIDTH_OUT, dtype=dtype)
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    torch.library.opcheck(torch.ops.torchtitan_ext.grouped_outer.default, (x, y, offsets))


def test_autocast_computes_in_bf16() -> None:
    rows, weight, tokens_per_expert = make_inputs([3, 2], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = grouped_mm(rows, weight.transpose(-2, -1), tokens_per_expert)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert rows.grad.dtype == weight.grad.dtype == torch.float32


@pytest.fixture
def nan_filled_memory() -> Iterator[None]:
    """torch.empty() gives NaNs: whatever reads memory that nobody wrote shows it."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.mark.usefixtures("nan_filled_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_uninitialised_memory_never_reaches_a_result(counts: list[int], dtype: torch.dtype) -> None:
    for result in forward_and_gradients(grouped_mm, counts, dtype):
        assert result.isfinite().all()


@pytest.mark.parametrize(
    ("device", "dtype", "widths", "expected"),
    [
        ("cpu", torch.float32, (4, 8), True),
        ("cpu", torch.float32, (4, 6), False),  # 24 bytes
        ("cpu", torch.float32, (2, 8), False),
        ("cpu", torch.bfloat16, (8, 16), True),
        ("cpu", torch.bfloat16, (8, 12), False),  # 24 bytes
        ("cpu", torch.float16, (8, 16), True),
        ("cpu", torch.float64, (16, 16), False),
    ],
)
def test_has_grouped_mm_wants_known_types_and_aligned_rows(
    device: str, dtype: torch.dtype, widths: tuple[int, ...], expected: bool
) -> None:
    assert has_grouped_mm(torch.device(device), dtype, *widths) is expected


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((7, 5), torch.bfloat16, False),
        ((8, 0), torch.bfloat16, True),
        ((9, 0), torch.bfloat16, True),
        ((9, 0), torch.float16, False),
        ((9, 0), torch.float32, False),
    ],
)
def test_has_grouped_mm_on_cuda_wants_bf16_and_ampere(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_grouped_mm(torch.device("cuda"), dtype, 64, 64) is expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_widths_that_has_grouped_mm_accepts_do_run(dtype: torch.dtype) -> None:
    width = 16 // dtype.itemsize  # the narrowest
    assert has_grouped_mm(torch.device("cpu"), dtype, width, 3 * width)
    rows = torch.randn(5, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(2, width, 3 * width, dtype=dtype, requires_grad=True)
    out = grouped_mm(rows, weight, torch.tensor([2, 3]))
    out.float().square().sum().backward()
    expected = grouped_mm_loop(rows, weight, torch.tensor([2, 3]))
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
