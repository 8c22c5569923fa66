"""Row permutations of the MoE layer, against tables written by hand."""

import pytest
import torch

from torchtitan_ext.moe.permute import permute_rows, rank_major_to_expert_major, sort_by_expert


@pytest.mark.parametrize(
    ("expert_ids", "index", "inverse"),
    [
        ([0, 1, 2], [0, 1, 2], [0, 1, 2]),
        ([2, 0, 1, 0], [1, 3, 2, 0], [3, 0, 2, 1]),
        ([3, 3, 0, 3], [2, 0, 1, 3], [1, 2, 0, 3]),  # experts 1 and 2 get nothing
        ([1, 1, 1], [0, 1, 2], [0, 1, 2]),  # ties keep their order
        ([], [], []),
    ],
)
def test_sort_by_expert_table(expert_ids: list[int], index: list[int], inverse: list[int]) -> None:
    found_index, found_inverse = sort_by_expert(torch.tensor(expert_ids, dtype=torch.int64))
    assert found_index.tolist() == index
    assert found_inverse.tolist() == inverse
    assert found_index.dtype == found_inverse.dtype == torch.int64


def test_sort_by_expert_many_ties_keep_row_order() -> None:
    """Large enough for a sort that isn't stable to show it."""
    expert_ids = torch.randint(3, (5000,))
    index, inverse = sort_by_expert(expert_ids)
    rows = list(range(5000))
    assert index.tolist() == sorted(rows, key=lambda row: int(expert_ids[row]))
    assert index[inverse].tolist() == rows


# Rows received from each rank (line) for each local expert (column); where the rows of
# expert-major order lie in rank-major order.
TABLES = [
    ([[2, 1], [1, 2]], [0, 1, 3, 2, 4, 5]),
    ([[1, 2], [3, 1]], [0, 3, 4, 5, 1, 2, 6]),
    ([[3, 2]], [0, 1, 2, 3, 4]),
    ([[2], [1]], [0, 1, 2]),
    ([[0, 2], [0, 1]], [0, 1, 2]),  # expert 0 gets nothing
    ([[2, 0, 1], [1, 0, 1]], [0, 1, 3, 2, 4]),  # expert 1 gets nothing
    ([[1, 1, 0], [1, 1, 0]], [0, 2, 1, 3]),  # the last expert gets nothing
    ([[0, 0], [1, 2]], [0, 1, 2]),  # rank 0 sends nothing
    ([[1, 1], [0, 0], [1, 1]], [0, 2, 1, 3]),  # rank 1 sends nothing
    ([[0, 1], [1, 0]], [1, 0]),
    ([[0, 0], [0, 0]], []),
]


@pytest.mark.parametrize(("counts", "index"), TABLES)
def test_rank_major_to_expert_major_table(counts: list[list[int]], index: list[int]) -> None:
    found, inverse = rank_major_to_expert_major(torch.tensor(counts), len(index))
    assert found.tolist() == index
    assert inverse.tolist() == [index.index(row) for row in range(len(index))]
    assert found.dtype == inverse.dtype == torch.int64


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (8, 8)])
def test_rank_major_to_expert_major_random_counts_match_a_sort(shape: tuple[int, int]) -> None:
    for _ in range(20):
        counts = torch.randint(4, shape) * torch.randint(2, shape)  # about half are 0
        experts = [
            expert
            for of_rank in counts.tolist()
            for expert, count in enumerate(of_rank)
            for _ in range(count)
        ]
        index, inverse = rank_major_to_expert_major(counts, len(experts))
        assert index.tolist() == sorted(range(len(experts)), key=lambda row: experts[row])
        assert index[inverse].tolist() == list(range(len(experts)))


def test_permute_rows_there_and_back_is_the_identity() -> None:
    x = torch.randn(4, 3)
    index, inverse = sort_by_expert(torch.tensor([2, 0, 1, 0]))
    moved = permute_rows(x, inverse)
    assert torch.equal(moved, x[[1, 3, 2, 0]])
    assert torch.equal(permute_rows(moved, index), x)


@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_permute_rows_gradient_equals_that_of_indexing(num_rows: int) -> None:
    index, inverse = sort_by_expert(torch.randint(3, (num_rows,)))
    factor = torch.randn(num_rows, 4)
    x = torch.randn(num_rows, 4, requires_grad=True)
    indexed = x.detach().clone().requires_grad_()
    (permute_rows(x, inverse) * factor).sum().backward()
    (indexed[index] * factor).sum().backward()
    assert torch.equal(x.grad, indexed.grad)


def test_permute_rows_gradcheck_in_float64() -> None:
    _, inverse = sort_by_expert(torch.tensor([2, 0, 1, 0, 2]))
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: permute_rows(x, inverse), x)
