"""What must be settled before any test imports torch or triton, and what do tests of all families ask alike?

Triton reads TRITON_INTERPRET when a kernel is decorated, and torch its thread count when it is imported; one thread a
worker, since the workers share the cores.
"""

import os
import re
import sys

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TREE = os.environ.get("MLA_ORACLE_VLLM")
# An op among a test's parameters, alone or with the name of an implementation.
_OP = re.compile(r"\[([a-z0-9_]+\.[a-z0-9_]+)[]/]")
_NO_TREE = pytest.mark.skip(reason="MLA_ORACLE_VLLM names no vLLM source tree")
MACHINE = os.environ.get("MLA_ORACLE_MACHINE") == "1"
_NOT_ALL = pytest.mark.skip(reason="minutes long: nox -s isa asks it, with MLA_ORACLE_MACHINE=1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `vllm` are skipped where there is no tree, those marked `machine` unless they are asked for."""
    for item in items:
        if TREE is None and item.get_closest_marker("vllm"):
            item.add_marker(_NO_TREE)
        if not MACHINE and item.get_closest_marker("machine"):
            item.add_marker(_NOT_ALL)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, tests that share what is costly to make go to one worker, and those of the most begin."""
    if config.getoption("dist") != "load":
        return None
    scheduling = importlib.import_module("xdist.scheduler").LoadScopeScheduling

    class Sharing(scheduling):  # type: ignore[misc, valid-type]
        def _split_scope(self, nodeid: str) -> str:
            return shared_by(nodeid)

    return Sharing(config, log)


def shared_by(nodeid: str) -> str:
    """What is made once for a test and others: an op's cases, the browser's pages, an installation; else the test."""
    file, _, test = nodeid.partition("::")
    if "/contract/" in file:
        op = _OP.search(test)
        return op[1] if op else nodeid
    if "/packaging/" in file:
        return "packaging"
    return file if file.endswith("test_html_browser.py") else nodeid


@pytest.fixture(autouse=True)
def _tree_of_vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tests marked `vllm`, vLLM is the tree that MLA_ORACLE_VLLM names."""
    if TREE is not None and request.node.get_closest_marker("vllm"):
        monkeypatch.setattr(importlib.import_module("impl.sources.settings"), "_vllm", Path(TREE))


@pytest.fixture(scope="session")
def verdict() -> Callable[..., tuple[str, list[str]]]:
    """What a sweep would record of an implementation and a case, or a law on it: the status, and what was wrong."""
    running = importlib.import_module("reports.execute")
    environment = importlib.import_module("reports.record").Environment(
        machine="", python="", torch="", triton="", numpy="", device=""
    )

    def found(case: Any, impl: Any, law: str = "") -> tuple[str, list[str]]:
        with pytest.MonkeyPatch.context() as patch:
            # Which mutant a failure resembles takes long to find and is not asked here.
            patch.setattr(running, "diagnose", lambda *_: ())
            record = running.execute(case, impl, "interpreter", environment, law=law)
        return record.status, [*record.reasons, *(str(check) for check in record.checks if not check.passed)]

    return found


@pytest.fixture(scope="session")
def watched() -> Callable[[Any, Any], Any]:
    """An implementation's answer to a private copy of the inputs, every access watched and nothing else written."""
    memory = importlib.import_module("cases.memory")
    watch = importlib.import_module("impl.executions.memory_watch").watch

    def answer(impl: Any, inputs: Any) -> Any:
        used = memory.on_device(inputs, "cpu")
        with watch():
            outputs = impl.run(used)
        assert memory.trespasses(inputs, used, sys.modules[type(inputs).__module__].WRITABLE) == []
        return outputs

    return answer
