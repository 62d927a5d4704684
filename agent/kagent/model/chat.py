"""What a model is sent, what comes back, and how a call fails."""

from __future__ import annotations

from dataclasses import dataclass

from kagent_sandbox.errors import KagentError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One system and one user message."""

    system: str
    user: str
    card: str = ""  # name of the technique card in it


@dataclass(frozen=True, slots=True)
class Usage:
    """What a call used up, as far as the endpoint said."""

    input_tokens: int | None = None
    output_tokens: int | None = None  # reasoning tokens included
    dollars: float | None = None  # None: no price is known, or no tokens were reported
    seconds: float = 0.0  # from the request to the end of the reply


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's text, and what it cost."""

    text: str
    model: str  # as the user named it
    truncated: bool  # cut at the token limit, or at kagent's own limit of characters
    usage: Usage = Usage()

    @property
    def input_tokens(self) -> int | None:
        """Tokens of the prompt."""
        return self.usage.input_tokens

    @property
    def output_tokens(self) -> int | None:
        """Tokens that were written, reasoning included."""
        return self.usage.output_tokens

    @property
    def dollars(self) -> float | None:
        """Price of the call; None where no price is known."""
        return self.usage.dollars

    @property
    def seconds(self) -> float:
        """From the request to the end of the reply."""
        return self.usage.seconds


class ModelError(KagentError):
    """A call that gave no usable reply. The text is one line: which model and host, what happened,
    what to do.

    Attributes:
        permanent: Asking again cannot help: the key, the model's name, the quota, the address.
        usage: What the call cost all the same: an empty reply is paid for too.
    """

    def __init__(self, message: str, *, permanent: bool, usage: Usage = Usage()) -> None:
        super().__init__(message)
        self.permanent = permanent
        self.usage = usage
