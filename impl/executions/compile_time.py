"""How long does Triton compile while a case runs?

Triton tells whoever listens how long each compilation took. The interpreter compiles nothing.
"""

import contextlib
import importlib
import importlib.util
import threading
from collections.abc import Iterator
from typing import Any


class Compiling:
    """The seconds that compilations took, as Triton's compiler reports them from whichever thread runs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.seconds = 0.0

    def add(self, microseconds: float) -> None:
        """One compilation more."""
        with self._lock:
            self.seconds += microseconds * 1e-6


@contextlib.contextmanager
def compiling(compiles: bool) -> Iterator[Compiling]:
    """Sum what Triton spends in compiling inside the block; nothing where there is no Triton, or nothing is compiled.

    A listener that stood there before still hears everything, and is put back afterwards.
    """
    spent = Compiling()
    knobs = _knobs() if compiles else None
    if knobs is None:
        yield spent
        return
    before = knobs.compilation.listener

    def listen(**said: Any) -> None:
        spent.add(float(said["times"].total))
        if before is not None:
            before(**said)

    knobs.compilation.listener = listen
    try:
        yield spent
    finally:
        knobs.compilation.listener = before


def _knobs() -> Any:
    """Triton's settings with a place for a listener; None where there are none."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        knobs = importlib.import_module("triton.knobs")
    except Exception:
        # A Triton that cannot be imported is the reason of those who need it; torch's kernels run without.
        return None
    return knobs if hasattr(getattr(knobs, "compilation", None), "listener") else None
