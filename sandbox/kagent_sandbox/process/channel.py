"""Framed messages between processes that do not trust each other.

A message is a JSON value, any number of byte strings, and file descriptors (`SCM_RIGHTS`). The
receiver states its limits. A message that is larger, deeper, malformed or not finite is a
`ChannelError`. Nothing is ever un-pickled. After an error the channel is unusable, since the peer
broke the protocol.

Frame: header (magic, length of the JSON, number of blobs, number of descriptors), the blobs'
    lengths, the JSON, the blobs. Descriptors travel with the header's first byte.
"""

from __future__ import annotations

import array
import contextlib
import json
import math
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Self

_MAGIC = 0x6B41474E
_HEADER = struct.Struct("<IIII")
_LENGTH = struct.Struct("<Q")
_MAX_BLOBS = 4096
_MAX_FDS = 64
_MAX_DEPTH = 32
MAX_JSON_BYTES = 8 << 20
MAX_MESSAGE_BYTES = 256 << 20


class ChannelError(Exception):
    """The peer sent something malformed, oversized, too deep or not finite."""


class ChannelClosed(ChannelError):  # noqa: N818
    """The peer closed its end, or died."""


class ChannelTimeout(ChannelError):  # noqa: N818
    """Nothing, or not all of a message, came in time."""


@dataclass(frozen=True, slots=True)
class Message:
    """One received message. The receiver owns the descriptors."""

    obj: object
    blobs: tuple[bytes, ...] = ()
    fds: tuple[int, ...] = ()


class Channel:
    """One end of a stream socket pair.

    Not thread-safe: one thread at a time sends, and one receives.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.setblocking(False)
        self._broken = False

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """A channel, and the socket to hand to the peer."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Channel(ours), theirs

    def fileno(self) -> int:
        """Descriptor, for `select`."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close this end; the peer sees `ChannelClosed`."""
        self._sock.close()

    def hang_up(self) -> None:
        """Close it for both ends at once, also where another thread waits for a message: its
        `recv` ends, and the peer sees `ChannelClosed`. Not for a socket that another process has,
        too.
        """
        with contextlib.suppress(OSError):  # the peer may be gone
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(
        self,
        obj: object,
        blobs: Sequence[bytes] = (),
        fds: Sequence[int] = (),
        timeout_s: float | None = 60.0,
    ) -> None:
        """Send one message.

        Raises:
            ChannelClosed: The peer is gone.
            ChannelTimeout: The peer did not read for `timeout_s`; the channel is unusable
                afterwards.
            ValueError: `obj` is not JSON-able or holds NaN or an infinity, or there are too many
                parts.
        """
        if len(blobs) > _MAX_BLOBS or len(fds) > _MAX_FDS:
            raise ValueError(f"{len(blobs)} blobs and {len(fds)} descriptors in one message")
        try:
            text = json.dumps(obj, separators=(",", ":"), allow_nan=False).encode()
        except TypeError as e:
            raise ValueError(f"not JSON: {e}") from None
        lengths = b"".join(_LENGTH.pack(len(b)) for b in blobs)
        head = _HEADER.pack(_MAGIC, len(text), len(blobs), len(fds)) + lengths
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._write(head + text, rights, deadline)
        for blob in blobs:
            self._write(blob, [], deadline)

    def recv(
        self,
        timeout_s: float | None,
        *,
        max_bytes: int = MAX_MESSAGE_BYTES,
        max_fds: int = 0,
    ) -> Message:
        """Receive one message of at most `max_bytes` in all, with at most `max_fds` descriptors.

        A `ChannelTimeout` before the first byte leaves the channel usable.

        Raises:
            ChannelClosed: The peer closed its end or died.
            ChannelTimeout: The whole message did not come within `timeout_s` (None waits for ever).
            ChannelError: The message breaks the rules.
        """
        if self._broken:
            raise ChannelError("the channel is unusable after an earlier error")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        head, fds = self._header(deadline, max_fds)
        try:
            return self._body(head, fds, deadline, max_bytes, max_fds)
        except BaseException:
            self._broken = True
            for fd in fds:
                os.close(fd)
            raise

    # -- receiving -------------------------------------------------------------------------------

    def _body(
        self, head: bytes, fds: list[int], deadline: float | None, max_bytes: int, max_fds: int
    ) -> Message:
        head += self._read(_HEADER.size - len(head), deadline)
        magic, text_bytes, blob_count, fd_count = _HEADER.unpack(head)
        if magic != _MAGIC:
            raise ChannelError("not a message: wrong magic number")
        if fd_count != len(fds) or fd_count > max_fds:
            raise ChannelError(f"{fd_count} descriptors announced, {len(fds)} taken of {max_fds}")
        if blob_count > _MAX_BLOBS or text_bytes > min(MAX_JSON_BYTES, max_bytes):
            raise ChannelError(f"message with {blob_count} blobs and {text_bytes} bytes of JSON")
        raw = self._read(blob_count * _LENGTH.size, deadline)
        lengths = [n for (n,) in _LENGTH.iter_unpack(raw)]
        if text_bytes + sum(lengths) > max_bytes:
            raise ChannelError(
                f"message of {text_bytes + sum(lengths)} bytes, the limit is {max_bytes}"
            )
        obj = parse_json(self._read(text_bytes, deadline))
        return Message(obj, tuple(self._read(n, deadline) for n in lengths), tuple(fds))

    def _header(self, deadline: float | None, max_fds: int) -> tuple[bytes, list[int]]:
        """First bytes of the header, with the descriptors that came along."""
        space = socket.CMSG_SPACE(max_fds * 4) if max_fds else 0
        while True:
            self._wait(select.POLLIN, deadline)
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(
                    _HEADER.size, space, socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as e:
                self._broken = True
                raise ChannelClosed(f"the peer is gone: {e}") from None
            break
        fds: list[int] = []
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                taken = array.array("i")
                taken.frombytes(payload[: len(payload) - len(payload) % taken.itemsize])
                fds.extend(taken)
        if flags & socket.MSG_CTRUNC:
            self._broken = True
            for fd in fds:
                os.close(fd)
            raise ChannelError("more descriptors than expected")
        if not data:
            self._broken = True
            raise ChannelClosed("the peer closed its end")
        return data, fds

    def _read(self, count: int, deadline: float | None) -> bytes:
        buffer = bytearray(count)
        view = memoryview(buffer)
        done = 0
        while done < count:
            try:
                got = self._sock.recv_into(view[done:])
            except (BlockingIOError, InterruptedError):
                self._wait(select.POLLIN, deadline)
                continue
            except OSError as e:
                raise ChannelClosed(f"the peer is gone: {e}") from None
            if not got:
                raise ChannelClosed("the peer closed its end in the middle of a message")
            done += got
        return bytes(buffer)

    # -- sending ---------------------------------------------------------------------------------

    def _write(
        self,
        data: bytes,
        rights: list[tuple[int, int, array.array[int]]],
        deadline: float | None,
    ) -> None:
        view = memoryview(data)
        while view:
            try:
                # A confined child may not send descriptors, so it has no sendmsg.
                sent = self._sock.sendmsg([view], rights) if rights else self._sock.send(view)
            except (BlockingIOError, InterruptedError):
                self._wait(select.POLLOUT, deadline)
                continue
            except OSError as e:
                raise ChannelClosed(f"the peer is gone: {e}") from None
            view, rights = view[sent:], []

    def _wait(self, event: int, deadline: float | None) -> None:
        """Wait until the socket can be read or written (or its peer is gone)."""
        if self._sock.fileno() < 0:
            raise ChannelClosed("this end is closed")
        poller = select.poll()
        poller.register(self._sock, event)
        left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3
        if not poller.poll(left_ms):
            raise ChannelTimeout("nothing came in time")


def parse_json(data: bytes) -> object:
    """Decode JSON that an untrusted peer wrote: finite numbers, bounded depth, valid text.

    Raises:
        ChannelError: It breaks one of these rules.
    """
    try:
        value: object = json.loads(
            data.decode(), parse_constant=_refuse_constant, parse_float=_finite
        )
    except (ValueError, RecursionError) as e:
        raise ChannelError(f"not JSON: {e}") from None
    level = [value]
    for _ in range(_MAX_DEPTH):
        deeper: list[object] = []
        for item in level:
            if isinstance(item, dict):
                deeper.extend(item.keys())
                deeper.extend(item.values())
            elif isinstance(item, list):
                deeper.extend(item)
            elif isinstance(item, str) and not item.isascii():
                with contextlib.suppress(UnicodeEncodeError):
                    item.encode()
                    continue
                raise ChannelError("text with a lone surrogate")
        if not deeper:
            return value
        level = deeper
    raise ChannelError(f"JSON nested deeper than {_MAX_DEPTH}")


def _refuse_constant(name: str) -> NoReturn:
    raise ChannelError(f"JSON holds {name}: only finite numbers are allowed")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ChannelError(f"JSON holds {text[:40]}, which is not finite")
    return value
