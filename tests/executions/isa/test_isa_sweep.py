"""Does asking implementations as machine code end with a verdict, a reason or a fault, and never with a guess?"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cases.case import parse
from impl.executions.isa import triton_launch
from impl.implementation import implementations
from reports import command
from reports.environment import environment
from reports.execute import execute
from reports.plan import Selection, plan
from reports.record import Record
from reports.store import Run, read_run

STANDINS = Path(__file__).parent / "standins"
ROOT = Path(__file__).parents[3]
OP = "cache.kv_gather_dequant"
ARCHS = ("gfx942", "gfx950")


def asked(*arguments: str, cwd: Path, **others: str) -> subprocess.CompletedProcess[str]:
    """What the command says in a fresh process in which the stand-ins are beside the real implementations."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    changed = {
        **kept, "PYTHONPATH": f"{ROOT}{os.pathsep}{STANDINS}", "PYTEST_PLUGINS": "gather_standins", "COLUMNS": "200",
        "TRITON_DEFAULT_FP_FUSION": "1", **others,
    }  # fmt: skip
    return subprocess.run([sys.executable, str(STANDINS / "gather_standins.py"), *arguments], env=changed, cwd=cwd,
                          capture_output=True, text=True, timeout=280)  # fmt: skip


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, subprocess.CompletedProcess[str]]:
    """One sweep of both architectures over a real implementation, one without kernels and those with faults."""
    directory = tmp_path_factory.mktemp("sweep")
    done = asked(
        "sweep", "--on", "isa:gfx942", "--on", "isa:gfx950", "--op", OP, "--impl", "ours-triton", "--impl", "torch-*",
        "--impl", "standin-*", "--cases", "smoke", "--workers", "1", "--out", "run", cwd=directory,
    )  # fmt: skip
    assert (directory / "run").is_dir(), done.stderr
    return read_run(directory / "run"), done


def records(swept: tuple[Run, Any], impl: str, arch: str) -> list[Record]:
    """The records of an implementation on an architecture."""
    found = [record for record in swept[0].records.values() if (record.impl, record.on) == (impl, f"isa:{arch}")]
    assert found
    return found


@pytest.mark.parametrize("arch", ARCHS)
def test_our_kernel_passes_as_machine_code(swept: tuple[Run, Any], arch: str) -> None:
    found = records(swept, "ours-triton", arch)
    assert {record.status for record in found} == {"pass"}
    assert {record.environment.arch for record in found} == {arch}
    assert {record.environment.driver for record in found} == {"machine code executed on the processor"}


@pytest.mark.parametrize("arch", ARCHS)
def test_an_implementation_without_kernels_says_that_it_has_none(swept: tuple[Run, Any], arch: str) -> None:
    reason = f"on=isa:{arch}: executed is the machine code of Triton kernels, and torch-fp8 launches none"
    assert {(record.status, record.reasons) for record in records(swept, "torch-fp8", arch)} == {
        ("unsupported", (reason,))
    }


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("fault", "says"), [("past", "out-of-bounds load in "), ("race", "write race in ")])
def test_a_kernel_s_fault_is_the_verdict_memory(swept: tuple[Run, Any], fault: str, says: str, arch: str) -> None:
    for record in records(swept, f"standin-triton-{fault}", arch):
        assert record.status == "memory"
        assert len(record.reasons) == 1
        assert record.reasons[0].startswith(says)
        assert "(faulty_kernels.py:" in record.reasons[0]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("fault", "says"), [("unmodelled", "v_msad_u8 is not modelled"), ("lds", "bytes of LDS: {arch} has")]
)
def test_what_cannot_be_executed_is_unsupported_and_named(
    swept: tuple[Run, Any], fault: str, says: str, arch: str
) -> None:
    for record in records(swept, f"standin-triton-{fault}", arch):
        assert record.status == "unsupported"
        assert record.reasons[0].startswith("machine code: ")
        assert says.format(arch=arch) in record.reasons[0]


def test_a_sweep_ends_with_a_record_for_every_task(swept: tuple[Run, subprocess.CompletedProcess[str]]) -> None:
    run, done = swept
    assert not run.open_tasks
    # Memory is a verdict against the suspect.
    assert done.returncode == 1


def test_a_sweep_of_what_passes_ends_well(tmp_path: Path) -> None:
    done = asked(
        "sweep", "--on", "isa:gfx942", "--on", "isa:gfx950", "--op", OP, "--impl", "ours-triton", "--cases", "smoke",
        "--workers", "1", "--out", "run", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = read_run(tmp_path / "run")
    assert not run.open_tasks
    assert {(record.on, record.status) for record in run.records.values()} == {
        (f"isa:{arch}", "pass") for arch in ARCHS
    }


def test_a_fault_is_told_again_by_replay(swept: tuple[Run, Any], tmp_path: Path) -> None:
    record = records(swept, "standin-triton-past", "gfx942")[0]
    done = asked("replay", record.case, "--impl", record.impl, "--on", "isa:gfx942", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "memory" in done.stdout
    assert "out-of-bounds load in 'global_load_ushort" in " ".join(done.stdout.split())


def test_the_interpreter_and_machine_code_are_asked_in_one_call(tmp_path: Path) -> None:
    done = asked(
        "replay", case_of(OP), "--impl", "ours-triton", "--on", "interpreter", "--on", "isa:gfx942", "--on", "isa:gfx950",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if " by ours-triton on " in line]
    assert said == [f"pass by ours-triton on {on}" for on in ("interpreter", "isa:gfx942", "isa:gfx950")]


@pytest.mark.parametrize("word", ["isa:gfx90a", "isa", "isa:", "gfx942"])
@pytest.mark.parametrize("verb", [["sweep", "--op", OP, "--out", "run"], ["replay", f"{OP}:"]])
def test_another_machine_is_misuse(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: list[str], word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if verb[0] == "replay":
        verb = ["replay", case_of(OP)]
    assert command.main([*verb, "--on", word]) == 2
    said = capsys.readouterr().err
    assert f"--on {word}: should be one of interpreter, cuda, hip, isa:gfx942, isa:gfx950" in said
    assert not (tmp_path / "run").exists()


def case_of(op: str, **values: str) -> str:
    """The id of an op's first smoke case that has these values."""
    chosen = [task.case for task in plan(Selection(ops=(op,), level="smoke")).tasks]
    wanted = [f"{name}={value}" for name, value in values.items()]
    return next(case for case in chosen if all(want in case.replace(":", ",").split(",") for want in wanted))


def answer(case: str, impl: str, on: Any) -> Record:
    """What becomes of a case in this process."""
    question = parse(case)
    return execute(
        question, next(each for each in implementations(question.op) if each.name == impl), on, environment(on)
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_a_case_about_another_architecture_says_so(arch: str) -> None:
    other = next(each for each in ARCHS if each != arch)
    record = answer(case_of("sparse_mla.decode", arch=other), "ours-triton", f"isa:{arch}")
    assert (record.status, record.reasons) == ("unsupported", (f"arch={other}: what is executed is {arch} code",))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process as one whose kernels are decorated for the compiler."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton_launch, "_installed", None)
    return monkeypatch


def test_without_numba_the_reason_is_said(fresh: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    fresh.setattr(
        importlib.util, "find_spec", lambda name, package=None: None if name == "numba" else find(name, package)
    )
    record = answer(case_of(OP), "ours-triton", "isa:gfx942")
    reason = "numba is not installed: the executor of machine code needs it (the extra `isa`)"
    assert (record.status, record.reasons) == ("unsupported", (reason,))


@pytest.mark.usefixtures("fresh")
def test_a_process_of_the_interpreter_says_that_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    record = answer(case_of(OP), "ours-triton", "isa:gfx942")
    assert record.status == "unsupported"
    assert record.reasons[0].startswith("TRITON_INTERPRET is set: ")


def test_the_help_names_every_execution(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["sweep", "--help"]) == 0
    assert "isa:gfx942" in capsys.readouterr().out
