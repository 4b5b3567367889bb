"""How long do the reference and the interpreter take on this machine? Figures, no verdicts.

python -m reports.bench              everything
python -m reports.bench reference    the decode reference against its two matrix products
python -m reports.bench memory       the peak memory of the decode reference at 1,024 rows
"""

import dataclasses
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console

from cases.draw import Draw
from cases.sparse_mla.decode import LANES, MODEL_SCALE, RECORD, DecodeInputs, Segment
from oracle.sparse_mla.call import listed, rows_of, segments, valid
from oracle.sparse_mla.decode import reference
from reports.environment import environment

REPEATS = 3


def production_call(rows: int, heads: int = 128, window: int = 128, chosen: int = 2048) -> DecodeInputs:
    """A decode call of the largest model: a window and a top-k list a row, pages of 64 tokens."""
    draw = Draw(0, "bench")

    def segment(name: str, count: int) -> Segment:
        blocks = max(4096 // 64, count * 4 // 64)
        codes = draw.integers(name, (1, 64, 512), 0, 0x7F)
        stride = -(-64 * RECORD // 576) * 576
        cache = torch.full((blocks, stride), 127, dtype=torch.uint8)
        data = cache[:, : 64 * 576].view(blocks, 64, 576)
        data[..., :448] = codes[..., :448].to(torch.uint8)
        data[..., 448:] = codes[..., 384:].to(torch.uint8)
        slots = draw.permutation(name + "slots", blocks * 64)[:count].repeat(rows)
        return Segment(
            cache=cache.as_strided((blocks, 64, RECORD), (stride, RECORD, 1)),
            encoding="float8_e4m3fn",
            indices=slots.int(),
            indptr=torch.arange(rows + 1, dtype=torch.int32) * count,
        )

    return DecodeInputs(
        # One row's numbers for all: the benchmark must not need more memory than what it measures.
        query=draw.normal_like("query", (1, heads, LANES)).to(torch.bfloat16).repeat(rows, 1, 1),
        main=segment("main", window), extra=segment("extra", chosen), scale=MODEL_SCALE,
        sink=draw.normal_like("sink", (heads,)), positions=None, cos_sin=None,
        out=torch.empty(rows, heads, LANES, dtype=torch.bfloat16), out_codes=None, out_scales=None,
        arch="gfx950", compute_units=256, splits=0, adaptive=False, trust_extra=False,
    )  # fmt: skip


def best(work: Callable[[], object]) -> float:
    """The shortest of a few runs, in seconds."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def time_reference(console: Console, rows: int = 64) -> None:
    """The reference at 128 heads and 2,176 keys a row, and the two matrix products alone on rows already decoded."""
    inputs = production_call(rows)
    keys = torch.cat([rows_of(part, valid(part, listed(part, 0)), torch.float32) for part in segments(inputs)])
    query = inputs.query.float()
    weight = torch.rand(query.shape[1], keys.shape[0])

    def products() -> None:
        for t in range(rows):
            torch.mm(query[t], keys.T)
            torch.mm(weight, keys)

    alone, whole = best(products), best(lambda: reference(inputs))
    console.print(
        f"decode reference, 128 heads, {rows} rows, {keys.shape[0]} keys: {whole:.3f} s; its two matrix products alone "
        f"{alone:.3f} s; ratio {whole / alone:.2f} ({torch.get_num_threads()} threads)"
    )


def peak_memory() -> None:
    """Runs the reference at 1,024 rows and prints the peak resident set of this process."""
    inputs = production_call(1024)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    reference(dataclasses.replace(inputs))
    took = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.stdout.write(
        f"decode reference, 128 heads, 1024 rows, 2176 keys: peak {peak / 2**20:.2f} GiB "
        f"({before / 2**20:.2f} GiB before it), {took:.1f} s\n"
    )


def main(arguments: list[str]) -> int:
    """Print the figures asked for; 2 for an unknown one."""
    known = ("reference", "memory", "interpreter")
    wanted = arguments or list(known)
    for name in wanted:
        if name not in (*known, "peak-memory-here"):
            sys.stderr.write(f"unknown benchmark {name!r}: should be one of {', '.join(known)}\n")
            return 2
    console = Console(soft_wrap=True)
    if "peak-memory-here" in wanted:
        peak_memory()
        return 0
    here = environment("interpreter")
    console.print(f"{here.device}, torch {here.torch}, triton {here.triton}, Python {here.python}")
    if "reference" in wanted:
        time_reference(console)
    if "memory" in wanted:
        # In a process of its own: the peak of a process cannot be reset.
        subprocess.run([sys.executable, "-m", "reports.bench", "peak-memory-here"], check=True)
    if "interpreter" in wanted:
        for way in ("stock", "corrected", "watched"):
            subprocess.run([sys.executable, "-m", "impl.executions.interpreter_speed", way], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
