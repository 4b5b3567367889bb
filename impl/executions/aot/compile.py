"""What does Triton's AMD backend make of one captured launch, for an architecture that need not be present?

Triton is imported where it is needed, and must have been imported without its interpreter (TRITON_INTERPRET).
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

WAVE = 64
FUSION = "TRITON_DEFAULT_FP_FUSION"
"""Whether products and sums may contract, which Triton's versions decide differently unless they are told."""

# A change of what is derived from a compilation, or of what decides one, must not meet older answers.
_FORMAT = "1"
# Environment variables that change what the compiler does and enter no option.
_STEERING = ("TRITON_", "AMDGCN_", "LLVM_", "DISABLE_LLVM_OPT", "MLIR_")
_NOT_STEERING = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR")

Stage = Literal["launch", "source", "backend"]


class CompileError(Exception):
    """A launch that does not become machine code; `stage` says who refused, the message is one sentence.

    launch: its arguments or options do not fit the kernel. source: the kernel's own text is not valid for them. backend:
    the compiler gave up on a valid kernel.
    """

    def __init__(self, stage: Stage, sentence: str) -> None:
        super().__init__(sentence)
        self.stage = stage


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, bound for an architecture: everything that decides its machine code.

    function: the JIT function. signature: the type of each argument by name. constants: the values of constexpr arguments
    by position. attributes: what is known of the others, by position. options: the backend's, complete.
    """

    function: Any
    signature: Mapping[str, str]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]
    arch: str

    @property
    def name(self) -> str:
        """The kernel's own name."""
        return str(self.function.__name__)


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a launch.

    assembly: the text that the backend emits. metadata: Triton's, of which `shared` is the memory of a workgroup that
    the launch asks for, in bytes. key: what the compilation is known by in a cache. seconds: wall time of the compilation.
    """

    key: str
    assembly: str
    metadata: dict[str, Any]
    code: bytes = b""
    seconds: float = 0.0


def target_of(arch: str) -> Any:
    """Triton's name of an architecture with waves of 64."""
    return importlib.import_module("triton.backends.compiler").GPUTarget("hip", arch, WAVE)


def bind(function: Any, args: tuple[Any, ...], keywords: Mapping[str, Any], arch: str) -> Launch:
    """The launch that a call `function[grid](*args, **keywords)` makes on an architecture.

    Raises `CompileError` at the stage `launch` for arguments or options that the kernel or the backend does not take.
    """
    return bind_call(function, args, keywords, arch)[0]


def bind_call(
    function: Any, args: tuple[Any, ...], keywords: Mapping[str, Any], arch: str
) -> tuple[Launch, Mapping[str, Any]]:
    """As `bind`, with the value of every parameter by name, defaults filled in."""
    backend, binder = _binder(function, arch)
    given = {**keywords, "debug": False}
    try:
        bound, specialization, options = binder(*args, **given)
        options, signature, constants, attributes = function._pack_args(backend, given, bound, specialization, options)
    except Exception as error:
        raise CompileError("launch", f"{function.__name__}: {type(error).__name__}: {_line(error)}") from error
    return Launch(function, signature, constants, attributes, dict(vars(options)), arch), bound


@functools.lru_cache(maxsize=1024)
def _binder(function: Any, arch: str) -> tuple[Any, Any]:
    """Triton's backend for an architecture, and what sorts a call's arguments; writing the latter takes a millisecond."""
    backend = importlib.import_module("triton.compiler").make_backend(target_of(arch))
    create = importlib.import_module("triton.runtime.jit").create_function_from_signature
    return backend, create(function.signature, function.params, backend)


def key_of(launch: Launch) -> str:
    """The hash of all that decides the machine code: source, signature, constants, options, architecture and compiler."""
    triton = importlib.import_module("triton")
    backend = importlib.import_module("triton.compiler").make_backend(target_of(launch.arch))
    environment = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_STEERING) and name not in _NOT_STEERING
    }
    parts = (
        _FORMAT, triton.__version__, backend.hash(), launch.arch, launch.name, _source(launch).hash(),
        json.dumps(dict(launch.options), sort_keys=True, default=str), json.dumps(environment),
    )  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def compile_launch(launch: Launch) -> Compiled:
    """The machine code of a launch, always compiled anew; raises `CompileError` with the stage that refused.

    A compiler that ends its process ends this one: run it in a process of its own.
    """
    compiler = importlib.import_module("triton.compiler")
    failures = importlib.import_module("triton.compiler.errors")
    key = key_of(launch)
    started = time.perf_counter()
    try:
        with _own_cache():
            done = compiler.compile(_source(launch), target=target_of(launch.arch), options=dict(launch.options))
    except failures.CompilationError as error:
        raise CompileError("source", f"{launch.name}: {_compilation_sentence(error)}") from error
    except Exception as error:
        raise CompileError("backend", f"{launch.name}: {type(error).__name__}: {_line(error)}") from error
    seconds = time.perf_counter() - started
    metadata = {name: value for name, value in done.metadata._asdict().items() if _is_plain(value)}
    return Compiled(
        key=key, assembly=str(done.asm["amdgcn"]), metadata=metadata, code=bytes(done.asm.get("hsaco", b"")), seconds=seconds
    )  # fmt: skip


def externals(launch: Launch) -> list[str]:
    """What in the kernel's own text no model of Triton's language covers: inline assembly and functions of libraries."""
    text = "\n".join(_texts(launch.function, set()))
    found = []
    if re.search(r"\binline_asm_elementwise\s*\(", text):
        found.append("inline assembly")
    if re.search(r"\bextern_elementwise\s*\(|\blibdevice\.\w+\s*\(|\btldevice\.\w+\s*\(", text):
        found.append("functions of a device library")
    return found


def _texts(function: Any, seen: set[int]) -> Iterator[str]:
    """The source of a JIT function and of those that it calls by name."""
    if id(function) in seen:
        return
    seen.add(id(function))
    yield function.src
    jit = importlib.import_module("triton.runtime.jit").JITFunction
    for name in set(re.findall(r"[A-Za-z_]\w*", function.src)):
        called = function.__globals__.get(name)
        if isinstance(called, jit) and not called.__module__.startswith("triton."):
            yield from _texts(called, seen)


def _source(launch: Launch) -> Any:
    if launch.function.is_gluon():
        kind = importlib.import_module("triton.experimental.gluon._runtime").GluonASTSource
    else:
        kind = importlib.import_module("triton.compiler").ASTSource
    return kind(launch.function, dict(launch.signature), dict(launch.constants), dict(launch.attributes))


@contextmanager
def _own_cache() -> Iterator[None]:
    """Triton's own cache is empty inside: an answer from there would say nothing about the compiler."""
    name = "TRITON_CACHE_DIR"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory(prefix="mla-oracle-aot-") as directory:
        os.environ[name] = directory
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float | bool | None)


def _line(error: BaseException) -> str:
    """The message of an exception in one line."""
    said = " ".join(str(error).split())
    return said if len(said) <= 300 else said[:297] + "..."


def _compilation_sentence(error: BaseException) -> str:
    """What the front end says of a kernel's text: the innermost reason, and the line that it is about."""
    inner: BaseException = error
    while inner.__cause__ is not None and type(inner.__cause__).__name__ == type(error).__name__:
        inner = inner.__cause__
    node = getattr(inner, "node", None)
    reason = getattr(inner, "error_message", None) or (_line(inner.__cause__) if inner.__cause__ else _line(inner))
    place = f"line {node.lineno}: " if node is not None and hasattr(node, "lineno") else ""
    source = getattr(inner, "src", None)
    line = ""
    if source and node is not None and 0 < node.lineno <= len(source.splitlines()):
        line = f" in `{source.splitlines()[node.lineno - 1].strip()}`"
    return f"{place}{' '.join(str(reason).split())}{line}"
