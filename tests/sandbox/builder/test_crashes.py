"""Candidates that crash or hang in host code: the verdict names their line."""

import re

import pytest
from kagent_sandbox.builder.crash_report import crash_line, printed_before
from kagent_sandbox.data.build import BuildCase, BuildRequest, TensorSpec
from kagent_sandbox.data.verdict import Rejected, Stage, Status

CPP = '''
import ctypes, os, signal, sys
import torch
from kagent_sandbox.lang import cpp_kernel
{at_import}

def copy(x):
    y = torch.empty_like(x)
    {in_call}
    cpp_kernel("copy", SOURCE)(x, y, x.numel())
    return y

SOURCE = """
#include <cstdint>
extern "C" void copy(const float* x, float* y, int64_t n) {{ y[0] = x[n - 1]; }}
"""
'''
X = TensorSpec("x", (64,), (1,), "float32")
CASE = BuildCase("one", (X,), (TensorSpec("y", (64,), (1,), "float32"),))
OTHER = BuildCase("two", (X,), (TensorSpec("y", (64,), (1,), "float32"),))


def built(builder, in_call="pass", at_import="", **limits):
    source = CPP.format(at_import=at_import, in_call=in_call)
    return builder.build(BuildRequest(source, "copy", "cpu", (CASE, OTHER), **limits))


def refused(builder, status, *args, **kwargs):
    found = built(builder, *args, **kwargs)
    assert isinstance(found, Rejected)
    assert (found.stage, found.status) == (Stage.BUILD, status)
    return found.message


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("ctypes.string_at(0)", "SIGSEGV"),
        ("os.abort()", "SIGABRT"),
        ("signal.raise_signal(signal.SIGILL)", "SIGILL"),
    ],
)
def test_a_crash_names_its_line(builder, code, how):
    message = refused(builder, Status.RUNTIME_ERROR, code)
    assert message.startswith(f"line 9: `{code}`: the process that traced one died of {how}")
    message = refused(builder, Status.RUNTIME_ERROR, at_import=code)
    assert message.startswith(f"line 5: `{code}`: the builder's process was lost while importing")
    assert "Fatal Python error" not in message
    assert built(builder).binaries


def test_what_was_printed_before_a_crash_is_shown_and_our_own_frames_are_not(builder):
    code = "print('nearly there', flush=True); os.abort()"
    message = refused(builder, Status.RUNTIME_ERROR, at_import=code)
    assert message.endswith("\nnearly there")


def test_a_process_that_ends_itself_has_no_line(builder):
    message = refused(builder, Status.RUNTIME_ERROR, "os._exit(3)")
    assert message == "the process that traced one ended itself with status 3 in host code"


@pytest.mark.parametrize(
    "loop",
    [
        "while True: pass",
        "10 ** (10 ** 9)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64)); [0 for _ in iter(int, 1)]",
    ],
)
def test_a_loop_is_ended_at_its_limit_with_its_line(builder, loop):
    # one second of a limit is kept to send what there is: the loop has the rest
    message = refused(builder, Status.TIMEOUT, loop, wall_limit_s=1.7)
    assert "host code of one" in message
    blocked = "sigmask" in loop
    assert re.search(r"^line 9: `", message) or blocked
    message = refused(builder, Status.TIMEOUT, at_import=loop, wall_limit_s=0.5)
    assert re.match(r"line 5: `.*`: importing the file took longer than 0\.5 s", message)


def test_a_worker_that_is_stopped_by_its_fork_is_ended_at_its_limit(builder):
    """The process that keeps the limit cannot; the client does, from outside."""
    code = "os.kill(os.getppid(), signal.SIGSTOP)"
    message = refused(builder, Status.TIMEOUT, code, wall_limit_s=3.0)
    assert message == "tracing and compiling (0 of 2 cases done) took longer than 3 s"


def test_an_exception_with_a_huge_text_is_cut(builder):
    message = refused(builder, Status.RUNTIME_ERROR, 'raise ValueError("flood " * 10_000_000)')
    assert message.startswith("line 9: ")
    assert len(message) < 4000


def test_a_function_with_a_mangled_name_does_not_compile(builder):
    source = CPP.format(at_import="", in_call="").replace('extern "C" ', "")
    found = builder.build(BuildRequest(source, "copy", "cpu", (CASE,)))
    assert found.status is Status.COMPILE_ERROR
    assert 'must be declared extern "C"' in found.message


def test_a_tensor_on_a_device_that_is_not_the_target_s(builder):
    message = refused(builder, Status.POLICY, 'torch.empty(4, device="cuda")')
    assert 'line 9: `torch.empty(4, device="cuda")`' in message
    assert "allocate with device=x.device" in message
    assert len(message) < 400


DUMP = """half a line
Fatal Python error: Segmentation fault

Current thread 0x00007f1859a36b80 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/tmp/kagent-a/7/candidate.py", line 2 in inner
  File "/tmp/kagent-a/7/candidate.py", line 3 in rows
"""


def test_dumps():
    assert crash_line(DUMP, "a\nb = 1\nc\n") == "line 2: `b = 1`: "
    assert crash_line(DUMP, "a") == ""
    assert crash_line("no dump", "a") == ""
    assert printed_before(DUMP) == "half a line"
    assert printed_before("all well\n") == "all well"


@pytest.mark.parametrize("deep", ["-" * 50_000 + "1", "1+" * 50_000 + "1", "(" * 50_000])
def test_a_file_that_is_too_deep_for_the_parser_is_refused(builder, deep):
    found = builder.build(BuildRequest(f"x = {deep}\n", "copy", "cpu", (CASE,)))
    assert (found.stage, found.status) == (Stage.PARSE, Status.COMPILE_ERROR)
    assert re.search("nested|recursion", found.message)
