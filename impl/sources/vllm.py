"""Which vLLM is meant, and how do its kernels and their host code run without vLLM being installed or imported?"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from impl.sources import triton_language
from impl.sources.execution import Architecture, Logger, Platform, namespace, refuse_mismatch
from impl.sources.package import Package, Source, Stated
from impl.sources.source_tree import MissingNameError, Refusal, SourceError, Substitute, TreeLoader, source_tree

__all__ = [
    "EXECUTIONS",
    "Architecture",
    "Loader",
    "MissingNameError",
    "Platform",
    "Source",
    "SourceError",
    "load",
    "locate",
    "unsupported",
]

EXECUTIONS = ("interpreter", "isa:gfx942", "isa:gfx950", "aot", "aot:values", "cuda", "hip")
"""Where loaded kernels may run; `aot` compiles launches that were captured on meta tensors, `aot:values` on CPU ones."""

AMD_OPTIONS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
"""Launch options that only Triton's AMD backend knows; another backend refuses a launch that has them."""

ENVIRONMENT: Mapping[str, object] = {
    "VLLM_BATCH_INVARIANT": False,
    "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": 512,
}
"""What loaded code reads from `vllm.envs`: vLLM's own defaults, never the environment of this process."""

_CAPABILITIES = {"gfx942": (9, 4), "gfx950": (9, 5), "other": (9, 0)}
_DEVICES = {"cuda": "cuda", "hip": "cuda", "aot": "meta"}


def _stated(path: Path) -> Stated:
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


PACKAGE = Package(name="vllm", title="vLLM", article="a", sources="triton_utils", distributions="vllm", stated=_stated)
locate = PACKAGE.locate
unsupported = PACKAGE.unsupported


@functools.cache
def load(source: Source, platform: Platform, execution: str) -> Loader:
    """The loader of a tree for a platform and an execution; the same arguments give the same loader.

    Raises `SourceError` if Triton's interpreter is on without being asked for, or asked for without being on: Triton
    decides when a kernel is decorated, from TRITON_INTERPRET.
    """
    if execution not in EXECUTIONS:
        raise ValueError(f"execution={execution!r}: should be one of {', '.join(EXECUTIONS)}")
    refuse_mismatch(execution)
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
        super().__init__(
            source_tree(source.root, "vllm"),
            namespace(source, platform, execution),
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
        "_GCN_ARCH": (lambda: loader.platform.name, platform),
        "_ON_GFX942": (lambda: arch == "gfx942", platform),
        "_ON_GFX950": (lambda: arch == "gfx950", platform),
        "_decode_cu_count": (lambda: loader.count_compute_units, "it asks the device, once for ever"),
        "num_compute_units": (lambda: loader.count_compute_units, "it asks the device, once for ever"),
        "has_deep_select": (lambda: lambda: False, "it looks into the installed vllm, and is for NVIDIA only"),
        "_has_module": (lambda: lambda *_: False, "what happens to be installed must not choose the path"),
        "_has_module_spec": (lambda: lambda *_: False, "what happens to be installed must not choose the path"),
        "vllm.envs": (lambda: _Environment(loader._environment), "the environment of this process must not decide"),
        "envs": (lambda: _Environment(loader._environment), "the environment of this process must not decide"),
        "logger": (Logger, "vLLM's logging needs its configuration"),
        "init_logger": (lambda: lambda *_: Logger(), "vLLM's logging needs its configuration"),
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
