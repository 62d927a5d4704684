"""Inputs to start from, and ways to spoil them."""

from __future__ import annotations

import contextlib
import functools
import json
import random
from collections.abc import Callable
from pathlib import Path

from kagent_sandbox.builder.compile.cpp import compile_cpp
from kagent_sandbox.builder.compile.cuda import compile_cuda
from kagent_sandbox.errors import MachineError

ROOT = Path(__file__).parents[2]
KERNEL = 'extern "C" void k(const float* x, float* y) { y[0] = x[0]; }'
CUDA_KERNEL = 'extern "C" __global__ void k(const float* x, float* y) { y[0] = x[0]; }'
TENSOR = '{"tensor":{"buffer":1,"offset":0,"shape":[4,8],"strides":[8,1],"dtype":"float32"}}'
PLAN = (
    '{"version":1,"target":"cpu","buffers":[{"id":0,"kind":"input","nbytes":128,"name":"x"},'
    '{"id":1,"kind":"scratch","nbytes":128,"name":null},'
    '{"id":2,"kind":"scratch","nbytes":128,"name":null}],"ops":[{"is":"alloc","buffer":1},'
    '{"is":"fill","tensor":T,"value":{"float":"-inf"}},{"is":"copy","src":T,"dst":T},'
    '{"is":"torchop","name":"aten::mm.out","args":[T,1,null,[2.5]],"kwargs":{"a":1},"writes":[T]},'
    '{"is":"launch","kernel":"H","grid":[4,1,1],"block":[128,1,1],"args":['
    '{"is":"pointer","buffer":0,"offset":0},{"is":"scalar","type":"i32","value":-3},{"is":"null"}],'
    '"shared":0,"cluster":[2,1,1],"cooperative":true,"pdl":false},'
    '{"is":"alloc","buffer":2},{"is":"free","buffer":2}],"outputs":[T],"kernels":[{"hash":"H",'
    '"language":"cpp","name":"k","param_bytes":[8,4,8],"registers":0,"spill_bytes":0,'
    '"static_shared_bytes":0,"load_bytes":{"16":4},"code":""}]}'
).replace("T,", f"{TENSOR},").replace("T]", f"{TENSOR}]").replace("T}", f"{TENSOR}}}").replace(
    '"H"', f'"{"a" * 64}"'
)  # fmt: skip
REJECTED = '{"stage":"build","status":"POLICY","message":"no","case":null}'
REPLY = (
    "<think>why</think>\nHypothesis: **rows** fit.\nPredicted speed-up: 1.15×–1.3x\n\n"
    '```python\nS = """\n```\n"""\ndef softmax(x):\n    return x\n```\n\n~~~cpp\nint a;\n~~~\n'
)
ASKED = '{"number":0,"parent":0,"operator":"rewrite","brief":0,"seen":0}'
PROPOSED = (
    '{"id":0,"parents":[],"operator":"seed","name":"a","kernel":"0123456789abcdef",'
    '"hypothesis":"","predicted":null,"seen":0,"attempt":0}'
)

WORDS = [
    b"", b"\0", b"\xff", b"\xed\xa0\x80", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\n",
    b"```", b"~~~", b"'''", b'"""', b"//", b"/*", b"*/", b"#", b"-1", b"0", b"1e999", b"NaN",
    b"Infinity", b"null", b"true", b"\\ud800", b"9" * 25, b"1" + b"0" * 5000, b"[" * 2000,
    b"(" * 300, b'{"a":' * 40, b"\x1b[2J", "\u202e".encode(), b"../../etc/passwd", b'R"(',
    b"# define A #\\\n", b"<think>", b"kagent ask 0007 of run ab", b"\x7fELF\x02\x01", b"softmax",
    b"def softmax(x): pass\n",
]  # fmt: skip
VALUES: list[object] = [
    None, True, False, 0, -1, 1, 2**31, 2**48, 2**63, 2**64, 1.5, -0.0, 1e308, "", "a", "\ud800",
    "\x1b[2J", "x" * 5000, "../x", [], {}, [[]], {"": 0}, {"float": "nan"}, {"is": "launch"},
]  # fmt: skip


@functools.cache
def seeds(target: str) -> tuple[bytes, ...]:
    """Sound inputs of a target."""
    if target == "binary":
        return _binaries()
    rejected = f'{{"rejected":{REJECTED}}}'
    texts: dict[str, list[str]] = {
        "plan": [PLAN],
        "channel_json": [PLAN, REJECTED],
        "record": [REJECTED],
        "answers": [
            '{"loaded":[{}]}\n{"plan":[0,"c"],"hashes":[]}\n{"done":true}',
            '{"loaded":[{"A":1},{"A":{"B":2}}]}\n{"dropped":"x"}\n' + rejected,
            '{"machine":"on fire"}',
        ],
        "reply": [REPLY],
        "source": [_read("corpus/honest/rows_cpp.py"), _read("corpus/honest/rows_triton.py")],
        "manifest": [],
        "events": [
            f'session {{"budget":3}}\nproposed {PROPOSED}\nasked {ASKED}\ndropped {{"ask":0}}\n'
            'recorded {"id":0,"verdict":' + REJECTED + ',"facts":null}\nstopped {"stop":"time"}\n'
            'machine {"environment":{"key":"a"}}\nbaselines {}\nopened {"by":"ask"}'
        ],
        "task": [_read("corpus/tasks/rows/task.toml")],
        "config": ['budget = 3\nlang = "cpp"\ntime = "8m"\n[[models]]\nname = "a"\nweight = 2.0\n'],
    }
    if target == "message":
        return (_frame(b'{"a":[1,2.5,"x"]}', [b"blob", b""]), _frame(b"[]", []) * 2)
    if target == "manifest":
        from targets import MANIFEST

        return (MANIFEST.encode(),)
    return tuple(t.encode() for t in texts[target])


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _frame(text: bytes, blobs: list[bytes]) -> bytes:
    from kagent_sandbox.process.channel import _HEADER, _LENGTH, _MAGIC

    head = _HEADER.pack(_MAGIC, len(text), len(blobs), 0)
    return head + b"".join(_LENGTH.pack(len(b)) for b in blobs) + text + b"".join(blobs)


def _binaries() -> tuple[bytes, ...]:
    found = [compile_cpp("k", KERNEL)]
    with contextlib.suppress(MachineError):  # no NVRTC here
        found.append(compile_cuda("k", CUDA_KERNEL, "sm_90a").cubin)
    return tuple(found)


def spoiled(data: bytes, rng: random.Random) -> bytes:
    """The input with one to four faults."""
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        data = rng.choice(_WAYS)(data, rng)
    return data[: 1 << 20]


def _flip(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return data
    at = rng.randrange(len(data))
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.choice(WORDS) + data[at:]


def _cut(data: bytes, rng: random.Random) -> bytes:
    at, end = sorted(rng.randint(0, len(data)) for _ in range(2))
    return data[:at] + data[min(end, at + rng.choice((1, 8, 64, 1 << 20))) :]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    at = rng.randint(0, len(data))
    piece = data[at : at + rng.choice((1, 8, 64, 512))]
    return data[:at] + piece * rng.choice((2, 3, 50)) + data[at:]


def _number(data: bytes, rng: random.Random) -> bytes:
    """Eight bytes of a binary become a number at the edge of something."""
    at, size = rng.randint(0, max(0, len(data) - 8)), rng.choice((2, 4, 8))
    edge = rng.choice((0, 1, 2**15, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1, len(data)))
    return data[:at] + (edge % 2 ** (8 * size)).to_bytes(size, "little") + data[at + size :]


def _value(data: bytes, rng: random.Random) -> bytes:
    """Somewhere in JSON another value, if it is JSON; in a line of it if it is lines."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    head, brace, rest = lines[at].partition(b"{")
    try:
        value = json.loads(brace + rest)
    except (ValueError, RecursionError):
        return data
    lines[at] = head + json.dumps(_replaced(value, rng)).encode()
    return b"\n".join(lines)


def _replaced(value: object, rng: random.Random) -> object:
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: _replaced(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        if rng.random() < 0.1:
            return [*value, value[at]]
        return [*value[:at], _replaced(value[at], rng), *value[at + 1 :]]
    return rng.choice(VALUES)


_WAYS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip, _insert, _insert, _cut, _repeat, _number, _value, _value,
)  # fmt: skip
