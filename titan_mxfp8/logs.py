"""Log lines that a process says once, however many layers they are about."""

import logging
from functools import cache


@cache
def log_once(logger: logging.Logger, line: str) -> None:
    logger.info(line)
