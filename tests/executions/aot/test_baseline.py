"""Is growth seen where it is, told by its size, and closed where it costs?"""

from pathlib import Path

import msgspec
import pytest

from impl.executions.aot.baseline import compare
from impl.executions.aot.normalise import Shape
from impl.executions.aot.report import Asked, Report, ReportError, Row, read_report
from impl.executions.aot.resources import Resources

TAKEN = Resources(
    vgpr=100, agpr=0, sgpr=40, vgpr_spills=0, sgpr_spills=0, scratch=0, lds=1024, lds_limit=65536, waves=4.0, limit="vgpr",
    matrix={}, code=1000, instructions=100,
)  # fmt: skip


def row(key: str = "a", position: int = 0, shape: str = "same", **taken: float) -> Row:
    asked = Asked(op="sparse_mla.decode", impl="ours-triton", call="x", position=position, inputs="meta")
    return Row(
        kernel="partial", module="impl.x", arch="gfx942", key=key, constants={"KEYS": "32"}, options={"num_warps": "4"},
        arguments="", asked=(asked,), resources=msgspec.structs.replace(TAKEN, **taken), shape=Shape(shape, shape, shape),
    )  # fmt: skip


def report(*rows: Row) -> Report:
    return Report(triton="3.9.0", torch="2.13", arches=("gfx942",), rows=rows)


def test_the_same_is_no_growth() -> None:
    found = compare(report(row()), report(row()))
    assert not found.closes and not found.growths and found.counts == {"same": 1}


@pytest.mark.parametrize(
    ("resource", "amount"), [("vgpr_spills", 3), ("sgpr_spills", 1), ("scratch", 64), ("lds", 2048)]
)
def test_what_costs_on_every_machine_closes(resource: str, amount: int) -> None:
    found = compare(report(row()), report(row("b", **{resource: amount})))
    assert found.closes
    (growth,) = found.growths
    assert (growth.resource, growth.before, growth.after) == (resource, getattr(TAKEN, resource), amount)
    assert f"{amount - getattr(TAKEN, resource):+}" in growth.sentence and "KEYS=32" in growth.sentence


def test_registers_close_only_where_they_cost_a_wave() -> None:
    more = compare(report(row()), report(row("b", vgpr=104)))
    assert [growth.resource for growth in more.growths] == ["vgpr"] and not more.closes
    step = compare(report(row()), report(row("b", vgpr=130, waves=3.0)))
    assert step.closes
    assert [(growth.resource, growth.closes) for growth in step.growths] == [("waves", True), ("vgpr", False)]


def test_less_is_no_growth() -> None:
    assert not compare(report(row(scratch=64, vgpr=200)), report(row("b"))).growths


def test_a_changed_configuration_meets_its_predecessor() -> None:
    after = msgspec.structs.replace(row("b", lds=4096, shape="other"), constants={"KEYS": "64"})
    found = compare(report(row()), report(after))
    assert found.closes and found.counts == {"changed": 1}


def test_what_comes_and_goes_is_told() -> None:
    found = compare(report(row("a", 0), row("b", 1)), report(row("a", 0), row("c", 2)))
    assert found.counts == {"same": 1, "new": 1, "gone": 1}
    assert [each.key for each in found.gone] == ["b"]


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "aot.json"
    path.write_bytes(msgspec.json.encode(report(row())))
    assert read_report(path) == report(row())


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 99', "\xff"])
def test_a_file_that_is_no_report_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "aot.json"
    path.write_text(text, "latin-1")
    with pytest.raises(ReportError, match=r"should be the aot\.json of an earlier --out"):
        read_report(path)


def test_a_report_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "aot.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(report(row()), format=99)))
    with pytest.raises(ReportError, match="has format 99, should have 1"):
        read_report(path)
