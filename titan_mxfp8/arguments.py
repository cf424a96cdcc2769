"""Types of arguments and config fields, checked in one place: TOML, JSON and the command line give any."""

from collections.abc import Collection, Iterable
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", NoneType: "nothing"}


def check_type(name: str, value: object, hint: object) -> None:
    """Refuses a value of another type. ``"false"`` is not false, and ``True`` no whole number; but a whole number is a
    number, and a string stands for a list of strings. Raises ValueError: the value has another type.

    Args:
        name: what the message calls it.
        hint: a type, as in an annotation. Types that no config file can have are not checked.
    """
    if not _fits(value, hint):
        raise ValueError(f"{name} = {value!r}: it must be {_described(hint)}")


def check_types(config: object, section: str = "", skip: Collection[str] = ()) -> None:
    """``check_type`` for all fields of a dataclass, and of the dataclasses in it. Raises ValueError as ``check_type``.

    Args:
        section: what the names begin with, and a dot.
        skip: names of fields to leave unchecked.
    """
    for name, hint in get_type_hints(type(config)).items():
        value, name = getattr(config, name), f"{section}{name}"
        if is_dataclass(hint) and is_dataclass(value):
            check_types(value, f"{name}.", skip)
        elif name not in skip:
            check_type(name, value, hint)


def _fits(value: object, hint: object) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in args)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in args)
    if isinstance(origin, type) and issubclass(origin, Iterable) and args == (str,):
        return isinstance(value, Iterable) and all(isinstance(part, str) for part in value)
    if hint is float:
        return type(value) in (float, int)
    return not (hint in TYPES or is_dataclass(hint)) or type(value) is hint


def _described(hint: object) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(dict.fromkeys(_described(one) for one in get_args(hint) if one is not NoneType))
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    return TYPES.get(hint, "a table" if is_dataclass(hint) else "a list of strings")
