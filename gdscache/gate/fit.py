"""Fits a cost to observations: seconds as a sum of non-negative prices, robust, and quick to see a change.

Least absolute deviations, relative to the observation's size, over the last observations: an observation that is late
by any factor counts no more than one that is a little late. Solved by iteratively reweighted least squares
(Schlossmacher 1973), each step with non-negative coefficients (Lawson and Hanson 1974; of three columns all subsets can
be tried).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from gdscache.arrays import Float64Array
from gdscache.histograms import ERRORS, Histogram

ENOUGH = 4  # observations before a fit decides; also the number in a row that make a change
CHANGE = 2.0  # an observation off by more than this factor may begin a change
WINDOW = 64  # observations that a fit remembers
_STEPS, _STEPS_NEAR = 12, 2
_FEW = 16  # up to this number of observations, and at each multiple of it, the fit begins from nothing
_NEAR = 0.02  # an observation this near to the expected value is fitted only at those multiples: a fit takes time
_LEAST_SHARE = 0.05  # least part of the median observation that the largest one's main feature costs


def nonnegative(rows: Float64Array, values: Float64Array, weights: Float64Array) -> Float64Array:
    """The coefficients >= 0 with the least weighted squares of `rows @ coefficients - values`; (n, p), (n,), (n,)."""
    columns = rows.shape[1]
    weighted = rows * weights[:, None]
    gram, right = rows.T @ weighted, weighted.T @ values
    gram.flat[:: columns + 1] *= 1 + 1e-12
    found = _solve(gram, right)
    if (found >= 0).all():
        return found
    best, least = np.zeros(columns), 0.0
    for chosen in (c for size in range(1, columns) for c in itertools.combinations(range(columns), size)):
        some = list(chosen)
        square = gram[np.ix_(some, some)]
        found = _solve(square, right[some])
        loss = float(found @ square @ found - 2 * found @ right[some])  # without the squares of the values, a constant
        if loss < least and (found >= 0).all():
            best, least = np.zeros(columns), loss
            best[some] = found
    return best


def _solve(square: Float64Array, right: Float64Array) -> Float64Array:
    try:
        found = np.linalg.solve(square, right)
    except np.linalg.LinAlgError:  # the figures are too far apart for their sums
        found = np.linalg.lstsq(square, right)[0]
    return np.asarray(found, dtype=np.float64)


def least_absolute(rows: Float64Array, values: Float64Array, near: Float64Array | None = None) -> Float64Array:
    """Coefficients >= 0 with about the least sum of |values - fit| / fit. Column 0 has no zeros, values are above 0.

    `near`: coefficients of a similar fit; then a few steps do.
    """
    scale = rows.max(axis=0)
    rows = rows / scale
    if near is None:
        sizes = np.maximum(values, np.median(values / rows[:, 0]) * rows[:, 0])
        weights, found, steps = 1.0 / sizes**2, np.zeros(rows.shape[1]), _STEPS
    else:
        found, steps = near * scale, _STEPS_NEAR
        weights, sizes = _weights(rows, values, found, values)
    for _ in range(steps):
        before, found = found, nonnegative(rows, values, weights)
        if (np.abs(found - before) <= 1e-4 * before).all():
            break
        weights, sizes = _weights(rows, values, found, sizes)
    result: Float64Array = found / scale
    return result


def _weights(
    rows: Float64Array, values: Float64Array, found: Float64Array, sizes: Float64Array
) -> tuple[Float64Array, Float64Array]:
    fit = rows @ found
    sizes = np.maximum(fit, 1e-3 * sizes)
    return 1.0 / (sizes * np.maximum(np.abs(values - fit), 1e-3 * sizes)), sizes


class Fit:
    """seconds = coefficients . features, from the last `WINDOW` observations.

    `usable(rows)`: the columns that these features, float64 (n, p), can tell apart; the others are 0. Column 0, the
    main one, is always among them. `ENOUGH` observations in a row that are all off by more than `CHANGE`, to the same
    side, are a change: earlier ones are forgotten. One writer at a time; readers need no lock.
    """

    def __init__(self, columns: int, usable: Callable[[Float64Array], list[int]]) -> None:
        self.columns = columns
        self.coefficients: tuple[float, ...] | None = None
        self.observations = 0  # ever
        self.off = 0  # current series of far too slow (above 0) or far too fast (below 0) observations
        self._usable = usable
        self._columns: list[int] = []
        self._seen: deque[tuple[tuple[float, ...], float]] = deque(maxlen=WINDOW)
        self.errors = Histogram(ERRORS)  # ever

    @property
    def enough(self) -> bool:
        return self.coefficients is not None and self.observations >= ENOUGH

    def seconds(self, features: Sequence[float]) -> float | None:
        prices = self.coefficients
        return None if prices is None else sum(p * f for p, f in zip(prices, features, strict=True))

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """`features` (the main one above 0) took `seconds` (above 0)."""
        expected = self.seconds(features)
        if expected is not None:
            self.errors.note(abs(expected - seconds) / seconds)
            side = 1 if seconds > CHANGE * expected else -1 if seconds * CHANGE < expected else 0
            self.off = self.off + side if side * self.off >= 0 and side else side
        self._seen.append((tuple(features), seconds))
        self.observations += 1
        if abs(self.off) >= ENOUGH:
            for _ in range(len(self._seen) - ENOUGH):
                self._seen.popleft()
            self.off = 0
        near = expected is not None and abs(expected - seconds) <= _NEAR * seconds
        if not near or self.observations <= _FEW or not self.observations % _FEW:
            self.coefficients = self._fit()

    def kept(self) -> list[tuple[tuple[float, ...], float]]:
        return list(self._seen)

    def restore(self, seen: Sequence[tuple[tuple[float, ...], float]]) -> None:
        if seen:
            self._seen.extend(seen)
            self.observations += len(seen)
            self.coefficients = self._fit()

    def _fit(self) -> tuple[float, ...]:
        rows = np.array([features for features, _ in self._seen])
        values = np.array([seconds for _, seconds in self._seen])
        columns = self._usable(rows) if len(rows) >= ENOUGH else [0]
        near = None
        if self.coefficients is not None and columns == self._columns and len(rows) > _FEW and self.observations % _FEW:
            near = np.array(self.coefficients)[columns]
        self._columns, found = columns, np.zeros(self.columns)
        found[columns] = least_absolute(rows[:, columns], values, near)
        # A high price to begin must not make everything else free.
        found[0] = max(found[0], 0.0 if found[1:-1].any() else _LEAST_SHARE * np.median(values) / rows[:, 0].max())
        return tuple(found.tolist())


def spread(column: Float64Array) -> float:
    least = float(column.min())
    return float(column.max()) / least if least > 0 else float("inf")
