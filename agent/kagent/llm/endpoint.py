"""One model at one address, asked through the OpenAI-compatible chat interface.

The SDK sends, waits between tries and honours Retry-After. What it leaves open is closed here: a
wall clock over all tries, streams that stall or break, servers that answer with something else than
they were asked for, and texts that hold the key.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx2
import openai

from kagent.llm import failures
from kagent.llm.chat import ModelError, Reply, Usage
from kagent.llm.failures import Failure, Scrub, Unusable
from kagent.llm.model_config import ModelConfig
from kagent.llm.parameters import Dialect
from kagent.llm.pricing import dollars
from kagent.llm.response import Heard
from kagent.llm.transport import CALL, Call, on_request, on_response, read_body, read_stream
from kagent.runs.brief import Prompt

CONNECT_S = 10.0


class Endpoint:
    """One model at one address. Several calls may be in flight at once."""

    def __init__(self, model: ModelConfig) -> None:
        self.name = model.name
        self._model = model
        self._scrub = Scrub(model)
        self._dialect = Dialect()
        # A proxy cannot reach this machine's loopback.
        http = openai.DefaultAsyncHttpxClient(
            trust_env=not model.local,
            event_hooks={"request": [on_request], "response": [on_response]},
        )
        key = model.api_key.get_secret_value() if model.api_key is not None else "none"
        self._client = openai.AsyncOpenAI(
            api_key=key,
            base_url=model.base_url,
            timeout=openai.Timeout(model.reply_s, connect=CONNECT_S),
            max_retries=model.retries,
            http_client=http,
        )

    @property
    def left_out(self) -> tuple[str, ...]:
        """Parameters that the endpoint was found not to take, and that are no longer sent."""
        return self._dialect.left_out

    async def complete(self, prompt: Prompt) -> Reply:
        """The model's reply.

        Raises:
            ModelError: There is none that could be used, within the model's wall clock.
        """
        call = Call(time.monotonic() + self._model.reply_s)
        CALL.set(call)
        failure = await self._attempt(prompt, call)
        usage = self._usage(call)
        if failure is not None:
            # Raised outside of every handler: no cause that could hold the request hangs on it.
            where = f"model {self._model.name} at {self._model.host}"
            text = self._scrub(f"{where}: {failure.what}; {failure.remedy}")
            raise ModelError(" ".join(text.split()), permanent=failure.permanent, usage=usage)
        heard = call.heard
        return Reply(
            text=self._scrub.cut(heard.text) if heard.cut else self._scrub(heard.text),
            model=self.name,
            truncated=heard.truncated,
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            dollars=usage.dollars,
            seconds=usage.seconds,
        )

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()

    async def _attempt(self, prompt: Prompt, call: Call) -> Failure | None:
        """Why there is no usable reply in `call.heard`; None if there is."""
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + self._model.reply_s):
                await self._converse(prompt, call)
        except TimeoutError:
            return self._judge(call.heard) if call.heard.complete else self._too_late(call)
        except Unusable as e:
            return e.failure
        except openai.APIStatusError as e:
            return failures.of_status(e, self._model, call.tries, self._scrub)
        except (openai.APIConnectionError, httpx2.HTTPError, httpx2.StreamError, OSError) as e:
            if call.heard.complete:
                return self._judge(call.heard)
            if call.heard.seen:
                return self._broken(call.heard)
            return failures.of_connection(e, call.tries, self._scrub)
        except openai.APIError as e:  # an error object in a stream
            return failures.of_stated(e.body or e.message, self._scrub)
        except UnicodeEncodeError:
            return failures.KEY_UNSENDABLE
        except (openai.OpenAIError, ValueError, RecursionError) as e:
            text = failures.shown(self._scrub(str(e)))
            return Failure(f"sent something that is no reply ({text})", failures.ADDRESS_REMEDY)
        return self._judge(call.heard)

    async def _converse(self, prompt: Prompt, call: Call) -> None:
        """Send, and send again without what the endpoint does not take."""
        while True:
            used = self._dialect
            request = used.request(self._model, prompt)
            try:
                await self._listen(request, call.heard)
            except (openai.BadRequestError, openai.UnprocessableEntityError) as e:
                learned = used.after(request, e.param or "", failures.words(e))
                if learned is None:
                    raise
                if self._dialect == used:  # else another call has learned meanwhile
                    self._dialect = learned
            else:
                return

    async def _listen(self, request: dict[str, Any], heard: Heard) -> None:
        create = self._client.chat.completions.with_streaming_response.create
        async with create(**request) as response:
            kind = response.headers.get("content-type", "").lower()
            if not request["stream"] or "json" in kind or "html" in kind:
                await read_body(response.iter_bytes(), kind, heard, self._scrub)
            else:
                await read_stream(await response.parse(), heard)

    def _judge(self, heard: Heard) -> Failure | None:
        """What is wrong with a reply that has ended."""
        again = failures.AGAIN
        if heard.error is not None:
            return failures.of_stated(heard.error, self._scrub)
        if not heard.seen:
            what = "answered without choices, which is no chat completion"
            return Failure(what, failures.ADDRESS_REMEDY)
        if heard.finish == "content_filter":
            return Failure("its content filter stopped the reply", again)
        if heard.finish == "error":
            return Failure("failed in mid-reply", again)
        if heard.text.strip():
            return None if heard.complete or heard.cut else self._broken(heard)
        if heard.refusal:
            return Failure(f"refused ({failures.shown(self._scrub(heard.refusal))})", again)
        if heard.truncated:
            spent = f"all {heard.output_tokens} tokens" if heard.output_tokens else "all tokens"
            what = f"spent {spent} of its limit on reasoning and wrote nothing"
            return Failure(what, f"raise reply_tokens ({self._model.reply_tokens})")
        return Failure("sent an empty reply", again)

    def _broken(self, heard: Heard) -> Failure:
        what = f"broke the reply off after {heard.characters} characters"
        return Failure(what, "try again, or check the network and the server")

    def _too_late(self, call: Call) -> Failure:
        limit = f"{self._model.reply_s:g} s"
        if call.heard.seen:
            what = f"did not end its reply within {limit} ({call.heard.characters} characters came)"
            return Failure(what, "raise reply_s, lower reply_tokens, or take a faster model")
        if call.last:
            what = f"gave no reply within {limit} ({self._scrub(call.last)}, tried {call.tries}×)"
            return Failure(what, "try again later, or lower in_flight")
        return Failure(f"gave no reply within {limit}", "raise reply_s, or take a faster model")

    def _usage(self, call: Call) -> Usage:
        heard = call.heard
        known = heard.dollars if self._model.host.endswith("openrouter.ai") else None
        if known is None:
            known = dollars(
                self._model, heard.input_tokens, heard.output_tokens, heard.cached_tokens
            )
        seconds = time.monotonic() - call.begun
        return Usage(heard.input_tokens, heard.output_tokens, known, seconds)
