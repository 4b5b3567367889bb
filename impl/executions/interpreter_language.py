"""How do Triton's semantics reach the builder cheaply, and what do reductions, scans and libdevice mean?

Type promotion, shapes and errors stay Triton's; what is replaced is the cost of common operations, the broadcasting
inside elementwise ones, which NumPy does by itself, and everything that Triton's interpreter does element by element.
Imported only after ``impl.executions.interpreter`` has checked the installed Triton.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

from impl.executions import interpreter_numbers as numbers
from impl.executions.interpreter import KernelFault
from impl.executions.interpreter_builder import NUMPY_TYPES, Builder, Handle, convert, erf, from_values

Array = np.ndarray[Any, Any]
constexpr, tensor = tl.constexpr, tl.tensor


class _Facts:
    """What every tensor of a type shares; every Triton type carries its own as ``_interpreter_facts``."""

    __slots__ = ("dims", "dtype", "numel", "shape")

    def __init__(self, dtype: Any = None, dims: tuple[int, ...] = ()) -> None:
        self.dtype = dtype
        self.dims = dims
        self.shape = tl.tuple([constexpr(size) for size in dims])
        self.numel = constexpr(math.prod(dims))


_SCALAR = _Facts()


def typed(dtype: Any, dims: tuple[int, ...]) -> Any:
    """The Triton type of a block of ``dims`` elements of ``dtype``; always the same object."""
    if not dims:
        return dtype
    blocks = dtype.__dict__.get("_interpreter_blocks")
    if blocks is None:
        blocks = dtype._interpreter_blocks = {}
    found = blocks.get(dims)
    if found is None:
        found = blocks[dims] = tl.block_type(dtype, list(dims))
    return found


def _unwrapped(value: Any) -> Any:
    return value.value if isinstance(value, constexpr) else value


class Semantic(stock.TritonSemantic):  # type: ignore[misc]
    """Triton's semantics; broadcasting inside an elementwise operation is left to NumPy."""

    def __init__(self, builder: Builder) -> None:
        super().__init__(builder)
        self._promoted: dict[tuple[Any, ...], Any] = {}
        self._constants: dict[tuple[Any, ...], Any] = {}

    def make_tensor(self, handle: Handle, type: Any) -> Any:
        return tensor(handle, type)

    def to_tensor_type(self, x: Any) -> Any:
        # Triton 3.6 has no such method; the rule is the same in every version.
        x = _unwrapped(x)
        if isinstance(x, bool):
            return tl.int1
        if isinstance(x, int):
            for dtype, low, high in _INTEGERS:
                if low <= x < high:
                    return dtype
            raise ValueError(f"Nonrepresentable integer {x}.")
        if isinstance(x, float):
            size = abs(x)
            plain = size == 0.0 or not math.isfinite(x) or 2.0**-126 <= size <= (2 - 2**-23) * 2.0**127
            return tl.float32 if plain else tl.float64
        if isinstance(x, tl.dtype):
            return x
        raise TypeError(f"cannot convert {x} of type {type(x)} to tensor")

    def scalar_constant(self, value: Any, dtype: Any) -> Any:
        # The sign tells zero from minus zero, which are equal as keys.
        key = (value, value.__class__, dtype.name, math.copysign(1.0, value))
        found = self._constants.get(key)
        if found is None:
            found = super().scalar_constant(value, dtype)
            if len(self._constants) < 4096:
                self._constants[key] = found
        return found

    def computation_type_impl(
        self, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool
    ) -> Any:
        key = (a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod)
        found = self._promoted.get(key)
        if found is None:
            found = super().computation_type_impl(a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
            self._promoted[key] = found
        return found

    def binary_op_type_checking_impl(
        self,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        left_is_tensor, right_is_tensor = isinstance(lhs, tensor), isinstance(rhs, tensor)
        left = lhs.dtype if left_is_tensor else self.to_tensor_type(lhs)
        right = rhs.dtype if right_is_tensor else self.to_tensor_type(rhs)
        if left.is_ptr() or right.is_ptr():
            self.check_ptr_type_impl(left, right, allow_lhs_ptr)
            self.check_ptr_type_impl(right, left, allow_rhs_ptr)
            lhs, rhs = self.to_tensor(lhs), self.to_tensor(rhs)
        elif not arithmetic_check:
            lhs, rhs = self.to_tensor(lhs), self.to_tensor(rhs)
        else:
            common = self.computation_type_impl(left, not left_is_tensor, right, not right_is_tensor, div_or_mod)
            if left is not common or not left_is_tensor:
                lhs = self._to_computation_type(lhs, common)
            if right is not common or not right_is_tensor:
                rhs = self._to_computation_type(rhs, common)
        return self._aligned(lhs, rhs)

    def _to_computation_type(self, value: Any, dtype: Any) -> Any:
        if isinstance(value, tensor):
            return self.cast(value, dtype)
        if value < 0 and dtype.is_int_unsigned():
            raise ValueError(
                "Cannot perform a binary operation between an unsigned tensor and a negative scalar. "
                "Perform a explicit cast on one of them."
            )
        if dtype.is_int() and not (dtype.get_int_min_value() <= value <= dtype.get_int_max_value()):
            raise ValueError(f"Scalar {value} is out of range for type {dtype}")
        return self.scalar_constant(value, dtype)

    def _aligned(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        """Both operands typed with their common shape; their arrays broadcast when NumPy combines them."""
        left, right = lhs.type._interpreter_facts.dims, rhs.type._interpreter_facts.dims
        if left == right:
            return lhs, rhs
        dims = _joined(left, right)
        if left != dims:
            lhs = tensor(lhs.handle, typed(lhs.dtype, dims))
        if right != dims:
            rhs = tensor(rhs.handle, typed(rhs.dtype, dims))
        return lhs, rhs

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.type._interpreter_facts.dims == rhs.type._interpreter_facts.dims:
            return lhs, rhs
        left, right = self._aligned(lhs, rhs)
        return _materialised(left), _materialised(right)

    def cast(self, input: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
        source, target = input.dtype, dst_ty.scalar
        if source is target:
            return input
        plain = source.name in _PLAIN_CASTS and target.name in _PLAIN_CASTS
        if fp_downcast_rounding is None and (plain or (source.name in _FLOATS and target.name in _FLOATS)):
            dims = input.type._interpreter_facts.dims
            return tensor(convert(input.handle, target), typed(target, dims))
        return super().cast(input, dst_ty, fp_downcast_rounding)

    def load(self, ptr: Any, mask: Any, other: Any, *rest: Any) -> Any:
        # Triton drops an `other` that is a single zero; a load without one reads garbage in its masked lanes.
        self.builder.other_given = other is not None
        try:
            return super().load(ptr, mask, other, *rest)
        finally:
            self.builder.other_given = False

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        if condition.dtype is not tl.int1:
            return super().where(condition, x, y)
        x, y = self.binary_op_type_checking_impl(x, y, True, True)
        condition, x = self._aligned(condition, x)
        return tensor(self.builder.create_select(condition.handle, x.handle, y.handle), x.type)

    def dot_scaled(self, lhs: Any, lhs_scale: Any, lhs_format: Any, rhs: Any, rhs_scale: Any, rhs_format: Any,
                   *rest: Any) -> Any:  # fmt: skip
        left, right = _Format(_unwrapped(lhs_format)), _Format(_unwrapped(rhs_format))
        return super().dot_scaled(lhs, lhs_scale, left, rhs, rhs_scale, right, *rest)

    def binary_op_sanitize_overflow_impl(self, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if not self.builder.check_overflow or lhs.dtype.int_bitwidth >= 64:
            return
        exact = getattr(operator, binary_op.__name__)(
            lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64)
        )
        info = np.iinfo(lhs.handle.data.dtype)
        wrong = (exact < info.min) | (exact > info.max)
        if wrong.any():
            lane = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise IntegerOverflow(
                f"{lhs.dtype} overflow in {binary_op.__name__}, program {self.builder.grid_idx}, lane {lane}: "
                f"the exact result is {int(exact[lane])}"
            )


_INTEGERS = (
    (tl.int32, -(2**31), 2**31), (tl.uint32, 2**31, 2**32), (tl.int64, -(2**63), 2**63), (tl.uint64, 2**63, 2**64),
)  # fmt: skip


class _Format(str):
    """A format name that older Tritons may unwrap as if it were a compile-time value."""

    @property
    def value(self) -> str:
        return str(self)


class IntegerOverflow(KernelFault):
    """A kernel's integer arithmetic left the range of its type while that was being checked."""


_FLOATS = numbers.PACKED | {"fp16", "fp32", "fp64"}
_PLAIN_CASTS = NUMPY_TYPES.keys() - numbers.FP8_TYPES.keys() - {"fp8e4b15"}


@functools.cache
def _joined(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(len(left), len(right))
    padded = ((1,) * (rank - len(left)) + left, (1,) * (rank - len(right)) + right)
    for index, (a, b) in enumerate(zip(*padded, strict=True)):
        if a != b and a != 1 and b != 1:
            raise ValueError(f"Cannot make_shape_compatible: incompatible dimensions at index {index}: {a} and {b}")
    return tuple(max(a, b) for a, b in zip(*padded, strict=True))


def _materialised(value: Any) -> Any:
    dims = value.type._interpreter_facts.dims
    data = value.handle.data
    return value if data.shape == dims else tensor(Handle(np.broadcast_to(data, dims), value.dtype), value.type)


BUILDER = Builder()
SEMANTIC = Semantic(BUILDER)


_FAST_REDUCTIONS: dict[str, Any] = {
    "_sum_combine": np.add,
    "_prod_combine": np.multiply,
    "_elementwise_max": (np.maximum, np.fmax),
    "_elementwise_min": (np.minimum, np.fmin),
    "_xor_combine": np.bitwise_xor,
    "_or_combine": np.bitwise_or,
    "_and_combine": np.bitwise_and,
}
_ARGUMENT_REDUCTIONS = {
    f"_arg{which}_combine_tie_break_{how}": which for which in ("max", "min") for how in ("left", "fast")
}


def _standard_name(combine: Any) -> str:
    """The name of a combine function of Triton's standard library, or nothing for a kernel's own."""
    name = getattr(combine, "__name__", "")
    return name if getattr(tl.standard, name, None) is combine else ""


def _block(handle: Handle, dtype: Any, scalar: bool = False) -> Any:
    return tensor(handle, typed(dtype, () if scalar else handle.data.shape))


def _reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_region: Any) -> Any:
    axis, keep_dims = _unwrapped(axis), _unwrapped(keep_dims)
    alone = isinstance(input, tensor)
    inputs = (input,) if alone else tuple(input)
    dims = inputs[0].type._interpreter_facts.dims
    if axis is not None and not -len(dims) <= axis < max(1, len(dims)):
        raise ValueError(f"axis {axis} out of bounds for shape {dims}")
    handles = [_materialised(t).handle for t in inputs]
    if axis is None:
        handles = [Handle(h.data.reshape(-1), h.dtype.scalar) for h in handles]
        kept: tuple[int, ...] = (1,) * len(dims)
        axis = 0
    else:
        axis %= len(dims)
        kept = (*dims[:axis], 1, *dims[axis + 1 :])
    shape = kept if keep_dims else tuple(size for i, size in enumerate(kept) if i != axis)
    if keep_dims is False and kept == (1,) * len(dims) and handles[0].data.ndim == 1:
        shape = ()
    reduced = _reduce_axis(handles, axis, combine_fn)
    results = [
        _block(Handle(h.data.reshape(shape or (1,)), h.dtype.scalar), h.dtype.scalar, scalar=not shape) for h in reduced
    ]
    return results[0] if alone else tuple(results)


def _reduce_axis(handles: list[Handle], axis: int, combine: Any) -> list[Handle]:
    name = _standard_name(combine)
    first = handles[0]
    packed = first.dtype.scalar.name in numbers.PACKED
    if name in _ARGUMENT_REDUCTIONS and len(handles) == 2:
        return _reduce_with_index(handles, axis, _ARGUMENT_REDUCTIONS[name])
    operation = _FAST_REDUCTIONS.get(name) if len(handles) == 1 else None
    if isinstance(operation, tuple):
        operation = operation[first.dtype.scalar.is_floating()]
    elif packed or first.data.dtype == np.float16:
        # A sum in a narrow type rounds after every step: left to the general tree.
        operation = None
    if operation is None:
        return _reduce_tree(handles, axis, combine)
    values = first.values
    result = operation.reduce(values, axis=axis, dtype=None if values.dtype == np.bool_ else values.dtype)
    return [from_values(np.asarray(result), first.dtype.scalar)]


def _reduce_with_index(handles: list[Handle], axis: int, which: str) -> list[Handle]:
    """The extreme value and its lowest index; NaN never wins against a number."""
    values = handles[0].values
    if values.dtype.kind == "f":
        losing = -np.inf if which == "max" else np.inf
        comparable = np.where(np.isnan(values), losing, values)
    else:
        comparable = values
    place = (comparable.argmax if which == "max" else comparable.argmin)(axis=axis, keepdims=True)
    return [Handle(np.take_along_axis(h.data, place, axis).squeeze(axis), h.dtype.scalar) for h in handles]


def _reduce_tree(handles: list[Handle], axis: int, combine: Any) -> list[Handle]:
    """Neighbours first, as any associative combine function allows; whole slices at a time."""
    while handles[0].data.shape[axis] > 1:
        even, odd = (
            [_block(Handle(_every_other(h.data, axis, start), h.dtype.scalar), h.dtype.scalar) for h in handles]
            for start in (0, 1)
        )
        handles = _combined(combine, even, odd)
    return [Handle(h.data.squeeze(axis), h.dtype.scalar) for h in handles]


def _every_other(data: Array, axis: int, start: int) -> Array:
    return data[(slice(None),) * axis + (slice(start, None, 2),)]


def _combined(combine: Any, left: list[Any], right: list[Any]) -> list[Handle]:
    result = combine(*left, *right)
    results = tuple(result) if isinstance(result, (tuple, tl.tuple)) else (result,)
    return [
        _materialised(r if r.dtype is like.dtype else SEMANTIC.cast(r, like.dtype)).handle
        for r, like in zip(results, left, strict=True)
    ]


def _scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **_region: Any) -> Any:
    axis, reverse = _unwrapped(axis), _unwrapped(reverse)
    alone = isinstance(input, tensor)
    inputs = (input,) if alone else tuple(input)
    dims = inputs[0].type._interpreter_facts.dims
    if not -len(dims) <= axis < len(dims):
        raise ValueError(f"axis {axis} out of bounds for shape {dims}")
    axis %= len(dims)
    handles = [_materialised(t).handle for t in inputs]
    if reverse:
        handles = [Handle(np.flip(h.data, axis), h.dtype.scalar) for h in handles]
    scanned = _scan_axis(handles, axis, combine_fn)
    if reverse:
        scanned = [Handle(np.flip(h.data, axis), h.dtype.scalar) for h in scanned]
    results = [_block(h, h.dtype.scalar) for h in scanned]
    return results[0] if alone else tuple(results)


def _scan_axis(handles: list[Handle], axis: int, combine: Any) -> list[Handle]:
    first = handles[0]
    operation = _FAST_REDUCTIONS.get(_standard_name(combine)) if len(handles) == 1 else None
    narrow = first.dtype.scalar.name in numbers.PACKED or first.data.dtype in (np.float16, np.bool_)
    if isinstance(operation, np.ufunc) and not narrow:
        return [Handle(operation.accumulate(first.data, axis=axis, dtype=first.data.dtype), first.dtype.scalar)]
    size = first.data.shape[axis]
    position = np.arange(size).reshape((size,) + (1,) * (first.data.ndim - axis - 1))
    distance = 1
    while distance < size:
        earlier = [_block(Handle(np.roll(h.data, distance, axis), h.dtype.scalar), h.dtype.scalar) for h in handles]
        current = [_block(h, h.dtype.scalar) for h in handles]
        merged = _combined(combine, earlier, current)
        handles = [
            Handle(np.where(position >= distance, m.data, h.data), h.dtype.scalar)
            for m, h in zip(merged, handles, strict=True)
        ]
        distance *= 2
    return handles


def _bound(function: Any, semantic: Semantic) -> Any:
    inner = getattr(function, "__wrapped__", function)

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return inner(*args, _semantic=semantic, **kwargs)

    return functools.update_wrapper(call, inner)


def _unwrapping(slow: Callable[[Any], Any]) -> Callable[[Any], Any]:
    plain = frozenset({tensor, int, float, bool, str, type(None)})

    def unwrap(value: Any) -> Any:
        kind = value.__class__
        if kind in plain:
            return value
        return value.value if kind is constexpr else slow(value)

    return unwrap


def _initialise_tensor(self: Any, handle: Handle, type: Any) -> None:
    facts = type._interpreter_facts
    self.handle = handle
    self.type = type
    self.dtype = type if facts is _SCALAR else facts.dtype
    self.shape = facts.shape
    self.numel = facts.numel


def _remembering(initialise: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[Any, ...], tuple[Any, dict[str, Any]]] = {}

    def initialise_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        dims = tuple([size.value if isinstance(size, constexpr) else size for size in shape])
        key = (id(element_ty), dims)
        # The element type is kept alive with its entry, so its id is not used again.
        entry = known.get(key)
        if entry is None:
            initialise(self, element_ty, list(dims))
            self._interpreter_facts = _Facts(element_ty, dims)
            if len(known) > 8192:
                known.clear()
            known[key] = (element_ty, dict(self.__dict__))
        else:
            self.__dict__.update(entry[1])

    return initialise_block_type


def _transposed_tensor(self: Any) -> Any:
    return SEMANTIC.permute(self, (*range(len(self.shape) - 2), len(self.shape) - 1, len(self.shape) - 2))


def counted(*bounds: Any) -> Iterator[Any]:
    """``range`` as the compiler sees it: the variable is an integer of the machine, not one of Python."""
    wide = any(isinstance(b, tensor) and b.dtype.primitive_bitwidth == 64 for b in bounds)
    dtype, stored = (tl.int64, np.int64) if wide else (tl.int32, np.int32)
    for value in range(*(operator.index(_unwrapped(b)) for b in bounds)):
        yield tensor(Handle(np.array([value], stored), dtype), dtype)


def _counted(arg1: Any, arg2: Any = None, step: Any = None, **_hints: Any) -> Iterator[Any]:
    step = 1 if step is None else step
    return counted(0, arg1, step) if arg2 is None else counted(arg1, arg2, step)


def _unrolled(arg1: Any, arg2: Any = None, step: Any = None, **_hints: Any) -> range:
    start, end = (0, arg1) if arg2 is None else (arg1, arg2)
    return range(*(operator.index(_unwrapped(v)) for v in (start, end, 1 if step is None else step)))


def _static_assert(cond: Any, msg: str = "", **_context: Any) -> None:
    if not _unwrapped(cond):
        raise AssertionError(msg)


def _static_print(*values: Any, **_context: Any) -> None:
    print(*values)  # noqa: T201


def _hint(input: Any, values: Any, **_context: Any) -> Any:
    return input


def _truth_of_tensor(self: Any) -> bool:
    # Triton asks whether an optional block is there by its truth, so a block is true.
    data = self.handle.data
    return bool(data.reshape(-1)[0]) if data.size == 1 else True


# What follows answers the operators and functions that kernels use most, without the detour through Triton's layers,
# for the operands on which all of those layers would agree; every other case takes the long way.

_ARITHMETIC = frozenset({"fp32", "fp64", "int32", "int64", "uint32", "uint64"})
_COMPARABLE = _ARITHMETIC | {"fp16", "int8", "uint8", "int16", "uint16"}
_BITS = frozenset({"int1", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"})


def _number_for(dtype: Any, number: Any) -> bool:
    """Whether a Python number takes part in an operation with ``dtype`` simply as one of its elements."""
    kind = number.__class__
    if dtype.name == "fp32":
        return kind is float or (kind is int and -(2**53) <= number <= 2**53)
    return kind is int and dtype.name in ("int32", "int64") and -(2**31) <= number < 2**31


def _operator(name: str, operation: Callable[..., Array], dtypes: frozenset[str], result: Any = None) -> Any:
    slow = getattr(tensor, name)
    reverse = name.startswith("__r") and name not in ("__rshift__",)
    overflows = result is None and operation in (np.add, np.subtract, np.multiply)

    def method(self: Any, other: Any) -> Any:
        if other.__class__ is constexpr:
            other = other.value
        dtype = self.dtype
        if dtype.name in dtypes and not (overflows and BUILDER.check_overflow):
            if other.__class__ is tensor:
                if other.dtype is dtype and not reverse:
                    left, right = self.type, other.type
                    if left is not right:
                        a, b = left._interpreter_facts.dims, right._interpreter_facts.dims
                        if a != b:
                            left = typed(dtype, _joined(a, b))
                    data = operation(self.handle.data, other.handle.data)
                    if result is None:
                        return tensor(Handle(data, dtype), left)
                    return tensor(Handle(data, result), typed(result, left._interpreter_facts.dims))
            elif _number_for(dtype, other):
                mine = self.handle.data
                other = mine.dtype.type(other)
                data = operation(other, mine) if reverse else operation(mine, other)
                if result is None:
                    return tensor(Handle(data, dtype), self.type)
                return tensor(Handle(data, result), typed(result, self.type._interpreter_facts.dims))
        elif operation is np.add and dtype.is_ptr() and other.__class__ is tensor and other.dtype.name in _BITS:
            a, b = self.type._interpreter_facts.dims, other.type._interpreter_facts.dims
            type_ = self.type if a == b else typed(dtype, _joined(a, b))
            return tensor(BUILDER.create_addptr(self.handle, other.handle), type_)
        return slow(self, other)

    return method


def _index_block(slow: Any) -> Any:
    everything = slice(None)

    def method(self: Any, slices: Any) -> Any:
        handle = self.handle
        dims = self.type._interpreter_facts.dims
        if slices.__class__ is tuple and handle.data.shape == dims:
            kept = 0
            for key in slices:
                if key is not None:
                    if key.__class__ is not slice or key != everything:
                        return slow(self, slices)
                    kept += 1
            # Triton wants every axis named; anything else is for it to refuse.
            if kept == len(dims):
                data = handle.data[slices]
                values = None if handle._values is None else handle._values[slices]
                return tensor(Handle(data, handle.dtype, values), typed(self.dtype, data.shape))
        return slow(self, slices)

    return method


def _cast_method(slow: Any) -> Any:
    def to(self: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False, **_context: Any) -> Any:
        dtype = _unwrapped(dtype)
        if fp_downcast_rounding is None and bitcast is False and isinstance(dtype, tl.dtype):
            return SEMANTIC.cast(self, dtype)
        return slow(self, dtype, fp_downcast_rounding, bitcast)

    return to


def _optional_tensor(value: Any) -> Any:
    value = _unwrapped(value)
    return value if value is None or value.__class__ is tensor else SEMANTIC.to_tensor(value)


def _load_function(slow: Any) -> Any:
    def load(pointer: Any, mask: Any = None, other: Any = None, *rest: Any, **options: Any) -> Any:
        if pointer.__class__ is not tensor or rest or _has_bounds(options) or not _readable(pointer.dtype):
            return slow(pointer, mask, other, *rest, **options)
        mask, other = _optional_tensor(mask), _optional_tensor(other)
        dims = own = pointer.type._interpreter_facts.dims
        if not own and any(t is not None and t.type.is_block() for t in (mask, other)):
            raise ValueError("Mask and other cannot be blocks if the pointer is not one")
        element = pointer.dtype.element_ty
        for part in (mask, other):
            if part is not None and (theirs := part.type._interpreter_facts.dims) != dims:
                dims = _joined(dims, theirs)
        handle = pointer.handle
        if dims != own:
            handle = Handle(np.broadcast_to(handle.data, dims), handle.dtype)
        BUILDER.other_given = other is not None
        replacement = None if other is None else SEMANTIC.cast(other, element).handle
        loaded = BUILDER.create_masked_load(handle, None if mask is None else mask.handle, replacement)
        BUILDER.other_given = False
        return tensor(loaded, typed(element, dims))

    return load


def _has_bounds(options: dict[str, Any]) -> bool:
    # Of block pointers; what else can be said about an access (caching, eviction) changes no value.
    return bool(options.get("boundary_check")) or bool(options.get("padding_option"))


def _readable(dtype: Any) -> bool:
    # Triton reads int1 through int8; a constant pointer or one to anything else is left to it.
    return dtype.is_ptr() and dtype.element_ty.name in NUMPY_TYPES and dtype.element_ty.name != "int1"


def _store_function(slow: Any) -> Any:
    def store(pointer: Any, value: Any, mask: Any = None, *rest: Any, **options: Any) -> Any:
        plain = pointer.__class__ is tensor and not rest and not _has_bounds(options) and _readable(pointer.dtype)
        if not plain or pointer.dtype.is_const():
            return slow(pointer, value, mask, *rest, **options)
        value, mask = _optional_tensor(value), _optional_tensor(mask)
        dims = pointer.type._interpreter_facts.dims
        for part in (value, mask):
            if (
                part is not None
                and (theirs := part.type._interpreter_facts.dims) != dims
                and _joined(dims, theirs) != dims
            ):
                raise ValueError(f"Cannot broadcast, a block of {theirs} is stored through pointers of {dims}")
        value = SEMANTIC.cast(value, pointer.dtype.element_ty)
        BUILDER.create_masked_store(pointer.handle, value.handle, None if mask is None else mask.handle)
        return None

    return store


def _bind_fast_paths() -> None:
    same: list[tuple[str, Any, frozenset[str], Any]] = [
        ("__add__", np.add, _ARITHMETIC, None), ("__radd__", np.add, _ARITHMETIC, None),
        ("__sub__", np.subtract, _ARITHMETIC, None), ("__rsub__", np.subtract, _ARITHMETIC, None),
        ("__mul__", np.multiply, _ARITHMETIC, None), ("__rmul__", np.multiply, _ARITHMETIC, None),
        ("__truediv__", np.divide, frozenset({"fp32", "fp64"}), None),
        ("__and__", np.bitwise_and, _BITS, None), ("__or__", np.bitwise_or, _BITS, None),
        ("__xor__", np.bitwise_xor, _BITS, None),
        ("__lt__", np.less, _COMPARABLE, tl.int1), ("__le__", np.less_equal, _COMPARABLE, tl.int1),
        ("__gt__", np.greater, _COMPARABLE, tl.int1), ("__ge__", np.greater_equal, _COMPARABLE, tl.int1),
        ("__eq__", np.equal, _COMPARABLE, tl.int1), ("__ne__", np.not_equal, _COMPARABLE, tl.int1),
    ]  # fmt: skip
    for name, operation, dtypes, result in same:
        setattr(tensor, name, _operator(name, operation, dtypes, result))
    tensor.__getitem__ = _index_block(tensor.__getitem__)
    tensor.to = _cast_method(tensor.to)
    for module in (tl, tl.core):
        module.load = _load_function(module.load)
        module.store = _store_function(module.store)


def bind_language(semantic: Semantic) -> None:
    owners = [tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base]
    for owner in owners:
        for name, member in inspect.getmembers(owner):
            if tl.core.is_builtin(member):
                setattr(owner, name, _bound(member, semantic))
    _bind_fast_paths()
    tl.dtype._interpreter_facts = _SCALAR
    tl.core._unwrap_if_constexpr = _unwrapping(tl.core._unwrap_if_constexpr)
    tl.tensor.__init__ = _initialise_tensor
    tl.tensor.__index__ = lambda self: int(self.handle.data.reshape(-1)[0])
    tl.tensor.__bool__ = _truth_of_tensor
    tl.tensor.__repr__ = lambda self: repr(self.handle.data)
    tl.tensor.__str__ = lambda self: str(self.handle.data)
    tl.tensor.T = property(_transposed_tensor)
    tl.block_type.__init__ = _remembering(tl.block_type.__init__)
    for kind in (tl.dtype, tl.block_type, tl.pointer_type):
        kind.to_ir = lambda self, builder: self
    tl.condition.__bool__ = lambda self: bool(self.condition)
    for module in (tl, tl.core):
        module.reduce = _reduce
        module.associative_scan = _scan
        module.range = _counted
        module.static_range = _unrolled
        module.static_assert = _static_assert
        module.static_print = _static_print
        module.multiple_of = module.max_contiguous = module.max_constancy = _hint


_LIBDEVICE: dict[str, Callable[..., Array]] = {
    "abs": np.abs, "acos": numbers.through_float64(np.arccos), "asin": numbers.through_float64(np.arcsin),
    "atan": numbers.through_float64(np.arctan), "atan2": np.arctan2, "cbrt": numbers.through_float64(np.cbrt),
    "ceil": np.ceil, "copysign": np.copysign, "cos": numbers.cos, "cosh": numbers.through_float64(np.cosh),
    "div_rn": np.divide, "erf": erf, "exp": numbers.exp, "exp10": numbers.through_float64(lambda x: 10.0**x),
    "exp2": numbers.exp2, "expm1": numbers.through_float64(np.expm1), "fast_cosf": numbers.cos,
    "fast_dividef": np.divide, "fast_exp10f": numbers.through_float64(lambda x: 10.0**x), "fast_expf": numbers.exp,
    "fast_log2f": numbers.log2, "fast_logf": numbers.log, "fast_powf": np.power, "fast_sinf": numbers.sin,
    "fast_tanhf": numbers.tanh, "fast_tanh": numbers.tanh, "floor": np.floor, "fmod": np.fmod, "log": numbers.log,
    "log10": numbers.through_float64(np.log10), "log1p": numbers.through_float64(np.log1p), "log2": numbers.log2,
    "max": np.fmax, "min": np.fmin, "nearbyint": np.rint, "pow": np.power, "rint": np.rint, "rsqrt": numbers.rsqrt,
    "rsqrt_rn": numbers.rsqrt, "sin": numbers.sin, "sinh": numbers.through_float64(np.sinh), "sqrt": np.sqrt,
    "sqrt_rn": np.sqrt, "tan": numbers.through_float64(np.tan), "tanh": numbers.tanh, "trunc": np.trunc,
    # Half away from zero, unlike rint.
    "round": numbers.through_float64(lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x)),
}  # fmt: skip
_LIBDEVICE_TESTS: dict[str, Callable[[Array], Array]] = {
    "isnan": np.isnan, "isinf": np.isinf, "finitef": np.isfinite, "isfinited": np.isfinite, "signbit": np.signbit,
}  # fmt: skip


def bind_libdevice() -> None:
    from triton.language.extra import libdevice

    for name, function in _LIBDEVICE.items():
        if hasattr(libdevice, name):
            setattr(libdevice, name, _elementwise(function))
    for name, function in _LIBDEVICE_TESTS.items():
        if hasattr(libdevice, name):
            setattr(libdevice, name, _elementwise(function, tl.int32))


def _elementwise(function: Callable[..., Array], returns: Any = None) -> Callable[..., Any]:
    def call(*args: Any, _semantic: Any = None) -> Any:
        operands = [SEMANTIC.to_tensor(arg) for arg in args]
        for i in range(1, len(operands)):
            operands[0], operands[i] = SEMANTIC.binary_op_type_checking_impl(operands[0], operands[i])
        first = operands[0]
        dtype = returns or first.dtype
        handle = from_values(np.asarray(function(*(t.handle.values for t in operands))), dtype)
        dims = first.type._interpreter_facts.dims
        return tensor(handle, typed(dtype, dims))

    return call
