"""May this file be written, and does a reader ever see half of it?

An output is written beside its place and renamed. A run of the gate overwrites what an earlier one wrote there, as a job
that runs again does; a file that the gate did not write is never touched.
"""

import os
from pathlib import Path

# What a sweep writes in the directory of a run itself, besides its folders.
_OF_A_RUN = ("run.json", "run.json.part", "plan.jsonl", "lock")
# Stands near the beginning of every file that the gate writes.
MARK = b"mla-oracle gate"
_LOOKED_AT = 4096


class OutputError(ValueError):
    """A place where an output cannot go; the message says what would be right."""


def outside_runs(option: str, path: Path) -> None:
    """Raise `OutputError` for what would lie in a folder of a run, or under the name of a file of its own."""
    place = path.resolve()
    for directory in place.parents:
        is_run = (directory / "run.json").is_file() or (directory / "plan.jsonl").is_file()
        if is_run and (directory != place.parent or place.name in _OF_A_RUN):
            raise OutputError(
                f"{option} {path}: belongs to the run {directory}, in which only a sweep writes; an output should go "
                "elsewhere, or beside run.json under a name of its own"
            )


def claim(option: str, path: Path) -> Path:
    """The path, if an output may be written there; raises `OutputError` otherwise, and writes nothing itself."""
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise OutputError(f"{option} {path}: should name a file in a directory that exists")
    outside_runs(option, path)
    if path.exists():
        if not path.is_file():
            raise OutputError(f"{option} {path}: is no regular file; it should be a new file")
        with path.open("rb") as file:
            head = file.read(_LOOKED_AT)
        # What steers a gate is TOML and may bear its name; what it writes is not.
        if head and (MARK not in head or path.suffix == ".toml"):
            raise OutputError(
                f"{option} {path}: exists, and mla-oracle gate did not write it; it should be a new file or an earlier output"
            )
    return path


def write(path: Path, text: str) -> None:
    """Put the text in its place at once."""
    place = path.resolve()
    draft = place.with_name(f".{place.name[:100]}.{os.getpid()}.part")
    try:
        draft.write_bytes(text.encode("utf-8", errors="backslashreplace"))
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)
