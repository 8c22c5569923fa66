"""What a model's forward returns. The trainer decides what becomes of it."""

from typing import NamedTuple

import torch


class ModelOutput(NamedTuple):
    """Shapes: B batch, S sequence, V vocabulary, L MoE layers, E experts."""

    logits: torch.Tensor
    """(B, S, V)."""
    tokens_per_expert: torch.Tensor | None = None
    """Tokens of this process that each layer's router sent to each expert, (L, E) int64."""
