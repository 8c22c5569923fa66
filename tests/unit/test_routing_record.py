"""A record of routing: what was written comes back, on any layout, for the same tokens alone."""

from pathlib import Path

import pytest
import torch

from torchtitan_ext.components.routing import (
    RecordedRouting,
    RoutingWriter,
    Shape,
    Share,
    checksums,
    read_shape,
    recorded_steps,
)

SEQ_LEN, BATCH, LAYERS, TOP_K = 5, 8, 2, 3
SHAPE = Shape(LAYERS, num_experts=300, top_k=TOP_K, seq_len=SEQ_LEN, global_batch_size=BATCH)


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (batch, sequence), and the experts of each (layers, batch, sequence, top-k)."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1000, (BATCH, SEQ_LEN), generator=generator)
    ids = torch.randint(300, (LAYERS, BATCH, SEQ_LEN, TOP_K), generator=generator)
    return tokens, ids


def micro_batches(share: Share) -> list[list[int]]:
    """Rows of the global batch that a rank sees, as the data set deals them out."""
    mine = list(range(share.data_rank, BATCH, share.num_data_ranks))
    size = share.local_batch_size
    return [mine[i : i + size] for i in range(0, len(mine), size)]


def record(folder: Path, num_ranks: int, local_batch_size: int, steps: list[int]) -> None:
    for rank in range(num_ranks):
        share = Share(rank, num_ranks, local_batch_size)
        writer = RoutingWriter(folder, SHAPE, share)
        if rank == 0:
            writer.start(steps[0] - 1)
        for step in steps:
            tokens, ids = global_batch(step)
            rows = [row for rows in micro_batches(share) for row in rows]
            writer.write(step, checksums(tokens[rows]), ids[:, rows].short())


@pytest.mark.parametrize(("num_ranks", "local_batch_size"), [(1, 8), (1, 2), (2, 4), (4, 1)])
@pytest.mark.parametrize(("read_ranks", "read_batch"), [(1, 8), (2, 2), (4, 2)])
def test_record_comes_back_on_any_layout(
    tmp_path: Path, num_ranks: int, local_batch_size: int, read_ranks: int, read_batch: int
) -> None:
    record(tmp_path, num_ranks, local_batch_size, [1, 2])
    assert read_shape(tmp_path) == SHAPE
    for rank in range(read_ranks):
        share = Share(rank, read_ranks, read_batch)
        recorded = RecordedRouting(tmp_path, share)
        for step in (1, 2):
            tokens, ids = global_batch(step)
            for i, rows in enumerate(micro_batches(share)):
                found = recorded.expert_ids(step, i, tokens[rows])
                assert len(found) == LAYERS
                for layer, found_TK in zip(ids, found, strict=True):
                    assert torch.equal(found_TK, layer[rows].flatten(0, 1))


@pytest.mark.parametrize("change", ["another token", "another order"])
def test_other_tokens_are_refused(tmp_path: Path, change: str) -> None:
    record(tmp_path, 1, BATCH, [1])
    tokens = global_batch(1)[0]
    if change == "another token":
        tokens[3, 2] += 1
    else:
        tokens[3, [0, 1]] = tokens[3, [1, 0]]
    with pytest.raises(ValueError, match="sequence 3 of step 1 has other tokens"):
        RecordedRouting(tmp_path, Share(0, 1, BATCH)).expert_ids(1, 0, tokens)


def test_step_that_was_not_recorded_is_refused(tmp_path: Path) -> None:
    record(tmp_path, 1, BATCH, [1])
    with pytest.raises(ValueError, match="sequence 0 of step 2 was not recorded"):
        RecordedRouting(tmp_path, Share(0, 1, BATCH)).expert_ids(2, 0, global_batch(2)[0])


def test_earlier_record_of_later_steps_is_dropped(tmp_path: Path) -> None:
    record(tmp_path, 4, 2, [1, 2, 3, 4])
    record(tmp_path, 1, BATCH, [3])  # goes on after step 2
    assert recorded_steps(tmp_path, BATCH) == [1, 2, 3]
    assert [path.name for path in (tmp_path / "step-3").iterdir()] == ["rank-0.safetensors"]


def test_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no record of routing"):
        read_shape(tmp_path)
