"""Is the padding of query heads judged rightly, and do our own routes send and take the heads worked out by hand?"""

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from cases import memory
from cases.case import parse
from cases.dense_mla import pad_heads as ask
from cases.dense_mla.pad_heads import Inputs, Outputs, PadCase, Target
from cases.precision import Precision
from impl.dense_mla import pad_heads as routes
from impl.dense_mla.pad_heads import IMPLS
from impl.dense_mla.pad_heads_triton import pad
from impl.sources import settings as sources
from oracle.dense_mla import pad_heads as right

OURS, VLLM, TORCH = IMPLS
RUNS = pytest.mark.parametrize("run", [right.reference, OURS.run, TORCH.run], ids=["reference", OURS.name, TORCH.name])


def numbered(heads: int, kernel_heads: int, target: Target = "decode") -> Inputs:
    """One row whose heads hold their numbers, and a kernel's answer whose heads do."""
    return Inputs(
        query=torch.arange(heads, dtype=torch.bfloat16).reshape(1, heads, 1).expand(1, heads, 2).contiguous(),
        kernel_out=torch.arange(kernel_heads, dtype=torch.bfloat16).reshape(1, kernel_heads, 1),
        kernel_lse=torch.arange(kernel_heads, dtype=torch.float32).reshape(1, kernel_heads),
        kernel_heads=kernel_heads,
        target=target,
    )


def passes(inputs: Inputs, outputs: Outputs) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, Precision()))


@RUNS
@pytest.mark.parametrize(
    ("heads", "kernel_heads", "sent", "taken"),
    [
        (12, 16, [*range(12), 0, 1, 2, 3], list(range(12))),
        (8, 16, [j // 2 for j in range(16)], list(range(0, 16, 2))),
        (1, 16, [0] * 16, [0]),
        (96, 128, [*range(96), *range(32)], list(range(96))),
        (16, 16, list(range(16)), list(range(16))),
        (64, 128, [j // 2 for j in range(128)], list(range(0, 128, 2))),
        (3, 8, [0, 1, 2, 0, 1, 2, 0, 1], [0, 1, 2]),
    ],
    ids=str,
)
def test_hand_worked_heads(run: object, heads: int, kernel_heads: int, sent: list[int], taken: list[int]) -> None:
    outputs = run(numbered(heads, kernel_heads))  # type: ignore[operator]
    assert outputs.padded[0, :, 1].tolist() == sent
    assert outputs.out.flatten().tolist() == taken
    assert outputs.lse.flatten().tolist() == taken
    assert outputs.forms.tolist() == [1, int(heads == kernel_heads), 1, 1]


@pytest.mark.parametrize("heads", range(1, 129))
def test_every_head_comes_back_from_every_target(heads: int) -> None:
    targets = {ask.kernel_heads(target, heads) for target in ("decode", "round_robin", "double", "odd")}
    for many in targets | {128}:
        sent = right.sources(heads, many)
        assert len(sent) == many and sent.count(heads - 1) >= 1
        assert [sent[place] for place in right.real_heads(heads, many)] == list(range(heads))
        query = torch.arange(heads, dtype=torch.float32).reshape(1, heads, 1)
        assert routes.real_heads(torch.tensor(sent).reshape(1, many), heads).flatten().tolist() == list(range(heads))
        if heads in (1, 8, 12, 24, 127):
            assert pad(query, many).flatten().tolist() == sent


def test_only_four_numbers_of_heads_are_interleaved_for_kernels() -> None:
    for target in ("decode", "round_robin", "prefill"):
        padded = [n for n in range(1, 129) if ask.kernel_heads(target, n) != n]  # type: ignore[arg-type]
        interleaved = [n for n in padded if ask.kernel_heads(target, n) % n == 0]  # type: ignore[arg-type]
        assert interleaved == [1, 2, 4, 8]


def test_malformed_calls_are_named() -> None:
    with pytest.raises(ValueError, match="kernel_heads=8: should be at least 12"):
        right.reference(numbered(12, 8))
    with pytest.raises(ValueError, match="kernel_out=16 heads: should be 32, the kernel's"):
        right.reference(dataclasses.replace(numbered(12, 16), kernel_heads=32))
    inputs = numbered(12, 16)
    short = dataclasses.replace(inputs, kernel_lse=inputs.kernel_lse[:, :12])  # type: ignore[index]
    with pytest.raises(ValueError, match="kernel_lse=12 heads: should be 16"):
        right.reference(short)


def test_padding_heads_are_free_only_in_room_that_rows_reserve() -> None:
    reserved = ask.build(PadCase(layout="reserved"))
    outputs = right.reference(reserved)
    outputs.padded[:, 12:] = 7
    assert passes(reserved, outputs)
    outputs.padded[:, 11] = 7
    assert not passes(reserved, outputs)
    for case in (PadCase(layout="row_gaps"), PadCase(layout="reserved", heads=8)):
        inputs = ask.build(case)
        outputs = right.reference(inputs)
        outputs.padded[:, 15] = 7
        assert not passes(inputs, outputs), case.id


def test_forms_count_where_they_matter() -> None:
    for case, counted in (
        (PadCase(), [True, False, True, True]),
        (PadCase(heads=16), [False, True, True, True]),
        (PadCase(target="prefill", dtype="float8_e4m3fn"), [True, False, False, False]),
    ):
        inputs = ask.build(case)
        for place in range(4):
            outputs = right.reference(inputs)
            outputs.forms[place] = 1 - outputs.forms[place]
            assert passes(inputs, outputs) is not counted[place], (case.id, place)


def test_real_heads_are_views() -> None:
    for heads in (2, 12, 16):
        inputs = numbered(heads, 16)
        for impl in (OURS, TORCH):
            outputs = impl.run(inputs)
            outputs.out[0, heads - 1] = 99
            outputs.lse[0, heads - 1] = 99
            assert 99 in inputs.kernel_out and 99 in inputs.kernel_lse  # type: ignore[operator]


def test_not_a_number_keeps_its_code() -> None:
    inputs = ask.build(PadCase(rows=33, dtype="float8_e4m3fnuz"))
    codes = inputs.query.view(torch.uint8)
    assert {0x80, 0x7F, 0xFF} <= set(codes.flatten().tolist())
    assert torch.equal(OURS.run(inputs).padded.view(torch.uint8)[:, :12], codes)


@pytest.mark.parametrize("case", ask.REGRESSIONS)
def test_our_routes_are_right(case: str) -> None:
    inputs = ask.build(parse(case))  # type: ignore[arg-type]
    for impl in (OURS, TORCH):
        assert passes(inputs, impl.run(memory.on_device(inputs, "cpu")))


@pytest.mark.parametrize("mutant", right.MUTANTS, ids=lambda mutant: mutant.name)
def test_wrong_heads_are_told_from_right_ones(mutant: right.Mutant) -> None:
    for case in [PadCase(heads=16), *map(parse, ask.REGRESSIONS[:8])]:
        inputs = ask.build(case)  # type: ignore[arg-type]
        answer = mutant.answer(inputs)
        if answer is not None and not passes(inputs, answer):
            return
    pytest.fail("no case tells it from the right answer")


needs_vllm = pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree")


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize("heads", [1, 2, 8, 12, 16, 24, 96])
def test_vllm_takes_the_real_heads_of_decode_and_prefill(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    for case in (
        PadCase(heads=heads),
        PadCase(heads=heads, layout="reserved"),
        PadCase(heads=heads, target="prefill", dtype="float8_e4m3fn"),
    ):
        inputs = ask.build(case)
        assert passes(inputs, VLLM.run(memory.on_device(inputs, "cpu"))), case.id


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize(("heads", "wrong"), [(1, False), (2, True), (4, True), (8, True), (12, False), (96, False)])
def test_in_vllm_the_round_robin_route_takes_the_first_heads(
    heads: int, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    outputs = VLLM.run(numbered(heads, ask.kernel_heads("round_robin", heads), "round_robin"))
    assert outputs.out.flatten().tolist() == outputs.lse.flatten().tolist() == list(range(heads))
    assert passes(numbered(heads, ask.kernel_heads("round_robin", heads), "round_robin"), outputs) is not wrong


@pytest.mark.vllm
@needs_vllm
def test_in_vllm_reserved_rows_with_gaps_between_heads_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", Path(os.environ["MLA_ORACLE_VLLM"]))
    inputs = ask.build(PadCase(layout="wide_reserved"))
    outputs = VLLM.run(inputs)
    assert outputs.padded.stride() == (16 * 96, 96, 1)
    assert not passes(inputs, outputs)


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_vllm", tmp_path)
    reasons = VLLM.unsupported(PadCase(target="double"), "interpreter")
    assert "is not a vLLM tree" in reasons[0]
    assert reasons[1] == "target=double: vLLM takes real heads of its own kernels only"
