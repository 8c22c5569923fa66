"""The configuration: our sections of it, how it is read, and what is refused.

torchtitan finds our sections through this module (``job.custom_config_module``).
"""

from .sections import CheckpointMode, JobConfig, LayerRule, LayerWrap, Metrics, match_layers

__all__ = ["CheckpointMode", "JobConfig", "LayerRule", "LayerWrap", "Metrics", "match_layers"]
