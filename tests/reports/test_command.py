"""Does the command say in one sentence what was wrong, write nothing then, and else do what it says?"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from oracle.check import Check
from reports import command
from reports.commands import doctor, show
from reports.commands import sweep as sweep_command
from reports.commands.replay import answer_alone
from reports.commands.shared import console_of
from reports.record import LOST, Attempt, Environment, Record, Seconds
from reports.store import RecordFile, Settings, Task, create_run, held, read_run

FOUR = "standin.double:rows=4,sign=plus,wide=no,seed=0"
HERE = Environment(machine="m", python="3", torch="2", triton="3", numpy="2", device="cpu")
BAD = Check(output="out", measure="exact", use=1e9, wrong=1, count=4, where=(3,), got="9", want="8", why="it is exact")


@pytest.fixture(autouse=True)
def _placed(standins: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A run with a failure and a declared reason, and one case left to do."""
    path = tmp_path / "runs" / "kept"
    tasks = [
        Task(case=FOUR, impl=f"standin-{name}", on="interpreter", item=name) for name in ("wrong", "declines", "right")
    ]
    create_run(path, Settings(on=("interpreter",), vllm="/some/vllm"), tasks)
    file = RecordFile(path / "records" / "0001-interpreter-gw0-1.jsonl")
    common: dict[str, Any] = {"op": "standin.double", "on": "interpreter", "environment": HERE, "case": FOUR}
    file.record(
        Record(
            impl="standin-wrong", status="fail", checks=(BAD,), diagnosis=("as if the last row were late",), **common
        )
    )
    file.record(Record(impl="standin-declines", status="unsupported", reasons=("no fours", "no sevens"), **common))
    file.close()
    return path


def files(path: Path) -> dict[Path, bytes]:
    return {found: found.read_bytes() for found in path.rglob("*") if found.is_file()}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("list --op nope", "unknown op 'nope': known ops are "),
        ("list --cases loud", "--cases loud: should be one of smoke, default, nightly"),
        ("sweep --op nope", "unknown op 'nope'"),
        ("sweep --op standin.double --impl nope", "unknown implementation 'nope': standin.double have standin-right"),
        ("sweep --op standin.double --on moon", "--on moon: should be one of interpreter, cuda, hip"),
        ("sweep --op standin.double --on hip", "--on hip: torch "),
        ("sweep --op standin.double --cases loud", "--cases loud: should be one of"),
        ("sweep --op standin.double --case rows=3", "no default case has rows=3"),
        ("sweep --op standin.double --case rows=4|banana", "no default case has rows=banana; there are "),
        ("sweep --op standin.double --case rows", "case pattern: 'rows' is not axis=value"),
        ("sweep --op standin.double --workers -1", "--workers -1: should be 1 or more"),
        ("sweep --op standin.double --workers many", "--workers"),
        ("sweep --op standin.double --deadline 0", "--deadline 0: should be more than 0 seconds"),
        ("sweep --op standin.double --seed -1", "--seed -1: should not be negative"),
        (f"sweep --op standin.double --seed 1{'0' * 18}", "should have 9 digits at most"),
        ("sweep --op standin.double --vllm nowhere", "--vllm nowhere: no such directory; it should be a vLLM checkout"),
        ("sweep --failed nowhere", "nowhere: no such run directory"),
        ("sweep --resume nowhere", "nowhere: no such run directory"),
        ("sweep --resume runs/kept --op standin.double", "the run's own settings hold"),
        ("sweep --op standin.double --out runs/kept", "already holds a run; continue it with --resume runs/kept"),
        ("sweep --op standin.double --out runs", "runs: is not empty; a run needs a directory of its own"),
        ("show nowhere", "nowhere: no such run directory"),
        ("show runs/kept --status good", "--status good: should be one of pass, fail"),
        ("show runs/kept --status crash", "holds no such record; it has 2"),
        (f"show {FOUR.replace('rows=4', 'rows=5')}", "holds no such record"),
        (f"show {FOUR.replace('rows', 'hats')}", "no axis 'hats'"),
        ("replay standin.double:rows=4", "the id lacks sign, wide, seed"),
        ("replay nonsense", "not a case id: 'nonsense'"),
        ("replay lost.safetensors", "lost.safetensors: "),
        (f"replay {FOUR} --impl nope", "unknown implementation 'nope'"),
        (f"replay {FOUR} --on cuda", "--on cuda: torch "),
        (f"replay {FOUR} --save x.safetensors", "--save x.safetensors: needs one --impl and one --on"),
        ("report nowhere", "nowhere: no such run directory"),
        ("sweep --op standin.double --vllm runs/kept/run.json", "--vllm runs/kept/run.json: is a file; unpack it"),
        ("report runs/kept --out runs/kept/run.json", "--out runs/kept/run.json: belongs to the run "),
        ("report runs/kept --out runs", "--out runs: should name a file"),
        ("sweep --resume runs/kept --workers 1", "--resume runs/kept: the run's own settings hold"),
        ("sweep --op standin.double --out runs/kept/run.json/sub", "/runs/kept; a run needs a directory outside"),
        ("sweep --op standin.double --out runs/kept/records/x.jsonl", "/runs/kept; a run needs a directory outside"),
        ("sweep --op standin.double --shard 0/4", "--shard 0/4: should be i/n with i from 1 to n, such as 1/4"),
        ("sweep --op standin.double --shard 5/4", "--shard 5/4: should be i/n"),
        ("sweep --op standin.double --shard a/b", "--shard a/b: should be i/n"),
        ("sweep --op standin.double --shard=", "--shard : should be i/n"),
        (
            "sweep --op standin.double --impl standin-right --case rows=7,sign=plus --shard 1/99",
            "make 1 shards at most",
        ),
        ("sweep --op standin.double --shard 1/2 --balance nowhere", "nowhere: no such run directory"),
        ("sweep --op standin.double --balance runs/kept", "so it should stand with --shard i/n"),
        ("sweep --op standin.double --capsules -1", "--capsules -1: should not be negative"),
        ("sweep --resume runs/kept --shard 1/2", "--resume runs/kept: the run's own settings hold"),
        ("sweep --resume runs/kept --shard=", "--resume runs/kept: the run's own settings hold"),
        ("sweep --resume runs/kept --retry", "--resume runs/kept: the run's own settings hold"),
        ("sweep --resume runs/kept --capsules 0", "--resume runs/kept: the run's own settings hold"),
        ("sweep --resume runs/kept --balance runs/kept", "--resume runs/kept: the run's own settings hold"),
        (
            "merge runs/kept --out merged",
            "runs/kept: is no shard; merge joins runs that were made with sweep --shard i/n",
        ),
        ("merge nowhere runs/kept --out merged", "nowhere: no such run directory"),
        ("merge runs/kept --out runs/kept", "runs/kept: already holds a run"),
        ("merge runs/kept", "Missing option '--out'"),
        ("merge --out merged", "Missing argument"),
        ("sweep --op standin.double --vllm .", "is not a vLLM tree"),
        ("doctor --vllm nowhere", "--vllm nowhere: no such directory"),
        ("prove --op nope", "unknown op 'nope'"),
        (
            "prove --op standin.double --out runs/kept/run.json/x",
            "should name a new file below a directory that can be",
        ),
        ("prove --op standin.double --depth 0", "--depth 0: should be"),
        ("dance", "No such command 'dance'"),
        ("sweep --dance", "--dance"),
        ("replay", "Missing argument"),
    ],
)
def test_a_misuse_is_one_sentence_and_changes_nothing(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, sentence: str
) -> None:
    before = files(tmp_path)
    assert command.main(arguments.split()) == 2
    said = capsys.readouterr()
    assert said.err.startswith("mla-oracle: ")
    assert sentence in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"status":"fail"', '"status":"unsupported"', "status is 'unsupported' without a reason"),
        ('"status":"fail"', '"status":"error"', "status is 'error' without a reason"),
        ('"wrong":1', '"wrong":9', "finds 9 of"),
    ],
)
def test_a_failure_cannot_be_edited_away(
    kept: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, sentence: str
) -> None:
    (path,) = (kept / "records").glob("*.jsonl")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert command.main(["show", "runs/kept"]) == 2
    assert sentence in capsys.readouterr().err


def test_a_sweep_without_triton_says_first_that_no_kernel_was_judged(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = read_run(kept)
    bare = {
        key: msgspec.structs.replace(record, impl="ours-triton", reasons=("triton is not installed",))
        if record.status == "unsupported"
        else record
        for key, record in run.records.items()
    }
    sweep_command._summarise(dataclasses.replace(run, records=bare), console_of())
    assert capsys.readouterr().out.startswith("No Triton kernel was judged: triton is not installed.\n")


@pytest.mark.parametrize("there", [True, False])
def test_the_doctor_says_whether_triton_kernels_can_be_judged(
    there: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "without_triton", lambda: [] if there else ["triton is not installed"])
    monkeypatch.setattr(doctor, "_print_conformance", lambda console: 0)
    monkeypatch.setattr(doctor.rooms, "OPS", ())
    assert command.main(["doctor"]) == 0
    sentence = "No Triton kernel can be judged here: triton is not installed.\n"
    assert capsys.readouterr().out.startswith(sentence) is not there


@pytest.mark.parametrize(
    ("torch", "triton", "installed"),
    [(True, True, []), (True, False, ["triton>=3.6,<3.10"]), (False, False, ["torch==2.13.0"])],
)
def test_a_session_brings_the_triton_that_the_host_lacks_and_never_another_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, torch: bool, triton: bool, installed: list[str]
) -> None:
    stub = SimpleNamespace(options=SimpleNamespace(), session=lambda function: function, Session=object)
    monkeypatch.setitem(sys.modules, "nox", stub)
    monkeypatch.delenv("MLA_ORACLE_TORCH", raising=False)
    house = runpy.run_path(str(Path(command.__file__).parent.parent / "noxfile.py"))
    here = house["install"].__globals__
    monkeypatch.setitem(here, "host_has", {"torch": torch, "triton": triton}.get)
    monkeypatch.setitem(here, "sys", SimpleNamespace(platform="linux"))
    monkeypatch.setattr(importlib.metadata, "version", {"torch": "2.12.0+cpu", "numpy": "2.4"}.__getitem__)
    monkeypatch.setattr(importlib.metadata, "PackageNotFoundError", KeyError)
    calls: list[tuple[str, ...]] = []
    session = SimpleNamespace(
        install=lambda *words: calls.append(words),
        run=lambda *words, **how: str(tmp_path),
        create_tmp=lambda: str(tmp_path),
    )
    house["install"](session, "tests")
    words = [word for call in calls for word in call]
    assert [word for word in words if word.startswith(("torch", "triton"))] == installed
    assert (".[tests]" in words, ".[standalone,tests]" in words) == (torch, not torch)
    if torch:
        assert all(call[-2:] == ("-c", str(tmp_path / "host.txt")) for call in calls)
        assert (tmp_path / "host.txt").read_text() == "torch==2.12.0+cpu\nnumpy==2.4\n"


class Session:
    """Stands for nox's: keeps what a session runs, lets a sweep leave a run, and fails where it is told to."""

    def __init__(self, *posargs: str, fails: tuple[str, ...] = (), settings: dict[str, Any] | None = None) -> None:
        self.posargs, self.fails = list(posargs), fails
        self.settings = {"ops": [], "impls": [], "vllm": "", "aiter": "", **(settings or {})}
        self.ran: list[tuple[str, ...]] = []
        self.installed: list[str] = []

    def run(self, *words: str, **how: Any) -> None:
        self.ran.append(words)
        if words[:2] == ("mla-oracle", "sweep"):
            out = next(Path(after) for word, after in pairwise(words) if word in ("--out", "--resume"))
            out.mkdir(parents=True, exist_ok=True)
            (out / "run.json").write_text(json.dumps(self.settings))
        if set(words[:2]) & set(self.fails) and 1 not in how.get("success_codes", [0]):
            raise RuntimeError(words[1])

    def asked(self, name: str) -> list[str]:
        """The arguments of the one call of a subcommand of mla-oracle."""
        (words,) = (words for words in self.ran if words[:2] == ("mla-oracle", name))
        return list(words[2:])


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The project's nox sessions, which install nothing."""
    monkeypatch.chdir(tmp_path)
    stub = SimpleNamespace(options=SimpleNamespace(), session=lambda function: function, Session=object)
    monkeypatch.setitem(sys.modules, "nox", stub)
    house = runpy.run_path(str(Path(command.__file__).parent.parent / "noxfile.py"))
    monkeypatch.setitem(
        house["install"].__globals__, "install", lambda session, *extras: session.installed.extend(extras)
    )
    return house


MACHINES = ["--on", "isa:gfx942", "--on", "isa:gfx950"]


def test_the_machine_code_session_tests_and_sweeps_or_sweeps_alone(sessions: dict[str, Any]) -> None:
    session = Session("--out", "run")
    sessions["isa"](session)
    assert [words[0] for words in session.ran] == ["pytest", "mla-oracle", "mla-oracle"]
    assert session.installed == ["tests", "isa"]
    assert session.asked("sweep") == ["--out", "run", *MACHINES, "--impl", "ours-triton", "--cases", "smoke"]
    assert session.asked("report") == ["run"]
    session = Session("--without-tests", "--op", "dcp.combine", "--on=isa:gfx950", "--out", "run")
    sessions["isa"](session)
    assert [words[0] for words in session.ran] == ["mla-oracle", "mla-oracle"] and session.installed == ["isa"]
    asked = ["--op", "dcp.combine", "--on=isa:gfx950", "--out", "run", "--impl", "ours-triton", "--cases", "smoke"]
    assert session.asked("sweep") == asked
    session = Session("--resume", "run", "--without-tests")
    sessions["isa"](session)
    assert session.asked("sweep") == ["--resume", "run"]


def test_a_session_compiles_what_the_run_was_asked_for_and_reports_in_any_case(sessions: dict[str, Any]) -> None:
    settings = {"ops": ["dcp", "formats.cast"], "impls": ["ours-*"], "vllm": "/a/tree"}
    session = Session("--compiled", "--out", "run", settings=settings)
    sessions["sweep"](session)
    assert session.asked("sweep") == ["--out", "run", "--laws"]
    asked = ["--op", "dcp", "--op", "formats.cast", "--impl", "ours-*", "--vllm", "/a/tree", "--out", "run"]
    assert session.asked("aot") == asked
    assert [words[1] for words in session.ran] == ["sweep", "aot", "report"]
    for fails in (("sweep",), ("aot",), ("sweep", "aot")):
        session = Session("--compiled", "--out", "run", fails=fails)
        with pytest.raises(RuntimeError, match=r"sweep|aot"):
            sessions["sweep"](session)
        assert [words[1] for words in session.ran] == ["sweep", "aot", "report"]
    session = Session("--out", "run")
    sessions["sweep"](session)
    assert [words[1] for words in session.ran] == ["sweep", "report"]


def test_what_escapes_is_the_harness_fault_and_one_sentence(
    kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(show, "read_run", broken)
    assert command.main(["show", "runs/kept"]) == 3
    said = capsys.readouterr().err
    assert said.startswith("mla-oracle: the harness itself broke: ZeroDivisionError: on purpose")
    assert said.count("\n") == 1


def test_an_edited_record_is_named_by_every_reader(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = (kept / "records").glob("*.jsonl")
    path.write_text(path.read_text().replace('"fail"', '"fine"'))
    for arguments in (
        ["show", "runs/kept"],
        ["report", "runs/kept"],
        ["sweep", "--resume", "runs/kept"],
        ["sweep", "--failed", "runs/kept"],
    ):
        assert command.main(arguments) == 2
        said = capsys.readouterr().err
        assert "0001-interpreter-gw0-1.jsonl line 1: Invalid enum value 'fine'" in said
        assert said.count("\n") == 1


def test_a_run_is_shown_as_a_table_and_line_by_line(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["show", str(kept)]) == 0
    said = capsys.readouterr().out
    assert f"fail        standin-wrong interpreter {FOUR}" in said
    assert "out[3]=9, but should be 8: it is exact" in said
    assert "1 of 3 cases has no record: mla-oracle sweep --resume" in said


def test_one_is_counted_as_one(kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = read_run(kept)
    sweep_command._summarise(run, console_of())
    said = capsys.readouterr().out
    assert "standin-declines on interpreter did not answer 1 time: no fours (1)\n" in said
    assert "1 case has no record: the sessions ended without it, see " in said
    (declined,) = (record for record in run.records.values() if record.status == "unsupported")
    others = [
        msgspec.structs.replace(declined, case=FOUR.replace("4", f"{number}"), reasons=(f"no {number}",))
        for number in (5, 6)
    ]
    for count, words in (
        (1, "2 times: no fours (1), and 1 other reason"),
        (2, "3 times: no fours (1), and 2 other reasons"),
    ):
        records = run.records | {record.key: record for record in others[:count]}
        sweep_command._summarise(dataclasses.replace(run, records=records), console_of())
        assert f"did not answer {words}\n" in capsys.readouterr().out
    create_run(tmp_path / "new", Settings(), [Task(case=FOUR, impl="standin-right", on="interpreter", item="i")])
    assert command.main(["show", "new"]) == 2
    assert "new: its one case has no record; answer it with mla-oracle sweep --resume new" in capsys.readouterr().err


def test_the_version_is_told_alone(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((Path(command.__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mla-oracle {project['version']}\n"
    assert command.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "Is this kernel right, everywhere it claims to be" in said and "--version" in said
    assert command.main(["--version", "sweep", "--out", "run"]) == 0
    assert not Path("run").exists()


def test_a_process_that_dies_before_it_answers_is_told_by_its_exit_code() -> None:
    assert answer_alone(max, 3, 7) == 7
    assert answer_alone(signal.raise_signal, signal.SIGKILL) == -signal.SIGKILL
    assert answer_alone(os._exit, 5) == 5


def test_a_run_that_is_being_written_is_shown_as_far_as_it_is(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with held(kept):
        assert command.main(["show", str(kept)]) == 0
    said = capsys.readouterr().out
    assert f"{kept} is still being written: 2 of 3 tasks have a record" in said
    assert "--resume" not in said
    assert "out[3]=9, but should be 8" in said
    create_run(tmp_path / "fresh", Settings(), [Task(case=FOUR, impl="standin-right", on="interpreter", item="i")])
    with held(tmp_path / "fresh"):
        assert command.main(["show", "fresh"]) == 0
    assert capsys.readouterr().out == "fresh is still being written: 0 of 1 tasks have a record\n"
    assert command.main(["show", "fresh"]) == 2


def test_what_was_asked_once_more_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = [
        Task(case=FOUR, impl=f"standin-{name}", on="interpreter", item=name) for name in ("right", "wrong", "naps")
    ]
    create_run(tmp_path / "run", Settings(retry=True), tasks)
    file = RecordFile(tmp_path / "run" / "records" / "0001-interpreter-gw0-1.jsonl")
    common: dict[str, Any] = {"op": "standin.double", "on": "interpreter", "environment": HERE, "case": FOUR}
    crash = Attempt(status="crash", reasons=("the worker died: Aborted",))
    lost = Attempt(status="error", reasons=(f"{LOST}RuntimeError: unknown error",))
    good = msgspec.structs.replace(BAD, use=0.0, wrong=0)
    capsule = "capsules/a.safetensors"
    spent = Seconds(run=2.0, compile=1.5)
    file.record(Record(impl="standin-right", status="pass", checks=(good,), attempts=(crash,), seconds=spent, **common))
    file.record(Record(impl="standin-wrong", status="fail", checks=(BAD,), attempts=(lost,), capsule=capsule, **common))
    file.record(Record(impl="standin-naps", status="hang", reasons=("no answer",), **common))
    file.close()
    assert command.main(["show", "run"]) == 0
    said = capsys.readouterr().out
    assert "2 cases asked once more after 1 crash, 1 lost device: 1 pass, 1 fail" in said
    assert "1 case still to ask once more: mla-oracle sweep --resume run" in said
    assert command.main(["show", FOUR, "--run", "run"]) == 0
    said = capsys.readouterr().out
    assert "asked once more after crash: the worker died: Aborted" in said
    assert f"asked once more after lost device: {LOST}RuntimeError: unknown error" in said
    assert f"kept: run/{capsule}" in said
    assert "2.000 s to run (1.500 s of it to compile)" in said


def test_shards_are_swept_and_merged_into_one_run(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    five = FOUR.replace("rows=4", "rows=5")
    words = f"sweep --case {FOUR} --case {five} --on interpreter --workers 1".split()
    words += ["--impl", "standin-wrong", "--impl", "standin-right", "--balance", str(kept), "--capsules", "9"]
    assert command.main([*words, "--shard", "1/2", "--out", "one"]) in (0, 1)
    said = capsys.readouterr().out
    assert "  shard 1/2: 2 of 4 answers, about " in said
    assert "(1 with a time of their own); the longest shard has " in said
    assert command.main([*words, "--shard", "2/2", "--out", "two"]) in (0, 1)
    assert command.main(["merge", "one", "two", "--out", "whole"]) == 0
    run = read_run(tmp_path / "whole")
    assert sorted(record.status for record in run.records.values()) == ["fail", "fail", "pass", "pass"]
    assert [task.impl for task in run.plan] == ["standin-right", "standin-right", "standin-wrong", "standin-wrong"]
    assert run.state == "complete"
    failing = [record for record in run.records.values() if record.status == "fail"]
    assert all((tmp_path / "whole" / record.capsule).is_file() for record in failing)
    capsys.readouterr()
    assert command.main(["replay", str(tmp_path / "whole" / failing[0].capsule), "--on", "interpreter"]) == 1
    assert "its outputs are the same as in the capsule" in capsys.readouterr().out


def test_a_record_is_shown_in_full(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["show", FOUR, "--impl", "standin-wrong"]) == 0
    said = capsys.readouterr().out
    for part in (
        "fail by standin-wrong on interpreter",
        "out[3]=9, but should be 8: it is exact",
        "as if the last row were late",
        f"see it again: mla-oracle replay {FOUR} --impl standin-wrong --on interpreter --vllm /some/vllm",
    ):
        assert part in said
    assert "declines" not in said


def test_a_replay_explains_and_its_exit_code_judges(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["replay", FOUR, "--impl", "standin-wrong", "--on", "interpreter"]) == 1
    said = capsys.readouterr().out
    assert "as if the last row were one too large (last-row-late)" in said
    assert "but should be 1352" in said
    assert command.main(["replay", FOUR, "--impl", "standin-right", "--on", "interpreter"]) == 0


def test_a_capsule_without_room_is_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        code = command.main(
            ["replay", FOUR, "--impl", "standin-wrong", "--on", "interpreter", "--save", "x.safetensors"]
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith("mla-oracle: --save x.safetensors: ")


def test_a_capsule_is_replayed_and_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--impl", "standin-wrong", "--on", "interpreter"]
    assert command.main(["replay", FOUR, *arguments, "--save", "a.safetensors"]) == 1
    assert command.main(["replay", "a.safetensors", "--on", "interpreter"]) == 1
    assert "its outputs are the same as in the capsule" in capsys.readouterr().out
    assert command.main(["replay", "a.safetensors", "--impl", "standin-right", "--on", "interpreter"]) == 0
    assert command.main(["replay", FOUR, *arguments, "--save", "a.safetensors"]) == 2


def test_ops_are_listed_with_axes_and_answerers(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["list", "--op", "standin.double"]) == 0
    said = capsys.readouterr().out
    assert "answered by standin-right, standin-wrong" in said
    assert "  rows = 1 | 4 | 5 | 7" in said
    assert "  wide = no | yes" in said


def test_an_interrupt_while_the_command_is_imported_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert command.main(["list"]) == 130
    assert capsys.readouterr().err == "mla-oracle: interrupted\n"


def test_the_list_names_what_only_regressions_ask(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["list", "--op", "cache.kv_record_write"]) == 0
    assert "block_stride = page | padded | odd (and far)" in capsys.readouterr().out


def test_a_sweep_from_the_command_line_keeps_its_settings_and_gives_the_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm" / "vllm" / "triton_utils").mkdir(parents=True)
    (tmp_path / "vllm" / "vllm" / "__init__.py").touch()
    arguments = [
        "sweep",
        "--case",
        FOUR,
        "--on",
        "interpreter",
        "--workers",
        "1",
        "--vllm",
        "vllm",
        "--out",
        "run",
        "--impl",
    ]
    assert command.main([*arguments, "standin-wrong"]) == 1
    said = capsys.readouterr().out
    assert "run: 1 answer to 1 case on interpreter" in said
    assert "standin-wrong interpreter: 1 fail, such as: out[3]=1353, but should be 1352: this output is exact" in said
    again = f"see it again: mla-oracle replay {FOUR} --impl standin-wrong --on interpreter --vllm {tmp_path / 'vllm'}"
    assert again in said
    settings = msgspec.json.decode((tmp_path / "run" / "run.json").read_bytes())
    assert settings["vllm"] == str(tmp_path / "vllm")
    assert settings["patterns"] == [FOUR]
    assert command.main(["report", "run"]) == 0
    assert (tmp_path / "run" / "report.html").stat().st_size > 1000


def test_the_four_rooms_come_from_one_house() -> None:
    assert command.intruder() is None


@pytest.mark.parametrize("room", ["cases", "oracle", "impl"])
def test_a_room_of_another_house_is_named_and_nothing_runs(tmp_path: Path, room: str) -> None:
    (tmp_path / room).mkdir()
    (tmp_path / room / "__init__.py").write_text("raise SystemExit('an intruder ran')")
    house = Path(command.__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", "from reports.command import main; raise SystemExit(main(['list']))"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(house)]), "PYTEST_PLUGINS": ""},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == (
        f"mla-oracle: the package {room!r} comes from {tmp_path / room}, but should come from {house / room}; "
        "another project of that name stands in front of it on sys.path\n"
    )


def test_a_missing_room_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "oracle" else real(name))
    assert command.main(["list"]) == 2
    assert "the package 'oracle' is missing, it should lie in" in capsys.readouterr().err


def test_an_id_longer_than_a_file_name_may_be_is_an_id(capsys: pytest.CaptureFixture[str]) -> None:
    from cases.sparse_mla.prefill import PrefillCase

    case = PrefillCase(queries=0).id
    assert len(case) > 255
    assert command.main(["replay", case, "--impl", "torch-gathered", "--on", "interpreter"]) == 0
    assert "pass by torch-gathered" in capsys.readouterr().out


def test_a_replay_that_judges_nothing_is_no_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["replay", FOUR, "--impl", "standin-declines", "--on", "interpreter"]) == 1
    assert "unsupported by standin-declines" in capsys.readouterr().out


def test_the_reports_lines_name_the_trees(kept: Path) -> None:
    assert command.main(["report", str(kept)]) == 0
    assert "--vllm /some/vllm" in (kept / "report.html").read_text().replace("<wbr>", "")
