"""Linear layer and cross entropy: reference, baselines and inputs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from kagent_sandbox.draws import draw_kinds

if TYPE_CHECKING:
    from kagent_sandbox.data.task import Case

LOGITS = 1 << 27  # float64 logits held at once: 1 GiB, and about twice that with temporaries
WEIGHT_DEVIATION = 0.02  # as models are initialised: with D = 4096 the logits deviate by 1.3
IGNORED_SHARE = 0.5
LITTLE = 0.125  # what all tokens have in a dimension that lowers columns


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Hidden states of deviation `scale`, weights of 0.02, and targets.

    "normal": targets anywhere. "ignored": half of them are `ignore_index`; "all_ignored": all of
    them. "tail": targets in the last three columns, which a lost tail of the vocabulary would miss,
    and of every other token in the first three.
    "shifted": all logits of a token lie about 120 above zero or below it, too far to exponentiate:
    e^-120 is not even a denormal float.
    "spiked": one logit of each token, often the first or the last, is about 200, the others 0.
    "mixed": logits about 10000 below the others before and after a window of the vocabulary and in
    every other block of it, never at a target; a third of the tokens is 0, with equal logits
    elsewhere; a third of the others is ignored. "likely": three tokens of four point at their
    target, whose probability is from 0.75 to 0.999999, evenly in the logarithm of what is left
    (see `_point`; of 32 bits alone: with 16, torch has nothing of what is left). "nonfinite": a
    token that counts holds a NaN, so that loss and dw are NaN, and dx in its row alone.
    """
    kinds = ("normal", "ignored", "all_ignored", "tail", "shifted", "spiked", "mixed", "likely")
    kinds += ("nonfinite",)
    if case.inputs not in kinds:
        raise ValueError(f"inputs = {case.inputs!r}: use one of {', '.join(kinds)}")
    d = case.dims
    tokens, hidden, vocab, ignore_index = (int(d[n]) for n in ("T", "D", "V", "ignore_index"))
    dtype: torch.dtype = getattr(torch, case.dtype)
    x = torch.randn(tokens, hidden, generator=generator, device=device) * case.scale
    weight = torch.randn(vocab, hidden, generator=generator, device=device)
    target = torch.randint(vocab, (tokens,), generator=generator, device=device)
    if case.inputs == "tail":
        # In both: where the target's column, by far the largest term of dx, is added up last, torch
        # errs a sixth of what it does elsewhere, and would allow no other order.
        end = min(3, vocab)
        target = target % end
        target[1::2] += vocab - end  # a single token's is in the first
    elif case.inputs == "ignored":
        drop = torch.rand(tokens, generator=generator, device=device) < IGNORED_SHARE
        target = target.masked_fill(drop, ignore_index)
    elif case.inputs == "all_ignored":
        target = torch.full_like(target, ignore_index)
    weight *= WEIGHT_DEVIATION
    if case.inputs in ("shifted", "spiked"):
        # Few bits: bfloat16 holds these large logits exactly, and only what follows can be wrong.
        x = x.round().clamp_(-1, 1)
    if case.inputs == "shifted":
        # Half of the dimensions or more move all logits of a token. Their gradient is 0, the
        # rounding of a sum: where inputs and weights are no larger there than elsewhere, it stays
        # small. Few of the others are not 0 in a token: in 16 bits 16, so that all logits are
        # multiples of 0.5 up to 128, which bfloat16 holds. Of a wider sum torch itself rounds too
        # much away to be a measure; and where one logit has all of the probability, the gradient
        # is what is left of a difference.
        moved = 1 << (3 * hidden // 4).bit_length() - 1  # 120 / (moved / 2) has four bits
        most, size = (16, 0.5) if dtype.itemsize == 2 else (128, 0.125)
        share = min(1.0, most / (hidden - moved))
        sparse = torch.rand(tokens, hidden, generator=generator, device=device) < share
        counted = sparse & (sparse.cumsum(1) - sparse[:, :moved].sum(1, keepdim=True) <= most)
        sign = torch.randint(2, (tokens, 1), generator=generator, device=device) * 2 - 1
        x *= counted
        weight = size * weight.sign()
        # One half of these dimensions moves up, the other down: of both signs in one, the sum over
        # tokens would cancel by chance in half of a row of dw.
        up = torch.arange(moved, device=device) < moved // 2
        moves = 240.0 / (moved * size) * sign
        x[:, :moved], weight[:, :moved] = torch.where((sign > 0) == up, moves, 0.0), size
    elif case.inputs == "spiked":
        weight = torch.where(weight.abs() > 1.5 * WEIGHT_DEVIATION, weight.sign(), 0.0)
        # Dimension i belongs to one column of the vocabulary, and is large in that column's weight.
        dims = min(16, hidden)
        columns = torch.randint(vocab, (dims,), generator=generator, device=device)
        columns[0], columns[1] = 0, vocab - 1
        dim = torch.randint(dims, (tokens, 1), generator=generator, device=device)
        dim[::4], dim[1::4] = 0, 1
        weight[columns, torch.arange(dims, device=device)] = 10.0
        x.scatter_(1, dim, 20.0)
    elif case.inputs == "mixed":
        column = torch.arange(vocab, device=device)
        cut = torch.randint(vocab, (4,), generator=generator, device=device).sort().values
        blocks = column // (16 << int(cut[0] % 6)) % 2 == 0
        low = (column < cut[0]) | (column > cut[3]) | (blocks & (column > cut[1]))
        low[cut[1]] = False
        # All of it in the weight: a large x would enlarge the rounding of dw's first column alone,
        # where the sum of probabilities may be near the number of targets by chance.
        little = case.scale / 8
        weight[:, 0] = torch.where(low, -10000.0 / little, 0.0)
        likely = (~low).nonzero()[:, 0]
        target = likely[target % len(likely)]
        kind = torch.rand(tokens, 1, generator=generator, device=device)
        x = x.masked_fill(kind < 1 / 3, 0.0)
        x[:, 0] = little
        if tokens > 1:
            target = target.masked_fill(kind[:, 0] > 7 / 9, ignore_index)
    elif case.inputs == "likely":
        _point(x, weight, target, ignore_index, generator)
    elif case.inputs == "nonfinite":
        token = torch.randint(tokens, (), generator=generator, device=device)
        x[token, -1] = torch.nan
    if case.scale > 1 and case.inputs not in ("shifted", "spiked", "likely"):
        # Where the target is likely, p - 1 is what rounding leaves of a difference.
        logits = x @ weight.T
        at = target.where(target != ignore_index, 0)[:, None]
        likely = logits.log_softmax(1).gather(1, at)[:, 0].exp() > 0.2
        least = logits.where(logits > -1e3, torch.inf).argmin(1)
        target = torch.where(likely & (target != ignore_index), least, target)
    return {"x": x.to(dtype), "weight": weight.to(dtype), "target": target}


def _point(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    generator: torch.Generator,
) -> None:
    """Make the tokens of "likely", in place: three of four have one dimension, their target's.

    In that dimension the target's weight is 4 and all others' are 0, and in all dimensions in which
    other weights are not 0, the token is: so logits are exact, that of the target is one product,
    and those of the other columns are 0. Of these only a few rivals count, from 3 to all; the
    others' logits are -10000, by the first dimension. As in cross_entropy, a rival has J 2^-23 of
    what the target has, with a whole J, and the number of tokens that count is a power of two: so
    sums and p are exact in float32 in any order, and p - 1 is known to as many digits as torch has.

    Not reached: as likely a target among thousands of rivals, with less than 2^-23 for each, or
    with logits that are sums of many products. There the order of additions decides.
    """
    (tokens, hidden), vocab, device = x.shape, len(weight), x.device
    chance = torch.rand((3, tokens, 1), generator=generator, device=device).double()
    # Rivals first, in the whole range: what has a weight in a dimension of its own is one.
    many = 4 * (vocab / 4) ** float(torch.rand((), generator=generator, device=device))
    order = torch.randperm(vocab, generator=generator, device=device)
    rivals, others = order[: int(many)], order[int(many) :]
    weight[:, 0] = 0.0
    weight[others, 0] = -10000.0 / LITTLE
    usable = rivals[rivals != ignore_index]
    dims = min(8, hidden - 1, len(usable))
    weight[:, 1 : dims + 1] = 0.0
    weight[usable[:dims], torch.arange(1, dims + 1, device=device)] = 4.0
    least = max(1e-6, (len(rivals) - 1) / 2**23)
    left = least * (1 / 3 / least) ** chance[0]
    steps = (left * 2**23 / (len(rivals) - 1)).round().clamp_min(1.0)
    pointed = draw_kinds(tokens, 4, generator, device) > 0
    dim = 1 + (chance[1] * dims).long().clamp_max(dims - 1)
    x[:, 1 : dims + 1] = 0.0
    x.masked_fill_(pointed, 0.0)
    x.scatter_(1, dim, torch.where(pointed, (2**23 / steps).log() / 4, 0.0).float())
    x[:, 0] = LITTLE
    some = usable[(chance[2] * len(usable)).long().clamp_max(len(usable) - 1)]
    target.copy_(torch.where(pointed, usable[dim - 1], some)[:, 0])
    ignored = torch.randperm(tokens, generator=generator, device=device)
    ignored = ignored[1 << max(1, tokens - 1).bit_length() - 1 :]
    target[ignored] = ignore_index
    # One large number, of a token that does not count. A check also runs with the largest one in
    # the place of any other: a little more for all logits of a token would leave none exact.
    x[ignored[:1], -1] = 10000.0


def reference(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The definition in float64, over chunks of tokens: loss [], dx [T, D], dw [V, D]."""
    x64, w64 = x.double(), weight.double()
    kept = target != ignore_index
    count = kept.sum()
    column = target.where(kept, 0)[:, None]
    share = kept.double()[:, None] / count.clamp_min(1)
    loss = torch.zeros((), dtype=torch.float64, device=x.device)
    dx, dw = torch.empty_like(x64), torch.zeros_like(w64)
    rows = max(1, LOGITS // weight.shape[0])
    for start in range(0, x.shape[0], rows):
        chunk = slice(start, start + rows)
        z = x64[chunk] @ w64.T
        lse = z.logsumexp(1, keepdim=True)
        loss += ((lse - z.gather(1, column[chunk])) * kept[chunk, None]).sum()
        dz = z.sub_(lse).exp_()
        dz.scatter_add_(1, column[chunk], torch.full_like(lse, -1.0))
        dz *= share[chunk]
        torch.mm(dz, w64, out=dx[chunk])
        dw.addmm_(dz.T, x64[chunk])
    return loss / count, dx, dw


def reference_rows(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `reference` has: the loss, [1, 1], some rows of dx, [R, D], and of dw, [R', D].

    All of these need every token's log-sum-exp. On a GPU the logits behind it are products of
    16-bit numbers, which are exact in float32, added up in float32 by tensor cores; the rest is in
    float64. `rows[1]` and `rows[2]` are tokens and columns, int64.
    """
    kept = target != ignore_index
    count = kept.sum()
    column = target.where(kept, 0)
    share = kept.double() / count.clamp_min(1)
    lse = torch.cat([_lse(part, weight) for part in x.split(max(1, LOGITS // weight.shape[0]))])
    picked = (x.double() * weight[column].double()).sum(1)
    loss = ((lse - picked) * kept).sum() / count
    tokens, columns = rows[1], rows[2]
    dx = torch.zeros(len(tokens), x.shape[1], dtype=torch.float64, device=x.device)
    for part in weight.split(max(1, LOGITS // (8 * x.shape[1]))):
        wide = part.double()
        dx += torch.exp(x[tokens].double() @ wide.T - lse[tokens, None]) @ wide
    dx -= weight[column[tokens]].double()
    p = torch.exp(x.double() @ weight[columns].double().T - lse[:, None])
    p -= (column[:, None] == columns[None, :]).double()
    dw = (p * share[:, None]).T @ x.double()
    return loss.reshape(1, 1), dx * share[tokens, None], dw


def _lse(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """log-sum-exp of each token's logits, [T] float64."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.T, out_dtype=torch.float32).logsumexp(1).double()
    return (x.double() @ weight.double().T).logsumexp(1)


def eager(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Torch's own way: all logits, autograd. The mean is taken in float32, which costs nothing."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        weight = weight.detach().requires_grad_()
        losses = F.cross_entropy(
            F.linear(x, weight), target, ignore_index=ignore_index, reduction="none"
        )
        loss = losses.float().sum() / (target != ignore_index).sum()
        dx, dw = torch.autograd.grad(loss, (x, weight))
    return loss.detach(), dx, dw


def experts() -> Mapping[str, Callable[..., object]]:
    """Liger's and Apple's fused kernels, where they are installed and there is a GPU."""
    found: dict[str, Callable[..., object]] = {}
    if torch.cuda.is_available():
        if importlib.util.find_spec("liger_kernel"):
            found["Liger"] = _liger
        if importlib.util.find_spec("cut_cross_entropy"):
            found["cut-cross-entropy"] = _cut_cross_entropy
    return found


def _liger(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss_of = LigerFusedLinearCrossEntropyLoss(ignore_index=ignore_index)
    with torch.enable_grad():
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = loss_of(weight, x, target)
        dx, dw = torch.autograd.grad(loss, (x, weight))
    return loss.detach().float(), dx, dw


def _cut_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from cut_cross_entropy import linear_cross_entropy

    with torch.enable_grad():
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = linear_cross_entropy(x, weight, target, ignore_index=ignore_index)
        dx, dw = torch.autograd.grad(loss, (x, weight))
    return loss.detach().float(), dx, dw
