"""Log lines: said once in a process, however many layers they are about; how many, in words; names by reason."""

import logging
from collections.abc import Iterable
from functools import cache


@cache
def log_once(logger: logging.Logger, line: str) -> None:
    logger.info(line)


def count_of(number: int, what: str) -> str:
    """``1 MoE layer``, ``2 MoE layers``."""
    return f"{number} {what}{'s' * (number != 1)}"


def by_reason(reasons: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The names of each reason, both in order, given pairs of a name and its reason."""
    found: dict[str, list[str]] = {}
    for name, reason in reasons:
        found.setdefault(reason, []).append(name)
    return found
