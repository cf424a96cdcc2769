"""Log lines: said once in a process, however many layers they are about; how many, in words."""

import logging
from functools import cache


@cache
def log_once(logger: logging.Logger, line: str) -> None:
    logger.info(line)


def count_of(number: int, what: str) -> str:
    """``1 MoE layer``, ``2 MoE layers``."""
    return f"{number} {what}{'s' * (number != 1)}"
