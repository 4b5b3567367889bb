"""Which vLLM is meant, and how do its kernels and their host code run without vLLM being installed or imported?"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from impl.sources import triton_language
from impl.sources.source_tree import MissingNameError, Refusal, SourceError, Substitute, TreeLoader, source_tree

__all__ = [
    "EXECUTIONS",
    "Loader",
    "MissingNameError",
    "Platform",
    "Source",
    "SourceError",
    "load",
    "locate",
    "unsupported",
]

Architecture = Literal["gfx942", "gfx950", "other"]

EXECUTIONS = ("interpreter", "isa:gfx942", "isa:gfx950", "aot", "cuda", "hip")
"""Where loaded kernels may run; `aot` compiles launches that were captured on meta tensors."""

AMD_OPTIONS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
"""Launch options that only Triton's AMD backend knows; another backend refuses a launch that has them."""

ENVIRONMENT: Mapping[str, object] = {
    "VLLM_BATCH_INVARIANT": False,
    "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": 512,
}
"""What loaded code reads from `vllm.envs`: vLLM's own defaults, never the environment of this process."""

# What a value of the compiled-in architecture name looks like where no tuned path exists.
_ARCHITECTURE_NAMES = {"gfx942": "gfx942", "gfx950": "gfx950", "other": "gfx90a"}
_CAPABILITIES = {"gfx942": (9, 4), "gfx950": (9, 5), "other": (9, 0)}
_COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256, "other": 256}
_DEVICES = {"cuda": "cuda", "hip": "cuda", "aot": "meta"}


@dataclass(frozen=True)
class Platform:
    """The machine that loaded code is told it runs on: always ROCm, whatever it really runs on.

    `other` is an architecture without kernels of its own, so that code takes its general path; it answers as gfx90a.
    `compute_units` 0 means as many as the architecture's production part has (304 for gfx942, otherwise 256).
    """

    arch: Architecture
    compute_units: int = 0

    def __post_init__(self) -> None:
        if self.arch not in _ARCHITECTURE_NAMES:
            raise ValueError(f"arch={self.arch!r}: should be one of {', '.join(_ARCHITECTURE_NAMES)}")
        if self.compute_units < 0:
            raise ValueError(f"compute_units={self.compute_units}: should be positive, or 0 for the architecture's own")
        if self.compute_units == 0:
            object.__setattr__(self, "compute_units", _COMPUTE_UNITS[self.arch])

    @property
    def fnuz(self) -> bool:
        """Whether the platform's own FP8 is FNUZ (bias 8, no infinities, no negative zero) rather than OCP."""
        return self.arch == "gfx942"

    @property
    def needs_fnuz(self) -> bool:
        """Whether kernels loaded for the platform may compute with FNUZ types, which NVIDIA devices do not have."""
        return self.fnuz


@dataclass(frozen=True)
class Source:
    """A vLLM source tree on disk.

    `root` is the directory that holds `vllm/`. `version` is 'unknown' if nothing tells it. `commit` is the checked-out
    commit, with `-dirty` behind it if tracked files differ, the commit that a wheel says it was built from, or None.
    """

    root: Path
    version: str
    commit: str | None

    def fingerprint(self, modules: Sequence[str]) -> str:
        """The sha256 over the named modules' sources, as they were read by this process; their order does not matter.

        Raises `SourceError` if one is missing.
        """
        return source_tree(self.root, "vllm").fingerprint(modules)

    def __str__(self) -> str:
        return f"vllm {self.version} in {self.root}"


def locate(path: Path | None) -> Source:
    """The vLLM tree at a path: the directory that holds `vllm/` (a checkout, an unpacked wheel), or `vllm/` itself.

    None means the installed vLLM, which is found without being imported. Raises `SourceError` with one sentence that
    says what is wrong and what would be right.
    """
    found = _find(path)
    if isinstance(found, str):
        raise SourceError(found)
    return found


def unsupported(path: Path | None, modules: Mapping[str, Sequence[str]]) -> list[str]:
    """Every reason why the vLLM at `path` cannot provide the named top-level names of the named modules.

    It looks only at whether they are there; whether all that they refer to is there shows when they are loaded. A
    module that Python cannot parse raises `SourceError`: that is a mistake in it, not a reason to leave it out.
    """
    found = _find(path)
    if isinstance(found, str):
        return [found]
    tree = source_tree(found.root, "vllm")
    reasons = []
    for module, names in modules.items():
        if tree.path(module) is None:
            reasons.append(f"{found} has no module {module}")
            continue
        parsed = tree.module(module)
        missing = [name for name in names if name not in parsed.bindings]
        if missing and not parsed.star_imports:
            reasons.append(f"{found}: {module} has no {', '.join(missing)}")
    return reasons


@functools.cache
def load(source: Source, platform: Platform, execution: str) -> Loader:
    """The loader of a tree for a platform and an execution; the same arguments give the same loader.

    Raises `SourceError` if Triton's interpreter is on without being asked for, or asked for without being on: Triton
    decides when a kernel is decorated, from TRITON_INTERPRET.
    """
    if execution not in EXECUTIONS:
        raise ValueError(f"execution={execution!r}: should be one of {', '.join(EXECUTIONS)}")
    if execution.startswith("isa:") and platform.arch != "other" and execution != f"isa:{platform.arch}":
        raise ValueError(
            f"execution={execution!r}: should be isa:{platform.arch} for kernels loaded for {platform.arch}"
        )
    wrong = _interpreter_mismatch(execution)
    if wrong is not None:
        raise SourceError(wrong)
    return Loader(source, platform, execution)


class Loader(TreeLoader):
    """Loads vLLM's functions and kernels for one platform and one execution.

    `dropped_guards` lists the device assertions left out (never on `cuda` and `hip`), `dropped_options` the launch
    options left out (`kernel: option=value`, on `cuda` only), `loaded_modules` the modules that anything came from.
    """

    def __init__(self, source: Source, platform: Platform, execution: str) -> None:
        self.source = source
        self.platform = platform
        self.execution = execution
        self.dropped_options: list[str] = []
        self.device = _DEVICES.get(execution, "cpu")
        self._compute_units = platform.compute_units
        self._environment = dict(ENVIRONMENT)
        tag = hashlib.sha256(str(source.root).encode()).hexdigest()[:8]
        super().__init__(
            source_tree(source.root, "vllm"),
            f"mla_oracle_sources.{tag}.{platform.arch}_{platform.compute_units}_{execution.replace(':', '_')}",
            _substitutes(self),
            drop_guards=execution not in ("cuda", "hip"),
        )

    @contextlib.contextmanager
    def compute_units(self, count: int) -> Iterator[None]:
        """For the duration of a `with`, the number of compute units that host code believes in.

        Cached results are forgotten at both ends; a module constant computed from the number stays as it was.
        """
        if count < 1:
            raise ValueError(f"count={count}: should be at least 1")
        before = self._compute_units
        self._compute_units = count
        self.forget_cached_results()
        try:
            yield
        finally:
            self._compute_units = before
            self.forget_cached_results()

    @contextlib.contextmanager
    def environment(self, **values: object) -> Iterator[None]:
        """For the duration of a `with`, what `vllm.envs` holds: `environment(VLLM_BATCH_INVARIANT=True)`."""
        before = dict(self._environment)
        self._environment.update(values)
        self.forget_cached_results()
        try:
            yield
        finally:
            self._environment.clear()
            self._environment.update(before)
            self.forget_cached_results()

    def count_compute_units(self, *_device: object) -> int:
        """The number of compute units that host code is told now."""
        return self._compute_units

    def defined(self, name: str, value: object) -> None:
        """Makes a kernel that was just defined leave out the launch options which this execution does not know."""
        if self.execution != "cuda":
            return
        jit_function = importlib.import_module("triton.runtime.jit").JITFunction
        for item in (value, *(vars(value).values() if isinstance(value, type) else ())):
            kernel = getattr(item, "__func__", item)
            # An autotuner holds the kernel that it launches.
            while not isinstance(kernel, jit_function) and type(kernel).__module__ == "triton.runtime.autotuner":
                kernel = kernel.fn
            if isinstance(kernel, jit_function) and "run" not in vars(kernel):
                self._leave_out_amd_options(kernel)

    def _leave_out_amd_options(self, kernel: Any) -> None:
        launch: Callable[..., Any] = kernel.run
        options = [option for option in AMD_OPTIONS if option not in kernel.arg_names]

        def run(*args: Any, **kwargs: Any) -> Any:
            for option in options:
                if option in kwargs:
                    dropped = f"{kernel.__name__}: {option}={kwargs.pop(option)}"
                    if dropped not in self.dropped_options:
                        self.dropped_options.append(dropped)
            return launch(*args, **kwargs)

        kernel.run = run


class _CurrentPlatform:
    """What `vllm.platforms.current_platform` answers; what it has no answer for raises, and is not taken for False."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._platform = loader.platform
        self.device_type = loader.device
        self.device_name = loader.device

    def is_rocm(self) -> bool:
        return True

    def is_cuda_alike(self) -> bool:
        return True

    def is_cuda(self) -> bool:
        return False

    is_xpu = is_cpu = is_tpu = is_out_of_tree = is_unspecified = is_zen_cpu = is_cuda

    def is_fp8_fnuz(self) -> bool:
        return self._platform.fnuz

    def fp8_dtype(self) -> object:
        torch = importlib.import_module("torch")
        return torch.float8_e4m3fnuz if self._platform.fnuz else torch.float8_e4m3fn

    def supports_fp8(self) -> bool:
        return True

    def supports_mx(self) -> bool:
        return self._platform.arch == "gfx950"

    def num_compute_units(self, *_device: object) -> int:
        return self._loader.count_compute_units()

    def has_device_capability(self, capability: tuple[int, int] | int, *_device: object) -> bool:
        return _CAPABILITIES[self._platform.arch] >= _as_pair(capability)

    def is_device_capability(self, capability: tuple[int, int] | int, *_device: object) -> bool:
        return _CAPABILITIES[self._platform.arch] == _as_pair(capability)

    def is_device_capability_family(self, capability: int, *_device: object) -> bool:
        return _CAPABILITIES[self._platform.arch][0] == capability // 10

    def get_device_capability(self, *_device: object) -> object:
        major, minor = _CAPABILITIES[self._platform.arch]
        return self._loader.symbol("vllm.platforms.interface", "DeviceCapability")(major=major, minor=minor)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise SourceError(f"current_platform.{name} was used, and impl/sources/vllm.py has no answer for it")


class _Environment:
    """What stands for the module `vllm.envs`; a variable without a stated value raises."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._values:
            raise SourceError(f"vllm.envs.{name} was read, and impl/sources/vllm.py states no value for it")
        return self._values[name]


class _Logger:
    """Swallows log lines. It answers no question, so nothing can depend on it."""

    def _swallow(self, *_args: object, **_kwargs: object) -> None:
        pass

    debug = info = warning = error = exception = critical = _swallow
    debug_once = info_once = warning_once = error_once = _swallow


class _Workspace:
    """Hands out scratch memory as vLLM's workspace manager does, but new and full of 0xFF (NaN, or -1) each time."""

    def __init__(self, device: str) -> None:
        self._device = device

    def get_simultaneous(self, *shapes_and_dtypes: tuple[tuple[int, ...], Any]) -> list[Any]:
        torch = importlib.import_module("torch")
        views = []
        for shape, dtype in shapes_and_dtypes:
            size = dtype.itemsize
            for length in shape:
                size *= length
            memory = torch.full((size,), 0xFF, dtype=torch.uint8, device=self._device)
            views.append(memory.view(dtype).reshape(shape))
        return views

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise SourceError(f"the workspace manager's {name} was used, and impl/sources/vllm.py does not provide it")


def _substitutes(loader: Loader) -> dict[str, Substitute]:
    """Everything that loaded code is given instead of vLLM's own, each with the reason why vLLM's own will not do."""
    arch = loader.platform.arch
    platform = "the platform is a parameter; vLLM's own asks the drivers of this machine"
    triton = "vLLM's own first asks which GPU drivers are active"
    answers: dict[str, tuple[Callable[[], object], str]] = {
        "current_platform": (lambda: _CurrentPlatform(loader), platform),
        "_GCN_ARCH": (lambda: _ARCHITECTURE_NAMES[arch], platform),
        "_ON_GFX942": (lambda: arch == "gfx942", platform),
        "_ON_GFX950": (lambda: arch == "gfx950", platform),
        "_decode_cu_count": (lambda: loader.count_compute_units, "it asks the device, once for ever"),
        "num_compute_units": (lambda: loader.count_compute_units, "it asks the device, once for ever"),
        "has_deep_select": (lambda: lambda: False, "it looks into the installed vllm, and is for NVIDIA only"),
        "_has_module": (lambda: lambda *_: False, "what happens to be installed must not choose the path"),
        "_has_module_spec": (lambda: lambda *_: False, "what happens to be installed must not choose the path"),
        "vllm.envs": (lambda: _Environment(loader._environment), "the environment of this process must not decide"),
        "envs": (lambda: _Environment(loader._environment), "the environment of this process must not decide"),
        "logger": (_Logger, "vLLM's logging needs its configuration"),
        "init_logger": (lambda: lambda *_: _Logger(), "vLLM's logging needs its configuration"),
        "current_workspace_manager": (
            lambda: functools.partial(_only, _Workspace(loader.device)),
            "a server's workspace exists only once the server has been set up",
        ),
        "eager_break_during_capture": (lambda: _only, "it matters only while a graph is being captured"),
        "vllm.triton_utils:triton": (lambda: importlib.import_module("triton"), triton),
        "vllm.triton_utils:tl": (lambda: triton_language.complete(), triton),
        "vllm.triton_utils:tldevice": (lambda: importlib.import_module("triton.language.extra.libdevice"), triton),
        "vllm.triton_utils:gluon": (lambda: importlib.import_module("triton.experimental.gluon"), triton),
        "vllm.triton_utils:gl": (lambda: importlib.import_module("triton.experimental.gluon.language"), triton),
        "vllm.triton_utils:aggregate": (lambda: importlib.import_module("triton.language.core")._aggregate, triton),
        "HAS_TRITON": (lambda: True, triton),
    }
    refused = {
        "get_forward_context": "the forward context exists only inside a model's forward pass",
        "get_current_vllm_config": "the configuration exists only inside a server",
        "get_current_vllm_config_or_none": "the configuration exists only inside a server",
        "rocm_aiter_ops": "it dispatches to AITER, which has implementations of its own here",
        "direct_register_custom_op": "registering an operator with torch would change the whole process",
    }
    table = {name: Substitute(make, reason) for name, (make, reason) in answers.items()}
    for name, reason in refused.items():
        table[name] = Substitute(functools.partial(Refusal, name, reason), reason)
    return table


def _only(value: Any) -> Any:
    return value


def _as_pair(capability: tuple[int, int] | int) -> tuple[int, int]:
    return capability if isinstance(capability, tuple) else divmod(capability, 10)


def _find(path: Path | None) -> Source | str:
    """The source at a path, or the sentence that says why there is none."""
    if path is None:
        # An entry without a spec (a stub that somebody put there) makes find_spec raise instead of answering.
        loaded = sys.modules.get("vllm")
        if loaded is not None and loaded.__spec__ is None:
            return "the module vllm of this process came from no file; give the path of a vLLM source tree"
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            return "vllm is not installed; install it, or give the path of a checkout or an unpacked wheel"
        return _find(Path(spec.origin).parent)
    path = path.resolve()
    if not path.exists():
        return f"{path} does not exist; give the directory that holds vllm/"
    if path.suffix == ".whl":
        return f"{path} is a wheel; unzip it first and give the directory that it was unzipped to"
    if not path.is_dir():
        return f"{path} is a file; give the directory that holds vllm/"
    if (path / "vllm" / "__init__.py").is_file():
        root = path
    elif path.name == "vllm" and (path / "__init__.py").is_file():
        root = path.parent
    else:
        return f"{path} is not a vLLM tree, it has no vllm/__init__.py; give the directory that holds vllm/"
    if not (root / "vllm" / "triton_utils").is_dir():
        return f"{root} holds a vllm/ without Triton sources (no vllm/triton_utils/); give a complete checkout or wheel"
    stated, built_from = _stated_version(root / "vllm" / "_version.py")
    commit = _checked_out_commit(root)
    version = stated or _version_of_distribution(root)
    if version is None and commit is not None:
        version = _git(root, "describe", "--tags")
    return Source(root, version or "unknown", commit or built_from)


def _stated_version(path: Path) -> tuple[str | None, str | None]:
    """The version and the commit that vLLM's generated version file states; it is read, not executed."""
    if not path.is_file():
        return None, None
    values: dict[str, str] = {}
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
            values.update({name: statement.value.value for name in names if isinstance(statement.value.value, str)})
    commit = values.get("commit_id")
    # The version tools write a commit as git describes it: a `g`, then the hash.
    return values.get("version", values.get("__version__")), commit.removeprefix("g") if commit else None


def _version_of_distribution(root: Path) -> str | None:
    for directory in sorted(root.glob("vllm-*.dist-info")):
        match = re.fullmatch(r"vllm-(.+)\.dist-info", directory.name)
        if match:
            return match[1]
    return None


def _checked_out_commit(root: Path) -> str | None:
    # Without this, an environment inside somebody's repository would report that repository's commit.
    if not (root / ".git").exists():
        return None
    return _git(root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _interpreter_mismatch(execution: str) -> str | None:
    """The sentence that says why kernels decorated now would not run on an execution, or None."""
    asked = execution == "interpreter"
    is_set = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
    if asked and not is_set:
        return "execution=interpreter: TRITON_INTERPRET=1 should be in the environment before triton is imported"
    if not asked and is_set:
        return f"execution={execution}: TRITON_INTERPRET should not be set, it makes every kernel an interpreted one"
    # Triton's own library functions are kernels, decorated when triton was imported.
    library = sys.modules.get("triton.language.standard")
    if library is not None and (type(library.cdiv).__name__ == "InterpretedFunction") != asked:
        state = "without" if asked else "with"
        return f"execution={execution}: this process imported triton {state} TRITON_INTERPRET=1; use another process"
    return None
