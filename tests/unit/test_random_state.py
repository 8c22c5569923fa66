"""Random numbers of a step follow from (seed, data rank, step) alone."""

import torch
import torch.nn.functional as F

from torchtitan_ext.components.random_state import Place, mask_hash, seed_step


def _mask(seed: int, data_rank: int, step: int) -> torch.Tensor:
    seed_step(seed, Place(data_rank), step)
    return F.dropout(torch.ones(1000), 0.5) > 0


def test_same_step_draws_same_mask_whatever_was_drawn_before() -> None:
    first = _mask(0, 1, 5)
    torch.rand(17)
    assert torch.equal(first, _mask(0, 1, 5))


def test_seed_data_rank_and_step_each_change_the_mask() -> None:
    masks = [_mask(*key) for key in [(0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 2), (0, 1, 0)]]
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            # Independent masks agree in about half of the places.
            assert 400 < (mask == other).sum() < 600


def test_mask_hash_speaks_of_the_next_mask_and_draws_nothing() -> None:
    seed_step(0, Place(), 1)
    state = torch.get_rng_state()
    first = mask_hash()
    assert torch.equal(torch.get_rng_state(), state)
    assert mask_hash() == first
    torch.rand(1)
    assert mask_hash() != first
    seed_step(0, Place(), 1)
    assert mask_hash() == first
