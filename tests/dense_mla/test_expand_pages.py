"""Is the expansion of block tables judged rightly, and do our own routes give the slots worked out by hand?"""

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import memory
from cases.case import parse
from cases.dense_mla import expand_pages as ask
from cases.dense_mla.expand_pages import ExpandCase, Inputs
from cases.precision import Precision
from impl.dense_mla import expand_pages as routes
from impl.dense_mla.expand_pages import IMPLS
from impl.sources import settings as sources
from oracle.dense_mla import expand_pages as right

OURS, VLLM, TORCH = IMPLS
RUNS = pytest.mark.parametrize("run", [right.reference, OURS.run, TORCH.run], ids=["reference", OURS.name, TORCH.name])


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def two_requests(**changes: object) -> Inputs:
    """Lists of 3 and 5 tokens in blocks of 2, and two places behind them."""
    inputs = Inputs(
        block_table=int32([[10, 11, 99], [20, 21, 22]]),
        kv_indptr=int32([0, 3, 8]),
        real_lengths=int32([0, 0]),
        indices=int32([-7] * 10),
        block_size=2,
        clamped=False,
        extra=0,
        graphs=True,
    )
    return dataclasses.replace(inputs, **changes)  # type: ignore[arg-type]


def passes(inputs: Inputs, outputs: ask.Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


@RUNS
def test_hand_worked_lists(run: object) -> None:
    assert run(two_requests()).indices.tolist() == [20, 21, 22, 40, 41, 42, 43, 44, -1, -1]  # type: ignore[operator]
    eager = run(two_requests(graphs=False))  # type: ignore[operator]
    assert eager.indices.tolist() == [20, 21, 22, 40, 41, 42, 43, 44, -7, -7]


@RUNS
def test_blocks_of_one_token_are_copied(run: object) -> None:
    outputs = run(two_requests(block_size=1, kv_indptr=int32([0, 2, 5])))  # type: ignore[operator]
    assert outputs.indices.tolist() == [10, 11, 20, 21, 22, -1, -1, -1, -1, -1]


@RUNS
def test_clamped_places_repeat_the_first_slot(run: object) -> None:
    lists = {"kv_indptr": int32([0, 4, 10]), "real_lengths": int32([2, 6]), "clamped": True, "extra": 2}
    outputs = run(two_requests(**lists))  # type: ignore[operator]
    assert outputs.indices.tolist() == [20, 21, 20, 20, 40, 41, 42, 43, 44, 45]
    # The last two places lie beyond what the table has room for.
    lists |= {"kv_indptr": int32([0, 2, 10]), "real_lengths": int32([2, 5])}
    outputs = run(two_requests(**lists))  # type: ignore[operator]
    assert outputs.indices.tolist() == [20, 21, 40, 41, 42, 43, 44, 40, 40, 40]


@RUNS
@pytest.mark.parametrize("columns", [1, 2], ids=["next-to-each-other", "gaps"])
def test_strides_of_the_table_are_its_own(run: object, columns: int) -> None:
    table = int32([[10, 20], [11, 21], [99, 22]]).repeat_interleave(columns, 1)[:, ::columns].t()
    assert table.stride() != (3, 1)
    outputs = run(two_requests(block_table=table))  # type: ignore[operator]
    assert outputs.indices.tolist()[:8] == [20, 21, 22, 40, 41, 42, 43, 44]


@RUNS
def test_no_requests_leave_an_empty_list(run: object) -> None:
    nobody = {"block_table": int32([]).reshape(0, 3), "kv_indptr": int32([0]), "real_lengths": int32([])}
    assert run(two_requests(**nobody)).indices.tolist() == [-1] * 10  # type: ignore[operator]
    assert run(two_requests(**nobody, graphs=False)).indices.tolist() == [-7] * 10  # type: ignore[operator]


@RUNS
def test_the_last_slot_of_int32_is_reached(run: object) -> None:
    top = 2**31 // 48 - 1
    one = {"block_table": int32([[top]]), "kv_indptr": int32([0, 48]), "real_lengths": int32([0])}
    outputs = run(two_requests(**one, block_size=48, indices=int32([0] * 48)))  # type: ignore[operator]
    assert outputs.indices.tolist() == list(range(top * 48, top * 48 + 48))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kv_indptr": int32([0, 7, 8])}, "length of request 0=7: should be at most 6"),
        ({"kv_indptr": int32([0, 3, 11])}, "should rise from 0 to at most 10, the buffer's end"),
        ({"kv_indptr": int32([0, 3, 2])}, "should rise from 0"),
        ({"kv_indptr": int32([1, 3, 8])}, "should rise from 0"),
        ({"kv_indptr": int32([0, 3])}, "kv_indptr=2 starts: should be 3 for 2 rows"),
        (
            {"block_table": int32([[10, 2**30, 0], [20, 21, 22]])},
            "block of request 0=1073741824: should be 0 to 1073741823",
        ),
        ({"block_table": int32([[10, 11, 0], [20, 21, -1]])}, "block of request 1=-1: should be 0 to"),
        ({"clamped": True, "extra": 9, "real_lengths": int32([7, 0])}, r"real_lengths\[0\]=7: should be at most 6"),
    ],
)
def test_malformed_calls_are_named(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        right.reference(two_requests(**changes))


def test_blocks_that_no_token_needs_may_be_anything() -> None:
    table = int32([[10, 11, 2**31 - 1], [20, 21, 22]])
    assert right.reference(two_requests(block_table=table)).indices.tolist()[:3] == [20, 21, 22]


@settings(max_examples=40, deadline=None)
@given(
    table=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=4),
    block_size=st.integers(1, 5),
    data=st.data(),
)
def test_the_reference_agrees_with_a_loop_over_tokens(
    table: list[list[int]], block_size: int, data: st.DataObject
) -> None:
    lengths = [data.draw(st.integers(0, 3 * block_size)) for _ in table]
    real = [data.draw(st.integers(0, length)) for length in lengths]
    clamped = data.draw(st.booleans())
    starts, want = [0], []
    for row, length, known in zip(table, lengths, real, strict=True):
        for place in range(length):
            token = 0 if clamped and place >= known else place
            block, offset = divmod(token, block_size)
            want.append(row[block] * block_size + offset)
        starts.append(len(want))
    inputs = two_requests(
        block_table=int32(table), kv_indptr=int32(starts), real_lengths=int32(real), block_size=block_size,
        clamped=clamped, indices=int32([5] * (len(want) + 2)),
    )  # fmt: skip
    assert right.reference(inputs).indices.tolist() == [*want, -1, -1]
    assert OURS.run(memory.on_device(inputs, "cpu")).indices.tolist() == [*want, -1, -1]


def test_each_part_of_the_buffer_is_judged() -> None:
    inputs = two_requests()
    for place in (0, 7, 8, 9):
        outputs = right.reference(inputs)
        outputs.indices[place] += 1
        assert not passes(inputs, outputs), place
    outputs = right.reference(two_requests(graphs=False))
    assert not passes(inputs, outputs)


def test_the_table_of_a_case_is_laid_out_as_it_says() -> None:
    strides = {
        table: ask.build(ExpandCase(table=table)).block_table.stride()  # type: ignore[arg-type]
        for table in ("contiguous", "row_gaps", "column_gaps", "transposed", "one_row", "far")
    }
    assert strides["contiguous"] == (9, 1) and strides["one_row"] == (0, 1)
    assert strides["row_gaps"][0] > 9 and strides["row_gaps"][1] == 1
    assert strides["column_gaps"][1] == 3 and strides["transposed"] == (1, 10)
    assert 6 * strides["far"][0] * 4 >= 1 << 31


def test_lists_of_a_case_pass_the_ends_of_blocks_and_tiles() -> None:
    inputs = ask.build(ExpandCase(requests=33, width=40, block_size=128, lengths="edges"))
    lengths = set(inputs.kv_indptr.diff().tolist())
    assert {0, 1, 127, 129, 1023, 1024, 1025, 5119, 5120} <= lengths


@pytest.mark.parametrize("mutant", right.MUTANTS, ids=lambda mutant: mutant.name)
def test_wrong_answers_are_told_from_right_ones(mutant: right.Mutant) -> None:
    cases = [parse(case) for case in ask.REGRESSIONS]
    cases += [
        ExpandCase(requests=33, width=3, block_size=128, lengths="edges", table="row_gaps", graphs=False),
        ExpandCase(requests=7, width=9, block_size=48, ids="high", table="transposed", tail="clamped"),
        ExpandCase(requests=2, width=40, block_size=128, lengths="lonely"),
    ]
    for case in cases:
        inputs = ask.build(case)  # type: ignore[arg-type]
        answer = mutant.answer(inputs)
        if answer is not None and not passes(inputs, answer):
            return
    pytest.fail("no case tells it from the right answer")


def test_an_older_kernel_is_not_asked_to_clamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "vllm/v1/attention/backends/mla/rocm_aiter_mla.py"
    for directory in (module.parent, tmp_path / "vllm/triton_utils"):
        directory.mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").touch()
    module.write_text("def _expand_page_indices_kernel(page_indices, block_table, KERNEL_BLOCK_SIZE):\n    pass\n")
    monkeypatch.setattr(sources, "_vllm", tmp_path)
    assert VLLM.unsupported(ExpandCase(), "interpreter") == []
    reasons = VLLM.unsupported(ExpandCase(tail="clamped"), "interpreter")
    assert reasons == ["tail=clamped: the kernel of this vLLM does not clamp"]
    assert routes.kernel_arguments() == ("page_indices", "block_table", "KERNEL_BLOCK_SIZE")


needs_vllm = pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")


@pytest.mark.vllm
@needs_vllm
def test_vllm_gives_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    for case in (ExpandCase(table="transposed"), ExpandCase(tail="clamped", lengths="full", table="column_gaps")):
        assert passes(ask.build(case), VLLM.run(ask.build(case)))


@pytest.mark.vllm
@needs_vllm
def test_in_vllm_a_slot_beyond_int32_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    outputs = VLLM.run(two_requests(block_table=int32([[2**30, 0, 0], [20, 21, 22]])))
    assert outputs.indices.tolist()[:2] == [-(2**31), -(2**31) + 1]
