"""A run whose endpoint says the key again and again keeps it nowhere."""

import asyncio
import itertools
import json

from kagent.evolve.loop import Limits
from kagent.llm.endpoint import Endpoint
from kagent.llm.proposer import Model, ModelProposer
from kagent.llm.spend_limit import SpendLimit
from kagent.runs.ask import Prompt
from kagent.runs.cost import Spent
from llm_server import KEY, model_at, plain
from simulated_evolution import evolution
from simulated_landscape import toy_source
from werkzeug import Response


def echo(number):
    """A reply with the key in every part of it; each third call fails, and says it too."""
    if number % 3 == 2:
        error = {"error": {"message": f"key {KEY} has no luck", "code": KEY}}
        return Response(json.dumps(error), 500, content_type="application/json")
    source = toy_source(number % 5 + 1, 2, extra=f'Z = "{KEY}{number}"')
    text = f"Hypothesis: use {KEY}\nPredicted speed-up: 1.1×\n\n```python\n{source}```\n"
    return Response(json.dumps(plain(text)), 200, content_type="application/json")


def test_no_file_of_a_run_holds_the_key(tmp_path, httpserver):
    numbers = itertools.count()
    httpserver.expect_request("/v1/chat/completions").respond_with_handler(
        lambda request: echo(next(numbers))
    )
    model = model_at(httpserver.url_for("/v1"))
    seen = []

    class Late:
        """The proposer, made once the store is there."""

        name, resamples, at_once, operators = "model", 2, 1, ModelProposer.operators

        async def propose(self, ask):
            return await self.inner.propose(ask)

    late = Late()
    search, store = evolution(
        tmp_path / "task",
        tmp_path / "runs",
        proposer=late,
        budget=6,
        in_flight=1,
        observe=seen.append,
        limits=Limits(),
    )

    async def searched():
        endpoint = Endpoint(model)
        late.inner = ModelProposer(
            [Model(model, endpoint)],
            lambda ask: Prompt("system", f"ask {ask.id}"),
            store.call,
            SpendLimit(Spent()),
            seen.append,
            at_once=1,
        )
        try:
            return await search.run()
        finally:
            await endpoint.close()

    with store:
        asyncio.run(searched())
        folder = store.folder
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(b"has no luck" in path.read_bytes() for path in files)
    assert any(b"use [key]" in path.read_bytes() for path in files)
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    assert KEY not in repr(seen)
