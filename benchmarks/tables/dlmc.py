"""Tables of pruned weight matrices, and of what kernels build before a product."""

from __future__ import annotations

from typing import Any

from .cells import (
    Cell,
    Column,
    Row,
    Table,
    by,
    fastest,
    fastest_with_time,
    mean_of,
    number,
    ordered,
    pivot,
    quotient,
    shown,
    speedup,
    stored_baselines,
    time_of,
    value,
)

#: Columns of preprocessing that divide one step by another.
_RATIOS = {
    "list / spmm hr, device": ("hr work list, device", "spmm hr"),
    "list / spmm hr, wall clock": ("hr work list", "spmm hr, wall clock"),
    "list / conversion": ("hr work list", "flashsparse conversion"),
}


def dlmc(result: dict[str, Any]) -> list[Table]:
    """Pruned matrices by dtype, and preprocessing by graph."""
    # Records from before 0.2 also have times of a layer that was removed
    # (docs/dev/decisions/no_sparse_linear.md).
    cells = [c for c in by(result["cells"], part="matrices") if c["implementation"] != "SparseLinear"]
    tables = []
    for dtype, width in ordered((c["dtype"], c["width"]) for c in cells):
        tables += _matrices(result, by(cells, dtype=dtype, width=width))

    def columns(cells: list[Cell]) -> list[Column]:
        steps = ordered(cell["step"] for cell in cells)
        return [
            value("graph"),
            *map(_microseconds, steps),
            *(speedup(it, *pair) for it, pair in _RATIOS.items()),
        ]

    title = "Before a product, float16, F = {width}, microseconds"
    before = by(result["cells"], part="preprocessing")
    return tables + pivot(before, title, ("graph",), columns, split=("part",), by="step")


def _microseconds(name: str, field: str = "median_ms") -> Column:
    """A time of a cell, otherwise its status."""

    def text(row: Row) -> str:
        cell = row[name]
        if cell is not None and field in cell:
            return number(1e3 * cell[field])
        return "-" if cell is None or cell["status"] == "ok" else shown(cell)

    return Column(name.removeprefix("fastsparse "), text)


def _matrices(result: dict[str, Any], cells: list[Cell]) -> list[Table]:
    """Times of everything, then ratios to stored baselines: those of the best of ours, of tca and of hr."""
    names = ordered(cell["implementation"] for cell in cells)

    def stored(row: Row) -> dict[str, float]:
        return stored_baselines(result, f"dlmc@{row.cell['width']}", row.cell["dtype"], row.key["matrix"])

    def ours(row: Row) -> dict[str, float]:
        known = ((name, time_of(row[name])) for name in names if name.startswith("fast"))
        return {name.removeprefix("fastsparse "): time for name, time in known if time is not None}

    def best(row: Row) -> float | None:
        return min(ours(row).values(), default=None)

    title = "DLMC, {dtype}, N = {width}"
    facts = [
        value("matrix"),
        Column("shape", lambda row: f"{row.cell['rows']}x{row.cell['columns']}"),
        value("sparsity", form="{:.3f}".format),
    ]
    ratios = [
        value("matrix"),
        Column("best of ours", lambda row: fastest(ours(row)) or "-"),
        Column("best stored baseline us", lambda row: fastest_with_time(stored(row), 1e3)),
        mean_of(
            "best stored baseline / best",
            lambda row: quotient(min(stored(row).values(), default=None), best(row)),
        ),
        mean_of("TCA-SpMM / tca", lambda row: quotient(stored(row).get("TCA fp16"), ours(row).get("tca"))),
        mean_of("Sputnik / hr", lambda row: quotient(stored(row).get("Sputnik fp32"), ours(row).get("hr"))),
        mean_of("csr / best", lambda row: quotient(ours(row).get("csr"), best(row))),
        mean_of("dense / best", lambda row: quotient(time_of(row["dense"]), best(row))),
    ]
    columns = facts + list(map(_microseconds, names))
    tables = pivot(cells, f"{title}, microseconds", ("matrix",), columns)
    (compared,) = pivot(cells, f"{title}, ratios", ("matrix",), ratios, last="geometric mean")
    # Without baselines of this GPU model there is nothing to compare with.
    filled = [i for i in range(len(ratios)) if any(row[i] not in ("", "-") for row in compared.rows)]
    rows = [[row[i] for i in filled] for row in compared.rows]
    tables.append(Table(compared.title, [compared.columns[i] for i in filled], rows))
    warm = {cell["matrix"] for cell in cells if "warm_median_ms" in cell}
    columns = facts + [_microseconds(name, "warm_median_ms") for name in names]
    if warm:
        cells = [cell for cell in cells if cell["matrix"] in warm]
        tables += pivot(cells, f"{title}, microseconds back to back, warm", ("matrix",), columns)
    return tables
