"""Which kernels, made to go wrong in one way each, must the compilation tell apart?

`python stand_in_kernels.py` compiles them for gfx942 and writes what became of each: a stand-in for a whole director, in
whose process Triton's interpreter is off.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import os
import sys
import time

import msgspec
import torch
import triton
import triton.language as tl

from impl.executions.aot.capture import recording
from impl.executions.aot.compile import externals, key_of
from impl.executions.aot.pool import Outcome, Pool, outcome_of
from impl.executions.aot.warm import warm_up

ARCH = "gfx942"


@triton.jit
def copies(source, out, N: tl.constexpr):
    place = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + place, tl.load(source + place))


@triton.jit
def spills(source, out):
    rows, columns = tl.arange(0, 32)[:, None] * 128, tl.arange(0, 128)[None, :]
    one = tl.load(source + rows + columns)
    two = tl.load(source + 4096 + rows + columns)
    tl.store(out + rows + columns, one + tl.sum(two, 0)[None, :])
    tl.store(out + 4096 + rows + columns, two + tl.sum(one, 0)[None, :])


@triton.jit
def takes_too_much_memory(left, right, out):
    rows, inner, columns = tl.arange(0, 64), tl.arange(0, 1024), tl.arange(0, 64)
    a = tl.load(left + rows[:, None] * 1024 + inner[None, :])
    b = tl.load(right + inner[:, None] * 64 + columns[None, :])
    tl.store(out + rows[:, None] * 64 + columns[None, :], tl.dot(a, b))


@triton.jit
def is_no_kernel(source, out):
    tl.store(out + tl.arange(0, 64), tl.load(source + tl.arange(0, 32)))


@triton.jit
def kills(source, out):
    tl.store(out, tl.load(source))


@triton.jit
def never_ends(source, out):
    tl.store(out, tl.load(source))


@triton.jit
def has_assembly(source, out):
    place = tl.arange(0, 64)
    value = tl.inline_asm_elementwise(
        "v_mov_b32 $0, $1", "=v,v", [tl.load(source + place)], dtype=tl.int32, is_pure=True, pack=1
    )
    tl.store(out + place, value)


def work(launch) -> Outcome:
    """What the compiler does, and for two kernels what a compiler must not."""
    if launch.name == "kills":
        os.write(2, b"LLVM ERROR: a stand-in for an assertion\n")
        os.abort()
    if launch.name == "never_ends":
        time.sleep(600)
    return outcome_of(launch)


def main() -> None:
    """Capture every kernel here on tensors without memory, compile, and write JSON."""

    def memory(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    half = torch.bfloat16
    with recording(ARCH) as launches:
        copies[(4,)](memory(1024), memory(1024), N=256)
        # Eight waves leave a lane 64 registers, and each of the two tiles takes as many.
        spills[(1,)](memory(8192), memory(8192), num_warps=1, waves_per_eu=8)
        takes_too_much_memory[(1,)](
            memory(64, 1024, dtype=half), memory(1024, 64, dtype=half), memory(64, 64), num_warps=16
        )
        is_no_kernel[(1,)](memory(64), memory(64))
        kills[(1,)](memory(64), memory(64))
        never_ends[(1,)](memory(64), memory(64))
        has_assembly[(1,)](memory(64, dtype=torch.int32), memory(64, dtype=torch.int32))
        # What a pointer reaches decides how it is addressed.
        copies[(4,)](memory(1 << 30), memory(1024), N=256)
    warm_up(ARCH)
    by_key = {key_of(launch): launch for launch in launches}
    pool = Pool(2, work, deadline=60.0)
    for key, launch in by_key.items():
        if launch.name != "never_ends":
            pool.submit(key, launch)
    found = dict(pool.finished(wait=True))
    hurried = Pool(1, work, deadline=0.5)
    for key, launch in by_key.items():
        if launch.name == "never_ends":
            hurried.submit(key, launch)
    found.update(hurried.finished(wait=True))
    pool.close()
    hurried.close()
    told = [
        {"kernel": by_key[key].name, "key": key, "externals": externals(by_key[key]), "outcome": outcome}
        for key, outcome in found.items()
    ]
    sys.stdout.buffer.write(msgspec.json.encode(told))


if __name__ == "__main__":
    main()
