"""Two runs, step by step."""

import math
from dataclasses import dataclass

from .curves import Curve, mean_of_last, rolling_mean

FINAL_SHARE = 0.05


@dataclass(frozen=True)
class Comparison:
    """How far one curve is from another at the steps that both have."""

    steps: list[int]
    first_difference_step: int | None
    """The first step at which the numbers are not the same in every bit."""
    max_difference: float
    """Infinite where one of them is not finite and the other is another number."""
    max_difference_step: int
    final: tuple[float, float]
    """Means over the last 5% of the steps."""

    @property
    def final_difference(self) -> float:
        return _difference(*self.final)


def compare(first: Curve, second: Curve, *, window: int = 1, relative: bool = False) -> Comparison:
    """Compares two curves.

    Args:
        window: logged steps over which numbers are averaged before they are subtracted.
        relative: divide a difference by the first curve's number.

    Raises:
        ValueError: they have no step in common, or fewer than a window.
    """
    steps = [step for step in first if step in second]
    if not steps:
        raise ValueError("no step was logged by both")
    if len(steps) < window:
        raise ValueError(f"a mean of {window} steps, but only {len(steps)} were logged by both")
    first, second = ({step: curve[step] for step in steps} for curve in (first, second))
    differing = [step for step in steps if _difference(first[step], second[step]) > 0]
    smooth_first, smooth_second = rolling_mean(first, window), rolling_mean(second, window)
    differences = {
        step: _difference(value, smooth_second[step]) / (abs(value) if relative and value else 1)
        for step, value in smooth_first.items()
    }
    # Means that are not finite in both hide a number that is finite in one.
    differences |= {s: math.inf for s in differing if math.isinf(_difference(first[s], second[s]))}
    largest = max(sorted(differences), key=lambda step: differences[step])
    return Comparison(
        steps=steps,
        first_difference_step=differing[0] if differing else None,
        max_difference=differences[largest],
        max_difference_step=largest,
        final=(mean_of_last(first, FINAL_SHARE), mean_of_last(second, FINAL_SHARE)),
    )


def _difference(first: float, second: float) -> float:
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 0.0
    difference = abs(first - second)
    return math.inf if math.isnan(difference) else difference
