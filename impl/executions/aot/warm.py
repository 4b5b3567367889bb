"""What makes the compiler load all that it needs, so that processes forked afterwards share it?

The first compilation of a process takes ten times as long as a later one of the same kernel.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Kernels are written in Triton's language, which carries no types.

import torch
import triton
import triton.language as tl

from impl.executions.aot.capture import recording
from impl.executions.aot.compile import compile_launch


@triton.jit
def _copy_one(source, out):
    tl.store(out, tl.load(source))


def warm_up(arch: str) -> None:
    """Compile a kernel that cannot go wrong; raises `CompileError` where even that does."""
    one = torch.empty(1, device="meta")
    with recording(arch) as launches:
        _copy_one[(1,)](one, one)
    compile_launch(launches[0])
