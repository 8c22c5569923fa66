"""Sequences that ranks share come apart and together again, and gradients with them."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from torchtitan_ext.distributed.context_parallel import SharedSequence, share_batch
from torchtitan_ext.distributed.split_sequence import SplitSequence


def make(length: int) -> torch.Tensor:
    return torch.arange(2.0 * length * 3).view(2, length, 3)


def gathered_and_summed(length: int) -> tuple[list[int], bool]:
    """Whether a rank's part is gathered, and a sum is scattered, forward and backward."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sequence = SplitSequence(dist.group.WORLD, length)
    whole = make(length)
    own = torch.tensor_split(torch.arange(length), num_ranks)[rank]

    part = whole[:, own].requires_grad_()
    out = sequence.gather(part)
    # Each rank weighs the sequence by another number: the gradient is their sum.
    (out * (rank + 1)).sum().backward()
    total = num_ranks * (num_ranks + 1) / 2
    checks = [torch.equal(out, whole), bool((part.grad == total).all())]

    full = (whole * (rank + 1)).requires_grad_()
    scattered = sequence.scatter_sum(full)
    checks.append(torch.equal(scattered, whole[:, own] * total))
    (scattered * (rank + 1)).sum().backward()
    owner = torch.cat(
        [
            torch.full_like(p, r + 1)
            for r, p in enumerate(torch.tensor_split(torch.arange(length), num_ranks))
        ]
    )
    checks.append(torch.equal(full.grad, owner.view(1, -1, 1).expand_as(whole).float()))
    checks.append(torch.equal(sequence.own_part(torch.arange(length)), own))
    return sequence.sizes, all(checks)


@pytest.mark.parametrize(
    ("num_ranks", "length", "sizes"),
    [(2, 4, [2, 2]), (2, 5, [3, 2]), (3, 5, [2, 2, 1]), (3, 2, [1, 1, 0])],
)
def test_parts_of_a_split_sequence(num_ranks: int, length: int, sizes: list[int]) -> None:
    assert run_ranks(gathered_and_summed, num_ranks, length) == [(sizes, True)] * num_ranks


def shared(length: int) -> tuple[list[int], bool, bool]:
    """A rank's positions, and whether a gathered sequence and its gradient are right."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sequence = SharedSequence(dist.group.WORLD, length)
    whole = make(length)
    own = sequence.own_positions(torch.device("cpu"))
    part = whole[:, own].requires_grad_()
    out = sequence.gather(part, 1)
    (out * whole * (rank + 1)).sum().backward()
    total = num_ranks * (num_ranks + 1) / 2
    same = torch.equal(out, whole) and torch.equal(part.grad, whole[:, own] * total)
    parts = sequence.parts_of_ranks(whole, 1)
    back = torch.equal(parts[rank], whole[:, own]) and torch.equal(
        sequence.in_order(parts, 1), whole
    )
    return own.tolist(), same, back


def test_shared_sequence_is_dealt_out_from_both_ends() -> None:
    assert run_ranks(shared, 2, 8) == [
        ([0, 1, 6, 7], True, True),
        ([2, 3, 4, 5], True, True),
    ]


def shares_of_a_batch() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    tokens = torch.arange(8).view(1, 8)
    inputs = {
        "input": tokens,
        "token_types": tokens + 10,
        "masked_positions": torch.tensor([[0, 3, 7]]),
        "attention_mask": tokens > 0,
        "next_sentence_labels": torch.tensor([1]),
    }
    return share_batch(inputs, tokens + 100, mesh)


def test_batch_is_shared_by_position_and_by_label() -> None:
    (first, labels), (second, _) = run_ranks(shares_of_a_batch, 2)
    assert first["input"].tolist() == [[0, 1, 6, 7]]
    assert second["token_types"].tolist() == [[12, 13, 14, 15]]
    # Positions count in the whole sequence, and so do the labels that they look up.
    assert (first["masked_positions"].tolist(), second["masked_positions"].tolist()) == (
        [[0, 3]],
        [[7]],
    )
    assert labels.tolist() == [list(range(100, 108))]
    # Keys are those of all ranks.
    assert first["attention_mask"].shape == (1, 8)
    assert first["next_sentence_labels"].tolist() == [1]
