"""Recorded replies as an endpoint, over real HTTP."""

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kagent.integrations.reply_pool import ReplyPool, endpoint, pool_of_run, read_pool
from kagent_sandbox.errors import UserError

RUN = Path(__file__).parents[3] / "runs" / "softmax-ask-tell"


@pytest.fixture
def ask():
    pool = ReplyPool([("parent one", "of one"), ("", "of any"), ("parent two", "of two")])
    with endpoint(pool) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()

        def ask(data, **headers):
            url = f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
            request = urllib.request.Request(url, data, headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["choices"][0]["message"]["content"]

        yield lambda text: ask(json.dumps({"messages": [{"content": text}]}).encode()), ask, pool
        server.shutdown()
        thread.join()


def test_a_prompt_gets_its_parents_reply_once(ask):
    said, raw, pool = ask
    assert said("improve parent two") == "of two"
    assert said("improve parent two") == "of any"
    with pytest.raises(urllib.error.HTTPError) as none:
        said("improve parent two")
    assert none.value.code == 404
    assert said("improve parent one") == "of one"
    assert (pool.calls, pool.misses) == (4, 1)
    for bad in (b"", b"{}", b"[]", b"nothing"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            raw(bad)
        assert refused.value.code == 400


def test_a_web_page_takes_no_reply(ask):
    """A script of any site may post to this machine, without asking first."""
    said, raw, pool = ask
    asked = json.dumps({"messages": [{"content": "parent one"}]}).encode()
    with pytest.raises(urllib.error.HTTPError) as refused:
        raw(asked, Origin="https://a.example")
    assert refused.value.code == 403
    assert pool.calls == 0
    assert said("parent one") == "of one"


@given(st.lists(st.sampled_from(["", "a", "b"])), st.lists(st.sampled_from(["a", "b", "ab"])))
def test_no_reply_is_given_twice_or_to_another_parent(parents, prompts):
    pool = ReplyPool([(parent, f"{parent}{i}") for i, parent in enumerate(parents)])
    given_ = [(prompt, reply) for prompt in prompts if (reply := pool.reply(prompt)) is not None]
    assert len({reply for _, reply in given_}) == len(given_) == pool.calls - pool.misses
    assert all(reply.rstrip("0123456789") in prompt for prompt, reply in given_)


def test_a_recorded_runs_replies_fit_its_own_prompts(tmp_path):
    pool = pool_of_run(RUN)
    kept = [path.read_text() for path in (RUN / "replies").glob("*.md")]
    assert sorted(reply for _, reply in pool.replies) == sorted(kept)
    (tmp_path / "pool").write_text(
        "".join(json.dumps({"parent": p, "reply": r}) + "\n" for p, r in pool.replies)
    )
    again = read_pool(tmp_path / "pool")
    prompt = (RUN / "prompts" / "0000.md").read_text()
    assert again.reply(prompt) in {r for p, r in pool.replies if p in prompt}
    (tmp_path / "pool").write_text('{"reply": 3}\n')
    with pytest.raises(UserError, match=r'line 1: expected \{"parent"'):
        read_pool(tmp_path / "pool")
