"""A library's package for tests: real modules and operators, tables and kernels by hand."""

import importlib.util
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
from kagent.export.library import _devices

ROOT = Path(__file__).parents[3]
MODULES = ROOT / "agent/kagent/export/library"
SEEDS = ROOT / "seeds"
CPU = torch.device("cpu")
DTYPES = ("float32", "bfloat16", "float16")

SOFTMAX = """
import torch
SHIFT = 0.0
CALLS = []
def softmax(x):
    CALLS.append((tuple(x.shape), x.stride()))
    e = torch.exp(x - x.amax(-1, keepdim=True) + SHIFT)
    return e / e.sum(-1, keepdim=True)
"""
GELU = """
import torch
CALLS = []
def gelu(x):
    CALLS.append(tuple(x.shape))
    wide = x.float()
    u = (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
    return (0.5 * wide * (1 + torch.tanh(u))).to(x.dtype)
"""
ATTENTION = """
import math
import torch
CALLS = []
def attention(q, k, v, causal):
    CALLS.append(tuple(q.shape))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    s = q @ k.mT / math.sqrt(q.shape[3])
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return (torch.softmax(s, -1) @ v).contiguous()
"""
CROSS_ENTROPY = """
import torch
CALLS = []
def cross_entropy(logits, target, ignore_index):
    CALLS.append(tuple(logits.shape))
    assert ignore_index == -100
    kept = target != ignore_index
    log_p = torch.log_softmax(logits.float(), -1)
    column = target.where(kept, 0)[:, None]
    loss = -log_p.gather(1, column)[:, 0].where(kept, 0).sum() / kept.sum()
    p = log_p.exp().scatter_add(1, column, torch.full(column.shape, -1.0))
    grad = p * (kept / kept.sum().clamp_min(1))[:, None]
    return loss, grad.to(logits.dtype)
"""
LINEAR_CROSS_ENTROPY = """
import torch
CALLS = []
def linear_cross_entropy(x, weight, target, ignore_index):
    CALLS.append(tuple(x.shape))
    assert ignore_index == -100
    kept = target != ignore_index
    log_p = torch.log_softmax((x @ weight.T).float(), -1)
    column = target.where(kept, 0)[:, None]
    loss = -log_p.gather(1, column)[:, 0].where(kept, 0).sum() / kept.sum()
    p = log_p.exp().scatter_add(1, column, torch.full(column.shape, -1.0))
    z = (p * (kept / kept.sum().clamp_min(1))[:, None]).to(x.dtype)
    return loss, z @ weight, z.T @ x
"""
ATTENTION_TRAIN = """
import math
import torch
CALLS = []
def attention_train(q, k, v, causal):
    CALLS.append(tuple(q.shape))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    s = q @ k.mT / math.sqrt(q.shape[3])
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return (torch.softmax(s, -1) @ v).contiguous(), torch.logsumexp(s.float(), -1)
"""
GELU_BACKWARD = """
import torch
CALLS = []
def gelu_backward(grad, x):
    CALLS.append(tuple(x.shape))
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
"""
SOFTMAX_BACKWARD = """
import torch
CALLS = []
def softmax_backward(grad, y):
    CALLS.append(tuple(y.shape))
    return y * (grad - (grad * y).sum(-1, keepdim=True))
"""
ATTENTION_BACKWARD = """
import math
import torch
CALLS = []
def attention_backward(grad, q, k, v, o, lse, causal):
    CALLS.append(tuple(q.shape))
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (t.repeat_interleave(group, 1) for t in (k, v))
    scale = 1 / math.sqrt(q.shape[3])
    s = q @ wide_k.mT * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    p = torch.exp(s - lse[..., None])
    dp = grad @ wide_v.mT
    ds = p * (dp - (grad * o).sum(-1, keepdim=True)) * scale
    dk = (ds.mT @ q).unflatten(1, (-1, group)).sum(2)
    dv = (p.mT @ grad).unflatten(1, (-1, group)).sum(2)
    return ds @ wide_k, dk, dv
"""
KERNELS = {
    "softmax": SOFTMAX,
    "gelu": GELU,
    "attention": ATTENTION,
    "cross_entropy": CROSS_ENTROPY,
    "linear_cross_entropy": LINEAR_CROSS_ENTROPY,
}
BACKWARD = {
    "softmax_backward": SOFTMAX_BACKWARD,
    "gelu_backward": GELU_BACKWARD,
    "attention_train": ATTENTION_TRAIN,
    "attention_backward": ATTENTION_BACKWARD,
}
FLAGS = {
    "attention": {"causal": [False, True]},
    "attention_train": {"causal": [False, True]},
    "attention_backward": {"causal": [False, True]},
    "linear_cross_entropy": {"ignore_index": [-100]},
}
DIMS = {
    "attention": ("B", "H", "Hkv", "S", "D"),
    "attention_train": ("B", "H", "Hkv", "S", "D"),
    "attention_backward": ("B", "H", "Hkv", "S", "D"),
    "linear_cross_entropy": ("T", "D", "V"),
}
MOST = 1 << 16


@dataclass
class Package:
    """The folder of a package, and its parts by task."""

    folder: Path
    device: torch.device = CPU  # that its tables are about
    tables: dict[str, dict] = field(default_factory=dict)

    def add_kernel(self, task: str, source: str, **changes: object) -> str:
        """A kernel that is correct everywhere, fastest everywhere; `changes` to its entry."""
        name = f"{task}_{len(self.tables.get(task, {}).get('kernels', {})):08x}"
        dims = DIMS.get(task, ("M", "N"))
        flags = FLAGS.get(task, {})
        table = self.tables.setdefault(task, _empty(task, (*dims, *flags), self.device))
        region = {"low": dict.fromkeys(dims, 1), "high": dict.fromkeys(dims, MOST)}
        table["kernels"][name] = {
            "language": "cpp",
            "capabilities": [_devices.capability(self.device)],
            "pitched": False,
            "configs": [{}],
            "regions": [{"dtype": t, **region, "flags": flags, "volume": MOST**3} for t in DTYPES],
            **changes,
        }
        for values in _products(flags):
            for dtype in DTYPES:
                self.add_point(task, dtype, {**dict.fromkeys(dims, 1), **values}, name)
        (self.folder / "kernels" / f"{name}.py").write_text(source)
        return name

    def add_point(self, task: str, dtype: str, dims: dict, best: str, config: int = 0) -> None:
        """A measured shape on this machine."""
        point = {"dtype": dtype, "dims": dims, "best": best, "config": {best: config}, "us": {}}
        self.tables[task]["devices"][_devices.device_name(self.device)]["points"].append(point)

    def add_operator(self, task: str, text: str | None = None) -> None:
        """The operator of a built-in task, or a text."""
        text = text or (SEEDS / task / "operator.py").read_text()
        (self.folder / "operators" / f"{task}.py").write_text(text)

    def imported(self, name: str) -> ModuleType:
        """The package under a name, with its operators; the tables as they are now."""
        for task, table in self.tables.items():
            (self.folder / "portfolio" / f"{task}.json").write_text(json.dumps(table))
        spec = importlib.util.spec_from_file_location(
            name, self.folder / "__init__.py", submodule_search_locations=[str(self.folder)]
        )
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def _empty(task: str, dims: tuple[str, ...], device: torch.device) -> dict:
    name, capability = _devices.device_name(device), _devices.capability(device)
    table = {"kind": _devices.kind(device), "capability": capability, "points": []}
    return {
        "format": 1,
        "task": task,
        "entry": task,
        "dims": list(dims),
        "kernels": {},
        "devices": {name: table},
    }


def _products(flags: dict) -> list[dict]:
    found: list[dict] = [{}]
    for name, values in flags.items():
        found = [{**f, name: v} for f in found for v in values]
    return found


def assemble(
    folder: Path, namespace: str, operators: tuple[str, ...] = (), device: torch.device = CPU
) -> Package:
    """A package without kernels: the library's modules and some tasks' operators."""
    for name in ("operators", "kernels", "portfolio"):
        (folder / name).mkdir(parents=True)
    for path in MODULES.glob("*.py"):
        if path.name != "__init__.py":
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "_about.py").write_text(f'NAMESPACE = "{namespace}"\n')
    (folder / "operators" / "__init__.py").touch()
    imports = "".join(f"from .operators import {o}\n" for o in operators)
    (folder / "__init__.py").write_text(imports)
    package = Package(folder, device)
    for name in operators:
        package.add_operator(name)
    return package


def calls(module: ModuleType, task: str) -> list:
    """What a task's first kernel was called with, over all of its configurations."""
    wanted = f"{module.__name__}.kernels.{task}_00000000_"
    loaded = [m for n, m in sys.modules.items() if n.startswith(wanted)]
    return [c for m in loaded for c in m.CALLS]
