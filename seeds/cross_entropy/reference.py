"""Cross entropy of logits with its gradient: inputs, float64 reference, what a user would call."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from kagent_sandbox.draws import draw_huge, draw_kinds
from torch.nn import functional as F

if TYPE_CHECKING:
    from kagent_sandbox.data.task import Case

CHUNK_ELEMENTS = 1 << 26  # float64 temporaries of the reference stay near 2 GiB
IGNORE_INDEX = -100  # the value of `ignore_index` in task.toml
FEW = 256  # normal logits of as many classes leave none likely


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw logits: [M, N] in the case's dtype, times the case's scale; and target: [M] int64.

    Distributions: `normal` (uniform targets); `padded` (the last third of the rows is ignored, as
    padding is); `scattered` (about half of the rows, anywhere, is ignored); `ignored` (all rows: no
    loss, no gradient); `trained` (the target's logit is raised, as in a model that has learnt);
    `likely` (in three rows of four the target's probability is from 0.75 to 0.999999, of 16 bits to
    0.9997, evenly in the logarithm of what is left: see `_likely`);
    `constant` (each row one value); `spiked` (in two rows of three, two logits are raised by 100
    and one by 200: too much to exponentiate unshifted, or relative to a maximum that misses the
    one, which is often the first or the last). `mixed` gives each row a kind of its own, in equal
    numbers: normal, trained, learnt (the target has from 0.2 to 0.75), spiked, constant, ignored,
    rising or falling; -inf in a third of the columns, before and after a window, or in every other
    block, never at the target; the same with -1e4, -1e9 or the least finite value for -inf; every
    value such a one; few values, many of them the maximum; subnormal numbers; 200 more or less than
    normal; numbers up to the largest, none above half of what the target has. `nonfinite` also has
    rows that count with +inf or NaN somewhere, and rows of -inf: such a row's gradient and the loss
    are NaN, other rows' gradients are not.
    """
    if case.inputs in ("mixed", "nonfinite"):
        return _mixed(case, generator, device)
    rows, columns = int(case.dims["M"]), int(case.dims["N"])
    if case.inputs == "constant":
        logits = torch.randn((rows, 1), generator=generator, device=device).expand(rows, columns)
        logits = logits.clone()
    elif case.inputs in ("normal", "padded", "scattered", "ignored"):  # in one pass
        dtype = getattr(torch, case.dtype)
        logits = torch.empty((rows, columns), dtype=dtype, device=device)
        logits.normal_(0.0, case.scale, generator=generator)
    else:
        logits = torch.randn((rows, columns), generator=generator, device=device)
    target = torch.randint(columns, (rows,), generator=generator, device=device)
    if case.inputs == "likely":
        return _likely(logits.mul_(case.scale), target, getattr(torch, case.dtype), generator)
    if case.inputs == "trained":
        logits.scatter_(1, target[:, None], 8.0)
    elif case.inputs == "padded":
        target[rows - rows // 3 :] = IGNORE_INDEX
    elif case.inputs == "scattered":
        ignored = torch.rand((rows,), generator=generator, device=device) < 1 / 2
        ignored[0] = False  # `ignored` is the case for none at all
        target[ignored] = IGNORE_INDEX
    elif case.inputs == "ignored":
        target.fill_(IGNORE_INDEX)
    elif case.inputs == "spiked":
        at = torch.randint(columns, (rows, 3), generator=generator, device=device)
        at[::4, 0] = 0
        at[1::4, 0] = columns - 1
        raised = torch.tensor([200.0, 100.0, 100.0], device=device).repeat(rows, 1)
        raised[2::3] = 0.0  # rows that a neighbour's maximum would sink
        logits += torch.zeros_like(logits).scatter_add_(
            1, at, raised
        )  # whole numbers: any order of additions gives the same
    elif case.inputs not in ("normal", "constant"):
        raise ValueError(f"cross_entropy knows no distribution {case.inputs!r}")
    if case.inputs in ("constant", "trained", "spiked"):
        logits = logits.mul_(case.scale).to(getattr(torch, case.dtype))
    if columns < FEW or case.scale > 1 or case.inputs == "spiked":
        target = _not_likely(logits, target)
    return {"logits": logits, "target": target}


def _not_likely(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Targets; of rows where the target is likely, though not certain, the least likely class.

    There p - 1 is what rounding leaves of a difference, and each order of additions has another
    p. torch's would allow for them in every row, or not, by luck. Likely targets are in rows that
    `_learnt` makes, where all orders have the same sum.
    """
    p = torch.softmax(logits.double(), -1).gather(1, target[:, None].clamp_min(0))[:, 0]
    likely = (p > 0.2) & (p < 1 - 1e-9) & (target != IGNORE_INDEX)
    least = logits.where(logits > -1e3, torch.inf).argmin(1)
    return torch.where(likely, least, target)


def _likely(
    logits: torch.Tensor, target: torch.Tensor, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Rows with likely targets in the place of three normal ones of four.

    Where p is nearly 1, p - 1 is what rounding leaves of a difference. So all that comes before it
    is exact in torch as in others: the sum (see `_learnt`), p, and p / count, as the number of rows
    that count is a power of two; the others are ignored.
    """
    rows, columns = logits.shape
    kind = draw_kinds(rows, 4, generator, logits.device)
    # What a GPU's base-2 exponential errs by is less than 16 bits show, as long as this is left.
    least = 1e-6 if dtype == torch.float32 else 3e-4
    others = _learnt(target, columns, least, 1 / 3, generator).to(dtype)
    logits = torch.where(kind > 0, others, logits.to(dtype))
    target = torch.where(kind[:, 0] > 0, target, _not_likely(logits, target))
    order = torch.randperm(rows, generator=generator, device=logits.device)
    target[order[1 << rows.bit_length() - 1 :]] = IGNORE_INDEX
    return {"logits": logits, "target": target}


def _learnt(
    target: torch.Tensor, columns: int, least: float, most: float, generator: torch.Generator
) -> torch.Tensor:
    """Logits of rows in which the target has a large share, [M, N] float32.

    What all other classes have together is from `least` to `most` of what the target has, evenly
    in the logarithm. All of it belongs to one rival or more, in half of the rows to all other
    classes, as far as `least` allows; their logits are equal, and the rest lies 100 below.

    A rival has J 2^-23 of what the target has, with a whole J. So the sum of a row's exponentials
    is exact in float32 in any order, but for what the rivals' logit is rounded by: smaller ones are
    lost where they are added to the target's 1, and how often that happens is a matter of order.

    Args:
        target: [M], classes or IGNORE_INDEX.
        columns: N, 2 or more.
        least: From 2^-23.
        most: Up to 4, where rounding does no harm.
        generator: The source of chance.
    """
    device, shape, at = target.device, (len(target), columns), target[:, None].clamp_min(0)
    chance = torch.rand((4, len(target), 1), generator=generator, device=device).double()
    left = least * (most / least) ** chance[0]
    share = torch.where(chance[1] < 0.5, 1.0, columns ** (chance[1] * 2 - 2))
    share = torch.minimum(share, left * 2**23 / columns)  # J is 1 or more
    rivals = torch.rand(shape, generator=generator, device=device) < share
    one = (at + 1 + (chance[2] * (columns - 1)).long().clamp_max(columns - 2)) % columns
    rivals.scatter_(1, one, value=True).scatter_(1, at, value=False)
    steps = (left * 2**23 / rivals.sum(1, keepdim=True)).round().clamp_min(1.0)
    # Where little is left, a large log-sum-exp that is subtracted would be rounded by too much.
    far = (left * 1024).clamp_max(64.0)
    raised = ((2 * chance[3] - 1) * far * 16).round() / 16
    logits = torch.where(rivals, raised - (2**23 / steps).log(), raised - 100).float()
    return logits.scatter_(1, at, raised.float())


KINDS = (
    *("normal", "trained", "learnt", "spiked", "constant", "ignored", "rising", "falling"),
    *("masked", "window", "blocks", "finite window", "finite blocks", "sunk", "ties", "subnormal"),
    *("high", "low", "huge"),
)
NONFINITE = ("inf", "nan", "all -inf")


def _mixed(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Rows of all kinds, in random order."""
    rows, columns = int(case.dims["M"]), int(case.dims["N"])
    dtype = getattr(torch, case.dtype)
    limits = torch.finfo(dtype)
    first = int(torch.randint(len(KINDS), (), generator=generator, device=device))
    kinds = KINDS[first:] + KINDS[:first]
    if case.inputs == "nonfinite":  # one of them at least, in however few rows
        odd = first % len(NONFINITE)
        kinds = (NONFINITE[odd], *kinds, *NONFINITE[:odd], *NONFINITE[odd + 1 :])
    order = torch.randperm(rows, generator=generator, device=device)
    logits = torch.randn((rows, columns), generator=generator, device=device).mul_(case.scale)
    target = torch.randint(columns, (rows,), generator=generator, device=device)
    column = torch.arange(columns, device=device)

    def whole(most: int, *size: int) -> torch.Tensor:
        return torch.randint(most, size, generator=generator, device=device)

    for i, kind in enumerate(kinds[:rows]):
        at = order[i :: len(kinds)]
        n = len(at)
        some = logits[at]
        hidden = torch.zeros_like(some, dtype=torch.bool)
        if kind == "trained":
            some.scatter_(1, target[at, None], 4.0)
        elif kind == "spiked":
            raised = torch.tensor([200.0, 100.0, 100.0], device=device).repeat(n, 1)
            at_random = whole(columns, n, 3)  # whole numbers: any order of additions gives the same
            some += torch.zeros_like(some).scatter_add_(1, at_random, raised)
        elif kind == "constant":
            some = some[:, :1].expand(-1, columns)
        elif kind == "ignored" and rows > 1:  # `ignored` is the case for none at all
            target[at] = IGNORE_INDEX
        elif kind in ("rising", "falling"):
            ramp = torch.linspace(-20, 20, columns, device=device)
            some = some / max(1.0, case.scale) + (ramp if kind == "rising" else -ramp)
        elif kind == "masked":
            hidden = torch.rand(some.shape, generator=generator, device=device) < 1 / 3
        elif kind.endswith("window"):
            ends = whole(columns, n, 2).sort(1).values
            hidden = (column < ends[:, :1]) | (column > ends[:, 1:])
        elif kind.endswith("blocks"):
            hidden = (column // (16 << whole(9, n, 1)) + whole(2, n, 1)) % 2 == 0
        elif kind in ("high", "low"):
            some += 200.0 if kind == "high" else -200.0
        elif kind == "ties":
            some = whole(3, n, columns).float()
        elif kind == "subnormal":
            some = whole(1000, n, columns) * limits.smallest_normal / 1024
        elif kind == "huge":  # of another target the loss would be as huge
            some = draw_huge((n, columns), limits.max / 4, dtype, generator, device).float()
            some.scatter_(1, target[at, None].clamp_min(0), 2 * some.abs().amax(1, keepdim=True))
        elif kind == "all -inf":
            some.fill_(-torch.inf)
        elif kind in NONFINITE:
            some.scatter_(1, whole(columns, n, 1), torch.nan if kind == "nan" else torch.inf)
        elif kind == "learnt":
            logits[at] = _learnt(target[at], columns, 1 / 3, 4.0, generator)
            continue
        low: torch.Tensor | float = -torch.inf
        if kind == "sunk" or kind.startswith("finite"):
            lows = torch.tensor([-1e4, -1e9, limits.min], device=device).clamp_min_(limits.min)
            low = lows[whole(3, n, 1)]
            some = low.expand(-1, columns) if kind == "sunk" else some
        hidden.scatter_(1, target[at, None].clamp_min(0), value=False)
        some = logits[at] = some.where(~hidden, low)
        target[at] = _not_likely(some, target[at])
    return {"logits": logits.to(dtype), "target": target}


def reference(
    *, logits: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss over the rows that count, float64 scalar; and its gradient, [M, N].

    grad = (softmax(logits) - onehot(target)) / count, and 0 in ignored rows. Computed in float64, a
    chunk of rows at a time; the gradient of 16-bit logits is kept in float32, which is 2^13 times
    finer than they are and leaves room for 8192 x 131072.
    """
    valid = target != ignore_index
    count = valid.sum().double()
    kept = torch.float64 if logits.dtype == torch.float32 else torch.float32
    grad = torch.empty(logits.shape, dtype=kept, device=logits.device)
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    rows = max(1, CHUNK_ELEMENTS // logits.shape[1])
    for x, g, t, v in zip(
        logits.split(rows), grad.split(rows), target.split(rows), valid.split(rows), strict=True
    ):
        log_p = torch.log_softmax(x.double(), -1)
        index = t.where(v, 0)[:, None]
        total -= log_p.gather(1, index)[:, 0].where(v, 0.0).sum()
        p = log_p.exp_()
        p.scatter_add_(1, index, -torch.ones_like(index, dtype=torch.float64))
        g.copy_((p / count).where(v[:, None], 0.0))
    return total / count, grad


def reference_rows(
    rows: tuple[torch.Tensor, torch.Tensor],
    *,
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `reference` has: the loss, [1, 1], and some rows of its gradient, [R, N], in float64.

    The loss of 16-bit logits comes from exponentials in float32, added up in float64: it is allowed
    to err by thousands of times as much as these do. `rows[1]` are the gradient's, [R] int64.
    """
    valid = target != ignore_index
    count = valid.sum().double()
    work = torch.float64 if logits.dtype == torch.float32 else torch.float32
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    step = max(1, CHUNK_ELEMENTS // logits.shape[1])
    column = target.where(valid, 0)[:, None]
    for x, c, v in zip(logits.split(step), column.split(step), valid.split(step), strict=True):
        wide = x.to(work)
        largest = wide.amax(1, keepdim=True)
        picked = wide.gather(1, c).double()
        lse = wide.sub_(largest).exp_().sum(1, keepdim=True, dtype=torch.float64).log()
        total += (lse + (largest.double() - picked))[v].sum()
    at = rows[1]
    p = torch.softmax(logits[at].double(), 1)
    p.scatter_add_(1, column[at], torch.full_like(p[:, :1], -1.0))
    return (total / count).reshape(1, 1), (p / count).where(valid[at, None], 0.0)


def eager(
    *, logits: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch's own loss, as a float32 scalar, and its gradient by autograd, [M, N]."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        loss = F.cross_entropy(leaf, target, ignore_index=ignore_index)
        (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach().float(), grad


def experts() -> Mapping[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]]:
    """Liger and Quack, where they can be imported.

    Liger overwrites the logits with the gradient, so that it is given a copy, which is timed.
    """
    found: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {}
    try:
        liger = importlib.import_module("liger_kernel.ops.cross_entropy")
    except ImportError:
        pass
    else:

        def by_liger(
            *, logits: torch.Tensor, target: torch.Tensor, ignore_index: int
        ) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.enable_grad():
                leaf = logits.detach().clone().requires_grad_()
                loss = liger.LigerCrossEntropyFunction.apply(
                    leaf * 1, target, None, ignore_index, 0.0, 0.0, "mean"
                )[0]
                (grad,) = torch.autograd.grad(loss, leaf)
            return loss.detach().float(), grad

        found["liger"] = by_liger
    try:
        quack = importlib.import_module("quack.cross_entropy")
    except ImportError:
        pass
    else:

        def by_quack(
            *, logits: torch.Tensor, target: torch.Tensor, ignore_index: int
        ) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.enable_grad():
                leaf = logits.detach().requires_grad_()
                loss = quack.cross_entropy(
                    leaf, target, ignore_index=ignore_index, reduction="mean"
                )
                (grad,) = torch.autograd.grad(loss, leaf)
            return loss.detach().float(), grad

        found["quack"] = by_quack
    return found
