"""Loss curves as a PNG."""

from pathlib import Path

import numpy as np

from .losses import Losses, rolling_mean


def draw_pair(
    path: Path, pair: dict[str, Losses], band: list[Losses], band_name: str, window: int
) -> None:
    """Two smoothed curves over the band that others span, and below it their difference.

    Args:
        pair: two runs by name, logged at the same steps.
        band: further runs, logged at the same steps.
        window: logged steps that are averaged.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 6), height_ratios=(3, 1), layout="constrained"
    )
    curves = [rolling_mean(losses, window) for losses in band]
    spanned = np.stack([means for _, means in curves])
    top.fill_between(
        curves[0][0], spanned.min(0), spanned.max(0), color="0.8", label=band_name, linewidth=0
    )
    (first, first_losses), (second, second_losses) = pair.items()
    top.plot(*rolling_mean(first_losses, window), label=first, linewidth=2.5)
    top.plot(*rolling_mean(second_losses, window), label=second, linewidth=1, linestyle="--")
    top.set_ylabel(f"loss, mean of {window} logged steps")
    top.legend()
    steps = np.array(list(first_losses))
    difference = np.array(list(second_losses.values())) - np.array(list(first_losses.values()))
    bottom.plot(steps, difference, linewidth=0.5)
    bottom.set_ylabel("difference, each step")
    bottom.set_xlabel("step")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
