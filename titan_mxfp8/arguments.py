"""Types of arguments and config fields, checked in one place: TOML and JSON take any value."""

from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import get_type_hints

_WORDS = {bool: "true or false", int: "a whole number", str: "a string"}


def check_type(name: str, value: object, wanted: object) -> None:
    """Refuses a value of another type. ``True`` is no whole number, and ``"false"`` is not false.

    Args:
        name: what the message calls it.
        wanted: ``bool``, ``int`` or ``str``; anything else stands for a list of strings, as which one string counts.

    Raises:
        ValueError: the value has another type.
    """
    if wanted in _WORDS:
        fits = type(value) is wanted
    else:
        fits = isinstance(value, Iterable) and all(isinstance(part, str) for part in value)
    if not fits:
        raise ValueError(f"{name} = {value!r}: it must be {_WORDS.get(wanted, 'a list of strings')}")


def check_fields(config: object, cls: type, section: str = "") -> None:
    """``check_type`` for those fields of ``config`` that the dataclass ``cls`` has, sections aside."""
    for name, wanted in get_type_hints(cls).items():
        if not is_dataclass(wanted):
            check_type(f"{section}.{name}" if section else name, getattr(config, name), wanted)
