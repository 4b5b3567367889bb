"""Do vLLM's own kernels and host functions load from a real tree, for every platform?"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from impl.sources.vllm import Loader, Platform, load, locate, unsupported

SPARSE = "vllm.v1.attention.ops.rocm_aiter_mla_sparse"
CACHE = "vllm.models.deepseek_v41.common.ops.cache_utils"
NAMES = {
    SPARSE: [
        "_rocm_sparse_attn_decode_ragged_triton",
        "rocm_sparse_attn_decode",
        "build_ragged_indices_from_dense",
        "_decode_num_splits",
        "_decode_gfx950_num_splits",
        "_fused_inverse_rope_gptj",
        "rocm_inverse_rope_mxfp8_rows",
    ],
    CACHE: ["quantize_and_insert_k_cache", "dequantize_and_gather_k_cache", "combine_topk_swa_indices"],
}
TREE = Path(os.environ.get("MLA_ORACLE_VLLM", "."))

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif("MLA_ORACLE_VLLM" not in os.environ, reason="MLA_ORACLE_VLLM names no vLLM source tree"),
]


@pytest.fixture(params=["gfx942", "gfx950", "other"])
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Loader:
    # Host functions only: which way their kernels are decorated in this process does not matter.
    monkeypatch.setattr("impl.sources.vllm.refuse_mismatch", lambda execution: None)
    return load(locate(TREE), Platform(request.param), "hip")


def test_the_tree_has_what_is_asked_of_it() -> None:
    assert unsupported(TREE, NAMES) == []
    assert locate(TREE).version != "unknown"


def test_host_functions_load_and_answer(loader: Loader) -> None:
    host = {name: loader.symbol(SPARSE, name) for name in ("_decode_num_splits", "_decode_gfx950_num_splits")}
    assert all(loader.symbol(module, name) for module, names in NAMES.items() for name in names)
    # A single short sequence is split; a batch that fills the device is not.
    with loader.compute_units(256):
        assert host["_decode_num_splits"](1, 1, 640.0, 0.0) > 1
        assert host["_decode_num_splits"](256, 1, 640.0, 0.0) == 1
        assert host["_decode_gfx950_num_splits"](512, 1, 640.0, 0.0) == 1
    with loader.compute_units(1):
        assert host["_decode_num_splits"](1, 1, 640.0, 0.0) == 1
    assert "vllm" not in sys.modules


def test_platforms_share_what_was_parsed_and_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("impl.sources.vllm.refuse_mismatch", lambda execution: None)
    loaders = [load(locate(TREE), Platform("gfx950", units), "hip") for units in (17, 18)]
    first, second = (loader.symbol(SPARSE, "_rocm_sparse_attn_decode_ragged_triton") for loader in loaders)
    assert first is not second
    assert first.__code__ is second.__code__


def test_a_kernel_runs_in_the_interpreter() -> None:
    program = f"""
        import json, torch
        from pathlib import Path
        from impl.sources.vllm import Platform, load, locate
        loader = load(locate(Path({str(TREE.absolute())!r})), Platform("gfx950"), "interpreter")
        build = loader.symbol({SPARSE!r}, "build_ragged_indices_from_dense")
        dense = torch.tensor([[4, -1, 7, 9], [-1, -1, 5, 6]], dtype=torch.int32)
        flat, starts = build(dense, torch.tensor([4, 3], dtype=torch.int32))
        print(json.dumps([flat[: starts[-1]].tolist(), starts.tolist()]))
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[4, 7, 9, 5], [0, 3, 4]]
