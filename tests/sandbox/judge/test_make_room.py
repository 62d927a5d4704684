"""Memory of the device that a judge keeps between its turns."""

from types import SimpleNamespace

import pytest
from kagent_sandbox.device.cpu.traits import TRAITS as CPU
from kagent_sandbox.device.cuda.traits import TRAITS as GPU
from kagent_sandbox.errors import DeviceError, DeviceWedged, MachineError
from kagent_sandbox.judge.judge import Judge
from kagent_sandbox.judge.protocol import ERRORS
from kagent_sandbox.judge.server import JudgeServer
from kagent_sandbox.process.channel import ChannelClosed

GIB = 1 << 30


@pytest.mark.parametrize(("gib", "kept"), [(2, True), (3, False)])
def test_a_large_arena_goes_back_after_a_turn(gib, kept):
    """Others time on the device, and 6.4 GB of inputs are no rarity."""
    done = []
    judge = SimpleNamespace(
        _arenas=SimpleNamespace(nbytes=gib * GIB, close=lambda: done.append("arena")),
        _most_kept_bytes=int(GPU.kept_launchers.share * 80 * GIB),
        _let_go=lambda: done.append("launchers"),
        _checker=SimpleNamespace(sampler=SimpleNamespace(make_room=lambda: done.append("stale"))),
        backend=SimpleNamespace(free_unused=lambda: done.append("cache")),
    )
    Judge.make_room(judge)
    assert done == [*([] if kept else ["launchers", "arena"]), "stale", "cache"]


def test_a_cpu_keeps_its_arenas():
    assert CPU.kept_launchers.share == 1


class Requests:
    """A channel on which one request comes."""

    def __init__(self, verb):
        self.verbs = [verb]
        self.answers = []

    def recv(self, _):
        if not self.verbs:
            raise ChannelClosed
        return SimpleNamespace(obj={"do": self.verbs.pop()}, blobs=())

    def send(self, answer):
        self.answers.append(answer)


@pytest.mark.parametrize("answer", [None, DeviceError("of the request itself")])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (DeviceWedged("hangs"), "hangs"),
        (
            RuntimeError("CUDA error: unspecified launch failure\nand more"),
            "memory does not go back: CUDA error: unspec",
        ),
    ],
)
def test_memory_that_does_not_go_back_is_an_error_of_the_machine(error, text, answer):
    """The first error is told: it may have caused the other."""

    def fail(error):
        raise error

    server = JudgeServer(Requests("printed"))
    printed = (lambda: fail(answer)) if answer else (lambda: "text")
    server._judge = SimpleNamespace(
        backend=SimpleNamespace(printed=printed), make_room=lambda: fail(error), close=lambda: None
    )
    server.serve()
    (told,) = server._channel.answers
    assert issubclass(ERRORS[told["error"]], MachineError)
    assert told["text"].startswith(str(answer) if answer else text)
