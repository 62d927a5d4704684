"""Does a candidate's source launch what its plan says? Its host code, once, on real tensors.

A plan shows what host code did on symbolic tensors; what is exported is the source. So the source
is run as a user would run it, in a confined process that never saw the tracer, and every launch and
every result must be the plan's: the kernel's binary, its scalars, and which bytes of which tensor
its pointers are. What differs is TAMPER.

For C++ on the CPU. Not covered: fills and copies beside the launches, and host code that takes this
process for a builder by its folder or its limits, and a user's for none.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Self, cast

import torch

from kagent_sandbox import records
from kagent_sandbox.build.configs import apply_config
from kagent_sandbox.build.inspect import kernel_info
from kagent_sandbox.build.kernel_launches import plan_argument
from kagent_sandbox.build.request import BuildCase, ScalarSpec, TensorSpec
from kagent_sandbox.channel import ChannelError
from kagent_sandbox.confine import builder_confinement
from kagent_sandbox.context import Context
from kagent_sandbox.forkserver import ForkServer
from kagent_sandbox.plan import Arg, Null, Plan, Pointer, Scalar, TensorRef
from kagent_sandbox.runtime.launches import Observed, observing
from kagent_sandbox.spawned import printable
from kagent_sandbox.verdict import Rejected, Stage, Status

LIMIT_S = 30.0
_MAX_ANSWER_BYTES = 8 << 20
_MAX_TEXT = 2000
Seen = Mapping[str, list[Any]]
"""`launches` and `results`, as JSON."""


class Replayer:
    """Runs host code on real tensors, each case in a confined process of its own. A context
    manager.
    """

    def __init__(self) -> None:
        self._server = ForkServer(
            "kagent_sandbox.build.replay_real:handle",
            preload=("torch", "numpy", "kagent_sandbox.lang"),
            confinement=builder_confinement(),
        )

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def compare(
        self, source: str, entry: str, case: BuildCase, plan: Plan, config: Mapping[str, object]
    ) -> Rejected | None:
        """Run a case; TAMPER where it is not what the plan says, else None.

        Raises:
            ChildDied: The fork-server is gone.
            ValueError: The plan is not for the CPU.
        """
        if plan.target != "cpu":
            raise ValueError(f"a plan for {plan.target}: only C++ is run on real tensors here")
        request = {"source": source, "entry": entry, "config": dict(config)}
        with self._server.spawn(wall_limit_s=LIMIT_S) as child:
            try:
                child.channel.send({**request, "case": records.to_json(case)})
                answer = child.channel.recv(LIMIT_S, max_bytes=_MAX_ANSWER_BYTES).obj
            except ChannelError as e:
                end = child.kill()
                return _tamper(f"its process {end.describe()} ({e})", case)
        if not isinstance(answer, dict) or "failed" in answer:
            failed = answer.get("failed") if isinstance(answer, dict) else answer
            return _tamper(f"it fails: {printable(str(failed))[:_MAX_TEXT]}", case)
        difference = first_difference(expected(plan), cast("Seen", answer))
        return None if difference is None else _tamper(difference, case)


def _tamper(what: str, case: BuildCase) -> Rejected:
    text = f"on real tensors host code does not do what its plan says: {what}"
    return Rejected(Stage.CHECK, Status.TAMPER, text, case.name)


def expected(plan: Plan) -> Seen:
    """What a run of host code must show, from its plan."""
    names = {b.id: b.name for b in plan.buffers if b.kind == "input"}
    order: dict[int, str] = {}

    def place(buffer: int) -> str:
        name = names.get(buffer)
        return name if name is not None else order.setdefault(buffer, f"#{len(order)}")

    launches = [
        [op.kernel, [_shown(a, lambda p: place(p.buffer)) for a in op.args]] for op in plan.launches
    ]
    return {"launches": launches, "results": [_result(t, place(t.buffer)) for t in plan.outputs]}


def _shown(arg: Arg, place: Callable[[Pointer], str]) -> list[object]:
    if isinstance(arg, Pointer):
        return ["pointer", place(arg), arg.offset]
    if isinstance(arg, Scalar):
        return [arg.type, arg.value.hex() if isinstance(arg.value, float) else int(arg.value)]
    assert isinstance(arg, Null), "C++ kernels take no tensor maps"
    return ["null"]


def _result(ref: TensorRef, place: str) -> list[object]:
    return [place, ref.offset, list(ref.shape), list(ref.strides), ref.dtype]


def first_difference(want: Seen, got: Seen) -> str | None:
    """The first launch or result that differs, in words; None if all are the same."""
    for what in ("launches", "results"):
        theirs = got.get(what)
        if not isinstance(theirs, list):
            return f"it says nothing of its {what}"
        for i, (w, g) in enumerate(zip(want[what], theirs, strict=False), 1):
            if w != g:
                text = f"{what[:-2] if what == 'launches' else 'result'} {i} is {g}, the plan's {w}"
                return printable(text)[:_MAX_TEXT]
        if len(theirs) != len(want[what]):
            return f"{len(theirs)} {what}, the plan has {len(want[what])}"
    return None


# -- in the confined process -----------------------------------------------------------------------


def handle(context: Context) -> None:
    """Run one case of one candidate and say what it launched and returned."""
    asked = cast("dict[str, Any]", context.channel.recv(LIMIT_S).obj)
    case = records.from_json(BuildCase, asked["case"])
    try:
        module = _load(asked["source"], context.tmp)
        apply_config(module, asked["config"])
        context.channel.send(_Run(case).of(getattr(module, asked["entry"])))
    except (Exception, SystemExit) as e:  # noqa: BLE001 - host code may raise anything
        context.channel.send({"failed": f"{type(e).__name__}: {e}"[:_MAX_TEXT]})


def _load(source: str, folder: Path) -> ModuleType:
    path = folder / "kernel.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["kernel"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Run:
    """One call: what is launched is written down, and then really launched."""

    def __init__(self, case: BuildCase) -> None:
        self._case = case
        self._held: list[torch.Tensor] = []  # so that no address comes twice
        self._places: dict[int, str] = {}  # storages, by address
        self._launches: list[list[object]] = []

    def of(self, function: Callable[..., object]) -> Seen:
        arguments = [self._argument(a) for a in self._case.arguments]
        with observing(self._seen):
            result = function(*arguments)
        values = result if isinstance(result, tuple | list) else (result,)
        return {"launches": self._launches, "results": [self._returned(v) for v in values]}

    def _argument(self, spec: TensorSpec | ScalarSpec) -> object:
        if isinstance(spec, ScalarSpec):
            return spec.value
        dtype = getattr(torch, spec.dtype)
        tensor = torch.empty_strided(spec.shape, spec.strides, dtype=dtype)
        if dtype.is_floating_point:
            tensor.copy_(torch.randn(spec.shape))
        else:
            tensor.zero_()  # as an index, zero is always within
        self._held.append(tensor)
        self._places[tensor.untyped_storage().data_ptr()] = spec.name
        return tensor

    def _place(self, tensor: torch.Tensor) -> tuple[str, int]:
        """Name of a tensor's storage, and the byte of it at which the tensor begins."""
        start = tensor.untyped_storage().data_ptr()
        if start not in self._places:
            self._held.append(tensor)
            made = sum(name.startswith("#") for name in self._places.values())
            self._places[start] = f"#{made}"
        return self._places[start], tensor.data_ptr() - start

    def _seen(self, launch: Observed) -> None:
        shown = []
        for value in launch.arguments:
            if isinstance(value, torch.Tensor):
                shown.append(["pointer", *self._place(value)])
            else:
                shown.append(_shown(plan_argument(value, None), lambda _: ""))
        name = launch.source.name
        info = kernel_info(launch.binary, launch.symbol, launch.source.language)
        assert info.name == name
        self._launches.append([info.hash, shown])

    def _returned(self, value: object) -> list[object]:
        if not isinstance(value, torch.Tensor):
            return [type(value).__name__]
        place, offset = self._place(value)
        dtype = str(value.dtype).removeprefix("torch.")
        size = value.element_size()
        return [place, offset // size, list(value.shape), list(value.stride()), dtype]
