"""How many waves does a launch have, and what becomes of it under an onlooker? A process of its own: prints JSON."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import json
import sys

import torch
import triton
import triton.language as tl

from impl.executions.isa import triton_launch


@triton.jit
def fill(out, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), 3)


def main() -> None:
    """Launches one kernel as it is, under an onlooker that only looks, and under one that runs nothing."""
    triton_launch.install("gfx950")
    out = torch.zeros(256, dtype=torch.int32)
    seen: list[tuple[int, int]] = []

    def look(launched, run):
        steps = run(launched.kernel, 0)
        seen.append((launched.waves, steps))
        return steps

    with triton_launch.looked_on(look):
        fill[(1,)](out, BLOCK=256, num_warps=4)
    looked = int(out.sum())
    out.zero_()
    with triton_launch.looked_on(lambda launched, run: 0):
        fill[(1,)](out, BLOCK=256, num_warps=4)
    swallowed = int(out.sum())
    fill[(1,)](out, BLOCK=256, num_warps=4)
    told = {"waves": seen[0][0], "steps": seen[0][1], "sums": [looked, swallowed, int(out.sum())], "seen": len(seen)}
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
