"""Whether attention runs as one kernel or step by step."""

from __future__ import annotations

import logging

from fastsparse_core.log import info_once

_logger = logging.getLogger("fastsparse_core")


def attention_algorithm(algorithm: str, obstacle: str) -> str:
    """Resolves ``"auto"``, and a request that this call cannot serve, to ``"fused3s"`` or ``"unfused"``.

    Args:
        algorithm: as the caller asked.
        obstacle: why the fused kernels cannot serve the call, "" if they can.
    """
    if algorithm == "unfused":
        return algorithm
    if obstacle:
        info_once(_logger, f"attention runs as 'unfused', with memory for every edge: {obstacle}")
        return "unfused"
    return "fused3s"
