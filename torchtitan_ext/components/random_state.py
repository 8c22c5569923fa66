"""Random numbers of a training step, such as dropout masks, by design and not by history.

Before every step the generator is seeded with (seed, data parallel rank, step). So ranks that hold
different data draw different masks, and ranks that share data (tensor and pipeline parallel) the
same ones; a resumed run draws what the uninterrupted one would have drawn; and nothing else that
draws random numbers, such as a dataloader that starts, moves a mask.
"""

import hashlib

import torch
import torch.nn.functional as F

_PROBE_SIZE = 4096


def seed_step(seed: int, data_rank: int, step: int) -> None:
    """Seeds torch's generators, on the CPU and on accelerators, for one step of this rank."""
    digest = hashlib.sha256(f"{seed}:{data_rank}:{step}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def mask_hash(device: torch.device | str = "cpu") -> str:
    """A hash of the dropout mask that this process would draw next; draws nothing itself."""
    device = torch.device(device)
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        mask = F.dropout(torch.ones(_PROBE_SIZE, device=device), 0.5) > 0
    return hashlib.sha256(mask.cpu().numpy().tobytes()).hexdigest()
