"""How are two blocks set side by side in a Triton whose `tl.cat` knows no dimension?"""

# Kernels carry no types: Triton reads them.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def cat(input, other, can_reorder: tl.constexpr = False, dim: tl.constexpr = 0):
    """[M, N] and [M, N] to [M, 2N] with dim=1, every element in its place."""
    tl.static_assert(dim == 1, "only dim=1 of two-dimensional blocks is supplied")
    side_by_side = tl.permute(tl.join(input, other), (0, 2, 1))
    return tl.reshape(side_by_side, (input.shape[0], 2 * input.shape[1]))
