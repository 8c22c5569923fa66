"""The configuration: our sections of it, how it is read, and what is refused.

torchtitan finds our sections through this module (``job.custom_config_module``).
"""

from .sections import (
    CheckpointMode,
    Dropout,
    JobConfig,
    LayerRule,
    LayerWrap,
    Metrics,
    Mlm,
    Zero,
    match_layers,
)

__all__ = [
    "CheckpointMode",
    "Dropout",
    "JobConfig",
    "LayerRule",
    "LayerWrap",
    "Metrics",
    "Mlm",
    "Zero",
    "match_layers",
]
