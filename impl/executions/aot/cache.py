"""Where is kept what was compiled before, so that it is compiled once?

In `$MLA_ORACLE_CACHE`, or in `mla-oracle` of the user's cache directory. Every file appears whole or not at all, and one
that cannot be read counts as missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from pathlib import Path
from typing import TypeVar

import msgspec

from impl.executions.aot.compile import Compiled, Launch, compile_launch, key_of

T = TypeVar("T", bound=msgspec.Struct)


def cache_directory() -> Path:
    """The directory of compiled kernels; it need not exist."""
    stated = os.environ.get("MLA_ORACLE_CACHE")
    if stated:
        return Path(stated) / "aot"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mla-oracle" / "aot"


def compiled(launch: Launch) -> Compiled:
    """The machine code of a launch, from the cache or compiled now and kept; raises `CompileError`."""
    path = cache_directory() / f"{key_of(launch)}.code"
    found = load(path, Compiled)
    if found is None:
        found = compile_launch(launch)
        keep(path, found)
    return found


def load(path: Path, kind: type[T]) -> T | None:
    """What a file of the cache holds; None where it is missing or is not what it should be."""
    try:
        return msgspec.msgpack.decode(zlib.decompress(path.read_bytes()), type=kind)
    except (OSError, zlib.error, msgspec.DecodeError):
        return None


def keep(path: Path, value: msgspec.Struct) -> None:
    """Put a value into a file of the cache; where there is no room or no right to write, it is only not kept."""
    place = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(zlib.compress(msgspec.msgpack.encode(value), 3))
        place.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            place.unlink(missing_ok=True)


def hash_of(*paths: Path) -> str:
    """The hash of the bytes of files and of their names; a missing file counts as empty."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path}\0".encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()
