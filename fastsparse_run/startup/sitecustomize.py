"""Python imports this module when it starts, because `fastsparse run` put its folder first in PYTHONPATH."""

import contextlib
import importlib.util
import os
import sys
from importlib.machinery import PathFinder

# Only Python processes that are started later need this folder.
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(__file__)]
_hidden = PathFinder.find_spec("sitecustomize", sys.path)
if _hidden is not None and _hidden.loader is not None:
    _module = importlib.util.module_from_spec(_hidden)
    sys.modules["sitecustomize"] = _module
    _hidden.loader.exec_module(_module)
with contextlib.suppress(ImportError):  # Python of another environment has no FastSparse
    from fastsparse_run import watch

    watch.start(os.environ.get(watch.VARIABLE, ""))
