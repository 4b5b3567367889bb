"""What is an implementation, to those who run it?"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from cases import op_module
from cases.case import Case
from cases.precision import Precision

# Where an implementation can run. `interpreter`: Triton's interpreter on the CPU, corrected; `cuda`, `hip`: a device;
# `isa:gfx942`, `isa:gfx950`: compiled for that machine, whose code is executed instruction by instruction on the CPU.
Execution = Literal["interpreter", "cuda", "hip", "isa:gfx942", "isa:gfx950"]
EXECUTIONS: tuple[Execution, ...] = ("interpreter", "cuda", "hip", "isa:gfx942", "isa:gfx950")

PRODUCTS: Mapping[Execution, str] = {
    "interpreter": "NumPy fp32 products",
    "cuda": "tensor cores: exact products, fp32 sums that truncate",
    "hip": "matrix cores: exact products, fp32 sums",
    "isa:gfx942": "matrix cores as modelled: exact products, one rounding for each instruction",
    "isa:gfx950": "matrix cores as modelled: exact products, one rounding for each instruction",
}
"""How low-precision products are summed on an execution, for the note of a `Precision`."""


@dataclass(frozen=True)
class Impl:
    """One implementation of one op.

    name: `<library>-<route>`, such as `ours-triton`, `vllm-triton`, `torch-bf16`.
    run: inputs to outputs; the inputs already lie on the execution's device, output memory is poisoned.
    unsupported: every reason why this case cannot be run on this execution, found by looking, never by trying.
    precision: the rounding points on this execution.
    compile_key: cases with the same key share compiled code, so that a worker runs them together.
    source: the bytes that decide what the implementation computes, for the record's fingerprint.
    by_shape: its libraries choose among kernels by the shape of the call, so that the same row may round differently in
    another call.
    interpreted: in the interpreter its kernels are Triton's, whatever its name says.
    allocates: its library has memory of its own for outputs; all others write where the caller says.
    """

    name: str
    run: Callable[[Any], Any]
    unsupported: Callable[[Case, Execution], list[str]]
    precision: Callable[[Case, Execution], Precision]
    compile_key: Callable[[Case], str]
    source: Callable[[], bytes]
    by_shape: bool = False
    interpreted: bool = False
    allocates: bool = False


def implementations(op: str) -> tuple[Impl, ...]:
    """Everyone who answers `op`, whether or not they can answer here."""
    impls: tuple[Impl, ...] = op_module("impl", op).IMPLS
    return impls


def device_of(execution: Execution) -> str:
    """The torch device on which inputs must lie for an execution."""
    return "cuda" if on_device(execution) else "cpu"


def on_device(execution: Execution) -> bool:
    """Whether an execution needs a GPU in this machine."""
    return execution in ("cuda", "hip")


def machine_code_of(execution: Execution) -> str:
    """The architecture whose machine code an execution interprets; empty where it interprets none."""
    return execution.partition(":")[2]


def elsewhere(case: Case, execution: Execution) -> list[str]:
    """Why a case about another architecture says nothing about the machine code of this execution."""
    arch, asked = machine_code_of(execution), getattr(case, "arch", "")
    if arch and asked in ("gfx942", "gfx950") and asked != arch:
        return [f"arch={asked}: what is executed is {arch} code"]
    return []


def architecture(execution: Execution = "hip") -> str:
    """What the device calls its architecture, `gfx950:sramecc+:xnack-`; `no AMD device` where there is none.

    On an execution of machine code it is that code's.
    """
    if machine_code_of(execution):
        return machine_code_of(execution)
    if not torch.cuda.is_available() or not torch.version.hip:
        return "no AMD device"
    return str(torch.cuda.get_device_properties(0).gcnArchName)


def without_triton() -> list[str]:
    """Why no Triton kernel can run here; empty when Triton is installed. It is looked for, not imported."""
    return [] if importlib.util.find_spec("triton") else ["triton is not installed"]


def needs_triton(case: Case, execution: Execution) -> list[str]:
    """The reasons of kernels that answer every case wherever there is a Triton."""
    del case, execution
    return without_triton()


def no_reasons(case: Case, execution: Execution) -> list[str]:
    """The reasons of what answers every case everywhere: none."""
    del case, execution
    return []


def exact_but(note: str) -> Callable[[Case, Execution], Precision]:
    """The precision of what computes exactly, with the one exception that the note names."""
    return lambda case, execution: Precision(probability="exact", note=note)


def bytes_of(*paths: Path) -> Callable[[], bytes]:
    """The `source` of an implementation that these files decide."""
    return lambda: b"".join(path.read_bytes() for path in paths)
