"""What the script under compute-sanitizer makes of a tool's words; the tool itself needs a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import sanitize
from kagent.export.writing import files_of, write_library
from synthetic_library import cpu_library

SEEDS = Path(__file__).parents[1] / "seeds"

# Of one H200, 2026-11-26, CUDA 13.0. Lines 273 and 313 are the kernel's `def` and the `if` around
# its warp_specialize.
DISPATCH = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at _attention+0xf0 in attention_fa5733ac.py:273
=========     and Write access at _attention+0x79e0 in attention_fa5733ac.py:273 [26 hazards]
=========     and Write access at _attention+0xd600 in attention_fa5733ac.py:313 [14 hazards]
=========
========= Error: Race reported between Read access at _attention+0xf0 in attention_fa5733ac.py:273
=========     and Write access at _attention+0x63c0 in attention_fa5733ac.py:273 [3 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""
PLACES = {("attention_fa5733ac.py", 273), ("attention_fa5733ac.py", 313)}
SOURCE = """\
@gluon.jit
def role(x, y):
    y.store(x.load())

@gluon.jit
def kernel(x, GROUPS: gl.constexpr):
    s = gl.allocate_shared_memory(gl.float32, [8], layout)
    s.store(x)
    if GROUPS == 2:
        gl.warp_specialize(
            [(role, (s, 0)), (role, (s, 1))],
            [4], [240])
    s.load()
"""


def test_hazards_in_triton_s_dispatch_of_warps_are_counted_on_their_own():
    assert sanitize.found_by(DISPATCH, PLACES) == (0, 2)
    assert sanitize.found_by(DISPATCH, set()) == (2, 0)


@pytest.mark.parametrize(
    ("place", "other"),
    [
        ("attention_fa5733ac.py:313 [14", "attention_fa5733ac.py:250 [14"),  # a role's own line
        ("attention_fa5733ac.py:313 [14", "softmax_fa5733ac.py:313 [14"),
        ("+0xd600 in attention_fa5733ac.py:313", "+0xd600"),  # nobody knows where
    ],
)
def test_a_hazard_with_one_end_elsewhere_is_an_error(place, other):
    assert place in DISPATCH
    assert sanitize.found_by(DISPATCH.replace(place, other), PLACES) == (1, 1)


@pytest.mark.parametrize(
    ("out", "errors"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= ERROR SUMMARY: 1 error\n", 1),
        (  # "not printed" are among the 49
            "========= ERROR SUMMARY: 49 errors\n"
            "========= ERROR SUMMARY: 44 errors were not printed. Use --print-limit\n",
            49,
        ),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n", 1),
        ("Killed\n", None),
    ],
)
def test_the_summary_is_read(out, errors):
    assert sanitize.found_by(out, set()) == (errors, 0)


def test_dispatch_is_the_call_of_warp_specialize_and_what_is_around_it():
    assert set(sanitize.dispatch_lines(SOURCE)) == {6, 9, 10}


@pytest.mark.parametrize(
    ("next_", "places"),
    [
        ("if GROUPS:\n    meet()", {1, 4, 5}),
        ("if s.load():\n    meet()", {1, 4}),  # an access of its own
        ("meet()\nif GROUPS:\n    meet()", {1, 4}),
    ],
)
def test_an_if_on_a_constant_that_comes_next_gets_the_end_of_all_roles(next_, places):
    """As racecheck reported it of attention_backward's kernel."""
    text = f"def kernel(GROUPS: gl.constexpr):\nDOC\ns.store(x)\ngl.warp_specialize(roles)\n{next_}"
    head, *body = text.splitlines()
    assert set(sanitize.dispatch_lines("\n    ".join([head, *body]))) == places


def test_every_kernel_of_gluon_that_gives_out_roles_has_such_places():
    seeds = [f for f in SEEDS.rglob("gluon_*.py") if "warp_specialize(" in f.read_text()]
    assert seeds
    for file in seeds:
        lines = file.read_text().splitlines()
        found = {lines[n - 1].strip() for n in sanitize.dispatch_lines("\n".join(lines))}
        assert any("warp_specialize(" in line for line in found)
        assert any(line.startswith("def ") for line in found)


@pytest.mark.nightly
def test_kernels_are_called_and_compared(tmp_path):
    """Without a tool, on this CPU; then with one kernel whose results are a little too large."""
    record, folder = cpu_library(), tmp_path / "made"
    write_library(record, files_of(record, cubins={}), folder)
    found = tmp_path / "found.json"
    words = [sys.executable, sanitize.__file__, str(folder), "--without-tool", "--cases", "2"]
    words += ["--operator", "softmax", "--json", str(found)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = json.loads(found.read_text())
    assert line == {**line, "operator": "softmax", "calls": 2, "found": "0", "clean": True}
    (kernel,) = folder.glob("build/torch-universal/*/kernels/softmax_*.py")
    source = kernel.read_text()
    assert "    return y\n" in source
    kernel.write_text(source.replace("    return y\n", "    return y.mul_(1.01)\n"))
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = json.loads(found.read_text())
    assert line["found"].startswith("0, wrong 2: ")
    assert not line["clean"]
