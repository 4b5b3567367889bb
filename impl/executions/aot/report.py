"""What is known of every kernel, architecture and configuration once all are compiled?"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from impl.executions.aot.normalise import Shape
from impl.executions.aot.resources import Resources

FORMAT = 1

Failure = Literal["", "launch", "source", "backend", "crash", "hang", "lds"]


class ReportError(ValueError):
    """A file that is no report of compiled kernels; the message is one sentence."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Who launches a kernel: an implementation of an op in a call, as its `position`-th launch.

    inputs: `meta` where the call was made at its served size without memory, `values` where the wrapper reads values and
    was called with small ones.
    """

    op: str
    impl: str
    call: str
    position: int
    inputs: Literal["meta", "values"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel in one configuration on one architecture.

    module: where it is defined. constants: its constexpr arguments by name. options: what the launch says of the machine
    code. arguments: type of each other argument, with `/16` where it is divisible by 16 and `/32` where a pointer reaches
    no further than 32 bits. failure: who refused, empty where there is machine code that fits; sentence: why. seconds:
    wall time of its compilation.
    """

    kernel: str
    module: str
    arch: str
    key: str
    constants: dict[str, str]
    options: dict[str, str]
    arguments: str
    asked: tuple[Asked, ...] = ()
    notes: tuple[str, ...] = ()
    failure: Failure = ""
    sentence: str = ""
    seconds: float = 0.0
    resources: Resources | None = None
    shape: Shape | None = None

    @property
    def configuration(self) -> str:
        """Constants and options in one line."""
        return " ".join(f"{name}={value}" for name, value in (*self.constants.items(), *self.options.items()))

    @property
    def is_own(self) -> bool:
        """Whether it is one of this project's kernels."""
        return any(asked.impl.startswith("ours-") for asked in self.asked)

    @property
    def place(self) -> str:
        """The first who asks, the kernel and the architecture, for a sentence."""
        first = f"{self.asked[0].op} {self.asked[0].impl} " if self.asked else ""
        return f"{first}{self.kernel} on {self.arch}"


class Unasked(msgspec.Struct, frozen=True, kw_only=True):
    """An implementation whose kernels are not here for a call, and why; `broke` where its wrapper raised instead of saying so."""

    op: str
    impl: str
    arch: str
    call: str
    reasons: tuple[str, ...]
    broke: bool = False


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one command compiled, or found compiled before.

    compiled: how many rows were compiled by it. seconds, cpu: wall time and processor time of it all.
    """

    format: int = FORMAT
    triton: str
    torch: str
    vllm: str = ""
    aiter: str = ""
    arches: tuple[str, ...]
    rows: tuple[Row, ...]
    unasked: tuple[Unasked, ...] = ()
    compiled: int = 0
    seconds: float = 0.0
    cpu: float = 0.0

    @property
    def failures(self) -> tuple[Row, ...]:
        """The rows without machine code that fits."""
        return tuple(row for row in self.rows if row.failure)

    @property
    def broken(self) -> tuple[Unasked, ...]:
        """The wrappers that raised."""
        return tuple(each for each in self.unasked if each.broke)


def read_report(path: Path) -> Report:
    """The report in a file; raises `ReportError`."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}; it should be the aot.json of an earlier --out") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: {error}; it should be the aot.json of an earlier --out") from error
    if found.format != FORMAT:
        raise ReportError(f"{path}: has format {found.format}, should have {FORMAT}: compile it again")
    return found
