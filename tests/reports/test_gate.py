"""Does the gate close for what its policy names, and for nothing else?"""

import datetime
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

import reports.gate
from oracle.check import OFF_THE_SCALE
from reports.commands import run as command
from reports.diff import Diff, Growth, Move
from reports.gate import Finding, GateResult, judge
from reports.known_failures import read_known
from reports.policy import AGAINST, DEFAULT_TEXT, KEYS, Policy, PolicyError, read_policy
from reports.record import LOST, Attempt, Record
from reports.store import RecordFile, Run, create_run
from tests.reports.gate_records import BAD, GOOD, HERE, OP, TODAY, record, run_of

DOCS = Path(__file__).parents[2] / "docs" / "ci"


def on_disk(path: Path, *records: Record, more: int = 0) -> Path:
    run = run_of(*records, more=more)
    create_run(path, run.settings, run.plan)
    file = RecordFile(path / "records" / "0001-hip-gw0-1.jsonl")
    for each in records:
        file.record(each)
    file.close()
    return path


def rules(result: GateResult) -> dict[str, bool]:
    """Each rule that found something, and whether it closes."""
    found: dict[str, bool] = {}
    for finding in result.findings:
        found[finding.rule] = found.get(finding.rule, False) or finding.closes
    return found


def only(result: GateResult, rule: str) -> Finding:
    (finding,) = (each for each in result.findings if each.rule == rule)
    return finding


def known_of(tmp_path: Path, text: str = "", **changes: str) -> Path:
    words = {
        "impl": '"ours-triton"', "case": '"rows=1"', "issue": '"https://example.org/7"', "owner": '"ada"',
        "since": "2026-06-01", "expires": "2026-06-30", "why": '"w"', **changes,
    }  # fmt: skip
    path = tmp_path / "known.toml"
    path.write_text(text or "[[known]]\n" + "".join(f"{key} = {word}\n" for key, word in words.items()))
    return path


# The policy.


def test_the_written_policy_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "gate.toml"
    path.write_text(DEFAULT_TEXT)
    assert read_policy(path) == Policy()
    assert all(f"\n{key} = " in DEFAULT_TEXT for key in KEYS)


def test_the_ready_files_are_read_as_they_stand() -> None:
    assert (DOCS / "gate.toml").read_text() == DEFAULT_TEXT
    assert read_known(DOCS / "known.toml", datetime.date(2026, 11, 1))


def test_an_empty_policy_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "gate.toml").write_text("# nothing\n")
    assert read_policy(tmp_path / "gate.toml") == Policy()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('\nstatusses = ["fail"]', r"gate.toml line 2: unknown key 'statusses'; the keys are implementations, ops, statuses"),
        ("[rules]\na = 1", r"gate.toml line 1: unknown key 'rules'"),
        ('unfinished = "closes"', r"line 1: unfinished: Invalid enum value 'closes'; it should be \"close\" or \"report\""),
        ("unfinished = true", r"line 1: unfinished: .*; it should be \"close\" or \"report\""),
        ('statuses = ["fail", "pass"]', r"line 1: statuses: Invalid enum value 'pass'; it should be a list out of fail, memory"),
        ('statuses = "fail"', r"line 1: statuses: Expected `array`, got `str`; it should be a list out of"),
        ("statuses = []", r"line 1: statuses is empty; it should be a list out of"),
        ("ops = []", r"line 1: ops is empty; it should be a list of names or patterns"),
        ('ops = [""]', r"line 1: ops holds an empty word"),
        ("implementations = [3]", r"line 1: implementations: Expected `str`, got `int`"),
        ("error_growth = 0.5", r"line 1: error_growth: 0.5; it should be .* a ratio of 1 or more"),
        ("error_growth = nan", r"line 1: error_growth: nan; it should be"),
        ("error_growth = inf", r"line 1: error_growth: inf; it should be"),
        ('error_growth = "any"', r"line 1: error_growth: .*; it should be \"close\", \"report\", or a ratio"),
        ("unfinished = ", r"gate.toml: Invalid value .*; it should be TOML, a policy as"),
        ('ops = ["*"]\nops = ["*"]', r"gate.toml: .*; it should be TOML"),
    ],
)  # fmt: skip
def test_a_wrong_policy_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "gate.toml"
    path.write_text(text)
    with pytest.raises(PolicyError, match=sentence) as caught:
        read_policy(path)
    assert "\n" not in str(caught.value)


# What closes.


def test_a_run_in_which_everything_judged_passed_opens() -> None:
    result = judge(run_of(record(1), record(2), record(3, "unsupported")), Policy(), today=TODAY)
    assert not result.closed
    assert result.findings == ()
    assert result.sentence == "the gate is open: 2 passed, 1 unsupported"


@pytest.mark.parametrize("status", AGAINST)
def test_every_status_closes_unless_the_policy_lets_it_be(status: str) -> None:
    run = run_of(record(1), record(2, status))
    closed = judge(run, Policy(), today=TODAY)
    assert rules(closed) == {"statuses": True}
    others: tuple[Any, ...] = tuple(each for each in AGAINST if each != status)
    opened = judge(run, Policy(statuses=others), today=TODAY)
    assert rules(opened) == {"statuses": False}
    assert not opened.closed
    assert rules(judge(run, Policy(statuses=(status,)), today=TODAY)) == {"statuses": True}  # type: ignore[arg-type]


def test_a_lost_device_counts_as_a_crash() -> None:
    run = run_of(record(1), record(2, "error", reasons=(f"{LOST}hipErrorUnknown",)))
    assert only(judge(run, Policy(), today=TODAY), "statuses").kind == "infrastructure"
    assert not judge(run, Policy(statuses=("fail", "error")), today=TODAY).closed
    assert judge(run, Policy(statuses=("crash",)), today=TODAY).closed


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("fail", "answer"),
        ("memory", "answer"),
        ("error", "answer"),
        ("crash", "infrastructure"),
        ("hang", "infrastructure"),
    ],
)
def test_infrastructure_is_told_apart(status: str, kind: str) -> None:
    assert only(judge(run_of(record(1, status)), Policy(), today=TODAY), "statuses").kind == kind


def test_a_broken_harness_closes_whatever_the_policy_says(tmp_path: Path) -> None:
    run = run_of(record(1, "error", reasons=("the harness itself broke in judging: KeyError: x",)))
    known = read_known(known_of(tmp_path, status='"error"'))
    found = only(judge(run, Policy(statuses=("fail",)), known, today=TODAY), "harness")
    assert (found.closes, found.kind) == (True, "harness")


@pytest.mark.parametrize("policy", [Policy(implementations=("vllm-*",)), Policy(ops=("dense_mla.*",))])
def test_a_broken_harness_closes_wherever_it_broke(policy: Policy) -> None:
    broken = record(1, "error", reasons=("the harness itself broke in judging: KeyError: x",))
    inside = record(1, impl="vllm-triton", op="dense_mla.decode")
    result = judge(
        run_of(broken, record(2, "fail"), inside, record(3, impl="vllm-triton"), record(1, op="dense_mla.decode")),
        policy,
        today=TODAY,
    )
    assert rules(result) == {"harness": True}
    assert result.closed


def test_failures_of_one_kind_are_one_finding_and_others_are_their_own() -> None:
    other = msgspec.structs.replace(BAD, output="lse")
    run = run_of(
        record(1, "fail"), record(2, "fail"), record(3, "fail", checks=(other,)), record(4, "fail", impl="vllm-triton")
    )
    result = judge(run, Policy(), today=TODAY)
    assert [(each.count, each.impl, each.title.partition(":")[0]) for each in result.findings] == [
        (2, "ours-triton", "out"), (1, "ours-triton", "lse"), (1, "vllm-triton", "out"),
    ]  # fmt: skip
    assert len({each.fingerprint for each in result.findings}) == 3


def test_a_finding_keeps_its_fingerprint_from_run_to_run() -> None:
    first = judge(run_of(record(1, "fail")), Policy(), today=TODAY).findings[0]
    loud = msgspec.structs.replace(BAD, use=77.0, why="outside the budget, 77 times; 4 of 4 elements are out")
    second = judge(run_of(record(5, "fail", checks=(loud,)), name="x"), Policy(), today=TODAY).findings[0]
    assert first.fingerprint == second.fingerprint


def test_the_worst_case_speaks_for_its_finding() -> None:
    worse = msgspec.structs.replace(BAD, use=9.0)
    result = judge(run_of(record(1, "fail"), record(2, "fail", checks=(worse,))), Policy(), today=TODAY)
    (finding,) = result.findings
    assert finding.replay == f"mla-oracle replay {OP}:rows=2,seed=0 --impl ours-triton --on hip"


def test_the_replay_line_names_the_trees() -> None:
    result = judge(run_of(record(1, "fail"), vllm="/src/my vllm"), Policy(), today=TODAY)
    assert result.findings[0].replay.endswith("--vllm '/src/my vllm'")


@pytest.mark.parametrize(
    ("policy", "closed"),
    [
        (Policy(implementations=("ours-*",)), True),
        (Policy(implementations=("vllm-*",)), False),
        (Policy(ops=("sparse_mla.*",)), True),
        (Policy(ops=("dense_mla.*",)), False),
        (Policy(implementations=("ours-*", "vllm-*"), ops=("dense_mla.*", "sparse_mla.decode")), True),
    ],
)
def test_only_what_the_policy_looks_at_counts(policy: Policy, closed: bool) -> None:
    run = run_of(
        record(1, "fail"), record(1, impl="vllm-triton"), record(1, op="dense_mla.decode"),
        record(1, op="dense_mla.decode", impl="vllm-triton"),
    )  # fmt: skip
    assert judge(run, policy, today=TODAY).closed == closed


@pytest.mark.parametrize("action", ["close", "report"])
def test_an_unfinished_run(action: Any) -> None:
    result = judge(run_of(record(1), more=2), Policy(unfinished=action), today=TODAY)
    assert rules(result) == {"unfinished": action == "close"}
    found = only(result, "unfinished")
    assert found.count == 2
    assert "1 of 3 tasks have a record; it should be finished: mla-oracle sweep --resume run" in found.sentence


@pytest.mark.parametrize("action", ["close", "report"])
def test_a_single_shard_is_no_whole_run(action: Any) -> None:
    result = judge(run_of(record(1), shard="1/4"), Policy(unfinished=action), today=TODAY)
    assert rules(result) == {"unfinished": action == "close"}
    assert "shard 1/4" in only(result, "unfinished").sentence


@pytest.mark.parametrize("action", ["close", "report"])
def test_a_run_in_which_nothing_was_judged(action: Any) -> None:
    result = judge(run_of(record(1, "unsupported")), Policy(nothing_judged=action), today=TODAY)
    assert rules(result) == {"nothing_judged": action == "close"}
    assert "its only record is unsupported" in only(result, "nothing_judged").sentence


def test_a_pattern_that_fits_nothing_is_nothing_judged_and_said_where_others_fit() -> None:
    alone = judge(run_of(record(1)), Policy(implementations=("vlm-*",)), today=TODAY)
    assert rules(alone) == {"nothing_judged": True}
    assert "implementations 'vlm-*' fit nothing" in only(alone, "nothing_judged").sentence
    beside = judge(run_of(record(1)), Policy(implementations=("ours-*", "vlm-*")), today=TODAY)
    assert rules(beside) == {"nothing_judged": False}


@pytest.mark.parametrize("action", ["close", "report"])
def test_what_passed_only_when_asked_again_is_visible(action: Any) -> None:
    again = record(1, attempts=(Attempt(status="crash", reasons=("the worker died: Fatal",)),))
    result = judge(run_of(again, record(2)), Policy(retried=action), today=TODAY)
    assert rules(result) == {"retried": action == "close"}
    found = only(result, "retried")
    assert (found.kind, found.cases) == ("infrastructure", (again.case,))
    assert "crash: the worker died: Fatal" in found.sentence


def test_what_failed_when_asked_again_is_a_failure_that_shows_its_first_end() -> None:
    again = record(1, "fail", attempts=(Attempt(status="hang", reasons=("no answer after 3 s",)),))
    found = only(judge(run_of(again), Policy(), today=TODAY), "statuses")
    assert found.kind == "answer"
    assert "asked again: it ended before as hang, no answer after 3 s" in found.details


@pytest.mark.parametrize("status", ["fail", "memory", "error", "crash", "hang", "vacuous", "unsupported"])
@pytest.mark.parametrize("action", ["close", "report"])
def test_whatever_was_asked_again_is_visible_however_it_ended(status: str, action: Any) -> None:
    again = record(1, status, attempts=(Attempt(status="crash", reasons=("the worker left no trace",)),))
    others: tuple[Any, ...] = tuple(each for each in AGAINST if each != status)
    result = judge(run_of(again, record(2)), Policy(retried=action, statuses=others), today=TODAY)
    found = only(result, "retried")
    assert (found.closes, found.kind, found.cases) == (action == "close", "infrastructure", (again.case,))
    assert found.title == f"crash at first, {status} when asked again"
    assert "crash: the worker left no trace" in found.sentence
    assert result.closed == (action == "close")


def test_every_end_before_is_told() -> None:
    ends = (Attempt(status="crash", reasons=("no trace",)), Attempt(status="hang", reasons=("no answer",)))
    found = only(judge(run_of(record(1, attempts=ends)), Policy(), today=TODAY), "retried")
    assert found.sentence == "passed when asked again; it ended before as crash: no trace, then as hang: no answer"


def test_a_known_failure_that_was_asked_again_is_visible(tmp_path: Path) -> None:
    again = record(1, "fail", attempts=(Attempt(status="crash", reasons=("the worker left no trace",)),))
    assert rules(judge(run_of(again), Policy(), read_known(known_of(tmp_path)), today=TODAY)) == {"retried": False}


# Known failures.


def test_a_known_failure_opens_the_gate_and_stays_visible(tmp_path: Path) -> None:
    known = read_known(known_of(tmp_path))
    result = judge(run_of(record(1, "fail"), record(2)), Policy(), known, today=TODAY)
    assert (result.closed, result.outcomes["known"], result.findings) == (False, 1, ())
    assert judge(run_of(record(1, "fail"), record(3, "fail")), Policy(), known, today=TODAY).closed
    assert judge(run_of(record(1, "memory")), Policy(), known, today=TODAY).closed


@pytest.mark.parametrize("action", ["close", "report"])
def test_an_expired_entry(tmp_path: Path, action: Any) -> None:
    known = read_known(known_of(tmp_path, expires="2026-06-14"))
    failing = judge(run_of(record(1, "fail")), Policy(expired_known=action), known, today=TODAY)
    assert rules(failing) == {"statuses": True, "expired_known": action == "close"}
    passing = judge(run_of(record(1)), Policy(expired_known=action), known, today=TODAY)
    assert rules(passing) == {"expired_known": action == "close"}
    assert "known.toml line 1: expired on 2026-06-14, none of its cases fails" in passing.findings[0].sentence


@pytest.mark.parametrize("action", ["close", "report"])
@pytest.mark.parametrize(
    ("rule", "records"),
    [
        ("passing_known", (record(1), record(2))),
        ("unmatched_known", (record(2),)),
        ("unmatched_known", (record(1, "memory"),)),
    ],
)
def test_an_entry_out_of_order(tmp_path: Path, rule: str, records: tuple[Record, ...], action: Any) -> None:
    policy = msgspec.structs.replace(Policy(statuses=("fail",)), **{rule: action})
    found = rules(judge(run_of(*records), policy, read_known(known_of(tmp_path)), today=TODAY))
    assert found.pop(rule) == (action == "close")
    assert set(found) <= {"statuses"}


@pytest.mark.parametrize("action", ["close", "report"])
def test_entries_that_overlap(tmp_path: Path, action: Any) -> None:
    text = known_of(tmp_path).read_text()
    known = read_known(known_of(tmp_path, text + text.replace("rows=1", "rows=1|2")))
    result = judge(run_of(record(1, "fail")), Policy(overlapping_known=action), known, today=TODAY)
    assert rules(result) == {"overlapping_known": action == "close"}
    assert "line 9: speaks of 1 case that" in result.findings[0].sentence


def test_entries_of_implementations_outside_the_policy_are_not_called_unmatched(tmp_path: Path) -> None:
    known = read_known(known_of(tmp_path))
    run = run_of(record(1, "fail"), record(1, impl="vllm-triton"))
    result = judge(run, Policy(implementations=("vllm-*",)), known, today=TODAY)
    assert (result.findings, result.closed) == ((), False)
    assert "1 record outside the policy's implementations and ops was not judged" in result.notes


# Against a baseline.


@pytest.mark.parametrize("action", ["close", "report"])
def test_lost_coverage(action: Any) -> None:
    before, after = run_of(record(1), record(2), name="before"), run_of(record(1))
    policy = Policy(coverage_lost=action)
    result = judge(after, policy, baseline=before, today=TODAY)
    assert rules(result) == {"coverage_lost": action == "close"}
    assert only(result, "coverage_lost").cases == (record(2).case,)
    assert rules(judge(before, policy, baseline=before, today=TODAY)) == {}
    assert rules(judge(before, policy, baseline=after, today=TODAY)) == {}


@pytest.mark.parametrize("action", ["close", "report"])
def test_unsupported_where_it_was_supported(tmp_path: Path, action: Any) -> None:
    before, after = run_of(record(1), record(2), name="before"), run_of(record(1, "unsupported"), record(2))
    policy = Policy(unsupported_where_supported=action)
    result = judge(after, policy, baseline=before, today=TODAY)
    assert rules(result) == {"unsupported_where_supported": action == "close"}
    known = read_known(known_of(tmp_path, status='"unsupported"'))
    assert rules(judge(after, policy, known, baseline=before, today=TODAY)) == {}


def test_what_was_never_supported_is_no_loss() -> None:
    before, after = (
        run_of(record(1, "unsupported"), record(2), name="before"),
        run_of(record(1, "unsupported"), record(2)),
    )
    assert judge(after, Policy(), baseline=before, today=TODAY).findings == ()


def test_a_check_that_is_no_longer_made_is_lost_coverage() -> None:
    before, after = (
        run_of(record(1, checks=(GOOD, msgspec.structs.replace(GOOD, output="lse"))), name="before"),
        run_of(record(1)),
    )
    found = only(judge(after, Policy(), baseline=before, today=TODAY), "coverage_lost")
    assert (found.closes, found.title) == (True, "no longer checked as before")
    assert "1 checked in the baseline for more than here" in found.sentence
    assert "lse (bounded)" in found.sentence
    both = run_of(record(1), name="after"), run_of(record(1, checks=before.records[record(1).key].checks), record(2))
    lost = judge(both[0], Policy(), baseline=both[1], today=TODAY).findings
    assert sorted(each.title for each in lost) == ["no longer asked", "no longer checked as before"]
    assert len({each.fingerprint for each in lost}) == 2


def test_a_baseline_that_is_a_single_shard_is_said() -> None:
    shard = run_of(record(1), name="before", shard="1/5")
    notes = judge(run_of(record(1), record(2)), Policy(), (), shard, TODAY).notes
    assert "before holds only shard 1/5 of its plan: what the other shards were asked cannot be compared" in notes
    assert "coverage is not comparable: before was not asked for 1 answer of run" in notes
    assert "against before: 1 not comparable" in notes
    whole = judge(run_of(record(1)), Policy(), (), run_of(record(1), name="before"), TODAY).notes
    assert not any("cannot be compared" in note or "comparable" in note for note in whole)


def test_what_a_merge_was_allowed_to_mix_is_said() -> None:
    joined = run_of(
        record(1), merged=("a", "b, although they differ (--allow-mixed torch): torch on hip is '2' in a, but '3' in b")
    )
    said = "run was joined from runs that differ (--allow-mixed torch): torch on hip is '2' in a, but '3' in b"
    assert said in judge(joined, Policy(), today=TODAY).notes
    assert said in judge(run_of(record(1), name="after"), Policy(), (), joined, TODAY).notes
    assert not any("mixed" in note for note in judge(run_of(record(1), merged=("a", "b")), Policy(), today=TODAY).notes)


def _grown(ratio: float, seen: bool = True, tail: bool = False) -> Growth:
    still = Move(before=0.2, after=0.2, ratio=1.0, up=4, down=4, p=1.0)
    moved = Move(before=0.2, after=0.2 * ratio, ratio=ratio, up=40, down=0, p=1e-9 if seen else 0.5)
    return Growth(
        op=OP, impl="ours-triton", on="hip", cases=50, changed=40, median=still if tail else moved,
        tail=moved if tail else still, steepest=record(1).case, sentence=f"budget use grew {ratio} times",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("growth", "policy", "closes"),
    [
        (_grown(1.2), "close", True),
        (_grown(1.2), "report", False),
        (_grown(1.2), 1.5, False),
        (_grown(1.6), 1.5, True),
        (_grown(1.6, tail=True), 1.5, True),
        (_grown(1.5), 1.5, False),
        (_grown(9.0, seen=False), "close", None),
    ],
)
def test_error_growth(monkeypatch: pytest.MonkeyPatch, growth: Growth, policy: Any, closes: bool | None) -> None:
    def told(before: Run, after: Run) -> Diff:
        return Diff(
            before=str(before.path), after=str(after.path), environments=(), changes=(), growths=(growth,), times=(),
            unchanged=1, unjudged=0,
        )  # fmt: skip

    monkeypatch.setattr(reports.gate, "compare", told)
    result = judge(run_of(record(1)), Policy(error_growth=policy), baseline=run_of(record(1), name="b"), today=TODAY)
    assert rules(result) == ({} if closes is None else {"error_growth": closes})


def test_error_growth_is_found_by_the_diff_itself() -> None:
    def with_use(use: float, bits: str) -> list[Record]:
        return [
            record(n, checks=(msgspec.structs.replace(GOOD, use=use * (1 + n / 100)),), fingerprint=f"{bits}{n}")
            for n in range(60)
        ]

    before, after = run_of(*with_use(0.1, "a"), name="before"), run_of(*with_use(0.2, "b"))
    assert rules(judge(after, Policy(), baseline=before, today=TODAY)) == {"error_growth": True}
    assert rules(judge(before, Policy(), baseline=after, today=TODAY)) == {}
    assert rules(judge(after, Policy(error_growth=2.5), baseline=before, today=TODAY)) == {"error_growth": False}


@pytest.mark.parametrize("action", ["close", "report"])
def test_a_known_failure_that_fails_in_another_way(tmp_path: Path, action: Any) -> None:
    known = read_known(known_of(tmp_path))
    other = record(1, "fail", checks=(msgspec.structs.replace(BAD, output="lse"),), fingerprint="g")
    policy = Policy(changed_known=action)
    result = judge(run_of(other), policy, known, run_of(record(1, "fail"), name="before"), TODAY)
    assert rules(result) == {"changed_known": action == "close"}
    assert rules(judge(run_of(other), policy, known, run_of(other, name="before"), TODAY)) == {}
    assert rules(judge(run_of(other), policy, (), run_of(record(1, "fail"), name="before"), TODAY)) == {
        "statuses": True
    }


NOON = datetime.datetime(2026, 6, 10, 12, tzinfo=datetime.UTC).timestamp()


@pytest.mark.parametrize(
    ("since", "status", "new"),
    [
        ("2026-06-01", "pass", True),
        ("2026-06-09", "pass", True),
        ("2026-06-10", "pass", False),
        ("2026-06-12", "pass", False),
        ("2026-06-01", "fail", False),
        ("2026-06-01", "unsupported", False),
    ],
)
def test_what_passed_in_the_baseline_is_excused_only_by_an_entry_that_is_no_older(
    tmp_path: Path, since: str, status: str, new: bool
) -> None:
    known = read_known(known_of(tmp_path, since=since))
    before = run_of(record(1, status, finished=NOON), record(2), name="before")
    after = run_of(record(1, "fail"), record(2))
    result = judge(after, Policy(), known, before, TODAY)
    assert rules(result) == ({"statuses": True, "newly_failing_known": True} if new else {})
    assert result.outcomes["known"] == (not new)
    if new:
        found = only(result, "newly_failing_known")
        assert found.cases == (record(1).case,)
        assert (
            f"known.toml line 1: 1 of its cases passed on 2026-06-10, after it began on {since}, and no longer does: "
            in found.sentence
        )
    opened = judge(after, Policy(newly_failing_known="report"), known, before, TODAY)
    assert rules(opened) == ({"newly_failing_known": False} if new else {})
    assert opened.outcomes["known"] == 1
    assert opened.uses[0].state == "holds"
    if new:
        assert (result.uses[0].state, result.uses[0].excused) == ("outlived", ())


def test_a_younger_entry_excuses_what_an_older_one_does_not(tmp_path: Path) -> None:
    old = known_of(tmp_path).read_text()
    known = read_known(known_of(tmp_path, old + old.replace("2026-06-01", "2026-06-11")))
    result = judge(run_of(record(1, "fail")), Policy(), known, run_of(record(1, finished=NOON), name="before"), TODAY)
    assert rules(result) == {"overlapping_known": False}
    assert result.judged[0].entry is known[1]


def test_the_day_of_a_baseline_without_times_of_its_records_is_its_own(tmp_path: Path) -> None:
    known = read_known(known_of(tmp_path))
    before = run_of(record(1, finished=0.0), name="before", created=NOON)
    assert only(judge(run_of(record(1, "fail")), Policy(), known, before, TODAY), "newly_failing_known").closes


def test_a_status_that_the_policy_lets_be_is_not_newly_failing(tmp_path: Path) -> None:
    known = read_known(known_of(tmp_path, status='"hang"'))
    before = run_of(record(1, finished=NOON), name="before")
    assert not judge(run_of(record(1, "hang")), Policy(statuses=("fail",)), known, before, TODAY).closed


def test_an_older_entry_does_not_excuse_what_is_no_longer_supported(tmp_path: Path) -> None:
    known = read_known(known_of(tmp_path, status='"unsupported"'))
    before = run_of(record(1, finished=NOON), record(2), name="before")
    result = judge(run_of(record(1, "unsupported"), record(2)), Policy(), known, before, TODAY)
    assert rules(result) == {"unsupported_where_supported": True, "newly_failing_known": True}


# What differs round it.


@pytest.mark.parametrize("action", ["close", "report"])
@pytest.mark.parametrize("name", ["torch", "triton", "arch", "device", "driver", "vllm", "aiter", "commit"])
def test_another_environment_than_the_baselines_is_said(name: str, action: Any) -> None:
    there = msgspec.structs.replace(HERE, **{name: "another"})
    before = run_of(record(1), name="before")
    result = judge(run_of(record(1, environment=there)), Policy(environment_changed=action), (), before, TODAY)
    assert rules(result) == ({"environment_changed": True} if action == "close" else {})
    was = getattr(HERE, name) or "none"
    said = f"the environment is not the baseline's: {name} {was} then, another now"
    assert said in result.notes
    assert not any("environment" in note for note in judge(before, Policy(), (), before, TODAY).notes)


# What the policy lets be.


def test_checks_that_are_switched_off_are_said_with_the_outcome() -> None:
    one = judge(run_of(record(1)), Policy(coverage_lost="report"), today=TODAY)
    assert one.sentence == "the gate is open: 1 passed; 1 check is switched off by the policy: coverage_lost"
    two = judge(run_of(record(1, "fail")), Policy(statuses=AGAINST[:-1], error_growth="report"), today=TODAY)
    assert two.sentence == (
        "the gate is closed by 1 finding: 1 failed; 2 checks are switched off by the policy: status vacuous, error_growth"
    )
    assert (
        "switched off" not in judge(run_of(record(1)), Policy(error_growth=1.5, retried="close"), today=TODAY).sentence
    )
    # No ratio is larger than what stands for infinity.
    for large, off in ((OFF_THE_SCALE / 2, ()), (OFF_THE_SCALE, ("error_growth",)), (1e300, ("error_growth",))):
        assert Policy(error_growth=large).switched_off == off
    said = judge(run_of(record(1)), Policy(error_growth=1e300), today=TODAY).sentence
    assert said == "the gate is open: 1 passed; 1 check is switched off by the policy: error_growth"


@pytest.mark.parametrize("more", [0, 1, 2])
def test_the_sentence_counts_what_was_asked_and_not_answered(more: int) -> None:
    sentence = judge(run_of(record(1), more=more), Policy(), today=TODAY).sentence
    assert sentence == (
        f"the gate is closed by 1 finding: 1 passed, {more} without an answer" if more else "the gate is open: 1 passed"
    )
    alone = judge(run_of(more=more), Policy(), today=TODAY).sentence
    assert alone.endswith(f": {more} without an answer" if more else ": no record")


def test_without_a_baseline_its_rules_are_said_to_be_not_applied() -> None:
    result = judge(run_of(record(1)), Policy(), today=TODAY)
    assert (
        "no baseline was given: coverage_lost, unsupported_where_supported, error_growth, environment_changed, "
        "changed_known, newly_failing_known were not applied" in result.notes
    )
    assert any(note.startswith("no known failures were given: expired_known") for note in result.notes)
    compared = judge(run_of(record(1)), Policy(), (), run_of(record(1), name="before"), TODAY)
    assert not any("were not applied" in note for note in compared.notes)


# The command.


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


@pytest.mark.usefixtures("quiet")
class TestCommand:
    def test_the_exit_code_is_the_gate(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert command(["gate", str(on_disk(tmp_path / "good", record(1)))]) == 0
        assert capsys.readouterr().out.rstrip().endswith("the gate is open: 1 passed")
        assert command(["gate", str(on_disk(tmp_path / "bad", record(1, "fail")))]) == 1
        said = capsys.readouterr().out
        assert "see it again: mla-oracle replay" in said
        assert said.rstrip().endswith("the gate is closed by 1 finding: 1 failed")

    def test_every_option_is_heard(self, tmp_path: Path) -> None:
        before = on_disk(tmp_path / "before", record(1), record(2))
        after = on_disk(tmp_path / "after", record(1, "fail"))
        policy = tmp_path / "gate.toml"
        policy.write_text('coverage_lost = "report"')
        known = known_of(tmp_path)
        words = ["gate", str(after), "--known", str(known), "--policy", str(policy), "--baseline", str(before)]
        assert command([*words, "--today", "2026-06-15", "--json", str(tmp_path / "o.json")]) == 0
        found = json.loads((tmp_path / "o.json").read_text())
        assert (found["schema"], found["gate"], found["baseline"]) == (1, "open", str(before))
        assert [each["rule"] for each in found["findings"]] == ["coverage_lost"]
        assert command([*words, "--today", "2026-07-15"]) == 1
        assert command([*words[:-4], "--today", "2026-06-15", "--baseline", str(before)]) == 1

    def test_the_policy_is_written_once(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "gate.toml"
        assert command(["gate", "--write-policy", str(path)]) == 0
        assert path.read_text() == DEFAULT_TEXT
        path.write_text("mine")
        assert command(["gate", "--write-policy", str(path)]) == 2
        assert path.read_text() == "mine"
        assert command(["gate", "--write-policy", str(tmp_path / "no" / "gate.toml")]) == 2
        assert command(["gate", str(tmp_path), "--write-policy", str(tmp_path / "new.toml")]) == 2
        assert not (tmp_path / "new.toml").exists()

    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            ([], "gate needs a run directory"),
            (["nowhere"], "no such run directory"),
            (["RUN", "--baseline", "nowhere"], "no such run directory"),
            (["RUN", "--policy", "nowhere.toml"], "no such file; it should be a policy"),
            (["RUN", "--known", "nowhere.toml"], "no such file; it should be known failures"),
            (["RUN", "--junit", "no/o.xml"], "--junit no/o.xml: should name a file in a directory that exists"),
            (["RUN", "--sarif", "."], "--sarif .: should name a file in a directory that exists"),
            (["RUN", "--json", "RUN/run.json"], "belongs to the run"),
            (["RUN", "--buildkite", ""], "--buildkite '': should name a file"),
            (["RUN", "--github", "--buildkite", "-"], "both write to standard output"),
            (["RUN", "--junit", "o", "--sarif", "o"], "--sarif o: is the file of --junit already"),
            (["RUN", "--today", "soon"], "--today soon: should be a day"),
            (["RUN", "--junit", "socket"], "is no regular file"),
        ],
    )  # fmt: skip
    def test_misuse_is_one_sentence_and_writes_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
        words: list[str], sentence: str,
    ) -> None:  # fmt: skip
        monkeypatch.chdir(tmp_path)
        on_disk(tmp_path / "RUN", record(1))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("socket")
        before = _everything(tmp_path)
        assert command(["gate", *words, *(["--json", "new.json"] if words and "--json" not in words else [])]) == 2
        said = capsys.readouterr()
        assert sentence in said.err
        assert said.err.count("\n") == 1
        assert _everything(tmp_path) == before

    def test_an_earlier_output_is_overwritten_and_a_foreign_file_is_not(self, tmp_path: Path) -> None:
        run = on_disk(tmp_path / "run", record(1))
        outputs = {
            "--junit": "o.xml", "--sarif": "o.sarif", "--json": "o.json", "--buildkite": "o.md",
        }  # fmt: skip
        words = [word for option, name in outputs.items() for word in (option, str(tmp_path / name))]
        assert command(["gate", str(run), *words]) == 0
        assert command(["gate", str(run), *words]) == 0
        for option, name in outputs.items():
            (tmp_path / name).write_text("a thesis")
            assert command(["gate", str(run), option, str(tmp_path / name)]) == 2
            assert (tmp_path / name).read_text() == "a thesis"
            (tmp_path / name).write_text("")
            assert command(["gate", str(run), option, str(tmp_path / name)]) == 0

    def test_an_unfinished_run_on_disk_closes(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert command(["gate", str(on_disk(tmp_path / "run", record(1), more=1))]) == 1
        assert "was stopped half way: 1 of 2 tasks have a record" in capsys.readouterr().out


def _everything(path: Path) -> Mapping[Path, bytes]:
    # Reading a run may take its lock for a moment, which leaves an empty file.
    return {each: each.read_bytes() for each in path.rglob("*") if each.is_file() and each.name != "lock"}


def test_no_output_takes_the_place_of_what_steers_the_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = on_disk(tmp_path / "run", record(0))
    policy, spare = tmp_path / "gate.toml", tmp_path / "spare.toml"
    for path in (policy, spare):
        path.write_text(DEFAULT_TEXT)
    for out, sentence in ((policy, "is what the gate reads"), (spare, "exists, and mla-oracle gate did not write it")):
        assert command(["gate", str(run), "--policy", str(policy), "--json", str(out)]) == 2
        assert sentence in capsys.readouterr().err
        assert out.read_text() == DEFAULT_TEXT


@pytest.mark.parametrize("name", ["github-actions.yml", "buildkite.yml", "gate.toml", "../ci.md"])
@pytest.mark.parametrize("option", ["--json", "--junit", "--sarif", "--buildkite"])
def test_a_file_that_only_mentions_the_gate_is_kept(tmp_path: Path, name: str, option: str) -> None:
    run, out = on_disk(tmp_path / "run", record(0)), tmp_path / "out"
    content = (DOCS / name).read_bytes()
    for each in (
        content,
        b"#!/bin/sh\nmla-oracle gate run\n",
        b'{"kind": "mla-oracle gate"}',
        b"### mla-oracle gate: my notes\n",
    ):
        out.write_bytes(each)
        assert command(["gate", str(run), option, str(out)]) == 2
        assert out.read_bytes() == each


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_step_summary_that_has_no_room_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "/dev/full")
    assert command(["gate", str(on_disk(tmp_path / "run", record(0))), "--github"]) == 2
    assert "/dev/full: No space left on device" in capsys.readouterr().err


def test_the_step_summary_does_not_go_into_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = on_disk(tmp_path / "run", record(0))
    for place in ("records/sum.jsonl", "records/sum.md", "run.json", "no/where/sum.md"):
        before = _everything(tmp_path)
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(run / place))
        assert command(["gate", str(run), "--github", "--json", str(tmp_path / "o.json")]) == 2
        assert "GITHUB_STEP_SUMMARY" in capsys.readouterr().err
        assert _everything(tmp_path) == before


@pytest.mark.parametrize(
    "place",
    ["records/x", "records/x.json", "logs/x.xml", "run.json", "plan.jsonl", "lock", "run.json.part", "of/mine/x"],
)
@pytest.mark.parametrize("option", ["--json", "--junit", "--sarif", "--buildkite"])
def test_no_output_lands_among_what_a_sweep_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, option: str
) -> None:
    run = on_disk(tmp_path / "run", record(0))
    (run / "of" / "mine").mkdir(parents=True)
    (run / "lock").touch()
    (tmp_path / "link").symlink_to(run)
    if place == "plan.jsonl":
        (run / place).unlink()
    before = {each: each.read_bytes() for each in run.rglob("*") if each.is_file()}
    for where in (run, tmp_path / "link"):
        assert command(["gate", str(run), option, str(where / place)]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "belongs to the run" in said
    assert {each: each.read_bytes() for each in run.rglob("*") if each.is_file()} == before


def test_no_policy_is_written_among_what_a_sweep_writes(tmp_path: Path) -> None:
    run = on_disk(tmp_path / "run", record(0))
    assert command(["gate", "--write-policy", str(run / "records" / "gate.toml")]) == 2
    assert not (run / "records" / "gate.toml").exists()


def test_an_output_may_lie_beside_what_a_sweep_writes(tmp_path: Path) -> None:
    run = on_disk(tmp_path / "run", record(0))
    assert command(["gate", str(run), "--json", str(run / "gate.json")]) == 0
    assert command(["gate", str(run), "--json", str(run / "gate.json")]) == 0


def test_an_entry_that_has_not_begun_is_misuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, known = on_disk(tmp_path / "run", record(1, "fail")), known_of(tmp_path)
    assert command(["gate", str(run), "--known", str(known), "--today", "2026-05-30"]) == 2
    said = capsys.readouterr().err
    assert "known.toml line 6: since 2026-06-01 is still to come" in said
    assert said.count("\n") == 1


def test_a_baseline_without_a_record_is_misuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, empty = on_disk(tmp_path / "run", record(0)), on_disk(tmp_path / "empty", more=1)
    assert command(["gate", str(run), "--baseline", str(empty)]) == 2
    assert "empty: holds no record" in capsys.readouterr().err
