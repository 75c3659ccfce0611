"""The limit of a sparse kernel: the rate at which it can gather rows by column indices."""

from __future__ import annotations

import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

PEERS = Path(__file__).resolve().parent / "peers.json"


@functools.cache
def peers() -> dict[str, Any]:
    """Stored times of baselines and the gather roofline, all on the GPU model that ``gpu`` names."""
    return json.loads(PEERS.read_text())


#: On graphs with more edges, the roofline is the limit, and a kernel should reach this share of it. Smaller
#: graphs are limited by launch overhead, latency and balance.
LARGE_EDGES = 10_000_000
TARGET = 0.85


def gather_bytes(rows: int, width: int, itemsize: int) -> int:
    """Bytes of the rows that are gathered: one per edge, or one per vector where 8 destinations share it."""
    return rows * width * itemsize


def gather_bandwidth(table_bytes: int) -> float:
    """Measured bandwidth (TB/s) of gathering uniformly random rows of a table, by its size.

    Linear in the logarithm of the size between the stored points, constant outside them.
    """
    points = peers()["gather_roofline"]["table_mb_and_tb_per_s"]
    size = table_bytes / 1e6
    if size <= points[0][0]:
        return points[0][1]
    for (low, fast), (high, slow) in itertools.pairwise(points):
        if size <= high:
            return fast + (slow - fast) * math.log(size / low) / math.log(high / low)
    return points[-1][1]


def spmm_floor_ms(rows: int, num_src: int, width: int, itemsize: int) -> float:
    """Minimum time to gather a number of rows, at the measured bandwidth for a table of this size.

    Real columns repeat more than uniformly random ones and so hit the cache more often: on graphs with a few
    very popular nodes a kernel can come out below this time.
    """
    bandwidth = gather_bandwidth(num_src * width * itemsize)
    return gather_bytes(rows, width, itemsize) / bandwidth / 1e9
