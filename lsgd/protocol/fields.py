"""A dataclass as an array of its fields, and back: the type of each is checked when it arrives, once.

A field that is one of several dataclasses is the number of its class among them, and then its fields.
"""

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Callable
from typing import Any, NoReturn, Union

import msgpack

from lsgd.errors import ProtocolError

MAX_ITEMS = 1 << 16
"""Maximum number of elements of an array or map in a frame."""


def packed(value: Any) -> bytes:
    """Return a value as MessagePack; a dataclass inside it is the array of its fields.

    Raises:
        OverflowError: a number has more than 64 bits.
        ValueError: a text is no Unicode.
    """
    return msgpack.packb(value, default=_fields_of)  # type: ignore[no-any-return]


def _fields_of(value: Any) -> tuple[Any, ...]:
    if isinstance(value, int):  # msgpack asks here before it refuses one
        raise OverflowError(f"a number of {value.bit_length()} bits")
    cls: type = type(value)
    return values_of(cls)(value)


def unpacked(frame: bytes) -> Any:
    """Return the value that is in ``frame``.

    Raises:
        ProtocolError: it is not one well-formed value.
    """
    try:
        return msgpack.unpackb(
            frame,
            use_list=False,
            strict_map_key=True,
            ext_hook=_refuse_extension,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        why = str(error) or type(error).__name__
        raise ProtocolError(f"not MessagePack as this protocol uses it: {why}") from None


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code}")


@functools.cache
def values_of(cls: type) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that returns the values of a message's fields."""
    names = [field.name for field in dataclasses.fields(cls)]
    choices = {name: found for name, hint in _hints(cls).items() if (found := _choices(hint))}
    if choices:
        return lambda message: tuple(_chosen(choices.get(name), getattr(message, name)) for name in names)
    if len(names) < 2:  # with one name, attrgetter returns no tuple
        return lambda message: tuple(getattr(message, name) for name in names)
    return operator.attrgetter(*names)


def _chosen(choices: tuple[type, ...] | None, value: Any) -> Any:
    """Return one of several dataclasses as its number among them, and its fields."""
    if choices is None:
        return value
    cls: type = type(value)
    return (choices.index(cls), *values_of(cls)(value))


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _choices(hint: Any) -> tuple[type, ...]:
    """Return the dataclasses of which a value is one; none if it may be something else."""
    args = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else ()
    return args if args and all(map(dataclasses.is_dataclass, args)) else ()


@functools.cache
def _checks(cls: type) -> dict[str, Callable[[Any], Any]]:
    return {name: _check(hint) for name, hint in _hints(cls).items()}


def build(cls: type, values: tuple[Any, ...]) -> Any:
    """Return an instance of a dataclass from the values of its fields.

    Raises:
        ProtocolError: there are too many or too few, or one has the wrong type.
    """
    checks = _checks(cls)
    if len(values) != len(checks):
        raise ProtocolError(f"{cls.__name__} with {len(values)} fields instead of {len(checks)}")
    checked = []
    for (name, check), value in zip(checks.items(), values, strict=True):
        try:
            checked.append(check(value))
        except _WrongTypeError:
            raise ProtocolError(f"{cls.__name__}.{name} cannot be a {type(value).__name__}") from None
    return cls(*checked)


class _WrongTypeError(Exception):
    pass


def _check(hint: Any) -> Callable[[Any], Any]:
    """Return a function that returns a value of the type ``hint``, and raises for others."""
    origin = typing.get_origin(hint)
    if choices := _choices(hint):
        return functools.partial(_one_of, choices)
    if origin in (Union, types.UnionType):
        (inner,) = (_check(arg) for arg in typing.get_args(hint) if arg is not types.NoneType)
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        item = _check(typing.get_args(hint)[0])
        return lambda value: tuple(item(v) for v in _typed(value, tuple))
    if origin is dict:
        key, item = (_check(arg) for arg in typing.get_args(hint))
        return lambda value: {key(k): item(v) for k, v in _typed(value, dict).items()}
    if dataclasses.is_dataclass(hint):
        return lambda value: build(typing.cast(type, hint), _typed(value, tuple))
    return {int: _integer, float: _number}.get(hint) or functools.partial(_typed, kind=hint)


def _one_of(choices: tuple[type, ...], value: Any) -> Any:
    number, *values = _typed(value, tuple) or (-1,)
    if type(number) is not int or not 0 <= number < len(choices):
        raise _WrongTypeError
    return build(choices[number], tuple(values))


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise _WrongTypeError
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise _WrongTypeError
    return value


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value)
    raise _WrongTypeError
