"""What a builder that was taken over could send, and what becomes of it."""

import contextlib
import dataclasses
import json
import threading

import pytest
from kagent_sandbox.builder import client
from kagent_sandbox.builder.binary.inspect import InspectError, kernel_info
from kagent_sandbox.builder.client import _Answers
from kagent_sandbox.builder.compile.cpp import compile_cpp
from kagent_sandbox.data.build import BuildCase, BuildRequest, Built, TensorSpec
from kagent_sandbox.data.plan import Alloc, Buffer, Launch, Plan, Pointer, TensorRef, TorchOp
from kagent_sandbox.data.plan_json import dump_plan
from kagent_sandbox.data.verdict import Rejected, Status
from kagent_sandbox.process.channel import Channel, ChannelClosed
from kagent_sandbox.process.child_handle import Exit

X = TensorSpec("x", (4,), (1,), "float32")
CASE = BuildCase("c", (X,), (dataclasses.replace(X, name="y"),))
REQUEST = BuildRequest("def f(x):\n    return x\n", "f", "cpu", (CASE,))


class FakeChild:
    """A child whose channel plays back what was scripted."""

    def __init__(self, messages):
        ours, self._theirs = Channel.pair()
        self.channel = ours
        self._sender = threading.Thread(target=self._send, args=(messages,))
        self._sender.start()

    def _send(self, messages):
        with Channel(self._theirs) as peer, contextlib.suppress(ChannelClosed):
            peer.recv(10.0)
            for obj, blobs in messages:
                peer.send(obj, blobs)

    def kill(self):
        return Exit(None, 9, False, None, 0.0, 0.0, "")

    def end(self):
        self.channel.close()
        self._sender.join()


@pytest.fixture(scope="module")
def binary():
    return compile_cpp("k", 'extern "C" void k(const float* x, float* y) { y[0] = x[0]; }')


def plan(binary, **changes):
    info = kernel_info(binary, "k", "cpp")
    ref = TensorRef(1, 0, (4,), (1,), "float32")
    op = Launch(info.hash, (1, 1, 1), (1, 1, 1), (Pointer(0, 0), Pointer(1, 0)))
    whole = Plan(
        "cpu",
        (Buffer(0, "input", 16, "x"), Buffer(1, "scratch", 16)),
        (Alloc(1), op),
        (ref,),
        (info,),
    )
    return dataclasses.replace(whole, **changes)


def collect(*messages, request=REQUEST):
    child = FakeChild(messages)
    try:
        return _Answers(request, child, "tree").collect()
    finally:
        child.end()


def honest(binary, sent=None):
    info = kernel_info(binary, "k", "cpp")
    blob = dump_plan(plan(binary)) if sent is None else sent
    return ({"plan": [0, "c"], "hashes": [info.hash]}, [blob, binary])


LOADED = ({"loaded": [{}]}, [])
DONE = ({"done": True}, [])


def test_an_honest_answer(binary):
    built = collect(LOADED, honest(binary), DONE)
    assert isinstance(built, Built)
    assert built.plans[0, "c"] == plan(binary)


def rejection(stage="build", status="POLICY", message="no", case=None):
    fields = {"stage": stage, "status": status, "message": message, "case": case}
    return {"rejected": fields}, []


def forged_messages(binary):
    info = kernel_info(binary, "k", "cpp")
    other = compile_cpp("k", 'extern "C" void k(const float* x, float* y) { y[0] = 2 * x[0]; }')
    wide = dataclasses.replace(info, param_bytes=(8, 8, 8))
    lie = dataclasses.replace(info, hash="0" * 64)

    def sent(**changes):
        return honest(binary, dump_plan(plan(binary, **changes)))

    yield "no plan", [LOADED, DONE]
    yield "not loaded", [honest(binary), DONE]
    yield "loaded twice", [LOADED, LOADED]
    yield "too many configurations", [({"loaded": [{}] * 2}, [])]
    yield "unknown message", [LOADED, ({"verdict": "Passed"}, [])]
    yield "passed instead of rejected", [LOADED, ({"rejected": {"stage": "fine"}}, [])]
    yield "unknown case", [LOADED, ({"plan": [0, "d"], "hashes": []}, [b"{}"])]
    yield "unknown configuration", [LOADED, ({"plan": [1, "c"], "hashes": []}, [b"{}"])]
    yield "plan twice", [LOADED, honest(binary), honest(binary)]
    yield "not a plan", [LOADED, honest(binary, b"[]")]
    yield "deep", [LOADED, honest(binary, b"[" * 100_000)]
    yield "NaN", [LOADED, honest(binary, dump_plan(plan(binary)).replace(b"16", b"NaN", 1))]
    yield "oversized", [LOADED, honest(binary, b" " * (9 << 20))]
    yield (
        "without binaries",
        [LOADED, ({"plan": [0, "c"], "hashes": []}, [dump_plan(plan(binary))])],
    )
    yield (
        "another binary",
        [LOADED, ({"plan": [0, "c"], "hashes": [info.hash]}, [honest(binary)[1][0], other])],
    )
    yield (
        "junk binary",
        [LOADED, ({"plan": [0, "c"], "hashes": [info.hash]}, [honest(binary)[1][0], b"\x7fELF"])],
    )
    yield "other parameters", [LOADED, sent(kernels=(wide,))]
    yield "other hash", [LOADED, sent(kernels=(lie,))]
    yield "other target", [LOADED, sent(target="sm_90a")]
    yield (
        "other inputs",
        [LOADED, sent(buffers=(Buffer(0, "input", 1 << 20, "x"), Buffer(1, "scratch", 16)))],
    )
    yield "other results", [LOADED, sent(outputs=(TensorRef(1, 0, (3,), (1,), "float32"),))]
    yield "no results", [LOADED, sent(outputs=())]
    ref = TensorRef(1, 0, (4,), (1,), "float32")
    source = TensorRef(0, 0, (4,), (1,), "float32")
    softmax = TorchOp("aten::_softmax.out", (source, 0, False), {}, (ref,))
    yield "torch does the work", [LOADED, sent(ops=(Alloc(1), softmax), kernels=())]
    yield "escapes in a name", [LOADED, sent(kernels=(dataclasses.replace(info, name="\x1b[2J"),))]
    half = dump_plan(plan(binary)).replace(b'"name":"k"', b'"name":"\\ud800"')
    yield "half a character", [LOADED, honest(binary, half)]
    yield "deep configuration", [({"loaded": [{"A": {"B": {"C": 1}}}]}, [])]
    yield "huge configuration", [({"loaded": [{"A": "x" * 100_000}]}, [])]
    yield "escapes in a configuration", [({"loaded": [{"A": "\x1b]0;x\x07"}]}, [])]
    yield "a duplicate", [rejection(status="DUPLICATE")]
    yield "a verdict of the judge", [rejection(stage="measure", status="SUSPECT")]
    yield "a case that is not", [rejection(case="[link=http://x]y[/link]")]
    pointer = Launch(info.hash, (1, 1, 1), (1, 1, 1), (Pointer(0, 0), Pointer(1, 1 << 30)))
    yield "pointer outside", [LOADED, sent(ops=(Alloc(1), pointer))]


def test_forged_answers_are_tamper(binary):
    for name, messages in forged_messages(binary):
        answer = collect(*messages)
        assert isinstance(answer, Rejected), name
        assert answer.status is Status.TAMPER, (name, answer)


TWO_CASES = (CASE, dataclasses.replace(CASE, name="d"))


def test_a_binary_is_not_exchanged_after_it_was_looked_at(binary):
    """The second plan does not launch the kernel whose binary comes with it, so that nobody would
    look at it; the first one does.
    """
    other = compile_cpp("k", 'extern "C" void k(const float* x, float* y) { y[0] = 2 * x[0]; }')
    empty = dump_plan(plan(binary, ops=(Alloc(1),), kernels=()))
    name = kernel_info(binary, "k", "cpp").hash
    answer = collect(
        LOADED,
        honest(binary),
        ({"plan": [0, "d"], "hashes": [name]}, [empty, other]),
        DONE,
        request=dataclasses.replace(REQUEST, cases=TWO_CASES),
    )
    assert isinstance(answer, Rejected)
    assert answer.status is Status.TAMPER
    assert "two binaries" in answer.message


def test_ptx_is_taken_where_it_was_asked_for_of_kernels_that_there_are(binary, monkeypatch):
    name = kernel_info(binary, "k", "cpp").hash
    sent = LOADED, ({"ptx": [name, "other"]}, [b".entry\x1b[2J k", b"x"]), honest(binary), DONE
    wanted = dataclasses.replace(REQUEST, ptx=True)
    assert collect(*sent, request=wanted).ptx == {name: r".entry\x1b[2J k"}
    monkeypatch.setattr(client, "MAX_PTX_BYTES", 10)
    for request in (REQUEST, wanted):  # nobody asked; too much
        answer = collect(*sent, request=request)
        assert isinstance(answer, Rejected)
        assert answer.status is Status.TAMPER


def test_plans_are_bounded_in_all(binary, monkeypatch):
    monkeypatch.setattr(client, "MAX_PLANS_BYTES", 100)
    answer = collect(LOADED, honest(binary), DONE)
    assert isinstance(answer, Rejected)
    assert answer.status is Status.RESOURCE_LIMIT


def test_an_endless_stream_of_messages_ends_at_the_limit(binary):
    request = dataclasses.replace(REQUEST, wall_limit_s=-10.0)
    answer = collect(LOADED, honest(binary), DONE, request=request)
    assert isinstance(answer, Rejected)
    assert answer.status is Status.TIMEOUT


def test_what_the_child_says_cannot_steer_a_terminal(binary):
    answer = collect(rejection(message="a\x1b]8;;http://x\x07b\u202ec"))
    assert answer.message == r"a\x1b]8;;http://x\x07b\u202ec"


def test_a_claimed_broken_machine_is_not_believed(binary):
    answer = collect(({"machine": "the GPU is on fire"}, []))
    assert isinstance(answer, Rejected)
    assert answer.status is Status.RUNTIME_ERROR


def test_claims_about_resources_are_read_from_the_binary(binary):
    info = kernel_info(binary, "k", "cpp")
    boast = dataclasses.replace(info, registers=1, code="f" * 64)
    sent = dump_plan(plan(binary, kernels=(boast,)))
    built = collect(LOADED, honest(binary, sent), DONE)
    assert built.plans[0, "c"].kernels == (info,)


def test_texts_are_cut(binary):
    long = {"stage": "build", "status": "POLICY", "message": "x" * 100_000, "case": None}
    answer = collect(({"rejected": long}, []))
    assert len(answer.message) < 10_000
    json.dumps(dataclasses.asdict(answer))


@pytest.mark.parametrize("cut", [3, 64, 200, 1000, 5000])
def test_damaged_binaries_are_refused_not_crashed_on(binary, cut):
    with pytest.raises(InspectError):
        kernel_info(binary[:cut], "k", "cpp")
    for at in range(0, len(binary), 997):
        damaged = binary[:at] + b"\xff" * 16 + binary[at + 16 :]
        try:
            kernel_info(damaged, "k", "cpp")
        except InspectError:
            continue
