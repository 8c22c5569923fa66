"""Keeps the compiler's caches on disk from serving graphs of an earlier version of this code."""

import hashlib
from pathlib import Path

import torch

_PACKAGE = Path(__file__).resolve().parents[1]


def tag_compile_caches() -> None:
    """Makes this package's source part of the key of everything that is compiled from now on.

    torch's caches know an operator of our own by its name, and a checkpoint's policy by what it
    says of itself. The gradient of grouped_mm is traced into a cached graph, but not looked at
    when the graph is found again: without the tag an edit there would have no effect.
    """
    config = torch.compiler.config
    tag = f"torchtitan_ext-{source_hash()}"
    if tag not in config.cache_key_tag:
        config.cache_key_tag += tag


def source_hash() -> str:
    """A hash of every Python file of the package."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
