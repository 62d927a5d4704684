import torch
from kagent.authoring.importers.widened_source import (
    definitions,
    random_calls,
    renamed_source,
    widened_source,
)

SOURCE = """
import torch

ROWS = 4


def halved(x):
    return x.float() / 2  # é: columns count bytes


@torch.no_grad()
def run(x, packed):
    low = (packed & 0xFFFF).to(torch.int16).view(torch.bfloat16).to(torch.float32)
    out = torch.zeros(ROWS, dtype=torch.bfloat16)
    more = torch.zeros(
        ROWS,
    )
    count = torch.full((ROWS,), -1)
    least = torch.full((ROWS,), -0.1)
    out[:] = halved(x).to(torch.bfloat16) + low
    return out, more, count, least, x.to(x.dtype), torch.finfo(torch.float32).eps
"""


def test_all_of_it_computes_in_float64():
    names = {}
    exec(SOURCE + "\n" + widened_source(SOURCE, definitions(SOURCE)), names)
    x = torch.full((4,), 1 / 3, dtype=torch.float64)
    packed = torch.ones(4).bfloat16().view(torch.int16).to(torch.int32)
    out, more, count, least, same, eps = names["run_float64"](x, packed)
    assert torch.equal(out, x / 2 + 1)
    assert (more.dtype, same.dtype) == (torch.float64, torch.float64)
    assert (count.dtype, least[0].item()) == (torch.int64, -0.1)
    assert eps == torch.finfo(torch.float32).eps
    narrow = names["run"](x.float(), packed)[0]
    assert narrow.dtype == torch.bfloat16


def test_names_change_where_they_are_used():
    changed = renamed_source(SOURCE, {"halved": "half_of", "run": "run"})
    assert "def half_of(x):" in changed
    assert "half_of(x).to" in changed
    assert "halved" not in changed


def test_random_operations_are_found():
    assert random_calls("y = torch.multinomial(p, 1)\nx.normal_()\ntorch.sum(x)") == [
        "multinomial",
        "normal_",
    ]


def test_what_run_does_not_call_may_draw():
    """As the definitions of `kagent export`, whose references hold the task's `inputs`."""
    source = """
def inputs(): return torch.randn(3)
def noise(x): return x + torch.rand(1)
def helper(x): return %s
def run(x): return helper(x)
"""
    assert random_calls(source % "x") == []
    assert random_calls(source % "noise(x)") == ["rand"]
