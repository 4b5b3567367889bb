"""Into how many splits should one decode call cut its keys?

Whole numbers only. The cost of s splits is waves(s) * (1/s + 1/25); multiplied by 25 * 720720 it is an integer for
every s up to 16, because 720720 is a multiple of them all, so that the cheapest count is a minimum of integers.
Averages are fractions: entries of the index tensor over queries. Sources: vLLM's `_decode_num_splits` and
`_decode_gfx950_num_splits`, the adaptive count of its gfx950 partial kernel, and `rocm_sparse_decode_bf16_num_splits`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Arch = Literal["gfx942", "gfx950", "other"]

HEADS_PER_PROGRAM = 16
KEYS_PER_TILE = 32
_ALL_TO_16 = 720720
# Below this many keys a bf16 cache is read in one pass.
_BFLOAT16_SINGLE_PASS = 512


class Load(NamedTuple):
    """What a call asks of the device: programs before splitting, and entries per query as entries over queries.

    `main` and `extra` count the whole index tensors, unused tail included: the true count is on the device.
    """

    programs: int
    queries: int
    main: int
    extra: int
    compute_units: int

    def waves(self, splits: int) -> int:
        """How often every compute unit gets a program."""
        return _up(self.programs * splits, self.compute_units)

    def tiles(self, splits: int) -> int:
        """Key tiles that one program walks; the two segments are cut separately."""
        return sum(_up(_up(entries, self.queries * splits), KEYS_PER_TILE) for entries in (self.main, self.extra))

    def fewest_alike(self, splits: int) -> int:
        """The smallest count whose programs make as many waves and walk as many tiles as with `splits`."""
        same = (self.waves(splits), self.tiles(splits))
        return next(fewer for fewer in range(1, splits + 1) if (self.waves(fewer), self.tiles(fewer)) == same)


def load_of(queries: int, heads: int, main: int, extra: int, compute_units: int) -> Load:
    """The load of a call with `main` and `extra` entries in its index tensors."""
    programs = max(1, queries * _up(heads, HEADS_PER_PROGRAM))
    return Load(programs, max(1, queries), main, extra, max(1, compute_units))


def split_count(arch: Arch, load: Load) -> int:
    """The split count of a decode call: 1 to 16 on gfx942, 1 to 32 on gfx950, always 1 elsewhere."""
    if arch == "gfx942":
        return _for_gfx942(load)
    return _for_gfx950(load) if arch == "gfx950" else 1


def _for_gfx942(load: Load) -> int:
    def cost(splits: int) -> int:
        return load.waves(splits) * (25 + splits) * (_ALL_TO_16 // splits)

    # min keeps the first of equals, the smaller count.
    best = min(range(1, 17), key=cost)
    return load.fewest_alike(best) if load.main or load.extra else best


def _for_gfx950(load: Load) -> int:
    programs = load.programs
    splits = max(1, min(32, _up(2 * load.compute_units, programs)))
    if programs < 16:
        return splits
    if splits > 4 and load.tiles(4) <= 3:
        return 4
    if programs < 64:
        waves = 1 if load.tiles(max(1, load.compute_units // programs)) <= 9 else 2
        splits = max(1, min(splits, waves * load.compute_units // programs))
    return load.fewest_alike(splits)


def one_wave_count(load: Load, splits: int) -> int:
    """The count that fills the device once, which the adaptive choice may prefer to `splits`."""
    return max(1, load.compute_units // load.programs) if 16 <= load.programs < 64 else splits


def is_adaptive(arch: Arch, asked: bool, load: Load, splits: int) -> bool:
    """Whether the kernel chooses a split count of its own for each query."""
    return asked and arch == "gfx950" and load.programs >= 16 and splits > 4


def adaptive_count(main: int, extra: int, splits: int, one_wave: int) -> int:
    """The split count of one query with `main` and `extra` entries, out of the `splits` that were launched."""
    if Load(1, 1, main, extra, 1).tiles(4) <= 3:
        return 4
    if 4 < one_wave < splits and Load(1, 1, main, extra, 1).tiles(one_wave) <= 3:
        return one_wave
    return splits


def bfloat16_cache_count(arch: Arch, queries: int, heads: int, longest: int, compute_units: int) -> int:
    """The split count over an unquantised cache, from the longest key list of any query."""
    if longest < _BFLOAT16_SINGLE_PASS:
        return 1
    load = load_of(queries, heads, longest * max(1, queries), 0, compute_units)
    chosen = _for_gfx950(load) if arch == "gfx950" else _for_gfx942(load)
    return min(chosen, _up(longest, KEYS_PER_TILE))


def _up(a: int, b: int) -> int:
    return -(-a // b)
