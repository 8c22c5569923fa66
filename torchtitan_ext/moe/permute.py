"""Row permutations of the MoE layer.

Shapes: N = T * K routed rows, R rows received, e local experts, P ranks of expert parallelism.
"""

import torch


def permute_rows(x: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
    """Moves row i of ``x`` to row ``destination[i]``; ``destination`` is a permutation.

    Written as a copy to places, its gradient is a gather. As a gather, ``x[index]``, its gradient
    would be a scatter-add, since autograd can't know that no row is met twice.
    """
    return x.new_empty(x.shape).index_copy(0, destination, x)


def sort_by_expert(expert_ids_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The permutation that brings rows into expert order, ties in row order, and its inverse."""
    index_N = torch.argsort(expert_ids_N, stable=True)
    return index_N, _invert(index_N)


def rank_major_to_expert_major(
    tokens_per_rank_expert_Pe: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The permutation from rank-major to expert-major rows, and its inverse.

    Received rows lie rank after rank, and within a rank expert after expert. The experts'
    grouped product wants them expert after expert, and within an expert rank after rank.

    Args:
        tokens_per_rank_expert_Pe: rows that came from each rank for each local expert, int64.
        num_rows: their sum R, as a number.

    Returns:
        ``(index_R, inverse_R)``, both int64.
    """
    index_R = _source_rows(tokens_per_rank_expert_Pe, num_rows)
    inverse_R = _source_rows(tokens_per_rank_expert_Pe.t(), num_rows)
    return index_R, inverse_R


def _source_rows(counts_AB: torch.Tensor, num_rows: int) -> torch.Tensor:
    """For each row of B-major order, the row of A-major order it comes from.

    Both orders consist of the same A * B segments, so a row's source is its own position,
    shifted as its segment is: arithmetic on offsets instead of a sort of the rows.
    """
    starts_AB = (counts_AB.flatten().cumsum(0) - counts_AB.flatten()).view_as(counts_AB)
    sizes = counts_AB.t().flatten()
    ends = sizes.cumsum(0)
    shifts = starts_AB.t().flatten() - (ends - sizes)
    rows = torch.arange(num_rows, device=counts_AB.device)
    segments = torch.searchsorted(ends, rows, right=True)
    return rows + shifts[segments]


def _invert(index: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(index.shape[0], device=index.device)
    return torch.empty_like(index).scatter(0, index, rows)
