"""Loss curves as a PNG."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .curves import Curve, rolling_mean


def draw_pair(
    path: Path,
    pair: dict[str, Curve],
    window: int,
    band: Sequence[Curve] = (),
    band_name: str = "",
) -> None:
    """Two smoothed curves, over the band that others span if there are any; below, the difference.

    Args:
        pair: two runs by name, logged at the same steps.
        window: logged steps that are averaged in the upper part.
        band: further runs, logged at the same steps.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 6), height_ratios=(3, 1), layout="constrained"
    )
    if band:
        curves = [rolling_mean(curve, window) for curve in band]
        spanned = np.array([list(curve.values()) for curve in curves])
        top.fill_between(
            list(curves[0]), spanned.min(0), spanned.max(0), color="0.8", label=band_name, lw=0
        )
    (first, first_curve), (second, second_curve) = pair.items()
    for name, curve, style in ((first, first_curve, "C0-"), (second, second_curve, "C1--")):
        smoothed = rolling_mean(curve, window)
        top.plot(list(smoothed), list(smoothed.values()), style, label=name, lw=1.5)
    top.set_ylabel("loss" if window == 1 else f"loss, mean of {window} logged steps")
    top.legend()
    difference = np.array(list(second_curve.values())) - np.array(list(first_curve.values()))
    bottom.plot(list(first_curve), difference, "C1", lw=0.7)
    bottom.set_ylabel("difference, each step")
    bottom.set_xlabel("step")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
