"""Does `mla-oracle aot` say what it found, in words and by its exit code?"""

import json
import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest

import cases
from cases.case import impossible
from cases.production import ARCHES, Served, meta_inputs, production, served_bytes
from impl.executions.aot import run as running
from impl.executions.aot.director import Event, Request
from impl.executions.aot.normalise import Shape
from impl.executions.aot.report import Asked, Report, Row, Unasked, read_report
from impl.executions.aot.resources import Resources
from impl.executions.aot.run import triton_impls
from reports.commands import aot as command
from reports.commands import run
from reports.html.aot import render_aot
from reports.store import Settings, Task, create_run

OP = "dcp.verify_lengths"


def taken(**changes: int) -> Resources:
    numbers = {"vgpr": 8, "agpr": 0, "sgpr": 16, "vgpr_spills": 0, "sgpr_spills": 0, "scratch": 0, "lds": 0, **changes}
    return Resources(**numbers, lds_limit=65536, waves=8.0, limit="waves", matrix={}, code=100, instructions=10)


def row(**changes: object) -> Row:
    asked = Asked(op=OP, impl="ours-triton", call="<b>call</b>", position=0, inputs="values")
    fields = {"resources": taken(), "shape": Shape("a", "b", "c"), **changes}
    return Row(
        kernel="_count", module="impl.dcp", arch="gfx942", key="a", constants={"N": "<8>"}, options={},
        arguments="", asked=(asked,), **fields
    )  # type: ignore[arg-type]  # fmt: skip


def report(*rows: Row, unasked: tuple[Unasked, ...] = ()) -> Report:
    return Report(triton="3.9.0", torch="2.13", arches=("gfx942",), rows=rows, unasked=unasked)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    """What the compilation is said to have given; the command is tested without one."""
    answers: list[Report] = []
    monkeypatch.setattr(command, "compile_all", lambda request, progress: answers[-1])
    monkeypatch.setattr(command, "unavailable", lambda: "")
    return answers


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--arch", "gfx000"], "--arch gfx000: should be one of gfx942, gfx950"),
        (["--arch", "sm_90"], "--arch sm_90: should be one of gfx942, gfx950"),
        (["--arch", "gfx942", "--arch", "gfx1250"], "--arch gfx1250: should be one of gfx942, gfx950"),
        (["--impl", "nobody-*"], "nothing to compile: no implementation named nobody-*"),
        (["--op", "dense_mla.head_counts"], "nothing to compile"),
        (["--op", "nothing"], "unknown op 'nothing'"),
        (["--vllm", "/nowhere"], "--vllm /nowhere: no such directory"),
        (["--workers", "-1"], "--workers -1: should be 1 or more"),
        (
            ["--baseline", "/nowhere.json"],
            "--baseline /nowhere.json: No such file or directory; it should be the aot.json",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence_and_2(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["aot", *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_a_baseline_that_is_no_report_is_misuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b.json").write_text("{")
    assert run(["aot", "--baseline", str(tmp_path / "b.json")]) == 2
    assert "it should be the aot.json of an earlier --out" in capsys.readouterr().err


def test_a_place_that_is_taken_is_misuse(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert run(["aot", "--out", str(tmp_path / "file")]) == 2
    (tmp_path / "aot.html").write_text("somebody's")
    assert run(["aot", "--out", str(tmp_path)]) == 2
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "aot.json").write_text('{"format": "of somebody else"}')
    assert run(["aot", "--out", str(tmp_path / "more")]) == 2
    assert (tmp_path / "more" / "aot.json").read_text() == '{"format": "of somebody else"}'


def test_a_run_takes_what_was_compiled_beside_its_own_files_alone(
    answer: list[Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer.append(report(row()))
    task = Task(case=f"{OP}:seed=0", impl="ours-triton", on="interpreter", item="a")
    create_run(tmp_path / "run", Settings(created=1.0), [task])
    assert run(["aot", "--op", OP, "--out", str(tmp_path / "run")]) == 0
    assert run(["report", str(tmp_path / "run")]) == 0
    assert "Compiled for AMD GPUs" in (tmp_path / "run" / "report.html").read_text()
    # Once more, as one does after an edit.
    assert run(["aot", "--op", OP, "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    before = sorted(tmp_path.rglob("*"))
    for below in ("records", "new/deep"):
        assert run(["aot", "--op", OP, "--out", str(tmp_path / "run" / below)]) == 2
        said = capsys.readouterr().err
        assert f"belongs to the run {tmp_path / 'run'}, in which only a sweep writes" in said and said.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_without_triton_it_is_misuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "unavailable", lambda: "triton is not installed, and it compiles the kernels")
    assert run(["aot", "--op", OP]) == 2
    assert "triton is not installed" in capsys.readouterr().err


def test_what_fits_is_0_and_written(answer: list[Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer.append(report(row()))
    assert run(["aot", "--op", OP, "--out", str(tmp_path / "new")]) == 0
    said = capsys.readouterr().out
    assert "_count" in said and "1 compilation of 1 kernel for gfx942 by Triton 3.9.0: 0 failed" in said
    assert read_report(tmp_path / "new" / "aot.json") == answer[0]
    assert "They fit." in (tmp_path / "new" / "aot.html").read_text()


@pytest.mark.parametrize("failure", ["source", "backend", "crash", "hang", "lds", "launch"])
def test_a_failure_is_1_with_its_sentence(
    failure: str, answer: list[Report], capsys: pytest.CaptureFixture[str]
) -> None:
    answer.append(report(row(failure=failure, sentence="_count: it did not", resources=None, shape=None)))
    assert run(["aot", "--op", OP]) == 1
    said = capsys.readouterr().out
    assert f"fails: {OP} ours-triton _count on gfx942: {failure}: _count: it did not [N=<8>]" in said


def test_a_wrapper_that_raised_is_1_and_a_reason_is_not(
    answer: list[Report], capsys: pytest.CaptureFixture[str]
) -> None:
    reason = Unasked(op=OP, impl="vllm-triton", arch="gfx942", call="x", reasons=("heads=3: too few",))
    answer.append(report(row(), unasked=(reason,)))
    assert run(["aot", "--op", OP]) == 0
    assert f"not asked: {OP} vllm-triton: heads=3: too few (1 call)" in capsys.readouterr().out
    answer.append(report(row(), unasked=(msgspec.structs.replace(reason, broke=True),)))
    assert run(["aot", "--op", OP]) == 1
    assert f"broke: {OP} vllm-triton on gfx942: heads=3: too few" in capsys.readouterr().out


def test_an_own_kernel_that_spills_is_named(answer: list[Report], capsys: pytest.CaptureFixture[str]) -> None:
    answer.append(report(row(resources=taken(vgpr_spills=3, scratch=12))))
    assert run(["aot", "--op", OP]) == 0
    assert (
        "own kernel spills" in (said := capsys.readouterr().out) and "3 vector registers, 12 bytes of scratch" in said
    )


def test_growth_beyond_the_baseline_is_1(
    answer: list[Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer.append(report(row()))
    run(["aot", "--op", OP, "--out", str(tmp_path)])
    assert run(["aot", "--op", OP, "--baseline", str(tmp_path / "aot.json")]) == 0
    assert "1 same" in capsys.readouterr().out
    answer.append(report(row(resources=taken(scratch=64), shape=Shape("x", "b", "c"))))
    assert run(["aot", "--op", OP, "--baseline", str(tmp_path / "aot.json")]) == 1
    said = capsys.readouterr().out
    assert "1 same but scheduled" in said and "closes, grew" in said and "scratch 0 to 64 B (+64)" in said


def test_the_baseline_is_not_replaced(answer: list[Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer.append(report(row()))
    assert run(["aot", "--op", OP, "--out", str(tmp_path)]) == 0
    before = (tmp_path / "aot.json").read_text()
    (tmp_path / "other.json").symlink_to(tmp_path / "aot.json")
    answer.append(report(row(resources=taken(scratch=64))))
    for spelling in ("aot.json", "other.json"):
        assert run(["aot", "--op", OP, "--baseline", str(tmp_path / spelling), "--out", str(tmp_path)]) == 2
        assert "holds the baseline, which it would replace" in capsys.readouterr().err
    assert (tmp_path / "aot.json").read_text() == before


def test_the_page_shows_all_and_escapes_what_it_shows() -> None:
    broken = Unasked(op=OP, impl="vllm-triton", arch="gfx942", call="<i>", reasons=("<u>",), broke=True)
    page = render_aot(report(row(), row(failure="lds", sentence="<s>too much</s>"), unasked=(broken,)), None)
    for part in ("verdict", "failed", "kernels", "configurations", "unasked"):
        assert f'id="{part}"' in page
    assert "&lt;s&gt;too much" in page and "N=&lt;8&gt;" in page
    assert not any(text in page for text in ("<s>too", "<i>", "<u>", "<b>call", "<script"))


# Below, launches are captured and compiled in processes of their own.


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLA_ORACLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_own_kernels_compile_once(cache: Path, tmp_path: Path) -> None:
    words = ["aot", "--op", OP, "--impl", "ours-*"]
    assert run([*words, "--out", str(tmp_path / "out")]) == 0
    first = read_report(tmp_path / "out" / "aot.json")
    assert {each.arch for each in first.rows} == set(ARCHES)
    assert first.compiled == len(first.rows) > 0 and first.cpu > 0
    for each in first.rows:
        assert each.is_own and each.resources is not None and not each.resources.spills
        assert each.asked[0].inputs == "meta" and "num_warps=" in each.configuration
    again = tmp_path / "again"
    assert run([*words, "--baseline", str(tmp_path / "out" / "aot.json"), "--out", str(again)]) == 0
    second = read_report(again / "aot.json")
    assert second.compiled == 0 and second.cpu == 0.0
    assert second.rows == first.rows


def test_a_changed_cache_is_not_believed(cache: Path) -> None:
    request = Request(arches=("gfx942",), impls=((OP, "ours-triton"),), workers=1)
    first = running.compile_all(request, lambda event: None)
    for path in cache.rglob("*"):
        if path.is_file():
            path.write_bytes(b"nonsense")
    second = running.compile_all(request, lambda event: None)
    assert second.compiled == first.compiled > 0
    assert [each.resources for each in second.rows] == [each.resources for each in first.rows]


def test_a_wrapper_that_kills_its_process_takes_nobody_along(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A stand-in for a director, which dies in the first of two wrappers.
    stand_in = (
        "import json, os, sys; asked = json.load(open(sys.argv[1]));"
        "os.write(1, b'{\"capturing\": \"a.b ours-triton\"}\\n') if not asked['skip'] else None;"
        f"os.kill(os.getpid(), {int(signal.SIGSEGV)}) if not asked['skip'] else None;"
        f"os.write(1, {msgspec.json.encode(Event(report=report(row())))!r} + b'\\n')"
    )
    popen = running.subprocess.Popen
    monkeypatch.setattr(
        running.subprocess, "Popen", lambda words, **more: popen([sys.executable, "-c", stand_in, words[-1]], **more)
    )
    found = running.compile_all(Request(arches=("gfx942",), impls=(), workers=1), lambda event: None)
    assert [each.kernel for each in found.rows] == ["_count"]
    (broken,) = found.broken
    assert (broken.op, broken.impl) == ("a.b", "ours-triton")
    assert broken.reasons == ("its process died with signal SIGSEGV",)


def test_a_director_that_breaks_is_3(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    popen = running.subprocess.Popen
    stand_in = "import os; os.write(1, b'{\"capturing\": \"half a'); raise SystemExit('no room')"
    monkeypatch.setattr(
        running.subprocess, "Popen", lambda words, **more: popen([sys.executable, "-c", stand_in], **more)
    )
    assert run(["aot", "--op", OP]) == 3
    assert "the process that captures launches ended with exit code 1: no room" in capsys.readouterr().err


def test_an_interpreter_of_triton_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert "TRITON_INTERPRET" not in running.environment()
    assert running.environment()["TRITON_DEFAULT_FP_FUSION"] == "1"


def test_versions_outside_those_known_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert running.unavailable() == ""
    for version, known in (
        ("3.5.1", False),
        ("3.6.0", True),
        ("3.9.2+rocm", True),
        ("3.10.0", False),
        ("4.0.0", False),
    ):
        monkeypatch.setattr(running, "_stated_version", lambda path, version=version: version)
        assert (running.unavailable() == "") == known


# What is asked.


def test_every_op_with_a_triton_kernel_names_the_calls_that_are_served() -> None:
    ops = {op for op, _ in triton_impls(cases.OPS, ())}
    assert len(ops) > 40
    assert [op for op in sorted(ops) if not production(op)] == []


def test_every_served_call_is_a_case_on_some_architecture() -> None:
    for op in cases.OPS:
        for served in production(op):
            assert served.case.op == op
            assert impossible(served.case) == [], served.spelling
            assert any(served.is_for(arch) for arch in ARCHES), served.spelling


def test_served_inputs_have_no_memory_and_a_servers_sizes() -> None:
    served = production("cache.kv_record_write")[0]
    built = cases.op_module("cases", "cache.kv_record_write").build(served.case)
    inputs = meta_inputs(served, built)
    assert inputs.cache.device.type == "meta" and inputs.cache.shape[0] == 65536
    assert inputs.cache.stride() == built.cache.stride() and inputs.cache.dtype == built.cache.dtype
    assert inputs.cache.untyped_storage().nbytes() == served_bytes(built.cache, 65536) > 1 << 31
    assert inputs.k.shape == built.k.shape


def test_rows_of_what_is_no_tensor_are_refused() -> None:
    served = production("cache.kv_record_write")[0]
    built = cases.op_module("cases", "cache.kv_record_write").build(served.case)
    with pytest.raises(ValueError, match=r"rows of nothing: should name a tensor of the inputs, one of .*cache"):
        meta_inputs(Served(served.case, {"nothing": 3}), built)


def test_json_is_for_others_to_read(answer: list[Report], tmp_path: Path) -> None:
    answer.append(report(row()))
    run(["aot", "--op", OP, "--out", str(tmp_path)])
    found = json.loads((tmp_path / "aot.json").read_text())
    assert found["rows"][0]["resources"]["vgpr"] == 8 and found["format"] == 1
