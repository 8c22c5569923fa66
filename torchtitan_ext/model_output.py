"""What a model's forward returns. The trainer decides what becomes of it."""

from typing import NamedTuple

import torch


class ModelOutput(NamedTuple):
    """Shapes: B batch, S sequence, D model, V vocabulary, L MoE layers, E experts, M label
    positions, T = B * S tokens, K experts of each.
    """

    logits: torch.Tensor
    """(B, S, V), or (B, M, V) at ``label_positions``; the (B, S, D) hidden state of a model's part
    that does not have the head.
    """
    tokens_per_expert: torch.Tensor | None = None
    """Tokens of this process that each layer's router sent to each expert, (L, E) int64."""
    label_positions: torch.Tensor | None = None
    """Where in the sequence the logits are, if not everywhere: (B, M) int64."""
    expert_ids: tuple[torch.Tensor, ...] = ()
    """Experts of each token, (T, K) int64 a MoE layer."""
    next_sentence_logits: torch.Tensor | None = None
    """(B, 2): the second segment follows the first, or is from elsewhere."""
