"""Is every way of going wrong told by its kernel and by its name, and does the command outlive it?"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from impl.executions.aot import cache
from impl.executions.aot.compile import Compiled
from impl.executions.aot.run import environment

STAND_INS = Path(__file__).parent / "stand_in_kernels.py"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What became of each stand-in, by its name."""
    cache = str(tmp_path_factory.mktemp("cache"))
    done = subprocess.run(
        [sys.executable, str(STAND_INS)], env={**environment(), "MLA_ORACLE_CACHE": cache}, capture_output=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, list[dict[str, Any]]] = {}
    for each in json.loads(done.stdout):
        found.setdefault(each["kernel"], []).append(each)
    return found


def test_a_kernel_compiles(told: dict[str, list[dict[str, Any]]]) -> None:
    for each in told["copies"]:
        outcome = each["outcome"]
        assert outcome["failure"] == ""
        assert outcome["resources"]["vgpr"] > 0 and outcome["resources"]["waves"] == 8
        assert not outcome["resources"]["scratch"]


def test_how_far_a_pointer_reaches_is_another_kernel(told: dict[str, list[dict[str, Any]]]) -> None:
    # Small memory is addressed as a buffer with 32 bits, 4 GiB with 64.
    near, far = told["copies"]
    assert near["key"] != far["key"]
    assert near["outcome"]["shape"]["masked"] != far["outcome"]["shape"]["masked"]


def test_a_kernel_that_spills_is_seen(told: dict[str, list[dict[str, Any]]]) -> None:
    (each,) = told["spills"]
    taken = each["outcome"]["resources"]
    assert taken["vgpr_spills"] > 0 and taken["scratch"] > 0 and taken["vgpr"] == 64


def test_more_memory_than_there_is_fails(told: dict[str, list[dict[str, Any]]]) -> None:
    (each,) = told["takes_too_much_memory"]
    outcome = each["outcome"]
    assert outcome["failure"] == "lds"
    assert outcome["resources"]["lds"] > outcome["resources"]["lds_limit"] == 65536
    assert outcome["resources"]["waves"] == 0
    assert "but should be at most 65536" in outcome["sentence"]


def test_a_text_that_is_no_kernel_is_told_with_its_line(told: dict[str, list[dict[str, Any]]]) -> None:
    (each,) = told["is_no_kernel"]
    assert each["outcome"]["failure"] == "source"
    assert "line 2" in each["outcome"]["sentence"] and "tl.store(out" in each["outcome"]["sentence"]


def test_a_compiler_that_dies_is_told_of_its_kernel(told: dict[str, list[dict[str, Any]]]) -> None:
    (each,) = told["kills"]
    assert each["outcome"]["failure"] == "crash"
    assert each["outcome"]["sentence"] == (
        "kills: the compiler's process died with signal SIGABRT: LLVM ERROR: a stand-in for an assertion"
    )


def test_a_compiler_that_never_ends_is_ended(told: dict[str, list[dict[str, Any]]]) -> None:
    (each,) = told["never_ends"]
    assert each["outcome"]["failure"] == "hang"


def test_inline_assembly_compiles_and_is_noted(told: dict[str, list[dict[str, Any]]]) -> None:
    (each,) = told["has_assembly"]
    assert each["externals"] == ["inline assembly"]
    assert each["outcome"]["failure"] == ""


def test_a_cache_that_is_no_directory_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("MLA_ORACLE_CACHE", str(tmp_path / "file"))
    path = cache.cache_directory() / "key.code"
    cache.keep(path, Compiled(key="key", assembly="", metadata={}))
    assert cache.load(path, Compiled) is None
    assert (tmp_path / "file").read_text() == "mine"
