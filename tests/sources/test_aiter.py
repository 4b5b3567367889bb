"""Is the right AITER found and a wrong one refused in a sentence, and does loaded code see the machine it was given?"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from impl.sources.aiter import Loader, Platform, SourceError, load, locate, unsupported

OPS = "aiter.ops.triton.attention.decode"

TREE = {
    "__init__.py": "raise RuntimeError('aiter was imported')\n",
    "_version.py": "__version__ = version = '0.1.9.post2'\n",
    "jit/core.py": "def compile_ops(name):\n    raise RuntimeError\n",
    "ops/triton/utils/_triton/arch_info.py": """
        import triton

        try:
            _CACHED_ARCH = triton.runtime.driver.active.get_current_target().arch
        except RuntimeError:
            from jax._src.lib import gpu_triton

        def get_arch():
            return _CACHED_ARCH

        def is_gluon_avail():
            return get_arch() in ("gfx950", "gfx1250")
        """,
    "ops/triton/utils/device_info.py": "def get_num_sms():\n    raise RuntimeError\n",
    "ops/triton/utils/logger.py": "import nothing_of_this_name\nclass AiterTritonLogger: ...\n",
    "ops/triton/attention/decode.py": """
        import triton
        import triton.language as tl
        from aiter.jit.core import compile_ops
        from aiter.ops.triton.utils._triton import arch_info
        from aiter.ops.triton.utils.device_info import get_num_sms
        from aiter.ops.triton.utils.logger import AiterTritonLogger

        DEVICE_ARCH = arch_info.get_arch()
        _LOGGER = AiterTritonLogger()

        def facts():
            _LOGGER.info("facts")
            return DEVICE_ARCH, arch_info.is_gluon_avail(), get_num_sms()

        def guarded(x):
            if not x.is_cuda:
                raise RuntimeError("needs a device")
            return 1

        @compile_ops("module_attention")
        def compiled(x): ...

        @triton.jit
        def double_kernel(x_ptr, N: tl.constexpr):
            offsets = tl.arange(0, N)
            tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) * 2)

        def double(x):
            double_kernel[(1,)](x, N=x.numel(), waves_per_eu=2, num_warps=4)
            return x
        """,
}


def write_tree(root: Path) -> Path:
    for name, text in TREE.items():
        path = root / "aiter" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "tree")


@pytest.fixture
def any_execution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets functions that launch no kernel be loaded for any execution, whatever this process did with triton."""
    monkeypatch.setattr("impl.sources.aiter.refuse_mismatch", lambda execution: None)


def loaded(tree: Path, platform: Platform, execution: str = "interpreter") -> Loader:
    return load(locate(tree), platform, execution)


def test_a_tree_is_found_by_its_parent_and_by_itself(tree: Path) -> None:
    source = locate(tree)
    assert (source.root, source.version, source.commit) == (tree, "0.1.9.post2", None)
    assert str(source) == f"aiter 0.1.9.post2 in {tree}"
    assert locate(tree / "aiter") == source
    assert "aiter" not in sys.modules


def test_a_checkout_that_is_itself_called_aiter_is_found(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "aiter")
    assert locate(root).root == root


def test_an_installed_aiter_is_found_without_being_imported(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "aiter", raising=False)
    monkeypatch.syspath_prepend(str(tree))
    assert locate(None) == locate(tree)
    assert "aiter" not in sys.modules


def test_no_installed_aiter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "aiter", raising=False)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(SourceError, match="aiter is not installed; install it, or give the path of a checkout"):
        locate(None)


def test_version_falls_back_to_the_distribution_and_then_to_unknown(tree: Path) -> None:
    (tree / "aiter" / "_version.py").unlink()
    assert locate(tree).version == "unknown"
    (tree / "amd_aiter-0.1.7+rocm.dist-info").mkdir()
    assert locate(tree).version == "0.1.7+rocm"


def test_wrong_paths_are_refused_in_one_sentence(tree: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "amd_aiter-0.1.7-cp312-linux_x86_64.whl"
    wheel.write_bytes(b"PK")
    file = tmp_path / "kernel.py"
    file.write_text("")
    # The aiter on PyPI is about asynchronous iterators.
    stranger = tmp_path / "stranger" / "aiter"
    stranger.mkdir(parents=True)
    (stranger / "__init__.py").write_text("")
    for path, sentence in (
        (tmp_path / "nowhere", "does not exist; give the directory that holds aiter/"),
        (wheel, "is a wheel; unzip it first and give the directory that it was unzipped to"),
        (file, "is a file; give the directory that holds aiter/"),
        (
            tree / "aiter" / "ops",
            "is not an AITER tree, it has no aiter/__init__.py; give the directory that holds aiter/",
        ),
        (
            tmp_path / "stranger",
            "holds an aiter/ without Triton sources (no aiter/ops/triton/); give a complete checkout or wheel",
        ),
    ):
        with pytest.raises(SourceError) as caught:
            locate(path)
        assert str(caught.value) == f"{path} {sentence}"
        assert unsupported(path, {}) == [f"{path} {sentence}"]


def test_every_missing_module_and_name_is_a_reason(tree: Path) -> None:
    assert unsupported(tree, {OPS: ["double", "facts"]}) == []
    assert unsupported(tree, {OPS: ["double", "x", "y"], "aiter.ops.nothing": ["z"]}) == [
        f"aiter 0.1.9.post2 in {tree}: {OPS} has no x, y",
        f"aiter 0.1.9.post2 in {tree} has no module aiter.ops.nothing",
    ]


def test_a_fingerprint_changes_with_the_source(tree: Path, tmp_path: Path) -> None:
    changed = write_tree(tmp_path / "changed")
    assert locate(tree).fingerprint([OPS]) == locate(changed).fingerprint([OPS])
    again = write_tree(tmp_path / "again")
    (again / "aiter" / "ops" / "triton" / "attention" / "decode.py").write_text("X = 1\n")
    assert locate(tree).fingerprint([OPS]) != locate(again).fingerprint([OPS])
    with pytest.raises(SourceError, match=r"has no module aiter\.nothing"):
        locate(tree).fingerprint(["aiter.nothing"])


@pytest.mark.usefixtures("any_execution")
def test_platforms_side_by_side_answer_for_themselves(tree: Path) -> None:
    want = {
        Platform("gfx942"): ("gfx942", False, 304),
        Platform("gfx950", 17): ("gfx950", True, 17),
        Platform("other"): ("gfx90a", False, 256),
    }
    facts = {platform: loaded(tree, platform).symbol(OPS, "facts") for platform in want}
    assert {platform: fact() for platform, fact in facts.items()} == want
    assert loaded(tree, Platform("gfx942")) is loaded(tree, Platform("gfx942", 304))
    assert "aiter" not in sys.modules


@pytest.mark.usefixtures("any_execution")
def test_compiled_operators_are_refused(tree: Path) -> None:
    with pytest.raises(SourceError, match="compile_ops was used, and cannot be had from the sources alone"):
        loaded(tree, Platform("gfx950")).symbol(OPS, "compiled")


@pytest.mark.usefixtures("any_execution")
def test_guards_are_dropped_in_the_interpreter_only(tree: Path) -> None:
    class Tensor:
        is_cuda = False

    loader = loaded(tree, Platform("gfx950"))
    assert loader.symbol(OPS, "guarded")(Tensor()) == 1
    assert len(loader.dropped_guards) == 1
    with pytest.raises(RuntimeError, match="needs a device"):
        loaded(tree, Platform("gfx950"), "hip").symbol(OPS, "guarded")(Tensor())


def test_executions_are_checked(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match="execution='cuda': should be one of interpreter, isa:gfx942, isa:gfx950, aot, aot:values, hip"
    ):
        loaded(tree, Platform("gfx950"), "cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SourceError, match="TRITON_INTERPRET should not be set"):
        loaded(tree, Platform("gfx950"), "hip")


def test_a_loaded_kernel_is_launched_by_the_interpreter(tree: Path) -> None:
    program = f"""
        import json, torch
        from pathlib import Path
        from impl.sources.aiter import Platform, load, locate
        loader = load(locate(Path({str(tree)!r})), Platform("gfx942"), "interpreter")
        print(json.dumps([loader.symbol({OPS!r}, "double")(torch.arange(4.0)).tolist(), loader.loaded_modules]))
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
    assert json.loads(done.stdout) == [[0.0, 2.0, 4.0, 6.0], [OPS]]
