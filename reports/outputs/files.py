"""May this file be written, and does a reader ever see half of it?

An output is written beside its place and renamed. A run of the gate overwrites what an earlier one wrote there, as a job
that runs again does; a file that the gate did not write is never touched.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What a sweep writes in the directory of a run itself, besides its folders.
_OF_A_RUN = ("run.json", "run.json.part", "plan.jsonl", "lock")
# The first line of Markdown that the gate writes to a file of its own.
MARKDOWN_MARK = "<!-- mla-oracle gate wrote this file; the next one overwrites it -->"
# How each output begins, in the letters of its writer: JSON, JUnit XML, SARIF, Markdown.
_OURS = re.compile(
    rb"""\{\n  "kind": "mla-oracle gate",\n  "schema": \d+,\n  "gate": "(?:open|closed)",\n"""
    rb"""|<\?xml version="1\.0" encoding="UTF-8"\?>\n<testsuites name=["']mla-oracle gate """
    rb"""|\{\n  "\$schema": "[^"\n]+",\n  "version": "2\.1\.0",\n  "runs": \[\n    \{\n      "tool": \{\n"""
    rb"""        "driver": \{\n          "name": "mla-oracle gate",\n"""
    rb"|" + re.escape(MARKDOWN_MARK.encode()) + rb"\n"
)
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
        if head and not _OURS.match(head):
            raise OutputError(
                f"{option} {path}: exists, and mla-oracle gate did not write it; it should be a new file or an earlier output"
            )
    return path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An `OSError` in between names the path: Python's own does not where a file that is open has no room."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write(path: Path, text: str) -> None:
    """Put the text in its place at once."""
    place = path.resolve()
    draft = place.with_name(f".{place.name[:100]}.{os.getpid()}.part")
    try:
        with naming(path):
            draft.write_bytes(text.encode("utf-8", errors="backslashreplace"))
            draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)
