"""Chunks that are read together give the reply that they give one after the other."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kagent.llm.chunks import ChunkReader
from kagent.llm.response import ResponseBuffer


def chunk(index=0, finish=None, **delta):
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return {"id": "x", "model": "m", "choices": [choice], "usage": None}


def one_by_one(texts):
    buffer = ResponseBuffer()
    for text in texts:
        buffer.take(json.loads(text))
    return state(buffer)


def together(texts, *cuts):
    buffer = ResponseBuffer()
    reader = ChunkReader(buffer)
    for a, b in zip((0, *cuts), (*cuts, len(texts)), strict=True):
        reader.take(texts[a:b])
    return state(buffer)


def state(b):
    counts = b.input_tokens, b.output_tokens, b.reasoned, b.characters
    return b.text, b.refusal, b.finish, b.error, b.closed, b.seen, b.cut, counts


TEXT = st.text(st.characters(exclude_categories=()), max_size=4)
DELTA = st.fixed_dictionaries(
    {},
    optional={
        "content": TEXT | st.none() | st.just([{"type": "text", "text": "part"}]),
        "reasoning_content": TEXT | st.none(),
        "refusal": TEXT | st.none(),
        "role": st.just("assistant"),
    },
)
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}
OTHER = st.sampled_from([USAGE, {"error": {"message": "no"}}, [], "x", 1, {"choices": None}])
CHUNK = st.one_of(
    st.builds(lambda text: chunk(content=text), TEXT),
    st.builds(lambda text: chunk(reasoning_content=text, content=None), TEXT),
    st.builds(lambda d, f: chunk(finish=f, **d), DELTA, st.sampled_from([None, "stop"])),
    st.builds(lambda text, i: chunk(i, content=text), TEXT, st.integers(0, 1)),
    OTHER,
)


@given(st.lists(CHUNK, max_size=12), st.booleans(), st.data())
def test_any_chunks_in_any_pieces(chunks, ascii_only, data):
    texts = [json.dumps(c, ensure_ascii=ascii_only) for c in chunks]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(texts)), max_size=3)))
    assert together(texts, *cuts) == one_by_one(texts)


def test_a_piece_that_looks_like_the_end_of_its_chunk():
    around = '"}, "finish_reason": null}], "usage": null}'
    texts = [json.dumps(chunk(content=t)) for t in ("one", around, "x" + around, "two", '"', "\\")]
    assert together(texts) == one_by_one(texts)


def test_a_chunk_that_begins_and_ends_like_others_and_says_more():
    texts = [json.dumps(chunk(content=t)) for t in ("one", "two", "three")]
    more = texts[1].replace('"two"', '"two", "content": "four"')
    assert together([*texts, more, texts[0]]) == one_by_one([*texts, more, texts[0]])
    short = texts[0].replace('"one"', "")
    for wrong in (short, texts[0].replace('"one"', '"a" "b"'), texts[0].replace('"one"', "oops")):
        with pytest.raises(ValueError, match=r"delimiter|Expecting"):
            together([*texts, wrong])


def test_chunks_that_are_alike_are_parsed_at_once(monkeypatch):
    texts = [json.dumps(chunk(content=f"{i},")) for i in range(1000)]
    parsed, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or loads(text))
    whole = together(texts)
    assert len(parsed) == 3
    assert whole == one_by_one(texts)


def test_chunks_that_all_differ_are_parsed_at_once(monkeypatch):
    texts = [json.dumps({**chunk(content="a"), "padding": "x" * i}) for i in range(1000)]
    parsed, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or loads(text))
    whole = together(texts)
    assert len(parsed) < 10
    assert whole == one_by_one(texts)
