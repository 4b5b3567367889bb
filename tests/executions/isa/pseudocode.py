"""What does AMD's published pseudocode of an instruction compute? An evaluator of that language, one lane at a time.

The text comes from `tinygrad.runtime.autogen.amd.cdna.str_pcode`, extracted from AMD's "CDNA4 Instruction Set Architecture
Reference Guide". Values are exact: integers are Python integers of a width, floats are codes whose arithmetic goes
through fractions and is rounded once. Nothing here knows how an executor does it.

The language, as far as used: typed views (`S0.f32`, `S0[31 : 16].u16`), sized literals and casts (`8'255U`, `64'F(x)`),
concatenation (`{ a, b }`), C's operators with `**` exact, `if`/`elsif`/`else`/`endif`, `for i in a : b do`, `break`,
`return`, `lambda`, declarations. Integers narrower than 32 bits are promoted as in C.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from tests.executions.isa import small_floats
from tests.executions.isa.small_floats import FORMATS, NAN, Number

FLOATS = frozenset(FORMATS) | {"r"}
"""Kinds of values that are floats. `r` is an exact real number, what `2.0 ** n` gives."""
_LETTERS = {"U": "u", "I": "i", "B": "b"}


@dataclass(frozen=True)
class Value:
    """`bits` of `width`, read as `kind`: u, i, b (raw), a float format, or r, whose number is `real`."""

    bits: int
    width: int
    kind: str
    real: Fraction | None = None

    def integer(self) -> int:
        if self.kind in FLOATS:
            raise TypeError(f"{self} is no integer")
        return self.bits - (1 << self.width) if self.kind == "i" and self.bits >> (self.width - 1) else self.bits

    def number(self) -> Number:
        if self.real is not None:
            return self.real
        return small_floats.decode(self.bits, self.kind) if self.kind in FLOATS else Fraction(self.integer())

    def negative(self) -> bool:
        """The sign bit."""
        return self.real < 0 if self.real is not None else bool(self.bits >> (self.width - 1))

    def truth(self) -> bool:
        return self.bits != 0


def whole(number: int, width: int = 32, kind: str = "i") -> Value:
    """An integer cut to a width."""
    return Value(number & ((1 << width) - 1), width, kind)


def floating(number: Number, kind: str, *, negative_zero: bool = False) -> Value:
    """A number rounded to a format, half to even, overflow to infinity."""
    return Value(small_floats.encode(number, kind, negative_zero=negative_zero), FORMATS[kind].width, kind)


def truth(condition: bool) -> Value:
    return Value(int(condition), 1, "u")


def retyped(value: Value, kind: str, width: int) -> Value:
    """The low bits of a value read as another kind: what a view such as `.u16` means."""
    return Value(value.bits & ((1 << width) - 1), width, kind)


def converted(value: Value, kind: str, width: int) -> Value:
    """What a cast such as `32'F(x)` means: the same number in another format. NaN payloads move by bits, as hardware does."""
    if kind == "b":
        return Value(_extended(value, width) & ((1 << width) - 1), width, "b")
    if kind not in FLOATS:
        if value.kind in FLOATS:
            number = value.number()
            return whole(math.trunc(number) if isinstance(number, Fraction) else 0, width, kind)
        return Value(_extended(value, width) & ((1 << width) - 1), width, kind)
    if value.kind == "b":  # raw bits given a float's name
        return retyped(value, kind, width)
    if value.kind == "i" and value.bits >> 30 and value.width == 32 and kind == "f32" and value.bits in _RAW_FLOATS:
        return retyped(value, kind, width)
    if value.kind == "r" or value.kind == kind:
        return value
    if value.kind not in FLOATS:
        return floating(Fraction(value.integer()), kind)
    number = value.number()
    if number == NAN and value.kind in ("f64", "f32", "f16", "bf16") and kind in ("f64", "f32", "f16", "bf16"):
        return _moved_nan(value, kind)
    return floating(number, kind, negative_zero=value.negative())


# `32'F(0xffc00000)`: a hexadecimal literal cast to a float is that float's code.
_RAW_FLOATS = frozenset({0xFFC00000})


def _extended(value: Value, width: int) -> int:
    return value.integer() & ((1 << max(width, value.width)) - 1) if value.kind == "i" else value.bits


def _moved_nan(value: Value, kind: str) -> Value:
    old, new = FORMATS[value.kind], FORMATS[kind]
    payload = value.bits & ((1 << old.mantissa) - 1)
    shift = new.mantissa - old.mantissa
    payload = payload << shift if shift >= 0 else payload >> -shift
    code = (int(value.negative()) << (new.width - 1)) | (((1 << new.exponent) - 1) << new.mantissa) | payload
    return Value(code, new.width, kind)


# ---------------------------------------------------------------------------------------------------- arithmetic


def _promoted(a: Value, b: Value) -> tuple[int, str]:
    width = max(32, a.width, b.width)
    kind = "i" if all(v.kind == "i" or v.width < 32 for v in (a, b)) else "u"
    return width, kind


def _float_kind(a: Value, b: Value) -> str:
    kinds = [v.kind for v in (a, b) if v.kind in FLOATS and v.kind != "r"]
    return max(kinds, key=lambda kind: FORMATS[kind].width) if kinds else "r"


def _real(number: Fraction) -> Value:
    return Value(0, 0, "r", number)


def _float_arithmetic(operator: str, a: Value, b: Value) -> Value:
    kind = _float_kind(a, b)
    x, y = a.number(), b.number()
    if kind == "r":
        assert isinstance(x, Fraction) and isinstance(y, Fraction)
        return _real(_EXACT[operator](x, y))
    return rounded_operation(operator, (x, a.negative()), (y, b.negative()), kind)


_EXACT: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
}


def rounded_operation(operator: str, a: tuple[Number, bool], b: tuple[Number, bool], kind: str) -> Value:
    """IEEE 754's +, -, * and / of (number, sign bit) pairs, rounded once, half to even."""
    (x, x_sign), (y, y_sign) = a, b
    if x == NAN or y == NAN:
        return floating(NAN, kind)
    if operator == "-":
        return rounded_operation("+", a, (_negated(y), not y_sign), kind)
    infinite = "-inf" if x_sign != y_sign else "inf"
    if operator == "+":
        if isinstance(x, str) or isinstance(y, str):
            both = isinstance(x, str) and isinstance(y, str)
            return floating(NAN if both and x != y else x if isinstance(x, str) else y, kind)
        return floating(x + y, kind, negative_zero=x_sign and y_sign)
    if operator == "*":
        if isinstance(x, str) or isinstance(y, str):
            return floating(NAN if x == 0 or y == 0 else infinite, kind)
        return floating(x * y, kind, negative_zero=x_sign != y_sign)
    if isinstance(x, str):
        return floating(NAN if isinstance(y, str) else infinite, kind)
    if isinstance(y, str):
        return floating(Fraction(0), kind, negative_zero=x_sign != y_sign)
    if y == 0:
        return floating(NAN if x == 0 else infinite, kind)
    return floating(x / y, kind, negative_zero=x_sign != y_sign)


def _negated(number: Number) -> Number:
    if isinstance(number, Fraction):
        return -number
    return {"inf": "-inf", "-inf": "inf"}.get(number, number)


def negate(value: Value) -> Value:
    if value.real is not None:
        return _real(-value.real)
    if value.kind in FLOATS:
        return Value(value.bits ^ (1 << (value.width - 1)), value.width, value.kind)
    return whole(-value.integer(), max(32, value.width), "i" if value.kind == "i" or value.width < 32 else value.kind)


def fused(a: Value, b: Value, c: Value) -> Value:
    """a * b + c with one rounding."""
    kind = a.kind
    x, y, z = a.number(), b.number(), c.number()
    if NAN in (x, y, z):
        return floating(NAN, kind)
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        product, sign = x * y, a.negative() != b.negative()
        if isinstance(z, Fraction):
            return floating(product + z, kind, negative_zero=sign and c.negative())
        return floating(z, kind)
    if x == 0 or y == 0:
        return floating(NAN, kind)
    infinite = "-inf" if a.negative() != b.negative() else "inf"
    return floating(NAN if isinstance(z, str) and z != infinite else infinite, kind)


def _integer_arithmetic(operator: str, a: Value, b: Value) -> Value:
    width, kind = _promoted(a, b)
    x, y = a.integer(), b.integer()
    result = {"+": x + y, "-": x - y, "*": x * y, "&": x & y, "|": x | y, "^": x ^ y}[operator]
    return whole(result, width, kind)


def _shift(operator: str, a: Value, b: Value) -> Value:
    width = max(32, a.width)
    kind = "i" if a.kind == "i" else "u"
    amount = b.bits
    return whole(a.integer() << amount if operator == "<<" else a.integer() >> amount, width, kind)


def _compare(operator: str, a: Value, b: Value) -> Value:
    if a.kind in FLOATS or b.kind in FLOATS:
        x, y = _ordered(a.number()), _ordered(b.number())
        if x is None or y is None:
            return truth(operator == "!=")
    else:
        signed = all(v.kind == "i" or v.width < 32 for v in (a, b))
        width = max(32, a.width, b.width)
        x, y = ((v.integer() if signed or v.kind != "i" else v.integer() & ((1 << width) - 1)) for v in (a, b))
    return truth(
        {"==": x == y, "!=": x != y, "<>": x != y, "<": x < y, "<=": x <= y, ">": x > y, ">=": x >= y}[operator]
    )


def _ordered(number: Number) -> Any:
    if number == NAN:
        return None
    return {"inf": math.inf, "-inf": -math.inf}.get(number, number) if isinstance(number, str) else number


def binary(operator: str, a: Value, b: Value) -> Value:
    """Any operator of two values."""
    if operator in ("==", "!=", "<>", "<", "<=", ">", ">="):
        return _compare(operator, a, b)
    if operator in ("&&", "||"):
        return truth(a.truth() and b.truth() if operator == "&&" else a.truth() or b.truth())
    if operator == "**":
        power = max(-6000, min(6000, b.integer()))
        number = a.number()
        assert isinstance(number, Fraction)
        return _real(number**power)
    if operator in ("<<", ">>"):
        return _shift(operator, a, b)
    if a.kind in FLOATS or b.kind in FLOATS:
        return _float_arithmetic(operator, a, b)
    return _integer_arithmetic(operator, a, b)


# ---------------------------------------------------------------------------------------------------- parsing

_TOKEN = re.compile(
    r"""\s*(?:(?P<number>\d+'(?:0x[0-9a-fA-F]+|\d+(?:\.\d+)?)(?:ULL|LL|U|F)?|0x[0-9a-fA-F]+(?:ULL|LL|U)?|\d+\.\d+F?|\d+(?:ULL|LL|U|F)?)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<sign>\+=|-=|\|=|&=|\*\*|<<|>>|<=|>=|==|!=|<>|\|\||&&|\+:|[-+*/%&|^~!<>=?:;,.(){}\[\]']))""",
    re.VERBOSE,
)
_CAST = re.compile(r"\s*(\d+)'(BF|[UIBF])(?=\s*[(;\[\]]|\s*$)")


@dataclass(frozen=True)
class Token:
    """`kind` is number, name, sign, cast or end."""

    kind: str
    text: str


def _tokens(text: str) -> list[Token]:
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r'"[^"]*"', "0", text)
    found, at = [], 0
    while text[at:].strip():
        if cast := _CAST.match(text, at):
            found.append(Token("cast", f"{cast[1]}'{cast[2]}"))
            at = cast.end()
            continue
        match = _TOKEN.match(text, at)
        if not match or not match[0].strip():
            raise SyntaxError(f"no token at {text[at : at + 30]!r}")
        kind = match.lastgroup or "sign"
        found.append(Token(kind, match[kind]))
        at = match.end()
    return [*found, Token("end", "")]


Node = tuple[Any, ...]
_LEVELS = [
    ["||"],
    ["&&"],
    ["|"],
    ["^"],
    ["&"],
    ["==", "!=", "<>"],
    ["<", "<=", ">", ">="],
    ["<<", ">>"],
    ["+", "-"],
    ["*", "/", "%"],
    ["**"],
]
_ENDS = ("endif", "endfor", "else", "elsif")


class _Parser:
    """Recursive descent; nodes are tuples whose first item says what they are."""

    def __init__(self, text: str) -> None:
        self.tokens = _tokens(text)
        self.at = 0

    def peek(self, ahead: int = 0) -> Token:
        return self.tokens[min(self.at + ahead, len(self.tokens) - 1)]

    def take(self) -> Token:
        token = self.peek()
        self.at += 1
        return token

    def took(self, text: str) -> bool:
        if self.peek().text == text and self.peek().kind != "number":
            self.at += 1
            return True
        return False

    def must(self, text: str) -> None:
        if not self.took(text):
            raise SyntaxError(f"{text} expected at {self.peek().text!r}, token {self.at}")

    def statements(self, *ends: str) -> list[Node]:
        found: list[Node] = []
        while self.peek().kind != "end" and self.peek().text not in ends:
            if self.took(";"):
                continue
            found.append(self.statement())
        return found

    def statement(self) -> Node:
        word = self.peek().text
        if word == "declare":
            return self.declaration()
        if word == "if":
            return self.choice()
        if word == "for":
            return self.loop()
        if word == "break":
            self.take()
            return ("break",)
        if word == "return":
            self.take()
            return ("return", self.expression())
        return self.assignment()

    def declaration(self) -> Node:
        self.take()
        name = self.take().text
        width, kind, count = 32, "b", None
        if self.took(":"):
            text = self.take().text
            width, letter = int(text.split("'")[0]), text.split("'")[1]
            kind = _kind_of(letter, width)
            if self.took("["):
                count = int(self.take().text)
                self.must("]")
        return ("declare", name, width, kind, count)

    def choice(self) -> Node:
        self.take()
        arms = []
        condition: Node | None = self.expression()
        self.must("then")
        while True:
            arms.append((condition, self.statements(*_ENDS)))
            if self.took("endif"):
                return ("if", arms)
            if self.took("elsif"):
                condition = self.expression()
                self.must("then")
            else:
                self.must("else")
                condition = None

    def loop(self) -> Node:
        self.take()
        name = self.take().text
        self.must("in")
        first = self.expression()
        self.must(":")
        last = self.expression()
        self.must("do")
        body = self.statements("endfor")
        self.must("endfor")
        return ("for", name, first, last, body)

    def assignment(self) -> Node:
        target = self.postfix()
        for operator in ("+=", "-=", "|=", "&="):
            if self.took(operator):
                return ("assign", [target], ("binary", operator[0], target, self.expression()))
        targets = [target]
        self.must("=")
        if self.took("lambda"):
            return self.function(target)
        value = self.expression()
        while self.took("="):
            targets.append(value)
            value = self.expression()
        return ("assign", targets, value)

    def function(self, target: Node) -> Node:
        self.must("(")
        names = [self.take().text]
        while self.took(","):
            names.append(self.take().text)
        self.must(")")
        self.must("(")
        if self.peek().text in ("if", "declare"):
            body = self.statements(")")
        else:
            body = [("return", self.expression())]
            self.took(";")
        self.must(")")
        return ("lambda", target[1], names, body)

    def expression(self) -> Node:
        condition = self.level(0)
        if not self.took("?"):
            return condition
        yes = self.expression()
        self.must(":")
        return ("choose", condition, yes, self.expression())

    def level(self, depth: int) -> Node:
        if depth == len(_LEVELS):
            return self.unary()
        left = self.level(depth + 1)
        while self.peek().kind == "sign" and self.peek().text in _LEVELS[depth]:
            operator = self.take().text
            left = ("binary", operator, left, self.level(depth + 1))
        return left

    def unary(self) -> Node:
        for operator in ("-", "+", "~", "!"):
            if self.took(operator):
                return ("unary", operator, self.unary())
        return self.postfix()

    def postfix(self) -> Node:
        node = self.primary()
        while True:
            if self.took("."):
                node = ("view", node, self.take().text)
            elif self.took("["):
                high = self.expression()
                if self.took(":"):
                    node = ("slice", node, high, self.expression())
                elif self.took("+:"):
                    node = ("run", node, high, self.expression())
                else:
                    node = ("index", node, high)
                self.must("]")
            else:
                return node

    def primary(self) -> Node:
        token = self.take()
        if token.text == "(":
            node = self.expression()
            self.must(")")
            return node
        if token.text == "{":
            parts = [self.expression()]
            while self.took(","):
                parts.append(self.expression())
            self.must("}")
            return ("join", parts)
        if token.kind == "number":
            return ("value", _literal(token.text))
        if token.kind == "cast":
            width, letter = token.text.split("'")
            self.must("(")
            node = self.expression()
            self.must(")")
            return ("cast", int(width), _kind_of(letter, int(width)), node)
        if token.kind != "name":
            raise SyntaxError(f"{token.text!r} where a value should be")
        if self.took("("):
            arguments = []
            while not self.took(")"):
                arguments.append(self.expression())
                self.took(",")
            return ("call", token.text, arguments)
        return ("name", token.text)


def _kind_of(letter: str, width: int) -> str:
    if letter == "BF":
        return "bf16"
    return f"f{width}" if letter == "F" else _LETTERS[letter]


def _literal(text: str) -> Value:
    sized = None
    if "'" in text:
        size, text = text.split("'")
        sized = int(size)
    suffix = next((s for s in ("ULL", "LL", "U") if text.endswith(s)), "")
    if not text.startswith("0x") and text.endswith("F"):
        return floating(Fraction(text[:-1]), "f32")
    body = text.removesuffix(suffix)
    if "." in body:
        return floating(Fraction(body), f"f{sized}" if sized else "f64")
    number = int(body, 0)
    kind = "u" if "U" in suffix else "i"
    width = sized or (64 if "LL" in suffix or number >> 32 else 32)
    return whole(number, width, kind)


@functools.cache
def parse(text: str) -> tuple[Node, ...]:
    """The statements of a pseudocode text."""
    parser = _Parser(text)
    nodes = parser.statements()
    if parser.peek().kind != "end":
        raise SyntaxError(f"left over: {parser.peek().text!r}")
    return tuple(nodes)


# ---------------------------------------------------------------------------------------------------- running


class _Break(Exception):
    pass


class _Return(Exception):
    def __init__(self, value: Value) -> None:
        super().__init__()
        self.value = value


_VIEW = re.compile(r"(fp|bf|[uifb])(\d+)")


def _view(name: str) -> tuple[str, int]:
    match = _VIEW.fullmatch(name)
    if not match:
        raise SyntaxError(f"no view {name}")
    width = int(match[2])
    if match[1] in ("fp", "bf"):
        return name, width
    return (name if match[1] == "f" else match[1]), width


@dataclass
class Run:
    """One lane's run: names and their values, which bits of each were assigned, and memory by address."""

    names: dict[str, Value]
    functions: dict[str, Callable[..., Value]]
    written: dict[str, int] = field(default_factory=dict)
    memory: dict[int, int] | None = None
    arrays: dict[str, list[Value]] = field(default_factory=dict)
    lambdas: dict[str, tuple[list[str], list[Node]]] = field(default_factory=dict)

    def execute(self, text: str) -> Run:
        self._block(parse(text))
        return self

    def _block(self, nodes: tuple[Node, ...] | list[Node]) -> None:
        for node in nodes:
            getattr(self, f"_do_{node[0]}")(*node[1:])

    def _do_declare(self, name: str, width: int, kind: str, count: int | None) -> None:
        if count is not None:
            self.arrays.setdefault(name, [Value(0, width, kind)] * count)
        elif name not in self.names:
            self.names[name] = Value(0, width, kind)

    def _do_if(self, arms: list[tuple[Node | None, list[Node]]]) -> None:
        for condition, body in arms:
            if condition is None or self.value(condition).truth():
                self._block(body)
                return

    def _do_for(self, name: str, first: Node, last: Node, body: list[Node]) -> None:
        try:
            for number in range(self.value(first).integer(), self.value(last).integer() + 1):
                self.names[name] = whole(number)
                self._block(body)
        except _Break:
            pass

    def _do_break(self) -> None:
        raise _Break

    def _do_return(self, node: Node) -> None:
        raise _Return(self.value(node))

    def _do_lambda(self, name: str, names: list[str], body: list[Node]) -> None:
        self.lambdas[name] = (names, body)

    def _do_assign(self, targets: list[Node], node: Node) -> None:
        value = self.value(node)
        for target in targets:
            self._assign(target, value)

    # -- values

    def value(self, node: Node) -> Value:
        value = getattr(self, f"_of_{node[0]}")(*node[1:])
        assert isinstance(value, Value), node
        return value

    def _of_value(self, value: Value) -> Value:
        return value

    def _of_name(self, name: str) -> Value:
        if name in self.names:
            return self.names[name]
        raise NameError(name)

    def _of_choose(self, condition: Node, yes: Node, no: Node) -> Value:
        return self.value(yes if self.value(condition).truth() else no)

    def _of_binary(self, operator: str, a: Node, b: Node) -> Value:
        left = self.value(a)
        if operator == "&&" and not left.truth():
            return truth(False)
        if operator == "||" and left.truth():
            return truth(True)
        return binary(operator, left, self.value(b))

    def _of_unary(self, operator: str, node: Node) -> Value:
        value = self.value(node)
        if operator == "!":
            return truth(not value.truth())
        if operator == "~":
            return Value(~value.bits & ((1 << value.width) - 1), value.width, value.kind)
        return negate(value) if operator == "-" else value

    def _of_cast(self, width: int, kind: str, node: Node) -> Value:
        return converted(self.value(node), kind, width)

    def _of_join(self, nodes: list[Node]) -> Value:
        bits = width = 0
        for node in nodes:
            part = self.value(node)
            bits, width = (bits << part.width) | part.bits, width + part.width
        return Value(bits, width, "b")

    def _of_call(self, name: str, nodes: list[Node]) -> Value:
        arguments = [self.value(node) for node in nodes]
        if name not in self.lambdas:
            return self.functions[name](*arguments)
        names, body = self.lambdas[name]
        inner = Run(
            {**self.names, **dict(zip(names, arguments, strict=True))}, self.functions, arrays=dict(self.arrays)
        )
        try:
            inner._block(body)
        except _Return as returned:
            return returned.value
        raise SyntaxError(f"{name} returns nothing")

    def _of_view(self, node: Node, name: str) -> Value:
        kind, width = _view(name)
        if node[0] == "index" and node[1][0] == "name" and node[1][1] == "MEM":
            return Value(self._load(self.value(node[2]).bits, width // 8), width, kind)
        value = self.value(node)
        if value.kind in FLOATS and kind in FLOATS and width != value.width:
            return converted(value, kind, width)  # `INF.f32` and the like
        return retyped(value, kind, width)

    def _of_index(self, node: Node, index: Node) -> Value:
        at = self.value(index).bits
        if node[0] == "name" and node[1] in self.arrays:
            return self.arrays[node[1]][at]
        value = self.value(node)
        return Value((value.bits >> at) & 1, 1, "u")

    def _of_slice(self, node: Node, high: Node, low: Node) -> Value:
        value, top, bottom = self.value(node), self.value(high).integer(), self.value(low).integer()
        if top < bottom:  # written backwards: reversed bits
            backwards = self._cut(value, bottom, top)
            return Value(int(f"{backwards.bits:0{backwards.width}b}"[::-1], 2), backwards.width, backwards.kind)
        return self._cut(value, top, bottom)

    def _of_run(self, node: Node, low: Node, count: Node) -> Value:
        bottom = self.value(low).integer()
        return self._cut(self.value(node), bottom + self.value(count).integer() - 1, bottom)

    @staticmethod
    def _cut(value: Value, top: int, bottom: int) -> Value:
        width = top - bottom + 1
        return Value((value.bits >> bottom) & ((1 << width) - 1), width, "b" if value.kind in FLOATS | {"b"} else "u")

    # -- assignment

    def _assign(self, target: Node, value: Value) -> None:
        if target[0] == "join":
            for part in reversed(target[1]):
                width = _view(part[2])[1]
                self._assign(part, Value(value.bits & ((1 << width) - 1), width, "b"))
                value = Value(value.bits >> width, max(1, value.width - width), "b")
            return
        if target[0] == "index" and target[1][0] == "name" and target[1][1] in self.arrays:
            entries = list(self.arrays[target[1][1]])
            entries[self.value(target[2]).bits] = value
            self.arrays[target[1][1]] = entries
            return
        name, top, bottom, kind = self._place(target)
        if name == "MEM":
            self._store(bottom, _stored(value, kind, top), top // 8)
            return
        if kind is not None:
            value = Value(_stored(value, kind, top - bottom + 1), top - bottom + 1, kind)
        if top < 0:  # the whole name
            old = self.names.get(name)
            if name in _REGISTERS and old is not None:
                value = Value(value.bits & ((1 << old.width) - 1), old.width, "b")
            self.names[name] = value
            self.written[name] = (1 << value.width) - 1
            return
        old = self.names.get(name, Value(0, 0, "b"))
        mask = ((1 << (top - bottom + 1)) - 1) << bottom
        bits = (old.bits & ~mask) | ((value.bits << bottom) & mask)
        keeps = name not in _REGISTERS and bottom == 0 and old.width in (0, top + 1) and kind is not None
        self.names[name] = Value(
            bits,
            max(old.width, top + 1),
            kind if keeps and kind else "b" if name in _REGISTERS or old.width == 0 else old.kind,
        )
        self.written[name] = self.written.get(name, 0) | mask

    def _place(self, target: Node) -> tuple[str, int, int, str | None]:
        """(name, top bit, bottom bit, kind) that a target names; top -1 for the whole; of memory, width and address."""
        if target[0] == "name":
            return target[1], -1, 0, None
        if target[0] == "view":
            kind, width = _view(target[2])
            if target[1][0] == "index" and target[1][1][0] == "name" and target[1][1][1] == "MEM":
                return "MEM", width, self.value(target[1][2]).bits, kind
            name, top, bottom, _ = self._place(target[1])
            return name, (width - 1 if top < 0 else min(top, bottom + width - 1)), bottom, kind
        name, _, base, _ = self._place(target[1])
        if target[0] == "index":
            at = self.value(target[2]).integer() + base
            return name, at, at, None
        top, bottom = self.value(target[2]).integer(), self.value(target[3]).integer()
        return name, base + max(top, bottom), base + min(top, bottom), None

    def _load(self, address: int, count: int) -> int:
        assert self.memory is not None
        return sum(self.memory.get(address + k, 0) << (8 * k) for k in range(count))

    def _store(self, address: int, bits: int, count: int) -> None:
        assert self.memory is not None
        for k in range(count):
            self.memory[address + k] = (bits >> (8 * k)) & 255


_REGISTERS = frozenset({"D0", "D1", "S0", "S1", "S2", "VCC", "EXEC", "SCC", "RETURN_DATA"})


def _stored(value: Value, kind: str, width: int) -> int:
    """Bits that a value becomes in a place of a kind."""
    if kind in FLOATS and value.kind in FLOATS and (value.kind != kind):
        return converted(value, kind, width).bits if value.kind != "r" else floating(value.number(), kind).bits
    if kind in FLOATS or kind == "b" or value.kind in FLOATS:
        return value.bits & ((1 << width) - 1)
    return _extended(value, width) & ((1 << width) - 1)
