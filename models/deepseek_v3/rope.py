"""Rotary position embeddings (arXiv:2104.09864) with YaRN (arXiv:2309.00071), in real arithmetic.

Inductor can't compile complex numbers, so a rotation is written out with cosine and sine.

Shapes: B batch, S sequence, H heads, R rotary width of a head.
"""

import math

import torch

from .args import DeepSeekV3ModelArgs


def rope_cache(args: DeepSeekV3ModelArgs) -> torch.Tensor:
    """Cosine and sine of every position's angles: (max_seq_len, 2, R / 2), float32."""
    positions = torch.arange(args.max_seq_len, dtype=torch.float32)
    angles = torch.outer(positions, _frequencies(args))
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def apply_rope(x_BSHR: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (0, 1), (2, 3), ... of the last dim by their position's angles.

    The result holds the pairs' first members, then the second ones. Queries and keys are
    reordered alike, so their products don't change.
    """
    cos, sin = cache[: x_BSHR.shape[1]].unsqueeze(1).unbind(2)  # each (S, 1, R / 2)
    first, second = x_BSHR.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return rotated.to(x_BSHR.dtype)


def attention_scale(args: DeepSeekV3ModelArgs) -> float:
    """Factor on the scores: 1 / sqrt(head width), sharpened when YaRN stretches positions."""
    scale = args.qk_head_dim**-0.5
    if args.uses_yarn:
        mscale = 0.1 * args.mscale * math.log(args.rope_factor) + 1.0
        scale *= mscale**2
    return scale


def _frequencies(args: DeepSeekV3ModelArgs) -> torch.Tensor:
    """Angle per position of each of the R / 2 pairs."""
    width = args.qk_rope_head_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies = args.rope_theta**-exponents
    if not args.uses_yarn:
        return frequencies
    # Pairs that turn often keep their frequency, slow ones are stretched, with a ramp between.
    low = max(math.floor(_pair_with_turns(args.beta_fast, args)), 0)
    high = min(math.ceil(_pair_with_turns(args.beta_slow, args)), width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretched = ramp.clamp(0, 1)
    return frequencies * (1 - stretched) + frequencies / args.rope_factor * stretched


def _pair_with_turns(turns: float, args: DeepSeekV3ModelArgs) -> float:
    """The (fractional) pair that makes so many turns over the original sequence length."""
    wavelength = args.original_seq_len / (turns * 2 * math.pi)
    return args.qk_rope_head_dim * math.log(wavelength) / (2 * math.log(args.rope_theta))
