"""Curves of a run, as its metrics.jsonl has them: the loss or another number by step."""

import math
from pathlib import Path

import numpy as np

from torchtitan_ext.metrics_file import read_records

Curve = dict[int, float]
"""A number for each logged step, in the order of the steps."""


def read_curve(run: Path, key: str = "loss") -> Curve:
    """``key`` by step; see :func:`read_curves`."""
    return read_curves(run, key)[0]


def read_curves(run: Path, *keys: str) -> list[Curve]:
    """Each of the keys by step, in one pass; empty if the run has not logged any.

    A run that was resumed has repeated the steps since its last checkpoint: the later line counts.

    Args:
        run: a dump folder, or its metrics.jsonl.

    Raises:
        ValueError: names what is no number.
    """
    curves: dict[str, Curve] = {key: {} for key in keys}
    for record in read_records(run):
        step = record["step"]
        for key in record.keys() & curves:
            value = math.nan if record[key] is None else record[key]
            if not isinstance(value, int | float):
                raise ValueError(f"{run}: {key} of step {step} is no number, but {value!r}")
            curves[key][step] = float(value)
    return [dict(sorted(curve.items())) for curve in curves.values()]


def mean_of_last(curve: Curve, share: float) -> float:
    """Mean over the last ``share`` of the steps, of at least one logged step."""
    last_step = max(curve)
    return float(
        np.mean([value for step, value in curve.items() if step > last_step * (1 - share)])
    )


def rolling_mean(curve: Curve, window: int) -> Curve:
    """The mean of each logged step and the ``window - 1`` before it, from the first full window."""
    window = min(window, len(curve))
    means = np.convolve(list(curve.values()), np.full(window, 1 / window), mode="valid")
    return dict(zip(list(curve)[window - 1 :], means.tolist(), strict=True))
