"""What is kept of one case on one implementation?"""

import msgspec

from cases.precision import Precision
from oracle.check import Check, Status

SCHEMA = 1


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the answer may depend on besides the case and the code."""

    machine: str
    python: str
    torch: str
    triton: str
    numpy: str
    device: str
    driver: str = ""
    vllm: str = ""
    aiter: str = ""
    commit: str = ""


class Seconds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Wall-clock seconds of the four parts of a case."""

    build: float = 0.0
    run: float = 0.0
    reference: float = 0.0
    judge: float = 0.0


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One judged case: one JSON line in a run directory.

    case: the complete case id. on: the execution. law: the name of the law when the case was run with edited inputs.
    reasons: why it is unsupported, what memory was touched, which exception rose, in sentences.
    diagnosis: the mutants whose output the failing output equals or comes closest to.
    fingerprint: SHA-256 over the bytes of all outputs, in the order of their names. source: SHA-256 of the code.
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

    @property
    def use(self) -> float:
        """The largest budget use of the record's checks."""
        return max((check.use for check in self.checks), default=0.0)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What identifies the question: case, implementation, execution, law."""
        return (self.case, self.impl, self.on, self.law)
