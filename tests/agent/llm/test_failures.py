"""Every way in which a call fails, against a real server, and what the user is told."""

import asyncio
import contextlib
import gc
import json
import socket
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kagent.llm import transport as wire
from kagent.llm.chat import ModelError, Reply
from kagent.llm.endpoint import CONNECT_S, Endpoint
from kagent.llm.failures import Scrub
from kagent.llm.response import ResponseBuffer
from kagent.runs.ask import Prompt
from llm_server import (
    GOOD,
    KEY,
    STREAM,
    RawServer,
    ask_async,
    chunk,
    model_at,
    plain,
    says,
    send,
    sse,
    streams,
    usage_chunk,
)
from pydantic import SecretStr
from sampling import examples

PROMPT = Prompt("be brief", "say hello")


def fails(*answers, **changes):
    """The error, and how many requests were made."""

    async def run():
        async with RawServer(*answers) as server:
            with pytest.raises(ModelError) as caught:
                await ask_async(model_at(server.url, **changes), PROMPT)
            return caught.value, server

    error, server = asyncio.run(run())
    text = str(error)
    assert "\n" not in text
    assert text.startswith(f"model tiny at {server.url[7:-3]}: ")
    assert "; " in text  # what happened; what to do
    assert KEY not in text
    assert KEY not in repr(error)
    assert error.__cause__ is None
    assert error.__context__ is None
    return error, len(server.requests)


def error_body(message, **more):
    return {"error": {"message": message, **more}}


PERMANENT = [
    (
        says(401, error_body("Incorrect API key provided", code="invalid_api_key")),
        "refused the key (401: Incorrect API key provided); check KAGENT_API_KEY",
    ),
    (says(403, error_body("no access to project")), "refused access (403: no access"),
    (
        says(404, error_body("The model `tiny` does not exist", code="model_not_found")),
        "does not know the model (404: The model `tiny` does not exist",
    ),
    (
        says(400, error_body("tiny is not a valid model ID", code=400)),
        "does not know the model (400: tiny is not a valid model ID); check the model's name",
    ),
    (
        says(400, [error_body("API key not valid. Please pass a valid API key.", code=400)]),
        "refused the key (400: API key not valid. Please pass a valid API key.); check KAGENT",
    ),
    (says(400, error_body("Model Not Exist")), "does not know the model (400: Model Not Exist)"),
    (
        says(404, error_body("model: tiny", type="not_found_error")),
        "does not know the model (404: model: tiny)",
    ),
    (says(404, {"detail": "Not Found"}), "serves no chat completions there (404: Not Found)"),
    (
        says(404, "<html><h1>404</h1></html>"),
        "serves no chat completions there (404); check the base URL",
    ),
    (says(405, {"detail": "Method Not Allowed"}), "check the base URL"),
    (
        says(429, error_body("You exceeded your current quota", code="insufficient_quota")),
        "quota or credit is used up (429: You exceeded your current quota); add credit",
    ),
    (says(402, error_body("Insufficient credits", code=402)), "quota or credit is used up (402"),
    (says(200, "<!doctype html><p>Sign in"), "a web page in place of a reply; check the base URL"),
    (says(200, error_body("out of credit", code=402)), "quota or credit is used up (out of credit"),
    (
        says(200, error_body("No auth credentials found", code=401)),
        "refused access (401: No auth",
    ),
]


@pytest.mark.parametrize(("answer", "text"), PERMANENT)
def test_what_asking_again_cannot_help(answer, text):
    error, requests = fails(answer, retries=4)
    assert text in str(error)
    assert error.permanent
    assert requests == 1


PASSING = [
    (
        says(429, error_body("slow down")),
        "limits the rate (429: slow down), asked once; lower in_flight",
    ),
    (
        says(429, error_body("no"), ["Retry-After: Wed, 21 Oct 2099 07:28:00 GMT"]),
        "and asks to wait until Wed, 21 Oct 2099 07:28:00 GMT (429: no)",
    ),
    (says(500, error_body("oops")), "failed (500: oops), asked once; try again later"),
    (says(503, "<html>down for maintenance</html>"), "failed (503), asked once"),
    (says(529, ""), "failed (529"),
    (says(400, error_body("bad image")), "refused the request (400: bad image)"),
    (
        says(400, error_body("This model's maximum context length is 4096 tokens")),
        "cannot take that much (400: This model's maximum context length is 4096 tokens); "
        "lower reply_tokens (16000)",
    ),
    (
        says(400, error_body("max_tokens is too large: 16000", param="max_tokens")),
        "cannot take that much (400: max_tokens is too large: 16000); lower reply_tokens (16000)",
    ),
    (says(413, ""), "cannot take that much (413"),
    (says(200, {"id": "c", "choices": None}), "answered without choices"),
    (says(200, {"id": "c", "choices": []}), "sent an empty reply"),
    (says(200, "[1, 2"), "something that is no JSON ([1, 2)"),
    (says(200, plain("")), "sent an empty reply"),
    (says(200, plain(" \n ")), "sent an empty reply"),
    (says(200, plain(None)), "sent an empty reply"),
    (says(200, plain("half", finish="content_filter")), "its content filter stopped the reply"),
    (says(200, plain(None, refusal="I cannot do that")), "refused (I cannot do that)"),
    (
        says(200, plain(None, finish="length")),
        "spent all 7 tokens of its limit on reasoning and wrote nothing; raise reply_tokens",
    ),
    (streams(sse()), "answered without choices"),
    (streams(sse(chunk("half"), done=False), ends=False), "ended the reply early, after 4"),
    (streams(sse(chunk("half"), done=False)), "ended the reply early, after 4"),
    (streams(sse(chunk("half"), chunk(finish="content_filter"))), "its content filter stopped"),
    (
        streams(sse(chunk("half"), error_body("Provider disconnected", code=502))),
        "failed in mid-reply (Provider disconnected); try again later",
    ),
    (streams(sse(chunk("half"), chunk(finish="error"))), "failed in mid-reply"),
    (streams("data: {not json\n\n"), "sent something that is no reply"),
    (streams("data: [1, 2]\n\ndata: 3\n\n"), "answered without choices"),
    (streams("\xff\xfe nonsense"), "answered without choices"),
    (streams([b"data: \xff\xfe\n\n"]), "sent something that is no reply"),
]


@pytest.mark.parametrize(("answer", "text"), PASSING)
def test_what_may_pass(answer, text):
    error, _ = fails(answer)
    assert text in str(error)
    assert not error.permanent


def test_what_a_failed_reply_cost_is_known():
    error, _ = fails(says(200, plain(None, finish="length")))
    assert (error.usage.input_tokens, error.usage.output_tokens) == (11, 7)
    assert error.usage.dollars == pytest.approx(81e-6)
    error, _ = fails(says(500, "oops"))
    assert error.usage.dollars is None
    assert error.usage.seconds > 0


class TestTryingAgain:
    def test_after_a_rate_limit_without_retry_after(self):
        async def run():
            async with RawServer(says(429, error_body("slow")), streams(GOOD)) as server:
                reply = await ask_async(model_at(server.url, retries=1), PROMPT)
                return reply, len(server.requests)

        reply, requests = asyncio.run(run())
        assert (reply.text, requests) == ("hello", 2)

    def test_retry_after_is_waited_for(self):
        async def run():
            limited = says(429, error_body("slow"), ["Retry-After: 1"])
            async with RawServer(limited, streams(GOOD)) as server:
                begun = time.monotonic()
                reply = await ask_async(model_at(server.url, retries=1), PROMPT)
                return reply, time.monotonic() - begun

        reply, seconds = asyncio.run(run())
        assert reply.text == "hello"
        assert seconds >= 1  # the server's wish is a lower bound

    def test_a_wait_beyond_the_wall_clock_is_not_begun(self):
        limited = says(429, error_body("slow"), ["Retry-After: 60"])
        error, requests = fails(limited, retries=4)
        assert "and asks to wait 60 s (429: slow)" in str(error)
        assert requests == 1

    def test_after_server_errors_until_tries_are_used_up(self):
        error, requests = fails(says(502, error_body("bad gateway")), retries=2)
        assert "failed (502: bad gateway), asked 3 times" in str(error)
        assert requests == 3

    def test_never_past_the_wall_clock(self):
        error, requests = fails(says(503, error_body("busy")), retries=1000, reply_s=2.0)
        assert "gave no reply within 2 s (status 503, tried" in str(error)
        assert 2 <= requests <= 10

    def test_after_a_connection_that_broke_before_the_answer(self):
        async def breaks(_request, _writer):
            return False

        async def run():
            async with RawServer(breaks, streams(GOOD)) as server:
                return await ask_async(model_at(server.url, retries=1), PROMPT)

        assert asyncio.run(run()).text == "hello"
        error, _ = fails(breaks)
        assert "broke the connection (" in str(error)


class TestTime:
    def test_no_first_byte(self):
        async def silent(_request, _writer):
            await asyncio.sleep(60)

        error, requests = fails(silent, reply_s=2.0, retries=4)
        assert "gave no reply within 2 s; raise reply_s" in str(error)
        assert not error.permanent
        assert requests == 1

    def test_headers_and_nothing_more(self):
        error, _ = fails(streams([], then=60), reply_s=0.5)
        assert "gave no reply within 0.5 s" in str(error)

    def test_a_stall_in_mid_stream(self, monkeypatch):
        monkeypatch.setattr(wire, "STALL_S", 0.3)
        error, _ = fails(streams(sse(chunk("half"), done=False), then=60))
        assert "stalled for 0.3 s after 4 characters" in str(error)

    def test_thinking_before_the_first_words_is_no_stall(self, monkeypatch):
        monkeypatch.setattr(wire, "STALL_S", 0.1)

        async def thinks(request, writer):
            writer.write(STREAM)
            await send(writer, sse(chunk(None, role="assistant"), done=False))
            await asyncio.sleep(0.5)
            await send(writer, GOOD)
            writer.write(b"0\r\n\r\n")
            return True

        async def run():
            async with RawServer(thinks) as server:
                return await ask_async(model_at(server.url), PROMPT)

        assert asyncio.run(run()).text == "hello"

    def test_a_reply_that_trickles_for_too_long(self):
        async def trickles(_request, writer):
            writer.write(STREAM)
            while True:
                await send(writer, sse(chunk("x"), done=False))
                await asyncio.sleep(0.05)

        error, _ = fails(trickles, reply_s=1.0)
        assert "did not end its reply within 1 s (" in str(error)
        assert "raise reply_s" in str(error)

    def test_no_connection(self):
        """A listener whose queue is full answers nothing at all."""
        with socket.socket() as listener, contextlib.ExitStack() as fill:
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            for _ in range(4):
                waiting = fill.enter_context(socket.socket())
                waiting.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    waiting.connect(listener.getsockname())
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
            error = refused(url, connect_s=0.3)
        assert "took no connection in time, asked once; check the base URL, the network" in error


def refused(url, connect_s=CONNECT_S, **changes):
    with pytest.raises(ModelError) as caught:
        asyncio.run(ask_async(model_at(url, **changes), PROMPT, connect_s))
    assert KEY not in str(caught.value)
    return str(caught.value)


def test_nobody_listens():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        text = refused(url, retries=1)
    assert "refused the connection, asked 2 times; start the server, or check the base URL" in text


def test_a_name_that_nobody_has():
    with pytest.raises(ModelError, match=r"its name is not known \(DNS\); check the base URL") as e:
        asyncio.run(ask_async(model_at("http://kagent.invalid/v1"), PROMPT))
    assert str(e.value).startswith("model tiny at kagent.invalid: ")


def test_https_where_http_is_spoken():
    async def http_only(_reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def run():
        async with await asyncio.start_server(http_only, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(ModelError, match=r"speaks no TLS .*check http:// or https://") as e:
                await ask_async(model_at(f"https://127.0.0.1:{port}/v1"), PROMPT)
            return e.value

    assert asyncio.run(run()).permanent


def test_halves_of_characters_are_joined_or_replaced():
    async def run():
        pieces = [sse(chunk(t), done=False) for t in ("a \ud83d", "\ude00 b \ud800")]
        body = [*pieces, sse(chunk(finish="stop"))]
        async with RawServer(streams(body)) as server:
            odd = Prompt("\ud800", "\ud83d\ude00")
            reply = await ask_async(model_at(server.url), odd)
            return reply.text, [m["content"] for m in server.requests[0][1]["messages"]]

    assert asyncio.run(run()) == ("a \U0001f600 b \ufffd", ["\ufffd", "\U0001f600"])


class TestTheKey:
    ECHO = f"the key {KEY} is unknown, Bearer {KEY}"

    @pytest.mark.parametrize(
        "answer",
        [
            says(401, error_body(ECHO, code=KEY, param=KEY, type=KEY)),
            says(400, ECHO),
            says(400, error_body({"nested": [ECHO]})),
            says(429, error_body(ECHO), [f"Retry-After: {KEY}"]),
            says(500, [{"error": {"message": ECHO}}]),
            says(500, f"{' ' * 990}{ECHO}"),
            says(500, error_body("x" * 230 + KEY)),
            says(200, f"no json {ECHO}"),
            says(200, error_body(ECHO)),
            says(200, plain(None, refusal=ECHO)),
            streams(sse(chunk("half"), error_body(ECHO))),
            streams(f"data: {{{KEY}\n\n"),
            streams(sse(chunk("half"), chunk(finish="content_filter", refusal=ECHO))),
        ],
    )
    def test_is_in_no_error(self, answer):
        error, _ = fails(answer)
        assert "sk-planted" not in str(error)
        assert "sk-planted" not in repr(vars(error))

    def test_is_in_no_reply(self):
        async def run():
            pieces = [f"your key is {KEY[:9]}", f"{KEY[9:]} and {json.dumps(KEY)}"]
            body = sse(*map(chunk, pieces), chunk(finish="stop"), usage_chunk())
            async with RawServer(streams(body)) as server:
                return await ask_async(model_at(server.url), PROMPT)

        assert asyncio.run(run()).text == 'your key is [key] and "[key]"'

    def test_is_in_no_text_form(self):
        model = model_at("http://user:hidden@127.0.0.1:1/v1?token=hidden")
        endpoint = Endpoint(model)
        for text in (repr(model), str(model), repr(endpoint), model.host, repr(Scrub(model))):
            assert KEY not in text
            assert "hidden" not in text
        assert "hidden" not in refused("http://user:hidden@127.0.0.1:1/v1?token=hidden")
        asyncio.run(endpoint.close())

    def test_its_beginning_is_not_left_by_a_cut(self):
        scrub = Scrub(model_at("http://127.0.0.1:1/v1"))
        for length in range(1, len(KEY) + 1):
            assert scrub.cut(f"text {KEY[:length]}") in ("text ", "text [key]")

    def test_that_cannot_be_sent_is_not_shown(self):
        for key in ("sk-planted-\u00e9-0123456789", "sk-planted\n0123456789"):
            error, _ = fails(streams(GOOD), api_key=SecretStr(key))
            assert "the key cannot be sent in a header; check KAGENT_API_KEY" in str(error)
            assert error.permanent
            assert "sk-planted" not in str(error)

    def test_a_placeholder_is_no_secret(self):
        scrub = Scrub(model_at("http://127.0.0.1:1/v1", api_key=SecretStr("EMPTY")))
        assert scrub("the EMPTY set") == "the EMPTY set"

    def test_none_is_sent_where_none_is_set(self, monkeypatch):
        monkeypatch.setenv("OPENAI_API_KEY", KEY)

        async def run():
            async with RawServer(streams(GOOD)) as server:
                await ask_async(model_at(server.url, api_key=None), PROMPT)
                return server.requests[0][0]

        assert KEY not in json.dumps(asyncio.run(run()))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "delta", "message", "content", "index", "error", "usage"])
            | st.sampled_from(
                ["finish_reason", "prompt_tokens", "completion_tokens", "text", "code"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.lists(json_values, max_size=4))
def test_no_json_of_a_server_is_more_than_can_be_heard(values):
    heard = ResponseBuffer()
    for value in values:
        heard.take(value)
    assert isinstance(heard.text, str)
    assert heard.output_tokens is None or heard.output_tokens >= 0


@pytest.fixture(scope="module")
def _only_new_garbage():
    """Collecting looks at what is made from now on: not at torch each time, if a test before this
    one has imported it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_only_new_garbage")
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([200, 200, 200, 204, 301, 400, 401, 404, 422, 429, 500]),
    st.sampled_from(["text/event-stream", "application/json", "text/html", "text/plain"]),
    st.lists(json_values.map(json.dumps) | st.text(max_size=20), max_size=4),
)
def test_nothing_else_than_a_model_error_is_ever_raised(status, kind, values):
    async def anything(_request, writer):
        data = "".join(f"data: {v}\n\n" if "event" in kind else v for v in values).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + (b"" if status == 204 else data))
        await writer.drain()
        return False

    async def run():
        async with RawServer(anything) as server:
            try:
                return await ask_async(model_at(server.url, reply_s=5.0), PROMPT)
            except ModelError as e:
                return e

    assert isinstance(asyncio.run(run()), Reply | ModelError)
    gc.collect()
