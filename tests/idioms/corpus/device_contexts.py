"""Device and stream contexts, current stream, set_device: answered, with nothing to record.

entry: double(x: float32[1000]) -> float32[1000]
ops: alloc launch
"""
import contextlib

import torch

import triton
import triton.language as tl


@triton.jit
def _double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


def custom_device_context(device):
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def double(x):
    assert torch.cuda.is_available() and x.is_cuda and x.get_device() == torch.cuda.current_device()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with torch.cuda.device(x.device), torch.cuda.device(x.device.index), torch.cuda.device_of(x), torch.no_grad():
        stream = torch.cuda.current_stream()
        with torch.cuda.stream(stream), custom_device_context(x.device), torch.inference_mode():
            _double[(4,)](x, y, x.numel(), BLOCK=256)
    torch.cuda.synchronize()
    return y
