"""How does a gate read in code scanning: SARIF 2.1.0?

A result for each finding about an op, which is one for all records that went wrong in the same way: an alert stays the
same alert however many cases show it. Its rule is the op with the named wrong answer that it equals, else with the measure
or the status. What speaks of the run as a whole is a notification of the tool.
"""

import functools
import importlib.metadata
import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

from reports.gate import KINDS, Finding, GateResult
from reports.outputs.escaping import printable, sarif_text

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_HOUSE = Path(__file__).resolve().parent.parent.parent
_SHOWN = 20
_MUTANT = re.compile(r"as if .* \(([\w.-]+)\)$")

Object = dict[str, Any]


def sarif(result: GateResult) -> str:
    """The document, as text."""
    results = [finding for finding in result.findings if finding.op or finding.entry]
    rules = {rule_of(finding): finding for finding in reversed(results)}
    order = {rule: number for number, rule in enumerate(sorted(rules))}
    document: Object = {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "mla-oracle gate",
                        "semanticVersion": _version(),
                        "rules": [_rule(rule, rules[rule]) for rule in order],
                    }
                },
                "automationDetails": {"id": f"mla-oracle/{_machine(result)}/"},
                "invocations": [
                    {
                        "executionSuccessful": not any(finding.kind == "harness" for finding in result.closing),
                        "exitCode": 1 if result.closed else 0,
                        "exitCodeDescription": sarif_text(result.sentence),
                        "toolExecutionNotifications": [
                            *(
                                {
                                    "level": "error" if finding.closes else "warning",
                                    "message": {"text": _message(finding)},
                                }
                                for finding in result.findings
                                if not (finding.op or finding.entry)
                            ),
                            *({"level": "note", "message": {"text": sarif_text(note)}} for note in result.notes),
                        ],
                    }
                ],
                "originalUriBaseIds": {
                    "MLA_ORACLE": {"description": {"text": "The directory that holds impl/, of mla-oracle itself."}}
                },
                "columnKind": "unicodeCodePoints",
                "results": [_result(finding, order) for finding in results],
            }
        ],
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def rule_of(finding: Finding) -> str:
    """The op with the named wrong answer, the measure, the status or the policy's rule; `known/expired_known`."""
    if not finding.op:
        return f"{finding.kind}/{finding.rule}"
    if finding.rule not in ("statuses", "harness"):
        return f"{finding.op}/{finding.rule}"
    worst = finding.records[0]
    for sentence in worst.diagnosis:
        named = _MUTANT.search(sentence)
        if named:
            return f"{finding.op}/{named[1]}"
    if finding.status == "fail":
        return f"{finding.op}/{max(worst.checks, key=lambda check: check.use).measure}"
    return f"{finding.op}/{'harness' if finding.kind == 'harness' else finding.status}"


def _rule(rule: str, example: Finding) -> Object:
    op, _, what = rule.rpartition("/")
    said = next((text for text in example.details if _MUTANT.search(text)), "")
    short = f"{op}: {said or what.replace('_', ' ')}" if example.op else what.replace("_", " ")
    return {
        "id": printable(rule),
        "shortDescription": {"text": sarif_text(short)},
        "defaultConfiguration": {"level": "error"},
        "properties": {"kind": example.kind, "tags": [KINDS[example.kind]]},
    }


def _result(finding: Finding, order: dict[str, int]) -> Object:
    rule = rule_of(finding)
    found: Object = {
        "ruleId": printable(rule),
        "ruleIndex": order[rule],
        "level": "error" if finding.closes else "warning",
        "message": {"text": _message(finding)},
        "partialFingerprints": {
            "mlaOracleFinding/v1": f"{finding.fingerprint}-{finding.on}" if finding.on else finding.fingerprint
        },
        "occurrenceCount": max(1, finding.count),
        "properties": {
            "kind": finding.kind,
            "rule": finding.rule,
            "status": finding.status,
            "cases": [printable(case) for case in finding.cases[:_SHOWN]],
        },
    }
    location: Object = {}
    source = source_of(finding.op, finding.impl) if finding.op else ""
    if source:
        location["physicalLocation"] = {"artifactLocation": {"uri": source, "uriBaseId": "MLA_ORACLE"}}
    elif finding.entry is not None:
        file = finding.entry.file
        artifact = {"uri": file.as_uri() if file.is_absolute() else quote_from_bytes(os.fsencode(file))}
        region = {"region": {"startLine": finding.entry.line}} if finding.entry.line else {}
        location["physicalLocation"] = {"artifactLocation": artifact, **region}
    if finding.op:
        location["logicalLocations"] = [
            {
                "fullyQualifiedName": printable(f"{finding.op}/{finding.impl}/{finding.on}"),
                "name": printable(finding.impl),
                "kind": "function",
            }
        ]
    if location:
        found["locations"] = [location]
    return found


def _message(finding: Finding) -> str:
    number = f" ({finding.count:,} cases)" if finding.count > 1 else ""
    lines = [f"{finding.place}: {finding.sentence}{number}" if finding.op else finding.sentence, *finding.details]
    if finding.replay:
        lines.append(f"see it again: {finding.replay}")
    return sarif_text("\n".join(printable(line) for line in lines))


@functools.cache
def source_of(op: str, impl: str) -> str:
    """The file, from the house down, that answers or asks this implementation; empty where there is none.

    `ours-*` and `torch-*` are written there; of others it is where their function is called.
    """
    family, _, what = op.partition(".")
    library, _, route = impl.partition("-")
    stems = (
        (f"{what}_{route}", f"{what}_{library}", what) if library in ("ours", "torch") else (f"{what}_{library}", what)
    )
    for stem in stems:
        path = Path("impl", family, f"{stem}.py")
        if all(re.fullmatch(r"\w{1,100}", part) for part in (family, stem)) and (_HOUSE / path).is_file():
            return path.as_posix()
    return ""


def _machine(result: GateResult) -> str:
    """What tells the analyses of several machines apart: executions and architectures."""
    places = sorted({f"{each.record.on}-{each.record.environment.arch or 'any'}" for each in result.judged})
    return re.sub(r"[^\w.+-]", "_", "+".join(places)) or "nothing"


def _version() -> str:
    try:
        return importlib.metadata.version("mla-oracle")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0"
