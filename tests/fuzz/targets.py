"""Everything that reads bytes of others, as functions of bytes that fail only where a reader breaks
its word: each either takes its input or refuses it with the errors that it names.

Used by `test_fuzz.py` for seconds, and by benchmarks/fuzz.py for as long as one likes.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from kagent.asktell.open_asks import named_by_header
from kagent.config.settings import load_config
from kagent.llm.reply import Answer, read_reply
from kagent.runs.checksums import End, insert
from kagent.runs.files import connect
from kagent.runs.manifest import read_manifest
from kagent.runs.store import RunStore
from kagent_sandbox.builder.binary.inspect import InspectError, architecture, kernel_info
from kagent_sandbox.builder.client import _Answers
from kagent_sandbox.builder.identity import tree_hash
from kagent_sandbox.data import records
from kagent_sandbox.data.build import BuildCase, BuildRequest, Built, TensorSpec
from kagent_sandbox.data.plan import PlanError
from kagent_sandbox.data.plan_json import dump_plan, parse_plan, plan_identity
from kagent_sandbox.data.race import Race
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Passed, Rejected
from kagent_sandbox.errors import MachineError, RunError, UserError
from kagent_sandbox.judge.arena.layout import lay_out
from kagent_sandbox.process.channel import Channel, ChannelError, parse_json
from kagent_sandbox.process.child_handle import Exit

Target = Callable[[bytes], None]
X = TensorSpec("x", (4,), (1,), "float32")
REQUEST = BuildRequest(
    "def f(x):\n    return x\n", "f", "cpu", (BuildCase("c", (X,), (X,)),), max_configs=2
)
REFERENCE = "def reference(x):\n    return x\n"


def plan(data: bytes) -> None:
    """A plan that the builder sent: what is taken adds up, and survives being written again."""
    try:
        found = parse_plan(data)
    except PlanError:
        return
    assert parse_plan(dump_plan(found)) == found or _has_nan(data)
    plan_identity(found)
    layout = lay_out(found)
    for buffer in found.buffers:
        at = layout.offsets.get(buffer.id)  # none: it is never allocated, nor used
        assert at is None or layout.start <= at <= at + buffer.nbytes <= layout.stop
    for guard in layout.guards:
        for buffer, at in layout.offsets.items():
            size = next(b.nbytes for b in found.buffers if b.id == buffer)
            assert at + size <= guard[0] or guard[1] <= at or not size, "a guard inside of a buffer"


def _has_nan(data: bytes) -> bool:
    return b"nan" in data


def channel_json(data: bytes) -> None:
    """JSON of a message: finite, of bounded depth, and text that can be written."""
    with contextlib.suppress(ChannelError):
        json.dumps(parse_json(data), ensure_ascii=False, allow_nan=False).encode()


def message(data: bytes) -> None:
    """Bytes on a channel's socket."""
    ours, theirs = Channel.pair()

    def send() -> None:
        with contextlib.suppress(OSError):
            theirs.sendall(data)
        theirs.close()

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with ours, contextlib.suppress(ChannelError):
            while True:
                ours.recv(5.0, max_bytes=1 << 20)
    finally:
        sender.join()


def binary(data: bytes) -> None:
    """A library or a cubin."""
    for language in ("cpp", "cuda"):
        with contextlib.suppress(InspectError):
            kernel_info(data, "k", language)  # type: ignore[arg-type]
    with contextlib.suppress(ValueError):  # of which ElfError is one
        architecture(data)


def record(data: bytes) -> None:
    """Results, as judges and stores write them."""
    try:
        value = parse_json(data)
    except ChannelError:
        return
    for kind in (Rejected, Passed, Race, BuildRequest):
        with contextlib.suppress(records.RecordError):
            records.to_json(records.from_json(kind, value))


def answers(data: bytes) -> None:
    """What a builder's child says: JSON lines, each a message; a plan goes with those that need
    one.
    """
    ours, theirs = Channel.pair()
    child = _Child(ours)

    def send() -> None:
        with Channel(theirs) as peer, contextlib.suppress(*_UNSENT):
            peer.recv(10.0)
            for line in data.splitlines()[:20]:
                obj = json.loads(line)
                is_plan = isinstance(obj, dict) and "plan" in obj
                peer.send(obj, [dump_plan(_PLAN)] if is_plan else [])

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with contextlib.suppress(MachineError):
            found = _Answers(REQUEST, child, "tree").collect()  # type: ignore[arg-type]
            assert isinstance(found, Built | Rejected)
            if isinstance(found, Rejected):
                assert found.stage in ("parse", "build")
                json.dumps(records.to_json(found), ensure_ascii=False).encode()
    finally:
        ours.close()
        sender.join()


_UNSENT = (ChannelError, ValueError, RecursionError)


class _Child:
    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def kill(self) -> Exit:
        return Exit(None, 9, False, "killed", 0.0, 0.0, "")

    def wait(self, _limit_s: float) -> Exit:
        return Exit(1, None, False, None, 0.0, 0.0, "")


def reply(data: bytes) -> None:
    """A model's reply."""
    text = data.decode(errors="replace")
    for truncated in (False, True):
        found = read_reply(text, "softmax", truncated=truncated)
        if isinstance(found, Answer):
            assert "softmax" in found.source
            assert found.hypothesis.isprintable()
            assert found.predicted is None or found.predicted > 0
    named_by_header(text)


def source(data: bytes) -> None:
    """A candidate's text, on its way to being told a duplicate."""
    text = data.decode(errors="replace")
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        tree_hash(text)


def manifest(data: bytes) -> None:
    """run.json of somebody's run."""
    with _folder() as folder:
        (folder / "run.json").write_bytes(data)
        with contextlib.suppress(RunError):
            read_manifest(folder)


def events(data: bytes) -> None:
    """The log of somebody's run: lines of a kind, a blank and JSON."""
    with _folder() as folder:
        connect(folder / "lineage.sqlite").close()
        db = sqlite3.connect(folder / "lineage.sqlite")
        rows = []
        for line in data.decode(errors="replace").splitlines()[:50]:
            kind, _, text = line.partition(" ")
            rows.append((1.0, kind, text.encode(errors="replace").decode()))
        insert(db, rows, End())
        db.commit()
        db.close()
        (folder / "kernels").mkdir()
        (folder / "run.json").write_text(MANIFEST)
        with contextlib.suppress(RunError), RunStore.open(folder, write=False) as store:
            store.history()


def task(data: bytes) -> None:
    """task.toml of somebody's task."""
    with _folder() as folder:
        (folder / "task.toml").write_bytes(data)
        (folder / "reference.py").write_text(REFERENCE)
        with contextlib.suppress(UserError):
            load_task(folder)


def config(data: bytes) -> None:
    """kagent.toml of the folder in which somebody starts kagent."""
    with _folder() as folder, contextlib.chdir(folder):
        (folder / "kagent.toml").write_bytes(data)
        with contextlib.suppress(UserError):
            load_config()


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        yield Path(folder)


_PLAN = parse_plan(
    b'{"version":1,"target":"cpu","buffers":[{"id":0,"kind":"input","nbytes":16,"name":"x"}],'
    b'"ops":[],"outputs":[{"tensor":{"buffer":0,"offset":0,"shape":[4],"strides":[1],'
    b'"dtype":"float32"}}],"kernels":[]}'
)
MANIFEST = json.dumps(
    {
        "task": "toy", "task_folder": "toy", "task_digest": "0", "matrix": False, "kind": "cpu",
        "target": "cpu", "seed": 1, "lang": "any", "proposer": "tune", "operators": [],
        "in_flight": 1, "configs": 1, "environment": {}, "started": "", "version": "0",
    }
)  # fmt: skip

TARGETS: dict[str, Target] = {
    f.__name__: f
    for f in (
        plan, channel_json, message, binary, record, answers, reply, source, manifest, events, task,
        config,
    )
}  # fmt: skip
