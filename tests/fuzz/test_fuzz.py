"""Readers of untrusted bytes keep their word: whatever comes, they take it or refuse it by name.

For longer: benchmarks/fuzz.py. What it found is in `CRASHES`.
"""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutate import seeds, spoiled
from sampling import examples
from targets import TARGETS

MOST_EXAMPLES = {"events": 60, "task": 60, "config": 40, "answers": 60, "binary": 150}
BYTES = settings(max_examples=examples(60), deadline=None, derandomize=True, database=None)
CRASHES = {
    "task": [b"dims = " + b"[" * 2000],
    "config": [b"budget = " + b"[" * 2000, b"a = " + b"{a=" * 2000],
}


@pytest.mark.parametrize("name", TARGETS)
def test_sound_inputs_are_read(name):
    for data in seeds(name):
        TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
def test_spoiled_inputs_are_refused_by_name(name):
    rng = random.Random(name)
    for _ in range(MOST_EXAMPLES.get(name, 300)):
        TARGETS[name](spoiled(rng.choice(seeds(name)), rng))


@pytest.mark.parametrize("name", [n for n in TARGETS if n not in ("events", "config", "task")])
@BYTES
@given(data=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda t: t.encode())))
def test_any_bytes_are_refused_by_name(name, data):
    TARGETS[name](data)


@pytest.mark.parametrize("name", CRASHES)
def test_what_once_broke_a_reader(name):
    for data in CRASHES[name]:
        TARGETS[name](data)


SLOW = {
    "reply": [
        b"```python\n" * 30_000,
        b"```\n~~~\n" * 30_000,
        b"Hypothesis: " + b"* " * 200_000,
        b"<think>" * 100_000,
        b"\n" * 300_000,
        b'```python\nsoftmax = """' + b'\\"' * 200_000,
        b"@@ " * 200_000,
    ],
    "source": [
        b"S = '''#include <a>\n" + piece * (200_000 // len(piece)) + b"'''\n"
        for piece in (b'R"(', b"/*", b"#define a\\\n", b"'", b'"', b"\\\n", b"1'", b"u8", b"# ")
    ],
    "channel_json": [b"[" * 500_000, b'{"a":' * 100_000, b"[[],[]," * 100_000],
    "plan": [b'{"version":' + b"1" * 100_000, b"[" * 500_000],
}


@pytest.mark.parametrize("name", SLOW)
def test_no_input_costs_much_more_than_its_length(name):
    for data in SLOW[name]:
        began = time.process_time()
        TARGETS[name](data)
        took_s = time.process_time() - began
        assert took_s < 20, f"{data[:20]!r}: linear takes a second, quadratic minutes"
