"""How has budget use moved over many runs, and when did it step?

A series is an op on an implementation on an execution (and, on a device, an architecture). Cases that differ in nothing but
the seed are one question, so runs with moved seeds can be compared. A run's `level` is its mean budget use as if every
question had been asked in every run, by the least-squares fit of use = run + question; so questions that come and go do
not look like steps. A failing answer counts as a use of 1.

**Shapes.** Within a segment of runs, the level is explained by a step; or by a straight drift, where that explains it
better (by the Bayesian information criterion, against up to three steps); or else by a stretch that stands apart from
the runs on both sides of it. What lies between steps is a segment again. A shape is believed when two tests agree, neither
of which assumes a distribution:

* *Runs*: in a random order, would they come to lie this well on a step or line, or on a stretch? This guards against noise
  that all cases of a run share. For each series the chance of a false alarm is at most `LEVEL`, half of it for
  stretches; the order is drawn from a fixed seed.
* *Cases*: do the questions go the same way, more of them or farther than coins would make them? This guards against a
  change that only rounds otherwise. The chance of a false alarm anywhere, in any series, is at most `LEVEL` (Bonferroni
  over the series that moved at all and over the places of a shape).

No size is compared with a threshold, so a drift of a few per cent is seen once there are runs enough. Few runs tell
nothing: fewer than `FEWEST_RUNS` cannot show a step whatever they hold, so many can in their middle, and after twenty quiet
runs three are enough.
For two runs there is `reports.diff`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from oracle.check import OFF_THE_SCALE
from reports.chance import Floats, coin, one_sided
from reports.growth import shown
from reports.record import Record
from reports.store import Run, Settings, StoreError, read_run, read_settings
from reports.words import plural, without_record

# The probability of a false alarm: see above.
LEVEL = 0.01
# A step in the middle of so many runs is the rarest of their orders, up or down, and that is rare enough for steps and lines,
# which have half of the level.
FEWEST_RUNS = next(many for many in count(2) if 2 / math.comb(many, many // 2) <= LEVEL / 2)
_ORDERS = 3999
_TAIL = 0.95
# Relative to the whole variation: sums in another order are no difference.
_ROUNDING = 1e-9


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the history: where it lies, when it was created (seconds since 1970), how many records it holds."""

    name: str
    created: float
    records: int


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A place where the level changed.

    position: index into `History.runs` of the first run after it. before, after: the median use, and tail_before,
    tail_after the 95 % quantile, of the segments on both sides (medians over their runs). ratio: of the mean levels. up,
    down: questions by direction. p: the larger of the two tests', corrected.
    """

    position: int
    before: float
    after: float
    tail_before: float
    tail_after: float
    ratio: float
    up: int
    down: int
    p: float
    sentence: str


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of runs over which the level moved steadily.

    first, last: indices into `History.runs`. before, after: the level at its two ends, on the fitted line. ratio: of the
    two. per_run: the same for one run. up, down, p: as of a `Step`.
    """

    first: int
    last: int
    before: float
    after: float
    ratio: float
    per_run: float
    up: int
    down: int
    p: float
    sentence: str


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """The budget use of one series over the runs of the history; every tuple has an entry for each run.

    arch: empty in the interpreter, where it does not matter. None (0 in `count`) where the run holds nothing of the
    series. median, tail, worst: of the answers that were judged, the tail is the 95 % quantile; a failing answer counts as
    1. level: the mean use as if every question had been asked in every run. count, failed: answers judged, and failing ones
    among them.
    """

    op: str
    impl: str
    on: str
    arch: str
    median: tuple[float | None, ...]
    tail: tuple[float | None, ...]
    worst: tuple[float | None, ...]
    level: tuple[float | None, ...]
    count: tuple[int, ...]
    failed: tuple[int, ...]
    steps: tuple[Step, ...]
    drifts: tuple[Drift, ...]

    @property
    def moved(self) -> bool:
        """Whether there is a step or a drift."""
        return bool(self.steps or self.drifts)


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Many runs, the oldest first; trends of the series with any error at all, those that moved first.

    left_out: a sentence for each directory that is no finished, readable run.
    """

    runs: tuple[Point, ...]
    trends: tuple[Trend, ...]
    left_out: tuple[str, ...] = ()


class _Place(NamedTuple):
    """A series: op, implementation, execution, architecture."""

    op: str
    impl: str
    on: str
    arch: str


@dataclass
class _Series:
    """The numbers of one series: of every run that holds it, what is drawn, and the mean use of every question."""

    columns: dict[str, int] = field(default_factory=dict)
    runs: list[int] = field(default_factory=list)
    drawn: list[tuple[float, float, float, int, int]] = field(default_factory=list)
    questions: list[NDArray[np.int32]] = field(default_factory=list)
    uses: list[Floats] = field(default_factory=list)

    def add(self, run: int, answers: Sequence[tuple[str, float, bool]]) -> None:
        """The answers of a run: the case, its use, whether it fails."""
        uses = np.asarray([use for _, use, _ in answers])
        middle, tail, worst = (float(each) for each in np.quantile(uses, (0.5, _TAIL, 1.0)))
        self.runs.append(run)
        self.drawn.append((middle, tail, worst, len(uses), sum(fails for *_, fails in answers)))
        # The seed comes last in a case id.
        places = [
            self.columns.setdefault(case.rpartition(",seed=")[0] or case, len(self.columns)) for case, *_ in answers
        ]
        found, codes = np.unique(np.asarray(places, dtype=np.int32), return_inverse=True)
        self.questions.append(found)
        self.uses.append(np.bincount(codes, weights=uses) / np.bincount(codes))

    def matrix(self) -> Floats:
        """Runs by questions, NaN where a run does not hold the question."""
        found = np.full((len(self.runs), len(self.columns)), np.nan)
        for row, (questions, uses) in enumerate(zip(self.questions, self.uses, strict=True)):
            found[row, questions] = uses
        return found


def trends(runs: Iterable[Run]) -> History:
    """The history of runs in the order given. Only numbers are kept of each, so a generator needs one run at a time."""
    points: list[Point] = []
    series: defaultdict[_Place, _Series] = defaultdict(_Series)
    for number, run in enumerate(runs):
        points.append(Point(name=run.path.name, created=run.settings.created, records=len(run.records)))
        answers: defaultdict[_Place, list[tuple[str, float, bool]]] = defaultdict(list)
        for record in run.records.values():
            if not record.law and record.status in ("pass", "fail"):
                answers[_place(record)].append((record.case, shown(min(record.use, 1.0)), record.status == "fail"))
        for place, found in answers.items():
            series[place].add(number, found)
    # An exact answer has no error to follow.
    curved = {place: each for place, each in series.items() if any(worst > 0 for _, _, worst, *_ in each.drawn)}
    moving = sum(any(not np.array_equal(each.uses[0], uses) for uses in each.uses) for each in curved.values())
    found_trends = [_trend(place, each, points, moving) for place, each in curved.items()]
    found_trends.sort(key=lambda trend: (-_size(trend), trend.op, trend.impl, trend.on, trend.arch))
    return History(runs=tuple(points), trends=tuple(found_trends))


def _place(record: Record) -> _Place:
    here = record.environment
    return _Place(record.op, record.impl, record.on, "" if record.on == "interpreter" else here.arch or here.device)


def _size(trend: Trend) -> float:
    """How far the series moved, in any direction; 0 when it did not."""
    ratios = [*(step.ratio for step in trend.steps), *(drift.ratio for drift in trend.drifts)]
    return max((abs(math.log(max(ratio, 1 / OFF_THE_SCALE))) for ratio in ratios), default=0.0)


def read_history(directory: Path) -> History:
    """The history of the runs that lie in a directory, by creation.

    Raises `StoreError` when it is none or holds no finished run at all; a run that cannot be read or is unfinished is left
    out and named.
    """
    if not directory.is_dir():
        raise StoreError(f"{directory}: no such directory; a history is a directory that holds run directories")
    if (directory / "run.json").exists():
        raise StoreError(f"{directory}: is a run itself; a history is a directory that holds run directories")
    left_out: list[str] = []
    found: list[tuple[Settings, Path]] = []
    for path in sorted(directory.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            try:
                found.append((read_settings(path), path))
            except (StoreError, OSError) as error:
                left_out.append(str(error))
    found.sort(key=lambda each: (each[0].created, each[1].name))
    history = trends(_finished((path for _, path in found), left_out))
    if not history.runs:
        more = f", such as {left_out[0]}" if left_out else ""
        raise StoreError(
            f"{directory}: holds no finished run{more}; a history is a directory that holds run directories"
        )
    return msgspec.structs.replace(history, left_out=tuple(left_out))


def _finished(paths: Iterable[Path], left_out: list[str]) -> Iterator[Run]:
    """The runs one by one; a sentence for every other one goes into `left_out`."""
    for path in paths:
        try:
            run = read_run(path)
        except (StoreError, OSError) as error:
            left_out.append(str(error))
            continue
        if run.open_tasks:
            left_out.append(
                f"{path}: {without_record(len(run.open_tasks), len(run.plan))}, it is still being written "
                f"or was killed half way; mla-oracle sweep --resume {path} finishes it"
            )
            continue
        yield run


def _trend(place: _Place, series: _Series, points: Sequence[Point], moving: int) -> Trend:
    uses = series.matrix()
    level = fitted_level(uses)
    steps, drifts = _shapes(level, uses, moving)
    many = len(points)

    def spread(values: Iterable[float]) -> tuple[float | None, ...]:
        by_run = dict(zip(series.runs, values, strict=True))
        return tuple(by_run.get(number) for number in range(many))

    middles, tails, worsts, counts, failures = zip(*series.drawn, strict=True)
    counted, failed = (dict(zip(series.runs, each, strict=True)) for each in (counts, failures))
    stretches = [
        ([middle for middle, *_ in series.drawn[begin:end]], [tail for _, tail, *_ in series.drawn[begin:end]], level[begin:end])
        for begin, end in pairwise([0, *(shape.first for shape in steps), len(level)])
    ]  # fmt: skip
    told = [
        _step(shape, series.runs[shape.first], points, *sides)
        for shape, sides in zip(steps, pairwise(stretches), strict=True)
    ]
    return Trend(
        **place._asdict(),
        median=spread(middles),
        tail=spread(tails),
        worst=spread(worsts),
        level=spread(float(each) for each in level),
        count=tuple(counted.get(number, 0) for number in range(many)),
        failed=tuple(failed.get(number, 0) for number in range(many)),
        steps=tuple(told),
        drifts=tuple(_drift(shape, level, series.runs, points) for shape in drifts),
    )


def fitted_level(uses: Floats) -> Floats:
    """The level of every run: the least-squares fit of use = run + question, at the mean question. NaN is not asked."""
    asked = ~np.isnan(uses)
    if asked.all():
        means: Floats = uses.mean(axis=1)
        return means
    known = np.where(asked, uses, 0.0)
    times_asked = asked.sum(axis=0)
    question_means = known.sum(axis=0) / times_asked
    shared = np.diag(asked.sum(axis=1).astype(np.float64)) - (asked / times_asked) @ asked.T
    rest = np.where(asked, uses - question_means, 0.0).sum(axis=1)
    # Singular by a constant, and by one more for every set of runs that share no question with the others.
    runs = np.linalg.lstsq(shared, rest, rcond=1e-10)[0]
    questions = np.where(asked, uses - runs[:, None], 0.0).sum(axis=0) / times_asked
    found: Floats = runs + questions.mean()
    return found


@dataclass(frozen=True)
class _Shape:
    """A believed step before run `first`, or a drift over the runs from `first` to before `last`."""

    first: int
    last: int
    up: int
    down: int
    p: float


def _shapes(level: Floats, uses: Floats, moving: int) -> tuple[list[_Shape], list[_Shape]]:
    """The steps and the drifts of one series, by their places among its runs."""
    steps: list[_Shape] = []
    drifts: list[_Shape] = []
    segments = [(0, len(level))]
    while segments:
        first, last = segments.pop()
        found = _look(level[first:last], uses[first:last], max(1, moving), len(level))
        if found is None:
            continue
        inner, is_drift = found
        shifted = [_Shape(first + each.first, first + each.last, each.up, each.down, each.p) for each in inner]
        if is_drift:
            drifts += shifted
            continue
        steps += shifted
        cuts = [first, *(each.first for each in shifted), last]
        segments += pairwise(cuts)
    return sorted(steps, key=lambda each: each.first), sorted(drifts, key=lambda each: each.first)


def _look(level: Floats, uses: Floats, moving: int, runs: int) -> tuple[list[_Shape], bool] | None:
    """What is believed of one segment: its one step, its drift (True), or the two ends of a stretch; None for nothing."""
    many = len(level)
    whole = _variation(level)
    # The rarest order that there can be is still common.
    if many < 3 or whole <= (_ROUNDING * max(1e-3, float(np.abs(level).max()))) ** 2:
        return None
    split = 1 + int(np.argmin(_step_rests(level[None])[0]))
    is_drift = _is_drift(level)
    weights: Floats = np.where(np.arange(many) < split, -1.0, 1.0)
    if is_drift:
        weights = _places(many)
    # Half of the level each for steps and lines, and for stretches.
    places = 2 * moving * runs
    up, down, chance = _directions(uses, weights, is_drift)
    p = min(1.0, chance * places)
    if p <= LEVEL:
        p = max(p, 2 * _rarity(level, _best_step_or_line))
        if p <= LEVEL:
            return [_Shape(0 if is_drift else split, many, up, down, p)], is_drift
    begin, end = _best_stretch_of(level)
    inside = (np.arange(many) >= begin) & (np.arange(many) < end)
    up, down, chance = _directions(uses, np.where(inside, 1.0, -1.0), False)
    p = min(1.0, chance * places * (runs - 1) / 2)
    if begin > 0 and end < many and p <= LEVEL:
        p = max(p, 2 * _rarity(level, _best_stretch))
        if p <= LEVEL:
            return [_Shape(begin, end, up, down, p), _Shape(end, many, down, up, p)], False
    return None


def _places(many: int) -> Floats:
    """The places of so many runs, about their middle."""
    return np.arange(many, dtype=np.float64) - (many - 1) / 2


def _directions(uses: Floats, weights: Floats, is_drift: bool) -> tuple[int, int, float]:
    """How many questions went up and how many down, and the chance of it.

    A question moves by its slope over the weights of a drift; or from the mean where the weights are -1 to where they are 1.
    """
    asked = ~np.isnan(uses)
    known = np.where(asked, uses, 0.0)
    if is_drift:
        centres = (asked * weights[:, None]).sum(axis=0) / np.maximum(asked.sum(axis=0), 1)
        moves = (known * np.where(asked, weights[:, None] - centres, 0.0)).sum(axis=0)
    else:
        later, earlier = asked & (weights > 0)[:, None], asked & (weights < 0)[:, None]
        both = later.any(axis=0) & earlier.any(axis=0)
        means = [(known * which).sum(axis=0) / np.maximum(which.sum(axis=0), 1) for which in (later, earlier)]
        moves = np.where(both, means[0] - means[1], 0.0)
    # Sums in another order are no move.
    rounding = _ROUNDING * float(known.max(initial=0.0))
    up, down = int((moves > rounding).sum()), int((moves < -rounding).sum())
    return up, down, min(1.0, 2 * min(coin(up, down), one_sided(moves)))


def _variation(level: Floats) -> float:
    return float(np.square(level - level.mean()).sum())


def _step_rests(levels: Floats) -> Floats:
    """What each place of a step leaves unexplained of each row: sums of squares about the means of both sides."""
    many = levels.shape[1]
    centred = levels - levels.mean(axis=1, keepdims=True)
    sums = np.cumsum(centred, axis=1)[:, :-1]
    left = np.arange(1, many)
    found: Floats = np.square(centred).sum(axis=1, keepdims=True) - np.square(sums) * (many / (left * (many - left)))
    return found


def _line_rests(levels: Floats) -> Floats:
    """What a straight line leaves unexplained of each row."""
    places = _places(levels.shape[1])
    centred = levels - levels.mean(axis=1, keepdims=True)
    found: Floats = np.square(centred).sum(axis=1) - np.square(centred @ places) / np.square(places).sum()
    return found


def _best_step_or_line(levels: Floats) -> Floats:
    found: Floats = np.minimum(_step_rests(levels).min(axis=1), _line_rests(levels))
    return found


def _stretch_rests(levels: Floats) -> Iterator[tuple[int, Floats]]:
    """What stretches of each length leave unexplained of each row, by where they begin."""
    many = levels.shape[1]
    centred = levels - levels.mean(axis=1, keepdims=True)
    sums = np.concatenate([np.zeros((len(levels), 1)), np.cumsum(centred, axis=1)], axis=1)
    whole = np.square(centred).sum(axis=1, keepdims=True)
    for length in range(1, many):
        inside = sums[:, length:] - sums[:, :-length]
        yield length, whole - np.square(inside) * (many / (length * (many - length)))


def _best_stretch(levels: Floats) -> Floats:
    found = np.full(len(levels), np.inf)
    for _, rests in _stretch_rests(levels):
        found = np.minimum(found, rests.min(axis=1))
    return found


def _best_stretch_of(level: Floats) -> tuple[int, int]:
    best = (math.inf, 0, 1)
    for length, rests in _stretch_rests(level[None]):
        begin = int(np.argmin(rests[0]))
        best = min(best, (float(rests[0, begin]), begin, begin + length))
    return best[1], best[2]


def _rarity(level: Floats, rest: Callable[[Floats], Floats]) -> float:
    """How rarely the same runs in a random order leave as little unexplained."""
    draw = np.random.default_rng(0)
    orders = draw.permuted(np.broadcast_to(level, (_ORDERS, len(level))), axis=1)
    limit = float(rest(level[None])[0]) + _ROUNDING * _variation(level)
    return float(1 + (rest(orders) <= limit).sum()) / (1 + _ORDERS)


def _is_drift(level: Floats) -> bool:
    """Whether a line explains the level better than one, two or three steps, for the numbers that each needs."""
    many = len(level)
    floor = _ROUNDING * _variation(level)

    def criterion(rest: float, numbers: int) -> float:
        return many * math.log(max(rest, floor)) + numbers * math.log(many)

    line = criterion(float(_line_rests(level[None])[0]), 2)
    # What is left of each stretch about its own mean, and from it the best division into so many parts.
    sums, squares = (
        np.concatenate([[0.0], np.cumsum(each)]) for each in (level - level.mean(), np.square(level - level.mean()))
    )
    ends, begins = np.meshgrid(np.arange(many + 1), np.arange(many + 1))
    lengths = np.maximum(ends - begins, 1)
    rests = np.where(
        ends > begins, squares[ends] - squares[begins] - np.square(sums[ends] - sums[begins]) / lengths, np.inf
    )
    best = rests[0]
    for steps in range(1, min(3, many - 1) + 1):
        best = (best[:, None] + rests).min(axis=0)
        if criterion(float(best[many]), 2 * steps + 1) < line:
            return False
    return True


def _ratio(before: float, after: float) -> float:
    return min(after / before, OFF_THE_SCALE) if before > 0 else OFF_THE_SCALE if after > 0 else 1.0


# Of a stretch of runs: the medians, the tails, the levels.
_Stretch = tuple[Sequence[float], Sequence[float], Floats]


def _step(shape: _Shape, run: int, points: Sequence[Point], earlier: _Stretch, later: _Stretch) -> Step:
    (before, after), (tail_before, tail_after) = (
        [float(np.median(side[which])) for side in (earlier, later)] for which in (0, 1)
    )
    ratio = _ratio(float(earlier[2].mean()), float(later[2].mean()))
    return Step(
        position=run, before=before, after=after, tail_before=tail_before, tail_after=tail_after, ratio=ratio, up=shape.up,
        down=shape.down, p=shape.p,
        sentence=(
            f"steps {'up' if ratio > 1 else 'down'} at {points[run].name}: the mean use is {ratio:.3g} times what it was, "
            f"the median {before:.3g} → {after:.3g}, the 95 % quantile {tail_before:.3g} → {tail_after:.3g}; "
            f"{plural(shape.up, 'question')} went up and {shape.down:,} down (p {shape.p:.1g})"
        ),
    )  # fmt: skip


def _drift(shape: _Shape, level: Floats, runs: Sequence[int], points: Sequence[Point]) -> Drift:
    own = level[shape.first : shape.last]
    places = _places(len(own))
    slope = float(own @ places / np.square(places).sum())
    before, after = (max(0.0, float(own.mean()) + slope * float(places[end])) for end in (0, -1))
    first, last = runs[shape.first], runs[shape.last - 1]
    ratio = _ratio(before, after)
    per_run = ratio ** (1 / (len(own) - 1))
    return Drift(
        first=first, last=last, before=before, after=after, ratio=ratio, per_run=per_run, up=shape.up, down=shape.down,
        p=shape.p,
        sentence=(
            f"drifts {'up' if slope > 0 else 'down'} from {points[first].name} to {points[last].name}: the mean use goes "
            f"from {before:.3g} to {after:.3g}, {100 * (per_run - 1):+.2g} % a run; {plural(shape.up, 'question')} went up and "
            f"{shape.down:,} down (p {shape.p:.1g})"
        ),
    )  # fmt: skip
