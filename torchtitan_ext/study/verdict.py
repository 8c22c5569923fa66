"""Whether final losses are as close to each other as they have to be."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# Student's t, two-sided 99%, by degrees of freedom (one less than there are runs).
_T_QUANTILES = {2: 9.925, 3: 5.841, 4: 4.604}


class Check(NamedTuple):
    """A difference of losses and how large it may be."""

    name: str
    difference: float
    limit: float

    @property
    def passed(self) -> bool:
        return abs(self.difference) <= self.limit  # not so if one is nan

    def __str__(self) -> str:
        verdict = "ok" if self.passed else "NOT OK"
        return f"{self.name}: {self.difference:+.2e} (at most {self.limit:.2e}) {verdict}"


def check_equal(name: str, loss: float, other: float, tolerance: float) -> Check:
    """Two runs that compute the same."""
    return Check(name, loss - other, tolerance)


def check_among(name: str, loss: float, others: Sequence[float]) -> Check:
    """A run that draws other random numbers than ``others``, three to five of them, did.

    The limit is the 99% prediction interval: where one more run of a normal distribution lies that
    is known by the mean and deviation of the others alone.
    """
    deviation = statistics.stdev(others) * math.sqrt(1 + 1 / len(others))
    return Check(name, loss - statistics.mean(others), _T_QUANTILES[len(others) - 1] * deviation)
