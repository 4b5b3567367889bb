"""Are the same edits drawn for a seed, is what becomes of them counted rightly, and is a wrong kernel caught?"""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from cases.case import impossible, parse
from cases.covering import Level, sweep_cases
from impl.executions.isa import machine, miscompile, triton_launch
from impl.executions.isa.assembly import read_lines
from oracle.check import Status
from reports import command, miscompiles
from reports.miscompiles import OUTCOMES, Campaign, Outcome, Seeded, Target, campaign, draw, show
from reports.record import Environment, Record

HERE = Environment(machine="m", python="3", torch="2", triton="3", numpy="2", device="cpu")
LINES = """s_load_dword s4, s[0:1], 0x0
v_sub_u32_e32 v1, v2, v3
s_waitcnt lgkmcnt(0)
s_barrier
v_cmp_lt_i32_e32 vcc, v1, v2
v_cndmask_b32_e32 v1, v2, v3, vcc"""


def _target(op: str = "cache.kv_gather_dequant", key: str = "k", **other: object) -> Target:
    known = Target(op, "ours-triton", "isa:gfx950", key, read_lines("gfx950", LINES), ("case",), 4, 1000)
    return dataclasses.replace(known, **other)  # type: ignore[arg-type]


def _seeded(outcome: Outcome, kind: str = "barrier dropped", by: str = "fail: out is wrong") -> Seeded:
    return Seeded(
        op="formats.cast", impl="ours-triton", on="isa:gfx950", kernel="k", key="0", kind=kind, at=3, line="s_barrier",
        source="cast.py:7", edit="dropped", outcome=outcome, by=by,
    )  # fmt: skip


def _campaign(**counts: int) -> Campaign:
    edits = tuple(_seeded(outcome) for outcome in OUTCOMES for _ in range(counts.get(outcome, 0)))
    return Campaign(seed=0, on=("isa:gfx950",), ops=("formats.cast",), kernels=1, edits=edits)


def test_draw_is_of_the_seed_and_over_all_ops() -> None:
    targets = [_target(), _target("formats.cast", "l"), _target("formats.cast", "m")]
    first, again, other = (draw(targets, 12, random.Random(seed)) for seed in (1, 1, 2))
    assert [(target.key, edit) for target, edit in first] == [(target.key, edit) for target, edit in again]
    assert [edit for _, edit in first] != [edit for _, edit in other]
    assert [target.op for target, _ in first] == ["cache.kv_gather_dequant", "formats.cast"] * 6
    assert len({(target.key, edit.at, edit.kind, edit.words) for target, edit in first}) == 12
    assert all(miscompile.encoded(target.program, edit) is not None for target, edit in first)


def test_only_what_makes_a_difference_counts() -> None:
    found = _campaign(caught=3, dead=1, equivalent=1, missed=1)
    assert found.rate == 3 / 4
    assert (found.count("dead"), found.count("caught", "barrier dropped"), found.count("caught", "wait weakened")) == (
        1,
        3,
        0,
    )


@pytest.mark.parametrize(
    ("caught", "dead", "missed", "holds"), [(95, 0, 5, True), (94, 0, 6, False), (50, 45, 5, True), (0, 0, 0, False)]
)
def test_enough_are_caught_or_explained(caught: int, dead: int, missed: int, holds: bool) -> None:
    assert _campaign(caught=caught, dead=dead, missed=missed).holds is holds


def test_every_missed_edit_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    show(_campaign(caught=1, missed=1), Console(width=200, soft_wrap=True))
    said = capsys.readouterr().out
    assert "formats.cast isa:gfx950 k+3 `s_barrier` (cast.py:7): dropped: fail: out is wrong" in said
    assert "caught 1 of 2 that make a difference (50.0%)" in said


def test_missed_edits_that_no_judge_of_outputs_could_see_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    found = _campaign(caught=1)
    missed = (_seeded("missed", by="its result is used; the outputs' bits are as without it"), _seeded("missed"))
    show(msgspec.structs.replace(found, edits=(*found.edits, *missed)), Console(width=200, soft_wrap=True))
    assert "1 of 2 missed edits leave every bit of every output as it is" in capsys.readouterr().out


def _swapped(target: Target) -> miscompile.Edit:
    return miscompile.edits(target.program, "operands swapped")[0]


def _record(case: str = "c", status: Status = "pass", bits: str = "a") -> Record:
    return Record(case=case, op="o", impl="i", on="x", status=status, environment=HERE, fingerprint=bits * 64)


def test_missed_edit_tells_of_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    target = _target(bits={"case": "a" * 64})
    monkeypatch.setattr(miscompiles, "_explained", lambda *asked: _seeded("missed", by="its result is used"))
    for bits, told in (
        ("a", "the outputs' bits are as without it"),
        ("b", "within budget, other bits in 1 of 1 cases"),
    ):
        monkeypatch.setattr(miscompiles, "_asked_once", lambda case, impl, on, bits=bits: _record(bits=bits))
        assert miscompiles.judge(target, _swapped(target)).by == f"its result is used; {told}"


# What each case answers with the edited code and with the right one.
@pytest.mark.parametrize(
    ("answers", "level", "caught", "further"),
    [
        ({"default": ("fail", "pass"), "nightly": ("fail", "pass")}, "nightly", "default", 1),
        ({"default": ("pass", "pass"), "nightly": ("fail", "pass")}, "nightly", "nightly", 2),
        ({"default": ("pass", "pass"), "nightly": ("fail", "pass")}, "default", "", 1),
        ({"default": ("fail", "pass"), "nightly": ("fail", "pass")}, "smoke", "", 0),
        # Wrong without the edit too.
        ({"default": ("fail", "fail"), "nightly": ("pass", "pass")}, "nightly", "", 2),
    ],
)
def test_what_smoke_misses_is_asked_of_higher_levels(
    answers: dict[str, tuple[Status, Status]], level: Level, caught: str, further: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = _target(bits={"case": "a" * 64})
    answers["case"] = ("pass", "pass")
    monkeypatch.setattr(miscompiles, "_explained", lambda *asked: _seeded("missed", by="its result is used"))
    monkeypatch.setattr(miscompiles, "_launching", lambda target, level: [level])
    monkeypatch.setattr(miscompiles, "_near", lambda target: iter(()))
    monkeypatch.setattr(miscompiles, "_asked_with", lambda edited, target, case, limit: _record(case, answers[case][0]))
    monkeypatch.setattr(miscompiles, "_asked_once", lambda case, impl, on: _record(case, answers[case][1]))
    found = miscompiles.judge(target, _swapped(target), level)
    assert (found.outcome, found.case, found.further) == ("caught" if caught else "missed", caught, further)


def test_a_case_that_runs_long_is_no_endless_one(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0

    def asked(case: str, impl: str, on: str) -> Record:
        monkeypatch.setattr(triton_launch, "executed", triton_launch.executed + steps)
        return _record(case)

    monkeypatch.setattr(miscompiles, "_asked_once", asked)
    steps = 1_000
    assert miscompiles._is_right(_target(), "case")
    steps = 30_000_000
    assert not miscompiles._is_right(_target(), "case"), "four times as many would be called endless"


def test_near_cases_differ_and_launch_the_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    start = sweep_cases("formats.cast", "smoke", 0)[0]
    monkeypatch.setattr(
        miscompiles, "_keys", lambda case, impl, on: frozenset("k" if case.format == start.settings["format"] else "l")
    )
    target = _target("formats.cast", cases=(start.id,))
    found = list(miscompiles._near(target))
    assert len(found) > 20 and len(set(found)) == len(found) and start.id not in found
    assert found == list(miscompiles._near(target)), "drawn of the compilation, so the same ones again"
    chosen = [parse(case) for case in found]
    assert {case.settings["format"] for case in chosen} == {start.settings["format"]}
    assert all(not impossible(case) for case in chosen)
    apart = [sum(a != b for a, b in zip(case.settings.items(), start.settings.items(), strict=True)) for case in chosen]
    assert apart[0] == 1 and max(apart) > 2


def test_further_cases_are_those_that_launch_the_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [case.id for case in sweep_cases("formats.cast", "default", 0)]
    smoke = {case.id for case in sweep_cases("formats.cast", "smoke", 0)}
    chosen = set(asked[::3])
    monkeypatch.setattr(miscompiles, "_keys", lambda case, impl, on: frozenset("k" if case.id in chosen else "l"))
    found = miscompiles._launching(_target("formats.cast"), "default")
    assert found and set(found) == chosen - smoke


def _explained(kind: str, words: str, target: Target) -> tuple[Outcome, str] | None:
    edit = next(edit for edit in miscompile.edits(target.program, kind) if edit.words == words)
    before, after = (
        machine.prepare(each).encoded for each in (target.program, miscompile.applied(target.program, edit))
    )
    return next(iter(miscompiles._static(target, edit, before, after)), None)


def test_arguments_of_all_paths() -> None:
    assert _explained("barrier dropped", "dropped", _target(waves=1)) == ("equivalent", "a workgroup is one wave")
    # No memory is touched behind it.
    assert _explained("barrier dropped", "dropped", _target()) is not None
    ordering = read_lines("gfx950", "ds_write_b32 v1, v2\ns_waitcnt lgkmcnt(0)\ns_barrier\nds_read_b32 v1, v3")
    assert _explained("barrier dropped", "dropped", _target(program=ordering)) is None
    assert _explained("wait weakened", "dropped", _target(program=ordering)) is None
    assert _explained("wait weakened", "dropped", _target()) == (
        "equivalent", "on every path another wait covers what it waited for",
    )  # fmt: skip
    used = read_lines("gfx950", LINES + "\ns_mov_b32 s5, s4")
    assert _explained("wait weakened", "lgkmcnt(0) raised to 1", _target(program=used)) is None
    found = _explained("operands swapped", "sources v2 and v3 swapped", _target())
    assert found is None, "v1 is read by the comparison"


def test_kernel_that_is_wrong_is_caught_and_the_right_one_explained() -> None:
    found = campaign(("cache.kv_gather_dequant",), ("isa:gfx950",), 6, seed=3, workers=1)
    assert found.kernels > 0 and len(found.edits) == 6
    assert found.count("caught") > 0
    for edit in found.edits:
        assert edit.line and edit.by
        assert (edit.outcome == "caught") == bool(
            edit.case and edit.by.partition(":")[0] in ("fail", "memory", "error")
        )


def test_exit_code_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    asked: list[tuple[object, ...]] = []

    def made(ops: Sequence[str], executions: Sequence[str], count: int, **how: object) -> Campaign:
        asked.append((tuple(ops), tuple(executions), count, how["seed"]))
        return _campaign(caught=19, missed=1 if count == 20 else 2)

    monkeypatch.setattr(miscompiles, "campaign", made)
    line = ["prove", "--op", "formats.cast", "--seed", "4"]
    assert command.main([*line, "--miscompiles", "20", "--out", str(tmp_path / "kept.json")]) == 0
    assert command.main([*line, "--miscompiles", "21", "--on", "isa:gfx942"]) == 1
    assert asked == [(("formats.cast",), ("isa:gfx950",), 20, 4), (("formats.cast",), ("isa:gfx942",), 21, 4)]
    assert msgspec.json.decode((tmp_path / "kept.json").read_bytes(), type=Campaign).count("caught") == 19


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--miscompiles -1", "--miscompiles -1: should not be negative"),
        ("--on isa:gfx950", "they should stand with --miscompiles"),
        ("--miscompiles 2 --on interpreter", "--on interpreter: runs no machine code"),
        ("--miscompiles 2 --on moon", "--on moon: should be one of"),
        ("--miscompiles 2 --vllm nowhere", "--vllm nowhere: no such directory"),
    ],
)
def test_misuse_is_one_sentence(
    arguments: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert command.main(["prove", "--op", "formats.cast", *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1
