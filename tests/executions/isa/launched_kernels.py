"""Which Triton kernels, launched as machine code of an architecture, must end as torch or with a fault?

`python launched_kernels.py gfx942` runs them all under `triton_launch.install` and writes, of each, what became of it as
JSON: a stand-in for the kernels of implementations, in a process whose kernels are decorated for the compiler.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import json
import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from impl.executions.isa import triton_launch


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    tl.store(out + place, tl.load(x + place, inside) + tl.load(y + place, inside), inside)


@triton.jit
def sum_rows(x, out, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    tl.store(out + row, tl.sum(tl.load(x + row * COLUMNS + tl.arange(0, COLUMNS)), 0))


@triton.jit
def product(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, inner, columns = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    left = tl.load(a + rows[:, None] * K + inner[None, :])
    right = tl.load(b + inner[:, None] * N + columns[None, :])
    tl.store(out + rows[:, None] * N + columns[None, :], tl.dot(left, right))


@triton.jit
def halvings(x, out):
    row = tl.program_id(0)
    value, count = tl.load(x + row), 0
    while value > 1:
        value = value // 2
        count += 1
    tl.store(out + row, count)


@triton.jit
def add_if_given(x, bias, out, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    value = tl.load(x + place)
    if bias is not None:
        value += tl.load(bias + place)
    tl.store(out + place, value)


@triton.jit
def of_scalars(out, real, small, large, flag):
    tl.store(out, real)
    tl.store(out + 1, small.to(tl.float64))
    tl.store(out + 2, large.to(tl.float64))
    tl.store(out + 3, tl.where(flag, 1.0, 0.0))


@triton.jit
def of_tuple(pair, out, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(pair[0] + place) * pair[1])


def _mark(arguments) -> None:
    arguments["out"].fill_(7.0)


@triton.autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def tuned(x, out, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, 2 * tl.load(x + place, place < n), place < n)


@triton.autotune(
    configs=[triton.Config({"BLOCK": 64}, pre_hook=_mark), triton.Config({"BLOCK": 128}, pre_hook=_mark)], key=[]
)
@triton.jit
def accumulates(x, out, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(out + place) + tl.load(x + place))


@triton.jit
def copy_strided(x, out, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    tl.store(out + rows * COLUMNS + columns, tl.load(x + rows * row_stride + columns * column_stride))


@triton.jit
def stores_one_place(out):
    tl.store(out, tl.program_id(0))


@triton.jit
def loads_past(x, out, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + place + 1))


@triton.jit
def adds_up(out):
    tl.atomic_add(out, 1)


@triton.jit
def stores_eights(x, out, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + place).to(out.dtype.element_ty))


SCENARIOS: dict[str, Callable[[], str]] = {}


def scenario(function: Callable[[], str]) -> Callable[[], str]:
    """Registers a function that gives `right`, or what is wrong."""
    SCENARIOS[function.__name__] = function
    return function


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, whose sums and products no format here rounds."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(got: torch.Tensor, want: torch.Tensor) -> str:
    """`right`, or the first place that differs."""
    if torch.equal(got.to(torch.float64), want.to(torch.float64)):
        return "right"
    wrong = (got.to(torch.float64) != want.to(torch.float64)).nonzero()[0].tolist()
    return f"out{wrong}={got[tuple(wrong)].item()}, but should be {want[tuple(wrong)].item()}"


@scenario
def vector_add_with_a_mask() -> str:
    x, y, out = numbers(1000, seed=1), numbers(1000, seed=2), torch.full((1024,), 9.0)
    add[(4,)](x, y, out, 1000, BLOCK=256)
    return same(out, torch.cat([x + y, torch.full((24,), 9.0)]))


@scenario
def sum_across_four_waves() -> str:
    x, out = numbers(3, 1024), torch.zeros(3)
    sum_rows[(3,)](x, out, COLUMNS=1024, num_warps=4)
    return same(out, x.sum(1))


@scenario
def dot_of_bfloat16() -> str:
    a, b, out = (
        numbers(32, 64, dtype=torch.bfloat16),
        numbers(64, 32, seed=1, dtype=torch.bfloat16),
        torch.zeros(32, 32),
    )
    product[(1,)](a, b, out, M=32, N=32, K=64, num_warps=4)
    return same(out, a.float() @ b.float())


@scenario
def a_while_loop() -> str:
    x, out = torch.tensor([1, 2, 3, 1000, 0], dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    halvings[(5,)](x, out)
    return same(out, torch.tensor([0, 1, 1, 9, 0]))


@scenario
def no_pointer() -> str:
    x, out = numbers(64), torch.zeros(64)
    add_if_given[(1,)](x, None, out, BLOCK=64)
    return same(out, x)


@scenario
def a_pointer_where_none_may_be() -> str:
    x, bias, out = numbers(64), numbers(64, seed=1), torch.zeros(64)
    add_if_given[(1,)](x, bias, out, BLOCK=64)
    return same(out, x + bias)


@scenario
def scalars_of_every_type() -> str:
    found = []
    for real, small, large, flag in [(0.5, -3, 1 << 40, True), (-2.25, 2**31 - 1, -(1 << 50), False)]:
        out = torch.zeros(4, dtype=torch.float64)
        of_scalars[(1,)](out, real, small, large, flag)
        found.append(same(out, torch.tensor([real, small, large, flag], dtype=torch.float64)))
    return "right" if set(found) == {"right"} else str(found)


@scenario
def a_tuple() -> str:
    x, out = numbers(64), torch.zeros(64)
    of_tuple[(1,)]((x, 3), out, BLOCK=64)
    return same(out, 3 * x)


@scenario
def an_autotuned_kernel() -> str:
    x, out = numbers(200), torch.zeros(200)
    tuned[lambda meta: (triton.cdiv(200, meta["BLOCK"]),)](x, out, 200)
    return same(out, 2 * x)


@scenario
def the_hook_of_a_configuration() -> str:
    x, out = numbers(64), torch.zeros(64)
    accumulates[(1,)](x, out)
    return same(out, x + 7)


@scenario
def a_strided_view() -> str:
    storage, out = numbers(40, 96), torch.zeros(16, 32)
    view = storage[3:35:2, 5:69:2]
    copy_strided[(1,)](view, out, *view.stride(), ROWS=16, COLUMNS=32)
    return same(out, view)


@scenario
def two_tensors_of_one_storage() -> str:
    storage = numbers(256)
    x, out = storage[:128], storage[128:]
    before = x.clone()
    add[(1,)](x, x, out, 128, BLOCK=128)
    return same(storage, torch.cat([before, 2 * before]))


@scenario
def an_empty_tensor() -> str:
    out = torch.full((64,), 9.0)
    add[(1,)](torch.zeros(0), torch.zeros(0), out, 0, BLOCK=64)
    return same(out, torch.full((64,), 9.0))


@scenario
def a_grid_that_is_a_function() -> str:
    x, out = numbers(300), torch.zeros(300)
    add[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]), 1)](x, x, out, 300, BLOCK=128)
    return same(out, 2 * x)


@scenario
def a_grid_of_nothing() -> str:
    x, out = numbers(64), torch.zeros(64)
    add[(0,)](x, x, out, 64, BLOCK=64)
    add[(3, 0, 2)](x, x, out, 64, BLOCK=64)
    return same(out, torch.zeros(64))


@scenario
def a_warm_up_that_launches_nothing() -> str:
    x, out = numbers(64), torch.zeros(64)
    add.warmup(x, x, out, 64, BLOCK=64, grid=(1,))
    add.warmup(torch.float32, torch.float32, torch.float32, 64, BLOCK=64, grid=(1,))
    return same(out, torch.zeros(64))


@scenario
def atomics_of_many_programs() -> str:
    out = torch.zeros(1, dtype=torch.int32)
    adds_up[(37,)](out)
    return same(out, torch.tensor([37]))


@scenario
def eight_bits_of_the_architecture() -> str:
    kind = torch.float8_e4m3fnuz if triton_launch.installed() == "gfx942" else torch.float8_e4m3fn
    x, out = torch.linspace(-200, 200, 256), torch.zeros(256, dtype=kind)
    stores_eights[(1,)](x, out, BLOCK=256)
    return same(out.view(torch.uint8), x.to(kind).view(torch.uint8))


@scenario
def a_load_past_the_end() -> str:
    loads_past[(1,)](numbers(64), torch.zeros(64), BLOCK=64)
    return "nothing was seen"


@scenario
def a_load_before_a_view_but_within_its_storage() -> str:
    # What may be touched is the storage: a view's own bounds are the caller's to guard.
    storage, out = numbers(256), torch.zeros(64)
    loads_past[(1,)](storage[64:128], out, BLOCK=64)
    return same(out, storage[65:129])


@scenario
def a_store_past_the_end() -> str:
    add[(2,)](numbers(128), numbers(128), torch.zeros(100), 128, BLOCK=64)
    return "nothing was seen"


@scenario
def two_programs_that_store_one_byte() -> str:
    stores_one_place[(2,)](torch.zeros(1, dtype=torch.int32))
    return "nothing was seen"


@scenario
def more_memory_than_a_workgroup_has() -> str:
    depth = 1024 if triton_launch.installed() == "gfx942" else 2048
    a, b = numbers(64, depth, dtype=torch.bfloat16), numbers(depth, 64, dtype=torch.bfloat16)
    product[(1,)](a, b, torch.zeros(64, 64), M=64, N=64, K=depth, num_warps=16)
    return "nothing was seen"


@scenario
def more_waves_than_a_workgroup_has() -> str:
    add[(1,)](numbers(64), numbers(64), torch.zeros(64), 64, BLOCK=64, num_warps=32)
    return "nothing was seen"


@scenario
def an_argument_elsewhere() -> str:
    add[(1,)](torch.zeros(64, device="meta"), numbers(64), torch.zeros(64), 64, BLOCK=64)
    return "nothing was seen"


def main() -> None:
    """Run the scenarios named behind the architecture, or all, and write what became of each."""
    triton_launch.install(sys.argv[1])
    told = {}
    for name in sys.argv[2:] or SCENARIOS:
        try:
            told[name] = SCENARIOS[name]()
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    told["executed"] = str(triton_launch.executed)
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
