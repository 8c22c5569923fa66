"""Parallelisms, checkpointing and compilation, applied to single-device models from outside."""
