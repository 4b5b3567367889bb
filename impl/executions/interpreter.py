"""May Triton kernels be judged on this CPU, and if so, how are their numbers made right?

Triton's interpreter (``TRITON_INTERPRET=1``) is wrong as shipped: bf16 rounds by truncation and computes on raw codes,
fp8 loses carries and decodes NaN as numbers, Python's ``not``, ``and`` and ``or`` apply to whole blocks. ``install``
replaces the machine beneath Triton's semantics with one that is proven by ``impl.executions.conformance``.

Gluon kernels and inline assembly stay outside: they raise, here as in Triton's own interpreter.

The repaired process is for interpreting only: ``triton.language`` stays bound to the interpreter, which saves patching
it at every launch. What the repair depends on inside Triton is listed here and checked before anything is replaced.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator

SUPPORTED = ((3, 6), (3, 9))
"""The first and the last minor version of Triton that the repair covers."""

_INTERPRETER = "triton.runtime.interpreter"

# Everything that is replaced or called: dotted path, then the parameter lists that the repair understands.
_RELIED_ON: dict[str, tuple[tuple[str, ...], ...]] = {
    f"{_INTERPRETER}:TensorHandle.__init__": (("self", "data", "dtype", "attr"),),
    f"{_INTERPRETER}:GridExecutor.__init__": (("self", "fn", "arg_names", "grid", "pre_run_hooks"),),
    f"{_INTERPRETER}:GridExecutor.__call__": (("self", "args_dev", "kwargs"),),
    f"{_INTERPRETER}:GridExecutor._init_args_hst": (("self", "args_dev", "kwargs"),),
    f"{_INTERPRETER}:GridExecutor._restore_args_dev": (("self", "args_dev", "args_hst", "kwargs", "kwargs_hst"),),
    f"{_INTERPRETER}:InterpretedFunction.__call__": (("self", "args", "kwargs"),),
    f"{_INTERPRETER}:InterpretedFunction.run": (("self", "args", "grid", "warmup", "kwargs"),),
    f"{_INTERPRETER}:InterpretedFunction.rewrite": (("self",),),
    f"{_INTERPRETER}:FunctionRewriter._compile_and_exec": (("self", "transformed_ast"),),
    f"{_INTERPRETER}:FunctionRewriter._transform_ast": (("self", "src"),),
    f"{_INTERPRETER}:InterpreterBuilder.create_masked_load": (
        ("self", "ptrs", "mask", "other", "cache_modifier", "eviction_policy", "is_volatile"),
        ("self", "ptrs", "mask", "other", "cache_policy", "is_volatile"),
    ),
    f"{_INTERPRETER}:InterpreterBuilder.create_masked_store": (
        ("self", "ptrs", "value", "mask", "cache_modifier", "eviction_policy"),
        ("self", "ptrs", "value", "mask", "cache_policy"),
    ),
    f"{_INTERPRETER}:InterpreterBuilder.create_dot": (
        ("self", "a", "b", "d", "input_precision", "max_num_imprecise_acc"),
    ),
    f"{_INTERPRETER}:InterpreterBuilder.create_fp_to_fp": (("self", "src", "dst_type", "rounding_mode"),),
    f"{_INTERPRETER}:InterpreterBuilder.create_atomic_rmw": (("self", "rmwOp", "ptr", "val", "mask", "sem", "scope"),),
    f"{_INTERPRETER}:InterpreterBuilder.create_histogram": (("self", "data", "bins", "mask"),),
    f"{_INTERPRETER}:TensorDescHandle.materialize_pointers": (("self", "offsets"),),
    f"{_INTERPRETER}:FunctionRewriter.ast_transformer.visit": (("node",),),
    f"{_INTERPRETER}:InterpreterBuilder.set_grid_idx": (("self", "x", "y", "z"),),
    "triton.language.core:_unwrap_if_constexpr": (("o",),),
    "triton.language.core:is_builtin": (("fn",),),
    "triton.language.core:tensor.__init__": (("self", "handle", "type"),),
    "triton.language.core:block_type.__init__": (("self", "element_ty", "shape"),),
    "triton.language.semantic:TritonSemantic.binary_op_type_checking_impl": (
        ("self", "lhs", "rhs", "allow_lhs_ptr", "allow_rhs_ptr", "arithmetic_check", "div_or_mod"),
    ),
    "triton.language.semantic:TritonSemantic.computation_type_impl": (
        ("self", "a_ty", "a_is_scalar", "b_ty", "b_is_scalar", "div_or_mod"),
    ),
    "triton.language.semantic:TritonSemantic.broadcast_impl_value": (("self", "lhs", "rhs"),),
    "triton.language.semantic:TritonSemantic.scalar_constant": (("self", "value", "dtype"),),
    "triton.language.semantic:TritonSemantic.cast": (("self", "input", "dst_ty", "fp_downcast_rounding"),),
    "triton.language.semantic:TritonSemantic.where": (("self", "condition", "x", "y"),),
    "triton.language.semantic:TritonSemantic.load": (
        ("self", "ptr", "mask", "other", "boundary_check", "padding_option", "cache_modifier", "eviction_policy",
         "is_volatile"),
        ("self", "ptr", "mask", "other", "cache_policy", "is_volatile"),
    ),
    "triton.runtime.autotuner:Autotuner.run": (("self", "args", "kwargs"),),
    "triton.runtime.jit:mangle_type": (("arg", "specialize"),),
}  # fmt: skip

_installed = False


class KernelFault(Exception):
    """A kernel did something that is wrong whatever it computes; passes through the interpreter unwrapped."""


def unsupported() -> list[str]:
    """Every reason why Triton kernels may not be judged in this process; empty if ``install`` will do or has done."""
    if _installed:
        return []
    if importlib.util.find_spec("triton") is None:
        return ["triton is not installed"]
    triton = importlib.import_module("triton")
    first, last = (f"{major}.{minor}" for major, minor in SUPPORTED)
    found = re.match(r"(\d+)\.(\d+)", str(triton.__version__))
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    reasons = []
    if not SUPPORTED[0] <= version <= SUPPORTED[1]:
        reasons.append(f"triton {triton.__version__}: the faithful interpreter covers {first} to {last}")
    else:
        reasons += _changed_internals()
    if not _decorates_for_interpreting():
        reasons.append("TRITON_INTERPRET was not set when triton was imported: kernels are decorated for the compiler")
    return reasons


def _changed_internals() -> list[str]:
    reasons = []
    for path, shapes in _RELIED_ON.items():
        module, _, dotted = path.partition(":")
        target: object = importlib.import_module(module)
        for name in dotted.split("."):
            target = getattr(target, name, None)
        if not callable(target):
            reasons.append(f"{module}.{dotted}: gone from this triton")
            continue
        parameters = tuple(inspect.signature(target).parameters)
        if parameters not in shapes:
            reasons.append(f"{module}.{dotted} takes ({', '.join(parameters)}): the repair knows another shape")
    return reasons


def _decorates_for_interpreting() -> bool:
    # Triton's own library is decorated at import, as any kernel module's would have been.
    standard = importlib.import_module("triton.language.standard")
    interpreter = importlib.import_module(_INTERPRETER)
    return isinstance(standard._sum_combine, interpreter.InterpretedFunction)


def installed() -> bool:
    """Whether this process runs Triton kernels on the repaired interpreter."""
    return _installed


def install() -> None:
    """Repair the interpreter of this process, once and for good.

    Raises RuntimeError with every reason of ``unsupported``.
    """
    global _installed
    if _installed:
        return
    reasons = unsupported()
    if reasons:
        raise RuntimeError("; ".join(reasons))
    importlib.import_module("impl.executions.interpreter_machine").take_over()
    _installed = True


@contextlib.contextmanager
def overflow_checks() -> Iterator[None]:
    """While open, an addition, subtraction or multiplication of 32-bit (or narrower) integers that overflows raises.

    Masked lanes often hold garbage that overflows harmlessly, so this is a question to ask, not a default.
    """
    install()
    builder = importlib.import_module("impl.executions.interpreter_language").BUILDER
    before, builder.check_overflow = builder.check_overflow, True
    try:
        yield
    finally:
        builder.check_overflow = before
