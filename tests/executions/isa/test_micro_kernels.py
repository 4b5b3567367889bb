"""Do small kernels, compiled by Triton for each architecture and executed as its machine code, give the known answers?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_PARTS = {"elementwise and casts": ["elementwise", "division", "maximum", "cast", "codes", "narrow", "beyond", "ties"],
          "integers": ["integers"], "reductions": ["reduce", "softmax", "scans"],
          "movement and control": ["transposes", "gathers", "reshape", "sort", "histogram", "masked", "loop", "axes"],
          "atomics": ["atomic", "tickets"], "products": ["dot "], "scaled products": ["dot_scaled", "attention"]}  # fmt: skip

pytestmark = pytest.mark.machine


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> dict[str, str]:
    """Of an architecture, each check's name and what was wrong with it."""
    arch = request.param
    # Kernels decorated under TRITON_INTERPRET=1, as in this process, cannot be compiled.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "PYTHONPATH": str(ROOT)
    }
    command = [sys.executable, "-m", "tests.executions.isa.micro_kernels", arch]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines())


_BOTH = pytest.mark.parametrize("answers", ["gfx942", "gfx950"], indirect=True)


@pytest.mark.timeout(900)
@_BOTH
@pytest.mark.parametrize("part", _PARTS)
def test_known_answers(answers: dict[str, str], part: str) -> None:
    asked = {name: said for name, said in answers.items() if any(word in name for word in _PARTS[part])}
    assert asked
    assert {name: said for name, said in asked.items() if said} == {}


@_BOTH
def test_every_check_belongs_to_a_part(answers: dict[str, str]) -> None:
    words = [word for part in _PARTS.values() for word in part]
    assert [name for name in answers if not any(word in name for word in words)] == []
    assert len(answers) > 150
