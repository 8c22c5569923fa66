"""Keeps the compiler's caches on disk from serving graphs of another version or another rank."""

import hashlib
import re
from pathlib import Path

import torch

_PACKAGE = Path(__file__).resolve().parents[1]
_TAG = re.compile(r"torchtitan_ext-[0-9a-f]{16}-tp\d+")


def tag_compile_caches(tensor_rank: int = 0) -> None:
    """Makes the package's source and a rank part of the key of what is compiled from now on.

    torch's caches know an operator of our own by its name, and a checkpoint's policy by what it
    says of itself. The gradient of grouped_mm is traced into a cached graph, but not looked at
    when the graph is found again: without the tag an edit there would have no effect.

    They know a DTensor by its layout, which is the same on all ranks. The graph of a loss along the
    vocabulary has this rank's part of it as a constant: without the tag a rank would take the graph
    that another has left, and the loss would be wrong (pytorch/pytorch#188390).

    Args:
        tensor_rank: this rank's among those that share a layer's weights.
    """
    config = torch.compiler.config
    config.cache_key_tag = _TAG.sub("", config.cache_key_tag)
    config.cache_key_tag += f"torchtitan_ext-{source_hash()}-tp{tensor_rank}"


def source_hash() -> str:
    """A hash of every Python file of the package."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
