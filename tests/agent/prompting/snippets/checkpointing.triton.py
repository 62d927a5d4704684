"""entry: swiglu_backward(grad: float32[9,1000], gate: float32[9,1000], up: float32[9,1000]) -> float32[3,9,1000]
expect: torch.stack([grad * up * (torch.sigmoid(gate) * (1 + gate * (1 - torch.sigmoid(gate)))), grad * torch.nn.functional.silu(gate), torch.nn.functional.silu(gate) * up])
"""

import torch
import triton
import triton.language as tl

# SNIPPET


def swiglu_backward(grad, gate, up):
    found = torch.empty(3, *grad.shape, dtype=grad.dtype, device=grad.device)
    grid = (triton.cdiv(grad.numel(), 256),)
    backward_of_swiglu[grid](grad, gate, up, *found.unbind(), grad.numel(), BLOCK=256)
    return found
