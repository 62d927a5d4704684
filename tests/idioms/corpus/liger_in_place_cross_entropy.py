"""Liger's cross entropy writes the gradient over the logits: allowed where the task says `mutates`.

entry: cross_entropy(logits: bfloat16[64,1000], target: int64[64]) -> float32[64], bfloat16[64,1000]
mutates: logits
ops: alloc fill launch
check: plan.outputs[1].buffer == 0
"""
import torch

import triton
import triton.language as tl


@triton.jit
def _cross_entropy(X, stride, T, loss_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    X += row * stride
    c = tl.arange(0, BLOCK)
    x = tl.load(X + c, mask=c < n, other=-float("inf")).to(tl.float32)
    t = tl.load(T + row)
    m = tl.max(x, 0)
    e = tl.exp(x - m)
    s = tl.sum(e, 0)
    tl.store(loss_ptr + row, tl.log(s) + m - tl.sum(tl.where(c == t, x, 0.0), 0))
    tl.store(X + c, (e / s - tl.where(c == t, 1.0, 0.0)) / tl.num_programs(0), mask=c < n)


def cross_entropy(logits, target):
    BT, V = logits.shape
    loss_1d = torch.zeros(BT, dtype=torch.float32, device=logits.device)
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    if target.stride(-1) != 1:
        target = target.contiguous()
    _cross_entropy[(BT,)](logits, logits.stride(-2), target, loss_1d, V, BLOCK=triton.next_power_of_2(V))
    return loss_1d, logits
