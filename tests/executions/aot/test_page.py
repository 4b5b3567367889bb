"""Can the page of compiled kernels be read by everyone: no script, nothing fetched, nothing wider than the window?"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, sync_playwright

from impl.executions.aot.baseline import compare
from impl.executions.aot.normalise import Shape
from impl.executions.aot.report import Asked, Report, Row, Unasked
from impl.executions.aot.resources import Resources
from reports.html.aot import write_aot

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH (Debian: apt-get install chromium)"),
]


def rows() -> tuple[Row, ...]:
    """A hundred and twenty configurations of twenty kernels, one of which needs too much memory and one of which kills."""
    made = []
    for number in range(120):
        taken = Resources(
            vgpr=number, agpr=0, sgpr=16, vgpr_spills=number % 7, sgpr_spills=0, scratch=4 * (number % 7), lds=2048 * number,
            lds_limit=163840, waves=8.0, limit="waves", matrix={"v_mfma_f32_16x16x32_bf16": number}, code=100, instructions=10,
        )  # fmt: skip
        call = ",".join(f"an_axis_of_a_long_name_{at}=ordinary" for at in range(20))
        asked = Asked(
            op="sparse_mla.decode", impl="ours-triton", call=f"sparse_mla.decode:{call}", position=0, inputs="meta"
        )
        made.append(
            Row(
                kernel=f"_a_kernel_of_a_long_name_{number % 20}",
                module="vllm.a.module.of.a.long.name", arch=("gfx942", "gfx950")[number % 2], key=str(number),
                constants={f"CONSTANT_{at}": "True" for at in range(12)}, options={"num_warps": "4"}, arguments="",
                asked=(asked,), notes=("inline assembly",), resources=taken, shape=Shape(str(number), "", ""),
                failure="lds" if number == 119 else "", sentence="needs too much" if number == 119 else "", seconds=1.0,
            )
        )  # fmt: skip
    made.append(msgspec.structs.replace(made[0], key="x", failure="crash", sentence="died", resources=None, shape=None))
    return tuple(made)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = Unasked(op="dcp.decode", impl="vllm-triton", arch="gfx942", call="x", reasons=("no vllm",))
    broken = msgspec.structs.replace(missing, broke=True, reasons=("its wrapper raised RuntimeError: no",))
    after = Report(triton="3.9.0", torch="2.13", arches=("gfx942", "gfx950"), rows=rows(), unasked=(missing, broken))
    before = msgspec.structs.replace(
        after,
        rows=tuple(
            msgspec.structs.replace(row, resources=msgspec.structs.replace(row.resources, lds=0))
            if row.resources
            else row
            for row in rows()
        ),
    )
    return write_aot(after, compare(before, after), tmp_path_factory.mktemp("page") / "aot.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_the_page_is_accessible_with_everything_open(browser: Browser, page: Path, width: int, scheme: str) -> None:
    asked: list[str] = []
    said: list[str] = []
    visited = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
    visited.on("request", lambda request: asked.append(request.url))
    visited.on("console", lambda message: said.append(message.text))
    visited.goto(page.as_uri())
    visited.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert visited.evaluate("document.documentElement.scrollWidth") == width
    found = Axe().run(visited, options={"resultTypes": ["violations"]})
    assert found.violations_count == 0, found.generate_report()
    assert asked == [page.as_uri()] and said == []
    visited.close()


def test_the_page_stays_small(page: Path) -> None:
    assert page.stat().st_size < 600_000
