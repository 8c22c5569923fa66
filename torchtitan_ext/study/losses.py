"""The losses of a run, as its metrics.jsonl has them."""

import math
from pathlib import Path

import numpy as np

from torchtitan_ext.metrics_file import read_records

Losses = dict[int, float]
"""Loss of each logged step, in the order of the steps."""


def read_losses(dump_folder: Path) -> Losses:
    """Losses by step; empty if the run has not logged any.

    A run that was resumed has repeated the steps since its last checkpoint: the later line counts.
    """
    losses = {}
    for record in read_records(dump_folder):
        if "loss" in record:
            losses[record["step"]] = math.nan if record["loss"] is None else record["loss"]
    return dict(sorted(losses.items()))


def mean_of_last(losses: Losses, share: float) -> float:
    """Mean over the last ``share`` of the steps, of at least one logged step."""
    last_step = max(losses)
    return float(np.mean([loss for step, loss in losses.items() if step > last_step * (1 - share)]))


def rolling_mean(losses: Losses, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and the mean of each and the ``window - 1`` logged ones before it."""
    steps, values = np.array(list(losses)), np.array(list(losses.values()))
    window = min(window, len(values))
    means = np.convolve(values, np.full(window, 1 / window), mode="valid")
    return steps[window - 1 :], means
