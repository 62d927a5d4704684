"""The proposer that asks language models: an ask becomes a prompt, a reply becomes a draft."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kagent.llm.chat import ModelError, Reply
from kagent.llm.drafts import draft_of, origin_of, text_of
from kagent.llm.model_choice import choose
from kagent.llm.model_config import ModelConfig
from kagent.llm.pricing import CHARS_PER_TOKEN, most_dollars
from kagent.llm.reply import read_reply
from kagent.llm.spend_limit import CallBound, SpendLimit
from kagent.runs.ask import Ask, Draft, Prompt
from kagent.runs.cost import ModelCall
from kagent.runs.events import Called, Observer
from kagent.runs.lineage import Operator

GIVEN_UP = "given up: the run ended first"
"""The error of a call that was in flight then. It may cost what it would have."""


class Chat(Protocol):
    """`kagent.llm.endpoint.Endpoint`, as far as it is needed here."""

    async def complete(self, prompt: Prompt) -> Reply:
        """The model's reply. Raises ModelError."""

    async def close(self) -> None:
        """Close its connections."""


@dataclass(frozen=True, slots=True)
class Model:
    """One model that can be asked."""

    config: ModelConfig
    chat: Chat


class ModelProposer:
    """A `Proposer`."""

    name = "model"
    operators: tuple[Operator, ...] = (
        Operator.STRUCTURE,
        Operator.REWRITE,
        Operator.CROSSOVER,
        Operator.RECOMBINE,
        Operator.REPAIR,
    )
    resamples = 2  # a duplicate costs a call

    def __init__(
        self,
        models: Sequence[Model],
        write: Callable[[Ask], Prompt],
        keep: Callable[[ModelCall, str, str | None], None],
        spend_limit: SpendLimit,
        observe: Observer,
        *,
        at_once: int,
        bandit: bool = False,
    ) -> None:
        """`write` renders an ask, `keep` stores a call with its prompt and reply."""
        self._models: Mapping[str, Model] = {m.config.name: m for m in models}
        self._write = write
        self._keep = keep
        self._spend_limit = spend_limit
        self._observe = observe
        self.at_once = at_once
        self._bandit = bandit
        self._failed = Counter[str]()  # calls in a row, by model
        self._paid: dict[int, list[ModelCall]] = {}  # by ask: failures and duplicates included

    async def propose(self, ask: Ask) -> Draft | None:
        """Return the model's answer."""
        prompt = self._write(ask)
        reply = await self._call(ask, prompt)
        answer = read_reply(reply.text, ask.setting.task.entry, truncated=reply.truncated)
        return draft_of(ask, answer, origin_of(self._paid[ask.id], prompt.card))

    async def _call(self, ask: Ask, prompt: Prompt) -> Reply:
        configs = [m.config for m in self._models.values()]
        rng = ask.rng("model")  # not the numbers by which a card is chosen
        name = choose(configs, ask.lineage, rng, bandit=self._bandit, failed=self._failed)
        model = self._models[name]
        most = most_of(model.config, prompt)
        async with self._spend_limit.reserve(most):
            begun = time.monotonic()
            call = ModelCall(
                ask.id,
                ask.attempt,
                model.config.name,
                prompt.card,
                0.0,
                most_tokens=most.tokens,
                most_dollars=most.dollars or 0.0,
            )
            try:
                reply = await model.chat.complete(prompt)
            except ModelError as e:
                call = replace(
                    call,
                    seconds=time.monotonic() - begun,
                    input_tokens=e.usage.input_tokens,
                    output_tokens=e.usage.output_tokens,
                    dollars=e.usage.dollars,
                    error=str(e),
                )
                self._over(call, prompt, None)
                self._failed[name] += 1
                raise
            except asyncio.CancelledError:
                waited_s = time.monotonic() - begun
                self._over(replace(call, seconds=waited_s, error=GIVEN_UP), prompt, None)
                raise
            call = replace(
                call,
                seconds=reply.seconds,
                input_tokens=reply.input_tokens,
                output_tokens=reply.output_tokens,
                dollars=reply.dollars,
                truncated=reply.truncated,
            )
            self._over(call, prompt, reply.text)
            self._failed[name] = 0
            return reply

    def _over(self, call: ModelCall, prompt: Prompt, reply: str | None) -> None:
        self._paid.setdefault(call.ask, []).append(call)
        self._spend_limit.charge(call)
        self._keep(call, text_of(prompt), reply)
        self._observe(Called(call, self._spend_limit.spent))


def most_of(model: ModelConfig, prompt: Prompt) -> CallBound:
    """The most that a call can take."""
    chars = len(prompt.system) + len(prompt.user)
    tokens = chars // CHARS_PER_TOKEN + model.reply_tokens
    return CallBound(tokens, most_dollars(model, chars))
