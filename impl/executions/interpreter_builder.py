"""What does each operation of a Triton program do to blocks held as NumPy arrays, with the numbers a GPU would give?

Imported only after ``impl.executions.interpreter`` has checked the installed Triton, on whose interpreter it builds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as stock

from impl.executions import interpreter_numbers as numbers
from impl.executions.interpreter_memory import Memory, Segment

Array = np.ndarray[Any, Any]
Program = tuple[int, int, int]
_ir = stock._ir

NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "int1": np.dtype(np.bool_),
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
    "bf16": np.dtype(np.uint16),
    **{name: np.dtype(np.uint8) for name in ("fp8e5", "fp8e5b16", "fp8e4nv", "fp8e4b8", "fp8e4b15")},
    **{f"{sign}int{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
ADDRESS = np.dtype(np.int64)


def numpy_type(dtype: Any) -> np.dtype[Any]:
    """The NumPy dtype in which elements of a Triton type are stored; a pointer is an address."""
    scalar = dtype.scalar
    return ADDRESS if scalar.is_ptr() else NUMPY_TYPES[scalar.name]


class Handle(stock.TensorHandle):  # type: ignore[misc]
    """A block of elements as stored, with the values of a packed format decoded at most once."""

    __slots__ = ("_values", "attr", "data", "dtype")

    def __init__(self, data: Array, dtype: Any, values: Array | None = None) -> None:
        self.data = data
        self.dtype = dtype
        self._values = values

    @property
    def values(self) -> Array:
        """The elements in a dtype that NumPy computes with."""
        if self._values is None:
            name = self.dtype.scalar.name
            self._values = numbers.decode(self.data, name) if name in numbers.PACKED else self.data
        return self._values

    def clone(self) -> Handle:
        return Handle(self.data.copy(), self.dtype)

    def set_attr(self, key: str, value: Any) -> None:
        """Alignment hints say nothing about values."""


def from_values(values: Array, dtype: Any, toward_zero: bool = False) -> Handle:
    """A handle of Triton type ``dtype`` holding ``values``, rounded if the type is narrower."""
    name = dtype.name
    if name in numbers.PACKED:
        return Handle(numbers.encode(values, name, toward_zero), dtype)
    return Handle(values.astype(NUMPY_TYPES[name], copy=False), dtype)


def convert(source: Handle, dtype: Any, toward_zero: bool = False) -> Handle:
    """``source`` as Triton type ``dtype``: rounded, truncated, wrapped or saturated as the GPU does."""
    origin, target = source.dtype.scalar, dtype.scalar
    if origin.is_ptr() or target.is_ptr():
        return Handle(source.data.astype(numpy_type(target), copy=False), target)
    stored = NUMPY_TYPES[target.name]
    if target.name == "int1":
        return Handle(source.values != 0, target)
    if target.is_floating():
        values = source.values
        if target.name in numbers.PACKED:
            # Integers reach packed formats through float32, as there is no direct convert.
            return from_values(values if origin.is_floating() else values.astype(np.float32), target, toward_zero)
        if toward_zero and stored == np.float16:
            return Handle(numbers.float16_toward_zero(values), target)
        return Handle(values.astype(stored, copy=False), target)
    if origin.is_floating():
        return Handle(numbers.to_integer(source.values, stored), target)
    return Handle(source.data.astype(stored, copy=False), target)


def _binary(operation: Callable[..., Array]) -> Callable[..., Handle]:
    def create(self: Any, lhs: Handle, rhs: Handle) -> Handle:
        dtype = lhs.dtype
        name = dtype.scalar.name
        if name in numbers.PACKED:
            return from_values(operation(lhs.values, rhs.values), dtype.scalar)
        left, right = lhs.data, rhs.data
        if name == "int1":
            # A one-bit integer wraps; NumPy would saturate it.
            return Handle((operation(left.astype(np.int8), right.astype(np.int8)) & 1).astype(np.bool_), dtype)
        result = operation(left, right)
        stored = left.dtype
        return Handle(result if result.dtype == stored else result.astype(stored), dtype)

    return create


def _bitwise(operation: Callable[..., Array]) -> Callable[..., Handle]:
    def create(self: Any, lhs: Handle, rhs: Handle) -> Handle:
        return Handle(operation(lhs.data, rhs.data), lhs.dtype)

    return create


def _comparison(operation: Callable[..., Array]) -> Callable[..., Handle]:
    def create(self: Any, lhs: Handle, rhs: Handle) -> Handle:
        return Handle(operation(lhs.values, rhs.values), tl.int1)

    return create


def _unary(operation: Callable[[Array], Array]) -> Callable[..., Handle]:
    def create(self: Any, arg: Handle) -> Handle:
        return from_values(operation(arg.values), arg.dtype.scalar)

    return create


def erf(values: Array) -> Array:
    wide = np.ascontiguousarray(values, np.float64)
    return torch.erf(torch.from_numpy(wide)).numpy().astype(values.dtype, copy=False)


def _divide_integers(lhs: Array, rhs: Array) -> Array:
    """Quotient truncated toward zero, as in C."""
    if lhs.size and not rhs.all():
        return _where_nothing_divides(rhs, _divide_integers(lhs, _ones_for_zeros(rhs)))
    if lhs.dtype.kind == "u" or (lhs.size and lhs.min() >= 0 and rhs.min() > 0):
        return np.floor_divide(lhs, rhs)
    quotient: Array = np.floor_divide(lhs, rhs)
    inexact = quotient * rhs != lhs
    return np.asarray(quotient + (inexact & ((lhs < 0) != (rhs < 0))))


def _remainder_of_integers(lhs: Array, rhs: Array) -> Array:
    """What a division toward zero leaves."""
    if lhs.size and not rhs.all():
        return _where_nothing_divides(rhs, np.fmod(lhs, _ones_for_zeros(rhs)))
    return np.asarray(np.fmod(lhs, rhs))


def _ones_for_zeros(divisors: Array) -> Array:
    return np.where(divisors == 0, divisors.dtype.type(1), divisors)


def _where_nothing_divides(divisors: Array, results: Array) -> Array:
    """Every bit set where the divisor is 0: no machine promises anything, an H200 gives this for int32, and none gives 0."""
    return np.where(divisors == 0, np.bitwise_not(divisors.dtype.type(0)), results)


def _fused_multiply_add(x: Array, y: Array, z: Array) -> Array:
    """x * y + z for types up to float32, exact but for a last bit that keeps any later rounding to nearest right."""
    product = x.astype(np.float64) * y.astype(np.float64)
    addend = z.astype(np.float64)
    total = product + addend
    shadow = total - product
    lost = (product - (total - shadow)) + (addend - shadow)
    adjust = np.isfinite(total) & (lost != 0) & ((total.view(np.int64) & 1) == 0)
    if adjust.any():
        total = np.where(adjust, np.nextafter(total, np.where(lost > 0, np.inf, -np.inf)), total)
    return total


class Watch(Protocol):
    """What looks on while a kernel touches memory; see ``impl.executions.memory_watch``."""

    def begin(self, kernel: str, memory: Memory, grid: tuple[int, int, int]) -> None: ...
    def end(self) -> None: ...
    def scattered(self, what: str, addresses: Array, mask: Array | None, width: int, program: Program) -> None:
        """An access whose lanes do not lie in one segment is about to happen."""

    def stored(
        self, segment: Segment | None, addresses: Array, mask: Array | None, width: int, program: Program
    ) -> None:
        """Lanes are about to be written; ``segment`` holds them all, if there is one."""

    def poison(self, stored: np.dtype[Any], element: str) -> Any:
        """What an unread lane holds, or None for zero."""


def _mask_data(mask: Any) -> Array:
    # Block pointers hand over a bare array.
    return mask if isinstance(mask, np.ndarray) else mask.data


def _same_shape(addresses: Array, mask: Any) -> tuple[Array, Array | None]:
    if mask is None:
        return addresses, None
    chosen = _mask_data(mask)
    if chosen.shape == addresses.shape:
        return addresses, chosen
    both = np.broadcast_arrays(addresses, chosen)
    return both[0], both[1]


def _element(pointer: Handle) -> Any:
    dtype = pointer.dtype
    while hasattr(dtype, "element_ty"):
        dtype = dtype.element_ty
    return dtype


class Builder(stock.InterpreterBuilder):  # type: ignore[misc]
    """Triton's interpreter builder with the arithmetic of the machine instead of NumPy's on raw codes."""

    def __init__(self) -> None:
        super().__init__()
        self.watch: Watch | None = None
        self.memory = Memory({})
        self.check_overflow = False
        self.other_given = False
        self.grid_idx: tuple[int, int, int] = (0, 0, 0)

    create_fadd = create_add = _binary(np.add)
    create_fsub = create_sub = _binary(np.subtract)
    create_fmul = create_mul = _binary(np.multiply)
    create_fdiv = create_precise_divf = create_approx_divf = _binary(np.divide)
    create_frem = _binary(np.fmod)
    create_srem = create_urem = _binary(_remainder_of_integers)
    create_sdiv = create_udiv = create_idiv = _binary(_divide_integers)
    create_shl = _binary(np.left_shift)
    create_minsi = create_minui = create_minimumf = _binary(np.minimum)
    create_maxsi = create_maxui = create_maximumf = _binary(np.maximum)
    create_minnumf = _binary(np.fmin)
    create_maxnumf = _binary(np.fmax)
    create_and = _bitwise(np.bitwise_and)
    create_or = _bitwise(np.bitwise_or)
    create_xor = _bitwise(np.bitwise_xor)

    create_icmpSLT = create_icmpULT = create_fcmpOLT = _comparison(np.less)
    create_icmpSLE = create_icmpULE = create_fcmpOLE = _comparison(np.less_equal)
    create_icmpSGT = create_icmpUGT = create_fcmpOGT = _comparison(np.greater)
    create_icmpSGE = create_icmpUGE = create_fcmpOGE = _comparison(np.greater_equal)
    create_icmpEQ = create_fcmpOEQ = _comparison(np.equal)
    create_icmpNE = create_fcmpUNE = _comparison(np.not_equal)
    create_fcmpONE = _comparison(lambda x, y: (x < y) | (x > y))
    create_fcmpUEQ = _comparison(lambda x, y: ~((x < y) | (x > y)))
    create_fcmpULT = _comparison(lambda x, y: ~(x >= y))
    create_fcmpULE = _comparison(lambda x, y: ~(x > y))
    create_fcmpUGT = _comparison(lambda x, y: ~(x <= y))
    create_fcmpUGE = _comparison(lambda x, y: ~(x < y))

    create_fneg = _unary(np.negative)
    create_fabs = create_iabs = _unary(np.abs)
    create_floor = _unary(np.floor)
    create_ceil = _unary(np.ceil)
    create_sqrt = create_precise_sqrt = _unary(np.sqrt)
    create_rsqrt = _unary(numbers.rsqrt)
    create_exp = _unary(numbers.exp)
    create_exp2 = _unary(numbers.exp2)
    create_log = _unary(numbers.log)
    create_log2 = _unary(numbers.log2)
    create_sin = _unary(numbers.sin)
    create_cos = _unary(numbers.cos)
    create_erf = _unary(erf)

    def binary_op(self, lhs: Handle, rhs: Handle, op: Callable[..., Array]) -> Handle:
        return _binary(op)(self, lhs, rhs)

    def unary_op(self, arg: Handle, op: Callable[[Array], Array]) -> Handle:
        return _unary(op)(self, arg)

    def create_lshr(self, lhs: Handle, rhs: Handle) -> Handle:
        bits = np.dtype(f"u{lhs.data.dtype.name.lstrip('u')}")
        return Handle((lhs.data.view(bits) >> rhs.data.view(bits)).view(lhs.data.dtype), lhs.dtype)

    def create_ashr(self, lhs: Handle, rhs: Handle) -> Handle:
        bits = np.dtype(lhs.data.dtype.name.lstrip("u"))
        return Handle((lhs.data.view(bits) >> rhs.data.view(bits)).view(lhs.data.dtype), lhs.dtype)

    def create_umulhi(self, lhs: Handle, rhs: Handle) -> Handle:
        stored = lhs.data.dtype
        bits = np.dtype(f"u{stored.name.lstrip('u')}")
        x, y = np.broadcast_arrays(lhs.data.view(bits), rhs.data.view(bits))
        if stored.itemsize < 8:
            wide = np.dtype(f"uint{stored.itemsize * 16}")
            high = ((x.astype(wide) * y.astype(wide)) >> wide.type(stored.itemsize * 8)).astype(bits)
        else:
            low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
            x0, x1, y0, y1 = x & low, x >> half, y & low, y >> half
            middle = x1 * y0 + ((x0 * y0) >> half)
            high = x1 * y1 + (middle >> half) + ((x0 * y1 + (middle & low)) >> half)
        return Handle(high.view(stored), lhs.dtype)

    # ---- casts

    def cast_impl(self, src: Handle, dst_type: Any) -> Handle:
        return convert(src, dst_type)

    def create_fp_to_fp(self, src: Handle, dst_type: Any, rounding_mode: Any) -> Handle:
        return convert(src, dst_type, toward_zero=rounding_mode == _ir.ROUNDING_MODE.RTZ)

    def create_bitcast(self, src: Handle, dst_type: Any) -> Handle:
        return Handle(src.data.view(numpy_type(dst_type)), dst_type.scalar)

    create_int_to_ptr = create_ptr_to_int = create_bitcast

    # ---- constants

    def get_bf16(self, value: float) -> Handle:
        return from_values(np.array([value], np.float64), tl.bfloat16)

    def get_fp8e4nv(self, value: float) -> Handle:
        return from_values(np.array([value], np.float64), tl.float8e4nv)

    def get_fp8e4b8(self, value: float) -> Handle:
        return from_values(np.array([value], np.float64), tl.float8e4b8)

    def get_fp8e5(self, value: float) -> Handle:
        return from_values(np.array([value], np.float64), tl.float8e5)

    def get_fp8e5b16(self, value: float) -> Handle:
        return from_values(np.array([value], np.float64), tl.float8e5b16)

    def get_null_value(self, type: Any) -> Handle:
        return Handle(np.zeros(1, numpy_type(type)), type.scalar)

    def get_all_ones_value(self, type: Any) -> Handle:
        stored = numpy_type(type)
        ones = np.ones(1, np.bool_) if stored == np.bool_ else np.full(stored.itemsize, 0xFF, np.uint8).view(stored)
        return Handle(ones, type.scalar)

    def create_make_range(self, ret_ty: Any, start: int, stop: int) -> Handle:
        return Handle(np.arange(start, stop, dtype=np.int32), tl.int32)

    # ---- three operands

    def ternary_op(self, lhs: Handle, rhs: Handle, other: Handle, op: Callable[..., Array]) -> Handle:
        return from_values(op(lhs.values, rhs.values, other.values), other.dtype.scalar)

    def create_select(self, cond: Handle, lhs: Handle, rhs: Handle) -> Handle:
        return Handle(np.where(cond.data, lhs.data, rhs.data), lhs.dtype)

    def create_clampf(self, arg: Handle, lo: Handle, hi: Handle, propagate_nans: Any) -> Handle:
        if propagate_nans == _ir.PROPAGATE_NAN.NONE:
            return from_values(np.fmin(np.fmax(arg.values, lo.values), hi.values), arg.dtype.scalar)
        return from_values(np.minimum(np.maximum(arg.values, lo.values), hi.values), arg.dtype.scalar)

    def create_fma(self, x: Handle, y: Handle, z: Handle) -> Handle:
        dtype = z.dtype.scalar
        if dtype.name == "fp64":
            return Handle(_fma_float64(x.values, y.values, z.values), dtype)
        return from_values(_fused_multiply_add(x.values, y.values, z.values), dtype)

    # ---- matrix products

    def create_dot(
        self, a: Handle, b: Handle, d: Handle, input_precision: Any = None, max_num_imprecise_acc: Any = None
    ) -> Handle:
        dtype = d.dtype.scalar
        if a.data.dtype.kind == "i" or (a.data.dtype.kind == "u" and not a.dtype.scalar.is_floating()):
            # Exact in float64 (BLAS) as long as the sum stays under 2**53; NumPy's integer product is far slower.
            total = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.int64) + d.data
            return Handle(total.astype(d.data.dtype), dtype)
        # Products are exact in float64 and the sum is rounded once, so that an element depends neither on its place in the
        # block nor on the BLAS of this machine.
        product = np.matmul(a.values.astype(np.float64, copy=False), b.values.astype(np.float64, copy=False))
        product += d.values
        return from_values(product if dtype.name == "fp64" else product.astype(np.float32), dtype)

    def create_dot_scaled(
        self,
        lhs: Handle,
        lhs_scale_handle: Handle | None,
        lhs_format_enum: Any,
        rhs: Handle,
        rhs_scale_handle: Handle | None,
        rhs_format_enum: Any,
        fast_math: bool,
        lhs_k_pack: bool,
        rhs_k_pack: bool,
        acc_handle: Handle,
    ) -> Handle:
        left = _scaled_operand(lhs, lhs_scale_handle, lhs_format_enum, -1 if lhs_k_pack else -2)
        # The right scale is given as [columns, groups of k].
        right = _scaled_operand(_transposed(rhs), rhs_scale_handle, rhs_format_enum, -1 if rhs_k_pack else -2).swapaxes(
            -1, -2
        )
        product = np.matmul(left.astype(np.float64, copy=False), right.astype(np.float64, copy=False))
        return from_values((product + acc_handle.values).astype(np.float32), tl.float32)

    # ---- shapes

    def create_reshape(self, arg: Handle, shape: Any, allow_reorder: bool = False) -> Handle:
        return Handle(arg.data.reshape(tuple(shape)), arg.dtype)

    def create_trans(self, arg: Handle, perm: Any) -> Handle:
        values = arg._values
        return Handle(arg.data.transpose(perm), arg.dtype, None if values is None else values.transpose(perm))

    def create_expand_dims(self, arg: Handle, axis: int) -> Handle:
        return Handle(np.expand_dims(arg.data, axis), arg.dtype)

    def create_broadcast(self, arg: Handle, shape: Any) -> Handle:
        return Handle(np.broadcast_to(arg.data, tuple(shape)), arg.dtype)

    def create_splat(self, ret_ty: Any, arg: Handle) -> Handle:
        data = arg.data
        return Handle(np.full(tuple(ret_ty.shape), data.reshape(-1)[0], data.dtype), arg.dtype)

    def create_unsplat(self, arg: Handle) -> Handle:
        return Handle(arg.data.reshape(-1)[:1], arg.dtype.scalar)

    def create_cat(self, lhs: Handle, rhs: Handle) -> Handle:
        return Handle(np.concatenate([lhs.data, rhs.data]), lhs.dtype)

    def create_join(self, lhs: Handle, rhs: Handle) -> Handle:
        return Handle(np.stack([lhs.data, rhs.data], axis=-1), lhs.dtype)

    def create_split(self, val: Handle) -> tuple[Handle, Handle]:
        first, second = val.data[..., 0], val.data[..., 1]
        if not first.shape:
            first, second = first.reshape(1), second.reshape(1)
        return Handle(first, val.dtype), Handle(second, val.dtype)

    def create_gather(self, src: Handle, indices: Handle, axis: int) -> Handle:
        return Handle(np.take_along_axis(src.data, indices.data.astype(np.int64), axis=axis), src.dtype)

    def create_histogram(self, data: Handle, bins: int, mask: Handle | None) -> Handle:
        keys = data.data.astype(np.int64)
        counted = (keys >= 0) & (keys < bins)
        if mask is not None:
            counted &= mask.data
        return Handle(np.bincount(keys[counted], minlength=bins).astype(np.int32), tl.int32)

    # ---- memory

    def create_addptr(self, ptr: Handle, offset: Handle) -> Handle:
        width = max(1, _element(ptr).primitive_bitwidth // 8)
        distance = offset.data.astype(ADDRESS)
        if width > 1:
            distance *= width
        return Handle(ptr.data + distance, ptr.dtype)

    def create_load(self, ptr: Handle, *_policy: Any) -> Handle:
        return self.create_masked_load(ptr, None, None)

    def create_store(self, ptr: Handle, val: Handle, *_policy: Any) -> None:
        self.create_masked_store(ptr, val, None)

    def create_masked_load(
        self, ptrs: Handle, mask: Any, other: Handle | None, *_policy: Any, **_policies: Any
    ) -> Handle:
        element = _element(ptrs)
        stored = numpy_type(element)
        addresses, chosen = _same_shape(ptrs.data, mask)
        if chosen is not None and chosen.all():
            chosen = None
        if chosen is None:
            loaded = self._read(addresses, stored)
        elif (segment := self.memory.around(addresses, stored.itemsize)) is not None and (
            places := segment.places(addresses, stored.itemsize)
        ) is not None:
            # Every lane is readable, so all are read and the masked ones replaced.
            loaded = segment.view(stored).take(places)
            np.copyto(loaded, self._rest(other, stored, element), where=~chosen)
        else:
            loaded = np.empty(addresses.shape, stored)
            loaded[...] = self._rest(other, stored, element)
            if chosen.any():
                loaded[chosen] = self._read(addresses, stored, chosen)
        return Handle(loaded, element)

    def _rest(self, other: Handle | None, stored: np.dtype[Any], element: Any) -> Any:
        """What masked lanes of a load hold."""
        if other is not None:
            return other.data
        if self.watch is not None and not self.other_given:
            poison = self.watch.poison(stored, element.name)
            if poison is not None:
                return poison
        return stored.type(0)

    def _read(self, addresses: Array, stored: np.dtype[Any], mask: Array | None = None) -> Array:
        """The elements at ``addresses``, or at those that ``mask`` chooses."""
        wanted = addresses if mask is None else addresses[mask]
        segment = self.memory.around(wanted, stored.itemsize)
        if segment is not None:
            places = segment.places(wanted, stored.itemsize)
            if places is not None:
                return segment.view(stored).take(places)
        elif self.watch is not None:
            self.watch.scattered("load", addresses, mask, stored.itemsize, self.grid_idx)
        every, nothing = np.ones(wanted.shape, np.bool_), np.zeros(wanted.shape, stored)
        lanes: Array = stock._interpreter.load(wanted.view(np.uint64), every, nothing, stored)
        return lanes

    def create_masked_store(self, ptrs: Handle, value: Handle, mask: Any, *_policy: Any, **_policies: Any) -> None:
        addresses, chosen = _same_shape(ptrs.data, mask)
        data = value.data
        stored = data.dtype
        if chosen is not None:
            if not chosen.any():
                return
            if chosen.all():
                chosen = None
        wanted = addresses if chosen is None else addresses[chosen]
        segment = self.memory.around(wanted, stored.itemsize)
        if self.watch is not None:
            if segment is None:
                self.watch.scattered("store", addresses, chosen, stored.itemsize, self.grid_idx)
            self.watch.stored(segment, addresses, chosen, stored.itemsize, self.grid_idx)
        if data.shape != addresses.shape:
            data = np.broadcast_to(data, addresses.shape)
        if chosen is not None:
            data = data[chosen]
        if segment is not None:
            places = segment.places(wanted, stored.itemsize)
            if places is not None:
                segment.view(stored)[places] = data
                return
        stock._interpreter.store(wanted.view(np.uint64), data, np.ones(wanted.shape, np.bool_))

    def create_tensor_pointer_load(
        self, ptr: Any, boundary_check: Any, padding_option: Any, *_policy: Any, **_policies: Any
    ) -> Handle:
        pointers, mask = _block_pointers(ptr, boundary_check)
        element = _element(pointers)
        other = None
        if padding_option is not None:
            padding = np.nan if padding_option == _ir.PADDING_OPTION.PAD_NAN else 0.0
            other = from_values(np.full(mask.shape, padding, np.float32), element)
        return self.create_masked_load(pointers, mask, other)

    def create_tensor_pointer_store(
        self, ptr: Any, value: Handle, boundary_check: Any, *_policy: Any, **_policies: Any
    ) -> None:
        pointers, mask = _block_pointers(ptr, boundary_check)
        self.create_masked_store(pointers, value, mask)

    def create_print(self, prefix: str, hex: bool, values: Any, isSigned: Any) -> None:
        shown = values if hex else [Handle(value.values, value.dtype) for value in values]
        super().create_print(prefix, hex, shown, isSigned)

    def create_descriptor_load(self, desc: Any, indices: Any, *_policy: Any, **_policies: Any) -> Handle:
        pointers, mask = _descriptor_pointers(desc, indices)
        element = _element(pointers)
        shape = pointers.data.shape
        if desc.padding == _ir.PADDING_OPTION.PAD_NAN:
            other = from_values(np.full(shape, np.nan, np.float32), element)
        else:
            other = Handle(np.zeros(shape, numpy_type(element)), element)
        loaded = self.create_masked_load(pointers, mask, other)
        if getattr(desc, "round_f32_to_tf32", False) and element.name == "fp32":
            return Handle(stock._round_f32_to_tf32(loaded.data), element)
        return loaded

    def create_descriptor_store(self, desc: Any, value: Handle, indices: Any) -> None:
        pointers, mask = _descriptor_pointers(desc, indices)
        self.create_masked_store(pointers, value, mask)

    def create_descriptor_gather(self, desc: Any, x_offsets: Handle, y_offset: Handle, type: Any) -> Handle:
        rows = [
            self.create_descriptor_load(desc, [Handle(np.array([x], np.int32), tl.int32), y_offset]).data
            for x in x_offsets.data
        ]
        return Handle(np.concatenate(rows), desc.base.dtype.element_ty)

    def create_descriptor_scatter(self, desc: Any, value: Handle, x_offsets: Handle, y_offset: Handle) -> None:
        for row, x in zip(value.data, x_offsets.data, strict=True):
            offsets = [Handle(np.array([x], np.int32), tl.int32), y_offset]
            self.create_descriptor_store(desc, Handle(row[None], value.dtype), offsets)

    def create_atomic_cas(self, ptr: Handle, cmp: Handle, val: Handle, sem: Any, scope: Any) -> Handle:
        shape = ptr.data.shape
        self._before_atomic(ptr.data, None, val.data.dtype.itemsize)
        expected, desired = (np.ascontiguousarray(np.broadcast_to(h.data, shape)) for h in (cmp, val))
        order = self.ir_sem_to_interpreter_sem[sem]
        return Handle(
            stock._interpreter.atomic_cas(ptr.data.view(np.uint64), expected, desired, order), cmp.dtype.scalar
        )

    def create_atomic_rmw(self, rmwOp: Any, ptr: Handle, val: Handle, mask: Handle, sem: Any, scope: Any) -> Handle:
        shape = ptr.data.shape
        data = np.ascontiguousarray(np.broadcast_to(val.data, shape))
        chosen = np.ascontiguousarray(np.broadcast_to(_mask_data(mask), shape))
        self._before_atomic(ptr.data, chosen, data.dtype.itemsize)
        if rmwOp == _ir.ATOMIC_OP.FADD and data.dtype not in (np.float32, np.float64):
            return self._atomic_add_narrow(ptr, Handle(data, val.dtype), chosen)
        operation = self.ir_rmw_op_to_interpreter_rmw_op[rmwOp]
        order = self.ir_sem_to_interpreter_sem[sem]
        return Handle(
            stock._interpreter.atomic_rmw(operation, ptr.data.view(np.uint64), data, chosen, order), val.dtype.scalar
        )

    def _before_atomic(self, addresses: Array, mask: Array | None, width: int) -> None:
        if self.watch is None:
            return
        wanted = addresses if mask is None else addresses[mask]
        if wanted.size and self.memory.around(wanted, width) is None:
            self.watch.scattered("atomic", addresses, mask, width, self.grid_idx)

    def _atomic_add_narrow(self, ptr: Handle, val: Handle, chosen: Array) -> Handle:
        """fp16 and bf16 sums, lane after lane, each rounded: lanes may share an address."""
        dtype = val.dtype.scalar
        before = np.zeros(ptr.data.size, val.data.dtype)
        yes, addends = np.ones(1, np.bool_), val.data.reshape(-1)
        addresses = np.ascontiguousarray(ptr.data).view(np.uint64).reshape(-1)
        for lane in np.flatnonzero(chosen.reshape(-1)):
            at = addresses[lane : lane + 1]
            old = Handle(stock._interpreter.load(at, yes, before[:1], before.dtype), dtype)
            new = from_values(old.values + Handle(addends[lane : lane + 1], dtype).values, dtype)
            stock._interpreter.store(at, new.data, yes)
            before[lane] = old.data[0]
        return Handle(before.reshape(ptr.data.shape), dtype)


def _block_pointers(block: Any, checked: Any) -> tuple[Handle, Array]:
    """The address of every element of a block pointer (Triton up to 3.7), and which lie inside on checked axes."""
    rank = len(block.block_shape)
    width = max(1, _element(block.base).primitive_bitwidth // 8)
    addresses: Any = block.base.data.reshape((1,) * rank)
    inside: Any = np.ones((1,) * rank, np.bool_)
    for axis, size in enumerate(block.block_shape):
        position = int(block.offsets[axis].data.reshape(-1)[0]) + np.arange(size, dtype=np.int64)
        position = position.reshape((-1,) + (1,) * (rank - axis - 1))
        addresses = addresses + position * (int(block.strides[axis].data.reshape(-1)[0]) * width)
        if axis in checked:
            inside = inside & (position >= 0) & (position < int(block.shape[axis].data.reshape(-1)[0]))
    shape = tuple(block.block_shape)
    return Handle(np.broadcast_to(addresses, shape), block.base.dtype.scalar), np.broadcast_to(inside, shape)


def _descriptor_pointers(desc: Any, offsets: Any) -> tuple[Handle, Array]:
    """The address of every element of a descriptor's block, and which of them lie inside its tensor."""
    rank = len(desc.block_shape)
    width = desc.base.dtype.element_ty.primitive_bitwidth // 8
    if (int(offsets[-1].data.reshape(-1)[0]) * width) % 16:
        raise ValueError("the last offset of a descriptor access must be a multiple of 16 bytes")
    addresses: Any = desc.base.data.reshape((1,) * rank)
    inside: Any = np.ones((1,) * rank, np.bool_)
    for axis, size in enumerate(desc.block_shape):
        position = int(offsets[axis].data.reshape(-1)[0]) + np.arange(size, dtype=np.int64)
        position = position.reshape((-1,) + (1,) * (rank - axis - 1))
        addresses = addresses + position * (int(desc.strides[axis].data.reshape(-1)[0]) * width)
        inside = inside & (position >= 0) & (position < int(desc.shape[axis].data.reshape(-1)[0]))
    shape = tuple(desc.block_shape)
    return Handle(np.broadcast_to(addresses, shape), desc.base.dtype.scalar), np.broadcast_to(inside, shape)


def _fma_float64(x: Array, y: Array, z: Array) -> Array:
    fused = getattr(stock._interpreter, "fma_fp64", None)
    if fused is not None:
        result: Array = fused(*np.broadcast_arrays(x, y, z))
        return result
    wide = np.longdouble
    return (x.astype(wide) * y.astype(wide) + z.astype(wide)).astype(np.float64)


def _transposed(handle: Handle) -> Handle:
    return Handle(handle.data.swapaxes(-1, -2), handle.dtype)


def _scaled_operand(value: Handle, scale: Handle | None, format_: Any, packed_axis: int) -> Array:
    """[rows, k] float64 values of a block-scaled operand, in which products and scales are exact."""
    if format_ == _ir.ScaleDotElemTypeTY.E2M1:
        values = numbers.decode_e2m1(value.data, packed_axis)
    else:
        names = {_ir.ScaleDotElemTypeTY.E4M3: "fp8e4nv", _ir.ScaleDotElemTypeTY.E5M2: "fp8e5"}
        name = names.get(format_, value.dtype.scalar.name)
        # MX formats are OCP whatever type the bytes were loaded as.
        values = numbers.decode(value.data.view(np.uint8), name) if format_ in names else value.values
    wide: Array = values.astype(np.float64)
    if scale is None:
        return wide
    factors = numbers.decode_e8m0(scale.data) if scale.data.dtype.itemsize == 1 else scale.values.astype(np.float64)
    return np.asarray(wide * np.repeat(factors, wide.shape[-1] // factors.shape[-1], axis=-1))
