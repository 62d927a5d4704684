"""One model at one address, asked through the OpenAI-compatible chat interface."""

from __future__ import annotations

import asyncio
import time

import openai

from kagent.model.chat import ModelError, Prompt, Reply
from kagent.model.pricing import dollars
from kagent.model.spec import ModelConfig


class Endpoint:
    """One model at one address. Several calls may be in flight at once."""

    def __init__(self, model: ModelConfig) -> None:
        self.name = model.name
        self._model = model
        key = model.api_key.get_secret_value() if model.api_key is not None else "none"
        self._client = openai.AsyncOpenAI(
            api_key=key, base_url=model.base_url, timeout=model.reply_s, max_retries=model.retries
        )

    async def complete(self, prompt: Prompt) -> Reply:
        """The model's reply.

        Raises:
            ModelError: There is none that could be used, within the model's wall clock.
        """
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self._model.reply_s):
                made = await self._client.chat.completions.create(
                    model=self.name,
                    messages=[
                        {"role": "system", "content": prompt.system},
                        {"role": "user", "content": prompt.user},
                    ],
                    max_tokens=self._model.reply_tokens,
                )
        except (openai.OpenAIError, TimeoutError) as e:
            where = f"{self.name} at {self._model.host}"
            raise ModelError(f"{where}: {type(e).__name__}", permanent=False) from None
        usage = made.usage
        used = (usage.prompt_tokens, usage.completion_tokens) if usage else (None, None)
        return Reply(
            text=made.choices[0].message.content or "",
            model=self.name,
            truncated=made.choices[0].finish_reason == "length",
            input_tokens=used[0],
            output_tokens=used[1],
            dollars=dollars(self._model, *used),
            seconds=time.monotonic() - begun,
        )

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()
