"""Is the sparse MLA forward over two packed caches decode without its rotation, and who gives the right answer?"""

from __future__ import annotations

import dataclasses
import math
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cases.case import parse
from cases.memory import guarded, new_memory_poisoned, on_device, storage_bytes
from cases.sparse_mla import decode as decode_questions
from cases.sparse_mla.decode import Segment
from cases.sparse_mla.two_segment_forward import (
    AXES,
    REGRESSIONS,
    ForwardCase,
    Inputs,
    Outputs,
    as_decode,
    build,
    decode_case,
    forbid,
    heavy,
)
from impl.sources import settings
from impl.sparse_mla import decode_triton, two_segment_forward_aiter, two_segment_forward_routes
from impl.sparse_mla.two_segment_forward import IMPLS, aiter_forward
from oracle.cache import records
from oracle.sparse_mla import decode as decode_oracle
from oracle.sparse_mla import two_segment_forward as oracle
from reports.laws import break_of

AITER = os.environ.get("MLA_ORACLE_AITER")
NAMED = {impl.name: impl for impl in IMPLS}
BASE = ForwardCase(queries=2, heads=3, main_length=33, extra_length=31, splits=2)
Run = Callable[[Inputs], Outputs]
Verdict = Callable[..., tuple[str, list[str]]]


@pytest.fixture(autouse=True)
def _tree_of_aiter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_aiter", Path(AITER) if AITER else None)


def _referred(inputs: Inputs) -> Outputs:
    return oracle.reference(inputs)


EVERYONE = [
    pytest.param(_referred, id="reference"),
    pytest.param(two_segment_forward_routes.ours, id="ours-triton"),
    pytest.param(two_segment_forward_routes.plain, id="torch-bf16"),
    pytest.param(two_segment_forward_routes.vllm, id="vllm-triton", marks=pytest.mark.vllm),
]


def _segment(rows: list[float], entries: list[int], block: int) -> Segment:
    """A cache whose record r holds `rows[r]` in every lane, and one query's entries."""
    blocks = -(-len(rows) // block)
    flat = torch.full((blocks * records.page_bytes(block),), 0xFF, dtype=torch.uint8)
    cache = flat.as_strided((blocks, block, 584), (records.page_bytes(block), 584, 1))
    lanes = torch.tensor(rows, dtype=torch.bfloat16)[:, None].expand(-1, 512)
    records.write(lanes.contiguous(), cache, torch.arange(len(rows)), "float8_e4m3fn")
    return Segment(
        cache,
        "float8_e4m3fn",
        torch.tensor(entries, dtype=torch.int32),
        torch.tensor([0, len(entries)], dtype=torch.int32),
    )


def _call(main: Segment, extra: Segment | None, **changes: Any) -> Inputs:
    """One query of zeros with one head, so that every key weighs the same; `changes` override."""
    inputs = Inputs(
        query=torch.zeros(1, 1, 512, dtype=torch.bfloat16), main=main, extra=extra, scale=0.25, sink=None,
        out=guarded((1, 1, 512), torch.bfloat16), compute_units=256, splits=1,
    )  # fmt: skip
    return dataclasses.replace(inputs, **changes)


# Hand-worked answers.


@pytest.mark.parametrize("run", EVERYONE)
def test_both_caches_are_read_with_their_own_pages_and_duplicates_count(run: Run) -> None:
    main = _segment([9.0, 1.0, 2.0, 3.0, 4.0], [1, 3, 3], block=2)
    extra = _segment([9.0, 9.0, 9.0, 5.0], [3], block=1)
    # (1 + 3 + 3 + 5) / 4.
    assert run(_call(main, extra)).out.unique().tolist() == [3.0]  # type: ignore[union-attr]


@pytest.mark.parametrize("run", EVERYONE)
def test_the_sink_takes_its_share_and_is_not_scaled(run: Run) -> None:
    # The score is 0.25 * 512 * (1/64) * 3 = 6; a sink of 6 takes half.
    query = torch.full((1, 1, 512), 1 / 64, dtype=torch.bfloat16)
    main = _segment([9.0, 3.0], [1, -1], block=2)
    out = run(_call(main, None, query=query, sink=torch.tensor([6.0]))).out
    assert out.unique().tolist() == [1.5]  # type: ignore[union-attr]


@pytest.mark.parametrize("run", EVERYONE)
@pytest.mark.parametrize("sink", [None, torch.tensor([-math.inf]), torch.tensor([2.0])], ids=["none", "-inf", "2"])
def test_a_row_without_a_valid_key_is_zero(run: Run, sink: torch.Tensor | None) -> None:
    for entries in ([], [-1] * 70):
        inputs = _call(_segment([1.0], entries, block=1), _segment([1.0], [-1], block=1), sink=sink)
        assert not run(inputs).out.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("run", EVERYONE)
def test_a_tile_without_a_valid_key_leaves_no_trace_before_scores_far_below_zero(run: Run) -> None:
    # The score is 0.25 * 512 * (-1) * 2 = -256: against a maximum of 0 nothing would be left.
    query = torch.full((1, 1, 512), -1.0, dtype=torch.bfloat16)
    inputs = _call(_segment([9.0, 2.0], [-1] * 64 + [1], block=2), None, query=query)
    assert run(inputs).out.unique().tolist() == [2.0]  # type: ignore[union-attr]


# An independent formulation: scalar loops over the bytes.


def _record(segment: Segment, slot: int) -> list[float]:
    data, block = storage_bytes(segment.cache), segment.cache.shape[1]
    page = int(segment.cache.storage_offset()) + slot // block * segment.cache.stride(0)
    start, lanes = page + slot % block * 576, []
    for lane in range(448):
        code, scale = int(data[start + lane]), int(data[page + block * 576 + slot % block * 8 + lane // 64])
        exponent, fraction = code >> 3 & 15, code & 7
        size = fraction * 2.0**-9 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
        lanes.append((-size if code & 0x80 else size) * 2.0 ** (scale - 127))
    for k in range(64):
        low, high = (int(data[start + 448 + 2 * k + i]) for i in (0, 1))
        bits = torch.tensor([low | high << 8], dtype=torch.int32).to(torch.int16)
        lanes.append(float(bits.view(torch.bfloat16)[0]))
    return lanes


def _by_hand(inputs: Inputs) -> torch.Tensor:
    want = torch.zeros(inputs.query.shape, dtype=torch.float64)
    for t in range(want.shape[0]):
        keys: list[list[float]] = []
        for part in (inputs.main, inputs.extra):
            if part is None or part.indices is None or part.indptr is None:
                continue
            entries = part.indices[int(part.indptr[t]) : int(part.indptr[t + 1])].tolist()
            keys += [_record(part, slot) for slot in entries if 0 <= slot < part.rows]
        for h in range(want.shape[1] if keys else 0):
            lanes = inputs.query[t, h].tolist()
            scores = [inputs.scale * math.fsum(a * b for a, b in zip(lanes, key, strict=True)) for key in keys]
            sink = -math.inf if inputs.sink is None else float(inputs.sink[h])
            top = max(*scores, sink)
            weights = [math.exp(score - top) for score in scores]
            total = math.fsum([*weights, math.exp(sink - top)])
            for lane in range(512):
                summed = math.fsum(w * key[lane] for w, key in zip(weights, keys, strict=True))
                want[t, h, lane] = summed / total
    return want


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": "mixed", "queries": 5, "invalid": "scattered", "entries": "any"},
        {"values": "below", "sink": "absent", "main_block": 5, "block_stride": "odd", "form": "ragged_offset"},
        {"values": "wide", "sink": "large", "duplicates": "across", "garbage": "huge", "extra_block": 1},
    ],
)
def test_reference_agrees_with_scalar_loops_over_the_bytes(changes: dict[str, Any]) -> None:
    inputs = build(BASE.varied(main_length=4, extra_length=5, heads=2, **changes))
    got = oracle.reference(inputs, torch.float64).out
    assert got is not None and torch.allclose(got, _by_hand(inputs), rtol=1e-11, atol=1e-13)


def test_fp32_and_fp64_references_agree() -> None:
    for values in AXES["values"]:
        inputs = build(BASE.varied(values=values, sink="absent"))
        single, double = (oracle.reference(inputs, dtype).out for dtype in (torch.float32, torch.float64))
        assert single is not None and double is not None
        scale = double.abs().amax(-1, keepdim=True)
        assert bool(((single - double).abs() <= 1e-3 * scale + 1e-30).all()), values


# The same as decode without a rotation.


@pytest.mark.parametrize("changes", [{}, {"rows": "mixed", "queries": 5}, {"entries": "any", "invalid": "tail"}])
def test_it_is_decode_without_a_rotation_bit_for_bit(changes: dict[str, Any]) -> None:
    inputs = build(BASE.varied(**changes))
    call = as_decode(inputs)
    assert torch.equal(oracle.reference(inputs).out, decode_oracle.reference(call).out)  # type: ignore[arg-type]
    first = two_segment_forward_routes.ours(on_device(inputs, "cpu")).out
    second = decode_triton.run(on_device(call, "cpu")).out
    assert first is not None and second is not None
    assert torch.equal(first.view(torch.int16), second.view(torch.int16))


def test_what_nobody_selects_has_no_effect() -> None:
    # The same records among NaN and among huge numbers, slot 0 included.
    answers = [
        two_segment_forward_routes.ours(build(BASE.varied(garbage=garbage, invalid="middle"))).out
        for garbage in ("nan", "huge")
    ]
    assert torch.equal(*answers)  # type: ignore[arg-type]
    for part in (build(BASE).main, build(BASE).extra):
        assert part is not None and part.indices is not None and not bool((part.indices == 0).any())


def test_negative_entries_are_minus_one_unless_any_is_asked_for() -> None:
    for entries, floor in (("negative", -1), ("any", -(2**31))):
        part = build(BASE.varied(entries=entries, rows="mixed", queries=5, invalid="scattered")).main
        assert part.indices is not None
        assert int(part.indices.min()) == floor
        assert (int(part.indices.max()) >= part.rows) is (entries == "any")


# What is no call.

_FP8 = torch.zeros(1, 1, 584, dtype=torch.uint8)
_LIST = {"indices": torch.tensor([0]), "indptr": torch.tensor([0, 1])}


def _wrong(name: str = "main", **changes: Any) -> dict[str, Any]:
    return {name: dataclasses.replace(Segment(_FP8, "float8_e4m3fn", **_LIST), **changes)}


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "query of 576 lanes": ({"query": torch.zeros(1, 1, 576).bfloat16()}, ValueError, "queries, heads, 512"),
    "query of two dimensions": ({"query": torch.zeros(1, 512).bfloat16()}, ValueError, "queries, heads, 512"),
    "query in fp32": ({"query": torch.zeros(1, 1, 512)}, TypeError, "should be bfloat16"),
    "query with a lane stride": ({"query": torch.zeros(1, 1, 1024).bfloat16()[..., ::2]}, ValueError, "should be 1"),
    "out of another shape": ({"out": torch.zeros(1, 2, 512).bfloat16()}, ValueError, "should"),
    "out in fp32": ({"out": torch.zeros(1, 1, 512)}, TypeError, "should be"),
    "out elsewhere": ({"out": torch.zeros(1, 1, 512, device="meta").bfloat16()}, ValueError, "should be"),
    "sink of one more": ({"sink": torch.zeros(2)}, ValueError, "exactly one"),
    "sink of one less": ({"sink": torch.zeros(0)}, ValueError, "exactly one"),
    "sink in fp64": ({"sink": torch.zeros(1, dtype=torch.float64)}, TypeError, "should be float32"),
    "cache of two dimensions": (_wrong(cache=torch.zeros(1, 584, dtype=torch.uint8)), ValueError, "blocks, block, 584"),
    "records of 656 bytes": (_wrong(cache=torch.zeros(1, 1, 656, dtype=torch.uint8)), ValueError, "block, 584"),
    "cache in bf16": (_wrong(cache=_FP8.bfloat16()), TypeError, "should be uint8"),
    "extra cache in bf16": (_wrong("extra", cache=_FP8.bfloat16()), TypeError, "should be uint8"),
    "FNUZ codes": (_wrong(encoding="float8_e4m3fnuz"), ValueError, "float8_e4m3fn in both caches"),
    "swapped lists": (_wrong(indices=torch.tensor([0, 1]), indptr=torch.tensor([0])), ValueError, "should hold 2"),
    "indices of two dimensions": (_wrong(indices=torch.tensor([[0]])), ValueError, "dimension"),
    "float indices": (_wrong(indices=torch.tensor([0.0])), TypeError, "int32 or int64"),
    "short indptr": (_wrong(indptr=torch.tensor([0], dtype=torch.int16)), TypeError, "int32 or int64"),
    "indptr elsewhere": (_wrong(indptr=torch.tensor([0, 1], device="meta")), ValueError, "should be on"),
    "extra without indptr": (_wrong("extra", indptr=None), ValueError, "all three"),
    "extra without indices": (_wrong("extra", indices=None), ValueError, "all three"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_call_is_refused(what: str) -> None:
    changes, error, sentence = REFUSED[what]
    inputs = dataclasses.replace(_call(_segment([1.0], [0], block=1), None), **changes)
    with pytest.raises(error, match=sentence):
        oracle.reference(inputs)
    if what != "indptr elsewhere":
        for run in (two_segment_forward_routes.ours, two_segment_forward_routes.plain):
            with pytest.raises(error, match="should"):
                run(inputs)


# Laws, mutants and the case space.


def test_a_law_can_be_broken() -> None:
    law = next(law for law in oracle.LAWS if law.name.startswith("M5"))
    wrong = next(mutant for mutant in oracle.MUTANTS if mutant.name == "drop-last-entry")
    inputs, first = build(BASE), oracle.HONEST[0]
    checks = break_of(law, inputs, first.answer(inputs), wrong.answer, oracle.judge, first.precision)
    assert checks is not None and not all(check.passed for check in checks)


def test_a_query_rounded_again_is_right_only_where_it_is_declared() -> None:
    inputs = build(parse(next(text for text in REGRESSIONS if "values=outlier" in text)))
    way = next(way for way in oracle.HONEST if way.precision.query == "bfloat16")
    answer = way.answer(inputs)
    assert all(check.passed for check in oracle.judge(inputs, answer, way.precision))
    assert not all(check.passed for check in oracle.judge(inputs, answer, oracle.HONEST[0].precision))


def test_missing_misshapen_and_poisoned_answers_fail() -> None:
    inputs = build(BASE)
    for out in (None, inputs.out, inputs.out.float(), inputs.out[:1]):
        checks = oracle.judge(inputs, Outputs(out), oracle.HONEST[0].precision)
        assert not all(check.passed for check in checks)
    with pytest.raises(TypeError, match="should be Outputs"):
        oracle.judge(inputs, None, oracle.HONEST[0].precision)  # type: ignore[arg-type]


def test_impossible_calls_are_refused_with_every_reason() -> None:
    case = ForwardCase(
        main_length=1, extra_length=-1, duplicates="across", invalid="middle", reach="rows", queries=3, splits=-1
    )
    assert len(forbid(case)) == 4


def test_a_case_and_its_decode_case_share_every_axis() -> None:
    shared = {field.name for field in dataclasses.fields(ForwardCase)} - {"op", "entries"}
    case = BASE.varied(values="wide", block_stride="odd")
    assert all(getattr(decode_case(case), name) == getattr(case, name) for name in shared)
    assert decode_questions.forbid(decode_case(case)) == []


# The implementations.


@hypothesis_settings(max_examples=8, deadline=None)
@given(st.data())
def test_ours_answers_whatever_is_drawn(verdict: Verdict, data: st.DataObject) -> None:
    axes = {axis: data.draw(st.sampled_from(values), label=axis) for axis, values in AXES.items()}
    axes |= {"queries": min(int(axes["queries"]), 2), "heads": min(int(axes["heads"]), 17)}
    case = ForwardCase(**axes, seed=data.draw(st.integers(0, 999)))  # type: ignore[arg-type]
    if not forbid(case) and not heavy(case):
        assert verdict(case, NAMED["ours-triton"]) == ("pass", [])


class TestVllm:
    """What vLLM's decode, which serves this call without AITER, does with it."""

    pytestmark = pytest.mark.vllm

    @pytest.mark.parametrize("changes", [{}, {"values": "below", "sink": "absent", "invalid": "front"}])
    def test_cases_pass(self, changes: dict[str, Any], verdict: Verdict) -> None:
        assert verdict(BASE.varied(**changes), NAMED["vllm-triton"]) == ("pass", [])

    def test_a_call_without_rows_raises(self) -> None:
        with pytest.raises(RuntimeError, match="reshape"):
            NAMED["vllm-triton"].run(build(BASE.varied(queries=0, rows="ragged")))


FAKE = {
    "__init__.py": "raise RuntimeError\n",
    "ops/triton/attention/pa_decode_sparse.py": """
        import torch
        from aiter.ops.triton.utils._triton import arch_info

        DEVICE_ARCH = arch_info.get_arch()

        def pa_decode_sparse(
            q, unified_kv, kv_indices, kv_indptr, attn_sink, softmax_scale, kv_splits=None, has_invalid=True
        ):
            assert DEVICE_ARCH == "gfx942" and has_invalid and kv_indices.dtype == torch.int32
            out = torch.empty_like(q)
            for t in range(q.shape[0] - 1):
                entries = kv_indices[kv_indptr[t] : kv_indptr[t + 1]]
                out[t] = unified_kv[entries[entries >= 0].long()].float().sum(0).to(q.dtype)
            return out
        """,
    "ops/triton/utils/_triton/arch_info.py": "def get_arch():\n    raise RuntimeError\n",
}


# Stand-ins of the function that vLLM calls and of its forerunner, which takes its arguments in another order.
PACKED = """
    import torch

    def pa_decode_sparse(
        q, unified_kv, kv_indices, kv_indptr, attn_sink, softmax_scale, kv_splits=None, has_invalid=None, *,
        extra_cache=None, extra_indices=None, extra_indptr=None,
    ):
        assert has_invalid and softmax_scale == 0.25 and attn_sink.tolist() == [0.5] and unified_kv.shape[2] == 584
        count = kv_indptr[-1] + (0 if extra_cache is None else extra_indptr[-1])
        return torch.full_like(q, float(count + kv_splits + 200))
    """
NEWER = """
    def sparse_mla_fwd(
        q, kv_buffer, kv_indptr, kv_indices, softmax_scale, *, kv_splits=None, has_invalid=False, out=None,
        attn_sink=None, extra_kv=None, extra_indptr=None, extra_indices=None,
    ):
        assert has_invalid and softmax_scale == 0.25 and attn_sink.tolist() == [0.5] and kv_buffer.shape[2] == 584
        count = kv_indptr[-1] + (0 if extra_kv is None else extra_indptr[-1])
        out.fill_(float(count + kv_splits + 100))
        return out, None
    """


class TestAiter:
    """What keeps AITER's kernels from answering, and how they are called."""

    @pytest.fixture
    def tree(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """An AITER whose only sparse kernel reads plain rows: it adds them up, and leaves the last row alone."""
        for name, text in FAKE.items():
            path = tmp_path / "aiter" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        monkeypatch.setattr(settings, "_aiter", tmp_path)
        return tmp_path

    def test_a_missing_tree_is_a_reason(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(settings, "_aiter", tmp_path / "nowhere")
        for name in ("aiter-triton", "aiter-gluon"):
            assert any("does not exist" in reason for reason in NAMED[name].unsupported(BASE, "interpreter"))
            assert NAMED[name].source() == b""

    def test_every_reason_is_given(self, tree: Path) -> None:
        def generic(on: Any = "interpreter", **changes: Any) -> list[str]:
            return NAMED["aiter-triton"].unsupported(BASE.varied(**changes), on)

        assert generic() == [] and NAMED["aiter-triton"].source() != b""
        starts = [reason.split(":")[0] for reason in generic("cuda", entries="any", sink="absent", splits=3)]
        assert starts == [
            "entries=any", "AITER's kernels are launched with options of Triton's AMD backend", "sink=absent", "splits=3",
        ]  # fmt: skip
        for on in ("interpreter", "cuda"):
            packed = NAMED["aiter-gluon"].unsupported(BASE, on)  # type: ignore[arg-type]
            assert "takes no second cache" in packed[0] and len(packed) == 2

    @pytest.mark.parametrize("extra", [True, False])
    @pytest.mark.parametrize("newer", [True, False])
    def test_both_caches_are_handed_over_as_they_are(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newer: bool, extra: bool
    ) -> None:
        where = tmp_path / "aiter" / "ops" / "triton" / "attention"
        where.mkdir(parents=True)
        (tmp_path / "aiter" / "__init__.py").touch()
        (where / "pa_decode_sparse.py").write_text(textwrap.dedent(PACKED))
        if newer:
            (where / "sparse_mla.py").write_text(textwrap.dedent(NEWER))
        monkeypatch.setattr(settings, "_aiter", tmp_path)
        monkeypatch.setattr("impl.sources.aiter.refuse_mismatch", lambda execution: None)
        found = aiter_forward(tmp_path)
        assert found is not None and found[1] == ("sparse_mla_fwd" if newer else "pa_decode_sparse")
        second = _segment([1.0, 1.0], [1, 1, 1], block=1) if extra else None
        inputs = _call(_segment([1.0, 1.0], [1, 1], block=1), second, sink=torch.tensor([0.5]), splits=4)
        out = two_segment_forward_aiter.packed(inputs).out
        # Entries of the main list, of the extra list, splits; each function adds a number of its own.
        assert out is inputs.out and out.unique().tolist() == [2 + 3 * extra + 4 + (100 if newer else 200)]
        precision = NAMED["aiter-gluon"].precision(BASE, "hip")
        assert precision.partial == ("bfloat16" if newer else "float32")

    def test_both_caches_become_one_pool_and_both_lists_one(self, tree: Path) -> None:
        main = _segment([9.0, 1.0, 2.0, 3.0], [1, -1, 3, 3], block=2)
        extra = _segment([9.0, 9.0, 9.0, 5.0], [3], block=1)
        two = {"indptr": torch.tensor([0, 4, 4])}, {"indptr": torch.tensor([0, 1, 1])}
        inputs = _call(
            dataclasses.replace(main, **two[0]), dataclasses.replace(extra, **two[1]),
            query=torch.zeros(2, 1, 512, dtype=torch.bfloat16), out=guarded((2, 1, 512), torch.bfloat16),
        )  # fmt: skip
        with new_memory_poisoned():
            out = two_segment_forward_aiter.generic(inputs).out
        # 1 + 3 + 3 + 5; what the kernel leaves alone is not zero by accident.
        assert out is not None and out[0].unique().tolist() == [12.0] and bool(out[1].isnan().all())


@pytest.mark.aiter
@pytest.mark.skipif(AITER is None, reason="MLA_ORACLE_AITER names no AITER source tree")
class TestRealAiter:
    """What AITER's generic kernel does."""

    @pytest.mark.parametrize("splits", [1, 4])
    def test_cases_pass(self, splits: int, verdict: Verdict) -> None:
        assert verdict(BASE.varied(splits=splits), NAMED["aiter-triton"]) == ("pass", [])

    def test_a_sink_of_minus_infinity_blots_out_an_unsplit_row(self, verdict: Verdict) -> None:
        status, _ = verdict(BASE.varied(splits=1, sink="minus_infinity"), NAMED["aiter-triton"])
        assert status == "fail"

    def test_an_unsplit_empty_row_is_never_written(self, verdict: Verdict) -> None:
        status, sentences = verdict(BASE.varied(splits=1, rows="mixed", queries=5), NAMED["aiter-triton"])
        assert status == "fail" and "=nan, but should be 0" in sentences[0]
