"""Do ranks with a device each answer as one process does? Runs where there are two devices or more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases.case import Case
from cases.covering import sweep_cases
from impl.implementation import Execution, implementations
from reports.environment import default_execution, environment
from reports.execute import attempt
from reports.plan import find_impl

DEVICES = torch.cuda.device_count()

pytestmark = pytest.mark.skipif(DEVICES < 2, reason=f"needs two devices, there are {DEVICES}")


def asked() -> list[Any]:
    """The default cases on two ranks, or on as many as there are devices, that can be asked of processes."""
    found = []
    for op in ("dcp.combine", "dcp.decode"):
        for case in sweep_cases(op, "default"):
            reach = case.settings.get("reach", "near")
            if case.settings["world"] in {2, DEVICES} and reach == "near":
                found += [pytest.param(case, impl.name, id=f"{impl.name} {case.id}") for impl in implementations(op)
                          if impl.name.startswith(("ours", "torch"))]  # fmt: skip
    return found


@pytest.mark.parametrize(("case", "name"), asked() if DEVICES >= 2 else [])
def test_processes_answer_as_one_process_does(case: Case, name: str) -> None:
    on: Execution = default_execution()
    impl, here = find_impl(case.op, name), environment(on)
    alone, together = (
        attempt(case.varied(ranks=ranks), impl, on, here).record for ranks in ("one_process", "processes")
    )
    assert (alone.status, together.status) == ("pass", "pass"), (*alone.reasons, *together.reasons)
    # A message is moved bits, and a sum of two has one order; more of them add in the library's.
    if case.settings["mode"] == "all_to_all" or case.settings["world"] == 2:
        assert together.fingerprint == alone.fingerprint
