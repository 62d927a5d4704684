"""Imports the library, calls one operator, and says what is no longer as it was.

python tests/visit.py TASK
"""

import ctypes
import functools
import gc
import glob
import importlib
import mmap
import os
import platform
import resource
import signal
import struct
import sys
import time
import warnings
from collections import Counter

import conftest  # noqa: F401 - finds the library
import torch

LOOKS, LOOK_S = 12, 0.02
END_S = 1.0  # more than an ending thread takes
PROT_READ, PROT_WRITE = 1, 2
# The C library keeps two signals for itself.
SIGNALS = sorted({*range(1, 65)} - {signal.SIGKILL, signal.SIGSTOP, 32, 33})
libc, libm = ctypes.CDLL(None, use_errno=True), ctypes.CDLL("libm.so.6")


def floating_point():
    """How this thread and torch's round, and what they make of subnormal numbers. In words: to a
    processor that flushes them, a subnormal number equals 0.
    """
    state = ctypes.create_string_buffer(64)
    libm.fegetenv(state)
    if platform.machine() == "x86_64":  # control words of the x87 and of SSE
        x87, mxcsr = struct.unpack_from("H26xI", state.raw)
        words = x87, mxcsr & ~0x3F
    else:
        words = struct.unpack_from("I", state.raw)
    many = torch.ones(1 << 20)
    found = {
        "control words": words,
        "1e-310 * 1, a subnormal number": float("1e-310") * float("1"),
        "1e-40 * 1 in float32": extremes(many * 1e-40 * 1),
        "1e-310 * 1 in torch": extremes(many.double() * 1e-310 * 1),
    }
    for divisor in (3.0, -3.0, 7.0):
        found[f"1 / {divisor} in float32"] = extremes(many / divisor)
    return {what: str(value) for what, value in found.items()}


def extremes(equal):
    """The least and the largest of numbers that would be equal if all threads computed alike."""
    return [bound.item() for bound in equal.aminmax()]


def handlers():
    """Of all signals, as the C library has them; which signals are blocked; the stack for them."""
    found = {"blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ())}
    for number in SIGNALS:
        action = ctypes.create_string_buffer(152)
        libc.sigaction(number, None, action)
        own = int.from_bytes(action.raw[:8], "little") > 1  # neither the default nor ignored
        mask_and_flags = action.raw[8:16] + action.raw[136:140] if own else b""
        found[f"the handler of signal {number}"] = action.raw[:8] + mask_and_flags
    stack = ctypes.create_string_buffer(24)
    libc.sigaltstack(None, stack)
    found["the alternate stack for signals"] = stack.raw
    return found


def open_files():
    """Descriptors, each with its device and inode; without /proc, which a sandbox may hide."""
    found = []
    for descriptor in range(min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0])):
        try:
            status = os.fstat(descriptor)
        except OSError:
            continue
        found.append((descriptor, status.st_dev, status.st_ino))
    return found


def threads():
    """How many of this process have a name; none where a sandbox hides /proc."""
    names = map(thread_name, glob.glob("/proc/self/task/*/comm"))
    return Counter(filter(None, names))


def thread_name(path):
    """Empty where the thread has ended since it was listed."""
    try:
        with open(path, encoding="utf-8") as name:
            return name.read().strip()
    except OSError:
        return ""


def more_threads(before):
    """Threads that came and stay, by name.

    Fewer are none: OpenMP ends threads for a smaller team, and starts others for the next large
    one, as torch's bf16 products on a CPU do. Such a thread is still there for a moment.
    """
    until = time.monotonic() + END_S
    while (more := threads() - before) and time.monotonic() < until:
        time.sleep(0.01)
    return dict(more)


def belongings():
    """Open files, the working directory and the settings of torch's threads."""
    return {
        "open files": open_files(),
        "the working directory": os.getcwd(),
        "torch's number of threads": torch.get_num_threads(),
        "the cores of this thread": os.sched_getaffinity(0),
    }


class Mallinfo2(ctypes.Structure):
    """What the C library counts."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def memory():
    """Bytes that are allocated, and bytes that the kernel was asked for: where a sandbox hides
    that, the most that were in memory so far.
    """
    gc.collect()
    used = 0
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = Mallinfo2
        found = libc.mallinfo2()
        used = found.uordblks + found.hblkhd
    try:
        with open("/proc/self/status", encoding="utf-8") as status:
            asked = next(int(line.split()[1]) for line in status if line.startswith("VmData"))
    except OSError:
        asked = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used, asked << 10


def changed(before, after):
    """What differs, in words."""
    return [
        f"{key}: {difference(value, after[key])}"
        for key, value in before.items()
        if after[key] != value
    ]


def difference(before, after):
    """Of lists, which may be long: what came, and what went."""
    if isinstance(before, list) and isinstance(after, list):
        new = [item for item in after if item not in before]
        gone = [item for item in before if item not in after]
        return f"new: {str(new)[:300]}, gone: {str(gone)[:300]}"
    return f"{str(after)[:300]}, and was {str(before)[:300]}"


def keeps_memory(call):
    """Whether memory has grown at each of many looks, with calls between them."""
    end = time.perf_counter() + 2 * LOOK_S
    while time.perf_counter() < end:
        call()
    last = memory()
    for _ in range(LOOKS):
        calls, end = 0, time.perf_counter() + LOOK_S
        while calls < 8 or time.perf_counter() < end:
            call()
            calls += 1
        now = memory()
        if all(a <= b for a, b in zip(now, last, strict=True)):
            return False
        last = now
    return True


class ReadOnly:
    """Copies of tensors in memory that cannot be written until it is closed."""

    def __init__(self, tensors):
        self.tensors, self._places = {}, []
        for name, tensor in tensors.items():
            extent = 1 + sum(
                (n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)
            )
            nbytes = max(1, extent) * tensor.element_size()
            memory = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
            flat = torch.frombuffer(memory, dtype=tensor.dtype, count=max(1, extent))
            copy = flat.as_strided(tensor.shape, tensor.stride())
            copy.copy_(tensor)
            self.tensors[name] = copy
            self._places.append((flat.data_ptr(), len(memory)))
            self._protect(*self._places[-1], PROT_READ)

    def _protect(self, address, nbytes, access):
        if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), access):
            raise OSError(ctypes.get_errno(), "mprotect failed")

    def close(self):
        """Let them be written again."""
        for place in self._places:
            self._protect(*place, PROT_READ | PROT_WRITE)


def call_on_guarded_inputs(task, operator, arguments):
    """One call; on a CPU it would end the process to write an input."""
    own = task.own(arguments)
    inputs = {n: t for n, t in own.items() if n in task.tensors and t is arguments[n]}
    before = {n: t.clone() for n, t in inputs.items()}
    guarded = {n: t for n, t in inputs.items() if t.is_cpu and t.numel()}
    guard = ReadOnly(guarded)
    try:
        operator.op(*{**own, **guard.tensors}.values())
        operator.op(*own.values())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    finally:
        guard.close()
    return [n for n, t in inputs.items() if not torch.equal(_bits(t), _bits(before[n]))]


def _bits(tensor):
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(width[tensor.element_size()])


def main(name):
    """What the library has changed."""
    torch.mm(torch.ones(512, 512), torch.ones(512, 512)).mul_(2)  # torch starts its threads
    before = {**floating_point(), **handlers()}
    importlib.import_module("kagent_kernels")
    found = [f"imported: {text}" for text in changed(before, {**floating_point(), **handlers()})]
    from harness import DEVICES, Task, operator_of  # the library's own

    from kagent_kernels import _portfolio

    _portfolio.elements = lambda dims: 1  # its kernels, also where a call is small

    task, operator = Task(name), operator_of(name)
    if "gpu" in DEVICES:  # a driver and compilers start threads, and have handlers of their own
        for case in task.cases():
            operator.op(*task.arguments(case).values())
        before = {**floating_point(), **handlers()}
    for case in task.cases():
        print(f"{name}, {case}", flush=True)  # the last line, if this ends the process
        written = call_on_guarded_inputs(task, operator, task.arguments(case))
        found += [f"{case}: the argument {argument} was changed" for argument in written]
        after = {**floating_point(), **handlers()}
        found += [f"{case}: {text}" for text in changed(before, after)]
    floating_point()  # torch's teams are as large as they become
    settled, started = belongings(), threads()
    gc.collect()
    gc.freeze()  # each look at the memory collects what calls have left, and not all of torch
    for case in task.cases():
        if keeps_memory(functools.partial(operator.op, *task.arguments(case).values())):
            found.append(f"{case}: every call keeps memory")
    found += [f"repeated: {text}" for text in changed(settled, belongings())]
    if more := more_threads(started):
        found.append(f"repeated: more threads: {more}")
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # about devices that nobody measured
    complaints = main(sys.argv[1])
    print("\n".join(complaints))
    sys.exit(bool(complaints))
