"""An operator of the library: known to torch, run by the kernel that was measured as the fastest.

    _softmax = LibraryOperator("softmax", "(Tensor x) -> Tensor", namespace=NAMESPACE,
                        reference=_reference, fake=_fake, dims=_dims)
    y = _softmax(x)

`_softmax.op` is an operator of torch.library: torch.compile, export and autograd know it. When it
runs, the table portfolio/softmax.json says which kernel to use. Whatever a kernel was not checked
for, and whatever does not compile or launch here, is computed by the reference, plain torch code,
with one warning for each reason.

Into torch's dispatcher and back into Python takes as long as to launch a kernel, or two. Where
nobody would see the call there (no mode, transform, tracer or profiler) and its choice is known, it
goes to the kernel at once.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from . import _kernels
from ._dispatch import Call, Dispatch, FallbackWarning, has_kernels
from ._gradients import scaled
from ._helpers import (
    PLAIN,
    autocast_dtype,
    available,
    check_classes,
    holds,
    plain,
    rows,
    vmap_rows,
    wants_gradient,
    with_autograd,
)
from ._kernels import ALIGNMENT as _ALIGNMENT
from ._portfolio import Portfolio, Size

__all__ = [
    "FallbackWarning",
    "LibraryOperator",
    "Portfolio",
    "autocast_dtype",
    "available",
    "check_classes",
    "holds",
    "plain",
    "rows",
    "scaled",
    "vmap_rows",
    "wants_gradient",
    "with_autograd",
]

_BELOW_AUTOGRAD = torch._C._after_autograd_keyset  # noqa: SLF001
_DENSE = tuple(
    torch._C.DispatchKeySet(key)  # noqa: SLF001
    for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)  # noqa: SLF001
)
_DIRECT: dict[int, bool] = {}  # whether nothing but the device's kernel is left, by keys

_AUTOCAST = functools.reduce(
    operator.or_,
    (
        torch._C.DispatchKeySet(key)  # noqa: SLF001
        for name, key in torch._C.DispatchKey.__members__.items()  # noqa: SLF001
        if name.startswith("Autocast")
    ),
)
"""Dispatch keys that cast arguments below autocast. An operator's function has cast them as torch
would, and nothing is cast within it.
"""

# Who would see a call: these answer in nanoseconds, while sets of dispatch keys, which have it all,
# take as long as the dispatcher.
_dispatch_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001
_function_modes = torch._C._len_torch_function_stack  # noqa: SLF001
_transforms = torch._C._are_functorch_transforms_active  # noqa: SLF001
_tracer = torch._C._get_tracing_state  # noqa: SLF001
_profiler = torch._C._autograd._profiler_enabled  # noqa: SLF001
_autocast = torch._C._is_any_autocast_enabled  # noqa: SLF001
_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded  # noqa: SLF001
_default_dtype = torch.get_default_dtype
_deterministic = torch.are_deterministic_algorithms_enabled
_legacy_batched = torch._C._functorch.is_legacy_batchedtensor  # noqa: SLF001
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality  # noqa: SLF001


class LibraryOperator:
    """One operator of torch.library, with a portfolio of kernels."""

    def __init__(
        self,
        name: str,
        schema: str,
        *,
        namespace: str,
        reference: Callable[..., Any],
        fake: Callable[..., Any],
        dims: Callable[..., Mapping[str, Size] | None],
        task: str | None = None,
        check: Callable[..., None] | None = None,
        setup_context: Callable[..., None] | None = None,
        backward: Callable[..., Any] | None = None,
        vmap: Callable[..., Any] | None = None,
    ) -> None:
        """Define it.

        Args:
            name: Of the operator.
            schema: In torch's words: "(Tensor x, bool causal) -> Tensor". Parameters are those of
                the kernels, in order.
            namespace: Of the library. Where it has the name already (a second copy of the library
                in this process), another one is taken.
            reference: The same with torch alone; takes whatever comes.
            fake: Shape and dtype of the results, which are contiguous.
            dims: The task's dimensions and flags of a call; None if its tensors do not fit the
                task, which leaves it to the reference to say what is wrong.
            task: Whose portfolio it uses, where it is not called like it.
            check: Looks at the arguments of every call, and raises where a kernel would read or
                write what is not its own.
            setup_context: As of torch.library.register_autograd, for `backward`.
            backward: Likewise. Without it, asking for a gradient is an error.
            vmap: As of torch.library.register_vmap.
        """
        self.name = name
        self._reference, self._dims, self._check = reference, dims, check
        self._namespace = _free_namespace(namespace, name)
        self._library = torch.library.Library(  # type: ignore[no-untyped-call]
            self._namespace, "FRAGMENT"
        )
        self._library.define(  # type: ignore[no-untyped-call]
            name + schema, tags=(torch.Tag.pt2_compliant_tag,)
        )
        self.op = getattr(getattr(torch.ops, self._namespace), name).default
        """The overload to call, with positional arguments."""
        arguments = self.op._schema.arguments  # noqa: SLF001
        self._tensors = tuple(i for i, a in enumerate(arguments) if str(a.type) == "Tensor")
        others = [i for i in range(len(arguments)) if i not in self._tensors]
        self._tensors_of, self._others_of = _picks(self._tensors), _picks(others)
        self._mutated = tuple(
            i for i in self._tensors if (alias := arguments[i].alias_info) and alias.is_write
        )
        self._public = f"{__package__}.{name}"  # as users know it: namespaces end in a digest
        self._dispatch = Dispatch(task or name, self._public)
        self._calls = self._dispatch.calls
        self.least = self._dispatch.least()
        """Elements of all tensors together below which nothing was measured: torch is called."""
        self._library.impl(  # type: ignore[no-untyped-call]
            name, self._run, "CompositeExplicitAutograd"
        )
        self._setup_context, self._backward = setup_context, backward or self._no_backward
        self._library.impl(  # type: ignore[no-untyped-call]
            name,
            self._not_differentiable if self._mutated else self._differentiable,
            "Autograd",
            with_keyset=True,
        )
        qualified = f"{self._namespace}::{name}"
        torch.library.register_fake(qualified, fake, lib=self._library)
        if vmap is not None:
            torch.library.register_vmap(qualified, vmap, lib=self._library)

    def is_large(self, *tensors: torch.Tensor) -> bool:
        """Whether a call with these tensors is as large as one that was measured. While a program
        is exported it is: its sizes may vary, and are looked at when it runs.
        """
        if torch.compiler.is_exporting():
            return True
        elements = sum([t.numel() for t in tensors])
        return elements >= self.least

    def is_torchs(self, *args: Any) -> bool:
        """Whether a call would be the reference's. While it is being traced, only where no kernel
        is for its device and dtypes; never in an exported program, which may run elsewhere.

        A function that then calls torch itself has all that torch has: its autograd, which keeps
        what it needs and no more, the memory layout of its results, and the compiler's fusions.
        """
        if torch.compiler.is_exporting():
            return False
        if torch.compiler.is_compiling():
            device = args[self._tensors[0]].device
            dtypes = tuple([str(a.dtype) if hasattr(a, "dtype") else "" for a in args])
            return not has_kernels(self._dispatch.number, device.type, device.index, dtypes)
        if type(args[self._tensors[0]]) is not torch.Tensor:
            return False
        return not self.is_large(*self._tensors_of(args)) or self._chosen(args) is None

    # -- a call ------------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        """Call it, by the shortest way that there is."""
        result = self.at_once(*args)
        return self.op(*args) if result is None else result

    def at_once(self, *args: Any) -> Any:
        """The result where a kernel is known for such a call and nobody is to see it; else None.

        Not under autocast: what calls it may have to cast arguments first.
        """
        if (
            torch.compiler.is_dynamo_compiling()
            or self._mutated
            or _autocast()
            or _dispatch_modes()
            or _function_modes()
            or _transforms()
            or _profiler()
            or _tracer() is not None
            or _default_dtype() is not torch.float32
            or forward_ad._current_level >= 0  # noqa: SLF001
        ):
            return None
        learns, ready, tensors = False, True, self._tensors_of(args)
        for tensor in tensors:
            if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_neg():
                return None
            if tensor.is_nested or _legacy_batched(tensor):
                return None
            if tensor.requires_grad:
                learns = True
            if not tensor.is_contiguous() or tensor.data_ptr() % _ALIGNMENT:
                ready = False
        call = self._calls.get((*map(_kind, tensors), *self._others_of(args)))
        if call is None or (_deterministic() and not call.repeats):
            return None
        if self._check is not None:
            self._check(*args)
        if learns and torch.is_grad_enabled():
            if _excluded(_AUTOGRAD):
                return None
            return _apply(*args, self, call)  # type: ignore[no-untyped-call]
        if not ready or call.guard is not None:
            return self._launch(call, args)
        try:  # as _launch does it: another function of Python's and another loop are 2 µs here
            return call.function(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as e:  # noqa: BLE001
            return self._instead_of(call, e, args)

    def _differentiable(self, keys: Any, *args: Any) -> Any:
        if forward_ad._current_level >= 0:  # noqa: SLF001
            self._refuse_tangents(args)
        # What torch.library.register_autograd does, in half its time (4 µs here).
        if torch.is_grad_enabled():
            for i in self._tensors:
                if args[i].requires_grad:
                    if _transforms():
                        return _Differentiable.apply(*args, self, keys)  # type: ignore[no-untyped-call]
                    return _apply(*args, self, keys)  # type: ignore[no-untyped-call]
        return self._below_autograd(keys, args)

    def _not_differentiable(self, keys: Any, *args: Any) -> Any:
        """Call an operator that writes to its arguments; refuse derivatives of either kind."""
        if forward_ad._current_level >= 0:  # noqa: SLF001
            self._refuse_tangents(args)
        if torch.is_grad_enabled() and any(args[i].requires_grad for i in self._tensors):
            self._no_backward()
        with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001
            return self.op.redispatch(keys & _BELOW_AUTOGRAD, *args)

    def _below_autograd(self, keys: Any, args: Sequence[Any]) -> Any:
        direct = _DIRECT.get(keys.raw_repr())
        if direct is None:
            direct = _DIRECT[keys.raw_repr()] = (keys & _BELOW_AUTOGRAD) in _DENSE
        if direct:  # nobody else wants to see the call: no tracing, no modes, no views
            return self._run(*args)
        with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001
            return self.op.redispatch(keys & _BELOW_AUTOGRAD, *args)

    def _run(self, *args: Any) -> Any:
        if self._check is not None:
            self._check(*args)
        call = self._chosen(args)
        if _autocast():
            with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):  # noqa: SLF001
                return self._launch(call, args)
        return self._launch(call, args)

    def _chosen(self, args: tuple[Any, ...]) -> Call | None:
        if _default_dtype() is not torch.float32:
            # A host function may leave the dtype of what it allocates to torch.
            self._dispatch.warn(
                "default dtype",
                f"torch's default dtype is {_default_dtype()}, and kernels were checked with "
                "torch.float32",
            )
            return None
        tensors = self._tensors_of(args)
        key = (*map(_kind, tensors), *self._others_of(args))
        try:
            call = self._calls[key]
        except KeyError:
            call = self._dispatch.choose(key, tensors, self._dims, args)
        if call is not None and not call.repeats and _deterministic():
            self._dispatch.warn(
                f"deterministic {call.kernel}",
                "torch.use_deterministic_algorithms is on, and the order of the atomic operations "
                f"of its kernel {call.kernel} differs from call to call",
            )
            return None
        return call

    def _launch(self, call: Call | None, args: Sequence[Any]) -> Any:
        if call is None:
            return self.by_reference(*args)
        passed = args
        for i in self._tensors:
            tensor = args[i]
            if not tensor.is_contiguous() or tensor.data_ptr() % _ALIGNMENT:
                passed = _kernels.as_checked(args, self._tensors, pitched=call.pitched)
                break
        on_copies = bool(self._mutated) and not call.function.called
        if on_copies:  # whose first call may end between two launches: arguments stay whole then
            passed = list(passed)
            for i in self._mutated:
                if passed[i] is args[i]:
                    passed[i] = args[i].clone()
        try:
            if call.guard is None:
                result = call.function(*passed)
            else:
                with torch.cuda.device(call.guard):
                    result = call.function(*passed)
        except torch.OutOfMemoryError:
            raise  # the reference needs no less
        except Exception as e:  # noqa: BLE001 - compilers, drivers, launchers: each has its own
            if self._mutated and not on_copies:
                self._dispatch.give_up(call.kernel, e)
                raise RuntimeError(
                    f"{self._public}: its kernel {call.kernel} failed, and may have "
                    "written part of its arguments: go on from a checkpoint"
                ) from e
            return self._instead_of(call, e, args)
        for i in self._mutated:
            if passed[i] is not args[i]:
                args[i].copy_(passed[i])
        if self._mutated:  # autograd refuses a graph that has saved what was there before
            increment_version([args[i] for i in self._mutated])
        return result

    def _instead_of(self, call: Call, error: Exception, args: Sequence[Any]) -> Any:
        self._dispatch.give_up(call.kernel, error)
        return self.by_reference(*args)

    def by_reference(self, *args: Any) -> Any:
        """Results of the reference, which are contiguous."""
        result = self._reference(*args)
        if result is None or isinstance(result, torch.Tensor):
            return None if result is None else result.contiguous()
        return tuple(r.contiguous() for r in result)

    def _refuse_tangents(self, args: Sequence[Any]) -> None:
        pairs = [forward_ad.unpack_dual(args[i]) for i in self._tensors]  # type: ignore[no-untyped-call]
        if any(pair.tangent is not None for pair in pairs):
            raise NotImplementedError(
                f"{self.name} has no forward-mode derivative (torch.autograd.forward_ad, "
                "torch.func.jvp), and its tangents would be lost. Call the library's function "
                "instead of torch.ops: it goes to torch, which has one"
            )

    def _no_backward(self, *_: object) -> None:
        raise NotImplementedError(
            f"{self.name} has no gradient: this library computes it forward only. Call it under "
            "torch.no_grad(), or on detached tensors"
        )


_kind = operator.attrgetter("shape", "dtype", "device")
"""Properties that tensors of calls must have in common for the calls to be run alike."""


def _picks(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that takes these out of a tuple."""
    first, count = (positions[0] if positions else 0), len(positions)
    if list(positions) == list(range(first, first + count)):
        return operator.itemgetter(slice(first, first + count))
    return operator.itemgetter(*positions)


class _Differentiable(torch.autograd.Function):
    """An operator's call that is to be differentiated.

    The last two arguments are the operator, and its keys or the call that is known already.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        *inputs, ctx.operator, how = args
        run = ctx.operator._launch if isinstance(how, Call) else ctx.operator._below_autograd  # noqa: SLF001
        result = run(how, inputs)
        if ctx.operator._setup_context is not None:  # noqa: SLF001
            ctx.operator._setup_context(ctx, inputs, result)  # noqa: SLF001
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = ctx.operator._backward(ctx, *grads)  # noqa: SLF001
        return (*found, None, None) if isinstance(found, tuple) else (found, None, None)


_apply = super(torch.autograd.Function, _Differentiable).apply
"""The core of its `apply` outside of torch.func, without 2 µs of checking for torch.func."""


def _free_namespace(namespace: str, name: str) -> str:
    """The namespace, or with a number where another copy of the library has defined the name."""
    wanted, number = namespace, 1
    while hasattr(getattr(torch.ops, wanted), name):
        number += 1
        wanted = f"{namespace}_{number}"
    return wanted
