"""Requests to a model, its replies, and its failures."""

from __future__ import annotations

from dataclasses import dataclass

from kagent_sandbox.errors import KagentError


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's text, and what it cost."""

    text: str
    model: str  # as the user named it
    truncated: bool  # cut at the token limit, or at kagent's own limit of characters
    input_tokens: int | None  # None: the endpoint did not say
    output_tokens: int | None  # reasoning tokens included
    dollars: float | None  # None: no price is known, or no tokens were reported
    seconds: float  # from the request to the end of the reply


@dataclass(frozen=True, slots=True)
class Usage:
    """Cost of a failed call, as far as the endpoint reported it."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    dollars: float | None = None
    seconds: float = 0.0


NOTHING = Usage()


class ModelError(KagentError):
    """A call that gave no usable reply. The text is one line: which model and host, what happened,
    what to do.

    Attributes:
        permanent: Asking again cannot help: the key, the model's name, the quota, the address.
        served: The model is there: only this reply came to nothing, or it is busy.
        usage: What the call cost: an empty or refused reply is paid for too.
        wait_s: Seconds that the server asks to wait before another call; 0 where it does not.
    """

    def __init__(
        self,
        message: str,
        *,
        permanent: bool,
        served: bool = False,
        usage: Usage = NOTHING,
        wait_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.permanent = permanent
        self.served = served
        self.usage = usage
        self.wait_s = wait_s


def join_surrogates(text: str) -> str:
    """The text with halves of characters (lone surrogates, which JSON may hold and no file can)
    joined where both are there, and replaced elsewhere.
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
