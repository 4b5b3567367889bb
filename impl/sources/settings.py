"""Which vLLM and which AITER did the user point at?"""

from pathlib import Path

_vllm: Path | None = None
_aiter: Path | None = None


def use_vllm(path: Path | None) -> None:
    """From now on, vLLM's kernels come from this checkout, installation or unpacked wheel; None: the installed one."""
    global _vllm
    _vllm = path


def vllm_path() -> Path | None:
    """The path that `use_vllm` was given last; None when whatever is installed should be used."""
    return _vllm


def use_aiter(path: Path | None) -> None:
    """From now on, AITER's kernels come from this checkout, installation or unpacked wheel; None: the installed one."""
    global _aiter
    _aiter = path


def aiter_path() -> Path | None:
    """The path that `use_aiter` was given last; None when whatever is installed should be used."""
    return _aiter
