"""Are prefill requests grouped into the chunks that the reserved workspace allows?"""

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
from cases.sparse_mla import prefill_chunks as ask
from cases.sparse_mla.prefill_chunks import ChunksCase, Inputs, Outputs
from impl.implementation import Impl
from impl.sources import settings
from impl.sparse_mla.prefill_chunks import IMPLS
from oracle.sparse_mla import prefill_chunks as right
from reports.laws import break_of

OURS, VLLM = IMPLS


def small_sweep(count: int) -> list[ChunksCase]:
    """The regressions and some random cases."""
    choose = random.Random(3)
    cases = [case for case in map(parse, ask.REGRESSIONS) if isinstance(case, ChunksCase)]
    while len(cases) < count:
        case = ChunksCase(
            **{axis: choose.choice(values) for axis, values in ask.AXES.items()}, seed=choose.randrange(99)
        )  # type: ignore[arg-type]
        if not ask.forbid(case):
            cases.append(case)
    return cases


SWEEP = small_sweep(60)


def asked(seq: list[int], query: list[int], ratio: int = 4, has_compressed: bool | None = None) -> Inputs:
    """A layer whose workspace holds two requests of 100 tokens, a window of 8 and 16 new tokens."""
    lengths = [torch.tensor(values, dtype=torch.int32) for values in (seq, query)]
    return Inputs(*lengths, ratio, has_compressed, chunk_size=2, window=8, max_len=100, max_batched=16)


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


RUNS = [pytest.param(right.reference, id="reference"), pytest.param(OURS.run, id="ours-host")]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("inputs", "plan"),
    [
        # Reserved are 2 * (100/4 + 8 + 16) = 98 rows. A context of 100 that ends in 16 new tokens takes 25 + 16 + 7 = 48.
        (asked([100, 100, 100], [16, 16, 16]), [[0, 2, 25, 48], [2, 3, 25, 48]]),
        # 3 * (25 + 7) = 96 rows fit, a fourth request does not, although it is short; it then waits for nobody.
        (asked([100, 1, 1, 1], [1, 1, 1, 1]), [[0, 2, 25, 33], [2, 4, 0, 1]]),
        # 7 + 7 rows: 98 rows hold seven such requests exactly.
        (asked([28] * 8, [0] * 8), [[0, 7, 7, 14], [7, 8, 7, 14]]),
        # Most records and most window rows come from different requests: 2 * (25 + 16).
        (asked([100, 16], [0, 16]), [[0, 2, 25, 41]]),
        # Alone it takes 100 + 7 of 98 rows, and still gets its chunk.
        (asked([400, 4], [0, 4]), [[0, 1, 100, 107], [1, 2, 1, 5]]),
        # Without records 2 * (8 + 16) = 48 rows, whatever the ratio.
        (asked([100, 100, 100], [16, 16, 16], ratio=0), [[0, 2, 0, 23], [2, 3, 0, 23]]),
        (asked([100, 100, 100], [16, 16, 16], has_compressed=False), [[0, 2, 0, 23], [2, 3, 0, 23]]),
        # Ratio 1 has a cache only if the caller says so: 2 * (100 + 24) = 248 rows.
        (asked([50, 50, 50], [1, 1, 1], ratio=1), [[0, 3, 0, 8]]),
        (asked([80, 80, 80], [1, 1, 1], ratio=1, has_compressed=True), [[0, 2, 80, 88], [2, 3, 80, 88]]),
        # A dummy request computes more than it has.
        (asked([1], [9]), [[0, 1, 0, 9]]),
        (asked([], []), []),
    ],
)  # fmt: skip
def test_hand_worked_plans(run: object, inputs: Inputs, plan: list[list[int]]) -> None:
    assert run(inputs).chunks.tolist() == plan  # type: ignore[operator]


def fewest(rows: list[tuple[int, int]], area: int) -> list[tuple[int, int]]:
    """Chunk limits by recursion: the longest head that fits, then the rest."""
    if not rows:
        return []
    fits = [
        n for n in range(1, len(rows) + 1) if n * (max(r for r, _ in rows[:n]) + max(g for _, g in rows[:n])) <= area
    ]
    count = max(1, len(fits))
    return [(0, count), *((start + count, end + count) for start, end in fewest(rows[count:], area))]


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=24),
    st.sampled_from([0, 1, 2, 4]),
    st.sampled_from([None, True, False]),
)
def test_the_plan_is_the_longest_head_that_fits(
    lengths: list[tuple[int, int]], ratio: int, has_compressed: bool | None
) -> None:
    if has_compressed and ratio == 0:
        has_compressed = False
    inputs = asked([a for a, _ in lengths], [b for _, b in lengths], ratio, has_compressed)
    records = [a // ratio if inputs.gathers_compressed else 0 for a, _ in lengths]
    rows = [(r, b + min(max(a - b, 0), 7)) for r, (a, b) in zip(records, lengths, strict=True)]
    area = 2 * (24 + (-(-100 // ratio) if inputs.gathers_compressed else 0))
    want = right.reference(inputs).chunks
    assert [tuple(chunk[:2]) for chunk in want.tolist()] == fewest(rows, area)
    for start, end, most_records, width in want.tolist():
        assert most_records == max(r for r, _ in rows[start:end])
        assert width == most_records + max(g for _, g in rows[start:end])
    assert passes(inputs, OURS.run(inputs))


@pytest.mark.parametrize(
    ("law", "mutant"),
    [
        ("C1", "last-request-lost"), ("C2", "maxima-carried"), ("C3", "oversized-dropped"), ("C4", "flag-ignored"),
        ("C5", "compressed-from-ratio-1"), ("C6", "records-rounded-up"),
    ],
)  # fmt: skip
def test_a_law_is_broken_by_its_fault(law: str, mutant: str) -> None:
    rule = next(rule for rule in right.LAWS if rule.name.startswith(law))
    answer = next(wrong for wrong in right.MUTANTS if wrong.name == mutant).answer

    def broken(case: ChunksCase) -> bool:
        inputs = ask.build(case)
        checks = break_of(rule, inputs, answer(inputs), answer, right.judge, Precision())
        return checks is not None and not all(check.passed for check in checks)

    assert any(broken(case) for case in SWEEP)


def test_a_planner_that_minds_the_integers_breaks_their_law() -> None:
    def minding(inputs: Inputs) -> Outputs:
        right_one = right.reference(inputs).chunks
        return Outputs(right_one + (inputs.seq_lens.dtype == torch.int32))

    rule = next(rule for rule in right.LAWS if rule.name.startswith("C7"))
    inputs = ask.build(ChunksCase())
    checks = break_of(rule, inputs, minding(inputs), minding, right.judge, Precision())
    assert checks is not None and not all(check.passed for check in checks)


def test_a_plan_that_no_workspace_holds_names_its_chunk() -> None:
    inputs = asked([100, 100, 100], [16, 16, 16])
    failed = [str(check) for check in right.judge(inputs, Outputs(torch.tensor([[0, 3, 25, 48]])), Precision())
              if not check.passed]  # fmt: skip
    assert failed[0].startswith("area of chunk[0]=3 * 48 rows, but should be 98 rows or fewer")
    failed = [str(check) for check in right.judge(inputs, Outputs(torch.tensor([[0, 2, 25, 48]])), Precision())
              if not check.passed]  # fmt: skip
    assert failed[0].startswith("order of chunk[1]=requests up to 2, but should be up to 3")
    thin = Outputs(torch.tensor([[0, 2, 25, 48], [2, 3, 24, 48]]))
    failed = [str(check) for check in right.judge(inputs, thin, Precision()) if not check.passed]
    assert failed[0].startswith("rows of chunk[1]=24 + 24 rows, but should be 25 + 23 or more")


def test_calls_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ratio=0: should be 1 or more"):
        right.reference(asked([1], [1], ratio=0, has_compressed=True))
    with pytest.raises(ValueError, match=r"query_lens has 1 requests: should have 2"):
        right.reference(asked([1, 2], [1]))
    with pytest.raises(ValueError, match=r"window=0: should be 1 or more"):
        right.reference(Inputs(torch.zeros(1), torch.zeros(1), 4, None, 4, 0, 100, 16))


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", tmp_path / "nowhere")
    assert "does not exist" in VLLM.unsupported(ChunksCase(), "interpreter")[0]


@pytest.mark.vllm
@pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")
def test_vllm_makes_the_same_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    impl: Impl = VLLM
    for case in SWEEP:
        assert impl.unsupported(case, "interpreter") == []
        inputs = ask.build(case)
        assert passes(inputs, impl.run(inputs)), case.id
