"""Do Triton kernels, launched as machine code, answer as torch does, and does what is wrong with them end the launch?"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from impl.executions.isa import lanes, machine, triton_launch

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ARCHS = ("gfx942", "gfx950")

RIGHT = [
    "vector_add_with_a_mask", "sum_across_four_waves", "dot_of_bfloat16", "a_while_loop", "no_pointer",
    "a_pointer_where_none_may_be", "scalars_of_every_type", "a_tuple", "an_autotuned_kernel", "a_strided_view",
    "two_tensors_of_one_storage", "an_empty_tensor", "a_grid_that_is_a_function", "a_grid_of_nothing",
    "atomics_of_many_programs", "eight_bits_of_the_architecture", "a_load_before_a_view_but_within_its_storage",
]  # fmt: skip
WRONG = {
    "a_load_past_the_end": (
        "MachineFault: out-of-bounds load in 'buffer_load_dword", "workgroup 0, wave 0, lane 63: a load of 4 bytes",
        "tl.load(x + place + 1)",
    ),
    "a_store_past_the_end": (
        "MachineFault: out-of-bounds store in 'buffer_store_dword", "workgroup 1, wave 0, lane 36: a store of 4 bytes",
        "tl.store(out + place, tl.load(x",
    ),
    "two_programs_that_store_one_byte": (
        "MachineFault: write race in 'global_store_dword", "workgroup 1, wave 0, lane 0: a byte that workgroup 0",
        "tl.store(out, tl.program_id(0))",
    ),
}  # fmt: skip
LDS = {"gfx942": 65536, "gfx950": 163840}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What a fresh Python says in this process's environment without Triton's interpreter."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    changed = {**kept, "PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1"}
    return subprocess.run(
        [sys.executable, *arguments], env=changed, cwd=ROOT, capture_output=True, text=True, timeout=240
    )


@pytest.fixture(scope="module")
def told() -> Mapping[str, Mapping[str, str]]:
    """What became of every kernel, of each architecture."""
    found = {}
    for arch in ARCHS:
        done = python(str(HERE / "launched_kernels.py"), arch)
        assert done.returncode == 0, done.stderr
        found[arch] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", RIGHT)
def test_a_kernel_answers_as_torch(told: Mapping[str, Mapping[str, str]], name: str, arch: str) -> None:
    assert told[arch][name] == "right"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", WRONG)
def test_a_fault_ends_the_launch_and_names_the_line_of_the_kernel(
    told: Mapping[str, Mapping[str, str]], name: str, arch: str
) -> None:
    begins, where, line = WRONG[name]
    lines = (HERE / "launched_kernels.py").read_text().splitlines()
    number = next(number for number, text in enumerate(lines, 1) if line in text)
    said = told[arch][name]
    assert said.startswith(begins)
    assert f"(launched_kernels.py:{number}), {where}" in said


@pytest.mark.parametrize("arch", ARCHS)
def test_more_memory_than_a_workgroup_has_is_refused(told: Mapping[str, Mapping[str, str]], arch: str) -> None:
    said = told[arch]["more_memory_than_a_workgroup_has"]
    assert said.startswith("UnsupportedInstruction: ")
    assert said.endswith(f" bytes of LDS: {arch} has {LDS[arch]}")


@pytest.mark.parametrize("arch", ARCHS)
def test_what_no_launch_can_be_is_refused(told: Mapping[str, Mapping[str, str]], arch: str) -> None:
    assert told[arch]["more_waves_than_a_workgroup_has"] == (
        "UnsupportedInstruction: 32 waves in a workgroup: it has 16 at most, which are 1,024 lanes"
    )
    assert told[arch]["an_argument_elsewhere"] == (
        "UnsupportedInstruction: an argument lies on meta: executed is on the memory of this process"
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_the_hook_of_an_autotuner_s_configuration_is_called(told: Mapping[str, Mapping[str, str]], arch: str) -> None:
    assert told[arch]["the_hook_of_a_configuration"] == "right"


@pytest.mark.parametrize("arch", ARCHS)
def test_a_warm_up_launches_nothing(told: Mapping[str, Mapping[str, str]], arch: str) -> None:
    assert told[arch]["a_warm_up_that_launches_nothing"] == "right"


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_of_the_stand_ins_is_asked_about(told: Mapping[str, Mapping[str, str]], arch: str) -> None:
    others = {
        "the_hook_of_a_configuration",
        "a_warm_up_that_launches_nothing",
        "more_memory_than_a_workgroup_has",
        "more_waves_than_a_workgroup_has",
        "an_argument_elsewhere",
        "executed",
    }
    assert set(told[arch]) == {*RIGHT, *WRONG, *others}


@pytest.mark.parametrize("arch", ARCHS)
def test_executed_instructions_are_counted(told: Mapping[str, Mapping[str, str]], arch: str) -> None:
    # A vector addition alone is four programs of some twenty instructions.
    assert int(told[arch]["executed"]) > 1000


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process as one that has installed nothing and decorates kernels for the compiler."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton_launch, "_installed", None)
    return monkeypatch


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.usefixtures("fresh")
def test_nothing_keeps_either_architecture_from_being_executed(arch: str) -> None:
    assert triton_launch.unsupported(arch) == []


@pytest.mark.usefixtures("fresh")
def test_another_architecture_is_a_reason() -> None:
    assert triton_launch.unsupported("gfx90a") == ["gfx90a: machine code is executed of gfx942 and gfx950"]


def test_kernels_of_the_interpreter_are_a_reason(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("TRITON_INTERPRET", "1")
    reason = "TRITON_INTERPRET is set: kernels are decorated for the interpreter, not for the compiler"
    assert triton_launch.unsupported("gfx942") == [reason]
    with pytest.raises(RuntimeError, match=reason):
        triton_launch.install("gfx942")


@pytest.mark.parametrize("spelling", ["true", "on", "yes"])
def test_kernels_of_the_interpreter_are_a_reason_however_it_is_asked_for(
    fresh: pytest.MonkeyPatch, spelling: str
) -> None:
    fresh.setenv("TRITON_INTERPRET", spelling)
    assert len(triton_launch.unsupported("gfx942")) == 1


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("numba", "numba is not installed: the executor of machine code needs it (the extra `isa`)"),
        ("triton", "triton is not installed"),
    ],
)
def test_what_is_not_installed_is_a_reason(fresh: pytest.MonkeyPatch, module: str, reason: str) -> None:
    find = importlib.util.find_spec
    fresh.setattr(
        importlib.util, "find_spec", lambda name, package=None: None if name == module else find(name, package)
    )
    assert triton_launch.unsupported("gfx942") == [reason]
    with pytest.raises(RuntimeError) as found:
        triton_launch.install("gfx942")
    assert str(found.value) == reason


def test_every_reason_is_told(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("TRITON_INTERPRET", "1")
    fresh.setattr(triton_launch, "_installed", "gfx950")
    assert [reason.split(":")[0] for reason in triton_launch.unsupported("gfx90a")] == [
        "gfx90a", "TRITON_INTERPRET is set", "this process executes gfx950 already"
    ]  # fmt: skip


INSTALL = """
import sys
from impl.executions.isa import triton_launch
asked = [triton_launch.unsupported(arch) for arch in ("gfx942", "gfx950")]
print(asked, [name for name in ("numba", "triton") if name in sys.modules])
for arch in sys.argv[1:]:
    try:
        triton_launch.install(arch)
        print("installed", triton_launch.installed())
    except RuntimeError as error:
        print(error)
"""


def test_asking_imports_no_compiler_and_a_process_executes_one_architecture_for_good() -> None:
    assert python("-c", INSTALL, "gfx950", "gfx950", "gfx942").stdout.splitlines() == [
        "[[], []] []", "installed gfx950", "installed gfx950", "this process executes gfx950 already"
    ]  # fmt: skip


def test_an_executor_that_cannot_be_read_is_compiled_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "isa_0"
    place.mkdir()
    (place / "core.run-1.py311.nbi").write_bytes(b"broken")
    (place / "core.run-1.py311.1.nbc").write_bytes(b"broken")
    (tmp_path / "generated_lanes.py").touch()
    tried = []

    def run_nothing() -> None:
        tried.append(sorted(path.suffix for path in place.iterdir()))
        if tried[-1]:
            raise EOFError("Ran out of input")

    monkeypatch.setattr(machine, "_run_nothing", run_nothing)
    monkeypatch.setattr(machine, "directory", lambda: tmp_path)
    monkeypatch.setattr(lanes, "directory", lambda: tmp_path)
    machine.warm.__wrapped__()
    assert tried == [[".nbc", ".nbi"], []]
    assert (tmp_path / "generated_lanes.py").exists()
