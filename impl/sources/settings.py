"""Which vLLM did the user point at?"""

from pathlib import Path

_vllm: Path | None = None


def use_vllm(path: Path | None) -> None:
    """From now on, vLLM's kernels come from this checkout, installation or unpacked wheel; None: the installed one."""
    global _vllm
    _vllm = path


def vllm_path() -> Path | None:
    """The path that `use_vllm` was given last; None when whatever is installed should be used."""
    return _vllm
