"""The runtime that kernel libraries carry, on the device at hand."""

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import kagent_sandbox.runtime
import pytest
import torch
from kagent_sandbox.runtime import CudaKernel, LaunchError, Source, cuda_kernel, observing, store

pytestmark = pytest.mark.gpu
RUNTIME = Path(kagent_sandbox.runtime.__file__).parent

ADD = """
template <int N> __global__ void add(const float* x, float* y, float by, long long n) {
  for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    y[i] = x[i] + by + N;
}
"""
TYPES = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
extern "C" __global__ void types(double* y, bool a, int8_t b, uint8_t c, int16_t d, uint16_t e,
                                 int f, unsigned g, int64_t h, uint64_t i, __half j,
                                 __nv_bfloat16 k, float l, double m) {
  double all[] = {double(a), double(b), double(c), double(d), double(e), double(f), double(g),
                  double(h), double(i), double(float(j)), double(float(k)), double(l), m};
  for (int n = 0; n < 13; ++n) y[n] = all[n];
}
"""
CLUSTER = """
#include <cooperative_groups.h>
extern "C" __global__ void ranks(int* y) {
  auto cluster = cooperative_groups::this_cluster();
  y[blockIdx.x] = cluster.block_rank() + 100 * cluster.num_blocks();
}
"""
GRID = """
#include <cooperative_groups.h>
extern "C" __global__ void rotate(int* x, int* y) {
  auto grid = cooperative_groups::this_grid();
  x[blockIdx.x] = blockIdx.x;
  grid.sync();
  y[blockIdx.x] = x[(blockIdx.x + 1) % gridDim.x];
}
"""
PDL = """
extern "C" __global__ void step(float* x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  x[threadIdx.x] = 2 * x[threadIdx.x] + 1;
}
"""


def fresh(number):
    """A kernel that nothing has loaded yet."""
    return CudaKernel(Source("cuda", f"add<{number}>", ADD))


def test_all_types_of_numbers():
    y = torch.empty(13, dtype=torch.float64, device="cuda")
    given = (True, -8, 200, -300, 60_000, -70_000, 3 << 30, -(2**40), 2**52, 0.5, 1.25, 0.1, 0.1)
    cuda_kernel("types", TYPES).launch(1, 1, y, *given)
    expected = torch.tensor(given, dtype=torch.float64)
    expected[11] = float(torch.tensor(0.1))
    assert torch.equal(y.cpu(), expected)


@pytest.mark.parametrize("size", [2, 8, 16])
def test_clusters_up_to_sixteen_blocks(size):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("this device has no clusters")
    y = torch.empty(32, dtype=torch.int32, device="cuda")
    cuda_kernel("ranks", CLUSTER).launch(32, 32, y, cluster=size)
    assert y.tolist() == [i % size + 100 * size for i in range(32)]


def test_a_cooperative_grid_waits_for_all_its_blocks():
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    x, y = torch.zeros(2, blocks, dtype=torch.int32, device="cuda")
    cuda_kernel("rotate", GRID).launch(blocks, 1, x, y, cooperative=True)
    assert torch.equal(y.cpu(), (torch.arange(blocks, dtype=torch.int32) + 1) % blocks)
    with pytest.raises(LaunchError, match="COOPERATIVE_LAUNCH_TOO_LARGE"):
        cuda_kernel("rotate", GRID).launch(blocks * 64, 1, x, y, cooperative=True)


def test_programmatic_dependent_launches_keep_their_order():
    x = torch.zeros(64, device="cuda")
    for _ in range(10):
        cuda_kernel("step", PDL).launch(1, 64, x, pdl=torch.cuda.get_device_capability()[0] >= 9)
    assert x.tolist() == [2.0**10 - 1] * 64


def test_a_first_launch_inside_of_a_capture():
    x = torch.ones(1000, device="cuda")
    y = torch.zeros_like(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    kernel = fresh(41)
    with torch.cuda.graph(graph):
        kernel.launch(4, 256, x, y, 0.5, 1000)
        kernel.launch(4, 256, y, y, 0.5, 1000)
    y.zero_()
    graph.replay()
    assert (y == 84).all()
    x.fill_(2)
    graph.replay()
    assert (y == 85).all()


def test_the_current_stream_is_launched_on():
    x = torch.ones(1 << 20, device="cuda")
    y = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(5)
        fresh(42).launch(64, 256, x, y, 0.0, x.numel())
    stream.synchronize()
    assert (y == 47).all()


def test_threads_launch_the_same_kernel():
    kernel, wrong = fresh(43), []

    def work(number):
        x = torch.full((1000,), float(number), device="cuda")
        y = torch.empty_like(x)
        for i in range(300):
            kernel.launch(4, 256, x, y, float(i), 1000)
            if i % 50 == 0 and not bool((y == number + 43 + i).all()):
                wrong.append((number, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_first_tensor_says_which_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one device")
    kernel = fresh(44)
    for index in (1, 0, 1):
        x = torch.ones(10, device=f"cuda:{index}")
        y = torch.empty_like(x)
        kernel.launch(1, 32, x, y, 1.0, 10)
        assert (y == 46).all()
        assert torch.cuda.current_device() == 0
    with pytest.raises(TypeError, match="launched on cuda:0"):
        kernel.launch(1, 32, torch.ones(10, device="cuda:0"), y, 1.0, 10)


def test_what_the_device_refuses_is_an_error_and_no_more():
    x = torch.ones(8, device="cuda")
    kernel = fresh(45)
    with pytest.raises(LaunchError, match="CUDA_ERROR_INVALID_VALUE"):
        kernel.launch(1, 4096, x, x, 0.0, 8)
    with pytest.raises(LaunchError, match="MAX_DYNAMIC_SHARED_SIZE_BYTES"):
        kernel.launch(1, 32, x, x, 0.0, 8, shared=1 << 20)
    kernel.launch(1, 32, x, x, 0.0, 8)
    assert (x == 46).all()


USE = """
import sys
sys.modules["cuda.bindings.nvrtc"] = None
sys.path.insert(0, sys.argv[1])
import torch
from library._runtime import cuda_kernel
x = torch.ones(8, device="cuda")
cuda_kernel("add<46>", sys.argv[2]).launch(1, 32, x, x, 0.0, 8)
print(x.tolist() == [47.0] * 8)
"""


def test_a_shipped_cubin_needs_no_compiler(tmp_path):
    seen = []
    x = torch.ones(8, device="cuda")
    with observing(seen.append):
        fresh(46).launch(1, 32, x, x, 0.0, 8)
    (launch,) = seen
    library = tmp_path / "library"
    (library / "cubins").mkdir(parents=True)
    (library / "__init__.py").write_text("")
    shutil.copytree(RUNTIME, library / "_runtime")
    cubin = library / "cubins" / f"{launch.source.key(launch.target)}.cubin"
    cubin.write_bytes(store.packed_cubin(launch.binary, launch.symbol))
    command = [sys.executable, "-c", USE, str(tmp_path), ADD]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr
