"""Is the scratch memory of prefill what a layer needs, apart, and reserved by the warm-up?"""

import os
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cases.case import parse
from cases.precision import Precision
from cases.sparse_mla import prefill_workspace as ask
from cases.sparse_mla.prefill_workspace import Inputs, Outputs, WorkspaceCase
from impl.sources import settings
from impl.sparse_mla.prefill_workspace import IMPLS
from oracle.sparse_mla import prefill_workspace as right
from reports.laws import break_of

OURS, VLLM = IMPLS


def small_sweep(count: int) -> list[WorkspaceCase]:
    """The regressions and some random cases."""
    choose = random.Random(5)
    cases = [case for case in map(parse, ask.REGRESSIONS) if isinstance(case, WorkspaceCase)]
    while len(cases) < count:
        case = WorkspaceCase(
            **{axis: choose.choice(values) for axis, values in ask.AXES.items()}, seed=choose.randrange(99)
        )  # type: ignore[arg-type]
        if not ask.forbid(case):
            cases.append(case)
    return cases


SWEEP = small_sweep(40)


def asked(
    ratios: list[int], steps: list[tuple[int, int]], arch: ask.Arch = "gfx950", gathers: bool = True, lanes: int = 8
) -> Inputs:
    """Layers of 100 tokens at most, a window of 8, 16 new tokens, two requests a chunk and three heads."""
    return Inputs(
        torch.tensor(ratios), torch.tensor([layer for layer, _ in steps], dtype=torch.int64),
        torch.tensor([tokens for _, tokens in steps], dtype=torch.int64), arch, gathers, chunk_size=2, window=8,
        max_len=100, max_batched=16, heads=3, lanes=lanes,
    )  # fmt: skip


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


RUNS = [pytest.param(right.reference, id="reference"), pytest.param(OURS.run, id="ours-host")]


@pytest.mark.parametrize("run", RUNS)
def test_hand_worked_views_of_a_gathering_layer(run: object) -> None:
    # ceil(100/8) = 13 records, 13 + 8 + 16 = 37 rows; 2 * 37 * 8 * 2 = 1184 bytes, rounded up to 1280.
    # 16 * 3 * 8 * 2 = 768 bytes of rows; 5 tokens take 240 of them, which is 256 with the mark.
    got = run(asked([8], [(0, 5), (0, 16), (0, 17)]))  # type: ignore[operator]
    assert got.gathered.tolist() == [[2, 37, 8]] * 4
    assert got.rows.tolist() == [[16, 3, 8], [5, 3, 8], [16, 3, 8], [17, 3, 8]]
    assert got.starts.tolist() == [[0, 1280], [0, 1280], [0, 1280], [-1, -1]]
    assert got.needed.tolist() == [2048, 1536, 2048, 2304]
    assert got.granted.tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("run", RUNS)
def test_a_layer_of_small_records_lends_room_to_the_others(run: object) -> None:
    # Ratio 1: 2 * 124 * 8 * 2 = 3968 -> 4096 bytes and 768 of rows. Without records 2 * 24 * 8 * 2 = 768 bytes.
    got = run(asked([1, 0], [(1, 85), (1, 86)]))  # type: ignore[operator]
    assert got.needed.tolist() == [4864, 1536, 768 + 4096, 768 + 4352]
    assert got.granted.tolist() == [1, 1, 1, 0]
    assert got.starts.tolist() == [[0, 4096], [0, 768], [0, 768], [-1, -1]]


@pytest.mark.parametrize("run", RUNS)
def test_what_a_layer_asks_for_depends_on_architecture_and_route(run: object) -> None:
    old = run(asked([0], [(0, 16), (0, 99)], arch="gfx942"))  # type: ignore[operator]
    assert old.gathered.tolist() == [[2, 24, 8]] * 3 and old.rows.tolist() == [[0, 0, 0]] * 3
    assert old.starts.tolist() == [[0, -1]] * 3 and old.granted.tolist() == [1, 1, 1]
    in_place = run(asked([4], [(0, 16), (0, 17)], gathers=False))  # type: ignore[operator]
    assert in_place.gathered.tolist() == [[0, 0, 0]] * 3
    assert in_place.starts.tolist() == [[-1, 0], [-1, 0], [-1, -1]] and in_place.granted.tolist() == [1, 1, 0]
    nothing = run(asked([4], [], arch="other", gathers=False))  # type: ignore[operator]
    assert nothing.needed.tolist() == [0] and nothing.granted.tolist() == [1]


class SimplePool:
    """A pool of bytes that fills a real buffer, as a second formulation of who shares memory with whom."""

    def __init__(self) -> None:
        self.bytes = bytearray()
        self.locked = False

    def take(self, sizes: list[int]) -> list[int] | None:
        starts, end = [], 0
        for size in sizes:
            while end % 256:
                end += 1
            starts.append(end)
            end += size
        while end % 256:
            end += 1
        if end > len(self.bytes):
            if self.locked:
                return None
            self.bytes = bytearray(end)
        return starts


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 2, 3, 128]), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=8),
    st.sampled_from([5, 8, 512]),
    st.booleans(),
)
def test_a_pool_of_real_bytes_hands_out_the_same(
    ratios: list[int], steps: list[tuple[int, int]], lanes: int, gathers: bool
) -> None:
    steps = [(layer % len(ratios), tokens) for layer, tokens in steps]
    inputs = asked(ratios, steps, gathers=gathers, lanes=lanes)
    want = right.reference(inputs)
    pool = SimplePool()
    calls = [(ratio, 16) for ratio in ratios] + [(ratios[layer], tokens) for layer, tokens in steps]
    for number, (ratio, tokens) in enumerate(calls):
        pool.locked = number >= len(ratios)
        width = 24 + (100 + ratio - 1) // ratio if ratio else 24
        sizes = [4 * width * lanes, 6 * tokens * lanes] if gathers else [6 * tokens * lanes]
        starts = pool.take(sizes)
        assert bool(want.granted[number]) == (starts is not None)
        if starts is not None:
            assert want.starts[number].tolist() == (starts if gathers else [-1, *starts])
    assert passes(inputs, OURS.run(inputs))


@pytest.mark.parametrize(
    ("law", "mutant"),
    [("W1", "last-call-counts"), ("W2", "layers-side-by-side"), ("W3", "warm-up-with-one-token"),
     ("W4", "gather-in-place")],
)  # fmt: skip
def test_a_law_is_broken_by_its_fault(law: str, mutant: str) -> None:
    rule = next(rule for rule in right.LAWS if rule.name.startswith(law))
    answer = next(wrong for wrong in right.MUTANTS if wrong.name == mutant).answer

    def broken(case: WorkspaceCase) -> bool:
        inputs = ask.build(case)
        checks = break_of(rule, inputs, answer(inputs), answer, right.judge, Precision())
        return checks is not None and not all(check.passed for check in checks)

    assert any(broken(case) for case in SWEEP)


def test_shared_memory_and_short_warm_ups_are_named() -> None:
    inputs = asked([8], [(0, 16)])
    wrong = {mutant.name: mutant.answer(inputs) for mutant in right.MUTANTS}

    def sentences(name: str) -> list[str]:
        return [str(check) for check in right.judge(inputs, wrong[name], Precision()) if not check.passed]

    assert sentences("asked-in-two-calls")[-1].startswith(
        "memory of ask[0]=rows from byte 0, but should be byte 1184 or"
    )
    assert sentences("warm-up-with-one-token")[-1].startswith(
        "grant of ask[1]=refused, but should be granted: the warm-up"
    )


def test_calls_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"arch=gfx942: should be gfx950 for a layer that asks for the rows"):
        right.reference(asked([4], [(0, 1)], arch="gfx942", gathers=False))
    with pytest.raises(ValueError, match=r"ratio=-1: should not be negative"):
        right.reference(asked([4, -1], []))


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", tmp_path / "nowhere")
    assert "does not exist" in VLLM.unsupported(WorkspaceCase(), "interpreter")[0]


@pytest.mark.vllm
@pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")
def test_vllm_asks_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    for case in SWEEP[:20]:
        assert VLLM.unsupported(case, "interpreter") == []
        inputs = ask.build(case)
        assert passes(inputs, VLLM.run(inputs)), case.id
    with pytest.raises(AssertionError, match="gfx950-only"):
        VLLM.run(asked([4], [(0, 1)], arch="gfx942", gathers=False))
