"""Reads a model's reply: a hypothesis, a predicted speed-up, one fenced Python file."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kagent_sandbox.verdict import Rejected, Stage, Status

_FENCED = re.compile(r"```(?:python|py)?\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a reply proposes."""

    hypothesis: str
    predicted: float | None  # speed-up over the parent: 1.2 = 20 % faster
    source: str


def read_reply(text: str, entry: str, *, truncated: bool = False) -> Answer | Rejected:
    """The answer in a reply's text, or why there is none, said so that the next attempt succeeds.

    Args:
        text: The whole reply.
        entry: Name of the function that the file must define.
        truncated: The reply was cut at a limit.
    """
    found = _FENCED.search(text)
    if found is None or f"def {entry}" not in found[1]:
        cut = "; the reply was cut short" if truncated else ""
        message = f"the reply holds no Python file that defines {entry}{cut}"
        return Rejected(Stage.PARSE, Status.NO_KERNEL, message)
    hypothesis = re.search(r"^Hypothesis:(.*)$", text, re.MULTILINE)
    predicted = re.search(r"^Predicted speed-up:\s*(\d+\.?\d*)", text, re.MULTILINE)
    return Answer(
        hypothesis[1].strip() if hypothesis else "",
        float(predicted[1]) if predicted else None,
        found[1],
    )
