"""How many launches, programs and lanes a second does Triton's interpreter do, as shipped, corrected and watched?

    python -m impl.executions.interpreter_speed stock|corrected|watched

prints one figure a line. Each way needs a process of its own: the correction stays for the life of a process.
"""

# Kernels carry no types: Triton reads them.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import contextlib
import os
import sys
import time
from collections.abc import Callable

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

from impl.executions import interpreter, memory_watch

WAYS = ("stock", "corrected", "watched")
LAUNCHES = 100
PROGRAMS = 1000
LANES = 1 << 18
BLOCK = 1 << 15
KEYS = 640


@triton.jit
def _tiny(out):
    tl.store(out, 1)


@triton.jit
def _copy(source, out, count, N: tl.constexpr):
    place = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + place, tl.load(source + place, mask=place < count, other=0), mask=place < count)


@triton.jit
def _attend(query, keys, out, count, scale, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr):
    # One program of decode attention over bf16 rows: the operations of a real kernel, in their proportions.
    heads, lanes, tile = tl.arange(0, H), tl.arange(0, D), tl.arange(0, K)
    q = tl.load(query + heads[:, None] * D + lanes[None, :])
    top = tl.full((H,), -3.0e38, tl.float32)
    total = tl.zeros((H,), tl.float32)
    values = tl.zeros((H, D), tl.float32)
    for start in range(0, count, K):
        inside = start + tile < count
        k = tl.load(keys + (start + tile)[:, None] * D + lanes[None, :], mask=inside[:, None], other=0.0)
        score = tl.where(inside[None, :], tl.dot(q, tl.trans(k)) * scale, -3.0e38)
        above = tl.maximum(top, tl.max(score, axis=1))
        p = tl.exp(score - above[:, None])
        shrink = tl.exp(top - above)
        total = total * shrink + tl.sum(p, axis=1)
        values = values * shrink[:, None] + tl.dot(p.to(tl.bfloat16), k)
        top = above
    tl.store(out + heads[:, None] * D + lanes[None, :], values / total[:, None])


def best(work: Callable[[], object], repeats: int = 5) -> float:
    """The shortest processor time of a few runs, after one to warm up."""
    work()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def main(arguments: list[str]) -> int:
    """Print the figures of one way; 2 for an unknown one."""
    if len(arguments) != 1 or arguments[0] not in WAYS:
        sys.stderr.write(f"{' '.join(arguments) or 'nothing'}: should be one of {', '.join(WAYS)}\n")
        return 2
    way = arguments[0]
    torch.set_num_threads(1)
    if way != "stock":
        interpreter.install()
    one = torch.zeros(1, dtype=torch.int32)
    source = torch.zeros(LANES, dtype=torch.bfloat16)
    copy = source.clone()
    query, keys = torch.ones(16, 512, dtype=torch.bfloat16), torch.ones(KEYS, 512, dtype=torch.bfloat16)
    out = torch.zeros(16, 512)

    def launches() -> None:
        for _ in range(LAUNCHES):
            _tiny[(1,)](one)

    with memory_watch.watch() if way == "watched" else contextlib.nullcontext():
        launch = best(launches) / LAUNCHES
        # A thousand programs store to one place on purpose, which the watch would call a race.
        program = best(lambda: _tiny[(PROGRAMS,)](one)) / PROGRAMS if way != "watched" else 0.0
        lanes = best(lambda: _copy[(LANES // BLOCK,)](source, copy, LANES, BLOCK))
        attend = best(lambda: _attend[(1,)](query, keys, out, KEYS, 0.04, 16, 32, 512))
    figures = [f"{1 / launch:,.0f} launches/s"]
    figures += [f"{1 / program:,.0f} programs/s"] if program else []
    figures += [f"{LANES / lanes / 1e6:.1f} M lanes/s", f"{attend * 1e3:.0f} ms for 16 heads x {KEYS} keys"]
    sys.stdout.write(f"interpreter, {way}: {', '.join(figures)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
