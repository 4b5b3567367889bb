"""What machine and which versions gave this answer?

Versions come from the installed distributions' metadata, so that describing an environment imports no kernel language.
"""

import importlib.metadata
import importlib.util
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from impl.executions.isa import triton_launch
from impl.implementation import Execution, machine_code_of, on_device
from impl.sources import aiter as aiter_source
from impl.sources import vllm as vllm_source
from impl.sources.source_tree import SourceError
from reports.record import Environment

# ROCm images ship Triton under other distribution names.
_TRITON_NAMES = ("triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton")


def environment(on: Execution, vllm: Path | None = None, aiter: Path | None = None) -> Environment:
    """The environment of this process for an execution; `vllm` and `aiter` are the trees that the user pointed at."""
    if on_device(on):
        device, arch, driver = _device()
    else:
        executed = machine_code_of(on)
        device, arch = _processor(), executed or platform.machine()
        driver = _executor() if executed else ""
    return Environment(
        machine=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        triton=_first_version(*_TRITON_NAMES) or ("of unknown version" if importlib.util.find_spec("triton") else ""),
        numpy=np.__version__,
        device=device,
        arch=arch,
        driver=driver,
        vllm=_tree(vllm, vllm_source.locate) if vllm is not None else _first_version("vllm"),
        aiter=_tree(aiter, aiter_source.locate) if aiter is not None else _first_version("amd-aiter", "aiter"),
        commit=_commit(Path(__file__).resolve().parent.parent),
    )


def _executor() -> str:
    """What executes machine code, and the launch options that it puts in place of what kernels ask for."""
    options = ",".join(f"{name}={number}" for name, number in triton_launch.launch_options().items())
    return "machine code executed on the processor" + (f", launched with {options}" if options else "")


def default_execution() -> Execution:
    """Where implementations run unless the user says so: the device that torch sees, else the interpreter."""
    if not torch.cuda.is_available():
        return "interpreter"
    return "hip" if torch.version.hip else "cuda"


def unavailable(on: Execution) -> list[str]:
    """Every reason why this machine has no such execution, found by looking; empty when it has."""
    if on == "interpreter":
        found = importlib.util.find_spec("triton") is not None
        return [] if found else ["triton is not installed: only implementations in torch can run"]
    if machine_code_of(on):
        return triton_launch.unsupported(machine_code_of(on))
    if not torch.cuda.is_available():
        return [f"torch {torch.__version__} sees no device"]
    built_for = "hip" if torch.version.hip else "cuda"
    return [] if on == built_for else [f"torch {torch.__version__} is built for {built_for}"]


def _first_version(*names: str) -> str:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or "cpu"


def _device() -> tuple[str, str, str]:
    """The device's name, what kernels are compiled for there, and the runtime that torch was built for."""
    if not torch.cuda.is_available():
        return "none", "", ""
    properties = torch.cuda.get_device_properties(0)
    # AMD's name lists features behind the architecture, gfx950:sramecc+:xnack-; on CUDA the field holds the device's name.
    architecture = properties.gcnArchName if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    driver = f"hip {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}"
    return f"{properties.name} ({architecture})", architecture.partition(":")[0], driver


def _commit(tree: Path) -> str:
    """The checked-out commit of a tree, `+` behind it when files differ from it; empty when it is no git checkout."""
    if not (tree / ".git").exists():
        return ""
    commit = _git(tree, "rev-parse", "--short=12", "HEAD")
    changed = bool(commit) and bool(_git(tree, "status", "--porcelain", "--untracked-files=no"))
    return commit + ("+" if changed else "")


def _tree(path: Path, locate: Callable[[Path], Any]) -> str:
    """The version that a source tree says it is, its commit if it is a checkout, and where it lies."""
    try:
        source = locate(path)
    except SourceError:
        # That it is none is the implementations' reason; an environment only describes.
        return str(path)
    commit = f"@{source.commit}" if source.commit else ""
    return f"{source.version}{commit} in {path}"


def _git(tree: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(tree), *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
