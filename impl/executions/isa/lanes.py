"""Turns the tables of meanings into compiled loops over the lanes of a wave, kept on disk per version of the tables.

The source is written out (one branch an instruction, one loop over the lanes in each), imported as a module and
compiled by numba, which keeps the machine code beside it. The directory is named after a hash of everything that decides
the code, so that a change of a table can never meet an old compilation.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import numba

from impl.executions.isa.meaning import COMPARE, SAVE_EXEC, SCALAR, VECTOR, Scalar, Vector

CHUNK = 32
"""Instructions of one compiled function: few enough that the compiler stays quick."""

_HERE = Path(__file__).parent
# What decides the compiled code.
_COMPILED = ("arithmetic.py", "core.py", "encoding.py", "lanes.py", "meaning.py")
_INTEGERS = {"u": "i64(X[lane])", "i": "i64(S(X[lane]))", "w": "i64(X[lane]) & 0xFFFF", "s": "extend(i64(X[lane]), 16)"}
_SOURCES = _INTEGERS | {
    "f": "f32_of(i64(X[lane]))",
    "h": "from_half(i64(X[lane]) & 0xFFFF)",
    "k": "from_bf16(i64(X[lane]))",
    "q": "u64(X[lane]) | u64(X[lane + 64]) << u64(32)",
    "l": "i64(u64(X[lane]) | u64(X[lane + 64]) << u64(32))",
    "d": "f64_of(u64(X[lane]) | u64(X[lane + 64]) << u64(32))",
}
_RESULTS = {
    "u": "R[lane + P] = u32(i64({}))",
    "i": "R[lane + P] = u32(i64({}))",
    "w": "R[lane + P] = u32(i64({}) & 0xFFFF)",
    "s": "R[lane + P] = u32(i64({}) & 0xFFFF)",
    "f": "R[lane + P] = u32(bits_of_f32(f32({})))",
    "h": "R[lane + P] = u32(clamped_half(f64({}), mode))",
}
_WIDE_RESULTS = {
    "q": "u64({})",
    "l": "u64(i64({}))",
    "d": "bits_of_f64(f64({}))",
}
_NAMES = "abce"
_HEAD = '''"""Generated from impl.executions.isa.meaning; changes here are lost."""
import math
import numpy as np
from numba import carray, cfunc, types
from impl.executions.isa.arithmetic import *
from impl.executions.isa.arithmetic import f32, f64, u32, u64, i64, f32_of, f64_of, bits_of_f32, bits_of_f64
S = np.int32
P = types.CPointer(types.uint32)
VECTOR = types.void(types.int64, types.int64, types.int64, types.int64, types.int64, P, P, P, P, P, P, P)
SCALAR = types.void(types.int64, types.int64, types.CPointer(types.uint64))
'''


def plan() -> tuple[dict[str, int], dict[str, int]]:
    """The number of every vector (compares included) and every scalar instruction."""
    vectors = {name: number for number, name in enumerate([*VECTOR, *COMPARE])}
    scalars = {name: number for number, name in enumerate([*SCALAR, *SAVE_EXEC])}
    return vectors, scalars


def _vector_branch(meaning: Vector) -> list[str]:
    lines = ["for lane in range(n):"]
    for name, letter in zip(_NAMES, meaning.sources, strict=False):
        lines.append(f"    {name} = {_SOURCES[letter].replace('X', name.upper())}")
    if meaning.mask:
        lines.append("    m = i64(M[lane])")
    if meaning.carry:
        lines.append(f"    K[lane] = u32(i64({meaning.carry}) & 1)")
    place = 0
    for letter, expression in meaning.results:
        if letter in _WIDE_RESULTS:
            lines.append(f"    wide = {_WIDE_RESULTS[letter].format(expression)}")
            lines.append(f"    R[lane + {place}] = u32(wide & u64(0xFFFFFFFF))")
            lines.append(f"    R[lane + {place + 64}] = u32(wide >> u64(32))")
            place += 128
        else:
            lines.append("    " + _RESULTS[letter].format(expression).replace("P]", f"{place}]"))
            place += 64
    return lines


_SCALAR_SOURCES = {
    "u": "i64(X & u64(0xFFFFFFFF))",
    "i": "i64(S(X & u64(0xFFFFFFFF)))",
    "s": "extend(i64(X & u64(0xFFFF)), 16)",
    "w": "i64(X & u64(0xFFFF))",
    "q": "X",
    "l": "i64(X)",
}


def _scalar_branch(name: str, meaning: Scalar) -> list[str]:
    lines = [
        f"{source} = {_SCALAR_SOURCES[letter].replace('X', f'Q[{place}]')}"
        for place, (source, letter) in enumerate(zip("ab", meaning.sources, strict=False))
    ]
    if meaning.reads_destination:
        letter = meaning.result or ("i" if name.endswith("i32") else "u")
        lines.append(f"d = {_SCALAR_SOURCES[letter].replace('X', 'Q[2]')}")
    if "scc" in meaning.expression:
        lines.append("scc = i64(Q[3])")
    if name in SAVE_EXEC:
        lines.append("x = Q[2]")
    lines.append(f"r = {meaning.expression}")
    if meaning.result:
        lines.append("Q[4] = u64(r) & u64(0xFFFFFFFF)" if meaning.result in "ui" else "Q[4] = u64(r)")
    if meaning.scc:
        lines.append(f"Q[3] = u64(1) if {meaning.scc} else u64(0)")
    return lines


def _function(name: str, head: list[str], branches: list[tuple[int, str, list[str]]]) -> str:
    lines = list(head)
    word = "if"
    for number, mnemonic, body in branches:
        lines.append(f"    {word} op == {number}:  # {mnemonic}")
        lines += [f"        {line}" for line in body]
        word = "elif"
    return "\n".join(lines) + "\n"


def source() -> str:
    """The text of the generated module."""
    vectors, scalars = plan()
    parts = [_HEAD]
    everything = VECTOR | COMPARE
    branches = [(number, name, _vector_branch(everything[name])) for name, number in vectors.items()]
    for start in range(0, len(branches), CHUNK):
        head = [
            "@cfunc(VECTOR, cache=True)",
            f"def vector_{start // CHUNK}(op, n, mode, table, clamp, a_, b_, c_, e_, m_, k_, r_):",
            *(f"    {name.upper()} = carray({name}_, (128,), np.uint32)" for name in "abcemk"),
            "    R = carray(r_, (256,), np.uint32)",
            "    high = table",
        ]
        parts.append(_function(f"vector_{start // CHUNK}", head, branches[start : start + CHUNK]))
    head = ["@cfunc(SCALAR, cache=True)", "def scalar(op, unused, q_):", "    Q = carray(q_, (8,), np.uint64)"]
    meanings = SCALAR | SAVE_EXEC
    parts.append(
        _function(
            "scalar", head, [(number, name, _scalar_branch(name, meanings[name])) for name, number in scalars.items()]
        )
    )
    parts.append(f"VECTORS = ({', '.join(f'vector_{k}' for k in range(-(-len(branches) // CHUNK)))},)\n")
    return "\n\n".join(parts)


@functools.cache
def directory() -> Path:
    """Where the compiled executor of this version of its sources lies; made on first use."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {numba.__version__}".encode())
    for name in _COMPILED:
        digest.update((_HERE / name).read_bytes())
    stated = os.environ.get("MLA_ORACLE_CACHE")
    root = Path(stated) if stated else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mla-oracle"
    for base in (root, Path(tempfile.gettempdir(), f"mla-oracle-{os.getuid()}")):
        place = base / "isa" / digest.hexdigest()[:16]
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        # The compiled outer loop goes there as well, wherever the sources lie.
        numba.config.CACHE_DIR = str(place)
        return place
    raise OSError(f"{root}: should be a directory that can be written, for the compiled executor")


@functools.cache
def compiled() -> ModuleType:
    """The generated module, its functions compiled or loaded from disk."""
    text = source()
    path = directory() / "generated_lanes.py"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        beside = path.with_suffix(f".{os.getpid()}.tmp")
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    name = "impl.executions.isa.generated_lanes"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def forget() -> None:
    """Deletes the compiled executor from disk, so that it is compiled anew where it is asked for next."""
    for path in directory().rglob("*.nb[ic]"):
        path.unlink(missing_ok=True)
    compiled.cache_clear()
