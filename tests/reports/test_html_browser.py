"""Does the page work in a browser: rows unpacked, table filtered, nothing fetched, nothing wider than the window?"""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from oracle.check import OFF_THE_SCALE, Check
from reports.html import write_report
from reports.record import Environment, Record, Seconds

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
        case = f"{op}:heads={heads}," + ",".join(f"{axis}={word}" for axis, word in axes.items()) + f",seed={number}"
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
                    seconds=Seconds(run=draw.random()),
                    finished=1.79e9,
                )
            )
    return made


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(records(), tmp_path_factory.mktemp("report") / "report.html", title="run 7")


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
    # Who is wrong stands first.
    visit.page.locator(".matrix a").nth(0).click()
    expect(visit.page.locator("#case-controls .found")).to_have_text("100 of 400")
    expect(visit.page.locator("#case-controls").get_by_label("By")).to_have_value("vllm-triton")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_fetched_said_or_wider_than_the_window(
    browser: Browser, report: Path, scheme: str, width: int
) -> None:
    visit = Visit(browser, report, viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = visit.page
    expect(page.locator("#case-table tbody tr")).to_have_count(100)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("window.broken") is None
    assert visit.said == []
    assert visit.asked == [report.as_uri()]
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper.removeprefix("rgb(").removesuffix(")").split(","))) < 200) == (scheme == "dark")
    page.close()


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_word_has_contrast(browser: Browser, report: Path, scheme: str) -> None:
    visit = Visit(browser, report, viewport={"width": 1280, "height": 900}, color_scheme=scheme)
    expect(visit.page.locator("#case-table tbody tr")).to_have_count(100)
    # One cell of every colour step, whether or not these records use it.
    visit.page.evaluate(
        "document.querySelector('.legend').append(...[0,1,2,3,4,5,6,7,8].map((step) => Object.assign("
        "document.createElement('span'), { className: `h${step}`, textContent: 'word' })))"
    )
    assert visit.page.evaluate(CONTRAST) == []
    visit.page.close()


def test_without_javascript_failures_and_the_reason_for_the_rest_stand_there(browser: Browser, report: Path) -> None:
    visit = Visit(browser, report, viewport={"width": 390, "height": 844}, java_script_enabled=False)
    expect(visit.page.locator("h1")).to_contain_text("4 of 400 judged cases are wrong, in 2 ways.")
    expect(visit.page.locator(".group").first).to_contain_text("out=1, but should be 2")
    assert "needs JavaScript" in visit.page.locator("#cases").inner_text()
    assert "needs JavaScript" in visit.page.locator("#pair").inner_text()
    visit.page.close()


def test_the_page_can_be_walked_by_keyboard(visit: Visit) -> None:
    visit.page.keyboard.press("Tab")
    assert visit.page.evaluate("document.activeElement.className") == "skip"
    unnamed = "[...document.querySelectorAll('.scroll')].filter((one) => one.tabIndex || !one.ariaLabel).length"
    assert visit.page.evaluate(unnamed) == 0
