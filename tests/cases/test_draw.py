"""Are the numbers of a case the same bytes everywhere, and are they what they say?"""

import hashlib
import math

import numpy as np
import pytest
import torch

from cases.draw import Draw

MANY = 200_000
GOLDEN_INTEGERS = [-4, -1, 1, 9, 5]
GOLDEN_NORMAL = ["-0x1.4e5df40000000p-1", "0x1.537b620000000p-8", "0x1.f83e480000000p-3"]
GOLDEN_PERMUTATION = [5, 0, 1, 2, 4, 3]


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


def test_the_bytes_never_change() -> None:
    draw = Draw(3, "op")
    assert draw.integers("x", (5,), -10, 10).tolist() == GOLDEN_INTEGERS
    assert [value.hex() for value in draw.normal_like("x", (3,)).tolist()] == GOLDEN_NORMAL
    assert draw.permutation("x", 6).tolist() == GOLDEN_PERMUTATION


def test_a_stream_is_its_name_scope_and_seed() -> None:
    draw = Draw(3, "op")
    same = digest(draw.integers("x", (64,), 0, 1 << 30))
    assert digest(Draw(3, "op").integers("x", (64,), 0, 1 << 30)) == same
    draw.integers("other", (999,), 0, 5)
    assert digest(draw.integers("x", (64,), 0, 1 << 30)) == same
    others = (Draw(4, "op"), Draw(3, "po"), Draw(3), draw.within("a"), draw.within("b"), draw.within("a").within("b"))
    assert len({digest(other.integers("x", (64,), 0, 1 << 30)) for other in others} | {same}) == len(others) + 1
    assert digest(draw.integers("y", (64,), 0, 1 << 30)) != same


def test_a_longer_draw_begins_like_a_shorter_one() -> None:
    draw = Draw(0, "op")
    assert draw.integers("x", (100,), 0, 1000)[:10].equal(draw.integers("x", (10,), 0, 1000))
    assert draw.integers("x", (4, 25), 0, 1000).flatten().equal(draw.integers("x", (100,), 0, 1000))


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-3, 4), (0, 7), (5, 6), (-(2**31), 2**31), (0, 2**32), (10**12, 10**12 + 3)]
)
def test_integers_fill_their_range_and_never_leave_it(low: int, high: int) -> None:
    drawn = Draw(1, "op").integers("x", (MANY,), low, high)
    assert drawn.dtype == torch.int64
    assert int(drawn.min()) >= low
    assert int(drawn.max()) < high
    if high - low <= 10:
        counts = torch.bincount(drawn - low, minlength=high - low).double()
        expected = MANY / (high - low)
        assert float(((counts - expected) ** 2 / expected).sum()) < 40
    else:
        middle, spread = (low + high - 1) / 2, (high - low) / math.sqrt(12)
        assert abs(float(drawn.double().mean()) - middle) < 5 * spread / math.sqrt(MANY)


@pytest.mark.parametrize(
    ("low", "high", "sentence"), [(0, 0, "empty range"), (3, 1, "empty range"), (0, 2**32 + 1, "at most 2")]
)
def test_impossible_ranges_are_refused(low: int, high: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Draw(1).integers("x", (3,), low, high)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3)])
def test_every_shape_is_drawn(shape: tuple[int, ...]) -> None:
    draw = Draw(1)
    assert draw.integers("x", shape, 0, 9).shape == shape
    assert draw.normal_like("x", shape).shape == shape
    assert draw.chance("x", shape, 1, 2).shape == shape


def test_normal_like_has_the_moments_that_it_says() -> None:
    drawn = Draw(2, "op").normal_like("x", (MANY,))
    assert drawn.dtype == torch.float32
    assert abs(float(drawn.double().mean())) < 5 / math.sqrt(MANY)
    assert abs(float(drawn.double().var()) - 1) < 0.02
    assert 3.0 < float(drawn.abs().max()) < 3.47
    assert abs(float((drawn.double() ** 3).mean())) < 0.02
    assert len(drawn.unique()) > MANY / 3


def test_neighbours_and_streams_are_not_correlated() -> None:
    draw = Draw(5, "op")
    x, y = draw.normal_like("x", (MANY,)).double(), draw.normal_like("y", (MANY,)).double()
    other = Draw(6, "op").normal_like("x", (MANY,)).double()
    limit = 5 / math.sqrt(MANY)
    for first, second in ((x[1:], x[:-1]), (x[64:], x[:-64]), (x[512:], x[:-512]), (x, y), (x, other)):
        assert abs(float((first * second).mean())) < limit


def test_every_bit_is_as_often_set_as_not() -> None:
    bits = Draw(7, "op")._bits("x", MANY)
    shares = np.array([float(((bits >> np.uint64(bit)) & np.uint64(1)).mean()) for bit in range(64)])
    assert np.abs(shares - 0.5).max() < 5 * 0.5 / math.sqrt(MANY)


def test_no_number_of_a_long_stream_comes_twice() -> None:
    assert len(np.unique(Draw(8)._bits("x", 1_000_000))) == 1_000_000


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_a_permutation_holds_every_number_once(count: int) -> None:
    drawn = Draw(9).permutation("x", count)
    assert drawn.dtype == torch.int64
    assert drawn.sort().values.equal(torch.arange(count))
    assert count < 1000 or not drawn.equal(torch.arange(count))


@pytest.mark.parametrize(("numerator", "denominator"), [(0, 5), (1, 50), (1, 2), (5, 5)])
def test_chance_is_the_share_that_it_says(numerator: int, denominator: int) -> None:
    drawn = Draw(10).chance("x", (MANY,), numerator, denominator)
    p = numerator / denominator
    assert drawn.dtype == torch.bool
    assert abs(float(drawn.double().mean()) - p) <= 5 * math.sqrt(p * (1 - p) / MANY)
