"""What the launcher's design rests on, each shown alone in processes that use nothing of kagent.

When one of these fails, read it first: the tests of the launcher then fail for this reason.
"""

import subprocess
import sys
import textwrap

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

PRELUDE = """
import ctypes, os, socket, sys, array
import torch
import cuda.bindings.driver as d
def ok(result, *what):
    err, *rest = result
    assert err == d.CUresult.CUDA_SUCCESS, (err.name, *what)
    return rest[0] if len(rest) == 1 else rest
class A:
    def __init__(self, p, n):
        self.__cuda_array_interface__ = dict(
            shape=(n,), typestr='|u1', data=(p, False), version=3, strides=None, stream=None)
"""


def python(code):
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_uid_can_be_dropped_before_the_context():
    python("""
        if os.getuid() == 0:
            os.setgroups([]); os.setgid(61234); os.setuid(61234)
        assert float(torch.ones(4, device='cuda').sum()) == 4
    """)


def test_a_fork_of_a_process_that_imported_everything_can_make_its_context():
    python("""
        import triton, cuda.core, kagent_sandbox.device.cuda.worker
        pid = os.fork()
        if pid == 0:
            try:
                assert float(torch.ones(4, device='cuda').sum()) == 4
                cuda.core.Device(0).set_current()
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    """)


SHARE = """
pid_sock, child_sock = socket.socketpair()
pid = os.fork()
if pid == 0:
    try:
        DROP
        msg, fds, _, _ = socket.recv_fds(child_sock, 64, 1)
        torch.zeros(1, device='cuda')
        N = 32 << 20
        OPEN
        t = torch.as_tensor(A(int(p), N), device='cuda')
        assert t.data_ptr() == int(p)
        assert int(t[:1000].sum()) == 7000, t[:10].tolist()
        t[1000:2000] = 9
        torch.cuda.synchronize()
        child_sock.send(b'done')
        child_sock.recv(1)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
child_sock.close()
N = 32 << 20
torch.zeros(1, device='cuda')
MAKE
t = torch.as_tensor(A(int(p), N), device='cuda')
t.fill_(7)
torch.cuda.synchronize()
SEND
reply = pid_sock.recv(4)
assert reply == b'done', reply
assert int(t[1000:2000].sum()) == 9000
pid_sock.send(b'x')
assert os.waitpid(pid, 0)[1] == 0
"""
FD = {
    "MAKE": """
prop = d.CUmemAllocationProp()
prop.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
prop.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
prop.location.id = 0
FDT = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
prop.requestedHandleTypes = FDT
h = ok(d.cuMemCreate(N, prop, 0), 'create')
fd = ok(d.cuMemExportToShareableHandle(h, FDT, 0), 'export')
def map_(h):
    p = ok(d.cuMemAddressReserve(N, 2 << 20, 0, 0), 'reserve')
    ok(d.cuMemMap(p, N, 0, h, 0), 'map')
    a = d.CUmemAccessDesc()
    a.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    a.location.id = 0
    a.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ok(d.cuMemSetAccess(p, N, [a], 1), 'access')
    return p
p = map_(h)
""",
    "SEND": "socket.send_fds(pid_sock, [b'x'], [int(fd)])",
    "OPEN": """
        FDT = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        h = ok(d.cuMemImportFromShareableHandle(fds[0], FDT), 'import')
        p = ok(d.cuMemAddressReserve(N, 2 << 20, 0, 0), 'reserve')
        ok(d.cuMemMap(p, N, 0, h, 0), 'map')
        a = d.CUmemAccessDesc()
        a.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        a.location.id = 0
        a.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        ok(d.cuMemSetAccess(p, N, [a], 1), 'access')
""",
}
IPC = {
    "MAKE": """
p = ok(d.cuMemAlloc(N), 'alloc')
handle = ctypes.string_at(ok(d.cuIpcGetMemHandle(p), 'export').getPtr(), 64)
""",
    "SEND": "pid_sock.send(handle)",
    "OPEN": """
        h = d.CUipcMemHandle()
        ctypes.memmove(h.getPtr(), msg, 64)
        p = ok(d.cuIpcOpenMemHandle(h, 1), 'open')
""",
}


@pytest.mark.parametrize("user", ["same user", "another user"])
@pytest.mark.parametrize("transport", ["fd", "ipc"])
def test_memory_is_shared_between_processes(transport, user):
    code = SHARE
    for key, text in {"fd": FD, "ipc": IPC}[transport].items():
        code = code.replace(
            key, text.strip("\n").removeprefix("        ") if key == "OPEN" else text
        )
    drop = "if os.getuid() == 0: os.setgroups([]); os.setgid(61234); os.setuid(61234)"
    code = code.replace("DROP", drop if user == "another user" else "pass")
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, timeout=120
    )
    if transport == "ipc" and user == "another user" and done.returncode:
        pytest.skip(f"CUDA IPC does not reach another user here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_torch_graphs_can_be_instantiated_and_launched_by_the_driver():
    python("""
        s = torch.cuda.Stream()
        x = torch.zeros(1000, device='cuda')
        with torch.cuda.stream(s):
            x.add_(1)
        torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(s):
            g.capture_begin(pool=None, capture_error_mode='thread_local')
            x.add_(1)
            g.capture_end()
        e = ok(d.cuGraphInstantiate(d.CUgraph(g.raw_cuda_graph()), 0), 'instantiate')
        st = d.CUstream(s.cuda_stream)
        ok(d.cuGraphUpload(e, st), 'upload')
        for _ in range(5):
            ok(d.cuGraphLaunch(e, st), 'launch')
        ok(d.cuStreamSynchronize(st), 'sync')
        assert float(x[0]) == 6, float(x[0])
        ok(d.cuGraphExecDestroy(e), 'destroy')
        g.reset()
    """)


def test_driver_attributes_and_persisting_l2():
    out = python("""
        torch.zeros(1, device='cuda')
        ok(d.cuCtxResetPersistingL2Cache(), 'reset')
        dev = ok(d.cuDeviceGet(0))
        for n in ('MEMORY_CLOCK_RATE', 'GLOBAL_MEMORY_BUS_WIDTH',
                  'MAX_SHARED_MEMORY_PER_BLOCK_OPTIN',
                  'HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED'):
            a = getattr(d.CUdevice_attribute, 'CU_DEVICE_ATTRIBUTE_' + n)
            print(n, ok(d.cuDeviceGetAttribute(a, dev), n))
        print(torch.cuda.get_device_properties(0))
    """)
    print(out)
