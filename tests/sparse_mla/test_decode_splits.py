"""Are the split rules those of the tables, whoever computes them?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cases.sparse_mla.decode_splits import Arch, Inputs, Rule, SplitsCase
from impl.sources import settings
from impl.sparse_mla import splits as split_rules
from impl.sparse_mla.decode_splits import IMPLS
from oracle.sparse_mla import decode_splits as oracle

# {(main, extra) average lengths: {programs: splits}} for 256 and 304 compute units.
GFX942_256 = {
    (0, 0): {
        **dict.fromkeys(range(17), 16), 17: 15, 20: 12, 24: 10, 31: 8, 32: 8, 33: 7, 40: 6, 48: 5, 64: 4, 65: 7, 77: 3,
        85: 3, 86: 5, 96: 5, 100: 5, 128: 2, 129: 5, 150: 5, 200: 5, 224: 1, 255: 1, 256: 1, 257: 5, 300: 5, 305: 5,
        400: 3, 512: 1, 600: 2, 1024: 1,
    },
    (128, 0): {
        **dict.fromkeys(range(1, 74), 4), **dict.fromkeys(range(74, 86), 2), **dict.fromkeys(range(86, 103), 4),
        **dict.fromkeys(range(103, 129), 2), 160: 2, 192: 4, 224: 1, 256: 1, 320: 4, 512: 1,
    },
    (128, 512): {
        **dict.fromkeys(range(1, 17), 16), 24: 8, 32: 8, 40: 6, 48: 4, 64: 4, 96: 4, 128: 2, 160: 3, 192: 4, 224: 1,
        256: 1, 320: 4, 512: 1,
    },
    (128, 2048): {
        **dict.fromkeys(range(1, 17), 16), 24: 10, 32: 8, 40: 6, 48: 5, 64: 4, 96: 5, 128: 2, 160: 3, 192: 4, 224: 1,
        256: 1, 320: 4, 512: 1,
    },
}  # fmt: skip
GFX942_304 = {
    (0, 0): {
        **dict.fromkeys(range(18), 16), 20: 15, 24: 12, 31: 9, 32: 9, 33: 9, 40: 7, 48: 6, 64: 4, 65: 4, 77: 7, 85: 7,
        86: 7, 96: 3, 100: 3, 128: 2, 129: 2, 150: 2, 200: 3, 224: 4, **dict.fromkeys(range(255, 305), 1), 305: 5,
        400: 3, 512: 4, 600: 1, 1024: 2,
    },
    (128, 0): {**dict.fromkeys(range(1, 65), 4), 96: 2, 128: 2, 160: 4, 192: 2, 224: 4, 256: 1, 320: 5, 512: 4},
    (128, 512): {
        **dict.fromkeys(range(1, 17), 16), 24: 8, 32: 8, 40: 6, 48: 6, 64: 4, 96: 3, 128: 2, 160: 4, 192: 3, 224: 4,
        256: 1, 320: 5, 512: 4,
    },
    (128, 2048): {
        **dict.fromkeys(range(1, 17), 16), 24: 11, 32: 8, 40: 7, 48: 6, 64: 4, 96: 3, 128: 2, 160: 5, 192: 3, 224: 4,
        256: 1, 320: 5, 512: 4,
    },
}  # fmt: skip
_FEW = dict.fromkeys(range(16), 32)
GFX950_256 = {
    (0, 0): {**_FEW, **dict.fromkeys(range(16, 97), 4), 128: 3, 192: 3, 256: 2, 512: 1, 513: 1, 1024: 1},
    (128, 0): {**_FEW, **dict.fromkeys(range(16, 128), 4), 128: 4, 192: 3, 256: 2, 512: 1, 1024: 1},
    (128, 32): {**_FEW, **dict.fromkeys(range(16, 128), 4), 128: 4, 192: 3, 256: 2, 512: 1, 1024: 1},
    (128, 512): {
        **_FEW, 16: 16, 17: 8, 24: 8, 32: 8, 48: 4, 63: 4, 64: 8, 96: 6, 128: 4, 192: 3, 256: 2, 512: 1,
    },
    (128, 1024): {**_FEW, 16: 16, 17: 11, 24: 8, 32: 8, 48: 5, 63: 4, 64: 8, 96: 6, 128: 4},
    (128, 2048): {**_FEW, 16: 16, 17: 13, 24: 10, 32: 8, 48: 10, 63: 8, 64: 8, 96: 6, 128: 4},
    (128, 8192): {
        **_FEW, 16: 32, 17: 29, 24: 20, 32: 16, 48: 10, 63: 8, 64: 8, 96: 6, 128: 4, 192: 3, 256: 2, 512: 1,
    },
}  # fmt: skip
TABLES: tuple[tuple[Arch, int, dict[tuple[int, int], dict[int, int]]], ...] = (
    ("gfx942", 256, GFX942_256),
    ("gfx942", 304, GFX942_304),
    ("gfx950", 256, GFX950_256),
)
# An unquantised cache, 16 heads on 256 units of gfx942: (queries, longest list) to splits.
UNQUANTISED = {(1, 511): 1, (1, 512): 16, (1, 520): 9, (4, 2048): 16, (64, 2048): 4, (256, 2048): 1}


def asked(arch: Arch, units: int, points: list[tuple[int, int, int, int, int, int]], rule: Rule = "decode") -> Inputs:
    """The call with these points: queries, heads, main and extra capacity, main and extra length."""
    columns = [torch.tensor([point[i] for point in points], dtype=torch.int64) for i in range(6)]
    return Inputs(
        *columns, out=torch.full((len(points),), -1, dtype=torch.int64), rule=rule, arch=arch, compute_units=units
    )


def answerers() -> list[object]:
    """The reference and every implementation that can run here."""
    named: list[tuple[str, Callable[[Inputs], object]]] = [("reference", oracle.reference)]
    named += [(impl.name, impl.run) for impl in IMPLS if impl.name != "vllm-host"]
    parameters: list[object] = [pytest.param(run, id=name) for name, run in named]
    vllm_host = next(impl for impl in IMPLS if impl.name == "vllm-host")
    return [*parameters, pytest.param(vllm_host.run, id="vllm-host", marks=pytest.mark.vllm)]


@pytest.mark.parametrize("run", answerers())
@pytest.mark.parametrize(("arch", "units", "table"), TABLES, ids=["gfx942-256", "gfx942-304", "gfx950-256"])
def test_every_table_holds(
    run: Callable[[Inputs], object], arch: Arch, units: int, table: dict[tuple[int, int], dict[int, int]]
) -> None:
    wrong = []
    for (main, extra), row in table.items():
        points = [(programs, 16, main * programs, extra * programs, 0, 0) for programs in row]
        if (main, extra) == (128, 512):
            # Programs are queries times blocks of 16 heads.
            points = [(n, 16 - n % 16, main * n, extra * n, 0, 0) for n in row]
        got = run(asked(arch, units, points)).out.tolist()  # type: ignore[attr-defined]
        wrong += [
            (main, extra, n, have, want) for (n, want), have in zip(row.items(), got, strict=True) if have != want
        ]
    assert wrong == []


@pytest.mark.parametrize("run", answerers())
def test_the_counts_over_an_unquantised_cache_hold(run: Callable[[Inputs], object]) -> None:
    points = [(queries, 16, 0, 0, longest, 0) for queries, longest in UNQUANTISED]
    got = run(asked("gfx942", 256, points, "bfloat16_cache")).out.tolist()  # type: ignore[attr-defined]
    assert got == list(UNQUANTISED.values())


@pytest.mark.parametrize(
    ("main", "extra", "splits", "tiles"),
    [
        (128, 512, 1, 20),
        (128, 512, 4, 5),
        (128, 512, 16, 2),
        (257, 0, 4, 2),
        (1, 0, 16, 1),
        (33, 0, 1, 2),
        (1, 1, 1, 2),
    ],
)
def test_a_program_walks_that_many_tiles(main: int, extra: int, splits: int, tiles: int) -> None:
    queries = 2 if (main, extra) in ((257, 0), (1, 1)) else 1
    assert split_rules.load_of(queries, 16, main, extra, 256).tiles(splits) == tiles


# 17 calls of one block of heads: gfx950 launches 8 splits for averages of 128 and 512, and 256 // 17 = 15 is one wave.
@pytest.mark.parametrize("run", answerers()[:-1])
@pytest.mark.parametrize(
    ("queries", "averages", "own", "want"),
    [
        # ceil(128/128) + ceil(256/128) = 3 tiles with four splits; one key more makes a fourth tile.
        (17, (128, 512), (128, 256), 4),
        (17, (128, 512), (128, 257), 8),
        (17, (128, 512), (0, 0), 4),
        # Fewer than 16 programs, or four splits at most: no choice.
        (15, (128, 512), (1, 1), 32),
        (48, (128, 512), (1, 1), 4),
        # 16 splits launched for 16 programs, and one wave is 16 too: nothing lies between 4 and 16.
        (16, (128, 512), (128, 512), 16),
        # 20 splits launched for 24 programs, 256 // 24 = 10 is one wave: 2 + 1 tiles with ten, 5 + 3 with four.
        (24, (128, 8192), (640, 320), 10),
        (24, (128, 8192), (641, 320), 20),
    ],
)
def test_a_query_chooses_by_its_own_lengths(
    run: Callable[[Inputs], object], queries: int, averages: tuple[int, int], own: tuple[int, int], want: int
) -> None:
    point = (queries, 16, averages[0] * queries, averages[1] * queries, *own)
    assert run(asked("gfx950", 256, [point], "adaptive")).out.tolist() == [want]  # type: ignore[attr-defined]


def test_other_architectures_never_split() -> None:
    points = [(1, 128, 128, 2048, 128, 2048), (0, 16, 0, 0, 0, 0)]
    assert oracle.reference(asked("other", 256, points)).out.tolist() == [1, 1]


def test_lowest_costs_never_tie() -> None:
    everything = math.lcm(*range(1, 17))
    for units, programs in itertools.product((1, 60, 80, 132, 256, 304), range(1, 2500)):
        costs = [-(-programs * s // units) * (25 + s) * (everything // s) for s in range(1, 17)]
        assert costs.count(min(costs)) == 1, (units, programs)


def test_a_wrong_count_names_the_call() -> None:
    inputs = asked("gfx942", 256, [(1, 16, 128, 512, 128, 512), (64, 16, 0, 0, 0, 0)])
    (check,) = oracle.judge(inputs, oracle.Outputs(torch.tensor([16, 5])), oracle.HONEST[0].precision)
    assert str(check).startswith("splits[1]=5, but should be 4:")
    assert "queries 64, heads 16" in str(check)


def test_vllm_says_why_it_cannot_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    vllm_host = next(impl for impl in IMPLS if impl.name == "vllm-host")
    monkeypatch.setattr(settings, "_vllm", tmp_path / "nowhere")
    case = SplitsCase()
    assert "does not exist" in vllm_host.unsupported(case, "interpreter")[0]
    assert "rule=adaptive" in vllm_host.unsupported(case.varied(rule="adaptive"), "interpreter")[0]
    assert "arch=other" in vllm_host.unsupported(case.varied(arch="other"), "interpreter")[0]
