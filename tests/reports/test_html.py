"""Does the page say what the records say, all of it, and nothing that they do not?"""

import base64
import errno
import gzip
import json
import random
import re
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cases.covering import Ledger
from cases.precision import Precision
from impl.executions.aot.report import Asked, Report, Row, Unasked
from impl.executions.aot.resources import Resources
from oracle.check import OFF_THE_SCALE, Check
from reports import figures
from reports.html import answer, judged_use, replay_line, report_run, write_report
from reports.html.rows import middle
from reports.prove import Alarm, Kill, Proof
from reports.record import LOST, Attempt, Environment, Record, Seconds
from reports.store import RecordFile, Settings, Task, create_run, held

CPU = Environment(
    machine="x86_64, 64 cores", python="3.12.3", torch="2.13.0+cpu", triton="3.8.0", numpy="2.4.6", device="cpu",
    vllm="0.14.1", commit="3f9ac1de0b7e",
)  # fmt: skip
GPU = Environment(
    machine="x86_64, 64 cores", python="3.12.3", torch="2.13.0+cu130", triton="3.8.0", numpy="2.4.6",
    device="NVIDIA H200", driver="580.65", commit="3f9ac1de0b7e",
)  # fmt: skip
OP = "sparse_mla.decode"


def case_id(op: str = OP, **axes: object) -> str:
    words = {"heads": 16, "kv_len": 64, "page": 64, "values": "randn", "seed": 0, **axes}
    return f"{op}:" + ",".join(f"{axis}={word}" for axis, word in words.items())


def within(use: float) -> Check:
    return Check(
        output="out", measure="bounded", use=use, use_rms=use / 4, count=8192, where=(2, 0, 151), got="0.25",
        want="0.24 ±0.1", error=0.1 * use, budget=0.1, why="outside the budget of the declared rounding points",
    )  # fmt: skip


def beyond(use: float) -> Check:
    return Check(
        output="out", measure="bounded", use=use, use_rms=use / 4, wrong=77, count=8192, where=(3, 17, 211),
        got="0.734375", want="0.367188 ±0.00123", error=0.00123 * use, budget=0.00123,
        why=f"outside the budget of the declared rounding points, {use:.3g} times; 77 of 8192 elements are out",
    )  # fmt: skip


def record(case: str | None = None, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "case": case or case_id(), "op": (case or case_id()).partition(":")[0], "impl": "ours-triton",
        "on": "interpreter", "status": "pass", "checks": (within(0.25),), "environment": CPU, "precision": Precision(),
        "seconds": Seconds(build=0.01, run=1.5, reference=0.2, judge=0.03), "finished": 1.79e9,
    }  # fmt: skip
    return Record(**{**fields, **changes})


def failing(case: str | None = None, **changes: Any) -> Record:
    fields = {
        "status": "fail", "checks": (beyond(298.0), within(0.5)),
        "diagnosis": ("as if the main cache were decoded FNUZ (main-fnuz)",),
    }  # fmt: skip
    return record(case, **{**fields, **changes})


class Reader(HTMLParser):
    """What a browser without JavaScript and without CSS would show, and which tags it would see."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("b", "i", "span", "code", "wbr", "a"):
            self.text.append(" ")
        if tag not in ("meta", "br", "wbr", "input", "path", "use", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text.append(data)


def read(page: str) -> tuple[str, Reader]:
    """The visible words with single spaces between them, and what was read."""
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == [], "a tag is left open"
    return re.sub(r"\s+", " ", "".join(reader.text)), reader


def written(tmp_path: Path, records: list[Record], **more: Any) -> str:
    return write_report(records, tmp_path / "report.html", title="run 7", **more).read_text(encoding="utf-8")


def rows_of(page: str) -> dict[str, Any]:
    packed = re.search(r'id="rows">([A-Za-z0-9+/=]+)</script>', page)
    assert packed
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))  # type: ignore[no-any-return]


def test_a_failure_stands_there_with_sentence_diagnosis_and_replay_line(tmp_path: Path) -> None:
    bad = failing(case_id(heads=128, seed=3))
    words, _ = read(written(tmp_path, [record(), record(case_id(seed=1)), bad]))
    assert "No. 1 of 3 judged cases is wrong, in 1 way." in words
    assert (
        "out[3, 17, 211]=0.734375, but should be 0.367188 ±0.00123: outside the budget of the declared rounding "
        "points, 298 times; 77 of 8192 elements are out"
    ) in words
    assert "as if the main cache were decoded FNUZ (main-fnuz)" in words
    assert (
        "mla-oracle replay sparse_mla.decode:heads=128,kv_len=64,page=64,values=randn,seed=3 --impl ours-triton "
        "--on interpreter"
    ) in words


def test_only_the_axes_that_differ_are_printed_beside_the_full_id(tmp_path: Path) -> None:
    words, _ = read(written(tmp_path, [record(), record(case_id(seed=1)), failing(case_id(heads=128))]))
    assert "Case heads=128 + 4 usual" in words


def test_failures_of_one_diagnosis_are_one_group_whatever_their_numbers(tmp_path: Path) -> None:
    alike = [failing(case_id(seed=seed), checks=(beyond(100.0 + seed),)) for seed in range(5)]
    undiagnosed = [failing(case_id(seed=seed), checks=(beyond(10.0 + seed),), diagnosis=()) for seed in range(5, 8)]
    words, reader = read(written(tmp_path, [*alike, *undiagnosed]))
    assert "Wrong: 8 records in 2 ways" in words
    assert sum(tag == "article" for tag, _ in reader.tags) == 2
    assert "104 times" in words and "The other 4" in words


def test_what_a_group_shares_is_told_with_how_often_it_passes(tmp_path: Path) -> None:
    passing = [record(case_id(heads=heads, seed=seed)) for heads in (16, 32, 64) for seed in range(4)]
    bad = [failing(case_id(heads=128, seed=seed)) for seed in range(4)]
    words, _ = read(written(tmp_path, [*passing, *bad, record(case_id(heads=128, seed=9))]))
    assert "heads=128 (asked 5 times, 1 of those passes)" in words


def test_answers_of_others_to_a_failing_case_are_told(tmp_path: Path) -> None:
    bad = failing(impl="vllm-triton", fingerprint="aa")
    same = failing(impl="vllm-triton", on="isa:gfx942", fingerprint="aa")
    words, _ = read(written(tmp_path, [bad, same, record(fingerprint="bb")]))
    assert "vllm-triton on isa:gfx942, 1 case of these: same bytes 1" in words
    assert "ours-triton on interpreter, 2 cases of these: pass 2" in words


def test_executions_that_disagree_are_named(tmp_path: Path) -> None:
    words, _ = read(
        written(tmp_path, [record(fingerprint="aa"), failing(on="cuda", environment=GPU, fingerprint="bb")])
    )
    assert "fail on cuda, pass on interpreter" in words
    assert "0 of 1" in words


def test_an_interpreter_run_says_that_no_gpu_ran(tmp_path: Path) -> None:
    words, _ = read(written(tmp_path, [record()]))
    assert "No GPU ran: everything was executed on the CPU." in words
    assert "interpreter 1 record: no GPU ran." in words
    mixed, _ = read(written(tmp_path, [record(), record(on="cuda", environment=GPU)]))
    assert "No GPU ran:" not in mixed
    assert "cuda 1 record: ran on NVIDIA H200." in mixed
    assert "2.13.0+cpu" in mixed and "2.13.0+cu130" in mixed and "3f9ac1de0b7e" in mixed


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7*7 }}"


def test_nothing_in_a_record_becomes_markup(tmp_path: Path) -> None:
    check = changed(beyond(3.0), output=HOSTILE, got=HOSTILE, want=HOSTILE, why=HOSTILE)
    records = [
        failing(
            f"{OP}:heads={HOSTILE},seed=0", checks=(check,), diagnosis=(f"as if {HOSTILE}",), impl=HOSTILE, law=HOSTILE
        ),
        record(case_id(seed=1), status="error", checks=(), reasons=(HOSTILE,), on=HOSTILE),
        record(case_id(seed=2), status="unsupported", checks=(), reasons=(f"heads={HOSTILE}: {HOSTILE}", HOSTILE)),
        record(op=HOSTILE, case=f"{HOSTILE}:seed=1", precision=Precision(note=HOSTILE)),
        record(case_id(seed=4), environment=Environment(**dict.fromkeys(Environment.__struct_fields__, HOSTILE))),
    ]
    page = written(tmp_path, records, notes=[HOSTILE])
    words, reader = read(page)
    harmless, harmless_reader = read(written(tmp_path, [record(), failing(case_id(seed=1))]))
    assert "onerror" in words and "onerror" not in harmless
    for tag, attributes in reader.tags:
        assert tag != "img" and not any(name.startswith("on") for name in attributes), (tag, attributes)
    scripts = [attributes for tag, attributes in reader.tags if tag == "script"]
    assert scripts == [attributes for tag, attributes in harmless_reader.tags if tag == "script"]
    assert "{{ 7*7 }}" in words


def changed(check: Check, **changes: Any) -> Check:
    """The check with other fields."""
    return msgspec.structs.replace(check, **changes)


def test_the_page_names_nothing_outside_itself(tmp_path: Path) -> None:
    page = written(tmp_path, [record(), failing(case_id(seed=1))])
    _, reader = read(page)
    for tag, attributes in reader.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        for name in ("src", "href", "srcset", "action", "xlink:href"):
            value = attributes.get(name)
            assert value is None or value.startswith("#"), (tag, name, value)
    assert not re.search(r"url\((?!#)|@import|https?://", re.sub(r'id="rows">[^<]*', "", page))
    assert "default-src 'none'" in page


def test_ids_are_unique_and_links_lead_somewhere(tmp_path: Path) -> None:
    records = [
        record(case_id(op, seed=seed), checks=(within(0.1 + seed / 10),)) for op in (OP, "b.c") for seed in range(3)
    ]
    _, reader = read(written(tmp_path, [*records, failing(case_id(seed=7))]))
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = {attributes["href"] for tag, attributes in reader.tags if tag in ("a", "use")}
    assert {link.removeprefix("#") for link in links if link} <= set(ids)


def test_every_header_has_a_scope(tmp_path: Path) -> None:
    _, reader = read(written(tmp_path, many(300)))
    headers = [attributes for tag, attributes in reader.tags if tag == "th"]
    assert headers and all("scope" in attributes for attributes in headers)
    levels = [int(tag[1]) for tag, _ in reader.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_an_empty_run_says_so(tmp_path: Path) -> None:
    words, reader = read(written(tmp_path, []))
    assert "Nothing was run." in words
    assert not any(tag == "script" for tag, _ in reader.tags)


@pytest.mark.parametrize(
    ("records", "missing", "word"),
    [
        ([], 0, "Nothing was run."),
        ([record(status="unsupported", checks=(), reasons=("heads=12: no",))], 0, "Nothing was judged."),
        ([record()], 0, "Yes, as far as it was asked."),
        ([record()], 2, "Not finished."),
        ([record(), record(case_id(seed=1), status="vacuous", checks=())], 0, "Not settled."),
        ([record(), record(case_id(seed=1), status="crash", checks=())], 0, "No."),
        ([record(), record(case_id(seed=1), status="memory", checks=(within(0.1),))], 5, "No."),
    ],
)
def test_the_verdict_is_yes_only_when_all_that_was_planned_was_judged_and_passed(
    records: list[Record], missing: int, word: str
) -> None:
    _, said, sentence = answer(records, 1, missing)
    assert said == word
    assert ("no record yet" in sentence) == bool(missing)


def without_triton(**changes: Any) -> list[Record]:
    """A run of torch and host code, whose kernels had no Triton."""
    bare = msgspec.structs.replace(CPU, triton="")
    no: dict[str, Any] = {"status": "unsupported", "checks": (), "environment": bare, "precision": None}
    return [
        record(impl="torch-bf16", environment=bare, **changes),
        record(impl="ours-triton", reasons=("triton is not installed", "heads=16: no"), **no),
        *(record(case_id(seed=n), impl="vllm-triton", reasons=("no vLLM is installed",), **no) for n in range(3)),
    ]


@pytest.mark.parametrize(
    ("changes", "missing", "status", "said"),
    [
        ({}, 0, "vacuous", "No Triton kernel was judged: triton is not installed. The one judged case passed;"),
        ({}, 2, "vacuous", "Not finished, and no Triton kernel was judged: triton is not installed. The one"),
        (
            {"status": "crash", "checks": ()},
            0,
            "fail",
            "No, and no Triton kernel was judged: triton is not installed. 1 of",
        ),
    ],
)
def test_a_run_that_judged_no_triton_kernel_says_so_first_and_why(
    tmp_path: Path, changes: dict[str, Any], missing: int, status: str, said: str
) -> None:
    records = without_triton(**changes)
    assert answer(records, 1, missing)[0] == status
    words, _ = read(written(tmp_path, records, missing=missing))
    assert said in words and "Yes" not in words
    assert "arithmetic and addressing" not in words
    assert "no GPU ran, and no Triton kernel was interpreted: torch and host code answered on the CPU." in words
    assert "triton not installed" in words


def test_kernels_that_were_judged_are_said_to_be(tmp_path: Path) -> None:
    words, _ = read(written(tmp_path, [*without_triton()[:1], record()]))
    assert "Yes, as far as it was asked." in words and "No Triton kernel" not in words
    assert "their arithmetic and addressing are judged" in words


def test_a_run_that_asked_no_kernel_says_so() -> None:
    assert answer(without_triton()[:1], 0)[:2] == ("pass", "No Triton kernel was judged: none was asked.")
    on_a_device = record(impl="aiter-asm", on="hip", environment=GPU)
    assert answer([on_a_device], 0)[1] == "Yes, as far as it was asked."
    no_vllm = record(impl="vllm-triton", status="unsupported", checks=(), reasons=("no vLLM is installed",))
    silent = without_triton()[1:]
    assert answer(silent, 0)[1] == "Nothing was judged."
    assert answer(silent, 0)[2].startswith("No Triton kernel was judged: triton is not installed. All 4 cases")
    assert answer([on_a_device, no_vllm], 0)[1] == "No Triton kernel was judged: no vLLM is installed."


def test_what_gave_no_number_is_not_a_small_error() -> None:
    assert judged_use(record(status="crash", checks=())) == OFF_THE_SCALE
    assert judged_use(record(status="memory", checks=(within(0.1),))) == OFF_THE_SCALE
    assert judged_use(record(status="unsupported", checks=())) is None
    assert judged_use(record(status="vacuous", checks=())) is None
    assert judged_use(failing()) == 298.0


def test_unsupported_reasons_are_counted_over_the_values_of_their_axis(tmp_path: Path) -> None:
    records = [
        record(
            case_id(heads=heads), status="unsupported", checks=(), reasons=(f"heads={heads}: needs a multiple of 16",)
        )
        for heads in (12, 24, 4)
    ]
    words, _ = read(written(tmp_path, [*records, record()]))
    assert "3 ours-triton heads=4|12|24: needs a multiple of 16" in words


def test_coverage_precision_and_the_closest_case_are_there(tmp_path: Path) -> None:
    ledger = Ledger(
        op=OP, strength=2, total=100, covered=95, impossible=4, undecided=0, missed=1, examples=("heads=8, page=1",)
    )
    near = record(case_id(page=1), checks=(within(0.9996),), precision=Precision(probability="float32", note="line 88"))
    words, _ = read(written(tmp_path, [record(), near], coverage=[ledger], notes=["One line was cut off."]))
    assert "99.0 % 95 96 1 0 4" in words and "heads=8, page=1" in words
    assert "line 88" in words and "One line was cut off." in words
    assert "used 0.999 of its budget" in words, "rounding must not print a passing use as 1"


def many(count: int, wrong_every: int = 150) -> list[Record]:
    """Covering-array-like records: twenty axes, three implementations, sentences with many digits."""
    draw = random.Random(1)
    values = {f"axis_{number:02d}": [f"value{choice}" for choice in range(2 + number % 5)] for number in range(20)}
    records = []
    for number in range(count):
        impl = ("ours-triton", "vllm-triton", "torch-bf16")[number % 3]
        if number % 3 == 0:
            case = case_id(**{axis: draw.choice(words) for axis, words in values.items()}, seed=draw.randrange(10**6))
        if number % wrong_every == 1:
            use = draw.lognormvariate(4, 1)
            check = changed(
                beyond(1 + use), got=f"{draw.random():.9g}", want=f"{draw.random():.9g} ±{draw.random():.3g}"
            )
            records.append(failing(case, impl=impl, checks=(check,), diagnosis=()))
            continue
        use = min(0.99, draw.lognormvariate(-2, 0.6))
        check = changed(within(use), got=f"{draw.random():.9g}", want=f"{draw.random():.9g} ±{draw.random():.3g}")
        seconds = Seconds(build=draw.random(), run=draw.random(), reference=draw.random(), judge=draw.random())
        records.append(record(case, impl=impl, checks=(check,), seconds=seconds, finished=1.79e9 + number))
    return records


def test_ten_thousand_cases_fit_and_every_failure_stands_without_javascript(tmp_path: Path) -> None:
    records = many(10_000)
    page = written(tmp_path, records)
    assert len(page.encode()) < 2_000_000
    words, _ = read(page)
    bad = [item for item in records if item.status == "fail"]
    assert len(bad) == 67
    for item in bad:
        assert replay_line(item) in words
        assert re.sub(r"\s+", " ", str(item.checks[0])) in words


def test_a_run_in_which_everything_fails_still_fits(tmp_path: Path) -> None:
    records = many(10_000, wrong_every=2)
    page = written(tmp_path, records)
    assert len(page.encode()) < 2_000_000
    words, _ = read(page)
    assert "more of this group are only in All cases" in words


def test_the_rows_give_every_case_and_number_back(tmp_path: Path) -> None:
    odd = f"{OP}:kv_len=64,heads=16,page=64,values=randn,seed=5"
    records = [
        *many(30, wrong_every=7),
        record(odd),
        record("not an id", op="lost"),
        failing(law="M3 entries permuted"),
    ]
    data = rows_of(written(tmp_path, records))
    assert len(data["rows"]["op"]) == len(records)
    for place, item in enumerate(records):
        op = data["ops"][data["rows"]["op"][place]]
        number = data["rows"]["case"][place]
        cells = [
            f"{axis}={words[column[number]]}"
            for axis, words, column in zip(op["axes"], op["words"], op["cells"], strict=True)
            if column[number] >= 0
        ]
        assert op["odd"].get(str(number), f"{op['name']}:{','.join(cells)}") == item.case
        assert data["statuses"][data["rows"]["status"][place]] == item.status
        assert data["laws"][data["rows"]["law"][place]] == item.law
        assert data["rows"]["use"][place] == pytest.approx(item.use, rel=5e-3)


def test_an_unwritable_place_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "report.html"
    write_report([record()], out, title="old")
    before = out.read_bytes()

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:100])
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        write_report([failing()], out, title="new")
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]


def test_whoever_reads_the_old_report_still_reads_it(tmp_path: Path) -> None:
    out = write_report([record()], tmp_path / "report.html", title="old")
    before = out.read_bytes()
    reader = tmp_path / "reader.html"
    reader.hardlink_to(out)
    write_report([failing()], out, title="new")
    assert reader.read_bytes() == before != out.read_bytes()


def test_a_lone_surrogate_does_not_stop_the_report(tmp_path: Path) -> None:
    page = written(tmp_path, [record(status="error", checks=(), reasons=("bad \ud800 byte",))])
    assert "bad \\ud800 byte" in unescape(page)


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    records = many(200)
    assert written(tmp_path, records) == written(tmp_path, records)


def begun(run: Path, planned: int, answered: int) -> Path:
    """A run directory with some of its records."""
    tasks = [Task(case=case_id(seed=seed), impl="ours-triton", on="interpreter", item="a") for seed in range(planned)]
    create_run(run, Settings(on=("interpreter",)), tasks)
    file = RecordFile(run / "records" / "gw0.jsonl")
    for task in tasks[:answered]:
        file.start(task)
        file.record(record(task.case))
    file.close()
    return run


def test_a_run_that_stopped_half_way_says_so_and_shows_what_is_there(tmp_path: Path) -> None:
    words, _ = read(report_run(begun(tmp_path / "run-8", 3, 2)).read_text(encoding="utf-8"))
    assert "run-8" in words
    assert (
        "This run stopped before its end. 2 of 3 planned questions have a record; the page shows what is there."
        in words
    )
    assert "Not finished. All 2 judged cases passed; the closest to its limit used 0.250 of its budget." in words
    assert "1 planned case has no record yet." in words


def test_a_run_that_a_sweep_is_at_says_so(tmp_path: Path) -> None:
    run = begun(tmp_path / "run-8", 3, 0)
    with held(run):
        words, _ = read(report_run(run).read_text(encoding="utf-8"))
    assert "This run is still being written. 0 of 3 planned questions have a record" in words
    assert "Nothing was run." in words


def test_a_finished_run_says_neither(tmp_path: Path) -> None:
    words, _ = read(report_run(begun(tmp_path / "run-8", 2, 2)).read_text(encoding="utf-8"))
    assert "This run" not in words


def test_a_shard_says_that_the_other_cases_are_elsewhere(tmp_path: Path) -> None:
    create_run(tmp_path / "run", Settings(on=("interpreter",), shard="2/5"), [])
    assert "Shard 2/5 of a plan" in read(report_run(tmp_path / "run").read_text(encoding="utf-8"))[0]


def links(reader: Reader) -> list[str]:
    return [href for tag, attributes in reader.tags if (href := attributes.get("href")) and not href.startswith("#")]


def test_a_capsule_is_a_link_in_the_run_and_a_path_elsewhere(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "capsules").mkdir(parents=True)
    (run / "capsules" / "a 1.safetensors").touch()
    bad = [failing(case_id(seed=seed), capsule="capsules/a 1.safetensors") for seed in range(2)]
    inside = write_report(bad, run / "report.html", title="run", run=run)
    assert links(read(inside.read_text())[1]) == ["capsules/a%201.safetensors"] * 2
    words, reader = read(write_report(bad, tmp_path / "elsewhere.html", title="run", run=run).read_text())
    assert links(reader) == [] and f"Capsule {run}/capsules/a 1.safetensors" in words


@pytest.mark.parametrize("capsule", ["capsules/gone", "../secret", "/etc/passwd", "javascript:alert(1)"])
def test_what_is_no_file_of_the_run_is_no_link(tmp_path: Path, capsule: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "secret").touch()
    (run / "javascript:alert(1)").touch()
    words, reader = read(write_report([failing(capsule=capsule)], run / "report.html", title="", run=run).read_text())
    assert links(reader) == [] and f"{capsule}, which is not in the run's directory" in words


def test_what_died_is_told_apart_from_what_is_wrong(tmp_path: Path) -> None:
    records = [
        failing(case_id(seed=1)),
        record(case_id(seed=2), status="crash", checks=(), reasons=("the worker died: Segmentation fault",)),
        record(case_id(seed=3), status="error", checks=(), reasons=(f"{LOST}CUDA error 700",)),
        record(case_id(seed=4), status="error", checks=(), reasons=("the harness itself broke in judging: oh",)),
        record(case_id(seed=5), status="error", checks=(), reasons=("ValueError: no",)),
    ]
    words, _ = read(written(tmp_path, records))
    assert "5 of 5 judged cases are wrong, in 5 ways; 2 of them died before there was an answer." in words
    assert "Wrong: 2 records in 2 ways" in words
    assert "Died before it answered: 2 records" in words
    assert words.index("ValueError: no") < words.index("Died before it answered") < words.index("CUDA error 700")
    assert words.index("CUDA error 700") < words.index("The harness itself broke") < words.index("broke in judging: oh")


def test_a_case_that_was_asked_again_is_visible_even_when_it_then_passed(tmp_path: Path) -> None:
    before = Attempt(status="hang", reasons=("no answer after 300 s",))
    page = written(tmp_path, [record(case_id(seed=1), attempts=(before,)), record()])
    words, _ = read(page)
    assert "1 case ended in a crash, a hang or a lost device and was asked once more." in words
    assert "Asked again" in words and "hang before: no answer after 300 s" in words
    assert "hang before: no answer after 300 s" in rows_of(page)["texts"]
    assert "Asked again" not in read(written(tmp_path, [record()]))[0]


def prints(page: str) -> set[str]:
    return set(re.findall(r'id="wrong-([0-9a-f]+)"', page))


def test_a_kind_of_failure_has_one_name_in_every_run(tmp_path: Path) -> None:
    one = prints(written(tmp_path, [failing(checks=(beyond(5.0),), diagnosis=())]))
    again = prints(written(tmp_path, [failing(case_id(seed=9), checks=(beyond(81.5),), diagnosis=()), record()]))
    other = prints(written(tmp_path, [failing(), failing(impl="vllm-triton", checks=(beyond(5.0),), diagnosis=())]))
    assert one == again and len(one) == 1
    assert len(other) == 2 and not one & other


def proof(**changes: Any) -> Proof:
    caught = Kill(
        op=OP, mutant="main-fnuz", pitfall="the cache were FNUZ", observable=6, caught=6, caught_on=case_id(heads=128),
        caught_by="out[0]=1, but should be 2: beyond",
    )  # fmt: skip
    fields: dict[str, Any] = {
        "op": OP, "level": "default", "kills": (caught,), "clean": 2000, "alarms": (), "looseness": (2.0, 3.0, 7.0),
    }  # fmt: skip
    return Proof(**{**fields, **changes})


def test_the_kill_matrix_names_survivors_alarms_and_what_caught_a_mutant_first(tmp_path: Path) -> None:
    missed = Kill(op=OP, mutant="sink-lost", pitfall="the sink were lost", observable=4, missed_on=case_id(heads=8))
    unseen = Kill(op=OP, mutant="never", pitfall="nobody looked", unobservable=9)
    alarm = Alarm(case=case_id(heads=64), honest="two-pass", sentence="out[1]=3, but should be 4")
    bad = proof(kills=(*proof().kills, missed, unseen), alarms=(alarm,))
    words, _ = read(written(tmp_path, [record()], proofs=[bad, proof(op="formats.cast", kills=(), looseness=())]))
    assert f"{OP} no 1 of 3 sink-lost, never 1 in 2,000 3.00" in words
    assert "formats.cast yes 0 of 0 none 0 in 2,000 exact" in words
    assert "main-fnuz as if the cache were FNUZ 6 of 6 0 the usual case out[0]=1, but should be 2" in words
    assert "survives, missed on heads=8" in words and "survives: no case of the sweep shows it" in words
    assert "two-pass: out[1]=3, but should be 4 heads=64" in words


def row(key: str, **changes: Any) -> Row:
    """A kernel in one configuration; `taken` changes what it takes."""
    taken = {
        "vgpr": 128, "agpr": 32, "sgpr": 48, "vgpr_spills": 0, "sgpr_spills": 0, "scratch": 0, "lds": 1024,
        "lds_limit": 65536, "waves": 4.0, "limit": "vgpr", "matrix": {"v_mfma_f32_16x16x16_bf16": 12}, "code": 4096,
        "instructions": 900, **changes.pop("taken", {}),
    }  # fmt: skip
    fields: dict[str, Any] = {
        "kernel": "_attend", "module": "impl.sparse_mla.decode_triton", "arch": "gfx942", "key": key, "seconds": 2.0,
        "constants": {"HEADS": "16", "BLOCK": key}, "options": {"num_warps": "4"}, "arguments": "heads:i32/16",
        "asked": (Asked(op=OP, impl="ours-triton", call=case_id(), position=0, inputs="meta"),),
        "resources": Resources(**taken),
    }  # fmt: skip
    return Row(**{**fields, **changes})


def compiled(*rows: Row, **changes: Any) -> Report:
    return Report(triton="3.8.0", torch="2.13", arches=("gfx942", "gfx950"), rows=rows, **changes)


def test_a_run_says_what_its_kernels_take_of_gpus_that_are_not_here(tmp_path: Path) -> None:
    found = compiled(
        row("32"),
        row("64", taken={"vgpr_spills": 7, "sgpr_spills": 2, "scratch": 5000}),
        row("16", arch="gfx950", taken={"lds_limit": 163840, "matrix": {}}),
    )
    words, _ = read(written(tmp_path, [record()], compiled=found))
    assert (
        "Compiled ahead of time for gfx942 and gfx950 by Triton 3.8.0, in the configurations in which a server launches the "
        "kernels. No GPU was needed and nothing was run: what stands here is what the machine code takes, not whether it is "
        "right, nor how fast. They fit. 3 compilations of 1 kernel, none of which failed."
    ) in words
    # Of each architecture the heaviest, then all of them below, and of each what differs.
    heaviest = (
        "_attend on gfx942 impl.sparse_mla.decode_triton, 2 configurations 128 32 48 7 + 2 5,000 1,024 of 65,536 4 vgpr 12 "
        "v_mfma_f32_16x16x16_bf16 4,096 900 2.0 s _attend on gfx950 impl.sparse_mla.decode_triton, 1 configuration 128 32 48 "
        "0 0 1,024 of 163,840 4 vgpr 4,096 900 2.0 s"
    )
    every = (
        "_attend impl.sparse_mla.decode_triton, 3 configurations Launched by sparse_mla.decode ours-triton. HEADS=16 "
        "num_warps=4 Configuration VGPR AGPR SGPR Spills Scratch LDS Waves Matrix instructions Code Instructions "
        "Compiled in gfx942 BLOCK=64 128 32 48 7 + 2"
    )
    assert heaviest in words and every in words and words.index(heaviest) < words.index(every)
    assert words.index("gfx942 BLOCK=64") < words.index("gfx942 BLOCK=32")
    assert "were made with Triton" not in words and "What failed" not in words
    assert "Compiled for AMD GPUs" not in read(written(tmp_path, [record()]))[0]


def test_what_does_not_compile_stands_first_and_in_the_verdict(tmp_path: Path) -> None:
    gone = row("x", kernel="_zero", failure="crash", sentence="the compiler died with SIGSEGV", resources=None)
    large = row("y", arch="gfx950", failure="lds", sentence="it needs 200000 bytes", taken={"lds": 200000})
    broken = Unasked(op=OP, impl="vllm-triton", arch="gfx942", call="c", reasons=("it raised KeyError",), broke=True)
    words, reader = read(written(tmp_path, [record()], compiled=compiled(row("1"), gone, large, unasked=(broken,))))
    said = "Of 3 compilations of 2 kernels, 2 compilations failed, 1 wrapper broke."
    assert f"Compiled ahead of time for AMD GPUs: {said}" in words and f"They do not fit. {said}" in words
    assert f"{OP} ours-triton _zero on gfx942 crash the compiler died with SIGSEGV HEADS=16" in words
    assert f"{OP} vllm-triton on gfx942 wrapper it raised KeyError c" in words
    names = [words.index(name) for name in ("_attend on gfx950 impl", "_zero on gfx942 impl", "_attend on gfx942 impl")]
    assert names == sorted(names)
    assert ("a", {"href": "#compiled"}) in reader.tags


def test_configurations_that_differ_in_types_alone_are_told_apart(tmp_path: Path) -> None:
    same = {"constants": {"HEADS": "16"}}
    found = compiled(row("1", **same), row("2", arguments="heads:i32 more:*bf16", taken={"vgpr": 9}, **same))
    words, _ = read(written(tmp_path, [record()], compiled=found))
    assert "gfx942 heads:i32/16 128 32" in words and "gfx942 heads:i32 more:*bf16 9 32" in words


def test_other_versions_of_triton_than_the_run_s_are_said(tmp_path: Path) -> None:
    words, _ = read(written(tmp_path, [record()], compiled=msgspec.structs.replace(compiled(row("1")), triton="3.9.0")))
    assert "The records of this run were made with Triton 3.8.0, which may emit other machine code." in words


def test_compiled_kernels_are_shown_of_a_run_without_records_and_of_no_kernel(tmp_path: Path) -> None:
    words, _ = read(written(tmp_path, [], compiled=compiled(row("1"))))
    assert "Nothing was run." in words and "_attend on gfx942" in words
    words, _ = read(written(tmp_path, [record()], compiled=compiled()))
    assert "Nothing compiled. No implementation that was chosen launches a kernel here." in words


def test_hostile_words_of_compiled_kernels_are_words(tmp_path: Path) -> None:
    evil = "</section><script>alert(1)</script>"
    bad = Unasked(op=evil, impl=evil, arch=evil, call=evil, reasons=(evil,))
    rows = [
        row(
            evil, kernel=evil, module=evil, arch=evil, constants={evil: evil}, options={evil: evil}, arguments=f"{evil}:{evil}",
            asked=(Asked(op=evil, impl=evil, call=evil, position=0, inputs="meta"),), notes=(evil,), sentence=evil,
            failure=failure, taken={"limit": evil, "matrix": {evil: 1}},
        )
        for failure in ("", "lds")
    ]  # fmt: skip
    found = compiled(*rows, unasked=(bad, msgspec.structs.replace(bad, broke=True)), vllm=evil, aiter=evil)
    page = written(tmp_path, [record()], compiled=msgspec.structs.replace(found, triton=evil, arches=(evil,)))
    words, reader = read(page)
    assert [tag for tag, _ in reader.tags].count("script") == 2 and "<script>alert" not in page
    assert words.count(evil) > 20


def test_what_all_kernels_take_leaves_the_page_small(tmp_path: Path) -> None:
    without = written(tmp_path, [record()])
    rows = [
        row(str(number), kernel=f"_kernel_{number % 70}", arch=("gfx942", "gfx950")[number // 70 % 2])
        for number in range(740)
    ]
    page = written(tmp_path, [record()], compiled=compiled(*rows))
    assert len(page) - len(without) < 600_000


def test_compile_time_stands_against_run_time(tmp_path: Path) -> None:
    slow = record(seconds=Seconds(run=4.0, compile=3.0), on="cuda", environment=GPU)
    quick = record(case_id(seed=1), seconds=Seconds(run=0.5), on="cuda", environment=GPU)
    words, _ = read(written(tmp_path, [slow, quick]))
    assert "1 record compiled kernels: 3.0 s of compiling, 1.5 s of running without it." in words
    assert f"{OP} ours-triton on cuda 2 1 3.0 s 1.5 s 66.7 % 3.0 s" in words
    nothing, _ = read(written(tmp_path, [record()]))
    assert "Nothing was compiled in this run: the interpreter executes kernels without compiling them." in nothing


def test_the_most_telling_pair_of_axes_stands_in_the_page(tmp_path: Path) -> None:
    draw = random.Random(4)
    records = []
    for seed in range(200):
        heads, layout, noise = draw.choice((16, 128)), draw.choice(("dense", "strided")), draw.choice("abc")
        # Neither axis says anything alone.
        wrong = (heads == 128) != (layout == "strided")
        case = case_id(heads=heads, layout=layout, noise=noise, seed=seed)
        records.append(failing(case, checks=(beyond(50.0),)) if wrong else record(case, checks=(within(0.02),)))
    words, _ = read(written(tmp_path, records))
    assert f"{OP} ours-triton on interpreter, " in words
    one = "heads ↓ layout → dense strided 16 0.0200 ✕ 50.0 128 ✕ 50.0 0.0200"
    other = "layout ↓ heads → 16 128 dense 0.0200 ✕ 50.0 strided ✕ 50.0 0.0200"
    assert (one in words) != (other in words)


def test_an_op_without_any_error_has_no_tables(tmp_path: Path) -> None:
    exact = [record(case_id("a.b", heads=heads), checks=(within(0.0),)) for heads in (16, 32)]
    words, _ = read(written(tmp_path, exact))
    assert "Without any error, so without tables: a.b (2 judged)." in words


def test_where_tables_do_not_fit_their_axes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [
        record(case_id(heads=2**seed % 7, seed=seed), checks=(within(0.1 + seed % 7 / 10),)) for seed in range(60)
    ]
    words, _ = read(written(tmp_path, records))
    assert "value cases wrong worst median 1 20" in words and "Left out" not in words
    monkeypatch.setattr("reports.html.axes._MOST_CELLS", 5)
    words, _ = read(written(tmp_path, records))
    assert "value cases wrong worst median 1 20" not in words
    assert "Left out to keep the page small, and to be had from the map of two axes: heads." in words


def test_a_family_stands_open_only_for_a_finding_when_there_are_many_ops(tmp_path: Path) -> None:
    records = [record(case_id(f"{family}.op{number}")) for family in ("one", "two") for number in range(8)]
    _, reader = read(written(tmp_path, [*records, failing(case_id("two.op3", seed=4))]))
    opened = {
        attributes["id"]: "open" in attributes
        for _, attributes in reader.tags
        if "family" in str(attributes.get("class"))
    }
    assert opened == {"family-1": False, "family-2": True}
    _, reader = read(written(tmp_path, records[:4]))
    assert all("open" in found for _, found in reader.tags if "family" in str(found.get("class")))


def test_the_overview_has_a_column_for_each_library_and_a_line_for_who_is_silent(tmp_path: Path) -> None:
    no = {"status": "unsupported", "checks": (), "reasons": ("no HIP device",)}
    records = [record(), record(impl="vllm-triton"), record(impl="aiter-asm", **no), record(impl="aiter-gluon", **no)]
    words, _ = read(written(tmp_path, records))
    assert (
        "Op ours vllm aiter sparse_mla.decode 0.250 triton 1 pass 0.250 triton 1 pass asm, gluon: unsupported" in words
    )


def test_fifty_five_ops_by_many_implementations_fit_and_stay_short(tmp_path: Path) -> None:
    ops = [
        f"{family}.op_{number:02d}"
        for family in ("dense_mla", "sparse_mla", "cache", "dcp", "quant")
        for number in range(11)
    ]
    records = []
    for number, item in enumerate(many(10_000)):
        op = ops[number // 3 % len(ops)]
        impl = ("ours-triton", f"vllm-{number % 5}", f"aiter-{number % 7}")[number % 3]
        records.append(msgspec.structs.replace(item, case=item.case.replace(OP, op), op=op, impl=impl))
    kills = [
        Kill(
            op=item.op, mutant=f"mutant-{at}", pitfall="it were not so", observable=6, caught=6, caught_on=item.case,
            caught_by="x" * 200,
        )
        for at, item in enumerate(records[:1200])
    ]  # fmt: skip
    proofs = [proof(op=op, kills=tuple(kill for kill in kills if kill.op == op)) for op in ops]
    page = written(tmp_path, records, proofs=proofs)
    assert len(page.encode()) < 2_000_000


def test_the_middle_of_a_number_and_no_number_is_no_number() -> None:
    assert middle([0.5, OFF_THE_SCALE]) == OFF_THE_SCALE
    assert middle([0.5, 0.7, OFF_THE_SCALE]) == 0.7
    assert middle([0.2, 0.4]) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("use", "step", "words"),
    [
        (0.0, 0, "0"),
        (1e-5, 1, "1e-5"),
        (0.02, 3, "0.0200"),
        (0.4999, 6, "0.500"),
        (0.99999, 7, "0.999"),
        (1.0, figures.OVER, "1.00"),
        (298.4, figures.OVER, "298"),
        (OFF_THE_SCALE, figures.OVER, "∞"),
        (None, -1, "–"),
    ],
)
def test_a_use_has_one_colour_and_one_spelling(use: float | None, step: int, words: str) -> None:
    assert figures.heat(use) == step
    assert figures.spelled_use(use) == words


def test_a_curve_ends_at_the_share_that_is_within_the_limit() -> None:
    across, up = figures.cumulated([0.1, 0.2, 0.4, OFF_THE_SCALE])
    assert across[1:4] == [0.1, 0.2, 0.4]
    assert up[1:4] == [0.25, 0.5, 0.75] and up[-1] == 0.75
