"""Frozen dataclasses as JSON and back, by their type annotations.

`to_json` gives what `json.dumps(..., allow_nan=False)` accepts; `from_json` accepts nothing else:
unknown keys, missing fields without a default and values of another type raise `RecordError`, which
names the field. A field that is a union of dataclasses carries the class's name under "is"; bytes
are base64; infinities and nan are strings; a mapping whose keys are not strings is a list of pairs.
Tuples in fields annotated `object` come back as lists.

Plans from an untrusted process are not read by this module but by `plan_json.parse_plan`, which
checks what they mean.
"""

from __future__ import annotations

import base64
import binascii
import collections.abc
import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_Convert = Callable[[Any, str], Any]
_NONFINITE = ("inf", "-inf", "nan")


class RecordError(ValueError):
    """JSON that is not the record that was expected."""


def to_json(record: object) -> dict[str, Any]:
    """A dataclass instance as JSON-able data.

    Raises:
        RecordError: It holds something that JSON cannot carry.
    """
    encoded: dict[str, Any] = _codec(type(record))[0](record, type(record).__name__)
    return encoded


def from_json(cls: type[T], data: object) -> T:
    """The dataclass instance that `to_json` wrote.

    Raises:
        RecordError: The data is not such a record; the text names the field.
    """
    decoded: T = _codec(cls)[1](data, cls.__name__)
    return decoded


def _codec(hint: Any) -> tuple[_Convert, _Convert]:
    """Encoder and decoder of a type annotation."""
    return _make_codec(hint)


@functools.cache
def _make_codec(hint: Any) -> tuple[_Convert, _Convert]:
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hint in (object, Any):
        return _plain, _plain
    if hint is float:
        return _encode_float, _decode_float
    if hint is None or hint is type(None) or hint in (int, str, bool):
        return _exactly(hint), _exactly(hint)
    if hint is bytes:
        return (lambda v, _: base64.b64encode(v).decode()), _decode_bytes
    if hint is Path:
        return (lambda v, _: str(v)), lambda v, where: Path(_exactly(str)(v, where))
    if origin is typing.Literal:
        return _one_of(arguments), _one_of(arguments)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return functools.partial(_encode_enum, hint), functools.partial(_decode_enum, hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return functools.partial(_encode_class, hint), functools.partial(_decode_class, hint)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments)
    if origin in (tuple, list, frozenset, collections.abc.Sequence):
        return _sequence(tuple if origin is collections.abc.Sequence else origin, arguments)
    if origin in (dict, collections.abc.Mapping):
        return _mapping(*arguments)
    raise TypeError(f"no JSON form for {hint!r}")


def _kind(value: object) -> str:
    return type(value).__name__


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise RecordError(f"{where}: {value} has no JSON form in a field of any type")
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, list | tuple):
        return [_plain(v, where) for v in value]
    if isinstance(value, collections.abc.Mapping):
        return {_exactly(str)(k, where): _plain(v, where) for k, v in value.items()}
    raise RecordError(f"{where}: no JSON form for {_kind(value)}")


def _exactly(cls: Any) -> _Convert:
    wanted = type(None) if cls is None else cls

    def convert(value: Any, where: str) -> Any:
        # A bool is an int to Python, and a StrEnum a str, but neither is in a record.
        if type(value) is not wanted:
            raise RecordError(f"{where}: expected {wanted.__name__}, got {_kind(value)}")
        return value

    return convert


def _one_of(values: tuple[object, ...]) -> _Convert:
    def convert(value: Any, where: str) -> Any:
        if value not in values:
            raise RecordError(f"{where}: expected one of {values}, got {value!r}")
        return value

    return convert


def _encode_float(value: Any, where: str) -> float | str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecordError(f"{where}: expected float, got {_kind(value)}")
    return float(value) if math.isfinite(value) else repr(float(value))


def _decode_float(value: Any, where: str) -> float:
    if isinstance(value, bool) or not (isinstance(value, int | float) or value in _NONFINITE):
        raise RecordError(f"{where}: expected float, got {value!r}")
    return float(value)


def _decode_bytes(value: Any, where: str) -> bytes:
    try:
        return base64.b64decode(_exactly(str)(value, where), validate=True)
    except binascii.Error as e:
        raise RecordError(f"{where}: not base64: {e}") from None


def _encode_enum(cls: type[enum.Enum], value: Any, where: str) -> Any:
    if not isinstance(value, cls):
        raise RecordError(f"{where}: expected {cls.__name__}, got {_kind(value)}")
    return value.value


def _decode_enum(cls: type[enum.Enum], value: Any, where: str) -> enum.Enum:
    try:
        return cls(value)
    except ValueError:
        raise RecordError(f"{where}: {value!r} is no {cls.__name__}") from None


@functools.cache
def _fields(cls: Any) -> dict[str, tuple[_Convert, _Convert, bool]]:
    """Per field that `__init__` takes: encoder, decoder, whether it must be given."""
    hints = typing.get_type_hints(cls)
    return {
        f.name: (
            *_codec(hints[f.name]),
            f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING,
        )
        for f in dataclasses.fields(cls)
        if f.init
    }


def _encode_class(cls: Any, value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, cls):
        raise RecordError(f"{where}: expected {cls.__name__}, got {_kind(value)}")
    return {
        name: encode(getattr(value, name), f"{where}.{name}")
        for name, (encode, _, _) in _fields(cls).items()
    }


def _decode_class(cls: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise RecordError(f"{where}: expected an object, got {_kind(value)}")
    fields = _fields(cls)
    if unknown := value.keys() - fields.keys():
        raise RecordError(f"{where}: unknown keys {sorted(map(str, unknown))}")
    if missing := [n for n, (_, _, required) in fields.items() if required and n not in value]:
        raise RecordError(f"{where}: lacks {missing}")
    return cls(**{n: fields[n][1](v, f"{where}.{n}") for n, v in value.items()})


def _union(members: tuple[Any, ...]) -> tuple[_Convert, _Convert]:
    dataclass_members: list[Any] = [m for m in members if dataclasses.is_dataclass(m)]
    classes = {m.__name__: m for m in dataclass_members}
    tagged = len(classes) > 1
    # Narrow types first: an int must not become a float where both are allowed.
    others = sorted((m for m in members if m not in dataclass_members), key=lambda m: m is float)

    def encode(value: Any, where: str) -> Any:
        cls = classes.get(_kind(value))
        if cls is not None:
            fields = _codec(cls)[0](value, where)
            return {"is": cls.__name__, **fields} if tagged else fields
        return first(value, where, 0)

    def decode(value: Any, where: str) -> Any:
        if isinstance(value, dict) and tagged and "is" in value:
            if value["is"] not in classes:
                raise RecordError(f"{where}: {value['is']!r} is none of {sorted(classes)}")
            rest = {k: v for k, v in value.items() if k != "is"}
            return _codec(classes[value["is"]])[1](rest, where)
        if isinstance(value, dict) and len(classes) == 1:
            return _codec(next(iter(classes.values())))[1](value, where)
        return first(value, where, 1)

    def first(value: Any, where: str, way: int) -> Any:
        for member in others:
            try:
                return _codec(member)[way](value, where)
            except RecordError:
                continue
        names = ", ".join(getattr(m, "__name__", str(m)) for m in members)
        raise RecordError(f"{where}: expected one of {names}, got {_kind(value)}")

    return encode, decode


def _sequence(origin: Any, arguments: tuple[Any, ...]) -> tuple[_Convert, _Convert]:
    fixed = origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis)
    codecs = [_codec(a) for a in arguments if a is not Ellipsis]

    def convert(value: Any, where: str, way: int) -> list[Any]:
        if not isinstance(value, list | tuple | frozenset):
            raise RecordError(f"{where}: expected a list, got {_kind(value)}")
        if fixed and len(value) != len(codecs):
            raise RecordError(f"{where}: expected {len(codecs)} items, got {len(value)}")
        return [codecs[i if fixed else 0][way](v, f"{where}[{i}]") for i, v in enumerate(value)]

    return (
        lambda value, where: convert(value, where, 0),
        lambda value, where: origin(convert(value, where, 1)),
    )


def _mapping(key: Any, item: Any) -> tuple[_Convert, _Convert]:
    keys, items = _codec(key), _codec(item)

    def encode(value: Any, where: str) -> Any:
        if not isinstance(value, collections.abc.Mapping):
            raise RecordError(f"{where}: expected a mapping, got {_kind(value)}")
        pairs = [[keys[0](k, where), items[0](v, f"{where}[{k!r}]")] for k, v in value.items()]
        return dict(pairs) if key is str else pairs

    def decode(value: Any, where: str) -> Any:
        pairs = list(value.items()) if key is str and isinstance(value, dict) else value
        if not isinstance(pairs, list) or any(len(p) != 2 for p in pairs):
            raise RecordError(f"{where}: expected a mapping, got {_kind(value)}")
        return {keys[1](k, where): items[1](v, f"{where}[{k!r}]") for k, v in pairs}

    return encode, decode
