"""Views of all kinds cost nothing; the copy comes where one is due.

entry: heads(q: float16[2,8,16,4], k: float16[2,2,16,4]) -> float16[2,16,32], float16[2,8,16,4]
ops: alloc copy alloc copy
"""


def heads(q, k):
    b, h, s, d = q.shape
    merged = q.transpose(1, 2).reshape(b, s, h * d)
    groups = h // k.size(1)
    repeated = k[:, :, None].expand(b, k.size(1), groups, s, d).reshape(b, h, s, d)
    first, second = q.unbind(0)
    assert first.shape == second.shape and q.view(b, -1, 4).squeeze().dim() == 3
    assert q.flatten(1, 2).unsqueeze(-1).mT.movedim(0, 1).split(1, dim=0)[0].chunk(2, -1)[0].numel() > 0
    return merged, repeated
