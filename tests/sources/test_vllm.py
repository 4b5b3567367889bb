"""Is the right vLLM found and a wrong one refused in a sentence, and does loaded code see the platform it was given?"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from impl.sources.vllm import Loader, Platform, SourceError, load, locate, unsupported

OPS = "vllm.v1.attention.ops.decode"

TREE = {
    "__init__.py": "raise RuntimeError('vllm was imported')\n",
    "_version.py": "version: str\n__version__ = version = '0.99.1'\n__commit_id__ = commit_id = 'gabc1234'\n",
    "envs.py": "raise RuntimeError\n",
    "logger.py": "def init_logger(name):\n    raise RuntimeError\n",
    "platforms/__init__.py": "def __getattr__(name):\n    raise RuntimeError\n",
    "platforms/rocm.py": """
        _GCN_ARCH = undefined()
        _ON_GFX942 = "gfx942" in _GCN_ARCH
        _ON_GFX950 = "gfx950" in _GCN_ARCH
        _ON_MI3XX = any(arch in _GCN_ARCH for arch in ["gfx942", "gfx950"])
        def on_mi3xx():
            return _ON_MI3XX
        """,
    "triton_utils/__init__.py": """
        from vllm.triton_utils.importing import HAS_TRITON
        if HAS_TRITON:
            import triton
            import triton.language as tl
        LOG2E = 1.4426950408889634
        """,
    "v1/attention/ops/decode.py": """
        import functools
        import torch
        import vllm.envs as envs
        from vllm.logger import init_logger
        from vllm.platforms import current_platform
        from vllm.triton_utils import LOG2E, tl, triton
        from vllm.forward_context import get_forward_context
        from vllm.v1.worker.workspace import current_workspace_manager

        if current_platform.is_rocm():
            from vllm.platforms.rocm import _ON_GFX942, _ON_GFX950, on_mi3xx
        else:
            _ON_GFX942 = False
            _ON_GFX950 = False

        logger = init_logger(__name__)
        FP8_DTYPE = current_platform.fp8_dtype()

        @functools.lru_cache
        def _decode_cu_count() -> int:
            return torch.cuda.get_device_properties(0).multi_processor_count

        @functools.lru_cache
        def waves(work):
            return -(-work // _decode_cu_count())

        def _decode_num_splits(work):
            logger.info_once("choosing")
            return max(1, _decode_cu_count() // work)

        def decode(work):
            return _decode_num_splits(work)

        def facts():
            return _ON_GFX942, _ON_GFX950, on_mi3xx(), str(FP8_DTYPE), current_platform.num_compute_units()

        def guarded(x):
            assert not x.is_cpu
            return 1

        def environment():
            return envs.VLLM_BATCH_INVARIANT

        def other_environment():
            return envs.VLLM_HOST_IP

        def unknown_question():
            return current_platform.get_device_name()

        def forward():
            return get_forward_context().attn_metadata

        def scratch():
            return current_workspace_manager().get_simultaneous(((2, 3), torch.bfloat16), ((4,), torch.int32))

        @triton.jit
        def double_kernel(x_ptr, N: tl.constexpr):
            offsets = tl.arange(0, N)
            tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) * 2)

        def double(x):
            double_kernel[(1,)](x, N=x.numel(), waves_per_eu=2, matrix_instr_nonkdim=16, num_warps=4)
            return x

        class Owner:
            @staticmethod
            @triton.jit
            def kernel(x_ptr, kpack: tl.constexpr):
                pass

            @staticmethod
            def launch(x):
                Owner.kernel[(1,)](x, kpack=1, waves_per_eu=3)
        """,
    "forward_context.py": "def get_forward_context():\n    raise RuntimeError\n",
    "v1/worker/workspace.py": "def current_workspace_manager():\n    raise RuntimeError\n",
}


def write_tree(root: Path) -> Path:
    for name, text in TREE.items():
        path = root / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "tree")


@pytest.fixture
def any_execution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets functions that launch no kernel be loaded for any execution, whatever this process did with triton."""
    monkeypatch.setattr("impl.sources.vllm.refuse_mismatch", lambda execution: None)


def loaded(tree: Path, platform: Platform) -> Loader:
    return load(locate(tree), platform, "interpreter")


def test_a_tree_is_found_by_its_parent_and_by_itself(tree: Path) -> None:
    source = locate(tree)
    assert (source.root, source.version, source.commit) == (tree, "0.99.1", "abc1234")
    assert locate(tree / "vllm") == source
    assert "vllm" not in sys.modules


def test_a_checkout_that_is_itself_called_vllm_is_found(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "vllm")
    assert locate(root).root == root


def test_an_installed_vllm_is_found_without_being_imported(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(str(tree))
    assert locate(None) == locate(tree)
    assert "vllm" not in sys.modules


def test_version_falls_back_to_the_distribution_and_then_to_unknown(tree: Path) -> None:
    (tree / "vllm" / "_version.py").unlink()
    assert (locate(tree).version, locate(tree).commit) == ("unknown", None)
    (tree / "vllm-0.98.0+rocm.dist-info").mkdir()
    assert locate(tree).version == "0.98.0+rocm"


def test_a_checkout_tells_its_commit_and_that_it_was_changed(tree: Path) -> None:
    (tree / "vllm" / "_version.py").unlink()

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", "-C", str(tree), *identity, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    git("tag", "-a", "v0.97.0", "-m", "one")
    commit = git("rev-parse", "HEAD")
    assert (locate(tree).version, locate(tree).commit) == ("v0.97.0", commit)
    (tree / "vllm" / "envs.py").write_text("changed\n")
    assert locate(tree).commit == f"{commit}-dirty"


def test_wrong_paths_are_refused_in_one_sentence(tree: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-0.33.0-cp312-linux_x86_64.whl"
    wheel.write_bytes(b"PK")
    file = tmp_path / "kernel.py"
    file.write_text("")
    (tmp_path / "empty").mkdir()
    stripped = tmp_path / "stripped" / "vllm"
    stripped.mkdir(parents=True)
    (stripped / "__init__.py").write_text("")
    for path, sentence in (
        (tmp_path / "nowhere", "does not exist; give the directory that holds vllm/"),
        (wheel, "is a wheel; unzip it first and give the directory that it was unzipped to"),
        (file, "is a file; give the directory that holds vllm/"),
        (tmp_path / "empty", "is not a vLLM tree, it has no vllm/__init__.py; give the directory that holds vllm/"),
        (tree / "vllm" / "v1", "is not a vLLM tree, it has no vllm/__init__.py; give the directory that holds vllm/"),
        (
            tmp_path / "stripped",
            "holds a vllm/ without Triton sources (no vllm/triton_utils/); give a complete checkout or wheel",
        ),
    ):
        with pytest.raises(SourceError) as caught:
            locate(path)
        assert str(caught.value) == f"{path} {sentence}"
        assert unsupported(path, {}) == [f"{path} {sentence}"]


def test_no_installed_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(SourceError, match="vllm is not installed; install it, or give the path of a checkout"):
        locate(None)


def test_every_missing_module_and_name_is_a_reason(tree: Path) -> None:
    assert unsupported(tree, {OPS: ["decode", "facts"]}) == []
    assert unsupported(tree, {OPS: ["decode", "x", "y"], "vllm.v1.nothing": ["z"]}) == [
        f"vllm 0.99.1 in {tree}: {OPS} has no x, y",
        f"vllm 0.99.1 in {tree} has no module vllm.v1.nothing",
    ]


def test_a_fingerprint_changes_with_the_source(tree: Path, tmp_path: Path) -> None:
    other = write_tree(tmp_path / "other")
    assert locate(tree).fingerprint([OPS]) == locate(other).fingerprint([OPS])
    changed = write_tree(tmp_path / "changed")
    (changed / "vllm" / "v1" / "attention" / "ops" / "decode.py").write_text("X = 1\n")
    assert locate(tree).fingerprint([OPS]) != locate(changed).fingerprint([OPS])
    with pytest.raises(SourceError, match=r"has no module vllm\.nothing"):
        locate(tree).fingerprint(["vllm.nothing"])


def test_platforms_state_what_they_are() -> None:
    assert [Platform(arch).compute_units for arch in ("gfx942", "gfx950", "other")] == [304, 256, 256]
    assert [Platform(arch).needs_fnuz for arch in ("gfx942", "gfx950", "other")] == [True, False, False]
    assert Platform("gfx942") == Platform("gfx942", 304)
    with pytest.raises(ValueError, match="arch='gfx90a': should be one of gfx942, gfx950, other"):
        Platform("gfx90a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="compute_units=-1"):
        Platform("gfx942", -1)


@pytest.mark.usefixtures("any_execution")
def test_platforms_side_by_side_answer_for_themselves(tree: Path) -> None:
    want = {
        "gfx942": (True, False, True, "torch.float8_e4m3fnuz", 304),
        "gfx950": (False, True, True, "torch.float8_e4m3fn", 256),
        "other": (False, False, False, "torch.float8_e4m3fn", 256),
    }
    facts = {arch: loaded(tree, Platform(arch)).symbol(OPS, "facts") for arch in ("gfx942", "gfx950", "other")}
    assert {arch: fact() for arch, fact in facts.items()} == want
    assert loaded(tree, Platform("gfx942")) is loaded(tree, Platform("gfx942", 304))
    assert loaded(tree, Platform("gfx942", 8)).symbol(OPS, "facts")()[-1] == 8


@pytest.mark.usefixtures("any_execution")
def test_compute_units_are_chosen_per_call_and_no_cache_goes_stale(tree: Path) -> None:
    loader = loaded(tree, Platform("gfx950"))
    decode, waves = loader.symbol(OPS, "decode"), loader.symbol(OPS, "waves")
    assert (decode(16), waves(512)) == (16, 2)
    with loader.compute_units(64):
        assert (decode(16), waves(512)) == (4, 8)
        with loader.compute_units(32):
            assert (decode(16), waves(512)) == (2, 16)
        assert waves(512) == 8
    assert (decode(16), waves(512)) == (16, 2)
    with pytest.raises(ValueError, match="count=0: should be at least 1"), loader.compute_units(0):
        pass


@pytest.mark.usefixtures("any_execution")
def test_the_number_of_splits_can_be_forced(tree: Path) -> None:
    loader = loaded(tree, Platform("gfx950"))
    decode = loader.symbol(OPS, "decode")
    with loader.replaced(OPS, "_decode_num_splits", lambda work: 3):
        assert decode(16) == 3
    assert decode(16) == 16


@pytest.mark.usefixtures("any_execution")
def test_the_environment_is_stated_and_not_inherited(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    loader = loaded(tree, Platform("gfx950"))
    environment = loader.symbol(OPS, "environment")
    assert environment() is False
    with loader.environment(VLLM_BATCH_INVARIANT=True):
        assert environment() is True
    assert environment() is False
    with pytest.raises(SourceError, match=r"vllm\.envs\.VLLM_HOST_IP was read"):
        loader.symbol(OPS, "other_environment")()


@pytest.mark.usefixtures("any_execution")
def test_what_only_a_server_has_is_refused(tree: Path) -> None:
    loader = loaded(tree, Platform("gfx950"))
    with pytest.raises(SourceError, match="get_forward_context was used, and cannot be had from the sources alone"):
        loader.symbol(OPS, "forward")()
    with pytest.raises(SourceError, match=r"current_platform\.get_device_name was used"):
        loader.symbol(OPS, "unknown_question")()


@pytest.mark.usefixtures("any_execution")
def test_scratch_memory_is_poisoned(tree: Path) -> None:
    floats, integers = loaded(tree, Platform("gfx950")).symbol(OPS, "scratch")()
    assert floats.shape == (2, 3)
    assert floats.isnan().all()
    assert integers.tolist() == [-1] * 4


@pytest.mark.usefixtures("any_execution")
def test_guards_are_dropped_on_the_cpu_only(tree: Path) -> None:
    class Tensor:
        is_cpu = True

    loader = loaded(tree, Platform("gfx950"))
    assert loader.symbol(OPS, "guarded")(Tensor()) == 1
    (dropped,) = loader.dropped_guards
    path, line = dropped.split(":")
    assert "assert not x.is_cpu" in (tree / path).read_text().splitlines()[int(line) - 1]
    device = load(locate(tree), Platform("gfx950"), "hip")
    with pytest.raises(AssertionError):
        device.symbol(OPS, "guarded")(Tensor())
    assert device.dropped_guards == []


def test_executions_are_checked(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = locate(tree)
    monkeypatch.delitem(sys.modules, "triton.language.standard", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SourceError, match="TRITON_INTERPRET=1 should be in the environment before triton is imported"):
        load(source, Platform("gfx942"), "interpreter")
    with pytest.raises(ValueError, match="execution='metal': should be one of interpreter, isa:gfx942"):
        load(source, Platform("gfx942"), "metal")
    # The platform is what host code believes in; what its kernels are compiled for is the execution's to say.
    assert load(source, Platform("gfx942"), "isa:gfx950").execution == "isa:gfx950"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SourceError, match="TRITON_INTERPRET should not be set"):
        load(source, Platform("gfx942"), "cuda")


def in_a_process(tree: Path, program: str, **environment: str) -> object:
    """What a program prints as JSON, run by itself: triton decides once a process how kernels are decorated."""
    head = "import json, os\nfrom pathlib import Path\nfrom impl.sources.vllm import *\n"
    head += f"source = locate(Path({str(tree)!r}))\nOPS = {OPS!r}\n"
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(program)],
        cwd=Path(__file__).parents[2],
        env={**kept, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_loaded_kernel_is_launched_by_the_interpreter(tree: Path) -> None:
    program = """
        import inspect, torch
        loader = load(source, Platform("gfx950"), "interpreter")
        kernel = loader.symbol(OPS, "double_kernel")
        doubled = loader.symbol(OPS, "double")(torch.arange(4.0)).tolist()
        print(json.dumps([doubled, inspect.getsource(kernel.fn).splitlines()[:2], loader.dropped_options]))
        """
    source = ["@triton.jit", "def double_kernel(x_ptr, N: tl.constexpr):"]
    assert in_a_process(tree, program, TRITON_INTERPRET="1") == [[0.0, 2.0, 4.0, 6.0], source, []]


def test_amd_launch_options_are_left_out_on_cuda(tree: Path) -> None:
    program = """
        from triton.runtime.jit import JITFunction
        seen = []
        JITFunction.run = lambda self, *args, grid, warmup, **kwargs: seen.append(sorted(kwargs))
        class Tensor:
            def numel(self):
                return 4
        def launch(execution):
            loader = load(source, Platform("gfx950"), execution)
            loader.symbol(OPS, "double")(Tensor())
            loader.symbol(OPS, "double")(Tensor())
            loader.symbol(OPS, "Owner").launch(Tensor())
            return loader.dropped_options
        print(json.dumps([launch("cuda"), seen[1:], launch("hip"), seen[4:]]))
        """
    dropped = ["double_kernel: waves_per_eu=2", "double_kernel: matrix_instr_nonkdim=16", "kernel: waves_per_eu=3"]
    kept = [["N", "num_warps"], ["kpack"]]
    everything = [["N", "matrix_instr_nonkdim", "num_warps", "waves_per_eu"], ["kpack", "waves_per_eu"]]
    assert in_a_process(tree, program) == [dropped, kept, [], everything]


def test_triton_that_was_imported_the_other_way_is_refused(tree: Path) -> None:
    program = """
        import triton
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            load(source, Platform("gfx950"), "interpreter")
        except SourceError as error:
            print(json.dumps(str(error)))
        """
    sentence = "execution=interpreter: this process imported triton without TRITON_INTERPRET=1; use another process"
    assert in_a_process(tree, program) == sentence
