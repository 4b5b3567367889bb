"""How does a gate read on the page of a build: Markdown for GitHub's step summary and for Buildkite's annotation?

Closing findings first, then what is only reported, each with its replay line to copy. What does not fit is counted, never
cut in the middle.
"""

from collections.abc import Iterable, Sequence

from reports.gate import KINDS, Finding, GateResult
from reports.known_failures import counted_as
from reports.outputs.escaping import code, fenced, markdown
from reports.outputs.files import MARKDOWN_MARK
from reports.words import plural

# Both pages refuse more than 1 MiB.
MOST_BYTES = 1024 * 1024
_SHOWN_CASES = 5
_ROWS = 200
_KNOWN = 50


def summary(result: GateResult, most: int = MOST_BYTES) -> str:
    """The page, of at most so many bytes."""
    head = "closed" if result.closed else "open"
    sign = "❌" if result.closed else "✅"
    blocks = [f"### {sign} mla-oracle gate: {head}\n\n{markdown(result.sentence)}\n\n{_run(result)}"]
    blocks += _findings("Why it is closed", result.closing, shown=True)
    blocks += _findings("Reported", result.reported, shown=False)
    blocks.append(_table(result))
    blocks += _known(result)
    if result.notes:
        blocks.append("\n".join(["**Notes**", "", *(f"- {markdown(note)}" for note in result.notes)]))
    return _fitted(blocks, most)


def annotation(result: GateResult) -> str:
    """The page as a file of its own, by whose first line the gate knows it again."""
    return f"{MARKDOWN_MARK}\n\n{summary(result, MOST_BYTES - len(MARKDOWN_MARK) - 2)}"


def _fitted(blocks: Sequence[str], most: int) -> str:
    """As many blocks as fit, and the number of those that do not."""
    room = most - len(_left_out(len(blocks)).encode())
    said: list[str] = []
    size = 0
    for block in blocks:
        size += len(block.encode(errors="backslashreplace")) + 2
        if size > room:
            break
        said.append(block)
    rest = len(blocks) - len(said)
    return "\n\n".join(said) + (_left_out(rest) if rest else "\n")


def _left_out(number: int) -> str:
    do = "does" if number == 1 else "do"
    return f"\n\n_{plural(number, 'more block')} {do} not fit here; the gate's JSON has everything._\n"


def _run(result: GateResult) -> str:
    words = [f"Run {code(result.run)}"]
    if result.baseline:
        words.append(f"baseline {code(result.baseline)}")
    for used in result.environments[:3]:
        versions = (
            ("torch", used.torch), ("triton", used.triton), ("vllm", used.vllm), ("aiter", used.aiter),
            ("mla-oracle", used.commit),
        )  # fmt: skip
        said = [f"{used.device} {used.arch}".strip(), used.driver, *(f"{name} {of}" for name, of in versions if of)]
        words.append(markdown(", ".join(filter(None, said))))
    return "; ".join(words)


def _findings(title: str, findings: Sequence[Finding], shown: bool) -> Iterable[str]:
    """A heading for each kind, and a folded block for each finding."""
    for kind, heading in KINDS.items():
        found = [finding for finding in findings if finding.kind == kind]
        if found:
            yield f"#### {title}: {heading} ({len(found)})"
            for number, finding in enumerate(found):
                yield _block(finding, shown and number < _SHOWN_CASES)


def _block(finding: Finding, shown: bool) -> str:
    number = f", {finding.count:,} cases" if finding.count > 1 else ""
    status = f"{finding.status}: " if finding.status not in ("", "pass") else ""
    where = f"<strong>{markdown(finding.place)}</strong>, " if finding.place else ""
    lines = [
        f"<details{' open' if shown else ''}><summary>{where}{markdown(status + finding.title)}{number}</summary>",
        "",
        markdown(finding.sentence),
    ]
    for sentence in finding.details:
        lines += ["", markdown(sentence)]
    if finding.count > 1 and finding.cases:
        lines += ["", *(f"- {code(case)}" for case in finding.cases[:_SHOWN_CASES])]
        if len(finding.cases) > _SHOWN_CASES:
            lines.append(f"- and {len(finding.cases) - _SHOWN_CASES:,} more")
    if finding.records and finding.records[0].capsule:
        lines += ["", f"Capsule: {code(finding.records[0].capsule)}"]
    if finding.replay:
        lines += ["", "See it again:", "", fenced(finding.replay)]
    return "\n".join([*lines, "", "</details>"])


def _table(result: GateResult) -> str:
    """Counts for each op and implementation."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for each in result.judged:
        record = each.record
        word = "known" if each.outcome == "known" else counted_as(record)
        rows.setdefault((record.op, record.impl, record.on), []).append(word)
    if not rows:
        return "No record."
    columns = [
        word
        for word in ("pass", "fail", "memory", "error", "crash", "hang", "vacuous", "known", "unsupported")
        if any(word in words for words in rows.values())
    ]
    lines = [
        f"| op | implementation | on | {' | '.join(columns)} |",
        f"|---|---|---|{'---:|' * len(columns)}",
        *(
            f"| {markdown(op)} | {markdown(impl)} | {markdown(on)} | "
            f"{' | '.join(str(words.count(column) or '') for column in columns)} |"
            for (op, impl, on), words in list(rows.items())[:_ROWS]
        ),
    ]
    if len(rows) > _ROWS:
        lines.append(f"\n{plural(len(rows) - _ROWS, 'more row')}")
    return "\n".join(lines)


def _known(result: GateResult) -> Iterable[str]:
    """The known failures that excuse something, with owner and the day until which they do."""
    held = [use for use in result.uses if use.state == "holds"]
    if held:
        lines = ["| known failure | cases | until | owner | issue | why |", "|---|---:|---|---|---|---|"]
        for use in held[:_KNOWN]:
            known = use.entry.known
            who = " ".join(word for word in (known.impl, known.op, known.case) if word not in ("", "*"))
            lines.append(
                f"| {markdown(who)} | {len(use.excused):,} | {known.expires} | {markdown(known.owner)} | "
                f"{markdown(known.issue)} | {markdown(known.why)} |"
            )
        if len(held) > _KNOWN:
            lines.append(f"\n{len(held) - _KNOWN:,} more")
        yield "\n".join(lines)
