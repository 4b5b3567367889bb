"""What is kept of one case on one implementation?"""

import msgspec

from cases.precision import Precision
from oracle.check import Check, Status

# Begins the reason of an error after which the device answered no more, though the kernel was not seen to be at fault.
LOST = "the device was lost: "

SCHEMA = 2
# Older records lack fields that have defaults.
READABLE = (1, 2)
# gc=False: nothing of a record can lie on a cycle, and the collector need not look at a hundred thousand of them.


class Environment(msgspec.Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """What the answer may depend on besides the case and the code.

    triton: its version, empty where none is installed. device: the GPU, or the processor where there is none. arch: what
    kernels are compiled for, `gfx950` or `sm_90`; of a processor its machine type. driver: the runtime that torch was built
    for. vllm, aiter: version, commit, and the tree that was pointed at. commit: of mla-oracle itself, `+` behind it when
    files differ.
    """

    machine: str
    python: str
    torch: str
    triton: str
    numpy: str
    device: str
    arch: str = ""
    driver: str = ""
    vllm: str = ""
    aiter: str = ""
    commit: str = ""


class Seconds(msgspec.Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """Wall-clock seconds of the parts of a case; compile: the part of `run` in which kernels were compiled."""

    build: float = 0.0
    run: float = 0.0
    reference: float = 0.0
    judge: float = 0.0
    compile: float = 0.0


class Attempt(msgspec.Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """How a case ended before it was asked once more: a crash, a hang or a lost device, never an answer."""

    status: Status
    reasons: tuple[str, ...]
    worker: str = ""
    finished: float = 0.0


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """One judged case: one JSON line in a run directory.

    case: the complete case id. on: the execution. law: the name of the law when the case was run with edited inputs.
    reasons: why it is unsupported, what memory was touched, which exception rose, in sentences.
    diagnosis: the mutants whose output the failing output equals or comes closest to.
    fingerprint: SHA-256 over the bytes of all outputs, in the order of their names. source: SHA-256 of the code.
    attempts: how the case ended before, the oldest first. capsule: the file in the run's directory that keeps the trial.
    """

    schema: int = SCHEMA
    case: str
    op: str
    impl: str
    on: str
    law: str = ""
    status: Status
    checks: tuple[Check, ...] = ()
    reasons: tuple[str, ...] = ()
    diagnosis: tuple[str, ...] = ()
    precision: Precision | None = None
    environment: Environment
    seconds: Seconds = Seconds()
    fingerprint: str = ""
    source: str = ""
    worker: str = ""
    finished: float = 0.0
    attempts: tuple[Attempt, ...] = ()
    capsule: str = ""

    @property
    def use(self) -> float:
        """The largest budget use of the record's checks."""
        return max((check.use for check in self.checks), default=0.0)

    @property
    def infrastructure(self) -> bool:
        """Whether the case ended without an answer: a crash, a hang or a lost device, which may be asked once more."""
        return unanswered(self.status, self.reasons)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What identifies the question: case, implementation, execution, law."""
        return (self.case, self.impl, self.on, self.law)


def unanswered(status: Status, reasons: tuple[str, ...]) -> bool:
    """Whether a case that ended so has no answer: the process or the device was gone before there could be one."""
    return status in ("crash", "hang") or (status == "error" and bool(reasons) and reasons[0].startswith(LOST))
