"""Shows the extension the OpenMP runtime that PyTorch has loaded.

The extension links none of its own, because two in one process would start twice the threads. PyTorch for
x86-64 loads its runtime for every library to see, PyTorch for aarch64 for its own libraries alone.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys

import torch  # noqa: F401  (which loads the runtime)

if sys.platform == "linux" and not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
    with open("/proc/self/maps", encoding="utf-8") as _maps:
        _paths = set(re.findall(r"/.*/lib(?:gomp|omp|iomp5)[-.].*", _maps.read()))
    for _path in sorted(_paths):
        ctypes.CDLL(_path, mode=os.RTLD_NOLOAD | os.RTLD_GLOBAL)
