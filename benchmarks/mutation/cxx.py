"""Mutations of C++ and CUDA: by tokens, since no parser for either is at hand.

It relies on the sources' layout: a binary operator has spaces around it, and the angle bracket of a
template does not. Comments, preprocessor lines, literals of text and what only steers the compiler
(alignment, launch bounds, attributes) are left alone. What does not compile counts for nothing, so
that a rule may now and then be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mutation.edits import Edit

_TOKENS = re.compile(
    r"""
    (?P<comment>//[^\n]*|/\*.*?\*/)
    | (?P<directive>^[ \t]*\#(?:\\\n|[^\n])*)
    | (?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+')
    | (?P<number>(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)[a-zA-Z]*)
    | (?P<word>[A-Za-z_]\w*)
    | (?P<op><<=|>>=|->|\+\+|--|&&|\|\||[-+*/%&|^=!<>]=|<<|>>|::|[-+*/%&|^=!<>~?:;,.(){}\[\]])
    | (?P<space>\s+)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_DIGITS = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_SWAPS = {
    "+": ("-",), "-": ("+",), "*": ("/",), "/": ("*",), "%": ("/",),
    "<<": (">>",), ">>": ("<<",), "&": ("|",), "|": ("&",), "^": ("|",),
    "+=": ("-=", "="), "-=": ("+=",), "*=": ("/=", "="), "/=": ("*=",),
}  # fmt: skip
_COMPARISONS = {
    "<": ("<=", ">"), "<=": ("<", ">="), ">": (">=", "<"), ">=": (">", "<="),
    "==": ("!=",), "!=": ("==",), "&&": ("||",), "||": ("&&",),
}  # fmt: skip
_CALLS = {
    "min": "max", "max": "min", "fmaxf": "fminf", "fminf": "fmaxf",
    "warp_max": "warp_sum", "warp_sum": "warp_max", "row_max": "row_sum",
    "exp2f": "expf", "expf": "exp2f", "__expf": "exp2f",
}  # fmt: skip
_INFINITIES = {"INFINITY", "CUDART_INF_F", "__builtin_inff", "LOWEST"}
_SYNC = re.compile(
    r"__sync\w+\(\);|\w*(?:wait|commit|arrive|started)(?:<[^;]*?>)?\(\);|land\(\);"
    r"|asm volatile\(\"sfence\"[^;]*;"
)
_HINTS = {"__launch_bounds__", "alignas", "__attribute__", "static_assert", "__builtin_prefetch"}
_TYPES = {"float", "double", "int", "bool", "int64_t", "uint32_t", "long", "unsigned", "auto"}

ROUNDED = """
// An accumulator of eight significant bits, as bfloat16 has them.
struct Rounded {
  float value;
  QUALIFIER static float rounded(float x) {
    union { float f; unsigned u; } bits = {x};
    if (x != x || x - x != 0.0f) return x;
    bits.u = (bits.u + 0x7fff + (bits.u >> 16 & 1)) & 0xffff0000u;
    return bits.f;
  }
  QUALIFIER Rounded(float x = 0.0f) : value(rounded(x)) {}
  QUALIFIER operator float() const { return value; }
  QUALIFIER Rounded& operator+=(float x) { value = rounded(value + x); return *this; }
  QUALIFIER Rounded& operator*=(float x) { value = rounded(value * x); return *this; }
};
"""
"""What the mutation of an accumulator's type needs, after the source's own includes."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token of code, with its place in the source."""

    text: str
    kind: str
    start: int
    stop: int
    spaced: bool  # white space on both sides


def tokens_of(source: str) -> list[Token]:
    """Tokens of code: without white space, comments and preprocessor lines."""
    found = []
    for match in _TOKENS.finditer(source):
        kind = match.lastgroup or "other"
        if kind in ("space", "comment", "directive"):
            continue
        around = source[match.start() - 1 : match.start()] + source[match.end() : match.end() + 1]
        found.append(Token(match[0], kind, match.start(), match.end(), around.isspace()))
    return found


def edits_of(source: str) -> Iterator[Edit]:
    """All mutations of a C++ or CUDA source."""
    tokens = tokens_of(source)
    closing = _brackets(tokens)
    skipped = _skipped(tokens, closing)
    for i, token in enumerate(tokens):
        if i in skipped:
            continue
        if token.kind == "number":
            yield from _constant(tokens, i)
        elif token.kind == "word":
            yield from _word(source, tokens, i, closing)
        elif token.kind == "op":
            yield from _operator(source, tokens, i, closing)
    for match in _SYNC.finditer(source):
        if any(t.start == match.start() for t in tokens):
            yield Edit(match.start(), match.end(), ";", "sync")


def prelude_of(source: str, *, cuda: bool) -> tuple[int, str]:
    """Where `Rounded` goes, after the last top-level include or #endif, and its text."""
    at = 0
    first_code = next((t.start for t in tokens_of(source)), 0)
    for match in re.finditer(r"^#[^\n]*\n", source[:first_code], re.MULTILINE):
        at = match.end()
    return at, ROUNDED.replace("QUALIFIER", "__device__" if cuda else "")


def _brackets(tokens: list[Token]) -> dict[int, int]:
    """Index of the closing bracket, by that of the opening one."""
    stack, closing = [], {}
    for i, token in enumerate(tokens):
        if token.text in ("(", "[", "{"):
            stack.append(i)
        elif token.text in (")", "]", "}") and stack:
            closing[stack.pop()] = i
    return closing


def _skipped(tokens: list[Token], closing: dict[int, int]) -> set[int]:
    """Tokens inside of what only steers the compiler."""
    skipped: set[int] = set()
    for i, token in enumerate(tokens):
        if token.text in _HINTS and i + 1 in closing:
            skipped |= set(range(i, closing[i + 1] + 1))
        if token.text == "static_cast":
            skipped.add(i)
    return skipped


def _constant(tokens: list[Token], i: int) -> Iterator[Edit]:
    token = tokens[i]
    before = tokens[i - 1] if i else None
    if before is not None and before.text in _SWAPS and before.spaced and _binary(tokens, i - 1):
        yield Edit(before.start, token.stop, "", "constant dropped")
    if token.text[:2] in ("0x", "0X"):
        yield Edit(token.start, token.stop, f"({token.text} >> 1)", "constant")
        return
    digits = _DIGITS.match(token.text)[0]  # type: ignore[index]  # a number has digits
    suffix = token.text[len(digits) :]
    if any(c in digits for c in ".eE"):
        value = float(digits)
        if value:
            yield Edit(token.start, token.stop, f"{value * 1.001!r}{suffix}", "constant scaled")
        else:
            yield Edit(token.start, token.stop, f"1.0{suffix}", "constant")
    else:
        for value in (int(digits) + 1, int(digits) - 1):
            if value >= 0:
                yield Edit(token.start, token.stop, f"{value}{suffix}", "constant")


def _word(source: str, tokens: list[Token], i: int, closing: dict[int, int]) -> Iterator[Edit]:
    token = tokens[i]
    following = tokens[i + 1].text if i + 1 < len(tokens) else ""
    before = tokens[i - 1].text if i else ""
    if token.text in _CALLS and following == "(" and before not in _TYPES:
        yield Edit(token.start, token.stop, _CALLS[token.text], "call")
    elif token.text in _INFINITIES and before != "float":
        stop = tokens[closing[i + 1]].stop if i + 1 in closing else token.stop
        yield Edit(token.start, stop, "0.0f", "initial value")
    elif token.text == "if" and i + 1 in closing:
        start, stop = tokens[i + 1].stop, tokens[closing[i + 1]].start
        inside = source[start:stop]
        yield Edit(start, stop, f"({inside}) || true", "condition")
        yield Edit(start, stop, f"({inside}) && false", "condition")
    elif token.text == "double":
        yield Edit(token.start, token.stop, "float", "accumulator")
    elif token.text == "float" and i + 2 < len(tokens) and tokens[i + 2].text in ("=", ","):
        if before in (";", "{", "}", ")"):  # a local variable: a constant one never accumulates
            yield Edit(token.start, token.stop, "Rounded", "accumulator")
    elif token.text == "continue" or (token.text == "return" and following == ";"):
        yield Edit(token.start, token.stop, "", "statement")


def _operator(source: str, tokens: list[Token], i: int, closing: dict[int, int]) -> Iterator[Edit]:
    token = tokens[i]
    if token.spaced and token.text in _COMPARISONS and _binary(tokens, i):
        for text in _COMPARISONS[token.text]:
            yield Edit(token.start, token.stop, text, "comparison")
    elif token.spaced and token.text in _SWAPS and _binary(tokens, i):
        for text in _SWAPS[token.text]:
            yield Edit(token.start, token.stop, text, "operator")
    elif token.text == "-" and not _binary(tokens, i):
        yield Edit(token.start, token.stop, "", "sign")
    elif token.text == "!" and not token.spaced:
        yield Edit(token.start, token.stop, "", "negation")
    elif token.text == "?":
        yield Edit(token.start, token.start, "|| true ", "mask dropped")
        yield Edit(token.start, token.start, "&& false ", "mask dropped")
    elif token.text == "[" and i in closing and not _declares(tokens, i, closing[i]):
        stop = tokens[closing[i]].start
        if stop > token.stop:
            inside = source[token.stop : stop]
            for sign in "+-":
                yield Edit(token.stop, stop, f"({inside}) {sign} 1", "offset")
    elif token.text == "(" and i and tokens[i - 1].text == "for" and i in closing:
        yield from _loop(tokens, i, closing[i])


def _loop(tokens: list[Token], start: int, stop: int) -> Iterator[Edit]:
    """The bound of `for (...; i < n; ...)`, one less and one more."""
    ends = [j for j in range(start, stop) if tokens[j].text == ";"]
    if len(ends) == 2 and tokens[ends[1] - 1].text != ";":
        at = tokens[ends[1] - 1].stop
        for sign in "+-":
            yield Edit(at, at, f" {sign} 1", "loop bound")


def _binary(tokens: list[Token], i: int) -> bool:
    """Whether there is an operand before the operator."""
    before = tokens[i - 1] if i else None
    return before is not None and (
        before.kind == "number"
        or (before.kind == "word" and before.text not in ("return", "case"))
        or before.text in (")", "]", "}")
    )


def _declares(tokens: list[Token], start: int, stop: int) -> bool:
    """Whether `name[...]` declares an array: a type stands before the name."""
    following = tokens[stop + 1].text if stop + 1 < len(tokens) else ""
    if tokens[start - 1].text == "]":  # the further dimensions of one
        while start and tokens[start].text != ";" and tokens[start - 1].kind != "word":
            start -= 1
    before = tokens[start - 2] if start > 1 else None
    typed = before is not None and (before.kind == "word" and before.text != "return")
    template = before is not None and before.text == ">" and not before.spaced
    lambda_ = tokens[start - 1].text in ("(", ",", "=", "{", ";")
    return (
        typed or template or lambda_ or (following in (",", ";") and before is not None
                                         and before.text == "," and _in_declaration(tokens, start))
    )  # fmt: skip


def _in_declaration(tokens: list[Token], i: int) -> bool:
    """Whether the statement that holds token `i` begins with a type."""
    while i and tokens[i - 1].text not in (";", "{", "}"):
        i -= 1
    words = [t.text for t in tokens[i : i + 3]]
    return any(w in _TYPES or w[:1].isupper() for w in words[:2]) and "=" not in words[:2]
