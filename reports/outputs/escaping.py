"""How does a text that a kernel, a user or a driver wrote become harmless where other programs read it?

Messages carry whatever an exception said. Each format has words that end a field, begin a command or draw on the reader's
terminal; a function each makes a text one that only says what it says.
"""

import re

# C0 and C1 controls, lone surrogates, non-characters, and what reorders or hides text.
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff\ufffe\uffff]"
)
_MARKDOWN = re.compile(r"[\\`*_\[\]<>|&~$]")
# What makes a heading, a list or a rule at the beginning of a line only.
_BEGINS = re.compile(r"[#+=-]|\d+[.)]")
_LONGEST = 4000


def printable(text: str, longest: int = _LONGEST) -> str:
    """One line without a character that is not seen, each spelled `\\x1b` or `\\u202e`; cut off beyond `longest`."""
    line = _UNSEEN.sub(lambda found: _spelled(found[0]), text[: longest + 1])
    return line if len(text) <= longest else f"{line[:longest]} … {len(text) - longest:,} more characters in the record"


def _spelled(character: str) -> str:
    known = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
    code = ord(character)
    return known.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def markdown(text: str) -> str:
    """The text as itself in Markdown and in the cells of its tables: what Markdown and HTML read is spelled as entities."""
    line = printable(text).lstrip()
    first = f"&#{ord(line[0])};" if _BEGINS.match(line) else ""
    return first + _MARKDOWN.sub(lambda found: f"&#{ord(found[0])};", line[bool(first) :])


def code(text: str) -> str:
    """The text in the letters of code, inside a line or a cell."""
    return f"<code>{markdown(text)}</code>"


def fenced(text: str) -> str:
    """A line of its own that a reader copies as it stands: the fence is longer than any in the text."""
    line = printable(text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return f"{fence}text\n{line}\n{fence}"


def command_data(text: str) -> str:
    """The message of a workflow command of GitHub Actions; its line ends stay line ends of the message."""
    lines = (printable(line) for line in text.split("\n"))
    return "%0A".join(line.replace("%", "%25") for line in lines)


def command_property(text: str) -> str:
    """A property of a workflow command, such as its title."""
    return printable(text).replace("%", "%25").replace(":", "%3A").replace(",", "%2C")


def sarif_text(text: str) -> str:
    """A plain text message of SARIF, in which `{0}` would be a placeholder and `[a](b)` a link."""
    lines = (printable(line) for line in text.split("\n"))
    return re.sub(r"\{(\d+)\}", r"{{\1}}", "\n".join(lines)).replace("](", "\\](")
