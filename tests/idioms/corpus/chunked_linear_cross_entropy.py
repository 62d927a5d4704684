"""Fused linear cross entropy in chunks: products through out= and in-place forms, views, frees.

entry: linear_cross_entropy(x: bfloat16[512,128], w: bfloat16[1000,128], t: int64[512]) -> float32[], bfloat16[512,128], bfloat16[1000,128]
allow: aten::mm aten::addmm aten::sum
ops: alloc alloc alloc fill alloc torchop launch torchop torchop alloc torchop free launch torchop torchop alloc torchop free free
check: [op.name for op in plan.ops if type(op).__name__ == "TorchOp"][:3] == ["aten::mm.out", "aten::mm.out", "aten::addmm_"]
check: plan.ops[14].writes[0].buffer == plan.outputs[2].buffer
"""
import torch

import triton
import triton.language as tl


@triton.jit
def _loss_and_grad(z_ptr, t_ptr, loss_ptr, stride, n, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * stride
    target = tl.load(t_ptr + row)
    c = tl.arange(0, BLOCK)
    z = tl.load(z_ptr + c, mask=c < n, other=-float("inf")).to(tl.float32)
    m = tl.max(z, 0)
    s = tl.sum(tl.exp(z - m), 0)
    tl.store(loss_ptr + row, (tl.log(s) + m - tl.sum(tl.where(c == target, z, 0.0), 0)) * scale)
    tl.store(z_ptr + c, (tl.exp(z - m) / s - tl.where(c == target, 1.0, 0.0)) * scale, mask=c < n)


def linear_cross_entropy(x, w, t):
    tokens, vocab = x.shape[0], w.shape[0]
    chunk = 256
    loss = torch.empty(tokens, dtype=torch.float32, device=x.device)
    dx, dw = torch.empty_like(x), torch.zeros_like(w)
    for i in range(0, tokens, chunk):
        z = x[i:i + chunk] @ w.t()
        _loss_and_grad[(z.shape[0],)](z, t[i:i + chunk], loss[i:i + chunk], z.stride(0), vocab, 1.0 / tokens,
                                      BLOCK=1024, num_warps=8)
        torch.mm(z, w, out=dx[i:i + chunk])
        dw.addmm_(z.t(), x[i:i + chunk])
    return loss.sum(), dx, dw
