"""Does `mla-oracle report` say in one sentence what was wrong, write nothing then, and else write the page asked for?"""

from pathlib import Path

import msgspec
import pytest

from impl.executions.aot.report import Asked, Report, Row
from reports.commands import run as command
from reports.prove import Proof
from reports.record import Environment, Record
from reports.store import RecordFile, Settings, Task, create_run

CASE = "sparse_mla.decode:heads=16,seed=0"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of one record, `runs/kept`, from where the tests stand."""
    monkeypatch.chdir(tmp_path)
    path = Path("runs", "kept")
    create_run(path, Settings(created=1.0), [Task(case=CASE, impl="ours-triton", on="interpreter", item="a")])
    file = RecordFile(path / "records" / "gw0.jsonl")
    here = Environment(machine="m", python="3", torch="2", triton="3", numpy="2", device="cpu")
    file.record(
        Record(
            case=CASE, op="sparse_mla.decode", impl="ours-triton", on="interpreter", status="unsupported",
            reasons=("no HIP device",), environment=here,
        )
    )  # fmt: skip
    file.close()
    Path("empty").mkdir()
    Path("text").write_text("not a report")
    Path("odd.json").write_text('[{"op": 3}]')
    Path("deep.json").write_text('{"more": ' + "[" * 100_000)
    Path("later.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(compiled(), format=2)))
    create_run(
        Path("runs", "spoilt"),
        Settings(created=1.0),
        [Task(case=CASE, impl="ours-triton", on="interpreter", item="a")],
    )
    Path("runs", "spoilt", "aot.json").write_text("{")
    return path


def compiled(kernel: str = "a_kernel") -> Report:
    """One kernel that does not fit, as `mla-oracle aot` tells of it."""
    asked = Asked(op="sparse_mla.decode", impl="ours-triton", call=CASE, position=0, inputs="meta")
    row = Row(
        kernel=kernel, module="impl.sparse_mla", arch="gfx942", key="a", constants={"N": "8"}, options={}, arguments="",
        asked=(asked,), failure="lds", sentence="it needs too much",
    )  # fmt: skip
    return Report(triton="3", torch="2", arches=("gfx942",), rows=(row,))


def files(path: Path) -> dict[Path, bytes]:
    return {found: found.read_bytes() for found in path.rglob("*") if found.is_file()}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "report: should name a run directory, or --history and a directory of runs"),
        ("nowhere", "nowhere"),
        ("empty", "empty"),
        ("text", "text"),
        ("runs/kept --history runs", "--history: is a page of its own"),
        ("--history nowhere", "--history nowhere: should be a directory that holds runs"),
        ("--history text", "--history text: should be a directory that holds runs"),
        ("--history empty", "empty"),
        ("runs/kept --against runs/kept", "--against runs/kept: is the run itself; it should be another"),
        ("runs/kept --against nowhere", "nowhere"),
        ("runs/kept --against empty --proofs odd.json", "--proofs: belongs on the page of a run"),
        ("runs/kept --proofs nowhere", "--proofs nowhere: No such file or directory; it should be a file that"),
        ("runs/kept --proofs text", "--proofs text: JSON is malformed"),
        ("runs/kept --proofs odd.json", "--proofs odd.json: Expected `str`, got `int` - at `$[0].op`; it should be"),
        ("runs/kept --against empty --compiled odd.json", "--compiled: belongs on the page of a run"),
        ("--history runs --compiled odd.json", "--history: is a page of its own"),
        (
            "runs/kept --compiled nowhere",
            "--compiled nowhere: No such file or directory; it should be the aot.json of an earlier --out",
        ),
        ("runs/kept --compiled empty", "--compiled empty: Is a directory; it should be the aot.json"),
        ("runs/kept --compiled text", "--compiled text: JSON is malformed"),
        ("runs/kept --compiled deep.json", "--compiled deep.json: "),
        (
            "runs/kept --compiled odd.json",
            "--compiled odd.json: Expected `object`, got `array`; it should be the aot.json",
        ),
        ("runs/kept --compiled runs/kept/run.json", "--compiled runs/kept/run.json: Object missing required field"),
        ("runs/kept --compiled later.json", "--compiled later.json: has format 2, should have 1: compile it again"),
        ("runs/spoilt", "runs/spoilt/aot.json: Input data was truncated; it should be the aot.json"),
        ("runs/kept --out text", "--out text: exists and is no report"),
        ("runs/kept --out empty", "--out empty: should name a file in a directory that exists"),
        ("runs/kept --out nowhere/page.html", "--out nowhere/page.html: should name a file in a directory"),
    ],
)
def test_misuse_is_one_sentence_and_writes_nothing(
    kept: Path, capsys: pytest.CaptureFixture[str], arguments: str, sentence: str
) -> None:
    before = files(Path())
    assert command(["report", *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1 and "Traceback" not in said
    assert files(Path()) == before


def test_each_page_goes_beside_what_it_speaks_of(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["report", str(kept)]) == 0
    assert capsys.readouterr().out == "runs/kept/report.html\n"
    assert command(["report", "--history", "runs"]) == 0
    assert capsys.readouterr().out == "runs/history.html\n"
    assert "kept" in Path("runs/history.html").read_text()


def test_proofs_become_the_kill_matrix(kept: Path) -> None:
    proof = Proof(op="sparse_mla.decode", level="smoke", kills=(), clean=7, alarms=(), looseness=())
    Path("proofs.json").write_bytes(msgspec.json.encode([proof]))
    assert command(["report", str(kept), "--proofs", "proofs.json", "--out", "page.html"]) == 0
    assert "Kill matrix" in Path("page.html").read_text()
    Path("twice.json").write_bytes(msgspec.json.encode([proof, proof]))
    assert command(["report", str(kept), "--proofs", "twice.json", "--out", "page.html"]) == 2


def test_what_was_compiled_is_taken_from_the_run_unless_another_file_is_named(kept: Path) -> None:
    assert command(["report", str(kept), "--out", "page.html"]) == 0
    assert "Compiled for AMD GPUs" not in Path("page.html").read_text()
    Path(kept, "aot.json").write_bytes(msgspec.json.encode(compiled()))
    assert command(["report", str(kept), "--out", "page.html"]) == 0
    page = Path("page.html").read_text()
    assert "Compiled for AMD GPUs" in page and "a_kernel" in page and "it needs too much" in page
    Path("other.json").write_bytes(msgspec.json.encode(compiled("another_one")))
    assert command(["report", str(kept), "--compiled", "other.json", "--out", "page.html"]) == 0
    page = Path("page.html").read_text()
    assert "another_one" in page and "a_kernel" not in page
