"""Where are the sources of a package whose kernels are meant, which version are they, and do they hold what is asked?"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from impl.sources.source_tree import SourceError, source_tree

Stated = tuple[str | None, str | None]
"""The version and the commit that a generated version file states, None for what it does not."""


@dataclass(frozen=True)
class Source:
    """A source tree on disk.

    `root` is the directory that holds the package's own. `version` is 'unknown' if nothing tells it. `commit` is the
    checked-out commit, with `-dirty` behind it if tracked files differ, the commit that a wheel says it was built from,
    or None.
    """

    package: str
    root: Path
    version: str
    commit: str | None

    def fingerprint(self, modules: Sequence[str]) -> str:
        """The sha256 over the named modules' sources, as they were read by this process; their order does not matter.

        Raises `SourceError` if one is missing.
        """
        return source_tree(self.root, self.package).fingerprint(modules)

    def __str__(self) -> str:
        return f"{self.package} {self.version} in {self.root}"


@dataclass(frozen=True)
class Package:
    """A package of somebody else's, found on disk and never imported.

    `name` as Python spells it and `title` as its people do, `article` before either. `sources`, below the package, is
    the directory without which it has no Triton sources. `distributions` matches the names that it is installed under.
    `stated` reads its generated version file, which need not exist.
    """

    name: str
    title: str
    article: str
    sources: str
    distributions: str
    stated: Callable[[Path], Stated]

    def locate(self, path: Path | None) -> Source:
        """The tree at a path: the directory that holds the package's (a checkout, an unpacked wheel), or that itself.

        None means the installed package, which is found without being imported. Raises `SourceError` with one sentence
        that says what is wrong and what would be right.
        """
        found = self._find(path)
        if isinstance(found, str):
            raise SourceError(found)
        return found

    def unsupported(self, path: Path | None, modules: Mapping[str, Sequence[str]]) -> list[str]:
        """Every reason why the package at `path` cannot provide the named top-level names of the named modules.

        It looks only at whether they are there; whether all that they refer to is there shows when they are loaded. A
        module that Python cannot parse raises `SourceError`: that is a mistake in it, not a reason to leave it out.
        """
        found = self._find(path)
        if isinstance(found, str):
            return [found]
        tree = source_tree(found.root, self.name)
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

    def _find(self, path: Path | None) -> Source | str:
        """The source at a path, or the sentence that says why there is none."""
        name, tree = self.name, f"{self.article} {self.title}"
        if path is None:
            # An entry without a spec (a stub that somebody put there) makes find_spec raise instead of answering.
            loaded = sys.modules.get(name)
            if loaded is not None and loaded.__spec__ is None:
                return f"the module {name} of this process came from no file; give the path of {tree} source tree"
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                return f"{name} is not installed; install it, or give the path of a checkout or an unpacked wheel"
            return self._find(Path(spec.origin).parent)
        path = path.resolve()
        if not path.exists():
            return f"{path} does not exist; give the directory that holds {name}/"
        if path.suffix == ".whl":
            return f"{path} is a wheel; unzip it first and give the directory that it was unzipped to"
        if not path.is_dir():
            return f"{path} is a file; give the directory that holds {name}/"
        if (path / name / "__init__.py").is_file():
            root = path
        elif path.name == name and (path / "__init__.py").is_file():
            root = path.parent
        else:
            return f"{path} is not {tree} tree, it has no {name}/__init__.py; give the directory that holds {name}/"
        if not (root / name / self.sources).is_dir():
            return (
                f"{root} holds {self.article} {name}/ without Triton sources (no {name}/{self.sources}/); "
                "give a complete checkout or wheel"
            )
        version, built_from = self.stated(root / name / "_version.py")
        commit = _checked_out_commit(root)
        version = version or self._version_of_distribution(root)
        if version is None and commit is not None:
            version = _git(root, "describe", "--tags")
        return Source(name, root, version or "unknown", commit or built_from)

    def _version_of_distribution(self, root: Path) -> str | None:
        for directory in sorted(root.glob("*.dist-info")):
            match = re.fullmatch(rf"(?:{self.distributions})-(.+)\.dist-info", directory.name)
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
