"""Which cases and which judge does this process have?"""

import hashlib
import importlib.metadata
import tomllib
from pathlib import Path

_HOUSE = Path(__file__).resolve().parent.parent
# What decides a verdict besides the implementation: the questions, the truth, how kernels are interpreted and watched,
# and how a trial is conducted.
_DECIDE = ("cases", "oracle", "impl/executions", "reports/execute.py", "reports/form.py", "reports/laws.py")


def judge(house: Path = _HOUSE) -> str:
    """The version of mla-oracle, and the SHA-256 over the names and the content of all files that decide a verdict."""
    found = hashlib.sha256()
    for part in _DECIDE:
        for path in sorted((house / part).rglob("*.py")) if not part.endswith(".py") else [house / part]:
            content = path.read_bytes() if path.is_file() else b""
            found.update(f"{path.relative_to(house).as_posix()} {len(content)}\n".encode() + content)
    return f"{version(house)} {found.hexdigest()}"


def version(house: Path = _HOUSE) -> str:
    """The version of mla-oracle that the checkout says, for another one may be installed; else what is installed."""
    project = house / "pyproject.toml"
    if project.is_file():
        known = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        if known.get("name") == "mla-oracle":
            return str(known["version"])
    try:
        return importlib.metadata.version("mla-oracle")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
