"""Does a known failure excuse what it names, until its day, and nothing else?"""

import datetime
from pathlib import Path
from typing import Any

import pytest

from oracle.check import Check
from reports.known_failures import Application, Entry, KnownError, apply, read_known
from reports.record import LOST, Environment, Record

GOOD = Check(output="out", measure="exact", use=0.0, count=4)
BAD = Check(output="out", measure="exact", use=1e9, wrong=1, count=4, got="1", want="2", why="it is exact")
TODAY = datetime.date(2026, 6, 15)
DECODE = "sparse_mla.decode:heads={heads},values={values},seed=0"

WHOLE = """\
# Ours.
[[known]]
impl = "vllm-*"
op = "sparse_mla.decode"
case = "heads=16|32"
issue = "https://example.org/issues/7"
owner = "ada"
since = 2026-06-01
expires = 2026-06-30
why = "the last page is dropped"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "known.toml"
    path.write_text(text)
    return path


def entries(tmp_path: Path, *changes: dict[str, Any]) -> tuple[Entry, ...]:
    """An entry for each set of changes to the whole one; None takes a key away."""
    known: dict[str, Any] = {
        "impl": "vllm-*", "op": "sparse_mla.decode", "issue": "https://example.org/issues/7", "owner": "ada",
        "since": datetime.date(2026, 6, 1), "expires": datetime.date(2026, 6, 30), "why": "the last page is dropped",
    }  # fmt: skip
    lines = []
    for change in changes:
        lines.append("[[known]]")
        for key, word in {**known, **change}.items():
            if word is not None:
                spelled = word.isoformat() if isinstance(word, datetime.date) else repr(word).replace("'", '"')
                lines.append(f"{key} = {spelled}")
    return read_known(written(tmp_path, "\n".join(lines)))


def record(
    heads: int = 16, impl: str = "vllm-triton", status: str = "fail", on: str = "hip", arch: str = "gfx950",
    values: str = "needle", law: str = "", op: str = "sparse_mla.decode", reasons: tuple[str, ...] = (),
) -> Record:  # fmt: skip
    checks = {"fail": (BAD,), "pass": (GOOD,)}.get(status, ())
    here = Environment(machine="m", python="3", torch="2", triton="3", numpy="2", device="d", arch=arch)
    case = DECODE.format(heads=heads, values=values).replace("sparse_mla.decode", op)
    return Record(
        case=case, op=op, impl=impl, on=on, law=law, status=status, checks=checks,  # type: ignore[arg-type]
        reasons=reasons or (() if checks else ("why",)), environment=here,
    )  # fmt: skip


def excused(found: Application) -> list[str]:
    return sorted(key[0] for key in found.excuses)


def test_an_entry_is_read_with_its_line(tmp_path: Path) -> None:
    (entry,) = read_known(written(tmp_path, WHOLE))
    assert entry.place == f"{tmp_path / 'known.toml'} line 2"
    assert entry.known.expires == datetime.date(2026, 6, 30)
    assert entry.known.statuses == ("fail", "error")
    assert entry.wanted == (("heads", ("16", "32")),)


def test_an_empty_file_knows_nothing(tmp_path: Path) -> None:
    assert read_known(written(tmp_path, "")) == ()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("expires = 2026-06-30\n", "", r"line 2: lacks expires: a day"),
        ("owner = \"ada\"\n", "", r"line 2: lacks owner: who answers for it"),
        ("issue = ", "isue = ", r"line 6: unknown key 'isue'; the keys of an entry are impl, op, case"),
        ("2026-06-30", '"soon"', r"line 9: expires: Invalid RFC3339 .*; it should be a day"),
        ("2026-06-30", "30", r"line 9: expires: Expected `date`, got `int`; it should be a day"),
        ("2026-06-30", "2026-06-31", r"known.toml: .*line 9.*; it should be TOML"),
        ("2026-06-30", "2026-05-30", r"line 9: expires 2026-05-30, before it began on 2026-06-01"),
        ("https://example.org/issues/7", "#7", r"line 6: issue: '#7' is no address; it should be the address of an issue"),
        ("heads=16|32", "heads", r"line 5: case: case pattern: 'heads' is not axis=value; it should be a case id"),
        ("heads=16|32", "heads=16,heads=32", r"line 5: case: case pattern: heads is given twice"),
        ("heads=16|32", "sparse_mla.decod:heads=16", r"line 5: case: unknown op 'sparse_mla.decod'; the ops are "),
        ('owner = "ada"', 'owner = " "', r"line 7: owner is empty; it should be who answers for it"),
        ('impl = "vllm-*"', 'impl = 3', r"line 3: impl: Expected `str`, got `int`; it should be an implementation"),
        ('op = "sparse_mla.decode"', 'status = "pass"', r"line 4: status: Invalid enum value 'pass'; it should be one or a"),
        ('op = "sparse_mla.decode"', "status = []", r"line 4: status is empty; it should be one or a list of fail"),
        ('op = "sparse_mla.decode"\ncase = "heads=16|32"\n', "", r"line 2: excuses everything of its implementation"),
        ('op = "sparse_mla.decode"\ncase = "heads=16|32"\n', 'op = "*.*"\n', r"line 4: excuses everything of its implementation"),
        ("[[known]]", "[[knwon]]", r"line 2: unknown key 'knwon'; the file holds \[\[known\]\] tables only"),
        ("[[known]]", "[known]", r"line 2: known is no list of tables"),
        ("[[known]]", "[[known", r"known.toml: .*line 2.*; it should be TOML"),
        ("# Ours.", "version = 1", r"line 1: unknown key 'version'"),
    ],
)  # fmt: skip
def test_a_malformed_entry_is_one_sentence_with_its_line(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    assert old in WHOLE
    with pytest.raises(KnownError, match=sentence) as caught:
        read_known(written(tmp_path, WHOLE.replace(old, new, 1)))
    assert "\n" not in str(caught.value)
    assert "`$" not in str(caught.value)


@pytest.mark.parametrize("op", ["*", "**", "*.*", "?*", "*?.?*", "[a-z]*", "[!0]*"])
@pytest.mark.parametrize("case", [None, "seed=0", "seed=0|1"])
@pytest.mark.parametrize("impl", ["*", "vllm-*"])
def test_an_entry_about_every_op_and_no_case_in_particular_is_refused(
    tmp_path: Path, impl: str, op: str, case: str | None
) -> None:
    with pytest.raises(KnownError, match="excuses everything of its implementation; it should name an op or a case"):
        entries(tmp_path, {"impl": impl, "op": op, "case": case})
    assert entries(tmp_path, {"impl": impl, "op": op, "case": "heads=16"})
    assert entries(tmp_path, {"impl": impl, "op": op, "case": "sparse_mla.decode:heads=16"})


@pytest.mark.parametrize("op", ["sparse_mla.*", "sparse_mla.decode", "s*"])
def test_an_entry_about_ops_of_one_family_is_read(tmp_path: Path, op: str) -> None:
    assert entries(tmp_path, {"impl": "*", "op": op})


@pytest.mark.parametrize(
    ("op", "families"),
    [("*a*", "formats, cache"), ("*.decode", "sparse_mla, dense_mla, dcp"), ("[cd]*", "cache, dense_mla, dcp")],
)
def test_an_entry_about_several_families_names_a_case(tmp_path: Path, op: str, families: str) -> None:
    for case in (None, "seed=0"):
        with pytest.raises(KnownError, match="one family") as caught:
            entries(tmp_path, {"op": op, "case": case})
        assert f"line 3: op: {op!r} fits ops of {families}" in str(caught.value)
    assert entries(tmp_path, {"op": op, "case": "heads=16"})
    assert entries(tmp_path, {"op": op, "case": "sparse_mla.decode:heads=16"}) if op != "[cd]*" else True


EVERY = ["fail", "memory", "error", "crash", "hang", "vacuous"]


def test_a_family_is_not_excused_whatever_becomes_of_it(tmp_path: Path) -> None:
    for statuses in (EVERY, [*EVERY, "unsupported"]):
        sentence = "excuses every status of [0-9]+ ops; it should name an op, a case or the statuses that were seen"
        with pytest.raises(KnownError, match=f"status: {sentence}"):
            entries(tmp_path, {"op": "sparse_mla.*", "status": statuses})
        assert entries(tmp_path, {"op": "sparse_mla.decode", "status": statuses})
        assert entries(tmp_path, {"op": "sparse_mla.*", "status": statuses, "case": "heads=16"})
    assert entries(tmp_path, {"op": "sparse_mla.*", "status": EVERY[1:]})


@pytest.mark.parametrize(
    ("op", "case", "word"),
    [
        ("sparse_mla.decode", "heads=16|banana", "heads=banana"),
        ("sparse_mla.decode", "values=banana", "values=banana"),
        ("*", "values=needle|banana", "values=banana"),
        ("sparse_mla.*", "sparse_mla.decode:heads=16,values=randn|", "values=randn|"),
        ("sparse_mla.decode", "seed=x", "seed=x"),
    ],
)
def test_a_word_that_no_case_can_have_is_refused(tmp_path: Path, op: str, case: str, word: str) -> None:
    with pytest.raises(KnownError, match="line 9: case: ") as caught:
        entries(tmp_path, {"op": op, "case": case})
    assert word in str(caught.value) and "\n" not in str(caught.value)


def test_an_axis_that_no_op_has_any_more_may_stand_in_an_entry(tmp_path: Path) -> None:
    assert entries(tmp_path, {"case": "an_old_axis=banana"})


def test_an_entry_begins_on_a_day_that_has_begun_somewhere(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE)
    for day in (datetime.date(2026, 6, 1), datetime.date(2026, 5, 31)):
        assert read_known(path, day)
    with pytest.raises(
        KnownError, match=r"line 8: since 2026-06-01 is still to come; it should be the day on which"
    ) as caught:
        read_known(path, datetime.date(2026, 5, 30))
    assert "\n" not in str(caught.value)


def test_the_second_entry_is_named_by_its_own_line(tmp_path: Path) -> None:
    second = WHOLE.replace('"ada"', "3")
    with pytest.raises(KnownError, match=r"line 17: owner: Expected `str`, got `int`"):
        read_known(written(tmp_path, WHOLE + second))


def test_an_entry_without_a_head_of_its_own_is_counted(tmp_path: Path) -> None:
    with pytest.raises(KnownError, match=r"known.toml entry 1: lacks impl"):
        read_known(written(tmp_path, 'known = [{op = "sparse_mla.decode"}]'))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\x00", b"a = " + b"[" * 5000])
def test_a_file_that_is_no_toml_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "known.toml"
    path.write_bytes(content)
    with pytest.raises(KnownError, match=r"known.toml: .*it should be ") as caught:
        read_known(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KnownError, match="no such file"):
        read_known(tmp_path / "nowhere.toml")
    with pytest.raises(KnownError, match="is no file"):
        read_known(tmp_path)


def test_it_excuses_the_cases_of_its_pattern_alone(tmp_path: Path) -> None:
    records = [record(16), record(32), record(64), record(16, impl="ours-triton", values="ties")]
    found = apply(entries(tmp_path, {"case": "heads=16|32"}), records, TODAY)
    assert excused(found) == [record(16).case, record(32).case]
    assert found.uses[0].state == "holds"
    assert found.uses[0].excused == (records[0], records[1])


def test_a_whole_id_is_one_case(tmp_path: Path) -> None:
    records = [record(16, values="needle"), record(16, values="ties")]
    found = apply(entries(tmp_path, {"case": records[1].case}), records, TODAY)
    assert excused(found) == [records[1].case]


def test_an_op_before_the_pattern_keeps_it_to_that_op(tmp_path: Path) -> None:
    records = [record(16), record(16, op="sparse_mla.prefill")]
    found = apply(entries(tmp_path, {"op": None, "case": "sparse_mla.prefill:heads=16"}), records, TODAY)
    assert excused(found) == [records[1].case]


@pytest.mark.parametrize(
    ("change", "other"),
    [
        ({"on": "hip"}, {"on": "interpreter"}),
        ({"arch": "gfx950"}, {"arch": "gfx942"}),
        ({"impl": "vllm-triton"}, {"impl": "vllm-torch"}),
        ({"law": "pages-*"}, {}),
        ({}, {"law": "pages-permuted"}),
    ],
)
def test_every_pattern_narrows_it(tmp_path: Path, change: dict[str, str], other: dict[str, str]) -> None:
    own = {key: word for key, word in change.items() if key != "law"}
    fitting = record(16, **own, law="pages-permuted" if "law" in change else "")  # type: ignore[arg-type]
    stranger = record(16, **other)  # type: ignore[arg-type]
    assert list(apply(entries(tmp_path, change), [fitting, stranger], TODAY).excuses) == [fitting.key]


def test_a_star_for_the_law_is_answers_and_laws(tmp_path: Path) -> None:
    records = [record(16), record(16, law="pages-permuted")]
    assert len(apply(entries(tmp_path, {"law": "*"}), records, TODAY).excuses) == 2


@pytest.mark.parametrize("status", ["memory", "crash", "hang", "vacuous"])
def test_only_a_named_status_is_excused(tmp_path: Path, status: str) -> None:
    silent, named = entries(tmp_path, {}, {"status": status})
    assert not apply([silent], [record(status=status)], TODAY).excuses
    assert apply([silent], [record(status=status)], TODAY).uses[0].state == "failing"
    assert apply([named], [record(status=status)], TODAY).excuses
    assert not apply([named], [record(status="fail")], TODAY).excuses


def test_a_lost_device_is_a_crash_and_no_error(tmp_path: Path) -> None:
    lost = record(status="error", reasons=(f"{LOST}hipErrorIllegalAddress",))
    silent, named = entries(tmp_path, {}, {"status": ["crash"]})
    assert not apply([silent], [lost], TODAY).excuses
    assert apply([named], [lost], TODAY).excuses
    assert apply([silent], [record(status="error")], TODAY).excuses


def test_a_broken_harness_is_never_excused(tmp_path: Path) -> None:
    broken = record(status="error", reasons=("the harness itself broke in judging: KeyError: x",))
    assert not apply(entries(tmp_path, {"status": ["error", "fail"]}), [broken], TODAY).excuses


def test_it_holds_through_its_last_day_and_no_longer(tmp_path: Path) -> None:
    found = entries(tmp_path, {})
    assert apply(found, [record()], datetime.date(2026, 6, 30)).excuses
    after = apply(found, [record()], datetime.date(2026, 7, 1))
    assert not after.excuses
    assert (after.uses[0].state, after.uses[0].excused) == ("expired", (record(),))


def test_an_entry_that_still_holds_excuses_what_an_expired_one_does_not(tmp_path: Path) -> None:
    old, new = entries(tmp_path, {"expires": datetime.date(2026, 6, 2)}, {})
    assert apply([old, new], [record()], TODAY).excuses[record().key] is new


@pytest.mark.parametrize(
    ("records", "state"),
    [
        ([], "elsewhere"),
        ([record(op="sparse_mla.prefill", status="pass")], "elsewhere"),
        ([record(16, impl="ours-triton")], "unmatched"),
        ([record(64)], "unmatched"),
        ([record(16, status="unsupported")], "unmatched"),
        ([record(16, status="pass"), record(32, status="pass")], "passing"),
        ([record(16, status="pass"), record(32, status="unsupported")], "passing"),
        ([record(16, status="pass"), record(32)], "holds"),
        ([record(16, status="pass"), record(32, status="memory")], "failing"),
    ],
)
def test_what_became_of_an_entry(tmp_path: Path, records: list[Record], state: str) -> None:
    assert apply(entries(tmp_path, {"case": "heads=16|32"}), records, TODAY).uses[0].state == state


def test_what_passed_after_an_entry_began_outlived_it(tmp_path: Path) -> None:
    old, young = entries(tmp_path, {}, {"since": datetime.date(2026, 6, 5)})
    records = [record(16), record(32)]
    passed = {record(16).key: datetime.date(2026, 6, 5)}
    alone = apply([old], records, TODAY, passed)
    assert (excused(alone), list(alone.outlived)) == ([record(32).case], [record(16).key])
    assert (alone.uses[0].state, alone.uses[0].excused, alone.uses[0].outlived) == (
        "holds",
        (records[1],),
        (records[0],),
    )
    assert apply([old], records[:1], TODAY, passed).uses[0].state == "outlived"
    both = apply([old, young], records, TODAY, passed)
    assert both.excuses[record(16).key] is young
    assert not both.outlived


def test_an_entry_about_another_machine_is_not_called_unmatched(tmp_path: Path) -> None:
    (entry,) = entries(tmp_path, {"arch": "gfx942"})
    assert apply([entry], [record(16, arch="gfx950", status="pass")], TODAY).uses[0].state == "elsewhere"
    assert apply([entry], [record(16, arch="gfx942", impl="ours-triton")], TODAY).uses[0].state == "unmatched"


def test_an_entry_about_an_op_that_does_not_exist_is_unmatched(tmp_path: Path) -> None:
    (entry,) = entries(tmp_path, {"op": "sparse_mla.decoed"})
    assert apply([entry], [record(16)], TODAY).uses[0].state == "unmatched"


def test_overlaps_and_duplicates_are_told_apart(tmp_path: Path) -> None:
    wide, narrow, again, other = entries(
        tmp_path, {}, {"case": "heads=16"}, {"case": "heads=16", "owner": "bob"}, {"impl": "ours-*"}
    )
    found = apply([wide, narrow, again, other], [record(16), record(32)], TODAY)
    assert [(each.first, each.second, each.shared, each.duplicate) for each in found.overlaps] == [
        (wide, narrow, 1, False),
        (wide, again, 1, False),
        (narrow, again, 1, True),
    ]


def test_an_old_record_with_axes_that_no_op_has_is_matched_by_its_id(tmp_path: Path) -> None:
    old = record(16)
    (entry,) = entries(tmp_path, {"case": "heads=16,values=needle"})
    assert apply([entry], [old], TODAY).excuses
    assert not apply(entries(tmp_path, {"case": "heads=16,pages=3"}), [old], TODAY).excuses
