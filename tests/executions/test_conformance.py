"""Does the conformance table tell the repaired interpreter from the stock one, and would it notice a wrong answer?"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from impl.executions import conformance
from impl.executions.conformance import Row


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return conformance.table()


def test_every_row_is_right_after_the_repair(table: list[Row]) -> None:
    assert [str(row) for row in table if row.corrected != "right"] == []


@pytest.mark.parametrize(
    "name",
    ["e4m3fn to fp32", "fp32 to bf16: ties", "fp32 to e4m3fn: ties", "bf16 x * y", "bf16 x == y with NaN",
     "dot bf16, k=512", "not on a block", "and on blocks", "cumsum bf16", "fp32 to int32: out of range"],
)  # fmt: skip
def test_the_stock_interpreter_is_shown_wrong(table: list[Row], name: str) -> None:
    (row,) = [row for row in table if row.name == name]
    assert row.stock != "right"
    assert row.note


def test_names_are_unique(table: list[Row]) -> None:
    names = [row.name for row in table]
    assert len(set(names)) == len(names) > 200


def test_a_difference_is_found_and_said() -> None:
    from impl.executions import conformance_kernels

    same = torch.tensor([1.0, torch.nan])
    assert conformance_kernels._differs(same, same) == ""
    said = conformance_kernels._differs(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]))
    assert said == "[1]=2.5, should be 2; 1 of 2 differ"
    assert conformance_kernels._differs(torch.tensor([-0.0]), torch.tensor([0.0])) != ""
    assert conformance_kernels._far(torch.tensor([1.0]), torch.tensor([1.5]), torch.tensor([0.25])) != ""


def test_a_check_that_raises_is_not_right() -> None:
    from impl.executions import conformance_kernels

    def broken() -> str:
        raise ValueError("no such thing")

    check = conformance_kernels.Check("broken", "nothing", broken)
    assert check.verdict() == ("raises", "ValueError: no such thing")


def test_a_column_needs_its_flag() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "impl.executions.conformance"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
