"""Storage formats derived from an Adjacency, one module each."""

from fastsparse_core.formats.cbsr import CBSR
from fastsparse_core.formats.row_split import RowSplit

__all__ = ["CBSR", "RowSplit"]
