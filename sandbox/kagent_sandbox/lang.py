"""CUDA and C++ kernels for candidates: compiled from source, launched on torch tensors.

    _softmax = cuda_kernel("softmax_rows", SOURCE)

    def softmax(x):
        y = torch.empty_like(x)
        _softmax.launch(x.shape[0], 256, x, y, x.shape[1], shared=4 * x.shape[1])
        return y

While kagent builds a candidate, launches are recorded and nothing runs. Imported anywhere else, the
same file compiles for the machine at hand and runs, so that it can be tried, tested and shipped: a
kernel library that kagent exports carries `kagent_sandbox.runtime`, which does that, and no other
part of kagent.

A kernel is compiled when it is first launched. Kernels with one name, source, options and defines
are one kernel: make them inside of the host function where defines depend on shapes or on tunables.
"""

from __future__ import annotations

from kagent_sandbox.runtime.cpp_kernels import CppKernel, cpp_kernel
from kagent_sandbox.runtime.cuda_kernels import CudaKernel, cuda_kernel
from kagent_sandbox.runtime.structs import StructArgument, struct
from kagent_sandbox.runtime.tensor_maps import TensorMapArgument, tensor_map

__all__ = [
    "CppKernel",
    "CudaKernel",
    "StructArgument",
    "TensorMapArgument",
    "cpp_kernel",
    "cuda_kernel",
    "struct",
    "tensor_map",
]
