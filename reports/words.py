"""How are numbers, counts and long texts written on a page?"""

import math
import re

from markupsafe import Markup

LONGEST_TEXT = 4000


def short(text: str, longest: int = LONGEST_TEXT) -> str:
    """The text, cut off where it would drown the page."""
    return text if len(text) <= longest else f"{text[:longest]} … {len(text) - longest:,} more characters in the record"


def number(value: float) -> str:
    """The number with thousands set apart."""
    return f"{value:,}"


def breakable(line: str, after: str = ",") -> Markup:
    """The escaped line, which may break after those characters; what is copied stays the line."""
    return Markup("<wbr>").join(re.split(f"(?<=[{re.escape(after)}])", line))


def percent(share: float) -> str:
    """A share in percent; what is not all never reads as 100, and what is not nothing never as 0."""
    value = 100 * share
    if 99.9 < value < 100:
        return f"{math.floor(value * 100) / 100:.2f} %"
    if 0 < value < 0.01:
        return "< 0.01 %"
    return f"{value:.{0 if value in (0, 100) else 1 if value >= 1 else 2}f} %"


def plural(count: int, noun: str) -> str:
    """`1 case`, `2 cases`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def every(count: int, noun: str) -> str:
    """`The one case`, `All 2 cases`."""
    return f"The one {noun}" if count == 1 else f"All {count:,} {noun}s"


def has(count: int) -> str:
    """The verb that agrees with a count."""
    return "has" if count == 1 else "have"


def without_record(number: int, asked: int) -> str:
    """`1 of its 2 questions has no record`."""
    return f"{number:,} of its {plural(asked, 'question')} {has(number)} no record"


def was(count: int) -> str:
    """The verb that agrees with a count."""
    return "was" if count == 1 else "were"


def natural(word: str) -> tuple[int, float, str]:
    """A key that sorts numbers before words, and numbers by size."""
    found = re.match(r"-?\d+", word)
    return (0, float(found[0]), word) if found else (1, 0.0, word)
