"""Attention with the kernel that suits the device, as modules for what is done around it.

Shapes: B batch, H heads, S sequence (Q queries of it), K width of queries and keys, V of values.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Up to here the scores are small, and plain matrix products beat the CPU's fused kernel: twice as
# fast at S = 256 in bf16 (docs/performance.md).
_MAX_SEQ_LEN_EXPLICIT = 512
_QUERY_BLOCK = 128


class CausalAttention(nn.Module):
    """Softmax attention in which a position sees itself and what comes before it.

    Args:
        scale: factor on the scores.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(
        self,
        q_BHQK: torch.Tensor,
        k_BHSK: torch.Tensor,
        v_BHSV: torch.Tensor,
        query_starts: tuple[int, ...] = (0,),
    ) -> torch.Tensor:
        """Returns (B, H, Q, V).

        Args:
            q_BHQK: queries at consecutive positions from each of ``query_starts`` on, equally many.
            k_BHSK: keys from position 0 on, at least to the last query's.
            v_BHSV: their values.
            query_starts: where the runs of queries begin.
        """
        is_short = k_BHSK.shape[-2] <= _MAX_SEQ_LEN_EXPLICIT
        if q_BHQK.device.type == "cpu" and is_short:
            attend = _explicit
        elif len(query_starts) == 1 and q_BHQK.shape[-2] == k_BHSK.shape[-2]:
            attend = _fused
        else:
            attend = _fused_with_mask
        # Ranks that share a sequence differ in where their queries start. Each takes the same way,
        # by the same operators: otherwise their graphs could order collectives differently.
        outputs = []
        for q, start in zip(q_BHQK.chunk(len(query_starts), -2), query_starts, strict=True):
            end = start + q.shape[-2]
            k, v = (x.narrow(-2, 0, end) for x in (k_BHSK, v_BHSV))
            outputs.append(attend(q, k, v, self.scale))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -2)


class BidirectionalAttention(nn.Module):
    """Softmax attention to all positions that a mask lets through, with dropout on the weights."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(
        self,
        q_BHQK: torch.Tensor,
        k_BHSK: torch.Tensor,
        v_BHSV: torch.Tensor,
        is_key_B11S: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns (B, H, Q, V)."""
        return F.scaled_dot_product_attention(
            q_BHQK,
            k_BHSK,
            v_BHSV,
            attn_mask=is_key_B11S,
            dropout_p=self.dropout if self.training else 0.0,
        )


def _fused(
    q_BHQK: torch.Tensor, k_BHSK: torch.Tensor, v_BHSV: torch.Tensor, scale: float
) -> torch.Tensor:
    """Of queries at all positions."""
    return _fused_kernel(q_BHQK, k_BHSK, v_BHSV, is_causal=True, scale=scale)


def _fused_with_mask(
    q_BHQK: torch.Tensor, k_BHSK: torch.Tensor, v_BHSV: torch.Tensor, scale: float
) -> torch.Tensor:
    """Of queries at the last Q of S positions."""
    # Not torch's CausalBias, whose mask has no elements: it can't be made in a checkpointed region.
    mask = _is_past(q_BHQK.shape[-2], k_BHSK.shape[-2], q_BHQK.device)
    return _fused_kernel(q_BHQK, k_BHSK, v_BHSV, attn_mask=mask, scale=scale)


def _fused_kernel(
    q_BHQK: torch.Tensor, k_BHSK: torch.Tensor, v_BHSV: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    if q_BHQK.device.type != "cpu":
        return F.scaled_dot_product_attention(q_BHQK, k_BHSK, v_BHSV, **kwargs)
    # The CPU's kernel wants values as wide as the keys; without it torch falls back to products in
    # float32.
    width = v_BHSV.shape[-1]
    v_padded = F.pad(v_BHSV, (0, q_BHQK.shape[-1] - width))
    return F.scaled_dot_product_attention(q_BHQK, k_BHSK, v_padded, **kwargs)[..., :width]


def _explicit(
    q_BHQK: torch.Tensor, k_BHSK: torch.Tensor, v_BHSV: torch.Tensor, scale: float
) -> torch.Tensor:
    """Of queries at the last Q of S positions, a block of queries at a time, as none needs the keys
    that come after it.
    """
    num_queries = q_BHQK.shape[-2]
    first_position = k_BHSK.shape[-2] - num_queries
    blocks = []
    for start in range(0, num_queries, _QUERY_BLOCK):
        end = min(start + _QUERY_BLOCK, num_queries)
        num_keys = first_position + end
        queries, keys, values = (
            q_BHQK[:, :, start:end],
            k_BHSK.narrow(-2, 0, num_keys),
            v_BHSV.narrow(-2, 0, num_keys),
        )
        scores = (queries * scale) @ keys.transpose(-2, -1)
        is_future = ~_is_past(end - start, num_keys, scores.device)
        weights = scores.float().masked_fill(is_future, float("-inf")).softmax(-1)
        blocks.append(weights.to(values.dtype) @ values)
    return torch.cat(blocks, dim=-2)


def _is_past(num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
    """Whether a query sees a key, (Q, S); the last query sees all keys."""
    query_position = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(-1)
    return torch.arange(num_keys, device=device) <= query_position
