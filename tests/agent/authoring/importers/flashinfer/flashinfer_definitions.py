"""Small definitions in FlashInfer-Bench's format, and their workloads."""

import json

NORM = """
import torch


@torch.no_grad()
def run(x, weight, eps):
    y = x.to(torch.float32)
    scale = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * scale * weight.to(torch.float32)).to(torch.bfloat16)
"""

PAGED = """
import torch


def run(q, cache, kv_indptr, kv_indices, kv_last_page_len, sm_scale):
    out = torch.zeros(q.shape, dtype=torch.bfloat16)
    lse = torch.full(q.shape[:1], -float("inf"), dtype=torch.float32)
    assert cache.shape[1] == 4
    for b in range(q.shape[0]):
        first, stop = int(kv_indptr[b]), int(kv_indptr[b + 1])
        if first >= stop:
            continue
        last = int(kv_last_page_len[b])
        keys = cache[kv_indices[first:stop].long()].to(torch.float32).reshape(-1, q.shape[1])
        keys = keys[: (stop - first - 1) * 4 + last]
        scores = keys @ q[b].to(torch.float32) * sm_scale
        lse[b] = torch.logsumexp(scores, -1)
        out[b] = (torch.softmax(scores, -1) @ keys).to(torch.bfloat16)
    return {"out": out, "lse": lse}
"""


def tensor(*shape, dtype="bfloat16", **more):
    return {"shape": list(shape), "dtype": dtype, **more}


def variable(*names):
    return {name: {"type": "var"} for name in names}


def norm(**changes):
    return {
        "name": "Norm-h32",
        "op_type": "norm",
        "description": 'RMS norm, "fused".',
        "axes": {"rows": {"type": "var"}, "hidden": {"type": "const", "value": 32}},
        "inputs": {
            "x": tensor("rows", "hidden"),
            "weight": tensor("hidden"),
            "eps": {"shape": None, "dtype": "float32"},
        },
        "outputs": {"y": tensor("rows", "hidden")},
        "reference": NORM,
        **changes,
    }


def paged(**changes):
    axes = variable("batch_size", "len_indptr", "num_pages", "num_kv_indices")
    consts = {"page_size": {"type": "const", "value": 4}, "head_dim": {"type": "const", "value": 8}}
    return {
        "name": "paged_d8_ps4",
        "op_type": "paged",
        "axes": {**axes, **consts},
        "constraints": [
            "len_indptr == batch_size + 1",
            "num_kv_indices == kv_indptr[-1].item()",
        ],
        "inputs": {
            "q": tensor("batch_size", "head_dim"),
            "cache": tensor("num_pages", "page_size", "head_dim"),
            "kv_indptr": tensor("len_indptr", dtype="int32"),
            "kv_indices": tensor("num_kv_indices", dtype="int32"),
            "kv_last_page_len": tensor("batch_size", dtype="int32"),
            "sm_scale": {
                "shape": None,
                "dtype": "float32",
                "description": "Default is 1/sqrt(head_dim).",
            },
        },
        "outputs": {
            "out": tensor("batch_size", "head_dim"),
            "lse": tensor("batch_size", dtype="float32"),
        },
        "reference": PAGED,
        **changes,
    }


def workload(axes, **inputs):
    return {
        "definition": "any",
        "solution": None,
        "evaluation": None,
        "workload": {"axes": axes, "inputs": inputs, "uuid": "0"},
    }


def write(folder, definition, *workloads):
    path = folder / f"{definition['name']}.json"
    path.write_text(json.dumps(definition))
    if workloads:
        lines = "".join(json.dumps(w) + "\n" for w in workloads)
        path.with_suffix(".jsonl").write_text(lines)
    return path
