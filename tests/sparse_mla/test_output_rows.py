"""Is every attention row turned exactly once, whichever way it took?"""

import dataclasses
import math
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from cases import memory
from cases.covering import sweep_cases
from cases.precision import Precision
from cases.sparse_mla import output_rows as ask
from cases.sparse_mla.output_rows import LANES, Arch, Decode, Inputs, OutputCase, Outputs
from impl.executions import memory_watch
from impl.implementation import Impl
from impl.sources import settings
from impl.sparse_mla.output_rows import IMPLS
from oracle import mxfp8
from oracle.formats import numbers
from oracle.sparse_mla import output_rows as right
from reports.laws import break_of

OURS, VLLM, VLLM_V4, TORCH = IMPLS
FP32 = Precision(flushes=False)
NOPE = 448


SWEEP = [case for case in sweep_cases(ask.CASE.op, "default") if isinstance(case, OutputCase)]


def passes(inputs: Inputs, outputs: Outputs, precision: Precision = FP32) -> bool:
    return all(check.passed for check in right.judge(inputs, outputs, precision))


# Position p turns every pair by p quarters, whose cosine and sine are whole numbers.
QUARTERS = torch.tensor([[[1, 0, -1, 0][p]] * 32 + [[0, 1, 0, -1][p]] * 32 for p in range(4)], dtype=torch.float32)


def quarter_back(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows whose last 64 lanes are turned back by their position's quarters, one quarter after the other."""
    out = rows.clone()
    for number, quarters in enumerate(positions.tolist()):
        for _ in range(quarters):
            even, odd = out[number, :, NOPE::2].clone(), out[number, :, NOPE + 1 :: 2].clone()
            out[number, :, NOPE::2], out[number, :, NOPE + 1 :: 2] = odd, -even
    return out


def plain_rows(tokens: int, heads: int = 1) -> torch.Tensor:
    """Rows whose lanes all hold the row's number from 1 on, but 0 in the odd lane of each pair that turns."""
    rows = torch.arange(1.0, tokens + 1)[:, None, None].expand(tokens, heads, LANES).clone()
    rows[..., NOPE + 1 :: 2] = 0
    return rows


def batch(
    decode_tokens: int, prefill_tokens: int, decode: Decode = "fused", *, quantised: bool = False,
    turns_later: bool = False, window_only: bool = False, heads: int = 1,
) -> Inputs:  # fmt: skip
    """A batch of recognisable rows after attention; row t stands at position t % 3 + 1."""
    tokens = decode_tokens + prefill_tokens
    positions = torch.arange(tokens) % 3 + 1
    rows, fused = plain_rows(tokens, heads), decode == "fused"
    codes = scales = None
    once = quarter_back(rows, positions)
    if fused:
        rows[:decode_tokens] = once[:decode_tokens]
    if quantised:
        codes = torch.full((tokens, heads * LANES), float("nan")).to(torch.float8_e4m3fn)
        scales = torch.full((tokens, heads * 16), 255, dtype=torch.uint8)
        if fused:
            front, front_scales = mxfp8.quantise(once[:decode_tokens])
            codes[:decode_tokens] = front.flatten(1).view(torch.float8_e4m3fn)
            scales[:decode_tokens] = front_scales.flatten(1)
            rows[:decode_tokens] = float("nan")
    arch: Arch = "other" if decode == "unsplit" else "gfx950"
    return Inputs(
        rows.to(torch.bfloat16), codes, scales, positions, QUARTERS, heads, decode_tokens, decode, window_only,
        turns_later, False, arch,
    )  # fmt: skip


def projected(inputs: Inputs, outputs: Outputs) -> torch.Tensor:
    """The rows that enter the output projection, float32, after a projection that turns rows has turned them."""
    if outputs.codes is not None and outputs.scales is not None:
        number = numbers.decode(outputs.codes.view(torch.uint8), "float8_e4m3fn").unflatten(1, (-1, 32))
        rows = torch.ldexp(number, outputs.scales.float()[..., None] - 127).flatten(1).unflatten(1, (-1, LANES))
    else:
        assert outputs.rows is not None
        rows = outputs.rows.float()
    return quarter_back(rows, inputs.positions) if inputs.turns_later else rows


RUNS = [pytest.param(right.reference, id="reference")]
RUNS += [pytest.param(impl.run, id=impl.name) for impl in (OURS, TORCH)]
Subject = Callable[[Inputs], Outputs]


@pytest.mark.parametrize("run", RUNS)
def test_hand_worked_rows(run: Subject) -> None:
    # Decode row 0 came turned by one quarter, (1, 0) having become (0, -1). Row 1 owes two, row 2 three quarters.
    out = run(batch(1, 2))
    assert out.rows is not None
    assert out.rows[:, 0, [0, 447, 448, 449, 510, 511]].tolist() == [
        [1, 1, 0, -1, 0, -1], [2, 2, -2, 0, -2, 0], [3, 3, 0, 3, 0, 3],
    ]  # fmt: skip
    assert out.turned.tolist() == [2]


@pytest.mark.parametrize("run", RUNS)
def test_hand_worked_codes(run: Subject) -> None:
    # The largest of row 1 is 2 = 256 * 2^-7, so byte 120 and code 0x78; -2 is 0xF8. Of row 0 it is 1, one byte less.
    out = run(batch(1, 1, quantised=True))
    assert out.codes is not None and out.scales is not None
    assert out.scales.tolist() == [[119] * 16, [120] * 16]
    stored = out.codes.view(torch.uint8)
    # Whichever sign a turned zero has: 00 or 80.
    assert [f"{code:02X}" for code in stored[1, [0, 447, 448]].tolist()] == ["78", "78", "F8"]
    assert stored[1, 449].item() in (0x00, 0x80)
    assert [f"{code:02X}" for code in stored[0, [0, 447, 449]].tolist()] == ["78", "78", "F8"]
    assert stored[0, 448].item() in (0x00, 0x80)
    assert out.turned.tolist() == [1]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("inputs", "turned"),
    [
        (batch(2, 3), 3),
        (batch(2, 3, "unsplit"), 5),
        (batch(2, 3, "plain"), 5),
        (batch(2, 3, "in_place"), 5),
        (batch(2, 3, "plain", turns_later=True), 0),
        (batch(2, 0), 0),
        (batch(0, 3), 3),
        (batch(0, 0), 0),
        (batch(2, 3, quantised=True), 3),
        (batch(2, 3, "in_place", quantised=True), 5),
        (batch(2, 0, quantised=True, window_only=True), 0),
    ],
)
def test_what_is_owed_depends_on_the_route(run: Subject, inputs: Inputs, turned: int) -> None:
    used = memory.on_device(inputs, "cpu")
    out = run(used)
    assert out.turned.tolist() == [turned]
    once = quarter_back(plain_rows(inputs.rows.shape[0]), inputs.positions)
    assert torch.equal(projected(inputs, out), once)


@pytest.mark.parametrize("run", RUNS)
def test_a_warm_up_leaves_zeros(run: Subject) -> None:
    for quantised in (False, True):
        inputs = dataclasses.replace(batch(2, 3, "in_place", quantised=quantised), warm_up=True)
        inputs.rows.fill_(float("nan"))
        out = run(inputs)
        assert out.turned.tolist() == [0]
        assert [bool((tensor.view(torch.uint8) == 0).all()) for _, tensor in memory.named_tensors(out)] == [True] * (
            3 if quantised else 2
        )


class OutputMachine(RuleBasedStateMachine):
    """A layer that serves one batch after the other; each of their rows must have been turned exactly once."""

    make: Callable[[], Subject] = staticmethod(lambda: right.reference)

    def __init__(self) -> None:
        super().__init__()
        self.subject = type(self).make()

    @rule(
        decode_tokens=st.integers(0, 3),
        prefill_tokens=st.integers(0, 3),
        decode=st.sampled_from(["fused", "unsplit", "plain", "in_place"]),
        quantised=st.booleans(),
        window_only=st.booleans(),
        turns_later=st.booleans(),
    )
    def serve(
        self, decode_tokens: int, prefill_tokens: int, decode: Decode, quantised: bool, window_only: bool,
        turns_later: bool,
    ) -> None:  # fmt: skip
        quantised = quantised and decode in ("fused", "in_place")
        turns_later = turns_later and decode in ("plain", "in_place") and not quantised
        inputs = batch(
            decode_tokens, prefill_tokens, decode, quantised=quantised, window_only=window_only, turns_later=turns_later
        )
        got = projected(inputs, self.subject(inputs))
        once = quarter_back(plain_rows(decode_tokens + prefill_tokens), inputs.positions)
        wrong = [number for number in range(len(once)) if not torch.equal(got[number], once[number])]
        assert not wrong, f"rows {wrong} were not turned exactly once"


def serve_batches(make: Callable[[], Subject]) -> None:
    """Runs the machine on a subject, which may remember earlier batches."""
    machine = type("Machine", (OutputMachine,), {"make": staticmethod(make)})
    run_state_machine_as_test(
        machine,
        settings=hypothesis_settings(
            max_examples=15, stateful_step_count=8, deadline=None, database=None, phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck), derandomize=True,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
def test_every_row_of_every_batch_is_turned_once(run: Subject) -> None:
    serve_batches(lambda: run)


def settled_from(start: Callable[[Inputs], int]) -> Subject:
    """A layer that turns the rows from `start` on."""
    return lambda inputs: right._settled(inputs, start=min(start(inputs), inputs.rows.shape[0]))


def frozen() -> Subject:
    """A layer compiled for its first batch: it keeps that batch's number of turned rows."""
    seen: list[int] = []

    def start(inputs: Inputs) -> int:
        seen.append(right.first_owed(inputs))
        return seen[0]

    return settled_from(start)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: settled_from(lambda inputs: 0), id="turned twice"),
        pytest.param(lambda: settled_from(lambda inputs: right.first_owed(inputs) + 1), id="a row missed"),
        pytest.param(lambda: settled_from(lambda inputs: inputs.decode_tokens), id="decode believed"),
        pytest.param(frozen, id="frozen"),
        pytest.param(
            lambda: lambda inputs: right.reference(dataclasses.replace(inputs, turns_later=False)), id="turned here too"
        ),
    ],
)
def test_the_machine_sees_a_row_turned_twice_or_never(make: Callable[[], Subject]) -> None:
    with pytest.raises(AssertionError, match="were not turned exactly once"):
        serve_batches(make)


def test_a_frozen_number_is_right_for_the_batch_it_was_taken_from() -> None:
    inputs = batch(2, 3)
    assert torch.equal(projected(inputs, frozen()(inputs)), quarter_back(plain_rows(5), inputs.positions))


def scalar_rows(inputs: Inputs) -> list[list[list[float]]]:
    """All rows by Python floats, each lane rounded to bfloat16 from float64."""

    def narrow(value: float) -> float:
        # Through float32 patterns; the products of these values leave no double rounding undetected by the caller.
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        return float(struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))[0])

    rows = [[head.tolist() for head in row] for row in inputs.rows.float()]
    fused = inputs.decode == "fused"
    for token in range(inputs.decode_tokens * fused, 0 if inputs.turns_later else len(rows)):
        table = inputs.cos_sin[int(inputs.positions[token])].tolist()
        for head in range(inputs.heads):
            lanes = rows[token][head]
            for pair in range(32):
                a, b = lanes[448 + 2 * pair], lanes[449 + 2 * pair]
                lanes[448 + 2 * pair] = narrow(a * table[pair] + b * table[32 + pair])
                lanes[449 + 2 * pair] = narrow(b * table[pair] - a * table[32 + pair])
    return rows


@pytest.mark.parametrize(
    "case", [case for case in SWEEP if case.output == "bfloat16" and not case.warm_up][:10], ids=str
)
def test_the_reference_agrees_with_scalar_arithmetic(case: OutputCase) -> None:
    inputs = ask.build(case)
    out = right.reference(inputs, torch.float64).rows
    assert out is not None
    want = torch.tensor(scalar_rows(inputs)).reshape(out.shape)
    # Python's way to bfloat16 rounds twice, so a lane in 2^16 may lie one bfloat16 step away.
    differs = out.float() != want
    assert int(differs.sum()) <= 2
    assert bool((out.float() - want).abs().le(want.abs() * 2.0**-7).all())


@pytest.mark.parametrize("case", [case for case in SWEEP if case.output == "mxfp8" and not case.warm_up], ids=str)
def test_codes_lie_as_near_to_the_turned_row_as_mxfp8_allows(case: OutputCase) -> None:
    inputs = ask.build(case)
    out = right.reference(inputs, torch.float64)
    start = right.first_owed(inputs)
    assert out.codes is not None and out.scales is not None and out.codes.shape[0] == inputs.rows.shape[0]
    for token in range(start, inputs.rows.shape[0]):
        table = inputs.cos_sin[int(inputs.positions[token])].tolist()
        for head in range(inputs.heads):
            lanes = inputs.rows[token, head].double().tolist()
            for pair in range(32):
                a, b = lanes[448 + 2 * pair], lanes[449 + 2 * pair]
                lanes[448 + 2 * pair] = a * table[pair] + b * table[32 + pair]
                lanes[449 + 2 * pair] = b * table[pair] - a * table[32 + pair]
            for block in range(16):
                byte = int(out.scales[token, head * 16 + block])
                largest = max(map(abs, lanes[32 * block : 32 * block + 32]))
                assert largest <= 448 * 2.0 ** (byte - 127) and (byte == 0 or largest > 448 * 2.0 ** (byte - 128))
                place = head * 512 + 32 * block
                stored = numbers.decode(out.codes[token, place : place + 32].view(torch.uint8), "float8_e4m3fn")
                for lane, code in zip(lanes[32 * block : 32 * block + 32], stored.tolist(), strict=True):
                    value = code * 2.0 ** (byte - 127)
                    assert math.isclose(value, lane, rel_tol=2.0**-4, abs_tol=2.0 ** (byte - 127 - 10))


@pytest.mark.parametrize("case", SWEEP, ids=str)
def test_the_reference_passes_at_either_width(case: OutputCase) -> None:
    inputs = ask.build(case)
    assert passes(inputs, right.reference(inputs))
    assert passes(inputs, right.reference(inputs, torch.float64), Precision(accumulate="exact", flushes=False))


@pytest.mark.parametrize("mutant", right.MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_caught_by_what_it_leaves(mutant: right.Mutant) -> None:
    def caught(case: OutputCase) -> bool:
        inputs = ask.build(case)
        answer = mutant.answer(inputs)
        if answer is None:
            return False
        if mutant.name != "turned-rows-counted-wrongly":
            answer = dataclasses.replace(answer, turned=right.reference(inputs).turned)
        return not passes(inputs, answer)

    assert any(caught(case) for case in SWEEP)


@pytest.mark.parametrize(
    ("law", "mutant"),
    [
        ("S1", "in-place-decode-reported-turned"), ("S2", "window-layers-left"), ("S3", "fused-decode-turned-again"),
        ("S4", "scales-block-by-block"),
    ],
)  # fmt: skip
def test_a_law_is_broken_by_its_fault(law: str, mutant: str) -> None:
    rule_ = next(one for one in right.LAWS if one.name.startswith(law))
    answer = next(wrong for wrong in right.MUTANTS if wrong.name == mutant).answer

    def broken(case: OutputCase) -> bool:
        inputs = ask.build(case)
        first = answer(inputs)
        if first is None:
            return False
        checks = break_of(
            rule_, inputs, first, lambda edited: answer(edited) or right.reference(edited), right.judge, FP32
        )
        return checks is not None and not all(check.passed for check in checks)

    assert any(broken(case) for case in SWEEP)


def test_doubled_rows_break_their_law_where_lanes_saturate() -> None:
    def saturating(inputs: Inputs) -> Outputs:
        out = right.reference(inputs)
        assert out.rows is not None
        return dataclasses.replace(out, rows=out.rows.clamp(-2, 2))

    doubled = next(one for one in right.LAWS if one.name.startswith("S5"))
    inputs = ask.build(OutputCase())
    checks = break_of(doubled, inputs, saturating(inputs), saturating, right.judge, FP32)
    assert checks is not None and not all(check.passed for check in checks)


def test_calls_that_make_no_sense_are_refused() -> None:
    inputs = batch(2, 3)
    quantised = batch(2, 3, quantised=True)
    for call, sentence in (
        (dataclasses.replace(inputs, decode_tokens=6), r"decode_tokens=6: should be 0 to 5"),
        (dataclasses.replace(inputs, heads=2), r"heads=2: should be 1 to 1"),
        (dataclasses.replace(inputs, positions=inputs.positions[:2]), r"positions have shape \[2\]: should have \[5\]"),
        (dataclasses.replace(quantised, scales=None), r"codes without scales"),
        (dataclasses.replace(quantised, arch="gfx942"), r"arch=gfx942: should be gfx950 for an MXFP8 output"),
        (dataclasses.replace(quantised, decode="plain"), r"an MXFP8 output: should have rows that decode or this step"),
    ):
        with pytest.raises(ValueError, match=sentence):
            right.reference(call)


def test_a_missing_output_is_a_failure() -> None:
    inputs = batch(1, 1)
    nothing = dataclasses.replace(right.reference(inputs), rows=None)
    assert "rows=nothing, but should be bfloat16[2, 1, 512]" in [
        str(check).split(":")[0] for check in right.judge(inputs, nothing, FP32)
    ]


def test_vllm_says_why_it_cannot_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_vllm", tmp_path / "nowhere")
    assert "does not exist" in VLLM.unsupported(OutputCase(), "interpreter")[0]
    later = OutputCase(decode="plain", turns_later=True)
    assert [text.split(":")[0] for text in VLLM.unsupported(later, "interpreter")[1:]] == [
        "decode=plain", "turns_later=yes",
    ]  # fmt: skip
    assert "output=mxfp8" in VLLM_V4.unsupported(OutputCase(output="mxfp8"), "interpreter")[1]


@pytest.mark.vllm
@pytest.mark.parametrize("impl", [VLLM, VLLM_V4], ids=lambda impl: impl.name)
def test_vllm_turns_every_row_once_but_those_of_the_route_without_splits(
    impl: Impl, verdict: Callable[..., tuple[str, list[str]]]
) -> None:
    asked = [case for case in SWEEP[::2] if case.reach != "far" and not impl.unsupported(case, "interpreter")]
    assert len(asked) > 8
    for case in asked:
        believed = case.decode == "unsplit" and case.decode_tokens > 0 and not case.warm_up
        assert verdict(case, impl)[0] == ("fail" if believed else "pass"), case.id


@pytest.mark.vllm
def test_vllm_multiplies_row_and_stride_in_32_bits() -> None:
    for output in ("bfloat16", "mxfp8"):
        case = OutputCase(output=output, decode_tokens=0, prefill_tokens=3, reach="far")  # type: ignore[arg-type]
        used = memory.on_device(ask.build(case), "cpu")
        with pytest.raises(Exception, match=r"out-of-bounds .* bytes before the start") as raised, memory_watch.watch():
            VLLM.run(used)
        found = (raised.value, raised.value.__cause__)
        assert any(isinstance(error, memory_watch.MemoryViolation) for error in found)
