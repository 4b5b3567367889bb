"""Which commands does a newcomer, a continuous integration run and a developer give, and on what do they run?

    nox -s sweep     the main job: judge every op here, then write the HTML report
    nox -s tests     the tests of the harness
    nox -s lint | types | build | bench | prove | vllm | isa

Arguments after `--` go to the command behind the session, but for two words of the sessions that sweep: `--compiled` compiles
the kernels of the run for AMD GPUs too, which takes minutes, and puts what they take into its report; `--without-tests` has
`isa` sweep alone. A torch that the interpreter running nox already has is used
as it is, with its triton and numpy, by linking its site-packages into the session; a triton that it lacks is installed
beside it. Without a torch the sessions install `$MLA_ORACLE_TORCH` (default `torch==2.13.0`) and the extra `standalone`.
"""

import importlib.metadata
import importlib.util
import itertools
import json
import os
import sys
import sysconfig
import time
import tomllib
import zipfile
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "tests", "sweep"]

HERE = Path(__file__).parent
TORCH = os.environ.get("MLA_ORACLE_TORCH", "torch==2.13.0")
VLLM = "0.33.0"
# Lies in reports/ here, and beside the four packages in the wheel.
PLUGIN = "mla_oracle_pytest.py"
# The workflow files and the schemas that they are validated against; check-jsonschema brings these along.
WORKFLOWS = {
    "vendor.github-workflows": (".github/workflows/ci.yml", "docs/ci/github-actions.yml"),
    "custom.github-workflows-require-timeout": (".github/workflows/ci.yml", "docs/ci/github-actions.yml"),
    "vendor.buildkite": ("docs/ci/buildkite.yml",),
}
# The host's builds are never replaced: triton comes under several distribution names on ROCm images.
HOST_PINNED = ("torch", "triton", "pytorch-triton-rocm", "triton-rocm", "numpy")


def host_has(package: str) -> bool:
    """Whether the interpreter that runs nox can import it."""
    return importlib.util.find_spec(package) is not None


def install(session: nox.Session, *extras: str) -> None:
    """The project, editable, with extras, on the host's torch or on one of the session's own."""
    beside: tuple[str, ...] = ()
    if host_has("torch"):
        link_host(session)
        chosen = extras
        # A CPU build of torch comes without one, and then no kernel could be judged; wheels are built for Linux only.
        if not host_has("triton") and sys.platform == "linux":
            beside = (triton_requirement(),)
    else:
        session.install(TORCH)
        chosen = ("standalone", *extras)
    session.install("-e", f".[{','.join(chosen)}]" if chosen else ".", *beside, *constraints(session))


def triton_requirement() -> str:
    """The versions of triton that the extra `standalone` allows."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return next(name for name in project["optional-dependencies"]["standalone"] if name.startswith("triton"))


def link_host(session: nox.Session) -> None:
    """Let the session import what the host's site-packages hold, behind its own."""
    purelib = session.run(
        "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", silent=True, log=False
    )
    paths = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    Path(str(purelib).strip(), "mla_oracle_host.pth").write_text("\n".join(paths) + "\n")


def constraints(session: nox.Session) -> list[str]:
    """pip's arguments that keep torch, triton and numpy at the versions that are there."""
    if not host_has("torch"):
        return []
    found = []
    for name in HOST_PINNED:
        try:
            found.append(f"{name}=={importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    path = Path(session.create_tmp(), "host.txt")
    path.write_text("\n".join(found) + "\n")
    return ["-c", str(path)]


def run_name(kind: str) -> str:
    """A fresh directory name under runs/."""
    return f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{kind}"


@nox.session
def sweep(session: nox.Session) -> None:
    """Judge every op on this machine, its laws too, and write the report; arguments go to `mla-oracle sweep`."""
    install(session)
    arguments = list(session.posargs)
    if not any(argument.partition("=")[0] in ("--resume", "--failed", "--laws") for argument in arguments):
        arguments.append("--laws")
    sweep_and_report(session, arguments, "sweep")


def sweep_and_report(session: nox.Session, arguments: list[str], kind: str, **how: object) -> None:
    """Sweep, compile where that is asked for, and write the report of the run even when either found something."""
    is_compiled = "--compiled" in arguments
    arguments = [argument for argument in arguments if argument != "--compiled"]
    if not any(argument.partition("=")[0] in ("--out", "--resume") for argument in arguments):
        arguments += ["--out", run_name(kind)]
    words = [part for argument in arguments for part in argument.split("=", 1)]
    run = Path(next(after for word, after in itertools.pairwise(words) if word in ("--out", "--resume")))
    try:
        session.run("mla-oracle", "sweep", *arguments, **how)
    finally:
        if (run / "run.json").is_file():
            try:
                if is_compiled:
                    session.run("mla-oracle", "aot", *asked_of(run), "--out", str(run), **how)
            finally:
                session.run("mla-oracle", "report", str(run))


def asked_of(run: Path) -> list[str]:
    """The ops, implementations and trees that a run was asked for, as options."""
    settings = json.loads((run / "run.json").read_text(encoding="utf-8"))
    stated = {"--op": settings["ops"], "--impl": settings["impls"]}
    stated |= {f"--{tree}": [settings[tree]] for tree in ("vllm", "aiter") if settings[tree]}
    return [word for option, values in stated.items() for value in values for word in (option, value)]


@nox.session
def tests(session: nox.Session) -> None:
    """The tests, on two workers; arguments go to pytest."""
    install(session, "tests")
    session.run("pytest", "-n", "2", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, the layering contracts and the schemas of the workflow files; needs no torch."""
    session.install("ruff>=0.9", "import-linter>=2.1", "check-jsonschema>=0.33")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", env={"PYTHONPATH": str(HERE)})
    for schema, files in WORKFLOWS.items():
        session.run("check-jsonschema", "--builtin-schema", schema, *files)
        # A check that passes everything would not be one: each file fails once a key of it is misspelled.
        for file in files:
            text = Path(file).read_text(encoding="utf-8")
            broken = Path(session.create_tmp(), f"misspelled-{Path(file).name}")
            broken.write_text(text.replace("    timeout", "    tiemout", 1), encoding="utf-8")
            session.run("check-jsonschema", "--builtin-schema", schema, str(broken), success_codes=[1], silent=True)


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict, on the four rooms; needs torch for its types."""
    install(session, "types")
    session.run("mypy", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """The wheel, which holds exactly the four packages and the pytest plugin beside them."""
    session.install("build")
    out = Path(session.create_tmp(), "dist")
    for old in out.glob("*.whl"):
        old.unlink()
    session.run("python", "-m", "build", "--wheel", "--outdir", str(out), silent=True)
    wheel = next(out.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/", 1)[0] for name in archive.namelist()}
        missing = sorted(
            str(path)
            for room in ("cases", "oracle", "impl", "reports")
            for path in (HERE / room).rglob("*")
            if path.is_file() and path.suffix in {".py", ".j2", ".html", ".css", ".js"}
            if "__pycache__" not in path.parts and path != HERE / "reports" / PLUGIN
            if str(path.relative_to(HERE)) not in archive.namelist()
        )
    packages = {top for top in tops if not top.endswith(".dist-info")}
    if packages != {"cases", "oracle", "impl", "reports", PLUGIN}:
        session.error(f"the wheel holds {sorted(packages)}: should be cases, impl, oracle, reports and {PLUGIN}")
    if missing:
        session.error(f"the wheel lacks {missing[0]} and {len(missing) - 1} more")
    session.log(f"{wheel.name} holds exactly cases, impl, oracle, reports and {PLUGIN}")


@nox.session
def isa(session: nox.Session) -> None:
    """The machine code of our own kernels: every instruction against its statement, then the smoke cases on both machines.

    Arguments go to `mla-oracle sweep`, and what they do not say of `--on`, `--impl` and `--cases` stays as it is. With
    `--without-tests` among them only the sweep is made. No AMD GPU is needed, nor of any use.
    """
    asked = [argument for argument in session.posargs if argument != "--without-tests"]
    if asked == list(session.posargs):
        install(session, "tests", "isa")
        session.run(
            "pytest", "-n", "2", "tests/executions/isa", env={"OMP_NUM_THREADS": "1", "MLA_ORACLE_MACHINE": "1"}
        )
    else:
        install(session, "isa")
    stated = {argument.partition("=")[0] for argument in asked}
    usual = {"--on": ("isa:gfx942", "isa:gfx950"), "--impl": ("ours-triton",), "--cases": ("smoke",)}
    if "--resume" not in stated:
        asked += [
            word
            for option, values in usual.items()
            for value in values
            for word in (option, value)
            if option not in stated
        ]
    sweep_and_report(session, asked, "isa")


@nox.session
def bench(session: nox.Session) -> None:
    """Times of the reference, the interpreter and the sweep on this machine; no pass or fail."""
    install(session)
    session.run("python", "-m", "reports.bench", *session.posargs)


@nox.session
def prove(session: nox.Session) -> None:
    """Kill matrix, false alarms and tightness; arguments go to `mla-oracle prove`."""
    install(session)
    session.run("mla-oracle", "prove", *session.posargs)


@nox.session
def vllm(session: nox.Session) -> None:
    """Judge vLLM's own kernels: `$MLA_ORACLE_VLLM`, or the Python files of the released wheel, downloaded once.

    What they get wrong is what the session is for, so it does not fail for it: read the report.
    """
    install(session)
    source = os.environ.get("MLA_ORACLE_VLLM")
    if source is None:
        root = Path(session.cache_dir, f"vllm-{VLLM}")
        if not (root / "vllm").is_dir():
            download = Path(session.create_tmp(), "wheel")
            session.run("pip", "download", f"vllm=={VLLM}", "--no-deps", "--dest", str(download), silent=True)
            wheel = next(download.glob("vllm-*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(root, [name for name in archive.namelist() if name.endswith(".py")])
            wheel.unlink()
        source = str(root)
    arguments = list(session.posargs) or ["--impl", "vllm-*"]
    sweep_and_report(session, ["--vllm", source, *arguments], "vllm", success_codes=[0, 1])
