"""Does the fixture work in a project of somebody else, one that has packages `reports` and `cases` of its own?"""

import re
import shlex
import zipfile
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

HERE = Path(__file__).parents[2]
pytestmark = pytest.mark.packaging
KERNELS = '''
"""The user's kernels; they use the user's own packages at import and while they run."""
import dataclasses

import cases
import torch
import triton
import triton.language as tl


def right(inputs):
    import reports
    from reports.bounds import SMALLEST

    assert cases.WHOSE == reports.WHOSE == "the user's"
    indices = inputs.indices.flatten(1)
    column = torch.arange(indices.shape[1], device=indices.device)
    keep = (column < inputs.lengths[:, None]) & (indices >= SMALLEST)
    if inputs.num_rows >= 0:
        keep &= indices < inputs.num_rows
    kept = indices[keep]
    inputs.flat[: len(kept)] = kept.to(torch.int32)
    inputs.indptr[:1] = 0
    inputs.indptr[1:] = keep.sum(1).cumsum(0)
    return {"flat": inputs.flat, "indptr": inputs.indptr}


def wrong(inputs):
    return right(dataclasses.replace(inputs, lengths=inputs.lengths - 1))


@triton.jit
def _copy(source, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(source + place, mask=place < count, other=0), mask=place < count)


@triton.jit
def _copy_past_the_end(source, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(source + place, mask=place < count, other=0))


def _launched(kernel, inputs):
    lengths = torch.empty_like(inputs.lengths)
    if len(lengths):
        kernel[(triton.cdiv(len(lengths), 16),)](inputs.lengths, lengths, len(lengths), BLOCK=16)
    return right(dataclasses.replace(inputs, lengths=lengths))


def triton_right(inputs):
    return _launched(_copy, inputs)


def triton_wrong(inputs):
    return _launched(_copy_past_the_end, inputs)
'''
TESTS = """
import kernels
import pytest

OP = "sparse_mla.ragged_from_dense"


@pytest.mark.parametrize("name", ["right", "wrong", "triton_right", "triton_wrong"])
def test_kernel(oracle_check, name):
    import cases
    import reports

    records = oracle_check(OP, getattr(kernels, name), case="rows=2|3|7|130", most=3, on="interpreter")
    assert {record.status for record in records} == {"pass"}
    assert cases.WHOSE == reports.WHOSE == "the user's"


@pytest.mark.parametrize(
    ("op", "function", "how"),
    [("nope", None, {}), (OP, lambda a, b: None, {}), (OP, kernels.right, {"case": "rows=77"}), (OP, kernels.right, {"hats": 3})],
    ids=["op", "signature", "nothing", "keyword"],
)
def test_misuse(oracle_check, op, function, how):
    oracle_check(op, function, **how)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's project with packages whose names are rooms of the house."""
    place = tmp_path_factory.mktemp("project")
    for name, text in {
        "reports/__init__.py": 'WHOSE = "the user\'s"\n',
        "reports/bounds.py": "SMALLEST = 0\n",
        "cases/__init__.py": 'WHOSE = "the user\'s"\n',
        "kernels.py": KERNELS,
        # Puts the project's directory on sys.path, however pytest is started.
        "conftest.py": "",
        "tests/test_kernels.py": TESTS,
    }.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    return place


def judged_rightly(ran: Any) -> None:
    """Everything that a run of the project's tests in the interpreter should have said."""
    assert ran.code == 1, ran.said
    messages = ran.messages
    assert messages["test_kernel[right]"] == messages["test_kernel[triton_right]"] == "", ran.said
    wrong = messages["test_kernel[wrong]"]
    assert re.match(
        r"sparse_mla.ragged_from_dense: \d+ failed of \d+ cases: wrong on interpreter \(\d+ passed\)\n", wrong
    )
    assert "\nas if the last column of a row's length were left out (length-off-by-one): " in wrong
    assert re.search(r"\n  indptr\[\d+\]=\d+, but should be \d+: row starts are sums of whole numbers; ", wrong)
    assert (
        "\n    again: pytest 'tests/test_kernels.py::test_kernel[wrong]' --oracle-on interpreter --oracle-case "
        in wrong
    )
    assert wrong.count("again: ") == 3
    past = messages["test_kernel[triton_wrong]"]
    assert "out-of-bounds store in _copy_past_the_end, program (0, 0, 0), lane " in past
    assert "past the end of argument out" in past
    for name, sentence in {
        "op": "unknown op 'nope': the ops are ",
        "signature": "lambda(a, b) cannot be called with one argument: should take the inputs of sparse_mla.ragged_from_dense",
        "nothing": "case pattern 'rows=77': no smoke case has rows=77",
        "keyword": "there is no keyword 'hats': there are cases, case, on, ",
    }.items():
        message = messages[f"test_misuse[{name}]"]
        assert message.startswith("oracle_check: ")
        assert sentence in message
        assert "\n" not in message
    assert "foreign_cases" not in ran.said


ON = ("--oracle-on", "interpreter")


def test_a_kernel_is_judged_and_each_side_sees_its_own_packages(installed: Any, project: Path) -> None:
    ran = installed.pytest(project, *ON)
    judged_rightly(ran)
    line = re.search(r"again: (pytest .* --oracle-on interpreter --oracle-case .*)", ran.messages["test_kernel[wrong]"])
    assert line is not None
    again = installed.pytest(project, *shlex.split(line[1])[1:])
    assert again.code == 1
    assert "1 failed of 1 case: wrong on interpreter\n" in again.messages["test_kernel[wrong]"]
    assert line[1] in again.said


def test_the_same_where_the_directory_stands_first_on_the_path(installed: Any, project: Path) -> None:
    judged_rightly(installed.pytest(project, *ON, begin=("python", "-m", "pytest")))


def test_the_same_in_the_workers_of_xdist_and_with_an_ini_value(installed: Any, project: Path) -> None:
    judged_rightly(installed.pytest(project, "-o", "oracle_on=interpreter", "-n", "2"))


def test_an_ini_value_that_means_nothing_is_misuse(installed: Any, project: Path) -> None:
    ran = installed.pytest(project, "-o", "oracle_on=moon")
    assert ran.code == 4
    assert "ERROR: oracle_on = moon: should be one of interpreter, cuda, hip" in ran.said


def test_a_case_that_no_test_asks_is_misuse(installed: Any, tmp_path: Path) -> None:
    (tmp_path / "test_cast.py").write_text(
        "def test_cast(oracle_check):\n    assert oracle_check('formats.cast', lambda inputs: None) == ()\n"
    )
    case = (
        "sparse_mla.ragged_from_dense:rows=2,width=6,form=split,indices=int64_wide,lengths=hostile,length_dtype=int32,"
        "bound=negative,entries=holes,layout=contiguous,seed=0"
    )
    ran = installed.pytest(tmp_path, "--oracle-case", case)
    assert ran.code == 4
    assert "--oracle-case: no test asked a case of sparse_mla.ragged_from_dense" in ran.said


def test_a_compiled_kernel_without_a_device_is_told_so(installed: Any, project: Path) -> None:
    ran = installed.pytest(project, "-k", "test_kernel and triton_right")
    assert (
        "triton_right launched the compiled Triton kernel _copy on the CPU, without a device: Triton's interpreter needs "
        "TRITON_INTERPRET=1 in the environment before the kernel is decorated; pytest sets it with --oracle-on interpreter"
    ) in ran.messages["test_kernel[triton_right]"]


def test_outputs_may_be_imported_where_their_name_is_free(installed: Any, tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "__init__.py").write_text('WHOSE = "the user\'s"\n')
    (tmp_path / "test_cast.py").write_text(
        dedent("""
        import torch
        from cases.formats.cast import Outputs

        import reports


        def decoded(inputs):
            from cases.formats import cast

            assert cast.Outputs is Outputs and type(inputs) is cast.Inputs
            assert reports.WHOSE == "the user's"
            return Outputs(inputs.source.view(torch.float8_e8m0fnu).to(inputs.out.dtype))


        def test_cast(oracle_check):
            oracle_check("formats.cast", decoded, case="format=float8_e8m0fnu,direction=decode", on="interpreter")
        """)
    )
    ran = installed.pytest(tmp_path, begin=("python", "-m", "pytest"))
    assert ran.code == 0, ran.said


def test_the_wheel_holds_the_four_packages_and_the_plugin(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "cases", "impl", "oracle", "reports", "mla_oracle_pytest.py",
    }  # fmt: skip


def test_an_editable_installation_has_the_plugin_too(fresh: Callable[..., Any], tmp_path: Path) -> None:
    editable = fresh("-e", str(HERE))
    where = editable.run(tmp_path, "python", "-c", "import mla_oracle_pytest; print(mla_oracle_pytest.HOUSE)")
    assert where.stdout.strip() == str(HERE), where.stderr
    assert "--oracle-on={interpreter,cuda,hip}" in editable.run(tmp_path, "pytest", "--help").stdout
