"""Random numbers of a training step, such as dropout masks, by design and not by history.

Before every step the generator is seeded with (seed, place of the rank, step). Ranks in different
places draw different masks, as they hold different sequences, positions, heads or layers: no layer
here draws numbers for a tensor that ranks share. A resumed run draws what the uninterrupted one
would have drawn; and nothing else that draws random numbers, such as a dataloader that starts,
moves a mask.
"""

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F

_PROBE_SIZE = 4096


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the mesh, as far as what it computes differs from other ranks."""

    data: int = 0
    """Which sequences."""
    context: int = 0
    """Which part of them."""
    tensor: int = 0
    """Which positions between blocks, and which heads."""
    pipeline: int = 0
    """Which layers."""


def seed_step(seed: int, place: Place, step: int) -> None:
    """Seeds torch's generators, on the CPU and on accelerators, for one step of this rank."""
    within = (place.context, place.tensor, place.pipeline)
    # Runs with data parallelism alone keep the numbers they have always drawn.
    suffix = f":{within}" if any(within) else ""
    digest = hashlib.sha256(f"{seed}:{place.data}:{step}{suffix}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def mask_hash(device: torch.device | str = "cpu") -> str:
    """A hash of the dropout mask that this process would draw next; draws nothing itself."""
    device = torch.device(device)
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        mask = F.dropout(torch.ones(_PROBE_SIZE, device=device), 0.5) > 0
    return hashlib.sha256(mask.cpu().numpy().tobytes()).hexdigest()
