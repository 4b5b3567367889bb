"""Do ranks with a device each answer as one process does? Runs where there are two devices or more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cases.case import Case
from cases.covering import sweep_cases
from reports import command
from reports.environment import default_execution
from reports.store import read_run

DEVICES = torch.cuda.device_count()


def asked() -> list[Case]:
    """The default cases on two ranks, or on as many as there are devices, whose memory can be sent."""
    return [
        case
        for op in ("dcp.combine", "dcp.decode")
        for case in sweep_cases(op, "default")
        if case.settings["world"] in {2, DEVICES} and case.settings["reach"] == "near"
    ]


@pytest.mark.skipif(DEVICES < 2, reason=f"needs two devices, there are {DEVICES}")
@pytest.mark.timeout(1800)
def test_processes_answer_as_one_process_does(tmp_path: Path) -> None:
    # A sweep has processes of its own, which compile: this one interprets.
    pairs = {case.varied(ranks="one_process").id: case.varied(ranks="processes").id for case in asked()}
    ids = [word for case in (*pairs, *pairs.values()) for word in ("--case", case)]
    on, out = default_execution(), tmp_path / "run"
    arguments = ["sweep", "--on", on, "--impl", "ours-*", "--impl", "torch-*", "--workers", "8", "--out", str(out)]
    assert command.main([*arguments, *ids]) == 0
    records: dict[Any, Any] = {(key[0], key[1]): record for key, record in read_run(out).records.items()}
    impls = {impl for _, impl in records}
    compared = 0
    for alone, together in pairs.items():
        # A message is moved bits, and a sum of two has one order; more of them add in the library's.
        if "mode=all_to_all" in alone or "world=2," in alone:
            for impl in impls:
                if (alone, impl) in records:
                    assert records[alone, impl].fingerprint == records[together, impl].fingerprint, together
                    compared += 1
    assert compared > 50
