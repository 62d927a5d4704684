"""Comparison of a candidate's or a scenario's outcome with the expected one."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from kagent_sandbox.data.build import Built
from kagent_sandbox.data.verdict import Passed, Rejected
from kagent_sandbox.errors import KagentError

from kagent.selftest.catalogue import ESCAPED, PASSED

# An attack that succeeds says so: host code by what it raises, native code by what it prints.
_SHOUT = re.compile(r"SystemError: escaped|^escaped", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class EntryOutcome:
    """The outcome of one entry.

    `outcome` is "passed", a stage and a status, "escaped", "error" (the machine's, not the
    candidate's) or whatever a scenario calls its outcomes. `log` is what the candidate printed.
    """

    outcome: str
    message: str = ""
    log: str = ""
    seconds: float = 0.0
    kernel_us: float | None = None  # of the first benchmark case, where it was timed


def of_verdict(verdict: object, log: str = "") -> EntryOutcome:
    """A verdict's outcome; what is not `Rejected` has passed."""
    if isinstance(verdict, Rejected):
        case = f" ({verdict.case})" if verdict.case else ""
        return EntryOutcome(f"{verdict.stage} {verdict.status}", f"{verdict.message}{case}", log)
    if isinstance(verdict, Passed):
        return EntryOutcome(PASSED, "", log, kernel_us=verdict.timings[0].kernel_us)
    if isinstance(verdict, Built) and verdict.log and not log:
        log = verdict.log
    return EntryOutcome(PASSED, "", log)


def of_error(error: KagentError) -> EntryOutcome:
    """A failure of the machine."""
    return EntryOutcome("error", f"{type(error).__name__}: {error}")


def escapes(seen: EntryOutcome, token: str) -> list[str]:
    """List the escapes in a candidate's own output."""
    words = f"{seen.message}\n{seen.log}"
    found = ["the secret appeared in its output"] if token in words else []
    if shout := _SHOUT.search(words):
        line = words[shout.start() :].splitlines()[0]
        found.append(f"it says: {line[:200]}")
    return found


def escaped(seen: EntryOutcome, how: list[str]) -> EntryOutcome:
    """Outcome for comparison. What an attack achieved outranks any verdict."""
    if not how:
        return seen
    text = f"{'; '.join(how)} (its verdict: {seen.outcome} {seen.message})".strip()
    return replace(seen, outcome=ESCAPED, message=text)


def miss(expect: tuple[str, ...], says: str, seen: EntryOutcome) -> str | None:
    """Return why the outcome is not the expected one, or None."""
    wanted = " or ".join(expect)
    if seen.outcome not in expect:
        return f"expected {wanted}, got {seen.outcome}: {seen.message or '(no message)'}"
    words = seen.log if seen.outcome == PASSED else seen.message
    if says and not re.search(says, words):
        where = "what it printed" if seen.outcome == PASSED else "the message"
        found = f"nothing like {says!r}: {words or '(nothing)'}"
        return f"{seen.outcome} as expected, but {where} has {found}"
    return None
