"""KernelBench-Hard's problems as task folders.

A problem is a folder: reference.py with `Model`, `get_inputs`, `get_init_inputs` and sizes as
globals; shapes.py with `SHAPES`, values of those; problem.yaml with formulas of its cost. The
parameters and buffers of the model become arguments behind those of its `forward`. Where `run`
draws the inputs itself, and calls the model step by step, one step is the task (`step_of_run`).
"""

from __future__ import annotations

import ast
import itertools
import math
import re
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kagent_sandbox.data.case import Case
from kagent_sandbox.data.formula import evaluate
from kagent_sandbox.data.plan import ITEMSIZE
from kagent_sandbox.errors import TaskError, UserError

from kagent.authoring.importers.kernelbench_hard.hidden_shapes import (
    hidden_generators,
    needed_divisors,
)
from kagent.authoring.importers.kernelbench_hard.step_of_run import step_of_run
from kagent.authoring.importers.widened_source import definitions, renamed_source, widened_source
from kagent.authoring.new_task import make_task
from kagent.authoring.proofs import declare_idle
from kagent.authoring.task_toml import task_toml
from kagent.search.text_edits import EditableText, TextEdit

if TYPE_CHECKING:
    import torch

Size = int | str
Shape = dict[str, int]
T = TypeVar("T")

_CAPS = (64, 128, 256)
"""Sizes are cut to the first of these with which the model runs."""
_MOST_BYTES = 2**28
"""Arguments and results of a hidden case that is tried, at most."""
_OURS = (
    "inputs",
    "reference",
    "eager",
    "experts",
    "reference_rows",
    "_forward",
    "_built",
    "_sizes",
)
_RESERVED = {*Case.model_fields, "itemsize"}


@dataclass
class _Run:
    """Arguments and results of a model for one shape."""

    given: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    results: list[torch.Tensor]


@dataclass
class _Problem:
    """A problem, read and run at small sizes."""

    folder: Path
    source: str
    shapes: list[Shape]
    knobs: dict[str, str]  # dimension -> global of reference.py
    flops: str
    bytes: str
    title: str
    step_sizes: Shape = field(default_factory=dict)  # of `run`, where that draws the inputs
    small: dict[str, Shape] = field(default_factory=dict)
    runs: list[tuple[Shape, _Run]] = field(default_factory=list)
    matrix: bool = False


def find_problems(folder: Path) -> list[Path]:
    """Find the problems below a folder, or the one that it is.

    Raises:
        UserError: There is none.
    """
    found = sorted(
        p.parent for p in folder.rglob("shapes.py") if (p.parent / "reference.py").is_file()
    )
    if not found:
        raise UserError(
            f"{folder}: no problem of KernelBench-Hard there: a folder with reference.py and "
            "shapes.py was expected, or one that holds such folders"
        )
    return found


def import_problem(folder: Path, to: Path, *, force: bool = False) -> Path:
    """Write a problem's task folder, named like it.

    Args:
        folder: The problem.
        to: Folder of task folders.
        force: Whether an existing folder is overwritten.

    Returns:
        The task folder.

    Raises:
        UserError: The folder exists.
        TaskError: The problem cannot be a task; one line that says why.
    """
    name = re.sub(r"\W+", "_", folder.name.lower()).strip("_")
    name = name if name[:1].isalpha() else f"kbh_{name}"
    target = to / name
    if target.exists() and not force:
        raise UserError(f"{target}: exists: remove it, or overwrite it with --force")
    problem = _read(folder)
    if problem.step_sizes:
        return _import_step(problem, target)
    _run_small(problem)
    data = _task_data(problem, name)
    text = _reference_py(problem, data)
    target.mkdir(parents=True, exist_ok=True)
    (target / "reference.py").write_text(text, encoding="utf-8")
    (target / "task.toml").write_text(task_toml(data), encoding="utf-8")
    declare_idle(target, data)
    return target


def _import_step(problem: _Problem, target: Path) -> Path:
    """Write the task of one step of a problem's `run`. Other files of the folder stay."""
    path = problem.folder / "reference.py"
    names = _executed(path, problem.source)
    operation = step_of_run(path, names, problem.step_sizes, target.name)
    return make_task(operation, target, seeds=False, force=True).folder


# -- reading and running --------------------------------------------------------------------------


def _read(folder: Path) -> _Problem:
    source = (folder / "reference.py").read_text(encoding="utf-8")
    shapes: dict[str, Any] = {}
    _execute(folder / "shapes.py", (folder / "shapes.py").read_text(encoding="utf-8"), shapes)
    yaml = folder / "problem.yaml"
    text = yaml.read_text(encoding="utf-8") if yaml.is_file() else ""
    found = [dict(s) for s in shapes.get("SHAPES", ())]
    if not found:
        raise TaskError(f"{folder / 'shapes.py'}: no SHAPES")
    names = _globals(source)
    knobs = {k: next((g for g in (k, k.upper()) if g in names), "") for k in found[0]}
    steps: Shape = {}
    if not all(knobs.values()) or _returns_nothing(source):
        if "run" not in definitions(source):
            raise TaskError(
                f"{folder / 'reference.py'}: its inputs are no arguments of Model.forward, and no "
                "run() draws them: write a task by hand (docs/tasks.md)"
            )
        each = shapes.get("CHECK_SHAPES") or found
        steps = dict(min(each, key=lambda s: math.prod(s.values())))
    return _Problem(
        folder,
        _without_seeds(source),
        found,
        knobs,
        _setting(text, "flops_formula"),
        _setting(text, "bytes_formula"),
        _setting(text, "display_name") or folder.name,
        steps,
    )


def _globals(source: str) -> set[str]:
    """Names that a module assigns at its top."""
    targets = [t for n in ast.parse(source).body if isinstance(n, ast.Assign) for t in n.targets]
    return {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}


def _returns_nothing(source: str) -> bool:
    """Whether get_inputs returns an empty list."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == "get_inputs":
            returned = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
            return all(isinstance(r, ast.List) and not r.elts for r in returned)
    return True


def _setting(yaml: str, key: str) -> str:
    """A text of problem.yaml."""
    found = re.search(rf'^{key}:\s*"([^"]*)"', yaml, re.MULTILINE)
    return found[1] if found else ""


def _without_seeds(source: str) -> str:
    """Source that leaves torch's seed as it is: the judge draws inputs from seeds of its own."""
    text = EditableText(source)
    edits = [
        TextEdit(*text.span(n.func), "_keep_seed")
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.Call) and ast.unparse(n.func) == "torch.manual_seed"
    ]
    return text.apply(edits)


def _execute(path: Path, source: str, names: dict[str, Any]) -> None:
    """Run a file of a problem.

    Raises:
        TaskError: It fails; one line that names it.
    """
    try:
        exec(compile(source, str(path), "exec"), names)  # noqa: S102 - the user's own file
    except ModuleNotFoundError as e:
        raise TaskError(f"{path}: it imports {e.name}: pip install {e.name}") from None
    except Exception as e:  # noqa: BLE001 - whatever it raises becomes one clear line
        raise TaskError(f"{path}: {type(e).__name__}: {' '.join(str(e).split())[:300]}") from None


def _executed(path: Path, source: str) -> dict[str, Any]:
    """Run a problem's reference.py without its seeds, and return the names that it defines."""
    module = types.ModuleType("kagent_problem")
    sys.modules[module.__name__] = module
    module.__dict__["_keep_seed"] = lambda _seed: None
    _execute(path, source, module.__dict__)
    return module.__dict__


def _run(problem: _Problem, shape: Shape) -> _Run:
    """Run the model on inputs of its own at some sizes."""
    import torch

    names = _executed(problem.folder / "reference.py", problem.source)
    names.update({problem.knobs[k]: v for k, v in shape.items()})
    with torch.no_grad():
        model = names["Model"](*names["get_init_inputs"]()).eval()
        tensors = list(names["get_inputs"]())
        results = model(*tensors)
    code = model.forward.__code__
    given = dict(zip(code.co_varnames[1 : code.co_argcount], tensors, strict=False))
    state = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
    used = {n: t for n, t in state.items() if _is_used(problem.source, n)}
    results = results if isinstance(results, tuple | list) else (results,)
    return _Run(given, used, list(results))


def _is_used(source: str, name: str) -> bool:
    """Whether code reads a parameter or buffer: some are there to be saved alone."""
    return any(
        isinstance(n, ast.Attribute)
        and n.attr == name.split(".")[-1]
        and isinstance(n.ctx, ast.Load)
        for n in ast.walk(ast.parse(source))
    )


def _run_small(problem: _Problem) -> None:
    """Run the model at small sizes: even ones, odd ones, and with each size doubled. A size that
    must stay even may come in steps, such as chunks of a sequence, of which the small one may be
    the first: `long` has such sizes tripled together, since what is carried from step to step, and
    what becomes of it on the way, shows in the third. A size that is tripled alone must run, too:
    otherwise it needs another that is, as the steps' own size would, of which there were one again.

    Raises:
        TaskError: It runs at none.
    """
    from kagent_sandbox.judge.check.flop_counts import product_counter

    failure = ""
    for cap in _CAPS:
        small = {k: min(v, cap) for k, v in problem.shapes[0].items()}
        try:
            with product_counter() as counter:
                run = _run(problem, small)
        except Exception as e:  # noqa: BLE001 - sizes that do not fit
            failure = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
            continue
        problem.matrix = counter.get_total_flops() > 0
        problem.small, problem.runs = {"small": small}, [(small, run)]
        break
    else:
        raise TaskError(f"{problem.folder / 'reference.py'}: runs at no small sizes: {failure}")
    odd = long = small
    for knob in small:
        _try(problem, {**small, knob: 2 * small[knob]})
        changed = {**odd, knob: small[knob] * 3 // 4 | 1}
        if changed != odd and _try(problem, changed):
            odd = changed
        else:
            alone, longer = ({**s, knob: 3 * s[knob]} for s in (small, long))
            if _try(problem, alone) and (longer == alone or _try(problem, longer)):
                long = longer
    found = {"odd": odd, "long": long}
    problem.small |= {name: shape for name, shape in found.items() if shape != small}


def _try(problem: _Problem, shape: Shape) -> bool:
    try:
        problem.runs.append((shape, _run(problem, shape)))
    except Exception:  # noqa: BLE001 - sizes that do not fit
        return False
    return True


# -- sizes ----------------------------------------------------------------------------------------


def _fit(values: Sequence[int], shapes: Sequence[Shape]) -> Size | None:
    """A number or formula over the dimensions that has some values; None if there is none."""
    if len(set(values)) == 1:
        return values[0]
    dims = list(shapes[0])
    numbers = (1, 2, 4, 8, 16, 32, 64, 128)
    found: Iterable[str] = itertools.chain(
        dims,
        (f"{a} * {b}" for a, b in itertools.combinations(dims, 2)),
        (f"{a} + 1" for a in dims),
        (f"{n} * {a}" for a in dims for n in numbers[1:]),
        (f"{a} // {n}" for a in dims for n in numbers[1:]),
        (f"cdiv({a}, {b})" for a, b in itertools.permutations(dims, 2)),
        (f"{c} * cdiv({a}, {b})" for a, b, c in itertools.permutations(dims, 3)),
        (
            f"max({c} * cdiv({a}, {b}) + {n}, {m})"
            for a, b, c in itertools.permutations(dims, 3)
            for n in numbers
            for m in numbers
        ),
    )
    for formula in found:
        if all(evaluate(formula, s) == v for s, v in zip(shapes, values, strict=True)):
            return formula
    return None


def _shape_of(name: str, tensors: Sequence[torch.Tensor], shapes: Sequence[Shape]) -> list[Size]:
    """A tensor's shape over the dimensions.

    Raises:
        TaskError: A size is no simple formula of them.
    """
    found: list[Size] = []
    for i, values in enumerate(zip(*(t.shape for t in tensors), strict=True)):
        size = _fit(values, shapes)
        if size is None:
            raise TaskError(
                f"{name}: size {i} follows from no simple formula of the shapes: {values}"
            )
        found.append(size)
    return found


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# -- files ----------------------------------------------------------------------------------------


def _task_data(problem: _Problem, name: str) -> dict[str, Any]:
    """The contents of task.toml. A dimension that no shape has is an argument of its own."""
    shapes = [_renamed(s) for s, _ in problem.runs]
    first = problem.runs[0][1]
    tensors = {
        n: [{**r.given, **r.state}[n] for _, r in problem.runs]
        for n in (*first.given, *first.state)
    }
    arguments: list[dict[str, Any]] = [
        {"name": _argument(n), "shape": _shape_of(n, t, shapes), "dtype": _dtype(t[0])}
        for n, t in tensors.items()
    ]
    seen = {s for a in arguments for s in a["shape"]}
    dims = list(shapes[0])
    arguments += [{"name": d, "value": d} for d in dims if d not in seen]
    results: list[dict[str, Any]] = []
    for i, result in enumerate(first.results):
        each = [r.results[i] for _, r in problem.runs]
        wide = _dtype(result) == "float32" and _dtype(next(iter(first.given.values()))) != "float32"
        results.append(
            {
                "name": f"result_{i}" if len(first.results) > 1 else "result",
                "shape": _shape_of(f"result {i}", each, shapes),
                "dtype": _dtype(result),
                "k": 2.0,
                "floor": 1024.0 if wide else 2.0,
            }
        )
    read, written = (
        " + ".join(_bytes(t) for t in ts if "shape" in t) for ts in (arguments, results)
    )
    given = [_renamed(s) for s in problem.shapes]
    visible = [*(_renamed(s) for s in problem.small.values()), *given]

    def works(shape: Mapping[str, int]) -> bool:
        if evaluate(f"{read} + {written}", shape) > _MOST_BYTES:
            return True  # not known: too large for a CPU
        return _try(problem, dict(zip(problem.knobs, (shape[d] for d in dims), strict=True)))

    constraints = needed_divisors(visible, shapes, visible[0], works)
    hidden = hidden_generators(visible, given, results[0]["dtype"], constraints, works)
    return {
        "name": name,
        "summary": problem.title,
        "entry": "run",
        "signature": _signature(arguments, results),
        "bytes": _cost(problem.bytes, problem, f"{read} + {written}"),
        "written": written,
        "flops": _cost(problem.flops, problem, None) if problem.matrix else "0",
        "matrix": problem.matrix,
        "dims": {d: f"as in shapes.py: {d}" for d in dims},
        "arguments": arguments,
        "results": results,
        "constraints": constraints or None,
        "gpu": {**_cases(problem, "", results), "hidden_check": hidden},
        "cpu": _cases(problem, "cpu_", results),
    }


def _renamed(shape: Mapping[str, T]) -> dict[str, T]:
    return {f"{k}_" if k in _RESERVED else k: v for k, v in shape.items()}


def _argument(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _bytes(tensor: Mapping[str, Any]) -> str:
    sizes = [
        f"({s})" if isinstance(s, str) and not s.isidentifier() else str(s) for s in tensor["shape"]
    ]
    return " * ".join([str(ITEMSIZE[tensor["dtype"]]), *sizes])


def _cost(formula: str, problem: _Problem, most: str | None) -> str:
    """A formula of problem.yaml if it can be read, and is not above `most`; else `most` or 0."""
    try:
        for shape in (*problem.shapes, *problem.small.values()):
            dims = _renamed(shape)
            value = evaluate(formula, dims)
            if value <= 0 or (most is not None and value > evaluate(most, dims)):
                return most or "0"
    except ValueError:
        return most or "0"
    return formula


def _signature(arguments: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]) -> str:
    def text(each: Mapping[str, Any]) -> str:
        if "shape" not in each:
            return f"{each['name']}: int"
        return f"{each['name']}: {each['dtype']}[{', '.join(map(str, each['shape']))}]"

    given, made = (", ".join(map(text, ts)) for ts in (arguments, results))
    return f"run({given}) -> {f'({made})' if len(results) > 1 else made}"


def _cases(problem: _Problem, prefix: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    dtype = results[0]["dtype"]

    def case(name: str, shape: Shape) -> dict[str, Any]:
        return {"name": prefix + name, "dtype": dtype, **_renamed(shape)}

    check = [case(n, s) for n, s in problem.small.items()]
    if prefix:
        return {"check": check, "bench": [case("bench", problem.small["small"])]}
    bench = [case("_".join(map(str, s.values())), s) for s in problem.shapes]
    return {"check": check, "bench": bench}


def _reference_py(problem: _Problem, data: Mapping[str, Any]) -> str:
    first = problem.runs[0][1]
    taken = {n: f"{n}_own" for n in definitions(problem.source) if n in _OURS}
    source = renamed_source(problem.source, taken)
    tree = ast.parse(source)
    futures = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    lines = source.splitlines()
    for node in futures:
        lines[node.lineno - 1] = ""
    source = "\n".join(lines)
    names = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    arguments = [a["name"] for a in data["arguments"]]
    shaped = {d: _where(d, data["arguments"]) for d in data["dims"]}
    knobs = dict(zip(data["dims"], problem.knobs.values(), strict=True))
    sizes = "{" + ", ".join(f'"{knobs[d]}": {shaped[d]}' for d in knobs) + "}"
    wide = {n: _widened(n, t) for n, t in (*first.given.items(), *first.state.items())}

    def call(model: str, text: Mapping[str, str]) -> str:
        state = ", ".join(f'"{n}": {text[n]}' for n in first.state)
        given = "".join(f"{text[n]}, " for n in first.given)
        return f"    return _forward({model}, {sizes}, {{{state}}}, ({given}))"

    plain = {n: _argument(n) for n in wide}
    drawn = ", ".join(f'"{knobs[d]}": int(case.dims["{d}"])' for d in knobs)
    pairs = [f'        found["{_argument(n)}"] = given[{i}]' for i, n in enumerate(first.given)]
    pairs += [f'        found["{_argument(n)}"] = state["{n}"].detach()' for n in first.state]
    return "\n".join(
        [
            f'"""{problem.title.replace(chr(34), chr(39))}',
            "",
            "Imported from KernelBench-Hard: `Model` and `get_inputs` are its code.",
            '"""',
            "",
            "from __future__ import annotations",
            "",
            "import functools",
            "import threading",
            "from collections.abc import Callable, Mapping",
            "",
            "import torch",
            "",
            "_sizes = threading.Lock()  # they are globals, as the problem has them",
            "",
            "",
            "def inputs(case, generator, device) -> dict[str, torch.Tensor]:",
            '    """Tensors that the problem\'s get_inputs and Model draw."""',
            '    if case.inputs != "normal":',
            '        raise ValueError(f"inputs = {case.inputs!r}: use normal")',
            "    seed = int(torch.randint(1 << 62, (), generator=generator, device=device))",
            '    devices = [device] if device.type == "cuda" else []',
            "    found: dict[str, torch.Tensor] = {}",
            "    with _sizes, torch.random.fork_rng(devices), torch.device(device):",
            "        torch.manual_seed(seed)",
            f"        globals().update({{{drawn}}})",
            "        given = get_inputs()",
            "        model = Model(*get_init_inputs())",
            "        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}",
            *pairs,
            "    return {name: tensor.to(device) for name, tensor in found.items()}",
            "",
            "",
            f"def reference({', '.join(arguments)}):",
            '    """The problem\'s model in float64."""',
            call("Model_float64", wide),
            "",
            "",
            f"def eager({', '.join(arguments)}):",
            '    """The problem\'s model as it stands."""',
            call("Model", plain),
            "",
            "",
            "def experts() -> Mapping[str, Callable[..., object]]:",
            '    """No library: add what users would call, by name."""',
            "    return {}",
            "",
            "",
            "def _forward(model, sizes, state, given):",
            '    """Run a model with the parameters and buffers of `state`."""',
            "    built = _built(model, tuple(sizes.items()))",
            "    return torch.func.functional_call(built, state, given)",
            "",
            "",
            "@functools.cache",
            "def _built(model, sizes):",
            '    """Make a model whose own parameters take no memory."""',
            '    with _sizes, torch.device("meta"):',
            "        globals().update(sizes)",
            "        return model(*get_init_inputs()).eval()",
            "",
            "",
            "def _keep_seed(seed: int) -> None:",
            '    """Leave the seed as it is: inputs follow from the judge\'s."""',
            "",
            "",
            "# -- the problem's own code " + "-" * 70,
            "",
            source.strip(),
            "",
            "",
            "# -- the same in float64 " + "-" * 72,
            "",
            "",
            widened_source(source, names),
            "",
        ]
    )


def _where(dim: str, arguments: Sequence[Mapping[str, Any]]) -> str:
    """Expression by which a function of reference.py reads a dimension."""
    for argument in arguments:
        for i, size in enumerate(argument.get("shape", ())):
            if size == dim:
                return f"{argument['name']}.shape[{i}]"
    return dim


def _widened(name: str, tensor: torch.Tensor) -> str:
    """A tensor as the float64 reference gets it. 8-bit floats stay: see `flashinfer_task`."""
    wide = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1
    return f"{_argument(name)}.double()" if wide else _argument(name)
