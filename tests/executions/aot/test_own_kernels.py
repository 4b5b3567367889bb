"""Do our own kernels keep a whole row of the cache in registers on every architecture that serves them?

Those that do are compiled in every call that is served. A machine that has compiled them before looks the answer up.
"""

import pytest

from cases.production import ARCHES
from impl.executions.aot.director import Request
from impl.executions.aot.report import Report, Row
from impl.executions.aot.run import compile_all

KERNELS = {
    "dense_mla.decode": "partial_kernel",
    "dense_mla.segmented_decode": "_produce",
    "sparse_mla.decode": "partial_kernel",
    "sparse_mla.prefill": "_prefill",
    "sparse_mla.two_segment_forward": "partial_kernel",
}
"""By op, the kernel that holds the sums of 16 heads over the lanes of a row, beside a tile of rows."""


@pytest.fixture(scope="module", params=sorted(KERNELS))
def compiled(request: pytest.FixtureRequest) -> tuple[str, Report]:
    """An op, and what became of our kernels of it."""
    op = str(request.param)
    asked = Request(arches=ARCHES, impls=((op, "ours-triton"),), workers=2)
    return op, compile_all(asked, lambda event: None)


def test_every_served_call_compiles_and_fits(compiled: tuple[str, Report]) -> None:
    op, report = compiled
    assert [each.reasons for each in report.broken] == []
    assert [row.sentence for row in report.failures] == []
    kept = [row for row in report.rows if row.kernel == KERNELS[op]]
    assert {row.arch for row in kept} == set(ARCHES)
    for row in report.rows:
        assert row.resources is not None and row.resources.waves >= 1, row.place
        assert row.resources.lds <= row.resources.lds_limit, row.place


def test_no_register_is_spilled(compiled: tuple[str, Report]) -> None:
    _, report = compiled
    assert [_spilled(row) for row in report.rows if row.resources is None or row.resources.spills] == []


def _spilled(row: Row) -> str:
    taken = row.resources
    numbers = (taken.vgpr_spills, taken.sgpr_spills, taken.scratch) if taken else ("?",) * 3
    return "{}: {} vector and {} scalar registers, {} bytes of scratch".format(row.place, *numbers)
