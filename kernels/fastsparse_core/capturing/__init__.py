"""Steps and models as CUDA graphs."""

from fastsparse_core.capturing.decorator import capture
from fastsparse_core.lazy import import_extensions

__all__ = ["capture"]

import_extensions(__name__)
