"""Makes PyTorch's OpenMP runtime visible to the extension.

The extension does not link an OpenMP runtime, because two runtimes in one process would start twice as many
threads. PyTorch for x86-64 loads its runtime with global symbols. PyTorch for aarch64 does not, so this
module makes the symbols of the loaded runtime global.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys

import torch  # noqa: F401  (loads the runtime)

if sys.platform == "linux" and not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
    with open("/proc/self/maps", encoding="utf-8") as _maps:
        _paths = set(re.findall(r"/.*/lib(?:gomp|omp|iomp5)[-.].*", _maps.read()))
    for _path in sorted(_paths):
        ctypes.CDLL(_path, mode=os.RTLD_NOLOAD | os.RTLD_GLOBAL)
