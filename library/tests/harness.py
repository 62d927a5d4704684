"""The library's tasks: cases, inputs, float64 reference, and what counts as correct."""

import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import math
import threading
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from tolerance import allowed, measure, share

from kagent_kernels import _devices
from kagent_kernels._library import LibraryOperator
from kagent_kernels._portfolio import (
    Chosen,
    DeviceEntry,
    Portfolio,
    ReferenceCall,
    read_portfolio,
)

TASKS = Path(__file__).parent / "tasks"
DEVICES = {"cpu": "cpu", **({"gpu": "cuda"} if torch.cuda.is_available() else {})}
"""Kinds of device that are here, with their names in torch."""
CALLS = 50
"""Of each of two threads that call at once."""
_CASE = ("name", "dtype", "inputs", "scale", "noncontiguous")


@dataclass(frozen=True)
class Case:
    """Shapes, dtype and distribution of inputs of one call; what reference.py's `inputs` takes."""

    name: str
    dtype: str
    dims: Mapping[str, int | float | bool] = field(default_factory=dict)
    inputs: str = "normal"
    scale: float = 1.0
    noncontiguous: bool = False
    kind: str = "cpu"

    def __str__(self):
        return self.name


class Task:
    """task.toml and reference.py of one operator."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.data = tomllib.loads((TASKS / name / "task.toml").read_text(encoding="utf-8"))
        path = TASKS / name / "reference.py"
        if not path.exists():  # the operator uses it, too, and has it
            path = Path(_devices.__file__).parent / "operators" / f"_{name}_reference.py"
        spec = importlib.util.spec_from_file_location(f"reference_of_{name}", path)
        self.reference = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.reference)
        self.tensors = [a["name"] for a in self.data["arguments"] if "shape" in a]

    def cases(self, which: str = "check") -> list[Case]:
        """Of the devices that are here."""
        return [
            Case(
                kind=kind,
                dims={k: v for k, v in entry.items() if k not in _CASE},
                **{k: v for k, v in entry.items() if k in _CASE},
            )
            for kind in DEVICES
            for entry in self.data[kind][which]
        ]

    def smallest(self, kind: str) -> Case:
        """The ordinary case with the fewest elements that has no dimension of 1, of deviation 1.

        With larger deviations a gradient is the difference of nearly equal numbers (softmax: of a
        row that one value dominates), and what it errs is chance, for torch as for a kernel.
        """
        ordinary = [c for c in self.cases() if c.kind == kind and not c.noncontiguous]
        whole = [c for c in ordinary if c.inputs == "normal" and 1 not in c.dims.values()]
        fewest = min(
            whole or ordinary, key=lambda c: math.prod(abs(v) for v in c.dims.values() if v)
        )
        return replace(fewest, scale=1.0)

    def largest(self, kind: str) -> Case:
        """The ordinary case with the most elements: calls that take as long as any here."""
        ordinary = [c for c in self.cases() if c.kind == kind and not c.noncontiguous]
        return max(ordinary, key=lambda c: math.prod(abs(v) for v in c.dims.values() if v))

    def arguments(self, case: Case, seed: int = 0) -> dict[str, object]:
        """Fresh arguments of the entry function, in order."""
        device = torch.device(DEVICES[case.kind])
        generator = torch.Generator(device=device).manual_seed(seed)
        drawn = self.reference.inputs(case, generator, device)
        if case.noncontiguous:
            drawn = {n: padded(t) for n, t in drawn.items()}
        return {
            a["name"]: drawn[a["name"]] if "shape" in a else _scalar(a["value"], case)
            for a in self.data["arguments"]
        }

    @property
    def compared(self) -> list[dict[str, object]]:
        """What has a tolerance: the results, then the arguments that are written."""
        written = [a for a in self.data["arguments"] if "writes" in a]
        return [*self.data.get("results", []), *({**a, **a["writes"]} for a in written)]

    def with_written(
        self, results: object, arguments: dict[str, object]
    ) -> tuple[torch.Tensor, ...]:
        """Results, then the arguments that the call has written."""
        names = [a["name"] for a in self.data["arguments"] if "writes" in a]
        return (*as_tuple(results), *(arguments[n] for n in names))

    def eager(self, arguments: dict[str, object]) -> tuple[torch.Tensor, ...]:
        """What torch itself gives."""
        own = self.own(arguments)
        return self.with_written(self.reference.eager(**own), own)

    def check(
        self,
        call: Callable[[dict[str, object]], object],
        arguments: dict[str, object],
        given: dict[str, object] | None = None,
    ) -> None:
        """Compare a call's results, and what it writes, with float64: a result may err `k` times
        what torch errs, and its floor.

        `given` are the arguments as they are passed, where their layout is another one.
        """
        own = self.own(arguments if given is None else given)
        self.compare(self.with_written(call(own), own), arguments)

    def compare(self, found: tuple[torch.Tensor, ...], arguments: dict[str, object]) -> None:
        """Compare results, and what was written, with float64; see `check`."""
        expected = as_tuple(self.reference.reference(**self.own(arguments)))
        yardstick = self.eager(arguments)
        for result, out, torch_s, exact in zip(
            self.compared, found, yardstick, expected, strict=True
        ):
            assert out.dtype == torch_s.dtype, f"{result['name']} is {out.dtype}"
            rows = result.get("row_dims", 1)
            limit = allowed(
                measure(torch_s, exact, rows),
                out.dtype,
                k=result["k"],
                floor=result.get("floor", 1.0),
                bias=result.get("bias", 0.0),
            )
            errors = measure(out, exact, rows)
            assert share(errors, limit) <= 1, f"{result['name']}: {errors}, allowed {limit}"

    def check_together(
        self,
        call: Callable[[dict[str, object]], object],
        given: list[dict[str, object]],
    ) -> None:
        """Have a thread for each of these arguments call at once, on a GPU each on a stream of its
        own, and compare what it gets with what it gets alone, and where that differs with float64.
        """

        def one(arguments: dict[str, object]) -> tuple[torch.Tensor, ...]:
            own = self.own(arguments)
            return self.with_written(call(own), own)

        alone = [one(arguments) for arguments in given for _ in range(3)][2::3]
        together, failed = [[] for _ in given], []
        begin = threading.Barrier(len(given))

        def calls(n: int) -> None:
            try:
                begin.wait()
                together[n] += [one(given[n]) for _ in range(CALLS)]
            except Exception as e:
                failed.append(e)

        def calls_on_a_stream(n: int) -> None:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                calls(n)
            stream.synchronize()

        on_gpu = any(isinstance(v, torch.Tensor) and v.is_cuda for v in given[0].values())
        if on_gpu:
            torch.cuda.synchronize()
        target = calls_on_a_stream if on_gpu else calls
        threads = [threading.Thread(target=target, args=(n,)) for n in range(len(given))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed
        for arguments, usual, results in zip(given, alone, together, strict=True):
            for found in results:
                pairs = zip(found, usual, strict=True)
                if not all(torch.equal(new.double(), old.double()) for new, old in pairs):
                    self.compare(found, arguments)

    def own(self, arguments: dict[str, object]) -> dict[str, object]:
        """Copies of those that a function may write."""
        names = {a["name"] for a in self.data["arguments"] if a.get("mutates") or "writes" in a}
        return {n: copied(v) if n in names else v for n, v in arguments.items()}

    # -- calling the library -------------------------------------------------------------------

    def call(
        self,
        function: Callable[..., object],
        arguments: dict[str, object],
        compiled: Callable[..., object] | None = None,
    ) -> object:
        """A functional form, or what it was compiled to, with the task's arguments: in order, and
        by name where it takes nothing else.
        """
        parameters = list(inspect.signature(function).parameters.values())
        ordered, named = [], {}
        for parameter, value in zip(parameters, arguments.values(), strict=False):
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                named[parameter.name] = value
            else:
                ordered.append(value)
        return (compiled or function)(*ordered, **named)

    def all_results(
        self,
        function: Callable[..., object],
        arguments: dict[str, object],
        compiled: Callable[..., object] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """The task's results: those that the function does not return are gradients of the first
        that it does, by its floating-point arguments in order.
        """
        results = as_tuple(self.call(function, arguments, compiled))
        if len(results) < len(self.data.get("results", ())):
            own = {n: leaf(v) for n, v in arguments.items()}
            results = as_tuple(self.call(function, own, compiled))
            results += torch.autograd.grad(results[0], leaves(own))
        return tuple(r.detach() for r in results)

    def gradients(
        self, call: Callable[..., object], arguments: dict[str, object]
    ) -> tuple[torch.Tensor, ...]:
        """Of a weighted sum of the first result, by the floating-point arguments.

        `call` takes the arguments by name; the weights are random and always the same.
        """
        own = {n: leaf(v) for n, v in arguments.items()}
        out = as_tuple(call(own))[0]
        generator = torch.Generator().manual_seed(1)
        weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        return torch.autograd.grad(out, leaves(own), weights.to(out))

    def empty(self, arguments: dict[str, object]) -> dict[str, object]:
        """Nothing of the first dimension that may have any size."""
        shapes = {a["name"]: a["shape"] for a in self.data["arguments"] if "shape" in a}
        named = (s for n in self.tensors for s in shapes[n] if s in self.data["dims"])
        first = next(named, None)
        found = dict(arguments)
        for name in self.tensors:
            for axis, size in enumerate(shapes[name]):
                if size == first:
                    found[name] = found[name].narrow(axis, 0, 0)
        return found


def with_one_thread(function: Callable[[], None]) -> None:
    """Call a function in a thread whose C++ kernels have one thread of OpenMP."""
    failed = []

    def run() -> None:
        try:
            torch.get_num_threads()  # the first time in a thread, this sets their number
            with contextlib.suppress(OSError):
                ctypes.CDLL("libgomp.so.1").omp_set_num_threads(1)
            function()
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def as_tuple(value: object) -> tuple[torch.Tensor, ...]:
    """No result, one or several."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """The same values and strides in memory of its own."""
    own = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return own.copy_(tensor)


def leaf(value: object) -> object:
    """A floating-point tensor as one that asks for a gradient; anything else as it is."""
    return value.detach().requires_grad_() if floating(value) else value


def leaves(arguments: dict[str, object]) -> list[torch.Tensor]:
    """Those that ask for a gradient."""
    return [v for v in arguments.values() if floating(v) and v.requires_grad]


def floating(value: object) -> bool:
    """Whether it is a tensor that can have a gradient."""
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def checks_for(arguments: dict[str, object]) -> tuple[str, ...]:
    """What torch.library.opcheck is to try: all, but for the schema where it would compare
    floating-point numbers of 8 bits, which torch cannot. `visit.py` has nothing written to, either.
    """
    narrow = any(floating(v) and v.dtype.itemsize == 1 for v in arguments.values())
    others = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    return others if narrow else ("test_schema", *others)


def transposed(value: object) -> object:
    """The same values, the last dimension not the fastest."""
    matrix = isinstance(value, torch.Tensor) and value.dim() > 1
    return value.mT.contiguous().mT if matrix else value


def operator_of(task: str) -> LibraryOperator:
    """The library's operator for a task."""
    module = importlib.import_module(f"kagent_kernels.operators.{task}")
    found = [v for v in vars(module).values() if isinstance(v, LibraryOperator)]
    return next(v for v in found if v.name == task)


def function_of(task: str) -> Callable[..., object]:
    """The library's function for a task."""
    module = importlib.import_module(f"kagent_kernels.operators.{task}")
    return getattr(module, next(n for n in module.__all__ if n[0].islower()))


def every_operator() -> list[LibraryOperator]:
    """Those of all tasks, with their gradients'."""
    found = []
    for task in sorted(p.name for p in TASKS.iterdir() if p.is_dir()):
        module = importlib.import_module(f"kagent_kernels.operators.{task}")
        found += [v for v in vars(module).values() if isinstance(v, LibraryOperator)]
    return found


def chosen(operator: LibraryOperator, arguments: dict[str, object]) -> Chosen | ReferenceCall:
    """Which kernel an operator's table names for a call."""
    values = list(arguments.values())
    first = next(v for v in values if isinstance(v, torch.Tensor))
    table = _portfolio(operator.name)
    return table.choose(_described(first.device), table.dtype_of(values), operator._dims(*values))


def table_for(task: str, device: torch.device) -> DeviceEntry | None:
    """What was measured on a device, or on one whose figures stand in for it."""
    return _portfolio(task)._table(_described(device))


def _portfolio(task: str) -> Portfolio:
    return read_portfolio(Path(_devices.__file__).parent / "portfolio" / f"{task}.json")


def _described(device: torch.device) -> DeviceEntry:
    name, kind = _devices.device_name(device), _devices.kind(device)
    return DeviceEntry(name, kind, _devices.capability(device), ())


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with rows that lie 8 elements further apart."""
    if tensor.dim() < 2:
        return tensor
    wide = tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] + 8))
    return wide[..., : tensor.shape[-1]].copy_(tensor)


def _scalar(value: object, case: Case) -> object:
    """A constant, a dimension, or a formula of dimensions, as task.toml has it."""
    if not isinstance(value, str):
        return value
    functions = {"min": min, "max": max, "cdiv": lambda a, b: -(-a // b), "__builtins__": {}}
    itemsize = getattr(torch, case.dtype).itemsize
    return eval(value, functions, {**case.dims, "itemsize": itemsize})
