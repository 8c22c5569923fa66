"""Causal attention with the kernel that suits the device.

Shapes: B batch, H heads, S sequence, K width of queries and keys, V width of values.
"""

import torch
import torch.nn.functional as F

# Up to here the S x S scores are small, and plain matrix products beat the CPU's fused kernel:
# twice as fast at S = 256 in bf16 (docs/performance.md).
_MAX_SEQ_LEN_EXPLICIT = 512
_QUERY_BLOCK = 128


def causal_attention(
    q_BHSK: torch.Tensor, k_BHSK: torch.Tensor, v_BHSV: torch.Tensor, scale: float
) -> torch.Tensor:
    """Softmax attention in which a position sees itself and what comes before it: (B, H, S, V)."""
    if q_BHSK.device.type != "cpu":
        return F.scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSV, is_causal=True, scale=scale)
    if q_BHSK.shape[-2] <= _MAX_SEQ_LEN_EXPLICIT:
        return _explicit(q_BHSK, k_BHSK, v_BHSV, scale)
    # The CPU's fused kernel wants values as wide as the keys; without it torch falls back to
    # products in float32.
    width = v_BHSV.shape[-1]
    v_padded = F.pad(v_BHSV, (0, q_BHSK.shape[-1] - width))
    out = F.scaled_dot_product_attention(q_BHSK, k_BHSK, v_padded, is_causal=True, scale=scale)
    return out[..., :width]


def _explicit(
    q_BHSK: torch.Tensor, k_BHSK: torch.Tensor, v_BHSV: torch.Tensor, scale: float
) -> torch.Tensor:
    """A block of queries at a time, as none needs the keys that come after it."""
    blocks = []
    for start in range(0, q_BHSK.shape[-2], _QUERY_BLOCK):
        end = min(start + _QUERY_BLOCK, q_BHSK.shape[-2])
        queries, keys, values = q_BHSK[:, :, start:end], k_BHSK[:, :, :end], v_BHSV[:, :, :end]
        scores = (queries * scale) @ keys.transpose(-2, -1)
        query_position = torch.arange(start, end, device=scores.device).unsqueeze(-1)
        is_future = torch.arange(end, device=scores.device) > query_position
        weights = scores.float().masked_fill(is_future, float("-inf")).softmax(-1)
        blocks.append(weights.to(values.dtype) @ values)
    return torch.cat(blocks, dim=-2)
