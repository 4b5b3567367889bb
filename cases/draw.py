"""Where do the numbers of a case come from, so that they are the same bytes on every machine?

A counter-based generator (SplitMix64's finaliser over a counter, keyed by the case's seed and the name of the stream)
in NumPy's 64-bit integers: no library's stream, no transcendental function, no dependence on the processor. Every draw
has a name, so adding one input to an op does not move the others.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
# Four 16-bit uniforms summed: variance 4 * (2^32 - 1) / 12. Products in fp64 round the same everywhere.
_NORMAL_SCALE = 1.0 / math.sqrt(4 * (2.0**32 - 1) / 12)


class Draw:
    """Named streams of integers and numbers, a pure function of `seed` and the stream's name."""

    def __init__(self, seed: int, *scope: str) -> None:
        self._seed = seed
        self._scope = scope

    def within(self, name: str) -> "Draw":
        """A generator whose streams are all distinct from this one's."""
        return Draw(self._seed, *self._scope, name)

    def _bits(self, name: str, count: int) -> NDArray[np.uint64]:
        label = "\x1f".join((str(self._seed), *self._scope, name)).encode()
        key = np.frombuffer(hashlib.blake2b(label, digest_size=8).digest(), "<u8")[0].astype(np.uint64)
        with np.errstate(over="ignore"):
            x = (np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN) ^ key
            x = (x + key) * _GOLDEN
            x = (x ^ (x >> np.uint64(30))) * _MIX_A
            x = (x ^ (x >> np.uint64(27))) * _MIX_B
            return np.asarray(x ^ (x >> np.uint64(31)), dtype=np.uint64)

    def integers(self, name: str, shape: Sequence[int], low: int, high: int) -> torch.Tensor:
        """int64 in [low, high), every value as likely as any other up to 2^-32."""
        if high <= low:
            raise ValueError(f"empty range [{low}, {high})")
        span = high - low
        if span > 1 << 32:
            raise ValueError(f"range of {span} values: at most 2^32")
        bits = self._bits(name, math.prod(shape)) >> np.uint64(32)
        values = ((bits * np.uint64(span)) >> np.uint64(32)).astype(np.int64) + low
        return torch.from_numpy(values.reshape(tuple(shape)))

    def normal_like(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """float32 with mean 0 and variance 1: four summed uniforms, so |x| < 3.47; exact arithmetic, one final rounding."""
        bits = self._bits(name, math.prod(shape))
        lanes = bits.view(np.uint16).reshape(-1, 4).astype(np.int64).sum(axis=1) - 4 * 32768
        centred = 2 * lanes + 4
        return torch.from_numpy((centred * (0.5 * _NORMAL_SCALE)).astype(np.float32).reshape(tuple(shape)))

    def permutation(self, name: str, count: int) -> torch.Tensor:
        """int64 permutation of 0..count-1."""
        return torch.from_numpy(np.argsort(self._bits(name, count), kind="stable").astype(np.int64))

    def chance(self, name: str, shape: Sequence[int], numerator: int, denominator: int) -> torch.Tensor:
        """bool, True with probability numerator / denominator."""
        return self.integers(name, shape, 0, denominator) < numerator
