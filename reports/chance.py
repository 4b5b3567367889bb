"""Could chance have done this?

Exact tests that assume no distribution, and what keeps many of them together honest.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def coin(up: int, down: int) -> float:
    """The probability that so many fair coins fall at least this unevenly, either way."""
    tossed, fewer = up + down, min(up, down)
    if up == down:
        return 1.0
    heads = np.arange(1, fewer + 1, dtype=np.float64)
    # log of the binomial coefficients, by their recurrence.
    logs = np.concatenate([[0.0], np.cumsum(np.log((tossed - heads + 1) / heads))]) - tossed * math.log(2)
    top = float(logs.max())
    return min(1.0, 2 * math.exp(top) * float(np.exp(logs - top).sum()))


def one_sided(moves: Floats) -> float:
    """A bound on the probability that moves of these sizes, were their signs fair coins, add up to as much (Hoeffding).

    It sees a few that move far among many that move a little, which `coin` does not.
    """
    squares = float(np.square(moves).sum())
    return min(1.0, 2 * math.exp(-(float(moves.sum()) ** 2) / (2 * squares))) if squares else 1.0


def least(tossed: int) -> float:
    """The smallest value that `coin` can have for so many coins."""
    return min(1.0, 2.0 ** (1 - tossed)) if tossed < 1000 else 0.0


def corrected(chances: Sequence[float], leasts: Sequence[float], level: float) -> list[float]:
    """The chances after Holm's correction: at most `level` for any false alarm among all of them.

    leasts: how small each could have become. By them those that could never be seen are set aside before counting
    (Tarone); their chance is 1.
    """
    lows = np.asarray(leasts, dtype=np.float64)
    counted = _countable(lows, level)
    found = np.ones(len(lows))
    (kept,) = np.nonzero(lows <= level / counted)
    ordered = kept[np.argsort(np.asarray(chances, dtype=np.float64)[kept], kind="stable")]
    worst = 0.0
    for place, index in enumerate(ordered):
        worst = max(worst, min(1.0, chances[index] * (len(ordered) - place)))
        found[index] = worst
    return [float(chance) for chance in found]


def countable(leasts: Sequence[float], level: float) -> int:
    """Among how many tests `level` is to be shared, when each can become as small as its least."""
    lows = np.asarray(leasts, dtype=np.float64)
    return max(1, int((lows <= level / _countable(lows, level)).sum()))


def _countable(lows: Floats, level: float) -> int:
    """The smallest K for which at most K tests can reach level / K."""
    ordered = np.sort(lows)
    for many in range(1, len(ordered) + 1):
        if int(np.searchsorted(ordered, level / many, side="right")) <= many:
            return many
    return max(1, len(ordered))


def median_interval(ordered: Floats, level: float) -> tuple[float, float]:
    """The interval of the median of what the sorted values were drawn from, missing it with at most `level`.

    Between two order statistics; infinite where there are too few values to say.
    """
    tossed = len(ordered)
    if tossed == 0 or least(tossed) > level:
        return -math.inf, math.inf
    heads = np.arange(1, tossed // 2 + 1, dtype=np.float64)
    logs = np.concatenate([[0.0], np.cumsum(np.log((tossed - heads + 1) / heads))]) - tossed * math.log(2)
    below = np.cumsum(np.exp(logs))
    # The median lies below the value of rank `outside` (from 0) when at most `outside` values are below the median.
    outside = int(np.searchsorted(2 * below, level, side="right")) - 1
    return float(ordered[outside]), float(ordered[tossed - 1 - outside])
