"""One model at one address, asked through the OpenAI-compatible chat interface.

The SDK sends, waits between tries and honours Retry-After. This module adds a wall clock over all
tries, and handles streams that stall or break, servers that answer with something else, and texts
that hold the key.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
import time
from typing import Any

import httpx2
import openai

from kagent.llm import failures
from kagent.llm.chat import ModelError, Reply, Usage
from kagent.llm.failures import Failure, Scrub, Unusable
from kagent.llm.model_config import ModelConfig
from kagent.llm.parameters import EndpointParameters
from kagent.llm.pricing import dollars
from kagent.llm.response import ResponseBuffer
from kagent.llm.transport import CALL, HttpCall, on_request, on_response, read_body, read_stream
from kagent.runs.ask import Prompt

CONNECT_S = 10.0


@functools.cache
def _authorities(trust_env: bool) -> ssl.SSLContext:
    """Certificates that are trusted, for all endpoints: to read them takes 30 ms of CPU time."""
    return httpx2.create_ssl_context(trust_env=trust_env)


class Endpoint:
    """One model at one address. Several calls may be in flight at once."""

    def __init__(self, model: ModelConfig, connect_s: float = CONNECT_S) -> None:
        """`connect_s`: seconds that a connection may take."""
        self.name = model.name
        self._model = model
        self._scrub = Scrub(model)
        self._parameters = EndpointParameters()
        # A proxy cannot reach this machine's loopback.
        http = openai.DefaultAsyncHttpxClient(
            trust_env=not model.local,
            verify=_authorities(not model.local),
            event_hooks={"request": [on_request], "response": [on_response]},
        )
        key = model.api_key.get_secret_value() if model.api_key is not None else "none"
        self._client = openai.AsyncOpenAI(
            api_key=key,
            base_url=model.base_url,
            timeout=openai.Timeout(model.reply_s, connect=connect_s),
            max_retries=model.retries,
            http_client=http,
        )

    @property
    def left_out(self) -> tuple[str, ...]:
        """Parameters that the endpoint was found not to take, and that are no longer sent."""
        return self._parameters.left_out

    async def complete(self, prompt: Prompt) -> Reply:
        """The model's reply.

        Raises:
            ModelError: There is none that could be used, within the model's wall clock.
        """
        call = HttpCall(time.monotonic() + self._model.reply_s)
        CALL.set(call)
        failure = await self._attempt(prompt, call)
        usage = self._usage(call)
        if failure is not None:
            # Raised outside of every handler: no cause that could hold the request hangs on it.
            where = f"model {self._model.name} at {self._model.host}"
            text = self._scrub(f"{where}: {failure.what}; {failure.remedy}")
            raise ModelError(
                " ".join(text.split()),
                permanent=failure.permanent,
                served=failure.served,
                usage=usage,
                wait_s=failure.wait_s,
            )
        buffer = call.buffer
        return Reply(
            text=self._scrub.cut(buffer.text) if buffer.cut else self._scrub(buffer.text),
            model=self.name,
            truncated=buffer.truncated,
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            dollars=usage.dollars,
            seconds=usage.seconds,
        )

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()

    async def _attempt(self, prompt: Prompt, call: HttpCall) -> Failure | None:
        """Make one call; return why there is no usable reply in `call.buffer`, or None if there is
        one.
        """
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + self._model.reply_s):
                await self._converse(prompt, call)
        except TimeoutError:
            return self._judge(call.buffer) if call.buffer.complete else self._too_late(call)
        except Unusable as e:
            return e.failure
        except openai.APIStatusError as e:
            return failures.of_status(e, self._model, call.tries, self._scrub)
        except (openai.APIConnectionError, httpx2.HTTPError, httpx2.StreamError, OSError) as e:
            if call.buffer.complete:
                return self._judge(call.buffer)
            if call.buffer.seen:
                return self._broken(call.buffer)
            return failures.of_connection(e, call.tries, self._scrub)
        except openai.APIError as e:  # an error object in a stream
            return failures.of_stated(e.body or e.message, self._scrub)
        except UnicodeEncodeError:
            return failures.KEY_UNSENDABLE
        except (openai.OpenAIError, ValueError, RecursionError) as e:
            text = failures.shown(self._scrub(str(e)))
            return Failure(f"sent something that is no reply ({text})", failures.ADDRESS_REMEDY)
        return self._judge(call.buffer)

    async def _converse(self, prompt: Prompt, call: HttpCall) -> None:
        """Send, and send again without what the endpoint does not take."""
        while True:
            used = self._parameters
            request = used.request(self._model, prompt)
            try:
                await self._listen(request, call.buffer)
            except (openai.BadRequestError, openai.UnprocessableEntityError) as e:
                learned = used.after(request, e.param or "", failures.words(e))
                if learned is None:
                    raise
                if self._parameters == used:  # else another call has learned meanwhile
                    self._parameters = learned
            else:
                return

    async def _listen(self, request: dict[str, Any], buffer: ResponseBuffer) -> None:
        create = self._client.chat.completions.with_streaming_response.create
        async with create(**request) as response:
            kind = response.headers.get("content-type", "").lower()
            if not request["stream"] or "json" in kind or "html" in kind:
                await read_body(response.iter_bytes(), kind, buffer, self._scrub)
            else:
                await read_stream(response.iter_bytes(), buffer)

    def _judge(self, buffer: ResponseBuffer) -> Failure | None:
        """Return the fault of a reply that has ended, or None."""
        again = failures.AGAIN
        if buffer.error is not None:
            return failures.of_stated(buffer.error, self._scrub)
        if not buffer.seen:
            what = "answered without choices, which is no chat completion"
            return Failure(what, failures.ADDRESS_REMEDY)
        if buffer.finish == "content_filter":
            return Failure("its content filter stopped the reply", again, served=True)
        if buffer.finish == "error":
            return Failure("failed in mid-reply", again, served=True)
        if buffer.text.strip():
            return None if buffer.complete or buffer.cut else self._broken(buffer)
        if buffer.refusal:
            said = failures.shown(self._scrub(buffer.refusal))
            return Failure(f"refused ({said})", again, served=True)
        if buffer.truncated:
            spent = f"all {buffer.output_tokens} tokens" if buffer.output_tokens else "all tokens"
            what = f"spent {spent} of its limit on reasoning and wrote nothing"
            return Failure(what, f"raise reply_tokens ({self._model.reply_tokens})", served=True)
        return Failure("sent an empty reply", again, served=True)

    def _broken(self, buffer: ResponseBuffer) -> Failure:
        what = f"ended the reply early, after {buffer.characters} characters"
        return Failure(what, "try again, or check the network and the server", served=True)

    def _too_late(self, call: HttpCall) -> Failure:
        limit = f"{self._model.reply_s:g} s"
        if call.buffer.seen:
            what = (
                f"did not end its reply within {limit} ({call.buffer.characters} characters came)"
            )
            remedy = "raise reply_s, lower reply_tokens, or take a faster model"
            return Failure(what, remedy, served=True)
        if call.last:
            what = f"gave no reply within {limit} ({self._scrub(call.last)}, tried {call.tries}×)"
            return Failure(what, "try again later, or lower in_flight", served=True)
        remedy = "raise reply_s, or take a faster model"
        return Failure(f"gave no reply within {limit}", remedy, served=True)

    def _usage(self, call: HttpCall) -> Usage:
        buffer = call.buffer
        known = buffer.dollars if self._model.host.endswith("openrouter.ai") else None
        if known is None:
            known = dollars(
                self._model, buffer.input_tokens, buffer.output_tokens, buffer.cached_tokens
            )
        seconds = time.monotonic() - call.begun
        return Usage(buffer.input_tokens, buffer.output_tokens, known, seconds)
