"""How is a whole set of kernels compiled from a process that must not import Triton, and nothing twice?"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from impl.executions.aot.cache import cache_directory, hash_of, keep, load
from impl.executions.aot.compile import FUSION
from impl.executions.aot.director import Event, Request
from impl.executions.aot.report import Report, Unasked
from impl.implementation import implementations

TRITONS = ((3, 6), (3, 9))
"""The first and the last version of Triton whose compiler is driven as here."""

_HOUSE = Path(__file__).parents[3]
_LAST_WORDS = 300


class AotError(RuntimeError):
    """The compilation as a whole could not be done; the message is one sentence."""


def unavailable() -> str:
    """The sentence on why nothing can be compiled here; empty where it can."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return "triton is not installed, and it compiles the kernels"
    version = _stated_version(Path(spec.origin))
    numbers = tuple(int(word) for word in version.split(".")[:2] if word.isdigit())
    if len(numbers) == 2 and not TRITONS[0] <= numbers <= TRITONS[1]:
        first, last = (".".join(map(str, each)) for each in TRITONS)
        return f"triton {version} is installed: should be {first} to {last}, whose compiler is known"
    return ""


def triton_impls(ops: Sequence[str], patterns: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The implementations of ops that launch Triton's kernels and whose name matches a pattern; all without one."""
    return tuple(
        (op, impl.name)
        for op in ops
        for impl in implementations(op)
        if (impl.interpreted or "triton" in impl.name or "gluon" in impl.name)
        and (not patterns or any(fnmatch.fnmatchcase(impl.name, pattern) for pattern in patterns))
    )


def compile_all(request: Request, progress: Callable[[Event], None]) -> Report:
    """Everything that a request names, compiled or found compiled before; `progress` hears how far it is.

    A wrapper that takes the process of its capture down is told as broken, and the others are asked again. Raises
    `AotError` where that process ends in another way than by a signal, or outside of wrappers.
    """
    started = time.perf_counter()
    place = cache_directory() / f"{_asked(request)}.report"
    known = load(place, Report)
    if known is not None:
        return msgspec.structs.replace(known, compiled=0, seconds=time.perf_counter() - started, cpu=0.0)
    broken: list[Unasked] = []
    while True:
        skip = tuple(f"{each.op} {each.impl}" for each in broken)
        report, capturing, code, said = _direct(msgspec.structs.replace(request, skip=skip), progress)
        if report is not None:
            break
        ending = f"died with signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        ending += f": {said}" if said else ""
        if code >= 0 or not capturing or capturing in skip:
            raise AotError(f"the process that captures launches {ending}")
        op, _, impl = capturing.partition(" ")
        broken.append(
            Unasked(op=op, impl=impl, arch=" ".join(request.arches), call="", broke=True, reasons=(f"its process {ending}",))
        )  # fmt: skip
    report = msgspec.structs.replace(
        report, unasked=(*report.unasked, *broken), seconds=time.perf_counter() - started
    )  # fmt: skip
    if not report.broken and all(row.failure in ("", "lds") for row in report.rows):
        keep(place, report)
    return report


def environment() -> dict[str, str]:
    """The environment of processes that compile: no interpreter, and products and sums that contract, as shipped."""
    found = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    parents = [str(_HOUSE), *filter(None, [found.get("PYTHONPATH", "")])]
    return {**found, FUSION: "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(parents)}


def _direct(request: Request, progress: Callable[[Event], None]) -> tuple[Report | None, str, int, str]:
    """One director's report; without one, what it was capturing last, its exit code, and its last words."""
    capturing = ""
    with tempfile.TemporaryDirectory(prefix="mla-oracle-aot-") as directory:
        asked, log = Path(directory) / "request.json", Path(directory) / "log"
        asked.write_bytes(msgspec.json.encode(request))
        command = [sys.executable, "-m", "impl.executions.aot.director", str(asked)]
        with log.open("wb") as errors:
            process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=errors)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if not line.endswith(b"\n"):
                    # It died while it spoke.
                    break
                event = msgspec.json.decode(line, type=Event)
                if event.report is not None:
                    process.wait()
                    return event.report, "", 0, ""
                capturing = event.capturing or capturing
                progress(event)
            code = process.wait()
        finally:
            # What it forked ends with it: they are its daemons.
            process.terminate()
            process.wait()
        said = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return None, capturing, code, said[-1][:_LAST_WORDS] if said else ""


def _asked(request: Request) -> str:
    """The hash of everything that decides the answer to a request."""
    digest = hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(request, workers=0)))
    here = Path(__file__).parent
    files = [path for room in ("cases", "impl") for path in sorted((_HOUSE / room).rglob("*.py"))]
    # Other executions of the same kernels say nothing about their machine code.
    digest.update(
        hash_of(*(path for path in files if here.parent not in path.parents or here in path.parents)).encode()
    )
    for package in ("triton", "torch", "numpy"):
        spec = importlib.util.find_spec(package)
        digest.update(json.dumps(_stamp(spec.origin if spec is not None else None)).encode())
    for package, stated in (("vllm", request.vllm), ("aiter", request.aiter)):
        installed = None if stated else importlib.util.find_spec(package)
        places = [stated] if stated else list(installed.submodule_search_locations or ()) if installed else []
        for place in places:
            digest.update(_tree(Path(place)))
    steering: Mapping[str, str] = {
        name: value for name, value in sorted(environment().items()) if name.startswith(("TRITON_", "AMDGCN_", "LLVM_", "MLIR_"))
    }  # fmt: skip
    digest.update(json.dumps(steering).encode())
    digest.update(sys.version.encode())
    return digest.hexdigest()


def _tree(root: Path) -> bytes:
    """The Python files below a directory as they are now: names, sizes, and when they were written."""
    digest = hashlib.sha256()
    for directory, below, names in os.walk(root):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(name for name in names if name.endswith(".py")):
            path = Path(directory, name)
            if path.is_file():
                state = path.stat()
                digest.update(f"{path}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return digest.digest()


def _stamp(origin: str | None) -> list[Any]:
    """An installed package by the files that change when it does."""
    if origin is None:
        return []
    root = Path(origin).parent
    files = [Path(origin), root / "version.py", *sorted(root.glob("_C/*.so")), *sorted(root.glob("backends/amd/*.py"))]
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]


def _stated_version(package: Path) -> str:
    """The version that a package's own text states."""
    for line in package.read_text("utf-8").splitlines():
        name, equals, value = line.partition("=")
        if equals and name.strip() == "__version__":
            return value.strip().strip("'\"")
    return ""
