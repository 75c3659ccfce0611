"""Tables of the sparse-dense product."""

from __future__ import annotations

from typing import Any

from .cells import (
    Cell,
    Column,
    Row,
    Table,
    best_stored,
    by,
    by_graph,
    compared_table,
    has_roofline,
    mean_of,
    number,
    ordered,
    percent,
    pivot,
    quotient,
    shown,
    speedup,
    spread,
    stored_baselines,
    time_of,
    value,
)

RODE = "RoDe fp32"
#: Baselines of the same precision that have a goal; shown next to the fastest baseline.
NAMED = ("FlashSparse fp16", RODE)


def _is_ours(cell: Cell) -> bool:
    return cell["implementation"].startswith("fast")


def _stored(result: dict[str, Any], cell: Cell) -> dict[str, float]:
    """Baselines' times of the product; they also count for the gradient, which is the same product."""
    if cell["direction"] != "forward":
        return {}
    return stored_baselines(result, f"spmm@{cell['width']}", cell["dtype"], cell["graph"])


def spmm(result: dict[str, Any]) -> list[Table]:
    def columns(cells: list[Cell]) -> list[Column]:
        ours, baseline = (
            next(cell["implementation"] for cell in cells if _is_ours(cell) == own) for own in (True, False)
        )

        def mine(row: Row, field: str) -> Any:
            return (row[ours] or {}).get(field)

        def fraction(row: Row) -> float | None:
            return quotient(mine(row, "floor_ms") if has_roofline(result) else None, time_of(row[ours]))

        def rate(row: Row) -> str:
            found = quotient(mine(row, "gather_bytes"), time_of(row[ours]))
            return number(found / 1e6 if found else None)

        return [
            value("graph"),
            Column(
                f"{ours} ms (20-80 %)",
                lambda row: shown(row[ours]) + (spread(row[ours]) if row[ours] else ""),
            ),
            Column(f"{baseline} ms", lambda row: shown(row[baseline])),
            speedup("speed-up", baseline, ours),
            Column("error", lambda row: number(mine(row, "error"), 2)),
            Column("gather GB/s", rate),
            mean_of("of roofline", fraction, percent),
            *best_stored(lambda row: _stored(result, row.cell), ours, "against it"),
        ]

    split = ("dtype", "width", "direction")
    title = "spmm {direction}, {dtype}, F = {width}"
    return pivot(result["cells"], title, ("graph",), columns, split=split, last="geometric mean")


def spmm_in_short(result: dict[str, Any]) -> list[Table]:
    """Against cuSPARSE in the same run, and against stored times."""
    found = {}
    for direction, dtype, width in ordered((c["direction"], c["dtype"], c["width"]) for c in result["cells"]):
        group = by(result["cells"], direction=direction, dtype=dtype, width=width)
        own = list(filter(_is_ours, group))
        if not own:
            continue
        cusparse = {cell["graph"]: time_of(cell) for cell in reversed(group) if not _is_ours(cell)}
        times = {
            "cuSPARSE": lambda cell, known=cusparse: known.get(cell["graph"]),
            "the fastest stored": lambda cell: min(_stored(result, cell).values(), default=None),
            **{
                name: lambda cell, name=name: _stored(result, cell).get(name)
                for name in _in_order(result, own)
            },
        }
        what = f"{own[0]['implementation'].split()[-1]}, {direction}, {dtype}, F = {width}"
        found |= {(what, name): by_graph(own, time) for name, time in times.items()}
    return [compared_table(found)]


def _in_order(result: dict[str, Any], cells: list[Cell]) -> list[str]:
    return ordered(name for cell in cells for name in NAMED if name in _stored(result, cell))


def spmm_together(results: list[dict[str, Any]]) -> list[Table]:
    """The faster of our algorithms on every graph against stored float32 times.

    The fastest algorithm for a float32 product differs from graph to graph, and each algorithm has its own
    record.

    Args:
        results: Records of one GPU model.
    """
    cells = [
        {**cell, "stored": stored_baselines(result, f"spmm@{cell['width']}", "float32", cell["graph"])}
        for result in results
        for cell in by(result["cells"], dtype="float32", direction="forward")
    ]
    found = {}
    for width in ordered(c["width"] for c in cells):
        group = by(cells, width=width)
        names = ordered(cell["implementation"].split()[-1] for cell in group if _is_ours(cell))
        if len(names) < 2:
            continue
        what = f"the faster of {' and '.join(names)}, forward, float32, F = {width}"
        for graph in ordered(c["graph"] for c in group):
            here = by(group, graph=graph)
            ours, cusparse = (
                [time for cell in here if _is_ours(cell) == own and (time := time_of(cell))]
                for own in (True, False)
            )
            rode = here[0]["stored"].get(RODE)
            if ours and rode is not None:
                baselines = {RODE: rode, f"the faster of {RODE} and cuSPARSE": min([rode, *cusparse])}
                for baseline, time in baselines.items():
                    found.setdefault((what, baseline), {})[graph] = time / min(ours)
    return [compared_table(found, "Baseline's time over the faster of ours")] if found else []
