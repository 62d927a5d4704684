"""Parameters that an endpoint takes. Servers differ, and the first refusal teaches.

Reasoning models refuse `temperature` and want `max_completion_tokens` instead of `max_tokens`; some
servers refuse `stream_options`, streaming, or a system message. A refusal that names one of these
is answered at once by the same request without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from kagent.llm.chat import join_surrogates
from kagent.llm.model_config import ModelConfig
from kagent.runs.ask import Prompt

Limit = Literal["max_tokens", "max_completion_tokens"]

_TOO_MUCH = ("too large", "at most", "context length", "context window", "exceed", "too many")


@dataclass(frozen=True, slots=True)
class EndpointParameters:
    """Parameters of requests to one endpoint, as far as they were learned."""

    limit: Limit | None = "max_tokens"  # None: neither name is taken
    temperature: bool = True
    stream: bool = True
    usage: bool = True  # asks for the token counts of a stream
    system: bool = True  # whether there may be a system message

    def request(self, model: ModelConfig, prompt: Prompt) -> dict[str, object]:
        """Parameters of a chat completion."""
        made: dict[str, object] = {"model": model.name, "messages": self._messages(prompt)}
        if self.limit is not None:
            made[self.limit] = model.reply_tokens
        if self.temperature and model.temperature is not None:
            made["temperature"] = model.temperature
        made["stream"] = self.stream
        if self.stream and self.usage:
            made["stream_options"] = {"include_usage": True}
        return made

    def _messages(self, prompt: Prompt) -> list[dict[str, str]]:
        system, user = join_surrogates(prompt.system), join_surrogates(prompt.user)
        if not system:
            return [{"role": "user", "content": user}]
        if not self.system:
            return [{"role": "user", "content": f"{system}\n\n{user}"}]
        return [{"role": "system", "content": system}, {"role": "user", "content": user}]

    def after(self, sent: Mapping[str, object], param: str, text: str) -> EndpointParameters | None:
        """The dialect without what a 400 blames; None where it blames nothing that was sent.

        Args:
            sent: The request that was refused.
            param: The parameter that the server names, or "".
            text: The server's own words.
        """
        said = text.lower()
        blamed = param if param in (*sent, "max_completion_tokens") else said
        if "stream_options" in sent and "stream_options" in blamed:
            return replace(self, usage=False)
        if self.limit is not None and ("max_tokens" in blamed or "max_completion" in blamed):
            if too_much(text):
                return None  # the name is right, and the number is not
            other: Limit | None = "max_completion_tokens" if self.limit == "max_tokens" else None
            return replace(self, limit=other)
        if "temperature" in sent and "temperature" in blamed:
            return replace(self, temperature=False)
        if self.system and "system" in said and "role" in said:
            return replace(self, system=False)
        if self.stream and "stream" in blamed:
            return replace(self, stream=False)
        return None

    @property
    def left_out(self) -> tuple[str, ...]:
        """Parameters that the endpoint was found not to take."""
        known = {
            "max_tokens": self.limit == "max_tokens",
            "a limit of tokens": self.limit is not None,
            "temperature": self.temperature,
            "streaming": self.stream,
            "stream_options": self.usage,
            "a system message": self.system,
        }
        return tuple(name for name, taken in known.items() if not taken)


def too_much(text: str) -> bool:
    """Whether a server says that a number is beyond what the model can do."""
    said = text.lower()
    return any(words in said for words in _TOO_MUCH)
