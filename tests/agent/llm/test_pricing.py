"""What calls cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kagent.llm.model_config import ModelConfig, Prices, host_of, is_local
from kagent.llm.pricing import dollars, most_dollars

KNOWN = ModelConfig("gpt-5", "https://api.openai.com/v1", reply_tokens=1000)
OWN = ModelConfig("mine", "http://10.0.0.7:8000/v1", prices=Prices(2.0, 8.0), reply_tokens=1000)


def test_by_the_table():
    million = 10**6
    assert dollars(KNOWN, million, 0) > 0
    assert dollars(KNOWN, 0, million) > dollars(KNOWN, million, 0)
    assert dollars(KNOWN, million, 0, cached_tokens=million) < dollars(KNOWN, million, 0)


def test_of_a_router_by_its_own_names():
    model = ModelConfig("deepseek/deepseek-r1", "https://openrouter.ai/api/v1")
    assert dollars(model, 1000, 1000) > 0


def test_behind_a_gateway_by_the_makers_name():
    model = ModelConfig("gpt-5", "https://llm.example.com/v1")
    assert dollars(model, 1000, 1000) == dollars(KNOWN, 1000, 1000)


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("no-such-model", "https://api.openai.com/v1"),
        ("no-such-model", "https://llm.example.com/v1"),
        ("", "https://llm.example.com/v1"),
        ("tiny", "http://127.0.0.1:8000/v1"),
        ("gpt-oss-20b", "http://localhost:11434/v1"),
        ("gpt-5", "http://[::1]:8000/v1"),
    ],
)
def test_unknown_is_none_and_not_nothing(name, url):
    model = ModelConfig(name, url)
    assert dollars(model, 1000, 1000) is None
    assert most_dollars(model, 1000) is None


def test_what_the_user_states_comes_first():
    assert dollars(OWN, 1000, 500) == pytest.approx(0.006)
    local = ModelConfig("tiny", "http://127.0.0.1:1/v1", prices=Prices(0, 0))
    assert dollars(local, 1000, 500) == 0


def test_tokens_that_nobody_counted_have_no_price():
    assert dollars(OWN, None, 5) is None
    assert dollars(OWN, 5, None) is None


@given(
    st.sampled_from([KNOWN, OWN]),
    st.integers(0, 100_000),
    st.integers(0, 1000),
    st.integers(0, 10**6),
)
def test_no_call_costs_more_than_its_bound(model, chars, written, cached):
    """At two characters or more for each token."""
    assert dollars(model, chars // 2, written, cached) <= most_dollars(model, chars)


def test_addresses():
    assert host_of("https://user:secret@host.example:8443/v1?key=secret") == "host.example:8443"
    local = ["http://localhost:1/v1", "http://127.9.9.9", "http://[::1]:8/", "http://a.localhost"]
    assert all(is_local(url) for url in local)
    far = ["http://10.0.0.1/", "https://localhost.example.com", "http://0.0.0.0:1/", "nonsense"]
    assert not any(is_local(url) for url in far)
