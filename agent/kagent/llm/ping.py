"""One small call to each model: what works, and what it costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kagent.llm.chat import ModelError, Reply
from kagent.llm.endpoint import CONNECT_S, Endpoint
from kagent.llm.model_config import ModelConfig
from kagent.llm.pricing import most_dollars
from kagent.runs.ask import Prompt
from kagent.runs.cost import ModelCall

PING_REPLY_S = 60.0
"""A model that needs longer for one word is of no use in a search."""
_BEFORE_A_RUN_S = 4.0
"""Lasting faults (no server, key, name) show within it. A slow model goes on later."""
_BEFORE_A_RUN_CONNECT_S = 3.0
_BEFORE_A_RUN_TOKENS = 512
_PROMPT = Prompt("You answer in one word.", "Are you ready?")


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a trial call."""

    model: ModelConfig
    result: Reply | ModelError
    left_out: tuple[str, ...]  # parameters that the endpoint does not take

    @property
    def call(self) -> ModelCall:
        """The call as a run counts it. It belongs to no ask."""
        result = self.result
        usage = result.usage if isinstance(result, ModelError) else result
        return ModelCall(
            ask=-1,
            attempt=0,
            model=self.model.name,
            card="",
            seconds=usage.seconds,
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            dollars=usage.dollars,
            truncated=isinstance(result, Reply) and result.truncated,
            error=str(result) if isinstance(result, ModelError) else "",
        )

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
    patient = [replace(m, reply_s=min(m.reply_s, PING_REPLY_S), retries=1) for m in models]
    return asyncio.run(_try_all(patient, CONNECT_S))


def require_models(
    models: Sequence[ModelConfig], say: Callable[[str], None]
) -> Sequence[ModelCall]:
    """Ask each model for one word before a run measures anything.

    A model that is there but busy or slow is told, and holds nothing up.

    Args:
        models: All that the run may ask.
        say: Is told one line per step.

    Returns:
        The calls, for the run's costs. Their ask is -1.

    Raises:
        ModelError: One is not there: no server, a refused key, an unknown name, wrong settings.
    """
    say(f"asking {', '.join(f'{m.name} at {m.host}' for m in models)} for one word")
    quick = [
        replace(
            m,
            reply_s=min(m.reply_s, _BEFORE_A_RUN_S),
            reply_tokens=min(m.reply_tokens, _BEFORE_A_RUN_TOKENS),
            retries=0,
        )
        for m in models
    ]
    trials = asyncio.run(_try_all(quick, _BEFORE_A_RUN_CONNECT_S))
    errors = [t.result for t in trials if isinstance(t.result, ModelError)]
    for error in errors:
        if not error.served:
            raise error
    for error in errors:
        say(f"{error} (the run begins all the same)")
    return [t.call for t in trials]


async def _try_all(models: Sequence[ModelConfig], connect_s: float) -> list[Trial]:
    return await asyncio.gather(*(_try(m, connect_s) for m in models))


async def _try(model: ModelConfig, connect_s: float) -> Trial:
    endpoint = Endpoint(model, connect_s)
    result: Reply | ModelError
    try:
        result = await endpoint.complete(_PROMPT)
    except ModelError as e:
        result = e
    finally:
        await endpoint.close()
    return Trial(model, result, endpoint.left_out)
