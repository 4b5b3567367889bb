"""Does the page work in a browser: rows unpacked, table filtered, nothing fetched, nothing wider than the window?"""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from impl.executions.aot.report import Asked, Report, Row, Unasked
from impl.executions.aot.resources import Resources
from oracle.check import OFF_THE_SCALE, Check
from reports.diff import Change, Diff, Differing, Growth, Move, Slowdown
from reports.history import History, Point, Step, Trend
from reports.html import write_report
from reports.html.difference import write_diff
from reports.html.trend import write_history
from reports.prove import Kill, Proof
from reports.record import Attempt, Environment, Record, Seconds

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync",
)  # fmt: skip

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH (Debian: apt-get install chromium)"),
]

WIDTHS = (390, 1280)


def records() -> list[Record]:
    """Four hundred records of two ops with long ids, four failures, one of which carries markup."""
    draw = random.Random(3)
    environment = Environment(
        machine="x86_64, 64 cores", python="3.12.3", torch="2.13.0", triton="3.8.0", numpy="2.4.6", device="cpu"
    )
    made = []
    for number in range(200):
        axes = {f"an_axis_of_a_long_name_{at:02d}": draw.choice(("ordinary", "hostile", "odd")) for at in range(20)}
        heads = (16, 64, 128)[number % 3]
        op = ("sparse_mla.decode", "cache.kv_record_write")[number % 2]
        case = (
            f"{op}:heads={heads},kv_len={number},"
            + ",".join(f"{axis}={word}" for axis, word in axes.items())
            + f",seed={number}"
        )
        for impl in ("ours-triton", "vllm-triton"):
            use = draw.lognormvariate(-2, 0.5)
            check = Check(output="out", measure="bounded", use=min(use, 0.9), count=64, got="0.25", want="0.24 ±0.1")
            status, checks, reasons = "pass", (check,), ()
            if impl == "vllm-triton" and number in (3, 33, 63):
                status = "fail"
                why = "this output is exact, bit for bit; 3 of 64 elements differ"
                checks = (
                    Check(
                        output="out", measure="exact", use=OFF_THE_SCALE, wrong=3, count=64, got="1", want="2", why=why
                    ),
                )
            if impl == "vllm-triton" and number == 5:
                status, checks, reasons = "error", (), ("</script><script>window.broken = true</script>",)
            made.append(
                Record(
                    case=case,
                    op=op,
                    impl=impl,
                    on="interpreter",
                    status=status,
                    checks=checks,
                    reasons=reasons,
                    environment=environment,
                    seconds=Seconds(run=draw.random(), compile=0.1 if number == 7 else 0.0),
                    attempts=(Attempt(status="hang", reasons=("no answer after 300 s",)),) if number == 9 else (),
                    finished=1.79e9,
                )
            )
    return made


def unsupported() -> list[Record]:
    """Records without a verdict, whose reasons are as long as real ones."""
    why = (
        "head_dim=512: the compiled library takes 128, 192 or 576 lanes a head, and none of its tables names another",
        "arch=gfx942: should_be_one_of_the_architectures_that_the_release_was_built_for=gfx950",
    )
    return [
        msgspec.structs.replace(record, status="unsupported", checks=(), reasons=why, seconds=Seconds())
        for record in records()[400 - 6 :]
    ]


def proofs() -> tuple[Proof, ...]:
    case = records()[0].case
    kills = (
        Kill(
            op="sparse_mla.decode",
            mutant="caught",
            pitfall="x",
            observable=6,
            caught=6,
            caught_on=case,
            caught_by="out=1",
        ),
        Kill(op="sparse_mla.decode", mutant="survivor", pitfall="y", observable=6, missed_on=case),
    )
    return (Proof(op="sparse_mla.decode", level="default", kills=kills, clean=9, alarms=(), looseness=(2.0,)),)


def compiled() -> Report:
    """Twelve configurations of three kernels with long names: one needs too much memory, one killed its compiler."""
    made = []
    for number in range(12):
        taken = Resources(
            vgpr=128 + number, agpr=64, sgpr=96, vgpr_spills=number % 5, sgpr_spills=3, scratch=4096 * (number % 5),
            lds=16384 * number, lds_limit=163840, waves=2.5, limit="launch",
            matrix={"v_mfma_f32_16x16x32_bf16": 1234, "v_mfma_f32_32x32x64_f8f6f4": number}, code=123456, instructions=12345,
        )  # fmt: skip
        asked = Asked(op="sparse_mla.decode", impl="vllm-triton", call=records()[0].case, position=0, inputs="values")
        row = Row(
            kernel=f"_a_kernel_of_a_rather_long_name_{number % 3}", module="vllm.a.module.of.a.rather_long_name",
            arch=("gfx942", "gfx950")[number // 3 % 2], key=str(number),
            constants={**{f"A_CONSTANT_{at}": "True" for at in range(12)}, "BLOCK": str(number)}, options={"num_warps": "4"},
            arguments="query:*bf16/16/32 capacity:i32", asked=(asked,), notes=("inline assembly",), resources=taken,
            failure="lds" if number == 11 else "", sentence="it needs more than there is" if number == 11 else "", seconds=1.0,
        )  # fmt: skip
        made.append(row)
    made.append(
        msgspec.structs.replace(
            made[0], key="x", kernel="</h3><script>window.broken = true</script>", failure="crash", sentence="<b>died</b>",
            resources=None,
        )
    )  # fmt: skip
    why = "head_dim=512: the compiled library takes 128, 192 or 576 lanes a head, and none of its tables names another"
    unasked = Unasked(op="dcp.decode", impl="vllm-triton", arch="gfx942", call=records()[0].case, reasons=(why,))
    broken = msgspec.structs.replace(unasked, broke=True, reasons=("its wrapper raised RuntimeError: no",))
    return Report(
        triton="3.9.0", torch="2.13", vllm="/a/path/of/many/words/vllm", arches=("gfx942", "gfx950"), rows=tuple(made),
        unasked=(unasked, broken),
    )  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "report.html"
    return write_report(records(), out, title="run 7", proofs=proofs(), compiled=compiled(), missing=2, state="stopped")


@pytest.fixture(scope="module")
def short_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every part of the page with few lines in each."""
    out = tmp_path_factory.mktemp("short") / "report.html"
    few = [*records()[4:24], *unsupported()]
    return write_report(few, out, title="run 7", proofs=proofs(), compiled=compiled(), missing=2, state="stopped")


@pytest.fixture(scope="module")
def difference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diff of one change of each of three classes, in long words."""
    found = records()
    changes = [
        Change(
            kind=kind, case=one.case, op=one.op, impl=one.impl, on=one.on, law="", was=was, now=now, before=one, after=one,
            sentence=f"{kind}, and a long sentence on out[3, 17, 211]=0.734375, but should be 0.367188 ±0.00123",
        )
        for kind, was, now, one in (
            ("new_failure", "pass", "fail", found[7]), ("lost_coverage", "pass", "no record", found[9]),
            *(("bit_change", "pass", "pass", found[at]) for at in range(20, 40)),
        )
    ]  # fmt: skip
    move = Move(before=0.2, after=0.31, ratio=1.55, up=48, down=2, p=1e-9)
    growth = Growth(
        op=found[0].op, impl="ours-triton", on="interpreter", axis="heads", value="16", cases=60, changed=50, median=move,
        tail=move, steepest=found[0].case, sentence="it grew",
    )  # fmt: skip
    slow = Slowdown(
        op=found[0].op, impl="ours-triton", on="interpreter", cases=50, before=0.2, after=0.4, ratio=2.0, low=1.8, high=2.2,
        noise=1.3, elsewhere=1.0, seen=True, sentence="",
    )  # fmt: skip
    made = Diff(
        before="/a/path/of/many/words/monday", after="/a/path/of/many/words/tuesday", changes=tuple(changes),
        environments=(Differing(field="vllm", before=("0.33.0",), after=("0.34.0@0123456789abcdef0123456789abcdef",)),),
        growths=(growth,), times=(slow,), unchanged=9, unjudged=1, notes=("monday was stopped half way",),
    )  # fmt: skip
    return write_diff(made, tmp_path_factory.mktemp("diff") / "diff.html")


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A history of two series, one of which stepped."""
    step = Step(
        position=6, before=0.1, after=0.2, tail_before=0.4, tail_after=0.8, ratio=2.0, up=80, down=3, p=0.0004,
        sentence="the level rose 2 times with run-6",
    )  # fmt: skip
    uses = (0.1,) * 6 + (0.2,) * 6
    series = [
        Trend(
            op=op, impl="ours-triton", on="interpreter", arch="", median=uses, tail=uses, worst=uses, level=uses,
            count=(9,) * 12, failed=(0,) * 12, steps=steps, drifts=(),
        )
        for op, steps in (("sparse_mla.decode", (step,)), ("cache.kv_record_write", ()))
    ]  # fmt: skip
    runs = tuple(Point(name=f"run-{number}", created=1.79e9, records=9) for number in range(12))
    made = History(runs=runs, trends=tuple(series), left_out=("run-99 is still being written",))
    return write_history(made, tmp_path_factory.mktemp("history") / "history.html", title="nightly")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


class Visit:
    """A page with what its console said and what it asked for besides itself."""

    def __init__(self, browser: Browser, report: Path, **context: object) -> None:
        self.page: Page = browser.new_page(**context)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(report.as_uri())


@pytest.fixture
def visit(browser: Browser, report: Path) -> Iterator[Visit]:
    visit = Visit(browser, report, viewport={"width": 1280, "height": 900})
    expect(visit.page.locator("#case-table tbody tr")).to_have_count(100)
    yield visit
    visit.page.close()


def test_rows_are_unpacked_and_the_worst_stand_first(visit: Visit) -> None:
    expect(visit.page.locator("#case-controls .found")).to_have_text("400 of 400")
    words = visit.page.locator("#case-table tbody tr td:first-child").all_text_contents()
    assert words[:5] == ["fail", "fail", "fail", "error", "pass"]


def test_terms_and_choices_filter_the_rows(visit: Visit) -> None:
    found = visit.page.locator("#case-controls .found")
    terms = visit.page.get_by_label("Terms")
    terms.fill("heads=64")
    expect(found).to_have_text("134 of 400")
    terms.fill("heads=6")
    expect(found).to_have_text("0 of 400")
    terms.fill("heads=64 -vllm")
    expect(found).to_have_text("67 of 400")
    visit.page.get_by_label("Status").select_option("wrong")
    expect(found).to_have_text("0 of 400")
    terms.fill("")
    expect(found).to_have_text("4 of 400")
    visit.page.get_by_role("button", name="Clear").click()
    expect(found).to_have_text("400 of 400")


def test_headers_sort_and_pages_turn(visit: Visit) -> None:
    visit.page.get_by_role("button", name="Time").click()
    expect(visit.page.locator("th[aria-sort=descending]")).to_have_text("Time")
    expect(visit.page.locator("#case-pages .found")).to_have_text("page 1 of 4")
    visit.page.get_by_role("button", name="Next").click()
    expect(visit.page.locator("#case-pages .found")).to_have_text("page 2 of 4")
    visit.page.get_by_role("button", name="Time").click()
    expect(visit.page.locator("th[aria-sort=ascending]")).to_have_text("Time")
    expect(visit.page.locator("#case-pages .found")).to_have_text("page 1 of 4")


def test_a_row_opens_to_the_line_that_runs_it_again(visit: Visit) -> None:
    row = visit.page.locator("#case-table tbody tr").first
    row.locator("summary").click()
    wrong = next(record for record in records() if record.status == "fail" and "seed=3" in record.case)
    line = f"mla-oracle replay {wrong.case} --impl vllm-triton --on interpreter"
    assert row.locator("code").text_content() == line
    expect(row.locator(".why")).to_contain_text("out=1, but should be 2: this output is exact, bit for bit")


def test_the_map_of_two_axes_leads_to_its_cases(visit: Visit) -> None:
    visit.page.locator("#pair-controls").get_by_label("Down").select_option(label="heads")
    rows = visit.page.locator("#pair-map tbody tr")
    expect(rows).to_have_count(3)
    visit.page.locator("#pair-controls").get_by_label("Shown").select_option("cases")
    cell = rows.nth(1).locator("button").first
    count = cell.text_content()
    cell.click()
    expect(visit.page.locator("#case-controls .found")).to_have_text(f"{count} of 400")
    assert "heads=64" in visit.page.get_by_label("Terms").input_value()


def test_a_cell_of_the_matrix_leads_to_its_cases(visit: Visit) -> None:
    # The columns are the libraries, ours first.
    visit.page.locator(".matrix .entry a").nth(1).click()
    expect(visit.page.locator("#case-controls .found")).to_have_text("100 of 400")
    expect(visit.page.locator("#case-controls").get_by_label("By")).to_have_value("vllm-triton")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_fetched_said_or_wider_than_the_window(
    browser: Browser, report: Path, scheme: str, width: int
) -> None:
    visit = Visit(browser, report, viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = visit.page
    expect(page.locator("#case-table tbody tr")).to_have_count(25 if width == 390 else 100)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("window.broken") is None
    assert visit.said == []
    assert visit.asked == [report.as_uri()]
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper.removeprefix("rgb(").removesuffix(")").split(","))) < 200) == (scheme == "dark")
    page.close()


SCROLLING = """(parts) => [...document.querySelectorAll(parts)]
  .filter((one) => one.scrollWidth > one.clientWidth || one.querySelector("table").getBoundingClientRect().right > innerWidth)
  .map((one) => one.ariaLabel)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_time_and_what_is_unsupported_are_read_on_a_phone_without_scrolling(
    browser: Browser, short_report: Path, scheme: str
) -> None:
    visit = Visit(browser, short_report, viewport={"width": 390, "height": 844}, color_scheme=scheme)
    parts = visit.page.locator("#slowest .scroll, #unsupported .scroll")
    expect(parts).to_have_count(3)
    visit.page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert visit.page.evaluate(SCROLLING, "#slowest .scroll, #unsupported .scroll") == []
    # What stood over a column stands beside its cell.
    label = "(cell) => getComputedStyle(cell, '::before').content"
    assert visit.page.locator("#slowest td").nth(2).evaluate(label) == '"Run"'
    assert visit.page.locator("#unsupported td").first.evaluate(label) == '"Records"'
    visit.page.close()


def test_a_label_beside_a_cell_is_the_head_of_its_column(browser: Browser, short_report: Path) -> None:
    visit = Visit(browser, short_report, viewport={"width": 1280, "height": 844})
    others = visit.page.evaluate(
        "[...document.querySelectorAll('.labelled [data-label]')].filter((cell) => cell.dataset.label !== "
        "cell.closest('table').tHead.rows[0].cells[cell.cellIndex].textContent).map((cell) => cell.outerHTML)"
    )
    assert others == []
    assert visit.page.locator(".labelled [data-label]").count() > 20
    visit.page.close()


HEADS = """[...document.querySelectorAll(".taken tbody tr")].filter((row) => row.cells.length === 12).flatMap((row) =>
  [...row.cells].slice(1).map((cell) => [getComputedStyle(cell, "::before").content,
    `"${row.closest("table").tHead.rows[0].cells[cell.cellIndex].textContent}"`]))
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_kernels_take_is_read_on_a_phone_without_scrolling(
    browser: Browser, short_report: Path, scheme: str
) -> None:
    visit = Visit(browser, short_report, viewport={"width": 390, "height": 844}, color_scheme=scheme)
    expect(visit.page.locator("#compiled .taken")).to_have_count(5)
    visit.page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert visit.page.evaluate(SCROLLING, "#compiled .scroll") == []
    # What stood over a column stands in front of its cell.
    found = visit.page.evaluate(HEADS)
    assert len(found) > 11 * 12 and [cell for cell, head in found if cell != head] == []
    visit.page.close()


def test_what_kernels_take_fits_beside_the_contents(browser: Browser, short_report: Path) -> None:
    visit = Visit(browser, short_report, viewport={"width": 1440, "height": 844})
    assert visit.page.evaluate(SCROLLING, "#compiled .scroll") == []
    assert {cell for cell, _ in visit.page.evaluate(HEADS)} == {"none"}
    visit.page.close()


def test_without_javascript_a_kernel_leads_to_all_its_configurations(browser: Browser, report: Path) -> None:
    visit = Visit(browser, report, viewport={"width": 1280, "height": 844}, java_script_enabled=False)
    expect(visit.page.locator("#verdict .note").last).to_contain_text("2 compilations failed, 1 wrapper broke")
    expect(visit.page.locator("#compiled")).to_contain_text("it needs more than there is")
    # The failures stand first, and the name of one is no markup.
    link = visit.page.locator("#compiled .taken th a").first
    expect(link).to_have_text("</h3><script>window.broken = true</script>")
    opened = visit.page.locator("#compiled details.op[open]")
    expect(opened).to_have_count(0)
    link.click()
    expect(opened).to_have_count(1)
    expect(opened.locator(".taken")).to_contain_text("crash")
    expect(opened.locator(".taken")).to_be_visible()
    visit.page.close()


CONTRAST = """() => {
  const light = (colour) => {
    const linear = (part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    const [red, green, blue] = colour.map((part) => linear(part / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = parts(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const poor = new Set();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    const silent = element.closest("script, noscript, svg, option, select, button:disabled");
    if (silent || !walk.currentNode.data.trim()) continue;
    const [one, other] = [light(parts(getComputedStyle(element).color)), light(behind(element))].sort((a, b) => b - a);
    const ratio = (one + 0.05) / (other + 0.05);
    if (ratio < 4.5) poor.add(`${element.tagName} ${element.className} ${ratio.toFixed(2)}`);
  }
  return [...poor];
}"""


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
@pytest.mark.parametrize("name", ["short_report", "difference", "history"])
def test_a_page_is_accessible_with_everything_open(
    browser: Browser, request: pytest.FixtureRequest, name: str, width: int, scheme: str
) -> None:
    path = request.getfixturevalue(name)
    visit = Visit(browser, path, viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = visit.page
    if name == "short_report":
        expect(page.locator("#case-table tbody tr").first).to_be_visible()
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    # Contrast is asked of every word below, in a hundredth of the time.
    rules = {"color-contrast": {"enabled": False}}
    found = Axe().run(page, options={"resultTypes": ["violations"], "rules": rules})
    assert found.violations_count == 0, found.generate_report()
    assert visit.asked == [path.as_uri()] and visit.said == []
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["report", "difference", "history"])
def test_every_word_has_contrast(browser: Browser, request: pytest.FixtureRequest, name: str, scheme: str) -> None:
    path = request.getfixturevalue(name)
    visit = Visit(browser, path, viewport={"width": 1280, "height": 900}, color_scheme=scheme)
    if name == "report":
        expect(visit.page.locator("#case-table tbody tr")).to_have_count(100)
    # One cell of every colour step, whether or not these records use it.
    visit.page.evaluate(
        "document.querySelector('main').append(...[0,1,2,3,4,5,6,7,8].map((step) => Object.assign("
        "document.createElement('p'), { className: `h${step}`, textContent: 'word' })))"
    )
    visit.page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert visit.page.evaluate(CONTRAST) == []
    visit.page.close()


def test_without_javascript_a_diff_shows_its_classes_and_examples(browser: Browser, difference: Path) -> None:
    visit = Visit(browser, difference, viewport={"width": 390, "height": 844}, java_script_enabled=False)
    expect(visit.page.locator("h1")).to_contain_text("Worse. 1 new failure, 1 question is judged no more and")
    expect(visit.page.locator("#new_failure .why")).to_contain_text("new_failure, and a long sentence")
    hidden = visit.page.locator("#bit_change .more .why").first
    expect(hidden).to_be_hidden()
    visit.page.locator("#bit_change .more > summary").first.click()
    expect(hidden).to_be_visible()
    visit.page.close()


def test_without_javascript_a_history_shows_its_steps_and_charts(browser: Browser, history: Path) -> None:
    visit = Visit(browser, history, viewport={"width": 1280, "height": 844}, java_script_enabled=False)
    expect(visit.page.locator("#events")).to_contain_text("the level rose 2 times with run-6")
    visit.page.locator("#events a").click()
    chart = visit.page.locator("#moved figure > svg").bounding_box()
    assert chart is not None and chart["width"] > 300 and chart["height"] > 100
    visit.page.close()


def test_without_javascript_a_link_opens_what_it_leads_to(browser: Browser, report: Path) -> None:
    visit = Visit(browser, report, viewport={"width": 1280, "height": 844}, java_script_enabled=False)
    visit.page.locator(".matrix th a").first.click()
    expect(visit.page.locator("#axes details[open] .axis").first).to_be_visible()
    visit.page.close()


def test_a_link_opens_what_it_leads_to(visit: Visit) -> None:
    closed = visit.page.locator("#axes details.op:not([open])").first
    name = closed.get_attribute("id")
    visit.page.evaluate(f"location.hash = '{name}'")
    expect(visit.page.locator(f"#{name} .axis").first).to_be_visible()


def test_an_axis_of_many_numbers_is_mapped_by_ranges_that_lead_to_their_cases(visit: Visit) -> None:
    visit.page.locator("#pair-controls").get_by_label("Down").select_option(label="kv_len")
    visit.page.locator("#pair-controls").get_by_label("Shown").select_option("cases")
    row = visit.page.locator("#pair-map tbody tr").filter(has_text="65–128")
    count = row.locator("button").first.text_content()
    row.locator("button").first.press("Enter")
    assert "kv_len=65..128" in visit.page.get_by_label("Terms").input_value()
    expect(visit.page.locator("#case-controls .found")).to_have_text(f"{count} of 400")


def test_what_has_the_focus_can_be_seen(visit: Visit) -> None:
    for _ in range(12):
        visit.page.keyboard.press("Tab")
        style = visit.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert style == "solid", visit.page.evaluate("document.activeElement.outerHTML")
    visit.page.locator("#pair-map button").first.focus()
    visit.page.keyboard.press("Tab")
    assert (
        visit.page.evaluate(
            "document.activeElement.closest('#pair-map') && getComputedStyle(document.activeElement).outlineStyle"
        )
        == "solid"
    )


def test_what_was_asked_again_and_the_law_stand_in_the_opened_row(visit: Visit) -> None:
    visit.page.get_by_label("Terms").fill("before:")
    expect(visit.page.locator("#case-controls .found")).to_have_text("2 of 400")
    row = visit.page.locator("#case-table tbody tr").first
    row.locator("summary").click()
    expect(row.locator(".why").last).to_have_text("hang before: no answer after 300 s")


def test_without_javascript_failures_and_the_reason_for_the_rest_stand_there(browser: Browser, report: Path) -> None:
    visit = Visit(browser, report, viewport={"width": 390, "height": 844}, java_script_enabled=False)
    expect(visit.page.locator("h1")).to_contain_text("4 of 400 judged cases are wrong, in 2 ways.")
    expect(visit.page.locator(".group").first).to_contain_text("out=1, but should be 2")
    assert "needs JavaScript" in visit.page.locator("#cases").inner_text()
    assert "needs JavaScript" in visit.page.locator("#pair").inner_text()
    expect(visit.page.locator("#pair .map").first).to_be_visible()
    expect(visit.page.locator(".state")).to_contain_text(
        "This run stopped before its end. 400 of 402 planned questions"
    )
    expect(visit.page.locator("#proofs")).to_contain_text("survives, missed on")
    visit.page.close()


def test_the_page_can_be_walked_by_keyboard(visit: Visit) -> None:
    visit.page.keyboard.press("Tab")
    assert visit.page.evaluate("document.activeElement.className") == "skip"
    unnamed = "[...document.querySelectorAll('.scroll')].filter((one) => one.tabIndex || !one.ariaLabel).length"
    assert visit.page.evaluate(unnamed) == 0
