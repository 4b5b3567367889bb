"""Does every way to fail get its own status, and a sentence that says what happened?"""

import dataclasses
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cases.memory import named_tensors
from cases.precision import Precision
from impl.executions import compile_time
from impl.implementation import Impl
from oracle.check import OFF_THE_SCALE
from oracle.laws import Mutant
from reports.capsule import CapsuleError, read_capsule, write_capsule
from reports.environment import environment
from reports.execute import HARNESS, Trial, attempt, device_is_dead, diagnose, execute, of_lost_device
from reports.record import LOST, Environment, Record

HERE = Environment(machine="m", python="3", torch="2", triton="3", numpy="2", device="cpu")


@pytest.fixture
def ask(standins: ModuleType) -> Callable[..., Trial]:
    def asked(impl: str | Impl, **axes: Any) -> Trial:
        found = impl if isinstance(impl, Impl) else next(one for one in standins.IMPLS if one.name == impl)
        return attempt(standins.DoubleCase(**axes), found, "interpreter", HERE, "worker")

    return asked


def test_a_right_answer_passes_and_its_record_is_complete(ask: Callable[..., Trial]) -> None:
    record = ask("standin-right").record
    assert (record.status, record.reasons, record.diagnosis) == ("pass", (), ())
    assert (record.op, record.impl, record.on, record.worker) == (
        "standin.double",
        "standin-right",
        "interpreter",
        "worker",
    )
    assert record.checks[0].count == 4
    assert record.precision == Precision()
    assert len(record.fingerprint) == len(record.source) == 64
    assert record.seconds.run > 0
    assert record.finished > 0


def test_the_fingerprint_is_of_the_outputs(ask: Callable[..., Trial]) -> None:
    first, again, other = (ask("standin-right", seed=seed).record.fingerprint for seed in (0, 0, 1))
    assert first == again != other
    assert ask("standin-wrong").record.fingerprint != first
    assert ask("standin-naps").record.fingerprint == first


def test_a_mutants_answer_is_recognised_bit_for_bit(ask: Callable[..., Trial]) -> None:
    record = ask("standin-wrong").record
    assert record.status == "fail"
    assert record.checks[0].use == OFF_THE_SCALE
    assert record.diagnosis == ("as if the last row were one too large (last-row-late)",)


def test_an_answer_near_a_mutant_is_said_to_be_near_it(ask: Callable[..., Trial]) -> None:
    assert ask("standin-own-wrong", sign="minus").record.diagnosis == (
        "closest to: as if the sign were lost (sign-lost)",
    )


def test_an_answer_like_no_mutant_gets_no_diagnosis(ask: Callable[..., Trial]) -> None:
    assert ask("standin-own-wrong", sign="plus", rows=5).record.diagnosis == ()


@pytest.mark.parametrize(
    ("impl", "status", "reason"),
    [
        ("standin-raises", "error", r"ArithmeticError: no doubling today \(standin_ops.py:\d+\)"),
        ("standin-returns-nothing", "error", "run returned NoneType, but should return standin_ops.Outputs"),
        (
            "standin-writes-outside",
            "memory",
            "out: 1 bytes were written outside its elements, the first at byte -253 .*",
        ),
        ("standin-writes-input", "memory", "x: .* bytes were written though it is an input, .*"),
    ],
)
def test_a_fault_has_its_status_and_one_sentence(
    ask: Callable[..., Trial], impl: str, status: str, reason: str
) -> None:
    record = ask(impl).record
    assert record.status == status
    (sentence,) = record.reasons
    assert __import__("re").fullmatch(reason, sentence), sentence
    assert record.checks == ()


def test_every_declared_reason_is_kept_and_nothing_runs(ask: Callable[..., Trial], standins: ModuleType) -> None:
    declines = next(one for one in standins.IMPLS if one.name == "standin-declines")
    trial = ask(dataclasses.replace(declines, run=lambda inputs: 1 / 0))
    assert trial.record.status == "unsupported"
    assert trial.record.reasons == ("rows=4: no fours", "and no sevens either")
    assert (trial.inputs, trial.outputs) == (None, None)


def test_a_case_whose_judge_looks_at_nothing_is_vacuous(standins: ModuleType) -> None:
    assert execute(standins.EmptyCase(), standins.IMPLS[0], "interpreter", HERE).status == "vacuous"


def made(standins: ModuleType, run: Callable[[Any], Any], name: str = "standin-made", **other: Any) -> Impl:
    return dataclasses.replace(standins.IMPLS[0], name=name, run=run, **other)


def test_the_suspect_answers_into_poison_and_cannot_reach_the_pristine_inputs(
    ask: Callable[..., Trial], standins: ModuleType
) -> None:
    seen: dict[str, int] = {}

    def run(inputs: Any) -> Any:
        seen.update({name: tensor.data_ptr() for name, tensor in named_tensors(inputs)})
        seen["first"] = int(inputs.out[0])
        return standins.right(inputs)

    trial = ask(made(standins, run))
    assert seen["first"] == 0x7B7B7B7B7B7B7B7B
    assert trial.record.status == "pass"
    assert all(tensor.data_ptr() != seen[name] for name, tensor in named_tensors(trial.inputs))


def test_a_missing_or_misshapen_output_fails(ask: Callable[..., Trial], standins: ModuleType) -> None:
    for run in (
        lambda inputs: standins.Outputs(inputs.out[:2]),
        lambda inputs: standins.Outputs(inputs.x.float() * 2),
    ):
        assert ask(made(standins, run)).record.status == "fail"


@pytest.mark.parametrize("error", [SystemExit(0), RecursionError("deep"), ValueError(""), MemoryError()])
def test_whatever_the_suspect_raises_is_its_error(
    ask: Callable[..., Trial], standins: ModuleType, error: BaseException
) -> None:
    def run(inputs: Any) -> Any:
        raise error

    record = ask(made(standins, run)).record
    assert record.status == "error"
    assert record.reasons[0].startswith(type(error).__name__)
    assert not record.reasons[0].startswith(HARNESS)


def test_an_interrupt_is_the_users(ask: Callable[..., Trial], standins: ModuleType) -> None:
    def run(inputs: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(made(standins, run))


@pytest.mark.parametrize(
    ("room", "name", "doing"),
    [("cases", "build", "building the inputs"), ("oracle", "judge", "judging"), ("oracle", "reference", "judging")],
)
def test_the_harness_blames_itself_for_its_own_faults(
    ask: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch, room: str, name: str, doing: str
) -> None:
    def broken(*_: object) -> None:
        raise LookupError("no formula")

    module = sys.modules[f"{room}.standin.double"]
    monkeypatch.setattr(module, name, broken)
    if name == "reference":
        monkeypatch.setattr(module, "judge", lambda *_: module.reference())
    record = ask("standin-right").record
    assert record.status == "error"
    assert record.reasons[0].startswith(f"{HARNESS}{doing}: LookupError: no formula (test_execute.py:")


def test_a_broken_declaration_is_never_unsupported(ask: Callable[..., Trial], standins: ModuleType) -> None:
    def unsupported(case: Any, execution: Any) -> list[str]:
        raise AttributeError("typo")

    record = ask(made(standins, standins.right, unsupported=unsupported)).record
    assert record.status == "error"
    assert record.reasons[0].startswith(f"{HARNESS}asking what is unsupported: AttributeError: typo")


def test_the_diagnosis_says_when_time_ran_out(standins: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reports.execute._DIAGNOSIS_SECONDS", -1.0)
    inputs = standins.build(standins.DoubleCase())
    oracle = sys.modules["oracle.standin.double"]
    assert diagnose(oracle, inputs, standins.wrong(inputs)) == ("only 0 of 2 wrong answers were compared in time",)


def test_nan_in_one_place_does_not_hide_the_nearest_mutant(standins: ModuleType) -> None:
    @dataclasses.dataclass(frozen=True)
    class Floats:
        out: torch.Tensor

    oracle = ModuleType("oracle.floats")
    right, wrong = torch.ones(64), torch.full((64,), 3.0)
    wrong[5] = float("nan")
    vars(oracle).update(
        reference=lambda inputs: Floats(right),
        MUTANTS=(
            Mutant("tripled", "it were tripled", lambda inputs: Floats(wrong)),
            Mutant("no", "no", lambda inputs: None),
        ),
    )
    assert diagnose(oracle, None, Floats(wrong.clone())) == ("as if it were tripled (tripled)",)
    assert diagnose(oracle, None, Floats(wrong * 1.01)) == ("closest to: as if it were tripled (tripled)",)
    assert diagnose(oracle, None, Floats(torch.full((64,), 40.0))) == ()


def test_a_device_is_dead_when_it_no_longer_synchronises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert device_is_dead("cuda")
    assert device_is_dead("hip")
    assert not device_is_dead("interpreter")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("reports.execute.device_of", lambda execution: "cpu")
    assert not device_is_dead("cuda")


@pytest.mark.parametrize(
    ("reason", "lost"),
    [
        ("AcceleratorError: CUDA error: an illegal memory access was encountered (x.py:1)", False),
        ("AcceleratorError: CUDA error: misaligned address (x.py:1)", False),
        ("AcceleratorError: HIP error: unspecified launch failure (x.py:1)", False),
        ("AcceleratorError: CUDA error: device-side assert triggered (x.py:1)", False),
        ("AcceleratorError: CUDA error: uncorrectable ECC error encountered (x.py:1)", True),
        ("AcceleratorError: HIP error: unknown error (x.py:1)", True),
        ("RuntimeError: No HIP GPUs are available (x.py:1)", True),
        (f"{HARNESS}moving the inputs: AcceleratorError: an illegal memory access was encountered (x.py:1)", True),
    ],
)
def test_a_kernel_that_breaks_its_device_is_told_from_a_device_that_went_away(reason: str, lost: bool) -> None:
    known = {"case": "o.p:seed=0", "op": "o.p", "impl": "x", "on": "hip", "status": "error", "environment": HERE}
    record = Record(**known, reasons=(reason, "more"))
    found = of_lost_device(record)
    assert found.infrastructure == lost
    if not lost:
        assert found == record
        return
    assert found.reasons == (f"{LOST}{reason.replace(HARNESS, 'while ')}", "more")


def test_the_time_that_compilation_took_is_told(
    ask: Callable[..., Trial], standins: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = SimpleNamespace(compilation=SimpleNamespace(listener=None))
    monkeypatch.setattr(compile_time, "_knobs", lambda: knobs)
    monkeypatch.setattr("reports.execute.device_of", lambda execution: "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def compiles(inputs: Any) -> Any:
        knobs.compilation.listener(times=SimpleNamespace(total=250_000), cache_hit=False)
        return standins.right(inputs)

    impl = made(standins, compiles)
    record = attempt(standins.DoubleCase(), impl, "cuda", HERE).record
    assert (record.status, record.seconds.compile) == ("pass", 0.25)
    record = attempt(standins.DoubleCase(), impl, "cuda", HERE, law="L1 negation").record
    assert record.seconds.compile == 0.5
    monkeypatch.setattr(compile_time, "_knobs", lambda: pytest.fail("the interpreter compiles nothing"))
    assert ask("standin-right").record.seconds.compile == 0.0


def test_the_environment_names_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment("interpreter").arch == platform.machine()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert environment("hip").arch == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for properties, hip, arch in (
        (SimpleNamespace(name="MI355X", gcnArchName="gfx950:sramecc+:xnack-", major=9, minor=5), "7.0", "gfx950"),
        # What torch puts there for CUDA is the name of the device.
        (SimpleNamespace(name="H200", gcnArchName="H200", major=9, minor=0), None, "sm_90"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, found=properties: found)
        monkeypatch.setattr(torch.version, "hip", hip)
        used = environment("cuda")
        assert used.arch == arch
        assert used.device.startswith(f"{properties.name} ({arch}")


def test_describing_the_environment_imports_no_kernel_language() -> None:
    script = (
        "import sys; import reports.sweep, reports.plan, reports.commands; from reports.environment import environment;"
        "e = environment('interpreter'); assert e.triton, e;"
        "found = {'triton', 'vllm', 'aiter'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": "."})


def test_an_environment_names_the_tree_that_was_pointed_at(tmp_path: Path) -> None:
    assert environment("interpreter", tmp_path).vllm == str(tmp_path)
    (tmp_path / "vllm" / "triton_utils").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "_version.py").write_text("__version__ = version = '1.2.3'\n")
    assert environment("interpreter", tmp_path).vllm == f"1.2.3 in {tmp_path}"
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(tmp_path), *identity, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    assert environment("interpreter", tmp_path).vllm.startswith("1.2.3@")


class TestCapsule:
    def test_a_trial_is_read_back_with_its_guards_and_strides(
        self, ask: Callable[..., Trial], standins: ModuleType, tmp_path: Path
    ) -> None:
        trial = ask("standin-wrong", seed=5)
        record, inputs = read_capsule(write_capsule(tmp_path / "a.safetensors", trial))
        assert record == trial.record
        again = attempt(standins.DoubleCase(seed=5), standins.IMPLS[1], "interpreter", HERE, inputs=inputs).record
        assert (again.status, again.fingerprint) == ("fail", record.fingerprint)

    def test_the_bytes_of_the_capsule_count_not_those_of_the_builder(
        self, ask: Callable[..., Trial], standins: ModuleType, tmp_path: Path
    ) -> None:
        trial = ask("standin-right")
        trial.inputs.x[0] = 12345
        _, inputs = read_capsule(write_capsule(tmp_path / "a.safetensors", trial))
        assert int(inputs.x[0]) == 12345

    def test_a_capsule_is_never_overwritten(self, ask: Callable[..., Trial], tmp_path: Path) -> None:
        path = write_capsule(tmp_path / "a.safetensors", ask("standin-right"))
        with pytest.raises(CapsuleError, match="never overwritten"):
            write_capsule(path, ask("standin-right"))
        with pytest.raises(CapsuleError, match="no inputs to keep"):
            write_capsule(tmp_path / "b.safetensors", ask("standin-declines"))

    @pytest.mark.parametrize(
        ("old", "new", "sentence"),
        [
            ('"capsule":1', '"capsule":9', "capsule schema 9, but this version of mla-oracle reads 1"),
            ('"capsule":1', '"castle":1', "capsule schema None"),
            ('"status":"pass"', '"status":"good"', "Invalid enum value 'good'.*should be a capsule"),
            ("rows=4", "hats=4", "its case cannot be read by this version: .*no axis 'hats'"),
            ('"dtype":"int64"', '"dtype":"int6400"', "dtype 'int6400', which torch .* does not know"),
            ('"shape":[4]', '"shape":[400000]', "does not fit its storage"),
            ('"x":{', '"y":{', "a capsule is a safetensors file|holds the inputs"),
        ],
    )
    def test_a_wrong_capsule_is_refused_in_one_sentence(
        self, ask: Callable[..., Trial], tmp_path: Path, old: str, new: str, sentence: str
    ) -> None:
        from safetensors import safe_open
        from safetensors.torch import load_file, save_file

        path = write_capsule(tmp_path / "a.safetensors", ask("standin-right"))
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata()
        assert old in metadata["mla-oracle"]
        edited = {"mla-oracle": metadata["mla-oracle"].replace(old, new)}
        save_file(load_file(str(path)), str(tmp_path / "b.safetensors"), metadata=edited)
        with pytest.raises(CapsuleError, match=sentence) as caught:
            read_capsule(tmp_path / "b.safetensors")
        assert "\n" not in str(caught.value)

    def test_other_files_are_no_capsules(self, tmp_path: Path) -> None:
        from safetensors.torch import save_file

        (tmp_path / "a.safetensors").write_bytes(b"PK\x03\x04 no tensors here")
        save_file({"x": torch.zeros(1)}, str(tmp_path / "b.safetensors"))
        save_file({"x": torch.zeros(1)}, str(tmp_path / "c.safetensors"), metadata={"mla-oracle": "[1]"})
        for name, sentence in (
            ("a", "a capsule is a safetensors file"),
            ("b", "no capsule"),
            ("c", "not a JSON object"),
        ):
            with pytest.raises(CapsuleError, match=sentence):
                read_capsule(tmp_path / f"{name}.safetensors")
        with pytest.raises(CapsuleError, match=r"missing.safetensors"):
            read_capsule(tmp_path / "missing.safetensors")


def test_records_of_a_trial_survive_their_line(ask: Callable[..., Trial]) -> None:
    import msgspec

    for name in ("standin-right", "standin-wrong", "standin-raises", "standin-declines"):
        record = ask(name).record
        assert msgspec.json.decode(msgspec.json.encode(record), type=Record) == record
