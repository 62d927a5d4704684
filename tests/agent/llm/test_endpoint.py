"""Replies that can be used, from a real server on loopback."""

import asyncio
import json

import pytest
from kagent.llm import response as hearing
from kagent.llm import transport as wire
from kagent.llm.chat import ModelError
from kagent.llm.endpoint import Endpoint
from kagent.runs.ask import Prompt
from llm_server import (
    GOOD,
    STREAM,
    USAGE,
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

PROMPT = Prompt("be brief", "say hello")


def asked(*answers, **changes):
    """A reply, and the requests that it took."""

    async def run():
        async with RawServer(*answers) as server:
            reply = await ask_async(model_at(server.url, **changes), PROMPT)
            return reply, [body for _, body in server.requests]

    return asyncio.run(run())


def test_a_stream_is_asked_for_and_read_with_its_counts():
    reply, [request] = asked(streams(GOOD), temperature=0.5, reply_tokens=123)
    assert (reply.text, reply.model, reply.truncated) == ("hello", "tiny", False)
    assert (reply.input_tokens, reply.output_tokens) == (11, 7)
    assert reply.dollars == pytest.approx((11 * 1.0 + 7 * 10.0) / 1e6)
    assert reply.seconds > 0
    assert request == {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "say hello"},
        ],
        "max_tokens": 123,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_through_another_server_program(httpserver):
    httpserver.expect_request("/v1/chat/completions", method="POST").respond_with_data(
        GOOD, content_type="text/event-stream"
    )
    reply = asyncio.run(ask_async(model_at(httpserver.url_for("/v1")), PROMPT))
    assert reply.text == "hello"


def test_several_calls_are_in_flight_at_once():
    async def run():
        all_here = asyncio.Barrier(8)

        async def answer(request, writer):
            await all_here.wait()
            return await streams(GOOD)(request, writer)

        async with RawServer(answer) as server:
            endpoint = Endpoint(model_at(server.url))
            replies = await asyncio.gather(*(endpoint.complete(PROMPT) for _ in range(8)))
            await endpoint.close()
            return [r.text for r in replies]

    assert asyncio.run(run()) == ["hello"] * 8


def test_a_plain_answer_to_a_request_for_a_stream():
    reply, _ = asked(says(200, plain("hello")))
    assert (reply.text, reply.output_tokens) == ("hello", 7)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_no_part_of_the_answer(name):
    body = sse(
        chunk(**{name: "let me think"}),
        chunk(**{name: "about it"}, content=None),
        chunk("hello"),
        chunk(finish="stop"),
        usage_chunk({**USAGE, "completion_tokens": 500, "total_tokens": 511}),
    )
    reply, _ = asked(streams(body))
    assert (reply.text, reply.output_tokens) == ("hello", 500)
    reply, _ = asked(says(200, plain("hello", **{name: "let me think"})))
    assert reply.text == "hello"


def test_reasoning_that_only_the_total_counts_is_counted():
    reply, _ = asked(says(200, plain(usage={**USAGE, "total_tokens": 1018})))
    assert (reply.input_tokens, reply.output_tokens) == (11, 1007)


def test_content_as_a_list_of_parts():
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "hello"}]
    assert asked(says(200, plain(parts)))[0].text == "hello"


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": "11", "completion_tokens": -1}])
def test_tokens_are_unknown_where_the_server_does_not_say(usage):
    reply, _ = asked(says(200, plain(usage=usage)))
    assert reply.text == "hello"
    assert (reply.input_tokens, reply.output_tokens, reply.dollars) == (None, None, None)


def test_cut_at_the_token_limit():
    reply, _ = asked(streams(sse(chunk("hel"), chunk(finish="length"), usage_chunk())))
    assert (reply.text, reply.truncated) == ("hel", True)


def test_megabytes_are_cut_and_the_connection_is_closed():
    async def run():
        closed = asyncio.Event()

        async def endless(_request, writer):
            writer.write(STREAM)
            try:
                while True:
                    await send(writer, sse(chunk("x" * 10_000), done=False))
            except ConnectionError:
                closed.set()
                raise

        async with RawServer(endless) as server:
            endpoint = Endpoint(model_at(server.url))
            reply = await endpoint.complete(PROMPT)
            await asyncio.wait_for(closed.wait(), 10)
            await endpoint.close()
            return reply

    reply = asyncio.run(run())
    assert reply.truncated
    assert len(reply.text) == hearing.MOST_CHARACTERS


def test_endless_reasoning_is_given_up(monkeypatch):
    monkeypatch.setattr(hearing, "MOST_REASONING", 1000)
    pieces = [sse(chunk(reasoning="x" * 100), done=False)] * 50
    body = [sse(chunk("he"), done=False), *pieces]
    reply, _ = asked(streams(body))
    assert (reply.text, reply.truncated) == ("he", True)


def test_one_endless_line_is_not_held_in_memory(monkeypatch):
    monkeypatch.setattr(wire, "MOST_BYTES", 1 << 20)
    with pytest.raises(ModelError, match="more than 1 MiB"):
        asked(streams(["data: " + "x" * (1 << 18)] * 40))


class TestTheEndOfAStream:
    def test_broken_after_the_end_is_complete(self):
        reply, _ = asked(streams(sse(chunk("hello"), chunk(finish="stop"), done=False), ends=False))
        assert (reply.text, reply.truncated) == ("hello", False)

    def test_a_server_that_says_no_more_after_the_end(self, monkeypatch):
        monkeypatch.setattr(wire, "GRACE_S", 0.1)
        body = sse(chunk("hello"), chunk(finish="stop"), done=False)
        reply, _ = asked(streams(body, then=10.0))
        assert reply.text == "hello"

    def test_counts_without_a_finish_reason(self):
        assert asked(streams(sse(chunk("hello"), usage_chunk())))[0].text == "hello"

    def test_no_done_line(self):
        body = sse(chunk("hello"), chunk(finish="stop"), usage_chunk(), done=False)
        assert asked(streams(body))[0].output_tokens == 7

    def test_comments_and_empty_chunks_between(self):
        quiet = {"id": "c", "choices": None}
        body = ": PROCESSING\n\n" * 3 + sse(quiet, {"id": "c", "choices": []}, chunk(None)) + GOOD
        body = body.replace("data: [DONE]\n\n", "", 1)
        assert asked(streams(body))[0].text == "hello"

    def test_chunks_split_anywhere(self):
        data = sse(chunk("hé"), chunk("llo ∑"), chunk(finish="stop"), usage_chunk()).encode()
        assert (
            asked(streams([data[i : i + 7] for i in range(0, len(data), 7)]))[0].text == "héllo ∑"
        )


def refusing(parameter, message, *, code="unsupported_parameter", status=400, stated=True):
    """A server that answers well only to requests without a parameter."""

    async def answer(request, writer):
        if parameter in request[1]:
            error = {"message": message, "type": "invalid_request_error", "code": code}
            error["param"] = parameter if stated else None
            return await says(status, {"error": error})(request, writer)
        if request[1].get("stream"):
            return await streams(GOOD)(request, writer)
        return await says(200, plain())(request, writer)

    return answer


class TestParametersThatAreNotTaken:
    @pytest.mark.parametrize("stated", [True, False])
    @pytest.mark.parametrize(
        ("parameter", "message", "instead"),
        [
            (
                "max_tokens",
                "Unsupported parameter: 'max_tokens' is not supported with this model. "
                "Use 'max_completion_tokens' instead.",
                {"max_completion_tokens": 16_000},
            ),
            ("temperature", "Unsupported value: 'temperature' does not support 0.5", {}),
            ("stream_options", "stream_options: extra fields not permitted", {}),
        ],
    )
    def test_are_left_out_at_once_and_from_then_on(self, parameter, message, instead, stated):
        async def run():
            async with RawServer(refusing(parameter, message, stated=stated)) as server:
                endpoint = Endpoint(model_at(server.url, temperature=0.5))
                replies = [await endpoint.complete(PROMPT) for _ in range(2)]
                await endpoint.close()
                return replies, [body for _, body in server.requests], endpoint.left_out

        replies, requests, left_out = asyncio.run(run())
        assert [r.text for r in replies] == ["hello", "hello"]
        assert [parameter in r for r in requests] == [True, False, False]
        assert requests[1].items() >= instead.items()
        assert parameter in left_out

    def test_a_422_counts_too(self):
        detail = [{"type": "extra_forbidden", "loc": ["body", "stream_options"]}]
        reply, requests = asked(says(422, {"detail": detail}), streams(GOOD))
        assert reply.text == "hello"
        assert "stream_options" not in requests[1]

    def test_streaming_itself(self):
        async def answer(request, writer):
            if request[1]["stream"]:
                text = "Your organization must be verified to stream this model."
                error = {"message": text, "param": "stream", "code": "unsupported_value"}
                return await says(400, {"error": error})(request, writer)
            return await says(200, plain())(request, writer)

        reply, requests = asked(answer)
        assert reply.text == "hello"
        assert (requests[1]["stream"], "stream_options" in requests[1]) == (False, False)

    def test_a_system_message(self):
        error = {"error": {"message": "System role not supported"}}
        reply, requests = asked(says(400, error), streams(GOOD))
        assert reply.text == "hello"
        assert requests[1]["messages"] == [{"role": "user", "content": "be brief\n\nsay hello"}]

    def test_one_after_the_other(self):
        refusals = [
            refusing("max_tokens", "no max_tokens"),
            refusing("temperature", "no temperature"),
            refusing("max_completion_tokens", "no max_completion_tokens"),
            refusing("stream_options", "no stream_options"),
            streams(GOOD),
        ]
        reply, requests = asked(*refusals, temperature=0.5)
        assert reply.text == "hello"
        assert set(requests[-1]) == {"model", "messages", "stream"}

    def test_calls_in_flight_learn_together(self):
        async def run():
            async with RawServer(refusing("max_tokens", "no max_tokens")) as server:
                endpoint = Endpoint(model_at(server.url))
                replies = await asyncio.gather(*(endpoint.complete(PROMPT) for _ in range(4)))
                await endpoint.close()
                return replies, server.requests, endpoint.left_out

        replies, requests, left_out = asyncio.run(run())
        assert [r.text for r in replies] == ["hello"] * 4
        assert len(requests) <= 8
        assert left_out == ("max_tokens",)


def test_cancelling_closes_the_connection():
    async def run():
        async with RawServer(streams(sse(chunk("hel"), done=False), then=60.0)) as server:
            endpoint = Endpoint(model_at(server.url))
            call = asyncio.create_task(endpoint.complete(PROMPT))
            while not server.requests:
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await endpoint.close()

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_local_address_is_never_asked_through_a_proxy(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert asked(streams(GOOD))[0].text == "hello"


def test_what_a_router_charged_is_what_it_cost(monkeypatch):
    monkeypatch.setattr("kagent.llm.model_config.host_of", lambda url: "openrouter.ai")
    reply, _ = asked(says(200, plain(usage={**USAGE, "cost": 0.25})))
    assert reply.dollars == 0.25


def test_requests_are_json_that_holds_no_key():
    _, requests = asked(streams(GOOD))
    assert "sk-planted" not in json.dumps(requests)
