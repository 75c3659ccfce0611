"""Logging that tells a user once which path was taken."""

from __future__ import annotations

import logging

import torch

from fastsparse_core.locks import ForkSafeLock

_lock = ForkSafeLock()
#: Names of loggers, and what each of them was given.
seen: set[tuple[str, str]] = set()


def info_once(logger: logging.Logger, message: str) -> None:
    """Logs `message` at INFO the first time this logger is given it; later calls are silent.

    So is code that torch.compile traces: it could not be traced.
    """
    if torch.compiler.is_compiling():
        return
    key = (logger.name, message)
    if key in seen:
        return
    with _lock:
        if key in seen:
            return
        seen.add(key)
    logger.info(message)
