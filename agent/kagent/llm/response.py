"""Collects a reply from what a server sends, which need not be what the interface says.

A stream of chunks and a plain answer are read alike. Reasoning is counted and not kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MOST_CHARACTERS = 400_000
"""Most characters of a reply: a file of 10,000 lines. Anything longer is no kernel."""
MOST_REASONING = 4_000_000
"""Characters of reasoning, which are thrown away, before a reply is given up."""
_CUT = ("length", "max_tokens", "max_output_tokens")


@dataclass(slots=True)
class ResponseBuffer:
    """The part of one reply that has been received so far."""

    finish: str = ""  # why the model ended; "" while it goes on
    cut: bool = False  # stopped here, at one of the limits above
    reasoned: int = 0  # characters
    seen: bool = False  # anything that looks like a chat completion
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int = 0
    dollars: float | None = None  # some routers say what they charged
    error: object = None  # an error object sent in place of a reply
    closed: bool = False  # the sender had its say: a whole answer, or the token counts of a stream
    _parts: list[str] = field(default_factory=list)
    _refusal: list[str] = field(default_factory=list)
    _length: int = 0

    def take(self, received: object) -> None:
        """Add one chunk of a stream, or a whole answer."""
        if not isinstance(received, dict):
            return
        self.error = self.error or received.get("error")
        counted = self._count(received.get("usage"))
        choices = received.get("choices")
        if not isinstance(choices, list):
            return
        self.seen = True
        self.closed = self.closed or (counted and not choices)
        for choice in choices:
            if isinstance(choice, dict) and choice.get("index") in (None, 0):
                self._choice(choice)

    def _choice(self, choice: dict[str, object]) -> None:
        message = choice.get("delta") or choice.get("message")
        if isinstance(message, dict):
            self._message(message)
        finish = choice.get("finish_reason")
        if finish and isinstance(finish, str):
            self.finish = finish

    def _message(self, message: dict[str, object]) -> None:
        content = message.get("content")
        if isinstance(content, str):
            self._add(content)
            if len(message) == 1:
                return  # as most chunks of a stream
        else:
            self._add(_text(content))
        refusal = message.get("refusal")
        if isinstance(refusal, str):
            self._refusal.append(refusal)
        for name in ("reasoning_content", "reasoning"):
            thought = message.get(name)
            if isinstance(thought, str):
                self.reasoned += len(thought)
                break
        self.cut = self.cut or self.reasoned > MOST_REASONING

    def _add(self, text: str) -> None:
        if not text:
            return
        room = MOST_CHARACTERS - self._length
        self._parts.append(text[:room])
        self._length += len(self._parts[-1])
        self.cut = self.cut or len(text) > room

    def _count(self, usage: object) -> bool:
        """Note the token counts; whether there are any."""
        if usage is None:
            return False
        given = _number(member(usage, "prompt_tokens"))
        written = _number(member(usage, "completion_tokens"))
        if given is None or written is None:
            return False
        # Some servers count reasoning in the total alone.
        total = _number(member(usage, "total_tokens")) or 0
        self.input_tokens, self.output_tokens = given, max(written, total - given)
        details = member(usage, "prompt_tokens_details")
        self.cached_tokens = min(_number(member(details, "cached_tokens")) or 0, given)
        cost = member(usage, "cost")
        if isinstance(cost, int | float) and not isinstance(cost, bool) and 0 <= cost < math.inf:
            self.dollars = float(cost)
        return True

    @property
    def text(self) -> str:
        """The answer, without reasoning."""
        return "".join(self._parts)

    @property
    def begun(self) -> bool:
        """Whether the model has said or thought anything."""
        return self._length > 0 or self.reasoned > 0

    @property
    def characters(self) -> int:
        """Length of `text`."""
        return self._length

    @property
    def refusal(self) -> str:
        """Text that the model sent in place of an answer."""
        return "".join(self._refusal)

    @property
    def truncated(self) -> bool:
        """Whether the text ends before the answer does."""
        return self.cut or self.finish.lower() in _CUT

    @property
    def complete(self) -> bool:
        """Whether the model ended its reply."""
        return bool(self.finish) or (self.closed and self._length > 0)


def member(value: object, name: str) -> object:
    """A field of a JSON object; None where there is none."""
    return value.get(name) if isinstance(value, dict) else None


def _text(content: object) -> str:
    """The text of a message that is no string: some servers send a list of parts."""
    if isinstance(content, list):
        parts = [member(p, "text") for p in content if member(p, "type") in (None, "text")]
        return "".join(p for p in parts if isinstance(p, str))
    return ""


def _number(value: object) -> int | None:
    """A count of tokens, if it is one."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e12:
        return int(value)
    return None
