"""How long do the reference, the interpreter and the store of runs take on this machine? Figures, no verdicts.

python -m reports.bench              everything
python -m reports.bench reference    the decode reference against its two matrix products
python -m reports.bench memory       the peak memory of the decode reference at 1,024 rows
python -m reports.bench store        100,000 records: written, loaded, filtered, and held against another 100,000
"""

import dataclasses
import importlib
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from cases.draw import Draw
from cases.precision import Precision
from cases.sparse_mla.decode import LANES, MODEL_SCALE, RECORD, DecodeInputs, Segment
from oracle.check import Check
from oracle.sparse_mla.call import listed, rows_of, segments, valid
from oracle.sparse_mla.decode import reference
from reports.environment import environment
from reports.record import Environment, Record, Seconds
from reports.store import RecordFile, Run, Settings, Task, create_run, read_run

REPEATS = 3
STORED = 100_000


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


def synthetic_run(path: Path, count: int, seed: int = 0, workers: int = 16) -> None:
    """A run directory of made-up records of about 1.5 KB: ten ops, three implementations, three checks, one in 50 fails."""
    dice = random.Random(seed)
    tasks = [
        Task(
            case=f"bench.op{n % 10}:rows={n // 30},heads=128,kv_len=4096,page=64,layout=packed,values=needle,indices=ragged,"
            f"encoding=float8_e4m3fn,record=576,window=128,chosen=2048,sink=yes,positions=mixed,splits=auto,seed={n // 30}",
            impl=f"bench-{('triton', 'torch', 'asm')[n // 10 % 3]}",
            on="hip",
            item=f"bench/{n // 50:05d}",
        )
        for n in range(count)
    ]
    create_run(path, Settings(on=("hip",), workers=workers), tasks)
    files = [RecordFile(path / "records" / f"0001-hip-gw{n}-{n}.jsonl") for n in range(workers)]
    for n, task in enumerate(tasks):
        file = files[n // 50 % workers]
        file.start(task)
        file.record(_synthetic_record(task, dice))
    for file in files:
        file.close()


_BENCH = Environment(
    machine="Linux x86_64", python="3.12.3", torch="2.13.0+rocm7.1", triton="3.6.0", numpy="2.3.1",
    device="AMD Instinct MI355X (gfx950:sramecc+:xnack-)", arch="gfx950", driver="hip 7.1.25424",
    vllm="0.33.0@0123456789ab in src/vllm", aiter="0.1.9@ba9876543210 in src/aiter", commit="0123456789ab",
)  # fmt: skip


def _synthetic_record(task: Task, dice: random.Random) -> Record:
    failed = dice.random() < 0.02
    worst = 1.0 + dice.random() if failed else dice.betavariate(2, 5)

    def check(output: str, use: float) -> Check:
        return Check(
            output=output, measure="bounded", use=use, use_rms=use / 3, wrong=int(use >= 1), count=262_144,
            where=(dice.randrange(64), dice.randrange(128), dice.randrange(512)), got=f"{dice.gauss(0, 1):.9g}",
            want=f"{dice.gauss(0, 1):.9g} ±0.00391", error=use / 256, budget=1 / 256,
            why=f"outside the budget of the declared rounding points, {use:.3g} times; {int(use >= 1)} of 262144 are out",
        )  # fmt: skip

    return Record(
        case=task.case, op=task.case.partition(":")[0], impl=task.impl, on=task.on,
        status="fail" if failed else "pass", checks=(check("out", worst), check("lse", worst / 4), check("rms of out", 0.3)),
        reasons=("the answer was judged by its meaning",) if failed else (),
        diagnosis=("closest to: as if the last page were dropped (dropped-page)",) if failed else (),
        precision=Precision(note="split sums in fp32"), environment=_BENCH,
        seconds=Seconds(build=dice.random(), run=dice.random(), judge=dice.random(), compile=dice.random() / 2),
        fingerprint=f"{dice.getrandbits(256):064x}", source=f"{_number_of(task.impl):064x}", worker="0001-hip-gw0-1",
        finished=1.8e9 + dice.random(),
    )  # fmt: skip


def _number_of(name: str) -> int:
    """A number as large as a SHA-256 that the name alone decides."""
    return random.Random(name).getrandbits(256)


def time_store(console: Console) -> None:
    """Write two runs; load, filter and compare them in processes of their own, whose peak memory then says something."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        for seed in (0, 1):
            synthetic_run(Path(folder, f"run{seed}"), STORED, seed)
        took = (time.perf_counter() - began) / 2
        size = sum(file.stat().st_size for file in Path(folder, "run0").rglob("*") if file.is_file())
        console.print(f"store, {STORED} records: written in {took:.1f} s, {size / 2**20:.0f} MiB")
        for name in ("store-load-here", "store-diff-here"):
            subprocess.run([sys.executable, "-m", "reports.bench", name, folder], check=True)


def load_here(folder: Path) -> None:
    """Loads and filters one run, and prints the times and the peak resident set of this process."""
    before, took, run = _loaded(folder / "run0")
    began = time.perf_counter()
    found = [record for record in run.records.values() if record.op == "bench.op3" and record.status == "fail"]
    filtered = time.perf_counter() - began
    sys.stdout.write(
        f"store: loaded in {took:.2f} s, {len(found)} failures of one op found in {filtered:.3f} s; {_peak(before)}\n"
    )


def diff_here(folder: Path) -> None:
    """Loads two runs and compares them, and prints the times and the peak resident set of this process."""
    diff = importlib.import_module("reports.diff")
    before, _, first = _loaded(folder / "run0")
    _, _, second = _loaded(folder / "run1")
    began = time.perf_counter()
    diff.compare(first, second)
    sys.stdout.write(f"store: two runs compared in {time.perf_counter() - began:.2f} s; {_peak(before)}\n")


def _loaded(path: Path) -> tuple[float, float, Run]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    run = read_run(path)
    return before, time.perf_counter() - began, run


def _peak(before: float) -> str:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"peak {peak / 2**20:.2f} GiB ({before / 2**20:.2f} GiB before it)"


def main(arguments: list[str]) -> int:
    """Print the figures asked for; 2 for an unknown one."""
    here: dict[str, Callable[[Path], None]] = {"store-load-here": load_here, "store-diff-here": diff_here}
    if len(arguments) == 2 and arguments[0] in here:
        here[arguments[0]](Path(arguments[1]))
        return 0
    known = ("reference", "memory", "interpreter", "store")
    wanted = arguments or list(known)
    for name in wanted:
        if name not in (*known, "peak-memory-here"):
            sys.stderr.write(f"unknown benchmark {name!r}: should be one of {', '.join(known)}\n")
            return 2
    console = Console(soft_wrap=True)
    if "peak-memory-here" in wanted:
        peak_memory()
        return 0
    used = environment("interpreter")
    console.print(f"{used.device}, torch {used.torch}, triton {used.triton}, Python {used.python}")
    if "reference" in wanted:
        time_reference(console)
    if "memory" in wanted:
        # In a process of its own: the peak of a process cannot be reset.
        subprocess.run([sys.executable, "-m", "reports.bench", "peak-memory-here"], check=True)
    if "interpreter" in wanted:
        for way in ("stock", "corrected", "watched"):
            subprocess.run([sys.executable, "-m", "impl.executions.interpreter_speed", way], check=True)
    if "store" in wanted:
        time_store(console)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
