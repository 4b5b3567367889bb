"""Is what executions answer differently found, and nothing else, and does the command sweep every way it is asked for?"""

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from rich.console import Console

from impl.executions.isa.triton_launch import OPTIONS
from oracle.check import Check, Status
from reports import command, differ
from reports.differ import Way, compare, ways
from reports.environment import environment
from reports.plan import Plan
from reports.record import Environment, Record
from reports.store import Settings, Task, create_run, read_run

HERE = Environment(machine="m", python="3", torch="2", triton="3", numpy="2", device="cpu")
EXACT = Check(output="out", measure="exact", use=0.0, count=4)
BOUNDED = Check(output="out", measure="bounded", use=0.5, count=4, error=1.0, budget=2.0)
BROKEN = Check(
    output="out", measure="exact", use=1e9, wrong=1, count=4, where=(3,), got="9", want="8", why="it is exact"
)
FOUR = "standin.double:rows=4,sign=plus,wide=no,seed=0"


def _record(status: Status = "pass", bits: str = "a" * 64, check: Check = EXACT, **other: Any) -> Record:
    known: dict[str, Any] = {"case": FOUR, "op": "standin.double", "impl": "one", "on": "interpreter", **other}
    checks = (check,) if status in ("pass", "fail") else ()
    return Record(status=status, checks=checks, fingerprint=bits, environment=HERE, **known)


def test_same_bits_agree() -> None:
    found = compare({"x": [_record()], "y": [_record()]})
    assert (found.compared, found.findings) == (1, ())
    assert [(pair.first, pair.second, pair.compared, pair.identical) for pair in found.agreements] == [("x", "y", 1, 1)]


def test_other_verdict_is_found_with_its_reason() -> None:
    found = compare({"x": [_record()], "y": [_record("fail", "b" * 64, BROKEN)], "z": [_record()]})
    assert [finding.kind for finding in found.findings] == ["verdict"]
    assert found.findings[0].sentence == "x, z pass; y: fail: out[3]=9, but should be 8: it is exact"
    assert found.findings[0].answers == {"x": "pass aaaaaaaa", "y": "fail bbbbbbbb", "z": "pass aaaaaaaa"}
    found = compare({"x": [_record("fail", check=BROKEN)], "y": [_record("fail", check=BROKEN)], "z": [_record()]})
    assert found.findings[0].sentence.startswith("z pass; x, y: fail: out[3]=9")
    found = compare({"x": [_record("memory", "", reasons=("a load outside",))], "y": [_record()]})
    assert found.findings[0].sentence == "y pass; x: memory: a load outside"


def test_other_bits_are_found_where_no_budget_is() -> None:
    found = compare({"x": [_record()], "y": [_record(bits="b" * 64)], "z": [_record()]})
    assert [(finding.kind, finding.sentence) for finding in found.findings] == [
        ("bits", "other bits where none may differ: x, z | y")
    ]
    within = compare({"x": [_record(check=BOUNDED)], "y": [_record(bits="b" * 64, check=BOUNDED)]})
    assert within.findings == () and within.agreements[0].identical == 0


@pytest.mark.parametrize("other", [_record("unsupported", ""), _record(law="moved", bits="b" * 64)])
def test_what_no_other_way_judged_is_not_compared(other: Record) -> None:
    found = compare({"x": [_record()], "y": [other]})
    assert (found.compared, found.findings, found.agreements) == (0, (), ())


def test_two_failures_agree() -> None:
    found = compare({"x": [_record("fail", check=BROKEN)], "y": [_record("fail", check=BROKEN)]})
    assert (found.compared, found.findings) == (1, ())


def test_ways_are_every_combination_of_machine_code_alone() -> None:
    found = ways(("interpreter", "isa:gfx950"), (1, 4), (2,))
    assert [way.name for way in found] == [
        "interpreter", "isa:gfx950", "isa:gfx950 num_warps=1,num_stages=2", "isa:gfx950 num_warps=4,num_stages=2",
    ]  # fmt: skip
    assert [way.stem for way in found][2] == "isa.gfx950-num_warps1-num_stages2"
    assert [way.options for way in ways(("isa:gfx942",), (8,), ())] == ["", "num_warps=8"]


def test_records_tell_the_launch_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTIONS, "num_warps=2")
    assert environment("isa:gfx950").driver == "machine code executed on the processor, launched with num_warps=2"
    assert "num_warps" not in environment("interpreter").driver
    monkeypatch.setenv(OPTIONS, "num_ctas=2")
    with pytest.raises(ValueError, match="should be num_warps or num_stages"):
        environment("isa:gfx950")


def test_sweep_of_a_way_starts_with_its_options_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(differ, "sweep", lambda path, console: seen.append(os.environ.get(OPTIONS)))
    monkeypatch.setenv(OPTIONS, "num_warps=8")
    plan = Plan((), ())
    console = Console()
    differ.ask(Way(on="isa:gfx950", warps=2), tmp_path / "a", plan, Settings(), console)
    differ.ask(Way(on="isa:gfx950"), tmp_path / "b", plan, Settings(), console)
    assert seen == ["num_warps=2", None]
    assert os.environ[OPTIONS] == "num_warps=8"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--on interpreter", "only interpreter: two ways are needed"),
        ("--on interpreter --warps 2", "--warps, --stages: are for machine code"),
        ("--on isa:gfx950 --warps 3", "--warps 3: should be some of 1, 2, 4, 8, 16"),
        ("--on isa:gfx950 --stages x", "--stages x: should be some of 1, 2"),
        ("--on interpreter --against nowhere", "nowhere: no such run directory"),
        ("--on interpreter --against kept --json kept/run.json", "--json kept/run.json: should name a new file"),
        ("--on interpreter --against kept --out kept", "kept: already holds a run"),
        ("--against kept --against also", "--op, --impl, --case: say what is asked, and without --on nothing is"),
        ("--against kept --against also --warps 2", "--warps, --stages: are for machine code"),
    ],
)
def test_misuse_is_one_sentence(
    arguments: str, sentence: str, standins: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in ("kept", "also"):
        create_run(tmp_path / name, Settings(), [Task(case=FOUR, impl="standin-right", on="interpreter", item="x")])
    assert command.main(["differ", "--op", "standin.double", *arguments.split()]) == 2
    said = capsys.readouterr()
    assert sentence in said.err and said.err.count("\n") == 1


def test_command_holds_its_sweep_against_another_run(
    standins: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    chosen = ["--op", "standin.double", "--impl", "standin-right", "--on", "interpreter", "--workers", "1"]
    assert command.main(["sweep", *chosen, "--cases", "smoke", "--out", "other"]) == 0
    line = ["differ", *chosen, "--against", "other"]
    assert command.main([*line, "--out", "same", "--json", "same.json"]) == 0
    asked = len(read_run(tmp_path / "same" / "interpreter").records)
    told = msgspec.json.decode((tmp_path / "same.json").read_bytes())
    assert told["compared"] == asked > 0 and told["findings"] == []
    assert [(pair["compared"], pair["identical"]) for pair in told["agreements"]] == [(asked, asked)]
    # Another answer in the other run.
    file = next((tmp_path / "other" / "records").glob("*.jsonl"))
    text = file.read_text()
    bits = next(iter(read_run(tmp_path / "other").records.values())).fingerprint
    file.write_text(text.replace(bits, "0" * 64))
    capsys.readouterr()
    assert command.main([*line, "--out", "apart"]) == 1
    assert "other bits where none may differ: interpreter | other: interpreter" in capsys.readouterr().out
    # Both are there: nothing is asked anew.
    before = sorted(tmp_path.rglob("*"))
    assert command.main(["differ", "--against", "other", "--against", "same/interpreter"]) == 1
    assert sorted(tmp_path.rglob("*")) == before
    assert f"{asked} questions answered in at least two of 2 ways: 1 finding" in capsys.readouterr().out
