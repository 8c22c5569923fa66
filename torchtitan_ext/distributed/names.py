"""Patterns of module and parameter names, in which ``*`` stands for one part between dots."""

import re
from collections.abc import Iterable

from torch import nn


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name such as "layers.3.attention.wq" fits one of the patterns."""
    return any(
        re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) for pattern in patterns
    )


def modules_named(model: nn.Module, patterns: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """The modules that fit, with their names, in the model's order."""
    patterns = list(patterns)
    return [(name, module) for name, module in model.named_modules() if matches(name, patterns)]
