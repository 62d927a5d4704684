"""Events of a stream, however their bytes come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kagent.llm.event_stream import EventStream


def events(*pieces):
    stream = EventStream()
    return [data for piece in pieces for data in stream.feed(piece)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"data: a\n\ndata:b\n\n", ["a", "b"]),
        (b"data: a\r\n\r\ndata: b\r\rdata: c\n\n", ["a", "b", "c"]),
        (b"data: a\ndata:  b\n\n", ["a\n b"]),
        (b": a comment\n\nevent: x\nid: 7\ndata: a\nretry: 3\n\n", ["a"]),
        (b"\n\n\r\n\r\r", []),
        (b"data: has not ended", []),
        (b"data: has not ended\n", []),
        (b"database: x\n\n", []),
        ("data: µ \u2028 \x0c\n\n".encode(), ["µ \u2028 \x0c"]),
    ],
)
def test_events_have_the_data_of_their_lines(text, found):
    assert events(text) == found
    assert events(*(text[i : i + 1] for i in range(len(text)))) == found


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)))),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.data(),
)
def test_where_pieces_end_makes_no_difference(texts, end, data):
    whole = "".join(f"data: {text}{end}{end}" for text in texts).encode() + b"data: \n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert events(*pieces)[: len(texts)] == texts


def test_what_is_no_utf_8_is_an_error():
    with pytest.raises(UnicodeDecodeError):
        events(b"data: \xff\n\n")
