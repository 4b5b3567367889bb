"""Do the implementations of sparse MLA decode give the answers worked out by hand, and refuse what is no call?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.case import parse
from cases.memory import guarded, on_device
from cases.sparse_mla.decode import (
    LANES,
    REGRESSIONS,
    DecodeCase,
    DecodeInputs,
    DecodeOutputs,
    Segment,
    build,
)
from impl.implementation import Impl
from impl.sources import settings
from impl.sparse_mla import decode_call, decode_torch, decode_triton
from impl.sparse_mla.decode import IMPLS
from oracle import mxfp8
from oracle.cache import records
from oracle.formats import numbers

NAMED = {impl.name: impl for impl in IMPLS}
OURS = [pytest.param(decode_triton.run, id="ours-triton"), pytest.param(decode_torch.run, id="torch-bf16")]
EVERYONE = [*OURS, pytest.param(NAMED["vllm-triton"].run, id="vllm-triton", marks=pytest.mark.vllm)]
Run = Callable[[DecodeInputs], DecodeOutputs]
Verdict = Callable[..., tuple[str, list[str]]]
BASE = DecodeCase()


def cache_of(codes: torch.Tensor, scales: torch.Tensor, rotated: torch.Tensor, block: int = 4) -> torch.Tensor:
    """Pages with the records: codes uint8 [rows, 448], scale bytes [rows, 7], bf16 [rows, 64]; the rest is 0xFF."""
    blocks = -(-codes.shape[0] // block)
    pages = torch.full((blocks, records.page_bytes(block)), 0xFF, dtype=torch.uint8)
    for row in range(codes.shape[0]):
        page, place = pages[row // block], row % block
        page[576 * place : 576 * place + 448] = codes[row]
        page[576 * place + 448 : 576 * place + 576] = rotated[row].bfloat16().view(torch.uint8)
        page[576 * block + 8 * place : 576 * block + 8 * place + 7] = scales[row]
    return pages.as_strided((blocks, block, 584), (pages.stride(0), 584, 1))


def call(
    cache: torch.Tensor, slots: list[int], query: torch.Tensor, /, *, encoding: str = "float8_e4m3fn", **changes: Any
) -> DecodeInputs:
    """One query over `slots` of one cache, fp32 out on gfx950, one split; `changes` override."""
    heads = query.shape[1]
    main = Segment(
        cache=cache,
        encoding=encoding,  # type: ignore[arg-type]
        indices=torch.tensor(slots, dtype=torch.int32),
        indptr=torch.tensor([0, len(slots)], dtype=torch.int32),
    )
    plain = DecodeInputs(
        query=query, main=main, extra=None, scale=1.0, sink=None, positions=None, cos_sin=None,
        out=torch.full((1, heads, LANES), math.nan), out_codes=None, out_scales=None, arch="gfx950", compute_units=256,
        splits=1, adaptive=False, trust_extra=False,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def plain_cache(rows: int = 8) -> torch.Tensor:
    """Row r holds r in the first lane, 1 in all others; scale 1."""
    codes = torch.full((rows, 448), 0x38, dtype=torch.uint8)
    codes[:, 0] = numbers.encode(torch.arange(rows).float(), "float8_e4m3fn")
    return cache_of(codes, torch.full((rows, 7), 127, dtype=torch.uint8), torch.ones(rows, 64))


def first_lane(value: float, heads: int = 1) -> torch.Tensor:
    """A query that sees the first lane only."""
    query = torch.zeros(1, heads, LANES, dtype=torch.bfloat16)
    query[..., 0] = value
    return query


@pytest.mark.parametrize("run", EVERYONE)
def test_one_key_is_the_answer(run: Run) -> None:
    inputs = call(plain_cache(), [3], first_lane(2.0))
    assert run(inputs).out[0, 0, :3].tolist() == [3.0, 1.0, 1.0]


@pytest.mark.parametrize("run", EVERYONE)
def test_a_zero_query_means_over_all_entries_as_often_as_they_stand(run: Run) -> None:
    # (1 + 3 + 3 + 5) / 4; -1 and 8 are no slots of the cache.
    inputs = call(plain_cache(), [1, -1, 3, 3, 8, 5, 2**31 - 1, -(2**31)], first_lane(0.0))
    assert run(inputs).out[0, 0, :2].tolist() == [3.0, 1.0]


@pytest.mark.parametrize("run", EVERYONE)
def test_a_sink_as_loud_as_the_key_takes_half(run: Run) -> None:
    # The score is 3 * 2 * 0.25 = 1.5; the sink is not multiplied by 0.25.
    inputs = call(plain_cache(), [3], first_lane(2.0), scale=0.25, sink=torch.tensor([1.5, 1e4]))
    assert run(inputs).out[0, 0, :2].tolist() == [1.5, 0.5]


@pytest.mark.parametrize("run", OURS)
def test_the_log_sum_exp_leaves_the_sink_out(run: Run) -> None:
    inputs = call(plain_cache(), [3, 3], first_lane(2.0), scale=0.25, sink=torch.tensor([1.5]))
    assert run(inputs).lse.tolist() == [[pytest.approx(1.5 + math.log(2), rel=1e-6)]]


@pytest.mark.parametrize("run", EVERYONE)
@pytest.mark.parametrize("sink", [None, torch.tensor([-math.inf]), torch.tensor([20.0])], ids=["no", "-inf", "20"])
def test_without_a_valid_key_the_answer_is_zero(run: Run, sink: torch.Tensor | None) -> None:
    inputs = call(plain_cache(), [-1, 99], first_lane(1.0), sink=sink, splits=3)
    out = run(inputs)
    assert not out.out.any() and (out.lse is None or out.lse.tolist() == [[-math.inf]])


@pytest.mark.parametrize("run", EVERYONE)
def test_the_rotation_is_the_inverse_one_in_neighbouring_lanes(run: Run) -> None:
    cache = plain_cache(4)
    rope = torch.zeros(4, 64)
    rope[1, 0], rope[1, 1] = 2.0, 1.0
    cache = cache_of(torch.zeros(4, 448, dtype=torch.uint8), torch.full((4, 7), 127, dtype=torch.uint8), rope)
    table = torch.zeros(3, 64)
    table[:, :32] = 1.0
    # At position 2 the first pair turns by a quarter: cos 0, sin 1.
    table[2, 0], table[2, 32] = 0.0, 1.0
    turned = run(call(cache, [1], first_lane(1.0), positions=torch.tensor([2]), cos_sin=table))
    assert turned.out[0, 0, 448:452].tolist() == [1.0, -2.0, 0.0, 0.0] and turned.rotated_rows == 1
    kept = run(call(cache, [1], first_lane(1.0), cos_sin=table))
    assert kept.out[0, 0, 448:452].tolist() == [2.0, 1.0, 0.0, 0.0] and kept.rotated_rows == 0


@pytest.mark.parametrize("run", OURS)
@pytest.mark.parametrize("encoding", ["float8_e4m3fn", "float8_e4m3fnuz"])
@pytest.mark.parametrize("scale", [0, 1, 105, 127, 200, 239])
def test_every_code_decodes(run: Run, encoding: Any, scale: int) -> None:
    codes = (torch.arange(448) % 256).to(torch.uint8)[None]
    cache = cache_of(codes, torch.full((1, 7), scale, dtype=torch.uint8), torch.zeros(1, 64))
    want = torch.nan_to_num(numbers.decode(codes[0], encoding, torch.float32) * 2.0 ** (scale - 127), nan=0.0)
    got = run(call(cache, [0], first_lane(0.0), encoding=encoding)).out[0, 0, :448]
    # Keys may be bf16, exact for every scale that a writer emits; below, bf16's own subnormals round.
    assert torch.equal(got, want) or (scale < 4 and torch.equal(got, want.bfloat16().float()))


def test_not_a_number_counts_as_zero_in_score_and_value() -> None:
    codes = torch.full((4, 448), 0x38, dtype=torch.uint8)
    codes[1, 0], codes[1, 1] = 0x7F, 0xFF
    rope = torch.ones(4, 64)
    rope[1, 5] = math.nan
    scales = torch.full((4, 7), 127, dtype=torch.uint8)
    # Zero times infinity.
    codes[1, 64:128], scales[1, 1] = 0, 255
    inputs = call(cache_of(codes, scales, rope), [1], first_lane(1.0))
    out = decode_triton.run(inputs)
    assert out.out[0, 0].tolist() == [0.0] * 2 + [1.0] * 62 + [0.0] * 64 + [1.0] * 325 + [0.0] + [1.0] * 58
    assert out.lse.tolist() == [[0.0]]


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 7, 32, 33])
def test_one_key_and_its_copies_are_exact_with_any_split_count(splits: int) -> None:
    for slots in ([-1] * 40 + [5] + [-1] * 30, [5] * 71):
        out = decode_triton.run(call(plain_cache(), slots, first_lane(1.0), splits=splits)).out
        assert out[0, 0, :2].tolist() == [5.0, 1.0]


def test_splits_cut_both_segments_by_themselves_and_lose_nothing() -> None:
    # 7 main and 4 extra entries in 3 splits: chunks of 3 and 2, so {0..2, 0..1}, {3..5, 2..3}, {6}.
    main, extra = list(range(7)), [2, 2, 7, 1]
    other = Segment(
        cache=plain_cache(),
        encoding="float8_e4m3fn",
        indices=torch.tensor([9, *extra, 9]),
        indptr=torch.tensor([1, 5]),
    )
    inputs = call(plain_cache(), main, first_lane(1.0), extra=other, splits=3)
    left = decode_triton.partials_of(decode_call.call_of(inputs))
    assert left.top[0, :, 0].tolist() == [2.0, 7.0, 6.0]
    sums = [
        sum(math.exp(s - top) for s in part) for top, part in ((2, [0, 1, 2, 2, 2]), (7, [3, 4, 5, 7, 1]), (6, [6]))
    ]
    assert left.total[0, :, 0].tolist() == pytest.approx(sums, rel=1e-6)


def test_an_inactive_split_leaves_its_memory_and_is_not_read() -> None:
    case = BASE.varied(queries=16, heads=1, main_length=31, extra_length=512, rows="mixed", adaptive=True)
    inputs = build(case)
    judged = decode_call.call_of(on_device(inputs, "cpu"))
    left = decode_triton.partials_of(judged)
    inactive = left.value.isnan().all(-1)[..., 0]
    assert left.adaptive and inactive.any() and not left.top.isnan().any() and not left.total.isnan().any()
    assert (left.top[..., 0][inactive] == decode_triton.LOWEST).all() and not left.total[..., 0][inactive].any()
    decode_triton.finish(judged, left)
    assert judged.inputs.out is not None and not judged.inputs.out.isnan().any()


def hard_rows() -> torch.Tensor:
    """fp32 [1, 2, 512]: zeros, ties of every code, subnormals, and the neighbours of 448 times powers of two."""
    rows = torch.zeros(2, 16, 32)
    for block in range(2, 16):
        power = 2.0 ** ((-149, -140, -127, -126, -20, -9, -1, 0, 1, 5, 30, 90, 118, 119)[block - 2])
        edge = torch.tensor(448.0 * power)
        rows[0, block, 0] = edge
        rows[1, block, 0] = torch.nextafter(edge, torch.tensor(math.inf)) if block < 15 else edge
        codes = numbers.decode(torch.arange(1, 32).to(torch.uint8) * 4 % 120, "float8_e4m3fn", torch.float32)
        above = numbers.decode(torch.arange(1, 32).to(torch.uint8) * 4 % 120 + 1, "float8_e4m3fn", torch.float32)
        sign = torch.where(torch.arange(31) % 2 == 0, 1.0, -1.0)
        rows[0, block, 1:] = (codes + above) / 2 * power * sign
        rows[1, block, 1:] = torch.nextafter((codes + above) / 2, torch.tensor(0.0)) * power * sign
    rows[0, 1] = -0.0
    return rows.view(1, 2, 512)


def test_the_quantised_answer_is_exactly_the_fp32_row_quantised() -> None:
    rows = hard_rows()
    table = torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], 1)
    inputs = call(
        plain_cache(), [1], first_lane(0.0, heads=2), positions=torch.tensor([0]), cos_sin=table, out=None,
        out_codes=torch.full((1, 1024), 0xFF, dtype=torch.uint8).view(torch.float8_e4m3fn),
        out_scales=torch.full((1, 32), 0xFF, dtype=torch.uint8),
    )  # fmt: skip
    left = decode_triton.Partials(torch.zeros(1, 1, 2), torch.ones(1, 1, 2), rows[:, None], False)
    decode_triton.finish(decode_call.call_of(inputs), left)
    codes, scales = mxfp8.quantise(rows.view(1, 1024))
    assert inputs.out_scales is not None and inputs.out_codes is not None
    assert torch.equal(inputs.out_scales, scales)
    got = inputs.out_codes.view(torch.uint8)
    assert torch.equal(numbers.decode(got, "float8_e4m3fn"), numbers.decode(codes, "float8_e4m3fn"))


@pytest.mark.parametrize(
    ("dense", "lengths", "rows", "indices", "indptr"),
    [
        # Without lengths, two non-negative entries mean the first two columns.
        ([[5, -1, 7]], None, 100, [5], [0, 1]),
        ([[5, -1, 7], [1, 2, 3]], [3, 2], 7, [5, 1, 2], [0, 1, 3]),
        ([[5, 6, 7], [1, 2, 3]], [-4, 9], 100, [1, 2, 3], [0, 0, 3]),
        ([[5, 5, 5]], [3], 0, [], [0, 0]),
        ([[2**31 - 1, -(2**31), 4]], [3], 5, [4], [0, 1]),
    ],
)
def test_dense_rows_become_ragged(
    dense: list[list[int]], lengths: list[int] | None, rows: int, indices: list[int], indptr: list[int]
) -> None:
    given = None if lengths is None else torch.tensor(lengths)
    got, starts = decode_call.ragged_from_dense(torch.tensor(dense), given, rows)
    assert got.numel() == torch.tensor(dense).numel() and starts.tolist() == indptr
    assert got[: indptr[-1]].tolist() == indices


def test_no_rows_are_an_empty_answer() -> None:
    for text in REGRESSIONS:
        case = parse(text)
        assert isinstance(case, DecodeCase)
        if case.queries == 0:
            for name in ("ours-triton", "torch-bf16"):
                out = NAMED[name].run(build(case))
                assert out.out.shape == (0, 16, 512) and out.rotated_rows == 0 and out.lse.shape == (0, 16)


def test_pages_beyond_two_gigabytes_are_reached() -> None:
    far = (1 << 31) + 576
    near = plain_cache(1)
    storage = torch.empty(far + 2880, dtype=torch.uint8)
    cache = storage.as_strided((2, 1, 584), (far, 584, 1))
    cache[1].copy_(near[0, :1])
    storage[far : far + 576] = near.as_strided((576,), (1,))
    storage[far + 576 : far + 584] = near.as_strided((8,), (1,), 576 * near.shape[1])
    storage[far] = 0x40
    assert decode_triton.run(call(cache, [1], first_lane(0.0))).out[0, 0, :2].tolist() == [2.0, 1.0]


CODES = {"out": None, "out_codes": torch.zeros(1, 512).to(torch.float8_e4m3fn)}
SCALES = {"out_scales": torch.zeros(1, 16, dtype=torch.uint8)}
TURN = {"positions": torch.tensor([0]), "cos_sin": torch.ones(1, 64)}
SEGMENT = Segment(plain_cache(), "float8_e4m3fn", torch.tensor([0]), torch.tensor([0, 1]))


def other(**changes: Any) -> dict[str, Segment]:
    """The main segment with one thing wrong."""
    return {"main": dataclasses.replace(SEGMENT, **changes)}


REFUSED: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "query of two dimensions": ({"query": torch.zeros(1, 512).bfloat16()}, ValueError),
    "query of 576 lanes": ({"query": torch.zeros(1, 1, 576).bfloat16()}, ValueError),
    "query in fp32": ({"query": torch.zeros(1, 1, 512)}, TypeError),
    "query with a lane stride": ({"query": torch.zeros(1, 1, 1024).bfloat16()[..., ::2]}, ValueError),
    "cache of two dimensions": (other(cache=torch.zeros(1, 584, dtype=torch.uint8)), ValueError),
    "cache of 656-byte records": (other(cache=torch.zeros(1, 1, 656, dtype=torch.uint8)), ValueError),
    "cache of int8": (other(cache=torch.zeros(1, 1, 584, dtype=torch.int8)), TypeError),
    "unknown encoding": (other(encoding="float8_e5m2"), ValueError),
    "indices of two dimensions": (other(indices=torch.tensor([[0]])), ValueError),
    "float indices": (other(indices=torch.tensor([0.0])), TypeError),
    "indptr of two dimensions": (other(indptr=torch.tensor([[0, 1]])), ValueError),
    "indptr too short": (other(indptr=torch.tensor([0])), ValueError),
    "indices without indptr": (other(indptr=None), ValueError),
    "dense of one dimension": (other(indices=None, indptr=None, dense=torch.tensor([0])), ValueError),
    "dense with too many rows": (other(indices=None, indptr=None, dense=torch.zeros(2, 1).int()), ValueError),
    "too many lengths": (
        other(indices=None, indptr=None, dense=torch.zeros(1, 1).int(), lengths=torch.zeros(2).int()), ValueError,
    ),
    "sink shorter than the heads": ({"sink": torch.zeros(0)}, ValueError),
    "no output": ({"out": None}, ValueError),
    "both outputs": ({**CODES, **SCALES, **TURN, "out": torch.zeros(1, 1, 512)}, ValueError),
    "codes without scales": ({**CODES, **TURN}, ValueError),
    "codes without positions": ({**CODES, **SCALES}, ValueError),
    "codes on gfx942": ({**CODES, **SCALES, **TURN, "arch": "gfx942"}, ValueError),
    "codes as bytes": ({**CODES, **SCALES, **TURN, "out_codes": torch.zeros(1, 512, dtype=torch.uint8)}, TypeError),
    "scales in fp32": ({**CODES, **TURN, "out_scales": torch.zeros(1, 16)}, TypeError),
    "scales of another shape": ({**CODES, **TURN, "out_scales": torch.zeros(1, 8, dtype=torch.uint8)}, ValueError),
    "out of another shape": ({"out": torch.zeros(1, 2, 512)}, ValueError),
    "out in fp16": ({"out": torch.zeros(1, 1, 512, dtype=torch.float16)}, TypeError),
    "out with a lane stride": ({"out": torch.zeros(1, 1, 1024)[..., ::2]}, ValueError),
    "positions without a table": ({"positions": torch.tensor([0])}, ValueError),
    "a table of 32 columns": ({**TURN, "cos_sin": torch.ones(1, 32)}, ValueError),
    "a position beyond the table": ({**TURN, "positions": torch.tensor([1])}, ValueError),
    "too many positions": ({**TURN, "positions": torch.tensor([0, 0])}, ValueError),
    "float positions": ({**TURN, "positions": torch.tensor([0.0])}, TypeError),
    "a cache with page stride 585": (
        other(cache=torch.zeros(1170, dtype=torch.uint8).as_strided((2, 1, 584), (585, 584, 1))), ValueError,
    ),
    "a cache with overlapping pages": (
        other(cache=torch.zeros(2000, dtype=torch.uint8).as_strided((2, 2, 584), (584, 584, 1))), ValueError,
    ),
    "a cache at an odd address": (
        other(cache=torch.zeros(1201, dtype=torch.uint8)[1:].as_strided((1, 2, 584), (1168, 584, 1), 1)), ValueError,
    ),
    "extra records of 656 bytes": (
        {"extra": dataclasses.replace(SEGMENT, cache=torch.zeros(1, 1, 656, dtype=torch.uint8))}, ValueError,
    ),
    "extra indices without indptr": ({"extra": dataclasses.replace(SEGMENT, indptr=None)}, ValueError),
    "out elsewhere": ({"out": torch.zeros(1, 1, 512, device="meta")}, ValueError),
    "codes with a lane stride": (
        {**SCALES, **TURN, "out": None, "out_codes": torch.zeros(1, 1024).to(torch.float8_e4m3fn)[:, ::2]}, ValueError,
    ),
    "codes of another shape": (
        {**SCALES, **TURN, "out": None, "out_codes": torch.zeros(1, 1024).to(torch.float8_e4m3fn)}, ValueError,
    ),
    "a negative position": ({**TURN, "positions": torch.tensor([-1])}, ValueError),
    "a table in fp64": ({**TURN, "cos_sin": torch.ones(1, 64, dtype=torch.float64)}, TypeError),
    "sink in bf16": ({"sink": torch.zeros(1).bfloat16()}, TypeError),
    "trust without an extra cache": ({"trust_extra": True}, ValueError),
    "trust on gfx942": ({"trust_extra": True, "extra": SEGMENT, "arch": "gfx942"}, ValueError),
    "negative splits": ({"splits": -1}, ValueError),
    "no compute units": ({"compute_units": 0}, ValueError),
    "unknown architecture": ({"arch": "gfx90a"}, ValueError),
}  # fmt: skip


@pytest.mark.parametrize("run", OURS)
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_call_is_refused(run: Run, what: str) -> None:
    changes, error = REFUSED[what]
    with pytest.raises(error, match=r"should|needs"):
        run(call(plain_cache(), [1], first_lane(1.0), **changes))


VARIED = [
    BASE.varied(arch="gfx942", main_encoding="float8_e4m3fnuz", heads=5, rows="mixed", invalid="scattered"),
    BASE.varied(arch="gfx942", splits=3, main_encoding="float8_e4m3fnuz", values="nan_lanes", queries=2),
    BASE.varied(arch="gfx942", splits=2, extra_encoding="float8_e4m3fnuz", values="uniform_exact", queries=1),
    BASE.varied(splits=5, heads=17, layout="strided", block_stride="odd", main_block=5, extra_block=1, queries=2),
    BASE.varied(splits=4, output="mxfp8", rotation="spread", layout="strided", integers="int64", sink="large"),
    BASE.varied(splits=4, output="float32", rotation="quarter", form="dense", queries=2, values="onehot_exact"),
    BASE.varied(splits=3, form="dense_counted", invalid="tail", queries=2, rows="ragged", sink="longer"),
    BASE.varied(splits=2, trust_extra=True, form="ragged_offset", duplicates="across", values="integer_exact"),
    BASE.varied(splits=8, values="subnormal", queries=1, extra_length=-1),
    BASE.varied(splits=3, values="wide", queries=2, main_length=33, block_stride="padded", garbage="huge"),
    BASE.varied(arch="other", rotation="spread", values="ties", queries=2, sink="minus_infinity"),
]


@pytest.mark.parametrize("name", ["ours-triton", "torch-bf16"])
@pytest.mark.parametrize("case", VARIED, ids=lambda case: case.id[18:])
def test_cases_pass(name: str, case: DecodeCase, verdict: Verdict) -> None:
    assert verdict(case, NAMED[name]) == ("pass", [])


def test_the_mxfp8_epilogue_is_the_quantised_fp32_row_bit_for_bit() -> None:
    for values in ("randn", "single", "outlier"):
        case = BASE.varied(
            heads=3,
            main_length=33,
            extra_length=31,
            splits=3,
            values=values,
            rotation="spread",
            output="mxfp8",
            queries=3,
        )
        inputs = build(case)
        plain = dataclasses.replace(inputs, out=guarded((3, 3, 512), torch.float32), out_codes=None, out_scales=None)
        rows = decode_triton.run(on_device(plain, "cpu")).out
        answer = decode_triton.run(on_device(inputs, "cpu"))
        assert rows is not None and answer.codes is not None and answer.scales is not None
        codes, scales = mxfp8.quantise(rows.reshape(3, -1))
        assert torch.equal(answer.scales, scales)
        decoded = answer.codes.view(torch.uint8)
        # The sign of a zero is free.
        assert torch.equal(torch.where(decoded == 0x80, 0, decoded), torch.where(codes == 0x80, 0, codes))


@pytest.mark.parametrize("impl", IMPLS, ids=lambda impl: impl.name)
def test_cases_with_one_key_share_code_only_if_their_axes_do(impl: Impl) -> None:
    assert impl.compile_key(BASE) == impl.compile_key(BASE.varied(seed=5, values="wide"))
    if impl.name != "torch-bf16":
        assert impl.compile_key(BASE) != impl.compile_key(BASE.varied(sink="absent"))
        assert impl.compile_key(BASE) != impl.compile_key(BASE.varied(splits=3))


class TestVllm:
    """What keeps vLLM's kernels from answering, and what does not."""

    @pytest.fixture
    def tree(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A vLLM whose wrapper is older than the rotation in the reduce kernel."""
        for package in ("vllm", "vllm/triton_utils", "vllm/v1", "vllm/v1/attention", "vllm/v1/attention/ops"):
            (tmp_path / package).mkdir()
            (tmp_path / package / "__init__.py").touch()
        (tmp_path / "vllm/v1/attention/ops/rocm_aiter_mla_sparse.py").write_text(
            "def _decode_num_splits(num_queries): ...\ndef rocm_sparse_attn_decode(q, *, extra_cache_nan_free): ...\n"
        )
        monkeypatch.setattr(settings, "_vllm", tmp_path)
        return tmp_path

    def reasons(self, on: Any = "interpreter", **changes: Any) -> list[str]:
        return NAMED["vllm-triton"].unsupported(BASE.varied(**changes), on)

    def test_nothing_stands_against_a_plain_call(self, tree: Path) -> None:
        assert self.reasons() == [] == self.reasons(arch="other") == self.reasons(queries=0, rows="ragged")

    def test_every_reason_is_given(self, tree: Path) -> None:
        assert self.reasons(arch="gfx942") == [] == self.reasons(on="cuda", arch="gfx942")
        fnuz = self.reasons(on="cuda", arch="gfx942", main_encoding="float8_e4m3fnuz")
        assert fnuz[0].startswith("main_encoding=float8_e4m3fnuz: Triton has no FNUZ types")
        assert len(self.reasons(arch="gfx942", extra_encoding="float8_e4m3fnuz")) == 1
        assert "_decode_gfx950_num_splits" in self.reasons(splits=3)[0]
        assert self.reasons(arch="gfx942", main_encoding="float8_e4m3fnuz", splits=3) == []
        missing = self.reasons(rotation="spread", output="mxfp8", adaptive=True, trust_extra=True)
        assert [reason.split(":")[0] for reason in missing] == ["adaptive=yes", "rotation=spread", "output=mxfp8"]

    @pytest.mark.parametrize(
        "case",
        [
            BASE.varied(queries=2, splits=2),
            BASE.varied(arch="gfx942", main_encoding="float8_e4m3fnuz", rotation="spread", heads=5, queries=2),
            BASE.varied(splits=3, output="mxfp8", rotation="spread", layout="strided", queries=1),
            BASE.varied(splits=2, output="float32", form="dense_counted", queries=1, sink="longer"),
            BASE.varied(queries=17, heads=1, main_length=33, extra_length=33, adaptive=True, rows="ragged"),
            BASE.varied(arch="other", queries=1),
        ],
        ids=lambda case: case.id[18:],
    )
    @pytest.mark.vllm
    def test_cases_pass(self, case: DecodeCase, verdict: Verdict) -> None:
        assert verdict(case, NAMED["vllm-triton"]) == ("pass", [])

    @pytest.mark.vllm
    def test_a_forced_split_count_reaches_the_kernel(self) -> None:
        # With seven maxima instead of one, other probabilities round.
        answers = [
            NAMED["vllm-triton"].run(build(BASE.varied(queries=1, splits=splits, sink="absent"))).out
            for splits in (1, 7)
        ]
        assert not torch.equal(*answers)

    @pytest.mark.vllm
    def test_the_route_without_splits_says_rotated_and_is_not(self, verdict: Verdict) -> None:
        status, sentences = verdict(BASE.varied(arch="other", rotation="spread", queries=2), NAMED["vllm-triton"])
        assert status == "fail" and sentences[0].startswith("out[")

    @pytest.mark.parametrize("arch", ["gfx942", "gfx950", "other"])
    @pytest.mark.vllm
    def test_far_pages_are_reached_and_far_rows_are_not(self, arch: str, verdict: Verdict) -> None:
        splits = 0 if arch == "other" else 2
        case = BASE.varied(arch=arch, heads=1, queries=5, main_length=33, extra_length=31, splits=splits)
        assert verdict(case.varied(reach="caches"), NAMED["vllm-triton"]) == ("pass", [])
        # The row's number and its stride are multiplied in 32 bits.
        status, sentences = verdict(case.varied(reach="rows"), NAMED["vllm-triton"])
        assert status == "memory" and sentences[0].startswith("out-of-bounds load ")
        assert "before the start of argument q" in sentences[0]

    @pytest.mark.vllm
    def test_a_call_without_rows_raises(self) -> None:
        with pytest.raises(RuntimeError, match="reshape"):
            NAMED["vllm-triton"].run(build(BASE.varied(queries=0, rows="ragged")))
