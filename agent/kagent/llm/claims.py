"""Claims that a reply makes beside its file: the hypothesis, the expected speed-up, and how likely
the file is to work.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence

from kagent_sandbox.runtime.text import printable

MOST_HYPOTHESIS = 4000
"""Characters that are kept."""

_LEAD = r"[ \t>#*_+.)\d-]*"  # of a heading, a list, bold type
_HYPOTHESIS = re.compile(rf"({_LEAD})hypothesis([ \t*_]*)(?::(.*)|$)", re.IGNORECASE | re.DOTALL)
_PREDICTED = re.compile(
    rf"{_LEAD}(?:predicted|expected|estimated)[ \t_-]*(?:speed[ -]?up|gain)[^:]{{0,40}}(?::(.*)|$)",
    re.IGNORECASE | re.DOTALL,
)
_WORKS = re.compile(
    rf"{_LEAD}probability[^:]{{0,40}}(?::(.*)|$)",
    re.IGNORECASE | re.DOTALL,
)
_BEGIN, _END = r"(?<![^\W_])(?<!\.)", r"(?![^\W_])"  # not within a word: "fp32", "2x2", "1.2.3"
_NUMBER = r"(\d+(?:[.,]\d+)?|\.\d+)"
_NO_UNIT = rf"{_END}(?![.,]\d)"
_SHARE = re.compile(
    rf"{_BEGIN}{_NUMBER}(?:\s*(%|percent{_END})|\s*(?:/|out of)\s*(\d+){_NO_UNIT}|{_NO_UNIT})",
    re.IGNORECASE,
)
_UNIT = rf"(?:\s*(%|×(?!\d)|(?:percent|x|times|fold){_END})|{_NO_UNIT})"
_FACTOR = re.compile(
    rf"{_BEGIN}([+−-]?)\s*(?:([x×])\s*)?{_NUMBER}{_UNIT}"
    rf"(?:\s*(?:-|–|—|to)\s*{_NUMBER}{_UNIT})?",
    re.IGNORECASE,
)


def begins(text: str) -> bool:
    """Whether a text begins with its hypothesis."""
    return _HYPOTHESIS.match(text.lstrip()[:200].split("\n")[0]) is not None


def hypothesis(lines: Sequence[str]) -> str:
    """The paragraph that begins with "Hypothesis:", else the first one, as one line."""
    for i, line in enumerate(lines):
        match = _HYPOTHESIS.match(line)
        if match is not None:
            lead, middle, rest = match[1], match[2], match[3] or ""
            first = rest.strip()
            if ("*" in lead or "_" in lead) and not middle.strip():
                first = first.strip("*_")  # bold type ends in here
            return _one_line([first, *_paragraph(lines, i + 1, skip=not first)])
    return _one_line(_paragraph(lines, 0, skip=True))


def _paragraph(lines: Sequence[str], start: int, *, skip: bool) -> Iterator[str]:
    """Lines up to an empty one or another claim; `skip`: empty lines and headings before it."""
    length = 0
    for line in lines[start:]:
        if _PREDICTED.match(line) or _WORKS.match(line) or length > MOST_HYPOTHESIS:
            return
        text = line.strip()
        if skip and (not text or text.startswith("#")):
            continue
        if not text:
            return
        skip = False
        length += len(text)
        yield text


def _one_line(parts: Iterable[str]) -> str:
    words = " ".join(" ".join(parts).split())
    text = " ".join(printable(words).split())  # it is shown, and goes into other prompts, too
    return text if len(text) <= MOST_HYPOTHESIS else f"{text[: MOST_HYPOTHESIS - 2]} …"


def predicted(lines: Sequence[str]) -> float | None:
    """Speed-up that the reply states."""
    for i, line in enumerate(lines):
        match = _PREDICTED.match(line)
        if match is not None:
            value = (match[1] or "").strip(" \t*_")
            following = (text for text in lines[i + 1 : i + 3] if text.strip())
            return _factor(value or next(following, ""))
    return None


def works(lines: Sequence[str]) -> float | None:
    """Probability that the reply gives its file to be correct, 0 to 1; None where it gives none."""
    for line in lines:
        match = _WORKS.match(line)
        shares = [*_SHARE.finditer((match[1] or "")[:100])] if match is not None else []
        if shares:
            number, percent, whole = next((s for s in shares if s[2]), shares[0]).groups()
            value = float(number.replace(",", "."))
            if whole is not None:
                value = value / float(whole) if float(whole) else math.inf
            elif percent or value > 1:
                value /= 100
            return value if 0 <= value <= 1 else None
    return None


def _factor(text: str) -> float | None:
    """1.15 of "1.15×", "15 %", "1.1–1.2x", "about 15% faster"; None where there is no number.

    A number with a unit comes before others, such as a count of threads.
    """
    found = [*_FACTOR.finditer(text[:200])]
    if not found:
        return None
    match = next((f for f in found if f[2] or f[4] or f[6]), found[0])
    sign, before, low, unit, high, unit_high = match.groups()
    if (before or unit) and not unit_high:
        high = None  # of something else: "1.15× — 2 passes less"
    ends = [float(n.replace(",", ".")) for n in (low, high) if n]
    value = sum(ends) / len(ends)
    if (unit_high or unit or "").lower() in ("%", "percent"):
        slower = sign in ("-", "−") or "slower" in text[:200].lower()
        value = 1 + (-value if slower else value) / 100
    return value if 0 < value <= 1000 else None
