"""A transposed view and contiguous(): a recorded, timed copy.

entry: copy(x: float32[64,100]) -> float32[100,64]
ops: alloc copy
check: plan.ops[1].src.strides == (1, 100) and plan.ops[1].dst.strides == (64, 1)
"""


def copy(x):
    return x.t().contiguous()
