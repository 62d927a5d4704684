"""FlashInfer-Bench's definitions and workloads as task folders."""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.plan import ITEMSIZE
from kagent_sandbox.data.task import load_task
from kagent_sandbox.errors import TaskError, UserError

from kagent.authoring.importers.flashinfer import cases, draws
from kagent.authoring.importers.flashinfer.exchange import (
    Definition,
    Tensor,
    Workload,
    read_definition,
    read_traces,
)
from kagent.authoring.importers.flashinfer.inputs import Inputs, Size, understand
from kagent.authoring.importers.widened_source import (
    definitions,
    random_calls,
    renamed_source,
    widened_source,
)
from kagent.authoring.proofs import declare_idle
from kagent.authoring.task_toml import task_toml

ENTRY = "run"  # as in the format, so that solutions are candidates as they stand
_MOST_MEASURED = 3e8
"""Elements of the inputs with which the reference is run to count its products."""
_FLOOR_WIDE = 1024.0
"""Machine epsilons of a float32 result of 16-bit inputs that a candidate may err by, 1.2e-4: less
than what rounding an intermediate to the inputs' dtype costs, more than approximate exponentials.
"""


@dataclass(frozen=True, slots=True)
class ImportedDefinition:
    """A definition that became a task folder.

    Attributes:
        name: The task's name.
        folder: Where it is.
        workloads: Number of workloads that were given.
        used: Number of them whose sizes fit together.
        left_out: Optional inputs that the task does without.
    """

    name: str
    folder: Path
    workloads: int
    used: int
    left_out: tuple[str, ...]


def import_definition(
    path: Path, workloads: Path | None, to: Path, *, force: bool = False
) -> ImportedDefinition:
    """Write a definition's task folder, named like it.

    Args:
        path: The definition.
        workloads: Its workloads, a line each.
        to: Folder of task folders.
        force: Whether an existing folder is overwritten.

    Raises:
        UserError: A file cannot be read, or the folder exists.
        TaskError: The definition cannot be a task; one line that says why.
    """
    definition = read_definition(path)
    loads = [t.workload for t in read_traces(workloads)] if workloads else []
    folder = to / task_name(definition.name)
    if folder.exists() and not force:
        raise UserError(f"{folder}: exists: remove it, or overwrite it with --force")
    _refuse(definition)
    inputs = understand(definition, loads)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reference.py").write_text(reference_py(inputs), encoding="utf-8")
    data = task_data(inputs, loads)
    (folder / "task.toml").write_text(task_toml(data), encoding="utf-8")
    _count_flops(inputs, folder, data)
    (folder / "task.toml").write_text(task_toml(data), encoding="utf-8")
    declare_idle(folder, data)
    used = len(cases.of_workloads(inputs, loads))
    return ImportedDefinition(data["name"], folder, len(loads), used, tuple(inputs.left_out))


def task_name(name: str) -> str:
    """A definition's name as a task may have it."""
    plain = re.sub(r"\W+", "_", name.lower()).strip("_")
    return plain if plain[:1].isalpha() else f"task_{plain}"


def _refuse(definition: Definition) -> None:
    """Refuse what no task can be, before anything else is found wrong with it.

    Raises:
        TaskError: Why.
    """
    name = definition.name
    try:
        drawn = random_calls(definition.reference)
    except SyntaxError as e:
        raise TaskError(f"{name}: reference: line {e.lineno}: {e.msg}") from None
    if drawn:
        raise TaskError(
            f"{name}: its reference draws random numbers ({', '.join(drawn)}): kagent holds "
            "results against one right answer. With the random numbers as an input it would work"
        )
    for which in ("inputs", "outputs"):
        for each, tensor in getattr(definition, which).items():
            if which == "outputs" and tensor.shape is None:
                raise TaskError(f"{name}: outputs.{each} is a number: results are tensors")
            if tensor.shape is not None and tensor.dtype not in ITEMSIZE:
                known = ", ".join(ITEMSIZE)
                raise TaskError(f"{name}: {which}.{each}: no dtype {tensor.dtype!r}: {known}")
            if not each.isidentifier():
                raise TaskError(f"{name}: {which}.{each}: no name that Python takes")


# -- reference.py ---------------------------------------------------------------------------------

_OURS = ("inputs", "reference", "eager", "experts", "reference_rows")


def reference_py(inputs: Inputs) -> str:
    """The text of reference.py.

    Raises:
        TaskError: The definition's reference is no Python.
    """
    definition = inputs.definition
    source, future, run = _own_source(definition)
    names = definitions(source)
    arguments = ", ".join(definition.inputs)
    dtype = _wide_dtype(inputs)
    wide = ", ".join(_widened(n, t, dtype) for n, t in definition.inputs.items())
    statements = inputs.statements()
    helpers = _helpers(statements)
    kinds = ["normal", "empty"] if inputs.sequences else ["normal"]
    lines = [
        f'"""{_in_docstring(definition.description or definition.name)}',
        "",
        f"Imported from FlashInfer-Bench's definition {definition.name}; `{run}` is its code.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        *(["import math"] if "math." in helpers else []),
        f"from collections.abc import Callable, Mapping{', Sequence' if helpers else ''}",
        "",
        "import torch",
        "",
        "",
        "def inputs(case, generator, device) -> dict[str, torch.Tensor]:",
        f'    """{_input_docstring(inputs)}"""',
        f"    if case.inputs not in {_texts(kinds)}:",
        f'        raise ValueError(f"inputs = {{case.inputs!r}}: use {" or ".join(kinds)}")',
    ]
    lines += [f'    {d} = int(case.dims["{d}"])' for d in inputs.dims]
    if any("least" in s for s in statements):
        lines.append('    first_is_empty = case.inputs == "empty"')
        lines.append("    least = 0 if first_is_empty else 1")
    lines += [
        "    t: dict[str, torch.Tensor] = {}",
        *(f"    {s}" for s in statements),
        "    return t",
        "",
        "",
        f"def reference({arguments}) -> tuple[torch.Tensor, ...]:",
        f'    """The definition\'s reference in {dtype}."""',
        f"    return _in_order({run}_{dtype}({wide}))",
        "",
        "",
        f"def eager({arguments}) -> tuple[torch.Tensor, ...]:",
        '    """The definition\'s reference as it stands."""',
        f"    return _in_order({run}({arguments}))",
        "",
        "",
        "def experts() -> Mapping[str, Callable[..., object]]:",
        '    """No library: add what users would call, by name."""',
        "    return {}",
        "",
        "",
        "def _in_order(results: object) -> tuple[torch.Tensor, ...]:",
        "    if isinstance(results, dict):",
        f"        return tuple(results[n] for n in {_texts(definition.outputs)})",
        "    return tuple(results) if isinstance(results, tuple | list) else (results,)",
        "",
        "",
        helpers,
        "",
        "# -- the definition's own code " + "-" * 66,
        "",
        source.strip(),
        "",
        "",
        f"# -- the same in {dtype} " + "-" * 72,
        "",
        "",
        widened_source(source, names, dtype),
        "",
    ]
    text = "\n".join(lines)
    return text if not future else text.replace("from __future__ import annotations", future, 1)


def _texts(names: Iterable[str]) -> str:
    """Texts as a tuple of Python, in double quotes."""
    quoted = [json.dumps(n) for n in names]
    return f"({', '.join(quoted)}{',' * (len(quoted) == 1)})"


def _own_source(definition: Definition) -> tuple[str, str, str]:
    """A definition's code without names that reference.py needs, its future imports, and the name
    of its entry.
    """
    source = definition.reference
    tree = ast.parse(source)
    ours = {*_OURS, "_in_order", *(f"_{n}" for n in _DRAWS)}
    taken = {n: f"{n}_own" for n in definitions(source) if n in ours}
    source = renamed_source(source, taken)
    futures = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    lines = source.splitlines()
    names = {"annotations"}
    for node in futures:
        names |= {a.name for a in node.names}
        lines[node.lineno - 1] = ""
    future = f"from __future__ import {', '.join(sorted(names))}" if len(names) > 1 else ""
    return "\n".join(lines), future, taken.get(ENTRY, ENTRY)


def _wide_dtype(inputs: Inputs) -> str:
    """Dtype that the reference computes in: float64, and float32 where all results have 16 bits and
    weights are so many that their copies in float64 do not fit into memory.
    """
    narrow = all(ITEMSIZE[t.dtype] <= 2 for t in inputs.definition.outputs.values())
    smallest = cases.at_point(inputs, cases.CHECK["one"])
    huge = cases.elements(inputs, smallest) >= cases.HUGE
    return "float32" if narrow and huge else "float64"


def _widened(name: str, tensor: Tensor, dtype: str) -> str:
    """An input as the widened reference gets it. 8-bit floats stay: torch computes with none, so
    the code itself widens them.
    """
    wide = tensor.shape is not None and tensor.dtype in ("float16", "bfloat16", "float32")
    return f"{name}.to(torch.{dtype})" if wide else name


def _input_docstring(inputs: Inputs) -> str:
    lines = ["Random tensors:", ""]
    lines += [f"{n}." for n in inputs.notes()]
    if inputs.sequences:
        lines += ["", 'Each sequence has a token at least; of "empty", the first one has none.']
    body = "\n    ".join(
        line for text in lines for line in (textwrap.wrap(text, 94) if text else [""])
    )
    return body.replace("\\", "/").replace('"""', "'''") + "\n    "


def _in_docstring(text: str) -> str:
    plain = " ".join(text.split()).replace("\\", "/").replace('"', "'")
    return "\n".join(textwrap.wrap(plain, 96))


_DRAWS = {
    n: f for n, f in vars(draws).items() if inspect.isfunction(f) and f.__module__ == draws.__name__
}


def _helpers(statements: Iterable[str]) -> str:
    """The functions of `draws` that statements call, with those that they call, private."""
    text = "\n".join(statements)
    wanted = [n for n in _DRAWS if re.search(rf"\b_{n}\(", text)]
    for name in wanted:
        body = inspect.getsource(_DRAWS[name])
        wanted += [n for n in _DRAWS if re.search(rf"\b{n}\(", body) and n not in wanted]
    names = {n: f"_{n}" for n in _DRAWS}
    parts = [renamed_source(inspect.getsource(f), names) for n, f in _DRAWS.items() if n in wanted]
    return "\n\n".join(p.rstrip() + "\n" for p in parts)


# -- task.toml ------------------------------------------------------------------------------------


def task_data(inputs: Inputs, workloads: Sequence[Workload]) -> dict[str, Any]:
    """The contents of task.toml, without a count of operations."""
    definition = inputs.definition
    chosen = cases.choose_cases(inputs, workloads)
    results = [_bytes(inputs, t) for t in definition.outputs.values()]
    moved = [*(_read_bytes(inputs, n, t) for n, t in inputs.tensors.items()), *results]
    return {
        "name": task_name(definition.name),
        "summary": " ".join((definition.description or definition.name).split()),
        "entry": ENTRY,
        "signature": _signature(inputs),
        "bytes": _added(moved),
        "written": _added(results),
        "flops": "0",
        "matrix": False,
        "constraints": chosen.constraints or None,
        "dims": inputs.dims,
        "arguments": [_argument(inputs, n, t) for n, t in definition.inputs.items()],
        "results": [_result(inputs, n, t) for n, t in definition.outputs.items()],
        "gpu": chosen.gpu,
        "cpu": chosen.cpu,
    }


def _argument(inputs: Inputs, name: str, tensor: Tensor) -> dict[str, Any]:
    if tensor.shape is None:
        return {"name": name, "value": inputs.scalars[name]}
    return {"name": name, "shape": list(inputs.shape(tensor)), "dtype": tensor.dtype}


def _result(inputs: Inputs, name: str, tensor: Tensor) -> dict[str, Any]:
    dtypes = {t.dtype for t in inputs.tensors.values()}
    narrow = any(ITEMSIZE[d] <= 2 and "float" in d for d in dtypes)
    floor = _FLOOR_WIDE if narrow and tensor.dtype == "float32" else 2.0
    shape = list(inputs.shape(tensor))
    return {"name": name, "shape": shape, "dtype": tensor.dtype, "k": 2.0, "floor": floor}


def _signature(inputs: Inputs) -> str:
    definition = inputs.definition

    def text(name: str, tensor: Tensor) -> str:
        if tensor.shape is None:
            return f"{name}: {re.sub(r'[0-9]+', '', tensor.dtype)}"
        axes = (f"{a}={inputs.sizes[a]}" if str(inputs.sizes[a]) != a else a for a in tensor.shape)
        return f"{name}: {tensor.dtype}[{', '.join(axes)}]"

    given = ", ".join(text(n, t) for n, t in definition.inputs.items())
    results = ", ".join(text(n, t) for n, t in definition.outputs.items())
    return f"{ENTRY}({given}) -> {f'({results})' if len(definition.outputs) > 1 else results}"


_Term: TypeAlias = tuple[int, tuple[str, ...]]
"""A number and formulas, to be multiplied."""


def _added(terms: Iterable[_Term]) -> str:
    """The formula of a sum; terms of equal formulas become one."""
    sums: dict[tuple[str, ...], int] = {}
    for number, formulas in terms:
        sums[formulas] = sums.get(formulas, 0) + number
    texts = [
        " * ".join([*([str(number)] if number != 1 or not formulas else []), *formulas])
        for formulas, number in sums.items()
    ]
    return " + ".join(texts) or "0"


def _term(sizes: Iterable[Size]) -> _Term:
    number, formulas = 1, []
    for size in sizes:
        if isinstance(size, int):
            number *= size
        else:
            plain = size.isidentifier() or size.startswith("min(")
            formulas.append(size if plain else f"({size})")
    return number, tuple(formulas)


def _bytes(inputs: Inputs, tensor: Tensor) -> _Term:
    return _term([ITEMSIZE[tensor.dtype], *inputs.shape(tensor)])


def _read_bytes(inputs: Inputs, name: str, tensor: Tensor) -> _Term:
    """The fewest bytes of an input that a call reads: of a cache, what numbers point at."""
    shape = tensor.shape or ()
    results = {a for t in inputs.definition.outputs.values() for a in t.shape or ()}
    pointing = [n for n in inputs.numbers if shape and n.pool == shape[0] and n.name != name]
    if pointing and shape[0] not in results:
        numbers = inputs.shape(inputs.tensors[pointing[0].name])
        count: Size = 1  # numbers of tokens may all be of one page, and of experts all be the same
        if pointing[0].per_place == 1 and len(numbers) == 1:
            count = f"min({numbers[0]}, {inputs.sizes[shape[0]]})"
        return _term([ITEMSIZE[tensor.dtype], count, *inputs.shape(tensor)[1:]])
    if len(shape) > 1 and "expert" in shape[0]:  # of which a call may need one alone
        return _term([ITEMSIZE[tensor.dtype], *inputs.shape(tensor)[1:]])
    return _bytes(inputs, tensor)


# -- operations -----------------------------------------------------------------------------------


def _count_flops(inputs: Inputs, folder: Path, data: dict[str, Any]) -> None:
    """Run the reference at some sizes, and find a formula for the operations of its matrix
    products: a number times powers of the dimensions. Without one, the count stays 0.

    Raises:
        TaskError: The reference fails, or writes to an input.
    """
    center = cases.at_point(inputs, cases.SequenceSizes(2, 16, 512))
    if cases.elements(inputs, center) > _MOST_MEASURED:
        return
    base = _products(inputs, folder, center)
    if not base:
        return
    powers: dict[str, int] = {}
    for dim in inputs.dims:
        if dim in inputs.choices:
            continue
        larger = {**center, dim: 2 * center[dim]}
        if not cases.fits(inputs, larger):
            return
        power = math.log2(max(1.0, _products(inputs, folder, larger)) / base)
        if abs(power - round(power)) > 0.3:
            return
        powers[dim] = round(power)
    factor = base / math.prod(center[d] ** p for d, p in powers.items())
    above = [d if p == 1 else f"{d} ** {p}" for d, p in powers.items() if p > 0]
    below = [d if p == -1 else f"{d} ** {-p}" for d, p in powers.items() if p < 0]
    data["flops"] = " / ".join([" * ".join([f"{_rounded(factor)}", *above]), *below])
    data["matrix"] = True


def _rounded(value: float) -> int:
    """A number in three digits, unless it is whole to begin with."""
    if abs(value - round(value)) < 1e-6 * value:
        return round(value)
    digits = 2 - math.floor(math.log10(value))
    return round(round(value, digits))


def _products(inputs: Inputs, folder: Path, dims: Mapping[str, int]) -> float:
    """Operations of the matrix products of the reference.

    Raises:
        TaskError: It fails, or writes to an input.
    """
    import torch
    from kagent_sandbox.judge.check.flop_counts import product_counter

    task = load_task(folder)
    module = task.reference()
    case = Case(name="counted", dtype=cases.case_dtype(inputs), **dims)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    name = inputs.definition.name
    try:
        tensors = module.inputs(case, generator, torch.device("cpu"))
        before = {n: t.clone() for n, t in tensors.items()}
        values = {a.name: getattr(a, "value", None) for a in build_case(task, case).arguments}
        scalars = {n: v for n, v in values.items() if n not in tensors}
        with product_counter() as counter:
            module.eager(**tensors, **scalars)
    except Exception as e:  # noqa: BLE001 - whatever a definition's code raises becomes one clear line
        text = " ".join(str(e).split())[:300]
        raise TaskError(
            f"{name}: its reference fails on drawn inputs: {type(e).__name__}: {text}"
        ) from None
    for key, tensor in tensors.items():
        pair = [t.reshape(-1).view(torch.uint8) for t in (tensor, before[key])]
        if not torch.equal(*pair):
            raise TaskError(
                f"{name}: its reference writes to its input {key}: a task's reference leaves "
                "inputs as they are: let it return the new values"
            )
    return float(counter.get_total_flops())
