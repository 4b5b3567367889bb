"""Is a launch the onlooker's to run, and do launch options from outside take the place of the kernel's own?"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from impl.executions.isa import triton_launch
from impl.executions.isa.triton_launch import OPTIONS

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def _launched(options: str) -> dict[str, Any]:
    kept = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", OPTIONS)}
    changed = {**kept, "PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1", OPTIONS: options}
    line = [sys.executable, str(HERE / "looked_on_launch.py")]
    done = subprocess.run(line, env=changed, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("options", "waves"), [("", 4), ("num_warps=2", 2), ("num_warps=1,num_stages=1", 1)])
def test_options_replace_those_of_a_launch(options: str, waves: int) -> None:
    found = _launched(options)
    assert found["waves"] == waves
    assert found["steps"] > 0 and found["seen"] == 1
    # Looked on, swallowed, and as ever behind that.
    assert found["sums"] == [768, 0, 768]
    # Named, and neither compiled nor run: the same name for the same compilation.
    first, again, other = found["named"]
    assert first == again == found["key"] != other
    assert found["untouched"] == 0


@pytest.mark.parametrize(
    "stated", ["num_warps", "num_warps=0", "num_ctas=2", "num_warps=2;num_stages=1", "num_warps=two"]
)
def test_what_is_no_option_is_a_reason(stated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTIONS, stated)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="each with a number, between commas"):
        triton_launch.launch_options()
    assert any(OPTIONS in reason for reason in triton_launch.unsupported("gfx950"))


@pytest.mark.parametrize("waves", [3, 6, 32, 64])
def test_waves_that_no_workgroup_has_are_a_reason(waves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTIONS, f"num_warps={waves}")
    with pytest.raises(ValueError, match=rf"num_warps={waves}: num_warps should be one of 1, 2, 4, 8, 16$"):
        triton_launch.launch_options()
