"""A task as it is being made: its cases and tolerances, and the text of its two files."""

from __future__ import annotations

import functools
import json
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from kagent_sandbox.data.formula import evaluate
from torch.fx import Node

from kagent.authoring.choices import IndexResult, find_choices
from kagent.authoring.code import CodeWriter
from kagent.authoring.drawing import Drawing
from kagent.authoring.errors import AuthoringError
from kagent.authoring.operation import Example
from kagent.authoring.rounded import RoundedResult, find_rounded
from kagent.authoring.trace import TracedOperation

_WIDTH = 96
HALVES = (torch.float16, torch.bfloat16)
_LIBRARY = {
    "linear": ("aten::mm", "aten::addmm"),
    "matmul": ("aten::mm", "aten::bmm"),
    "mm": ("aten::mm",),
    "addmm": ("aten::mm", "aten::addmm"),
    "bmm": ("aten::bmm",),
    "baddbmm": ("aten::bmm", "aten::baddbmm"),
    "einsum": ("aten::mm", "aten::bmm"),
    "conv1d": ("aten::convolution",),
    "conv2d": ("aten::convolution",),
    "conv3d": ("aten::convolution",),
    "convolution": ("aten::convolution",),
    "conv_transpose1d": ("aten::convolution",),
    "conv_transpose2d": ("aten::convolution",),
    "conv_transpose3d": ("aten::convolution",),
}
"""Library calls that host code may make, by the function's operation."""
_VIEWS = frozenset({"view", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "slice"})


@dataclass(frozen=True)
class DraftCase:
    """A case: sizes, and what else differs from the plainest."""

    sizes: Mapping[str, int]
    dtype: str
    inputs: str = "normal"
    scale: float = 1.0
    noncontiguous: bool = False
    offset: int = 0
    words: str = ""

    def name(self, kind: str) -> str:
        """Name among the cases of one kind."""
        short = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
        size = "x".join(str(s) for s in self.sizes.values()) or "fixed"
        return "_".join(p for p in (kind, short.get(self.dtype, self.dtype), size, self.words) if p)


@dataclass(frozen=True)
class DraftGenerator:
    """A generator of hidden cases. `dims` are TOML values."""

    count: int
    fields: Mapping[str, Sequence[Any]]
    dims: Mapping[str, str]
    cost: str = ""
    least: float = 0.0
    most: float = 0.0


@dataclass(frozen=True)
class DraftKind:
    """The cases for one kind of device; `bench_words` is a comment on the benchmark's."""

    check: tuple[DraftCase, ...]
    bench: tuple[DraftCase, ...]
    hidden_check: tuple[DraftGenerator, ...] = ()
    hidden_bench: tuple[DraftGenerator, ...] = ()
    bench_words: str = ""


@dataclass(frozen=True)
class TaskDraft:
    """A task as it is being made.

    Attributes:
        trace: The operation.
        rows: Kinds of rows that `mixed` inputs have.
        nonfinite: Whether the operation is tried on infinities and NaN.
        gpu: Cases for GPUs.
        cpu: Cases for CPUs.
        k: Tolerance: times torch's own error.
        floor: Tolerance: machine epsilons beside that.
    """

    trace: TracedOperation
    gpu: DraftKind
    cpu: DraftKind
    rows: tuple[str, ...] = ()
    nonfinite: bool = False
    k: float = 3.0
    floor: float = 2.0
    notes: tuple[str, ...] = field(default=())

    def with_(self, **changes: Any) -> TaskDraft:
        """A copy with other values."""
        return replace(self, **changes)

    @property
    def arguments(self) -> list[Example]:
        """Tensors that results depend on."""
        return [self.trace.operation.examples[i] for i in self.trace.used]

    @property
    def varied(self) -> list[Example]:
        """Tensors that cases scale and give rows of several kinds."""
        return [
            e
            for e in self.arguments
            if e.dtype.is_floating_point and not e.parameter and e.shape and not e.drawing.flags
        ]

    @functools.cached_property
    def undecided(self) -> list[IndexResult | RoundedResult]:
        """Results of whole numbers of which torch, or rounding, decides between several."""
        if self.trace.written:
            return []
        graph = self.trace.graph
        return [*find_choices(graph), *find_rounded(graph)]

    # -- dtypes -----------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """The cases' dtype on a GPU: that of most floating-point inputs."""
        return case_dtype(self.trace)

    def declared(self, dtype: torch.dtype) -> str:
        """A dtype as task.toml has it."""
        return "$dtype" if dtype == self.dtype else plain(dtype)

    # -- task.toml --------------------------------------------------------------------------------

    def toml(self) -> str:
        """The text of task.toml."""
        trace, operation = self.trace, self.trace.operation
        lines = [
            f"name = {_text(operation.name)}",
            f"summary = {_text(operation.summary)}",
            f"entry = {_text(operation.name)}",
            f"signature = {_text(self._signature())}",
            f"bytes = {_text(self._bytes())}    # derived: every argument read once, every result "
            + ("written once; an index may need less" if trace.gathers else "written once"),
            f"written = {_text(self._written())}",
            f"flops = {_text(self._flops())}    # derived from torch's operations",
        ]
        if self.matrix:
            lines.append("matrix = true")
        if self.undecided:
            lines.append("accept = true    # other indices, or numbers, are as right at times")
        allow = self._allow()
        if allow:
            lines.append(f"allow = [{', '.join(map(_text, allow))}]")
        lines += [
            "",
            f"# Made from {operation.origin}.",
            *(f"# {note}" for note in (*operation.notes, *trace.notes, *self.notes)),
            "",
            "[dims]",
            *(f"{n} = {_text(self._meaning(n))}" for n in trace.dims),
        ]
        for i in trace.used:
            example = operation.examples[i]
            lines += ["", "[[arguments]]", f"name = {_text(example.name)}"]
            lines.append(f"shape = {_shape(trace.shapes[i])}")
            if self.declared(example.dtype) != "$dtype":
                lines.append(f"dtype = {_text(plain(example.dtype))}")
            if i in trace.written:
                lines.append(f"writes = {{ {', '.join(self._tolerance(trace.shapes[i]))} }}")
        for name, value in operation.numbers.items():
            lines += ["", "[[arguments]]", f"name = {_text(name)}"]
            lines.append(f"value = {json.dumps(value)}")
        for result in trace.results:
            lines += ["", "[[results]]", f"name = {_text(result.name)}"]
            lines.append(f"shape = {_shape(result.shape)}")
            if self.declared(result.dtype) != "$dtype":
                lines.append(f"dtype = {_text(plain(result.dtype))}")
            lines += self._tolerance(result.shape)
        for kind, cases in (("gpu", self.gpu), ("cpu", self.cpu)):
            lines += ["", f"# {kind.upper()}"]
            for case in cases.check:
                lines += ["", f"[[{kind}.check]]", *self._case(kind, case)]
            if cases.bench_words:
                lines += ["", f"# {cases.bench_words}"]
            for case in cases.bench:
                lines += ["", f"[[{kind}.bench]]", *self._case(f"{kind}_bench", case)]
            for key, generators in (
                ("hidden_check", cases.hidden_check),
                ("hidden_bench", cases.hidden_bench),
            ):
                for generator in generators:
                    lines += ["", f"[[{kind}.{key}]]", *_generator(generator)]
        return "\n".join(lines) + "\n"

    @property
    def matrix(self) -> bool:
        """Whether most of its operations are matrix products."""
        dims = self.trace.dims
        return evaluate(self.trace.products, dims) > evaluate(self.trace.elements, dims)

    def _tolerance(self, shape: Sequence[int | str]) -> list[str]:
        """Tolerance of a result of such a shape, as task.toml has it."""
        rows = self._row_dims(shape)
        found = [f"k = {self.k}", f"floor = {self.floor}"]
        return [*found, f"row_dims = {rows}"] if rows != 1 else found

    def _signature(self) -> str:
        trace, operation = self.trace, self.trace.operation
        parts = [
            f"{operation.examples[i].name}: Tensor{_brackets(trace.shapes[i])}" for i in trace.used
        ]
        parts += [f"{n}: {type(v).__name__}" for n, v in operation.numbers.items()]
        results = [f"Tensor{_brackets(r.shape)}" for r in trace.results]
        result = results[0] if len(results) == 1 else f"({', '.join(results)})"
        result = result if results else "None"
        return f"{operation.name}({', '.join(parts)}) -> {result}"

    def _bytes(self) -> str:
        trace = self.trace
        tensors = [(trace.shapes[i], trace.operation.examples[i].dtype) for i in trace.used]
        return self._size([*tensors, *((r.shape, r.dtype) for r in trace.compared)])

    def _written(self) -> str:
        return self._size([(r.shape, r.dtype) for r in self.trace.compared])

    def _size(self, tensors: Sequence[tuple[Sequence[int | str], torch.dtype]]) -> str:
        """Bytes of tensors, as a formula."""
        parts: dict[str, dict[str, int]] = {}
        for shape, dtype in tensors:
            unit = "itemsize" if dtype == self.dtype else str(dtype.itemsize)
            number, names = 1, []
            for size in shape:
                if isinstance(size, int):
                    number *= size
                else:
                    names.append(size if size.isidentifier() else f"({size})")
            products = parts.setdefault(unit, {})
            key = " * ".join(names)
            products[key] = products.get(key, 0) + number
        texts = []
        for unit, products in parts.items():
            terms = [
                " * ".join(p for p in (str(n) if n > 1 or not key else "", key) if p)
                for key, n in products.items()
                if n
            ]
            total = " + ".join(terms) or "0"
            texts.append(f"({total}) * {unit}" if len(terms) > 1 else f"{total} * {unit}")
        return " + ".join(texts) or "0"

    def _flops(self) -> str:
        parts = [p for p in (self.trace.products, self.trace.elements) if p != "0"]
        return " + ".join(parts) or "0"

    def _allow(self) -> list[str]:
        """Products that host code may leave to a library, if there is something else to do."""
        called = [
            n.target.overloadpacket.__name__
            for n in self.trace.graph.graph.nodes
            if isinstance(n.target, torch._ops.OpOverload)  # noqa: SLF001 - torch's own name
        ]
        others = [c for c in called if c not in _LIBRARY and c not in _VIEWS and "sym" not in c]
        found = [a for c in called for a in _LIBRARY.get(c, ())]
        return list(dict.fromkeys(found)) if others else []

    def _meaning(self, name: str) -> str:
        """Text that says which argument a dimension is read from."""
        for i in self.trace.used:
            for d, size in enumerate(self.trace.shapes[i]):
                if size == name:
                    return f"dimension {d} of {self.trace.operation.examples[i].name}"
        return "a size"

    def _row_dims(self, shape: Sequence[int | str]) -> int:
        """Trailing dimensions that make a row of some length; 0 for the whole."""
        width = 1
        sizes = self.trace.sizes(shape, self.trace.dims)
        for count, size in enumerate(reversed(sizes), 1):
            width *= size
            if width >= 32:
                return count
        return 0

    def _case(self, kind: str, case: DraftCase) -> list[str]:
        lines = [f"name = {_text(case.name(kind))}", f"dtype = {_text(case.dtype)}"]
        if case.inputs != "normal":
            lines.append(f"inputs = {_text(case.inputs)}")
        if case.scale != 1.0:
            lines.append(f"scale = {case.scale}")
        if case.noncontiguous:
            lines.append("noncontiguous = true")
        if case.offset:
            lines.append(f"offset = {case.offset}")
        return [*lines, *(f"{n} = {s}" for n, s in case.sizes.items())]

    # -- reference.py -----------------------------------------------------------------------------

    def reference(self) -> str:
        """The text of reference.py.

        Raises:
            AuthoringError: The operation cannot be written down.
        """
        arguments = self.arguments
        numbers = self.trace.operation.numbers
        names = [e.name for e in arguments]
        typed = [f"{n}: torch.Tensor" for n in names]
        typed += [f"{n}: {type(v).__name__}" for n, v in numbers.items()]
        lines, results = self._code()
        written = [self.trace.operation.examples[i] for i in self.trace.written]
        wide = [
            f"        {e.name}={e.name}.double(),"
            if e.dtype.is_floating_point and e not in written
            else f"        {e.name}={e.name},"
            for e in arguments
        ]
        wide += [f"        {n}={n}," for n in numbers]
        copies = [
            f"    {e.name} = {e.name}.to(torch.float64, copy=True)"
            if e.dtype.is_floating_point
            else f"    {e.name} = {e.name}.clone()"
            for e in written
        ]
        left = [e.name for e in written]
        returned = [f"result_{i}" for i in range(len(results))] if written else []
        while set(returned) & set(names):
            returned = [f"{r}_" for r in returned]
        call = f"{', '.join(returned)} = " if returned else "" if written else "return "
        tail = [f"    return {', '.join((*returned, *left))}"] if written else []
        rule = self._rule(typed, wide) if self.undecided else []
        text = "\n".join(
            [
                f'"""{_doc(self.trace.operation.summary)}.',
                "",
                f"Made from {_doc(self.trace.operation.origin)} by running it on",
                "symbolic tensors: inputs, float64 reference, torch's own implementation.",
                '"""',
                "",
                "from __future__ import annotations",
                "",
                "import math  # noqa: F401 - sizes may need it",
                "from collections.abc import Callable, Mapping",
                "from typing import TYPE_CHECKING",
                "",
                "import torch",
                "",
                "if TYPE_CHECKING:",
                "    from kagent_sandbox.data.task import Case",
                "",
                "aten = torch.ops.aten",
                "",
                "",
                *self._inputs(),
                "",
                "",
                *_broken(
                    "def reference(", ["*", *typed], f") -> {_kind(len(self.trace.compared))}:"
                ),
                '    """The same operations in float64."""',
                *copies,
                f"    {call}eager(",
                *wide,
                "    )",
                *tail,
                "",
                "",
                *_broken("def eager(", ["*", *typed], f") -> {_kind(len(results))}:"),
                '    """The operations of torch that the function came down to."""',
                *(f"    {line}" for line in lines),
                *([f"    return {', '.join(results)}"] if results else []),
                "",
                "",
                *rule,
                "def experts() -> Mapping[str, Callable[..., object]]:",
                '    """None. Libraries that compute the same become further baselines here."""',
                "    return {}",
            ]
        )
        return text + "\n"

    def _rule(self, typed: Sequence[str], wide: Sequence[str]) -> list[str]:
        """Lines of the rules that accept other indices and numbers, and of what they come from.

        Args:
            typed: Parameters of `eager`.
            wide: Its arguments in the call by `reference`, a line each.
        """
        names = [t.partition(":")[0] for t in typed]
        lines, values = self._code(*(c.values for c in self.undecided))
        body = [f"    {line}" for line in lines]
        found = {c.result: c.mask(i) for i, c in enumerate(self.undecided)}
        masks = [found.get(i, "False") for i in range(len(self.trace.results))]
        rules = dict.fromkeys(c.RULE for c in self.undecided)
        parameters = ["results: tuple[torch.Tensor, ...]", "expected: tuple[torch.Tensor, ...]"]
        return [
            f"K, FLOOR = {self.k}, {self.floor}  # as in task.toml",
            *"\n".join(rules).splitlines(),
            "",
            "",
            *_broken("def _decided_by(", ["*", *typed], ") -> tuple[torch.Tensor, ...]:"),
            '    """Values that indices point into, and values that were rounded."""',
            *body,
            f"    return ({', '.join(values)},)",
            "",
            "",
            *_broken(
                "def accept(", [*parameters, "*", *typed], ") -> tuple[torch.Tensor | bool, ...]:"
            ),
            '    """Any index of an equal value is right, and near a tie the number beside."""',
            "    exact = _decided_by(",
            *wide,
            "    )",
            *(
                f"    {x}"
                for x in _broken("rounded = _decided_by(", [f"{n}={n}" for n in names], ")")
            ),
            *(
                f"    {x}"
                for x in _broken("return (", masks if len(masks) > 1 else [f"{masks[0]},"], ")")
            ),
            "",
            "",
        ]

    def _code(self, *wanted: Node) -> tuple[list[str], list[str]]:
        """Lines of the operation, and the names of its results; or of nodes that it computes."""
        trace = self.trace
        placeholders = [n for n in trace.graph.graph.nodes if n.op == "placeholder"]
        examples = trace.operation.examples
        names = {p.name: e.name for p, e in zip(placeholders, examples, strict=True)}
        floats = [e for e in self.arguments if e.dtype.is_floating_point]
        anchor = next((e.name for e in floats if e.dtype == self.dtype), None)
        anchor = anchor or (floats[0].name if floats else None)

        def dtype(value: torch.dtype) -> str:
            # In the reference's float64 all others are float64, too.
            if anchor is None or not value.is_floating_point or value.itemsize == 1:
                return str(value)
            if value == self.dtype and value in HALVES:
                return f"{anchor}.dtype"
            return f"torch.promote_types({anchor}.dtype, {value})"

        writer = CodeWriter(
            trace.graph,
            names=names,
            taken={*trace.dims, *trace.operation.numbers, "aten", "torch", "math"},
            size=trace.text,
            device=f"{self.arguments[0].name}.device",
            dtype=dtype,
        )
        lines = list(writer.lines(*wanted))
        (output,) = (n for n in trace.graph.graph.nodes if n.op == "output")
        results = [writer.name_of(n) for n in wanted or output.args[0]]
        return [*self._sizes_of(lines), *lines], results

    def _sizes_of(self, lines: Sequence[str]) -> list[str]:
        """Lines that take the dimensions from the arguments' shapes, those that are used."""
        text = " ".join(lines)
        found = []
        for name in self.trace.dims:
            if re.search(rf"\b{name}\b", text) is None:
                continue
            i, d = next(
                (i, shape.index(name))
                for i, shape in enumerate(self.trace.shapes)
                if i in self.trace.used and name in shape
            )
            found.append(f"{name} = {self.trace.operation.examples[i].name}.shape[{d}]")
        return found

    def _inputs(self) -> list[str]:
        trace = self.trace
        lines, words, varied = [], [], []
        for i in trace.used:
            example = trace.operation.examples[i]
            shape = _python_shape(trace.shapes[i])
            drawing = example.drawing
            lines += self._draw(example, drawing, shape, trace.shapes[i])
            words.append(f"{example.name} {drawing.words()}")
            if example in self.varied:
                varied.append(example.name)
                lines.append(f"{example.name} = _varied({example.name}, case, generator)")
        pairs = [f"{json.dumps(e.name)}: {e.name}" for e in self.arguments]
        doc = [
            "Draw the arguments of a call.",
            "",
            *_wrapped(f"Distributions: `normal` draws as the example does: {'; '.join(words)}."),
        ]
        if varied:
            doc += _wrapped(
                f"The case's scale multiplies {', '.join(varied)}. " + self._row_words()
            )
        whole = " ".join(lines)
        body = [f'{n} = int(case.dims["{n}"])' for n in trace.dims]
        body += ["dtype = getattr(torch, case.dtype)"] if "dtype" in whole else []
        found = [
            "def inputs(",
            "    case: Case, generator: torch.Generator, device: torch.device",
            ") -> dict[str, torch.Tensor]:",
            f'    """{doc[0]}',
            *(f"    {line}".rstrip() for line in doc[1:]),
            '    """',
            *(f"    {line}" for line in (*body, *lines)),
            *(f"    {line}" for line in _broken("return {", pairs, "}")),
        ]
        if varied:
            found += ["", "", *self._varied()]
        return found

    def _row_words(self) -> str:
        if not self.rows:
            return ""
        kinds = {
            "constant": "one value",
            "tiny": "times 0.001",
            "large": "times 8",
            "spiked": "one element times 100",
            "zeros": "0",
        }
        each = "; ".join(f"`{r}` ({kinds[r]})" for r in self.rows)
        text = f"Of these, each row of the last dimension is {each}; `mixed` has rows of all kinds."
        if self.nonfinite:
            text += " `nonfinite` has rows with +inf, -inf or NaN somewhere, too."
        return text

    def _varied(self) -> list[str]:
        rows = ("given", *self.rows)
        return [
            f"ROWS = ({', '.join(map(_text, rows))}{',' if len(rows) == 1 else ''})",
            'NONFINITE = ("inf", "-inf", "nan")',
            "",
            "",
            "def _varied(x: torch.Tensor, case: Case, generator: torch.Generator) -> torch.Tensor:",
            '    """Scale a tensor, and make its rows of the case\'s kinds."""',
            "    if case.scale != 1.0:",
            "        x = x * case.scale",
            '    if case.inputs == "normal":',
            "        return x",
            '    several = {"mixed": ROWS, "nonfinite": (*ROWS, *NONFINITE)}',
            "    names = several.get(case.inputs, (case.inputs,))",
            '    every = {"given", "constant", "tiny", "large", "spiked", "zeros", *NONFINITE}',
            "    if not every.issuperset(names):",
            '        raise ValueError(f"no distribution {case.inputs!r} here")',
            "    rows = x.reshape(-1, x.shape[-1])",
            "    n, columns = rows.shape",
            "    order = torch.randperm(n, generator=generator, device=x.device)",
            "    kind = (order % len(names)).unsqueeze(1)",
            "    at = torch.randint(columns, (n, 1), generator=generator, device=x.device)",
            "    one = torch.arange(columns, device=x.device) == at",
            "    for i, name in enumerate(names):",
            '        if name == "constant":',
            "            changed = rows[:, :1].expand_as(rows)",
            '        elif name in ("tiny", "large", "zeros"):',
            '            changed = rows * {"tiny": 1e-3, "large": 8.0, "zeros": 0.0}[name]',
            '        elif name == "spiked":',
            "            changed = torch.where(one, rows * 100.0, rows)",
            "        elif name in NONFINITE:",
            "            changed = rows.masked_fill(one, float(name))",
            "        else:",
            "            continue",
            "        rows = torch.where(kind == i, changed, rows)",
            "    return rows.reshape(x.shape)",
        ]

    def _draw(
        self, example: Example, drawing: Drawing, shape: str, formulas: Sequence[int | str]
    ) -> list[str]:
        """Lines that draw one argument into a variable of its name."""
        name, own = example.name, example.dtype
        dtype = "dtype" if own == self.dtype else str(own)
        direct = own.is_floating_point and own.itemsize > 1
        made = f"torch.empty({shape}, dtype={dtype if direct else 'torch.float32'}, device=device)"
        a, b = drawing.a, drawing.b
        if drawing.kind in ("uniform", "normal"):  # in place: every timed execution draws anew
            lines = [f"{name} = {made}"]
            lines.append(f"{name}.{drawing.kind}_({a!r}, {b!r}, generator=generator)")
            return lines if direct else [*lines, f"{name} = {name}.to({dtype})"]
        if drawing.kind == "integers":
            high = self._high(example, int(b))
            return [
                f"{name} = torch.randint({int(a)}, {high}, {shape}, generator=generator, "
                f"device=device, dtype={dtype})"
            ]
        if drawing.kind == "chance":
            return [
                f"{name} = (torch.rand({shape}, generator=generator, device=device) < {a!r})"
                f".to({dtype})"
            ]
        if drawing.kind in ("lower", "upper"):
            side = "tril" if drawing.kind == "lower" else "triu"
            ones = f"torch.ones({shape}, dtype=torch.bool, device=device).{side}()"
            made = f"torch.where({ones}, {_number(a)}, {_number(b)})"
            return [f"{name} = {made}.to({dtype})"]
        if drawing.kind == "counted":
            size = shape.strip("(),").split(", ")[-1]
            made = f"{a!r} + {b!r} * torch.arange({size}, device=device)"
            return [f"{name} = ({made}).reshape({shape}).to({dtype})"]
        return self._recorded(example, drawing, formulas, dtype)

    def draws(self, i: int, sizes: Mapping[str, int]) -> torch.Tensor:
        """Draw the operation's i-th tensor at other sizes, as the task will."""
        example, formulas = self.trace.operation.examples[i], self.trace.shapes[i]
        lines = self._draw(example, example.drawing, _python_shape(formulas), formulas)
        device = torch.device("cpu")
        space: dict[str, Any] = {"torch": torch, "aten": torch.ops.aten, "math": math, **sizes}
        space |= {"device": device, "dtype": self.dtype, "generator": torch.Generator(device)}
        exec("\n".join(lines), space)  # noqa: S102 - the code of the user's own example
        drawn: torch.Tensor = space[example.name]
        return drawn

    def _high(self, example: Example, high: int) -> str:
        """The end of a range of integers: a dimension, where it is one's size in the example."""
        sizes = {s: n for n, s in self.trace.dims.items()}
        near = [n for n, s in self.trace.dims.items() if s >= high > 0.9 * s > 1]
        own = self.trace.shapes[self.trace.operation.examples.index(example)]
        near = [n for n in near if n not in own] or near
        return sizes.get(high, near[0] if near else str(high))

    def _recorded(
        self, example: Example, drawing: Drawing, formulas: Sequence[int | str], dtype: str
    ) -> list[str]:
        """Lines of what was recorded, with the case's sizes for the example's."""
        assert drawing.graph is not None
        assert drawing.node is not None
        by_value = {n: f for n, f in zip(example.shape, formulas, strict=True) if n > 1}

        def sizes(values: Sequence[int]) -> str:
            """Write sizes as formulas of the argument's, at the same place or anywhere."""
            same = len(values) == len(example.shape)
            found = [
                formulas[d] if same and v == example.shape[d] else by_value.get(v, v)
                for d, v in enumerate(values)
            ]
            return f"[{', '.join(map(str, found))}]"

        writer = CodeWriter(
            drawing.graph,
            names={},
            taken={*self.trace.dims, *(e.name for e in self.trace.operation.examples), "dtype"},
            size=str,
            sizes=sizes,
            count=lambda n: str(by_value.get(n, n)),
            device="device",
            dtype=str,
            generator="generator",
        )
        lines = list(writer.lines(drawing.node))
        return [*lines, f"{example.name} = {writer.name_of(drawing.node)}.to({dtype})"]


def case_dtype(trace: TracedOperation) -> torch.dtype:
    """The dtype of most floating-point inputs; float32 where there is none."""
    used = [trace.operation.examples[i] for i in trace.used]
    floats = [e for e in used if e.dtype.is_floating_point and e.dtype.itemsize > 1]
    floats = [e for e in floats if not e.parameter] or floats
    found = [e.dtype for e in floats]
    return max(found, key=found.count) if found else torch.float32


def plain(dtype: torch.dtype) -> str:
    """A dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def _kind(results: int) -> str:
    """Type of a function with so many results."""
    return {0: "None", 1: "torch.Tensor"}.get(results, "tuple[torch.Tensor, ...]")


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _doc(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"""', "'''")


def _number(value: float) -> str:
    return repr(value) if value == value and abs(value) < float("inf") else f'float("{value}")'


def _shape(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(_text(s) if isinstance(s, str) else str(s) for s in shape)}]"


def _brackets(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _python_shape(shape: Sequence[int | str]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(_doc(" ".join(text.split())), 96)


def _broken(begin: str, parts: Sequence[str], end: str) -> list[str]:
    """Parts between brackets, one a line where they are too long for one."""
    line = f"{begin}{', '.join(parts)}{end}"
    if len(line) <= _WIDTH:
        return [line]
    return [begin, *(f"    {p}," for p in parts), end]


def _generator(generator: DraftGenerator) -> list[str]:
    lines = [f"count = {generator.count}"]
    lines += [f"{key} = {json.dumps(list(values))}" for key, values in generator.fields.items()]
    dims = ", ".join(f"{n} = {v}" for n, v in generator.dims.items())
    lines.append(f"dims = {{ {dims} }}" if dims else "dims = {}")
    if generator.cost:
        lines += [f"cost = {_text(generator.cost)}"]
        lines += [f"least = {generator.least:.0f}"] if generator.least else []
        lines.append(f"most = {generator.most:.0f}")
    return lines


def require_writable(draft: TaskDraft) -> None:
    """Make sure that the operation can be written down.

    Raises:
        AuthoringError: It cannot.
    """
    if not draft.arguments:
        raise AuthoringError("no result depends on a tensor")
    draft.reference()
