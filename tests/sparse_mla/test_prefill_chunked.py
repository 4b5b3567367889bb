"""Is sparse MLA prefill over packed caches the same whatever the chunks, and does its judge tell right from wrong?"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.case import parse
from cases.memory import guarded, on_device, trespasses
from cases.precision import Precision
from cases.sparse_mla.decode import DecodeInputs, Segment
from cases.sparse_mla.prefill_call import PrefillOutputs
from cases.sparse_mla.prefill_chunked import AXES, REGRESSIONS, WRITABLE, ChunkedCase, build, forbid, heavy
from cases.sparse_mla.prefill_chunked_call import Chunk, ChunkedInputs, PagedCache
from impl.executions.memory_watch import watch
from impl.implementation import Impl
from impl.sources import settings as sources
from impl.sparse_mla import decode_triton, prefill_driver
from impl.sparse_mla.prefill_chunked import IMPLS
from oracle.cache import records
from oracle.check import verdict_of
from oracle.laws import Law
from oracle.sparse_mla import prefill_chunked as oracle
from oracle.sparse_mla.prefill_chunked_call import slots_read, tokens_of
from oracle.sparse_mla.prefill_chunked_faults import HONEST, MUTANTS, Way, compute
from reports.laws import break_of, identical

TREE = os.environ.get("MLA_ORACLE_VLLM")
needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(TREE is None, reason="MLA_ORACLE_VLLM names no vLLM source tree"),
]
NAMED = {impl.name: impl for impl in IMPLS}
OURS = [pytest.param(NAMED[name].run, id=name) for name in ("ours-triton", "torch-gathered")]
EVERYONE = [
    pytest.param(oracle.reference, id="reference"),
    *OURS,
    pytest.param(NAMED["vllm-triton"].run, id="vllm-triton", marks=needs_vllm),
]
Run = Callable[[ChunkedInputs], PrefillOutputs]
BASE = ChunkedCase(requests=3, new=4, heads=2)
RIGHT = HONEST[0]


@pytest.fixture(autouse=True)
def _real_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(TREE) if TREE else None)


# Answers worked out by hand.


def cache(first_lanes: list[float], tables: list[list[int]], block: int) -> PagedCache:
    """Slot s holds first_lanes[s] in the first lane and 1 in all others."""
    rows = torch.ones(len(first_lanes), 512)
    rows[:, 0] = torch.tensor(first_lanes)
    blocks = len(first_lanes) // block
    flat = torch.full((blocks * records.page_bytes(block),), 0xFF, dtype=torch.uint8)
    pages = flat.as_strided((blocks, block, 584), (records.page_bytes(block), 584, 1))
    records.write(rows.bfloat16(), pages, torch.arange(len(first_lanes)), "float8_e4m3fn")
    return PagedCache(pages, "float8_e4m3fn", torch.tensor(tables, dtype=torch.int32))


def call(**changes: Any) -> ChunkedInputs:
    """A decode request of one token, then prefills of 2 tokens after 2 others and of 1 token after none.

    The window is 2 tokens long, a compressed record stands for 2 tokens, and a token may choose 2 of them. The query is
    0, so that the answer is the mean of what is read.
    """
    plain = ChunkedInputs(
        query=torch.zeros(3, 1, 512, dtype=torch.bfloat16),
        # Blocks of 2: block 0 nobody's, 1 the decode's, 2 and 3 the first prefill's, 4 the second's.
        window_cache=cache([90, 91, 80, 81, 1, 2, 4, 8, 16, 92], [[1, 99], [2, 3], [4, 99]], 2),
        # Blocks of 1.
        compressed_cache=cache([93, 70, 32, 64], [[1, 99], [3, 2], [99, 99]], 1),
        topk=torch.tensor([[0, 1], [0, 7], [1, 0], [0, 0]], dtype=torch.int32),
        query_start=torch.tensor([0, 1, 3, 4], dtype=torch.int32),
        seq_lens=torch.tensor([4, 1], dtype=torch.int32),
        gather_lens=torch.tensor([3, 1], dtype=torch.int32),
        decodes=1, window=2, ratio=2, scale=1.0, sink=None, chunks=(Chunk(0, 1, 2, 5), Chunk(1, 2, 0, 1)),
        workspace=guarded((6, 512), torch.bfloat16), out=torch.full((3, 1, 512), math.nan),
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


# Token at position 2: window 1 and 2 hold 2 and 4; one compressed record is complete, number 0 in block 3 holds 64.
# Token at position 3: window 4 and 8; records 1 and 0 hold 32 and 64. The last token sees itself only, 16.
MEANS = [(2 + 4 + 64) / 3, (4 + 8 + 32 + 64) / 4, 16.0]


@pytest.mark.parametrize("run", EVERYONE)
@pytest.mark.parametrize("chunks", [(Chunk(0, 1, 2, 5), Chunk(1, 2, 0, 1)), (Chunk(0, 2, 2, 5),), (Chunk(0, 2, 4, 8),)])
def test_each_token_means_over_its_window_and_its_chosen_records(run: Run, chunks: tuple[Chunk, ...]) -> None:
    out = run(call(chunks=chunks, workspace=guarded((16, 512), torch.bfloat16))).out
    assert out[:, 0, 0].tolist() == pytest.approx(MEANS, rel=1e-6) and out[:, 0, 1].tolist() == pytest.approx([1.0] * 3)


@pytest.mark.parametrize("run", EVERYONE)
def test_without_compressed_records_the_window_is_all(run: Run) -> None:
    bare = call(ratio=0, compressed_cache=None, topk=None, chunks=(Chunk(0, 2, 0, 3),))
    assert run(bare).out[:, 0, 0].tolist() == pytest.approx([3.0, 6.0, 16.0])


@pytest.mark.parametrize("run", EVERYONE)
def test_a_hole_and_a_position_too_large_are_skipped_and_still_take_their_places(run: Run) -> None:
    topk = torch.tensor([[0, 1], [-1, 0], [2, 0], [0, 0]], dtype=torch.int32)
    # One record counts at position 2, and it is a hole; two count at position 3, and the first is none of the request's.
    assert run(call(topk=topk)).out[:, 0, 0].tolist() == pytest.approx([3.0, (4 + 8 + 64) / 3, 16.0])


@pytest.mark.parametrize("run", EVERYONE)
def test_the_sink_takes_its_share(run: Run) -> None:
    # As loud as each of one, three or four rows.
    out = run(call(sink=torch.tensor([0.0, 1e4]))).out
    assert out[:, 0, 0].tolist() == pytest.approx([70 / 4, 108 / 5, 8.0])


def test_the_lists_are_those_of_the_workspace() -> None:
    lists, lengths = prefill_driver.combined(call(), Chunk(0, 2, 3, 9))
    assert lengths.tolist() == [3, 4, 1] and lists.shape == (3, 128)
    # The window's rows begin with position 1, behind three compressed rows; the second request's nine rows follow.
    assert [row[:5].tolist() for row in lists] == [[0, 3, 4, -1, -1], [1, 0, 4, 5, -1], [12, -1, -1, -1, -1]]


# Other formulations.


@pytest.mark.parametrize(
    "changes",
    [
        {"values": "needle", "chosen": "beyond", "output": "float32"},
        {"values": "plateau", "window_encoding": "float8_e4m3fnuz", "window_block": 5, "lengths": "full"},
        {"ratio": 0, "decodes": 0, "values": "outlier", "sink": "absent"},
        {"ratio": 1, "width": 40, "values": "slot_codes", "block_stride": "odd"},
    ],
)
def test_ours_equals_our_decode_over_the_same_slots_within_both_budgets(changes: dict[str, Any]) -> None:
    inputs = build(BASE.varied(**changes))
    slots = [slots_read(inputs, t, request, position) for t, (request, position) in enumerate(tokens_of(inputs))]

    def segment(paged: PagedCache, part: int) -> Segment:
        lists = [pair[part] for pair in slots]
        ends = torch.tensor([0, *(len(entries) for entries in lists)]).cumsum(0)
        return Segment(cache=paged.cache, encoding=paged.encoding, indices=torch.cat(lists), indptr=ends)

    extra = inputs.compressed_cache
    decode = DecodeInputs(
        query=inputs.query, main=segment(inputs.window_cache, 0), extra=None if extra is None else segment(extra, 1),
        scale=inputs.scale, sink=inputs.sink, positions=None, cos_sin=None, out=guarded(inputs.out.shape, inputs.out.dtype),
        out_codes=None, out_scales=None, arch="gfx942", compute_units=304, splits=2, adaptive=False, trust_extra=False,
    )  # fmt: skip
    for answer in (NAMED["ours-triton"].run(on_device(inputs, "cpu")), decode_triton.run(decode)):
        assert answer.out is not None
        checks = oracle.judge(inputs, PrefillOutputs(answer.out, answer.lse), Precision(probability="bfloat16"))
        assert [str(check) for check in checks if not check.passed] == []


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_fp32_reference_is_within_the_budget_of_fp32(data: st.DataObject) -> None:
    axes: dict[str, Any] = {axis: data.draw(st.sampled_from(values), label=axis) for axis, values in AXES.items()}
    axes |= {"new": min(axes["new"], 5), "heads": min(axes["heads"], 3), "output": "float32"}
    case = ChunkedCase(**axes, seed=data.draw(st.integers(0, 999)))
    if forbid(case) or heavy(case):
        return
    inputs = build(case)
    checks = oracle.judge(inputs, oracle.reference(inputs), Precision(probability="float32"))
    assert [str(check) for check in checks if not check.passed] == []


def test_the_workspace_is_poisoned_and_the_null_block_too() -> None:
    for garbage in ("nan", "huge"):
        inputs = build(BASE.varied(garbage=garbage))
        workspace = inputs.workspace.float()
        assert bool((workspace.isnan() | (workspace > 1e29)).all())
    null = records.dequantise(build(BASE).window_cache.cache, torch.arange(32), "float8_e4m3fn")
    assert null.isnan().all()


# The judge.


def test_mutant_names_are_unique_and_a_mutant_without_its_fault_is_the_right_way() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    inputs = build(BASE)
    assert identical(dataclasses.replace(compute(inputs, Way()), lse=None), RIGHT.answer(inputs))


def test_a_missing_a_misshapen_and_a_poisoned_answer_fail() -> None:
    inputs = build(BASE)
    right = RIGHT.answer(inputs)
    for out in (None, right.out.float(), right.out[:, :1], inputs.out):
        checks = oracle.judge(inputs, dataclasses.replace(right, out=out), RIGHT.precision)
        assert not all(check.passed for check in checks)


# Laws.

SPOKEN = ({}, {"sink": "minus_infinity", "ratio": 0, "chunking": "all"}, {"chosen": "beyond", "window_block": 5})


@pytest.mark.parametrize("law", oracle.LAWS, ids=lambda law: law.name)
def test_the_law_holds_of_the_reference(law: Law) -> None:
    for changes in SPOKEN:
        inputs = build(BASE.varied(**changes))
        edited = law.edit(inputs)
        if edited is None:
            continue
        first, second = (oracle.reference(each, torch.float64) for each in (inputs, edited))
        want = law.view(law.expect(first, inputs, edited))
        assert torch.allclose(want.out, second.out, rtol=1e-9, atol=1e-12)


def test_a_stale_workspace_breaks_the_laws_of_chunks() -> None:
    inputs = build(BASE.varied(chunking="each"))
    stale = Way(faults=frozenset({"stale-workspace"}))
    law = next(law for law in oracle.LAWS if law.name == "M19 all together")
    checks = break_of(
        law, inputs, compute(inputs, stale), lambda edited: compute(edited, stale), oracle.judge, RIGHT.precision
    )
    assert checks is not None and not all(check.passed for check in checks)


# What is no call.

HALF = torch.zeros(3, 1, 512, dtype=torch.float16)
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "query of other lanes": ({"query": HALF[..., :9]}, ValueError, r"query has the shape \[3, 1, 9\]: should be"),
    "query in fp16": ({"query": HALF}, TypeError, "should be torch.bfloat16"),
    "out of another shape": ({"out": torch.zeros(3, 2, 512)}, ValueError, "should have the query's"),
    "out in fp16": ({"out": HALF}, TypeError, "torch.bfloat16 or torch.float32"),
    "sink too short": ({"sink": torch.zeros(0)}, ValueError, "should be at least 1"),
    "no window": ({"window": 0}, ValueError, "window=0: should be positive"),
    "ratio without a cache": ({"compressed_cache": None, "topk": None}, ValueError, "ratio=2: should be"),
    "cache without a ratio": ({"ratio": 0}, ValueError, "ratio=0: should be"),
    "cache without choices": ({"topk": None}, ValueError, "both should be given"),
    "too few choices": ({"topk": torch.zeros(3, 2, dtype=torch.int32)}, ValueError, "should have 4, one a token"),
    "too few starts": ({"query_start": torch.tensor([0, 1, 3])}, ValueError, "should have 4, for 1 decode"),
    "too few tokens": ({"query_start": torch.tensor([0, 1, 2, 3])}, ValueError, "should have the 2 prefill tokens"),
    "too few table rows": ({"decodes": 0, "query_start": torch.tensor([0, 2, 3])}, ValueError, "each of 2 requests"),
    "too little gathered": ({"gather_lens": torch.tensor([2, 1])}, ValueError, r"gather_lens\[0\]=2: should be 3 to 4"),
    "a gap between chunks": ({"chunks": (Chunk(1, 2, 0, 1),)}, ValueError, "should start with 0"),
    "a request left over": ({"chunks": (Chunk(0, 1, 2, 5),)}, ValueError, "should end with 2"),
    "too few compressed rows": ({"chunks": (Chunk(0, 2, 1, 5),)}, ValueError, "room for 2 and 3"),
    "too few rows": ({"chunks": (Chunk(0, 2, 2, 4),)}, ValueError, "room for 2 and 3"),
    "too small a workspace": ({"chunks": (Chunk(0, 2, 2, 5),)}, ValueError, "should have 10"),
}


@pytest.mark.parametrize("run", [EVERYONE[0], *OURS])
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_call_is_refused(run: Run, what: str) -> None:
    changes, error, sentence = REFUSED[what]
    with pytest.raises(error, match=sentence):
        run(call(**changes))


# The implementations on cases.


def judged(impl: Impl, case: ChunkedCase) -> tuple[str, list[str]]:
    """The status of a case on the interpreter, and the sentences of what failed."""
    inputs = build(case)
    used = on_device(inputs, "cpu")
    with watch():
        outputs = impl.run(used)
    left = trespasses(inputs, used, WRITABLE)
    if left:
        return "memory", left
    checks = oracle.judge(inputs, outputs, impl.precision(case, "interpreter"))
    return verdict_of(checks), [str(check) for check in checks if not check.passed]


@pytest.mark.parametrize("name", ["ours-triton", "torch-gathered"])
@pytest.mark.parametrize("text", [text for text in REGRESSIONS if heavy(parse(text))], ids=lambda text: text[27:])
def test_heavy_regressions_pass(name: str, text: str) -> None:
    assert judged(NAMED[name], parse(text)) == ("pass", [])


@pytest.mark.vllm
@pytest.mark.skipif(TREE is None, reason="MLA_ORACLE_VLLM names no vLLM source tree")
class TestVllm:
    """What vLLM's functions do with batches at the edge."""

    VLLM = NAMED["vllm-triton"]

    def test_a_chunk_without_tokens_raises(self) -> None:
        with pytest.raises(RuntimeError, match="reshape"):
            self.VLLM.run(build(parse(REGRESSIONS[-1])))

    def test_its_gather_takes_the_width_of_a_block_table_for_its_pitch(self) -> None:
        with pytest.raises(Exception, match="out-of-bounds load in _dequantize_and_gather"):
            judged(self.VLLM, BASE.varied(table="narrowed", chunking="all", garbage="huge"))

    def test_a_ratio_of_0_is_not_divided_by(self) -> None:
        assert judged(self.VLLM, BASE.varied(ratio=0)) == ("pass", [])
