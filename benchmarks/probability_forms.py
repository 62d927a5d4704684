"""What it costs to write a softmax as the exponential of a difference of logarithms.

    python benchmarks/probability_forms.py [--draws 20]

Three forms of the same probability, in float32 with the sum in float64, are held against the
contract of the softmax task on the float32 check cases of both kinds of device, hidden ones
included, each draw with other inputs. Torch is the one of this machine's CPU. Printed is, for each
form, in how many draws a case rejects it, and the largest share of a tolerance where it passes.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable

import torch
from kagent.tasks import find_task
from kagent_sandbox.data.verdict import Stage
from kagent_sandbox.device.cpu.traits import TRAITS
from kagent_sandbox.judge.arena.session import CandidateRejected
from kagent_sandbox.judge.check.cases import check_cases
from kagent_sandbox.judge.check.checker import Checker
from kagent_sandbox.judge.check.inputs import InputSampler

MOST_ELEMENTS = 1 << 20
MOST_LINES = 6


def quotient(x: torch.Tensor) -> torch.Tensor:
    """exp(x - m) / s."""
    exponentials = torch.exp(x - x.amax(1, keepdim=True))
    return exponentials / exponentials.double().sum(1, keepdim=True).float()


def two_differences(x: torch.Tensor) -> torch.Tensor:
    """exp(x - m - log s)."""
    least = x - x.amax(1, keepdim=True)
    return torch.exp(least - torch.exp(least).double().sum(1, keepdim=True).log().float())


def one_difference(x: torch.Tensor) -> torch.Tensor:
    """exp(x - lse), lse = m + log s."""
    largest = x.amax(1, keepdim=True)
    log = torch.exp(x - largest).double().sum(1, keepdim=True).log()
    return torch.exp(x - (largest.double() + log).float())


FORMS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    quotient,
    two_differences,
    one_difference,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=20)
    options = parser.parse_args()
    task = find_task("softmax")
    shares: dict[str, dict[str, float]] = {f.__name__: defaultdict(float) for f in FORMS}
    rejected: dict[str, Counter[str]] = {f.__name__: Counter() for f in FORMS}
    for number in range(options.draws):
        checker = Checker(task, InputSampler(task, torch.device("cpu"), TRAITS.inputs))
        for case in (c for kind in ("cpu", "gpu") for c in check_cases(task, kind, number)):
            if case.dtype != "float32" or case.dims["M"] * case.dims["N"] > MOST_ELEMENTS:
                continue
            input_set = checker.sampler.draw(case)
            for form in FORMS:
                try:
                    errors = checker.compare([form(input_set.tensors["x"])], input_set, Stage.CHECK)
                except CandidateRejected:
                    rejected[form.__name__][case.name] += 1
                else:
                    share = max(e.share_of_tolerance for e in errors)
                    held = shares[form.__name__]
                    held[case.name] = max(held[case.name], share)
    for form in FORMS:
        name = form.__name__
        print(f"{form.__doc__}")
        print(f"    rejected, of {options.draws} draws: {dict(rejected[name].most_common())}")
        largest = sorted(shares[name].items(), key=lambda s: -s[1])[:MOST_LINES]
        print(f"    largest shares: {', '.join(f'{v:.2f} {k}' for k, v in largest)}", flush=True)


if __name__ == "__main__":
    main()
