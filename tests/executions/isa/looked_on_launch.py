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
    """Launches one kernel to be named only, as it is, under an onlooker that only looks, and under one that runs nothing."""
    triton_launch.install("gfx950")
    out = torch.zeros(256, dtype=torch.int32)
    seen: list[tuple[int, int, str]] = []

    def look(launched, run):
        steps = run(launched.kernel, 0)
        seen.append((launched.waves, steps, launched.key))
        return steps

    named = []
    for block in (256, 256, 512):
        with triton_launch.only_named() as keys:
            fill[(1,)](out, BLOCK=block, num_warps=4)
        named += sorted(keys)
    untouched = int(out.sum())
    with triton_launch.looked_on(look):
        fill[(1,)](out, BLOCK=256, num_warps=4)
    looked = int(out.sum())
    out.zero_()
    with triton_launch.looked_on(lambda launched, run: 0):
        fill[(1,)](out, BLOCK=256, num_warps=4)
    swallowed = int(out.sum())
    fill[(1,)](out, BLOCK=256, num_warps=4)
    waves, steps, key = seen[0]
    told = {"waves": waves, "steps": steps, "key": key, "sums": [looked, swallowed, int(out.sum())], "seen": len(seen)}
    told |= {"named": named, "untouched": untouched}
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
