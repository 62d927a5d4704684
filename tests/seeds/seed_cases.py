"""What tests of seeds share: importing a seed, drawing a case's arguments, and the worst error."""

import importlib.util
from pathlib import Path

import torch
from kagent_sandbox.data.build import ScalarSpec
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.judge.check.numerics import allowed, measure_errors, share

SEEDS = Path(__file__).parents[2] / "seeds"
TRAINING_TASKS = (
    "adamw",
    "adamw_tensors",
    "attention_backward",
    "attention_train",
    "fp8_linear",
    "gelu_backward",
    "int8_linear",
    "rms_norm",
    "rms_norm_backward",
    "softmax_backward",
)
"""Tasks of training and inference, whose families in the corpus are edits of their seeds."""


def name_of(path):
    """Of a seed's file, for a test's id."""
    return f"{path.parent.name}-{path.stem}"


def import_seed(path):
    spec = importlib.util.spec_from_file_location(f"seed_{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(task, reference, case, seed, device="cpu"):
    """Arguments of a call by name, with the declared strides and offsets."""
    device = torch.device(device)
    drawn = reference.inputs(case, torch.Generator(device).manual_seed(seed), device)
    given = {}
    for spec in build_case(task, case).arguments:
        if isinstance(spec, ScalarSpec):
            given[spec.name] = spec.value
            continue
        value = drawn[spec.name]
        assert tuple(value.shape) == spec.shape
        assert value.dtype == getattr(torch, spec.dtype)
        whole = torch.empty(spec.extent, dtype=value.dtype, device=device)
        given[spec.name] = whole.as_strided(spec.shape, spec.strides, spec.offset)
        given[spec.name].copy_(value)
    return given


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


def outputs(task, function, given):
    """What a function returns, and then what it has written to its arguments, which are copies."""
    written = [a.name for a in task.arguments if a.writes]
    given = {n: v.clone() if n in written else v for n, v in given.items()}
    results = function(**given)
    returned = () if results is None else as_tuple(results)
    return (*returned, *(given[n] for n in written))


def worst_share(task, reference, given, results):
    """Largest error over what is allowed, over all results; the contract holds up to 1."""
    return Contract(task, reference, given).worst_share(results)


class Contract:
    """What a task allows on some arguments: several results of the same call are compared with it,
    and the reference is asked once.
    """

    def __init__(self, task, reference, given):
        # As the judge calls them: torch's own attention on a GPU faults where rows are not aligned.
        given = {
            n: v.clone(memory_format=torch.contiguous_format) if torch.is_tensor(v) else v
            for n, v in given.items()
        }
        self._task = task
        self._expected = as_tuple(reference.reference(**given))
        self._eager = outputs(task, reference.eager, given)
        self._allowed = [
            allowed(measure_errors(torchs, ref, declared.row_dims), declared, torchs.dtype)
            for declared, ref, torchs in zip(
                task.compared, self._expected, self._eager, strict=True
            )
        ]

    def worst_share(self, results):
        """See `worst_share`."""
        shares = []
        for declared, result, ref, torchs, limit in zip(
            self._task.compared,
            as_tuple(results),
            self._expected,
            self._eager,
            self._allowed,
            strict=True,
        ):
            assert result.shape == torchs.shape
            assert result.dtype == torchs.dtype
            shares.append(share(measure_errors(result, ref, declared.row_dims), limit))
        return max(shares)


class Contracts:
    """Arguments of a task's cases, each drawn once, and what is allowed on them.

    Args:
        seed: Of the arguments.
    """

    def __init__(self, task, seed):
        self._task, self._reference, self._seed = task, task.reference(), seed
        self._known = {}

    def worst_share(self, case, function):
        """Largest error of what a function makes of a case's arguments, over what is allowed."""
        if case.name not in self._known:
            given = arguments(self._task, self._reference, case, self._seed)
            self._known[case.name] = given, Contract(self._task, self._reference, given)
        given, contract = self._known[case.name]
        return contract.worst_share(outputs(self._task, function, given))
