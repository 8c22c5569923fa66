"""Loads of a known shape: who gets how many tokens, and no token twice."""

import pytest
import torch

from torchtitan_ext.moe.presets import preset_expert_ids
from torchtitan_ext.moe.router import count_tokens


def loads(preset: str, step: int = 1, **changes: int) -> list[int]:
    """Tokens of each expert, 12 tokens in all unless ``changes`` says otherwise."""
    sizes = {"num_experts": 8, "top_k": 3, "num_ranks": 2} | changes
    num_tokens = sizes.pop("num_tokens", 12)
    ids_TK = preset_expert_ids(preset, step, torch.arange(num_tokens), **sizes)
    assert ids_TK.shape == (num_tokens, sizes["top_k"])
    assert all(len(set(ids)) == sizes["top_k"] for ids in ids_TK.tolist())
    return count_tokens(ids_TK, sizes["num_experts"]).tolist()


@pytest.mark.parametrize(
    ("preset", "changes", "expected"),
    [
        ("balanced", {"num_tokens": 8}, [3] * 8),
        ("balanced", {"num_experts": 6, "top_k": 6}, [12] * 6),
        ("balanced", {"num_tokens": 3, "top_k": 1}, [1, 1, 1, 0, 0, 0, 0, 0]),
        ("hot_expert", {"num_tokens": 7}, [7, 2, 2, 2, 2, 2, 2, 2]),
        ("hot_expert", {"top_k": 1}, [12, 0, 0, 0, 0, 0, 0, 0]),
        ("hot_expert", {"num_ranks": 1, "num_tokens": 7}, [7, 2, 2, 2, 2, 2, 2, 2]),
        ("hot_rank", {}, [9, 9, 9, 9, 0, 0, 0, 0]),
        ("hot_rank", {"num_ranks": 4}, [12, 12, 2, 2, 2, 2, 2, 2]),
        ("hot_rank", {"num_ranks": 4, "top_k": 2}, [12, 12, 0, 0, 0, 0, 0, 0]),
        ("empty_rank", {"num_ranks": 4}, [6, 6, 6, 6, 6, 6, 0, 0]),
    ],
)
def test_load_of_each_expert(preset: str, changes: dict[str, int], expected: list[int]) -> None:
    assert loads(preset, **changes) == expected


@pytest.mark.parametrize("preset", ["balanced", "hot_expert", "hot_rank", "empty_rank"])
def test_experts_of_a_token_are_the_same_in_any_batch(preset: str) -> None:
    sizes = {"num_experts": 8, "top_k": 3, "num_ranks": 4}
    whole = preset_expert_ids(preset, 1, torch.arange(20), **sizes)
    some = torch.tensor([3, 11, 4])
    assert torch.equal(preset_expert_ids(preset, 1, some, **sizes), whole[some])


@pytest.mark.parametrize(("num_ranks", "burst"), [(2, "hot_rank"), (1, "hot_expert")])
def test_every_fourth_step_is_a_burst(num_ranks: int, burst: str) -> None:
    for step in range(1, 10):
        expected = burst if step in (4, 8) else "balanced"
        assert loads("bursts", step, num_ranks=num_ranks) == loads(expected, num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("preset", "changes", "message"),
    [
        ("hot_rank", {"num_ranks": 1}, "needs .* expert_parallel_degree of at least 2"),
        ("empty_rank", {"num_ranks": 1}, "needs .* expert_parallel_degree of at least 2"),
        ("empty_rank", {"top_k": 5}, "a token needs 5 experts, and the other ranks have 4"),
    ],
)
def test_preset_that_does_not_fit_is_refused(
    preset: str, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        loads(preset, **changes)
