"""Tables of pruned linear layers."""

from __future__ import annotations

from typing import Any

from .cells import Cell, Table, by, first, ordered, quotient, ratio
from .choice import REGRET_SEEN


def sparse_linear(result: dict[str, Any]) -> list[Table]:
    """The time of the dense product over that of the sparse one."""
    tables = []
    for dtype, mode in ordered((cell["dtype"], cell["mode"]) for cell in result["cells"]):
        group = by(result["cells"], dtype=dtype, mode=mode)
        densities = ordered(cell["density"] for cell in group)
        rows = []
        for shape, batch in ordered((cell["shape"], cell["batch"]) for cell in group):
            cells = [first(group, shape=shape, batch=batch, density=density) for density in densities]
            rows.append([f"{shape}, batch {batch}", *map(_dense_over_sparse, cells)])
        title = f"{mode}, {dtype}: dense time over sparse time; picked: s sparse, d dense, ! the slower one"
        tables.append(Table(title, ["layer", *(f"{density:.1%} kept" for density in densities)], rows))
    return tables


def _dense_over_sparse(cell: Cell | None) -> str:
    if cell is None or cell["status"] != "ok":
        return "-" if cell is None else cell["status"].split(":")[0]
    mark = cell["pick"][0] + ("!" if cell["regret"] > REGRET_SEEN else "")
    return f"{ratio(quotient(cell['dense_ms'], cell['sparse_ms']))} {mark}"
