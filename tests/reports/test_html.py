"""Does the page say what the records say, all of it, and nothing that they do not?"""

import base64
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
from oracle.check import OFF_THE_SCALE, Check
from reports import figures
from reports.html import answer, judged_use, replay_line, report_run, write_report
from reports.record import Environment, Record, Seconds

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
        raise OSError("no space left on device")

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


def test_a_run_directory_becomes_a_report_that_counts_what_is_missing(tmp_path: Path) -> None:
    from reports.store import RecordFile, Settings, Task, create_run

    run = tmp_path / "run-8"
    tasks = [Task(case=case_id(seed=seed), impl="ours-triton", on="interpreter", item="a") for seed in range(3)]
    create_run(run, Settings(on=("interpreter",)), tasks)
    (run / "records").mkdir(exist_ok=True)
    file = RecordFile(run / "records" / "gw0.jsonl")
    for task in tasks[:2]:
        file.start(task)
        file.record(record(task.case))
    file.close()
    words, _ = read(report_run(run).read_text(encoding="utf-8"))
    assert "run-8" in words
    assert "Not finished. All 2 judged cases passed; the closest to its limit used 0.250 of its budget." in words
    assert "1 planned case has no record yet." in words


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
