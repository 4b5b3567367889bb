"""Which stand-in implementations of `cache.kv_gather_dequant` launch kernels with faults?

Put beside the real ones in a sweep's workers, which load this by `PYTEST_PLUGINS=gather_standins`, and in the process that
runs this file as a command: `python gather_standins.py replay ...`.
"""

import importlib
import sys
from typing import Any

from cases.cache.kv_gather_dequant import Outputs
from impl.cache import kv_gather_dequant
from impl.implementation import Impl, exact_but, no_reasons

FAULTS = ("past", "race", "unmodelled", "lds")


def _run(inputs: Any, fault: str) -> Any:
    getattr(importlib.import_module("faulty_kernels"), fault)(inputs.out)
    return Outputs(inputs.out)


def put_in_place() -> None:
    """Let the op's implementations end with the stand-ins."""
    kv_gather_dequant.IMPLS = (*kv_gather_dequant.IMPLS, *map(_stand_in, FAULTS))


def _stand_in(fault: str) -> Impl:
    return Impl(
        name=f"standin-triton-{fault}",
        run=lambda inputs: _run(inputs, fault),
        unsupported=no_reasons,
        precision=exact_but("it is a stand-in"),
        compile_key=lambda case: "",
        source=lambda: b"",
    )


put_in_place()

if __name__ == "__main__":
    sys.exit(importlib.import_module("reports.command").main())
