"""What may a kernel do wrong in memory that was given to it?"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl


@triton.jit
def _add_what_follows(out, size):
    tl.store(out, tl.load(out) + tl.load(out + size))


@triton.jit
def _store_one(out):
    tl.store(out, 1.0)


@triton.jit
def _dot_product(out):
    lane = tl.arange(0, 64)
    found = tl.inline_asm_elementwise("v_msad_u8 $0, $1, $1, 0", "=v,v", [lane], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(out + lane, found.to(tl.bfloat16))


@triton.jit
def _product(a, out, K: tl.constexpr):
    rows, inner = tl.arange(0, 64), tl.arange(0, K)
    left = tl.load(a + rows[:, None] * K + inner[None, :])
    right = tl.load(a + inner[:, None] * 64 + rows[None, :])
    tl.store(out, tl.sum(tl.sum(tl.dot(left, right), 0), 0).to(tl.bfloat16))


def past(out: torch.Tensor) -> None:
    """Reads behind the end of the storage."""
    _add_what_follows[(1,)](out, out.untyped_storage().nbytes() // out.element_size() + 1024)


def race(out: torch.Tensor) -> None:
    """Two programs store one element."""
    _store_one[(2,)](torch.zeros(1, dtype=out.dtype))


def unmodelled(out: torch.Tensor) -> None:
    """Holds inline assembly that the executor does not model."""
    _dot_product[(1,)](out)


def lds(out: torch.Tensor) -> None:
    """Asks for more memory of a workgroup than any architecture has."""
    _product[(1,)](torch.zeros(64 * 2048, dtype=torch.bfloat16), out, K=2048, num_warps=16)
