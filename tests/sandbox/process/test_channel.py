import json
import os
import socket
import struct
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kagent_sandbox.process.channel import (
    Channel,
    ChannelClosed,
    ChannelError,
    ChannelTimeout,
    parse_json,
)
from sampling import examples

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("ab\u00e9"), inner),
    max_leaves=20,
)


@pytest.fixture
def pair():
    ours, theirs = Channel.pair()
    with ours, Channel(theirs) as other:
        yield ours, other


def raw_pair():
    ours, theirs = Channel.pair()
    return ours, theirs


@given(JSON, st.lists(st.binary(max_size=3000), max_size=4))
@settings(max_examples=examples(60), deadline=None)
def test_what_is_sent_arrives(value, blobs):
    ours, theirs = Channel.pair()
    with ours, Channel(theirs) as other:
        ours.send(value, blobs)
        message = other.recv(1.0)
    assert message.obj == value
    assert list(message.blobs) == blobs


@given(st.binary(max_size=200))
@settings(max_examples=examples(200), deadline=None)
def test_noise_is_an_error_and_nothing_else(noise):
    ours, theirs = raw_pair()
    with ours, theirs:
        theirs.sendall(noise)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ChannelError):
            ours.recv(1.0)


@given(JSON, st.data())
@settings(max_examples=examples(60), deadline=None)
def test_a_damaged_frame_gives_a_message_or_an_error(value, data):
    text = json.dumps(value).encode()
    frame = bytearray(struct.pack("<IIII", 0x6B41474E, len(text), 1, 0))
    frame += struct.pack("<Q", 3) + text + b"abc"
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    ours, theirs = raw_pair()
    with ours, theirs:
        theirs.sendall(frame)
        theirs.shutdown(socket.SHUT_WR)
        try:
            message = ours.recv(1.0, max_bytes=1 << 16)
        except ChannelError:
            return
        assert len(message.blobs) <= 1


def test_large_messages_pass_in_pieces(pair):
    ours, other = pair
    blob = os.urandom(3 << 20)
    thread = threading.Thread(target=ours.send, args=({"n": 1}, [blob, b""]))
    thread.start()
    message = other.recv(10.0)
    thread.join()
    assert message.blobs == (blob, b"")


def test_descriptors_travel_only_where_expected(pair):
    ours, other = pair
    read, write = os.pipe()
    ours.send("take it", fds=[write])
    (taken,) = other.recv(1.0, max_fds=1).fds
    os.write(taken, b"x")
    assert os.read(read, 1) == b"x"
    assert not os.get_inheritable(taken)
    ours.send("unexpected", fds=[write])
    with pytest.raises(ChannelError):
        other.recv(1.0)
    for fd in (read, write, taken):
        os.close(fd)


def test_a_timeout_before_the_first_byte_leaves_the_channel_usable(pair):
    ours, other = pair
    with pytest.raises(ChannelTimeout):
        other.recv(0.01)
    ours.send(1)
    assert other.recv(1.0).obj == 1


def test_a_message_that_stops_half_way_times_out():
    ours, theirs = raw_pair()
    with ours, theirs:
        theirs.sendall(struct.pack("<IIII", 0x6B41474E, 100, 0, 0))
        with pytest.raises(ChannelTimeout):
            ours.recv(0.05)
        with pytest.raises(ChannelError, match="unusable"):
            ours.recv(0.05)


def test_a_closed_peer_is_named(pair):
    ours, other = pair
    other.close()
    with pytest.raises(ChannelClosed):
        ours.recv(1.0)
    with pytest.raises(ChannelClosed):
        ours.send("x" * 100_000)


def test_a_peer_that_does_not_read_is_a_timeout(pair):
    ours, _ = pair
    with pytest.raises(ChannelTimeout):
        ours.send(None, [bytes(8 << 20)], timeout_s=0.05)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"NaN", "NaN"),
        (b"[Infinity]", "Infinity"),
        (b"1e999", "finite"),
        (b"[" * 33 + b"]" * 33, "nested"),
        (b"[" * 100_000 + b"]" * 100_000, "not JSON|nested"),
        (b'"\\ud800"', "surrogate"),
        (b'{"a\\udfff": 1}', "surrogate"),
        (b"1" * 5000, "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
    ],
)
def test_hostile_json_is_refused(text, why):
    with pytest.raises(ChannelError, match=why):
        parse_json(text)


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<IIII", 0x6B41474E, 2**32 - 1, 0, 0),
        struct.pack("<IIII", 0x6B41474E, 2, 2**32 - 1, 0),
        struct.pack("<IIII", 0x6B41474E, 2, 0, 9),
        struct.pack("<IIIIQ", 0x6B41474E, 2, 1, 0, 2**63) + b"{}",
    ],
)
def test_sizes_are_refused_before_anything_is_allocated(head):
    ours, theirs = raw_pair()
    with ours, theirs:
        theirs.sendall(head)
        with pytest.raises(ChannelError):
            ours.recv(1.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"bytes"])
def test_only_finite_json_is_sent(pair, value):
    with pytest.raises(ValueError, match=r"JSON"):
        pair[0].send(value)
