"""Which of the things that kernels rely on does Triton's interpreter get right, as shipped and as repaired here?

``table`` asks both: it runs every check of ``impl.executions.conformance_kernels`` in two fresh processes, since an
interpreter cannot be unrepaired. One column can be had alone:

    python -m impl.executions.conformance --stock
    python -m impl.executions.conformance --corrected
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["right", "wrong", "raises"]


@dataclasses.dataclass(frozen=True)
class Row:
    """One behaviour: what was checked, and how the interpreter did before and after the repair."""

    name: str
    checks: str
    stock: Verdict
    corrected: Verdict
    note: str
    """What the first wrong answer was, in the corrected column if that is wrong, else in the stock one."""

    def __str__(self) -> str:
        return f"{self.name}: stock {self.stock}, corrected {self.corrected}" + (f" ({self.note})" if self.note else "")


def table() -> list[Row]:
    """Every row of the conformance table, in the order of the checks.

    Raises RuntimeError with the output of a column's process if it dies instead of answering.
    """
    stock, corrected = _column("--stock"), _column("--corrected")
    return [
        Row(
            before["name"],
            before["checks"],
            before["verdict"],
            after["verdict"],
            after["note"] if after["verdict"] != "right" else before["note"],
        )
        for before, after in zip(stock, corrected, strict=True)
    ]


def _column(flag: str) -> list[dict[str, Any]]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "impl.executions.conformance", flag],
        env=environment, cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"conformance {flag} ended with {done.returncode}: {done.stderr[-2000:]}")
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def _answer(corrected: bool) -> list[dict[str, Any]]:
    os.environ["TRITON_INTERPRET"] = "1"
    if corrected:
        importlib.import_module("impl.executions.interpreter").install()
    checks = importlib.import_module("impl.executions.conformance_kernels").CHECKS
    answers = []
    for check in checks:
        verdict, note = check.verdict()
        answers.append({"name": check.name, "checks": check.checks, "verdict": verdict, "note": note})
    return answers


def main(arguments: list[str]) -> int:
    """Print one column as a line of JSON."""
    if arguments not in (["--stock"], ["--corrected"]):
        sys.stderr.write("usage: python -m impl.executions.conformance --stock | --corrected\n")
        return 2
    answers = _answer(arguments == ["--corrected"])
    sys.stdout.write(json.dumps(answers) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
