"""Is the run right, where did it run, and who answers what?"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from reports import figures
from reports.html.rows import WRONG, judged_use, spelled_counts, status_counts
from reports.kernels import is_triton, judges_kernels, no_kernel_judged
from reports.record import Environment, Record
from reports.words import every, has, plural, was

# Libraries in the order of the matrix's columns; others follow by name.
_LIBRARIES = ("ours", "vllm", "aiter", "torch")
# Up to this many ops the matrix is short enough to stand open.
_FEW_OPS = 12


def answer(records: Sequence[Record], ways: int, missing: int = 0) -> tuple[str, str, str]:
    """Whether the run is right: the status it is coloured as, the answer in a few words, and the sentence.

    ways: the groups of what is wrong. missing: planned cases without a record; with any, nothing is called right. That no
    Triton kernel was judged stands in the first few words.
    """
    status, word, said = _answer(records, ways, missing)
    unjudged = no_kernel_judged(records)
    if not unjudged:
        return status, word, said
    if status == "pass":
        asked = any(is_triton(record.impl) for record in records)
        return "vacuous" if asked else "pass", unjudged, said
    if all(record.status == "unsupported" for record in records):
        return status, word, f"{unjudged} {said}"
    return status, f"{word.removesuffix('.')}, and {unjudged[0].lower()}{unjudged[1:]}", said


def _answer(records: Sequence[Record], ways: int, missing: int) -> tuple[str, str, str]:
    """`answer` of what was judged, whatever it is."""
    counts = status_counts(records)
    wrong = sum(counts[status] for status in WRONG)
    judged = wrong + counts["pass"] + counts["vacuous"]
    late = f" {plural(missing, 'planned case')} {has(missing)} no record yet." if missing else ""
    if not records:
        return "vacuous", "Nothing was run.", f"There is no record, so this page says nothing about any kernel.{late}"
    if not judged:
        said = f"{every(len(records), 'case')} {was(len(records))} unsupported; the reasons are below."
        return "vacuous", "Nothing was judged.", said + late
    if wrong:
        said = f"{wrong:,} of {plural(judged, 'judged case')} {'is' if wrong == 1 else 'are'} wrong, in {plural(ways, 'way')}"
        died = sum(record.infrastructure for record in records)
        lost = f"; {died:,} of them died before there was an answer" if died else ""
        return "fail", "No.", f"{said}{lost}.{late}"
    if counts["vacuous"]:
        said = f"{plural(counts['vacuous'], 'case')} could not have failed; {plural(counts['pass'], 'case')} passed."
        return "vacuous", "Not settled.", said + late
    worst = max(record.use for record in records if record.status == "pass")
    close = f"the closest to its limit used {figures.spelled_use(worst)} of its budget" if worst else "no error at all"
    said = f"{every(judged, 'judged case')} passed; {close}."
    return ("vacuous", "Not finished.", said + late) if missing else ("pass", "Yes, as far as it was asked.", said)


def executions_of(records: Sequence[Record]) -> list[tuple[str, int, str]]:
    """Each execution, its records, and what it says about a GPU."""
    said = []
    for on, number in sorted(Counter(record.on for record in records).items()):
        devices = sorted({record.environment.device for record in records if record.on == on})
        if on == "interpreter":
            words = (
                "no GPU ran. The kernels were interpreted on the CPU: their arithmetic and addressing are judged, "
                "the machine code of a GPU is not."
                if judges_kernels([record for record in records if record.on == on])
                else "no GPU ran, and no Triton kernel was interpreted: torch and host code answered on the CPU."
            )
        elif on.startswith("isa:"):
            chip = on.removeprefix("isa:")
            words = f"no GPU ran. Machine code for {chip} was executed on the CPU, instruction by instruction."
        else:
            words = f"ran on {', '.join(devices)}."
        said.append((on, number, words))
    return said


def environments_of(records: Sequence[Record]) -> dict[str, Any]:
    """The distinct environments as columns, most records first, and the fields in which they differ."""
    tally = Counter(record.environment for record in records)
    found = [environment for environment, _ in tally.most_common()]
    fields = []
    for field in Environment.__struct_fields__:
        absent = "not installed" if field == "triton" else ""
        words = [str(getattr(environment, field)) or absent for environment in found]
        if any(words):
            fields.append((field, words, len(set(words)) > 1))
    on = [sorted({record.on for record in records if record.environment == environment}) for environment in found]
    return {"records": [tally[environment] for environment in found], "on": on, "fields": fields}


def finished_of(records: Sequence[Record]) -> str:
    """When the last record was written; empty when none says it."""
    last = max((record.finished for record in records), default=0.0)
    return datetime.fromtimestamp(last, UTC).strftime("%Y-%m-%d %H:%M UTC") if last > 0 else ""


def matrix_of(records: Sequence[Record]) -> dict[str, Any]:
    """The overview: families of ops, a row for each op and a column for each library.

    A cell holds an entry for every implementation and execution that was judged; those without a verdict share a line. A
    family with a finding stands open, and all of them do when there are few ops.
    """
    answers: dict[str, dict[tuple[str, str], list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        answers[record.op][record.impl, record.on].append(record)
    libraries = sorted({library_of(record.impl) for record in records}, key=_library_order)
    several = len({record.on for record in records}) > 1
    families: dict[str, list[str]] = defaultdict(list)
    for op in sorted(answers):
        families[family_of(op)].append(op)
    lines = []
    for family, ops in families.items():
        rows = [(op, [_cell(op, answers[op], library, several) for library in libraries]) for op in ops]
        own = [record for op in ops for found in answers[op].values() for record in found]
        lines.append(
            {
                "name": family,
                "rows": rows,
                "open": len(answers) <= _FEW_OPS or any(has_finding(record) for record in own),
                **_summary(own),
            }
        )
    return {"libraries": libraries, "families": lines}


def library_of(impl: str) -> str:
    """Whose implementation it is: `vllm` of `vllm-triton`."""
    return impl.partition("-")[0]


def family_of(op: str) -> str:
    """`sparse_mla` of `sparse_mla.decode`."""
    return op.partition(".")[0]


def has_finding(record: Record) -> bool:
    """Whether the record says that something is wrong or not settled."""
    return record.status in WRONG or record.status == "vacuous"


def _library_order(library: str) -> tuple[int, str]:
    return (_LIBRARIES.index(library) if library in _LIBRARIES else len(_LIBRARIES), library)


def _cell(op: str, answers: dict[tuple[str, str], list[Record]], library: str, several: bool) -> dict[str, Any]:
    entries, silent = [], []
    for impl, on in sorted(answers):
        if library_of(impl) != library:
            continue
        found = answers[impl, on]
        route = impl.partition("-")[2] or impl
        label = f"{route} on {on}" if several else route
        if all(record.status == "unsupported" for record in found):
            silent.append((label, len(found)))
        else:
            entries.append({"op": op, "impl": impl, "on": on, "label": label, **_summary(found)})
    # Who is wrong stands first.
    entries.sort(key=lambda entry: -entry["wrong"])
    return {"entries": entries, "silent": silent}


def _summary(found: Sequence[Record]) -> dict[str, Any]:
    counts = status_counts(found)
    uses = [use for use in map(judged_use, found) if use is not None]
    return {
        "counts": spelled_counts(counts),
        "count": len(found),
        "use": max(uses, default=None),
        "wrong": sum(counts[status] for status in WRONG),
    }
