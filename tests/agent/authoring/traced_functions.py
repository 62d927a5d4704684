"""PyTorch code as tests trace it."""

import torch
from kagent.authoring.draft.draft import DraftKind, TaskDraft
from kagent.authoring.draft.reference import reference_py
from kagent.authoring.tracing.operation import make_operation
from kagent.authoring.tracing.trace import trace
from torch import nn


class RMSNorm(nn.Module):
    """Root mean square normalisation."""

    def __init__(self, dim=64, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def every_axis(operation):
    return [(i, d) for i, e in enumerate(operation.examples) for d in range(len(e.shape))]


def traced(function, *inputs, **options):
    operation = make_operation(function, inputs, **options)
    return trace(operation, every_axis(operation))


def written(found):
    return reference_py(TaskDraft(found, DraftKind((), ()), DraftKind((), ())))
