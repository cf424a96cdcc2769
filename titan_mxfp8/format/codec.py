"""Frozen dataclasses as strings, since torch's operators and graphs take strings and no objects of ours.

The text is JSON that names the class and each field, so a graph that one process has cached means the same in another:

    {"class":"OperandSpec","elem_dtype":{"dtype":"float8_e4m3fn"},"rounding":"rceil","block":"1x32", ...}
"""

import json
from dataclasses import fields
from functools import cache

import torch

_CLASSES: dict[str, type] = {}


class Encoded:
    """Base of frozen dataclasses whose fields are numbers, strings, dtypes, None or ``Encoded`` themselves. ``key``:
    the object as a string, made once, which ``decode`` reads."""

    key: str

    def __init_subclass__(cls) -> None:
        _CLASSES[cls.__name__] = cls

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", json.dumps(self, default=_as_dict, separators=(",", ":")))


@cache
def decode(key: str) -> Encoded:
    """The object whose ``key`` this is, the same one each time."""
    return json.loads(key, object_hook=_made)


def _as_dict(value: object) -> dict[str, object]:
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    given = [field.name for field in fields(value) if field.init]
    return {"class": type(value).__name__} | {name: getattr(value, name) for name in given}


def _made(found: dict[str, object]) -> object:
    if "class" not in found:
        return getattr(torch, found["dtype"])
    return _CLASSES[found.pop("class")](**found)
