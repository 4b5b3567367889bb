"""How is vLLM's own sparse MLA decode called?

Through the wrapper that production calls, `rocm_sparse_attn_decode`, with the tensors of the case as they are. What it
makes of a call without rows, of an architecture without a split route, or of a sink that is too long is its own affair:
nothing is repaired on the way in or out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from cases.sparse_mla.decode import LANES, NOPE, ROPE, DecodeInputs, DecodeOutputs, Segment
from impl.sources import vllm
from impl.sparse_mla.decode import VLLM_HEURISTICS, VLLM_MODULE, VLLM_WRAPPER, vllm_loader


def run(inputs: DecodeInputs) -> DecodeOutputs:
    """The wrapper's answer; it raises what it raises."""
    loader = vllm_loader(inputs.arch, inputs.query.device)
    decode = loader.symbol(VLLM_MODULE, VLLM_WRAPPER)
    main, extra = inputs.main, inputs.extra
    mxfp8 = None
    if inputs.out_codes is not None and inputs.out_scales is not None:
        mxfp8 = (inputs.out_codes, inputs.out_scales)
    # Of what a case does not ask for, nothing is said: an older wrapper does not know the names.
    asked: dict[str, Any] = {}
    if inputs.trust_extra:
        asked["extra_cache_nan_free"] = True
    if inputs.adaptive:
        asked["adaptive_splits"] = True
    if inputs.positions is not None:
        asked["inv_rope_positions"] = inputs.positions
        asked["inv_rope_cos_sin_cache"] = inputs.cos_sin
    if mxfp8 is not None:
        asked["output_mxfp8"] = mxfp8
    with loader.compute_units(inputs.compute_units), _forced(loader, inputs), _encoded(loader, inputs):
        rotated = decode(
            q=inputs.query,
            kv_cache=extra.cache if extra is not None else None,
            swa_k_cache=main.cache,
            swa_only=extra is None,
            topk_indices=extra.dense if extra is not None else None,
            topk_lens=extra.lengths if extra is not None else None,
            swa_indices=_dense_of(main, inputs.query),
            swa_lens=main.lengths,
            swa_ragged_indices=main.indices,
            swa_ragged_indptr=main.indptr,
            topk_ragged_indices=extra.indices if extra is not None else None,
            topk_ragged_indptr=extra.indptr if extra is not None else None,
            attn_sink=inputs.sink,
            scale=inputs.scale,
            head_dim=LANES,
            nope_head_dim=NOPE,
            rope_head_dim=ROPE,
            output=inputs.out,
            **asked,
        )
    return DecodeOutputs(
        out=inputs.out, codes=inputs.out_codes, scales=inputs.out_scales, rotated_rows=0 if rotated is None else rotated
    )


@contextlib.contextmanager
def _forced(loader: vllm.Loader, inputs: DecodeInputs) -> Iterator[None]:
    """For the duration of a `with`, the architecture's heuristic answers the forced split count."""
    name = VLLM_HEURISTICS.get(inputs.arch)
    if not inputs.splits or name is None:
        yield
        return
    with loader.replaced(VLLM_MODULE, name, lambda *_args, **_kwargs: inputs.splits):
        yield


@contextlib.contextmanager
def _encoded(loader: vllm.Loader, inputs: DecodeInputs) -> Iterator[None]:
    """For the duration of a `with`, the platform names the main cache's encoding.

    The wrapper hands it to the kernel as a flag. gfx942 caches are FNUZ in production; the flag's other value is what
    lets that kernel run natively on a device without FNUZ types.
    """
    if inputs.arch != "gfx942" or inputs.main.encoding == "float8_e4m3fnuz":
        yield
        return
    platform = _Ocp(loader.symbol(VLLM_MODULE, "current_platform"))
    with loader.replaced(VLLM_MODULE, "current_platform", platform):
        yield


class _Ocp:
    """A platform whose own FP8 is OCP, and which answers everything else as the one given."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def is_fp8_fnuz(self) -> bool:
        """No."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


def _dense_of(main: Segment, query: torch.Tensor) -> torch.Tensor:
    """The dense window indices; the wrapper takes their shape even where ragged ones decide."""
    if main.dense is not None:
        return main.dense
    return torch.full((query.shape[0], 1), -1, dtype=torch.int32, device=query.device)
