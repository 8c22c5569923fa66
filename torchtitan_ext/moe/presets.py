"""Expert ids that no router chose: loads of a known shape, for benchmarks and for tests.

Shapes: T tokens, E experts, K top-k, P ranks of expert parallelism, e = E / P experts of a rank.
"""

from collections.abc import Sequence

import torch

_OF_RANKS = ("hot_rank", "empty_rank")
_BURST_PERIOD = 4


def preset_expert_ids(
    preset: str,
    step: int,
    tokens_T: torch.Tensor,
    *,
    num_experts: int,
    top_k: int,
    num_ranks: int,
) -> torch.Tensor:
    """The experts of each token, (T, K) int64; those of a token differ.

    Args:
        tokens_T: the tokens' numbers in the global batch: in turn, and so in any layout.

    ==========  ==================================================================================
    balanced    every expert gets equally many tokens, give or take one
    hot_expert  every token visits expert 0; their other choices are spread over the other experts
    hot_rank    every token visits as many experts of the first rank as there are, or as it has
                choices; what is left is spread over the other ranks
    empty_rank  the last rank gets no token, the others equally many
    bursts      balanced; in every 4th step a hot rank, without expert parallelism a hot expert
    ==========  ==================================================================================

    Raises:
        ValueError: how the preset does not fit, as the end of "preset = ...: ".
    """
    check_preset(preset, num_experts=num_experts, top_k=top_k, num_ranks=num_ranks)
    if preset == "bursts":
        is_burst = step % _BURST_PERIOD == 0
        preset = ("hot_rank" if num_ranks > 1 else "hot_expert") if is_burst else "balanced"
    experts = range(num_experts)
    per_rank = num_experts // num_ranks
    if preset == "hot_expert":
        return _favour(experts[:1], experts[1:], tokens_T, top_k)
    if preset == "hot_rank":
        return _favour(experts[:per_rank], experts[per_rank:], tokens_T, top_k)
    if preset == "empty_rank":
        return _spread(experts[:-per_rank], tokens_T, top_k)
    assert preset == "balanced", preset
    return _spread(experts, tokens_T, top_k)


def check_preset(preset: str, *, num_experts: int, top_k: int, num_ranks: int) -> None:
    """Raises ValueError, as :func:`preset_expert_ids` does."""
    if preset in _OF_RANKS and num_ranks == 1:
        raise ValueError("needs [parallelism] expert_parallel_degree of at least 2")
    others = num_experts - num_experts // num_ranks
    if preset == "empty_rank" and top_k > others:
        raise ValueError(f"a token needs {top_k} experts, and the other ranks have {others}")


def _favour(
    hot: Sequence[int], others: Sequence[int], tokens_T: torch.Tensor, top_k: int
) -> torch.Tensor:
    num_hot = min(top_k, len(hot))
    ids = [_spread(hot, tokens_T, num_hot)]
    if num_hot < top_k:
        ids.append(_spread(others, tokens_T, top_k - num_hot))
    return torch.cat(ids, dim=1)


def _spread(experts: Sequence[int], tokens_T: torch.Tensor, top_k: int) -> torch.Tensor:
    """Deals the experts out in turn. K neighbours in the turn differ, as there are K or more."""
    turn_TK = tokens_T.unsqueeze(1) * top_k + torch.arange(top_k)
    return torch.tensor(experts)[turn_TK % len(experts)]
