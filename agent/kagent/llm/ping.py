"""One small call to each model: what works, and what it costs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kagent.llm.chat import ModelError, Reply
from kagent.llm.endpoint import Endpoint
from kagent.llm.model_config import ModelConfig
from kagent.llm.pricing import most_dollars
from kagent.runs.ask import Prompt

PATIENCE_S = 60.0
"""A model that needs longer for one word is of no use in a search."""
_PROMPT = Prompt("You answer in one word.", "Are you ready?")


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a trial call."""

    model: ModelConfig
    result: Reply | ModelError
    left_out: tuple[str, ...]  # parameters that the endpoint does not take

    @property
    def text(self) -> str:
        """One line for the user."""
        reply = self.result
        if isinstance(reply, ModelError):
            return str(reply)
        said = f"replied in {reply.seconds:.1f} s"
        parts = [f"{said}, cut at the token limit" if reply.truncated else said]
        if reply.input_tokens is None:
            parts.append("reports no token counts, so limits assume the most that a call can take")
        else:
            parts.append(f"{reply.input_tokens} + {reply.output_tokens} tokens")
        if reply.dollars is not None:
            parts.append(f"${reply.dollars:.6f}")
        elif most_dollars(self.model, 1) is None:
            parts.append("no price is known (input_price and output_price in kagent.toml set it)")
        if self.left_out:
            parts.append(f"does not take, and is not sent: {', '.join(self.left_out)}")
        return f"{self.model.host}: {'; '.join(parts)}"


def try_models(models: Sequence[ModelConfig]) -> list[Trial]:
    """Ask each of them, all at once."""

    async def all_of_them() -> list[Trial]:
        return await asyncio.gather(*map(_try, models))

    return asyncio.run(all_of_them())


async def _try(model: ModelConfig) -> Trial:
    endpoint = Endpoint(replace(model, reply_s=min(model.reply_s, PATIENCE_S), retries=1))
    result: Reply | ModelError
    try:
        result = await endpoint.complete(_PROMPT)
    except ModelError as e:
        result = e
    finally:
        await endpoint.close()
    return Trial(model, result, endpoint.left_out)
