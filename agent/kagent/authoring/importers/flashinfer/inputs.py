"""Meaning of the inputs of a FlashInfer-Bench definition, and draws of valid ones.

A definition names its inputs and says little of their values. Here they follow from its
constraints, and from names and descriptions as all definitions of the format have them: `kv_indptr`
ends at `num_kv_indices`, `kv_indices` point into the tensor whose first axis is `num_pages`.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from kagent_sandbox.data.case import Case
from kagent_sandbox.data.formula import evaluate
from kagent_sandbox.errors import TaskError

from kagent.authoring.importers.flashinfer.exchange import Definition, Tensor, Workload

Size: TypeAlias = int | str  # a number, or a formula over the task's dimensions

_TAKEN = {*Case.model_fields, "itemsize", "case", "generator", "device", "torch", "math", "t"}
_TAKEN |= {"least", "first_is_empty"}
_OFFSETS = re.compile(r"(indptr|offsets?|cu_?seq_?lens?|cu_lens)$")
_LENGTHS = re.compile(r"(^|_)(seq|kv|context|cache|sequence)_?len(gth)?s?$|(^|_)lengths$")
_NUMBERS = re.compile(r"(^|_)(indices|index|idx|ids?|table|tables|positions?|slots?|mapping)$")
_LAST_PAGE = re.compile(r"last_page_len")
_PAGES = re.compile(r"page|block")
_TOKENS = re.compile(r"offset|token_idx|\btoken (index|indices)", re.IGNORECASE)
_STATE = re.compile(r"^(initial_|recurrent_|ssm_|final_)?states?$")
_ROOT = re.compile(r"1(?:\.0)? ?/ ?sqrt\(([^()]*)\)")
_PLUS_ONE = re.compile(r"\b(\w+) ?\+ ?1\b")


@dataclass(frozen=True, slots=True)
class Sequences:
    """Offsets of sequences: an input that begins with 0 and ends with `total`.

    Attributes:
        name: The input.
        count: Number of sequences.
        total: The axis of what they divide.
        page_size: Tokens per element of that axis.
        queries: Whether results have that axis.
    """

    name: str
    count: Size
    total: str
    page_size: int
    queries: bool


@dataclass(frozen=True, slots=True)
class Numbers:
    """An input of numbers that point into the first axis of others.

    Attributes:
        name: The input.
        pool: The axis that it points into.
        per_place: Numbers per element of that axis: the page size if tokens are counted, else 1.
    """

    name: str
    pool: str
    per_place: int


@dataclass
class Inputs:
    """The inputs of a definition, understood.

    Attributes:
        definition: The definition, without optional inputs that nobody has to give.
        sizes: The size of each axis: a number or a formula over `dims`.
        dims: The task's dimensions, and what they mean.
        conditions: Formulas over `dims` that must hold.
        scalars: Values of numbers, or the dimension that holds one.
        choices: Values that dimensions of numbers take.
        left_out: Optional inputs that the task does without.
    """

    definition: Definition
    sizes: dict[str, Size] = field(default_factory=dict)
    dims: dict[str, str] = field(default_factory=dict)
    conditions: list[str] = field(default_factory=list)
    scalars: dict[str, int | float | bool | str] = field(default_factory=dict)
    choices: dict[str, list[int]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    sequences: list[Sequences] = field(default_factory=list)
    numbers: list[Numbers] = field(default_factory=list)
    _statements: dict[str, str] = field(default_factory=dict)
    _notes: dict[str, str] = field(default_factory=dict)

    def shape(self, tensor: Tensor) -> tuple[Size, ...]:
        """The shape of an input or output."""
        return tuple(self.sizes[a] for a in tensor.shape or ())

    def value(self, size: Size, dims: Mapping[str, float]) -> int:
        """The value of a size."""
        return int(evaluate(str(size), dims))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Inputs that are no numbers."""
        return {n: t for n, t in self.definition.inputs.items() if t.shape is not None}

    @property
    def queries(self) -> Sequences | None:
        """Offsets of what the results have a row for."""
        return next((s for s in self.sequences if s.queries), None)

    def notes(self) -> list[str]:
        """A sentence for each input about its values."""
        return [f"{n}: {text}" for n, text in self._notes.items()]

    def statements(self) -> list[str]:
        """Statements that draw all tensors into `t`, by their names."""
        first = [s.name for s in sorted(self.sequences, key=lambda s: not s.queries)]
        order = [*first, *(n for n in self._statements if n not in first)]
        return [f't["{n}"] = {self._statements[n]}' for n in order]


def understand(definition: Definition, workloads: list[Workload]) -> Inputs:
    """Find out what the inputs of a definition are for.

    Raises:
        TaskError: An input's values cannot be known; the text names it.
    """
    found = Inputs(definition)
    _leave_out(found)
    _name_dims(found)
    _find_scalars(found, workloads)
    for name, tensor in found.tensors.items():
        if _is_offsets(name, tensor):
            found.sequences.append(_sequences(found, name, tensor))
    for name, tensor in found.tensors.items():
        if _is_whole(tensor) and _NUMBERS.search(name):
            found.numbers.append(_numbers(found, name, tensor))
    found.sequences = [_with_pages(found, s) for s in found.sequences]
    for name, tensor in found.tensors.items():
        found._notes[name], found._statements[name] = _draw(found, name, tensor)  # noqa: SLF001
    return found


# -- axes and numbers -----------------------------------------------------------------------------


def _leave_out(found: Inputs) -> None:
    """Drop optional inputs that the reference has a default for."""
    module = ast.parse(found.definition.reference)
    run = next((n for n in module.body if isinstance(n, ast.FunctionDef) and n.name == "run"), None)
    if run is None:
        raise TaskError(f"{found.definition.name}: reference: no function named run")
    given = run.args.args[len(run.args.args) - len(run.args.defaults) :]
    defaults = {a.arg for a in (*given, *run.args.kwonlyargs)}
    inputs = dict(found.definition.inputs)
    found.left_out = [n for n, t in inputs.items() if t.optional and n in defaults]
    for name in found.left_out:
        del inputs[name]
    found.definition = found.definition.model_copy(update={"inputs": inputs})


def _name_dims(found: Inputs) -> None:
    definition = found.definition
    used = {
        a
        for t in (*definition.inputs.values(), *definition.outputs.values())
        for a in t.shape or ()
    }
    found.sizes.update(definition.consts())
    names = {n: n + "_" if n in _TAKEN else n for n in definition.axes}
    equal = _equalities(definition)
    for axis in definition.axes:
        if axis not in found.sizes and axis in used and axis not in equal:
            found.sizes[axis] = names[axis]
            found.dims[names[axis]] = definition.axes[axis].description or axis.replace("_", " ")
    for axis, formula in equal.items():
        known = {**definition.consts(), **names}
        text = re.sub(r"[A-Za-z_]\w*", lambda m, k=known: str(k.get(m[0], m[0])), formula)  # type: ignore[misc]
        found.sizes[axis] = text
    for text in definition.constraints:
        left, operator, _ = _comparison(text)
        if not operator or (left in equal and operator == "=="):
            continue
        mapping = {**definition.consts(), **{a: f"({s})" for a, s in found.sizes.items()}}
        formula = re.sub(r"[A-Za-z_]\w*", lambda m, k=mapping: str(k.get(m[0], m[0])), text)  # type: ignore[misc]
        if _names(formula) & found.dims.keys() and _names(formula) <= found.dims.keys():
            found.conditions.append(formula)


def _equalities(definition: Definition) -> dict[str, str]:
    """Variable axes that follow from others: by a constraint, or as their description says."""
    variable = {n for n, a in definition.axes.items() if a.type == "var"}
    used = {a for t in definition.inputs.values() for a in t.shape or ()}
    found: dict[str, str] = {}
    for text in definition.constraints:
        left, operator, right = _comparison(text)
        for axis, formula in ((left, right), (right, left)):
            names = _names(formula)
            known = bool(names) and names <= definition.axes.keys() - found.keys() - {axis}
            if operator == "==" and axis in variable and known:
                found.setdefault(axis, formula)
                break
    for axis in sorted(variable - found.keys()):
        match = _PLUS_ONE.search(definition.axes[axis].description)
        if match and match[1] in variable & used and match[1] not in found:
            found[axis] = f"{match[1]} + 1"
    # A number for each sequence says how many offsets there are, where nothing else does.
    inputs = {n: t for n, t in definition.inputs.items() if len(t.shape or ()) == 1}
    each = [t.shape[0] for n, t in inputs.items() if t.shape and _LAST_PAGE.search(n)]
    counts = [b for b in each if b in variable - found.keys()]
    for name, tensor in inputs.items():
        axis = tensor.shape[0] if tensor.shape else ""
        if _is_offsets(name, tensor) and axis in variable - found.keys() - set(each) and counts:
            found[axis] = f"{counts[0]} + 1"
    return found


def _comparison(text: str) -> tuple[str, str, str]:
    match = re.fullmatch(r"(.+?)\s*(==|<=|>=|<|>)\s*(.+)", text.strip())
    return (match[1], match[2], match[3]) if match else (text, "", "")


def _names(formula: str) -> set[str]:
    """Names of an arithmetic formula; of any other expression what no axis is named."""
    try:
        tree = ast.parse(formula, mode="eval")
    except SyntaxError:
        return {"?"}
    if any(isinstance(n, ast.Attribute | ast.Subscript | ast.Call) for n in ast.walk(tree)):
        return {"?"}
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}


def _find_scalars(found: Inputs, workloads: list[Workload]) -> None:
    for name, tensor in found.definition.inputs.items():
        if tensor.shape is not None:
            continue
        given = [w.inputs[name].value for w in workloads if name in w.inputs]
        values = [v for v in given if v is not None]
        if tensor.dtype.startswith("int") and len(set(values)) > 1:
            dim = name + "_" if name in found.dims.keys() | _TAKEN else name
            found.dims[dim] = tensor.description or name.replace("_", " ")
            found.choices[dim] = sorted({int(v) for v in values})
            found.scalars[name] = dim
        else:
            usual = max(values, key=values.count) if values else _usual(found, name, tensor)
            found.scalars[name] = usual


def _usual(found: Inputs, name: str, tensor: Tensor) -> int | float | bool:
    """A number's usual value, from its description or name."""
    consts = found.definition.consts()
    if tensor.dtype == "bool":
        return False
    if tensor.dtype.startswith(("int", "uint")):
        return 0
    for match in reversed(_ROOT.findall(tensor.description)):
        try:
            return 1 / math.sqrt(evaluate(match, consts))
        except (ValueError, ZeroDivisionError):
            continue
    if "eps" in name:
        return 1e-6
    if name in ("scale", "sm_scale", "softmax_scale"):
        first = next(iter(found.tensors.values()))
        last = found.sizes[first.shape[-1]] if first.shape else 1
        return 1 / math.sqrt(last) if isinstance(last, int) else 1.0
    return 1.0


# -- tensors --------------------------------------------------------------------------------------


def _is_whole(tensor: Tensor) -> bool:
    return tensor.dtype.startswith(("int", "uint"))


def _is_offsets(name: str, tensor: Tensor) -> bool:
    return _is_whole(tensor) and len(tensor.shape or ()) == 1 and bool(_OFFSETS.search(name))


def _sequences(found: Inputs, name: str, tensor: Tensor) -> Sequences:
    assert tensor.shape is not None
    length = found.sizes[tensor.shape[0]]
    count: Size
    if isinstance(length, int):
        count = length - 1
    else:
        count = length.removesuffix(" + 1") if length.endswith(" + 1") else f"{length} - 1"
    total = _total(found, name, tensor.shape[0])
    in_results = any(total in (t.shape or ()) for t in found.definition.outputs.values())
    return Sequences(name, count, total, 1, in_results)


def _total(found: Inputs, name: str, own: str) -> str:
    """The axis that offsets divide."""
    for text in found.definition.constraints:
        left, operator, right = _comparison(text)
        for axis, end in ((left, right), (right, left)):
            if operator == "==" and axis in found.sizes and re.match(rf"{name}\[-1\]", end):
                return axis
    first = [t.shape[0] for n, t in found.tensors.items() if t.shape and n != name]
    axes = [a for a in dict.fromkeys(first) if a in found.dims and a != own]
    prefix = name.split("_")[0]
    near = [a for a in axes if prefix in a or prefix.removesuffix("o") in a.split("_")]
    for chosen in (near, axes):
        if len(chosen) == 1:
            return chosen[0]
    raise TaskError(
        f"{found.definition.name}: {name}: it looks like offsets, and nothing says which axis they "
        f"divide: add the constraint 'AXIS == {name}[-1].item()'"
    )


def _numbers(found: Inputs, name: str, tensor: Tensor) -> Numbers:
    assert tensor.shape is not None
    others = [t.shape for n, t in found.tensors.items() if n != name and len(t.shape or ()) > 1]
    firsts = dict.fromkeys(s[0] for s in others if s is not None and s[0] not in tensor.shape)
    results = {t.shape[0] for t in found.definition.outputs.values() if t.shape}
    starts = {a for s in found.sequences for a in (s.total,)}

    def rank(axis: str) -> tuple[bool, bool, bool]:
        return (
            isinstance(found.sizes[axis], int),
            axis in starts and axis in results,
            axis in results,
        )

    pools = sorted((a for a in firsts), key=rank)
    if not pools:
        raise TaskError(
            f"{found.definition.name}: {name}: it looks like numbers of something, and no other "
            "input has an axis that they could point into"
        )
    pool = pools[0]
    page = next((s[1] for s in others if s is not None and s[0] == pool), "")
    size = found.sizes.get(page)
    tokens = _TOKENS.search(tensor.description) and not _PAGES.search(name)
    counts_tokens = bool(tokens) and bool(_PAGES.search(page)) and isinstance(size, int)
    return Numbers(name, pool, int(size) if counts_tokens and size is not None else 1)


def _with_pages(found: Inputs, sequences: Sequences) -> Sequences:
    """Add the page size to sequences: the size of what the offsets divide."""
    for numbers in found.numbers:
        if found.tensors[numbers.name].shape == (sequences.total,):
            size = _page_size(found, numbers.pool)
            return Sequences(
                sequences.name, sequences.count, sequences.total, size, sequences.queries
            )
    return sequences


def _page_size(found: Inputs, pool: str) -> int:
    for tensor in found.tensors.values():
        shape = tensor.shape or ()
        if len(shape) > 1 and shape[0] == pool and _PAGES.search(shape[1]):
            size = found.sizes[shape[1]]
            return size if isinstance(size, int) else 1
    return 1


def _draw(found: Inputs, name: str, tensor: Tensor) -> tuple[str, str]:
    """A note about a tensor's values, and the expression that draws them."""
    shape = "(" + "".join(f"{s}, " for s in found.shape(tensor)) + ")"
    shape = shape.replace(", )", ",)" if len(tensor.shape or ()) == 1 else ")")
    dtype = f"torch.{tensor.dtype}"
    text = tensor.description.lower()
    if tensor.dtype == "bool":
        return "random", f"torch.rand({shape}, generator=generator, device=device) < 0.5"
    if _is_whole(tensor):
        return _draw_whole(found, name, tensor, shape, dtype)
    if re.search(r"cos.*sin|sin.*cos", name):
        return (
            "cosines and sines of random angles",
            f"_rotations({shape}, {dtype}, generator, device)",
        )
    if "logits" in name and re.search("rout|gat", name):
        note = "multiples of 1/16 in random order, all different in a row"
        return note, f"_distinct({shape}, {dtype}, generator, device)"
    if re.search(r"scales?(_|$)", name):
        return "between 0.02 and 0.1", f"_uniform({shape}, {dtype}, 0.02, 0.1, generator, device)"
    if "decay" in text and not _varies(found, tensor) and "log" not in name.lower():
        return "between -1.5 and -0.5", f"_uniform({shape}, {dtype}, -1.5, -0.5, generator, device)"
    drawn = f"_normal({shape}, {dtype}, case.scale, generator, device)"
    if name in ("k", "key", "keys") and any(_STATE.match(n) for n in found.tensors):
        return "normal, every row scaled to length 1", f"_unit_rows({drawn})"
    return "normal with deviation `scale`", drawn


def _varies(found: Inputs, tensor: Tensor) -> bool:
    return any(not isinstance(s, int) for s in found.shape(tensor))


def _draw_whole(
    found: Inputs, name: str, tensor: Tensor, shape: str, dtype: str
) -> tuple[str, str]:
    for s in found.sequences:
        if s.name == name:
            return _draw_offsets(found, s, dtype)
    text = tensor.description
    if _LAST_PAGE.search(name):
        return _draw_last_pages(found, name, tensor, dtype)
    for numbers in found.numbers:
        if numbers.name == name:
            return _draw_numbers(found, numbers, text, shape, dtype)
    if _LENGTHS.search(name) and len(tensor.shape or ()) == 1:
        most = _capacity(found, tensor)
        if most is not None:
            drawn = f"torch.randint(1, {most} + 1, {shape}, generator=generator, device=device)"
            return f"from 1 to {most}", f"{drawn}.to({dtype})"
    raise TaskError(
        f"{found.definition.name}: {name}: nothing says which whole numbers are valid: kagent "
        "knows offsets (*_indptr, *_offsets), lengths (*_lens), and numbers of pages, slots, "
        "tokens and experts (*_indices, *_table, *_ids, positions)"
    )


def _draw_offsets(found: Inputs, sequences: Sequences, dtype: str) -> tuple[str, str]:
    queries = found.queries
    least = "least"
    note = f"offsets of sequences of random lengths, from 0 to {found.sizes[sequences.total]}"
    if queries is not None and queries is not sequences and queries.count == sequences.count:
        longer = f't["{queries.name}"].diff()'
        pages = longer if sequences.page_size == 1 else f"-(-{longer} // {sequences.page_size})"
        least = f"({pages}).clamp(min=least)"
        note += f", each with room for its tokens in {queries.name}"
    elif queries is sequences and len(found.sequences) > 1:
        note += "; those of `empty` may have none"
    arguments = f"{sequences.count}, {found.sizes[sequences.total]}, {least}, first_is_empty"
    return note, f"_offsets({arguments}, {dtype}, generator, device)"


def _draw_last_pages(found: Inputs, name: str, tensor: Tensor, dtype: str) -> tuple[str, str]:
    size = found.sizes[(tensor.shape or ("",))[0]]
    # Some definitions give it the length of the offsets: the last number is not used.
    longer = [s for s in found.sequences if found.tensors[s.name].shape == tensor.shape]
    count = longer[0].count if longer else size
    paged = [s for s in found.sequences if s.count == count and not s.queries]
    if not paged:
        raise TaskError(
            f"{found.definition.name}: {name}: no offsets of pages for {size} sequences: an input "
            "named *_indptr was expected"
        )
    queries = found.queries
    same = queries is not None and queries.count == count
    least = f't["{queries.name}"].diff()' if queries is not None and same else "least"
    note = f"tokens in each last page, 1 to {paged[0].page_size}; 0 where there is no page"
    arguments = f't["{paged[0].name}"], {paged[0].page_size}, {least}, {dtype}, generator'
    drawn = f"_last_page_lengths({arguments})"
    if longer:
        return note + ", and behind the last", f"torch.nn.functional.pad({drawn}, (0, 1))"
    return note, drawn


def _draw_numbers(
    found: Inputs, numbers: Numbers, text: str, shape: str, dtype: str
) -> tuple[str, str]:
    size: Size = found.sizes[numbers.pool]
    if numbers.per_place > 1:
        size = f"{size} * {numbers.per_place}"
    if re.search(r"high 16 bits", text):
        note = f"an expert below {size} in the high 16 bits, its weight as bfloat16 in the low ones"
        return note, f"_packed_experts({shape}, {size}, generator, device)"
    drawn = f"_places({shape}, {size}, {dtype}, generator, device)"
    note = f"below {size}, in random order, all different as far as there are enough"
    if "-1" in text and len(found.tensors[numbers.name].shape or ()) > 1:
        return note + "; -1 behind a random part of each row", f"_padded({drawn}, generator)"
    return note, drawn


def _capacity(found: Inputs, lengths: Tensor) -> Size | None:
    """The longest length that other inputs have room for."""
    assert lengths.shape is not None
    for numbers in found.numbers:
        shape = found.tensors[numbers.name].shape or ()
        if len(shape) == 2 and shape[0] == lengths.shape[0]:
            page = _page_size(found, numbers.pool)
            width = found.sizes[shape[1]]
            return width if page == 1 else f"{width} * {page}"
    for tensor in found.tensors.values():
        shape = tensor.shape or ()
        if len(shape) > 2 and shape[0] == lengths.shape[0]:
            return found.sizes[shape[1]]
    return None
