"""Which line runs a case again, as it was run?"""

import dataclasses
import shlex
from pathlib import Path

from reports.record import Record
from reports.store import Settings


@dataclasses.dataclass(frozen=True)
class Trees:
    """The source trees that the user pointed at; None where the installed one is meant."""

    vllm: Path | None = None
    aiter: Path | None = None

    @property
    def words(self) -> str:
        """The options that name them, for a line to run again; empty or with a blank in front."""
        return "".join(
            f" --{name} {shlex.quote(str(path))}"
            for name, path in (("vllm", self.vllm), ("aiter", self.aiter))
            if path is not None
        )

    @classmethod
    def of(cls, settings: Settings) -> "Trees":
        """Those of a run."""
        return cls(*(Path(text) if text else None for text in (settings.vllm, settings.aiter)))


NO_TREES = Trees()


def replay_line(record: Record, trees: Trees = NO_TREES) -> str:
    """The shell line that runs the record's case, or its law on it, again."""
    law = f" --law {shlex.quote(record.law)}" if record.law else ""
    who = f"--impl {shlex.quote(record.impl)} --on {shlex.quote(record.on)}"
    return f"mla-oracle replay {shlex.quote(record.case)} {who}{law}{trees.words}"
