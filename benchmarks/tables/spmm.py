"""Tables of the sparse-dense product."""

from __future__ import annotations

from typing import Any

from ..common import geometric_mean
from .cells import (
    COMPARED,
    Table,
    by,
    compared,
    first,
    has_roofline,
    number,
    ordered,
    percent,
    quotient,
    ratio,
    shown,
    stored_rivals,
    time_of,
)


def spmm(result: dict[str, Any]) -> list[Table]:
    cells = result["cells"]
    tables = []
    keys = ordered((c["dtype"], c["width"], c["direction"]) for c in cells)
    for dtype, width, direction in keys:
        group = by(cells, dtype=dtype, width=width, direction=direction)
        ours_name, rival_name = (
            next(
                name
                for name in ordered(c["implementation"] for c in group)
                if name.startswith("fast") == ours
            )
            for ours in (True, False)
        )
        rows, ratios, stored_ratios, fractions = [], [], [], []
        for graph in ordered(c["graph"] for c in group):
            ours = first(group, graph=graph, implementation=ours_name)
            rival = first(group, graph=graph, implementation=rival_name)
            stored = stored_rivals(result, f"spmm@{width}", dtype, graph) if direction == "forward" else {}
            best = min(stored, key=stored.__getitem__, default=None)
            mine = time_of(ours)
            speed = quotient(time_of(rival), mine)
            against = quotient(stored.get(best) if best else None, mine)
            fraction = quotient(ours["floor_ms"] if ours else None, mine) if has_roofline(result) else None
            rate = ours["gather_bytes"] / mine / 1e6 if ours and mine else None
            ratios.append(speed)
            stored_ratios.append(against)
            fractions.append(fraction)
            spread = f" ({number(ours['p20_ms'])}-{number(ours['p80_ms'])})" if ours and mine else ""
            rows.append(
                [
                    graph,
                    shown(ours) + spread,
                    shown(rival),
                    ratio(speed),
                    number(ours.get("error") if ours else None, 2),
                    number(rate),
                    "-" if fraction is None else f"{fraction:.0%}",
                    f"{best} {number(stored[best])}" if best else "-",
                    ratio(against),
                ]
            )
        rows.append(
            [
                "geometric mean",
                "",
                "",
                ratio(geometric_mean(r for r in ratios if r)),
                "",
                "",
                percent(geometric_mean(f for f in fractions if f)),
                "",
                ratio(geometric_mean(r for r in stored_ratios if r)),
            ]
        )
        columns = [
            "graph",
            f"{ours_name} ms (20-80 %)",
            f"{rival_name} ms",
            "speed-up",
            "error",
            "gather GB/s",
            "of roofline",
            "best stored rival ms",
            "against it",
        ]
        tables.append(Table(f"spmm {direction}, {dtype}, F = {width}", columns, rows))
    return tables


RODE = "RoDe fp32"
#: Rivals of the same precision that something was asked of, beside the fastest.
NAMED = ("FlashSparse fp16", RODE)


def spmm_in_short(result: dict[str, Any]) -> list[Table]:
    """Against cuSPARSE in the same run, and against stored times."""
    cells = result["cells"]
    rows = []
    for direction, dtype, width in ordered((c["direction"], c["dtype"], c["width"]) for c in cells):
        group = by(cells, direction=direction, dtype=dtype, width=width)
        own = [c for c in group if c["implementation"].startswith("fast")]
        if not own:
            continue
        what = f"{own[0]['implementation'].split()[-1]}, {direction}, {dtype}, F = {width}"
        speeds: dict[str, dict[str, float]] = {"cuSPARSE": {}, "the fastest stored": {}}
        for cell in own:
            graph, mine = cell["graph"], time_of(cell)
            stored = stored_rivals(result, f"spmm@{width}", dtype, graph) if direction == "forward" else {}
            rival = next(
                (c for c in by(group, graph=graph) if not c["implementation"].startswith("fast")), None
            )
            times = {"cuSPARSE": time_of(rival), "the fastest stored": min(stored.values(), default=None)}
            for name, time in {**times, **{n: stored[n] for n in NAMED if n in stored}}.items():
                if speed := quotient(time, mine):
                    speeds.setdefault(name, {})[graph] = speed
        rows += [compared(what, name, found) for name, found in speeds.items() if found]
    return [Table("Rival's time over ours", COMPARED, rows)]


def spmm_together(results: list[dict[str, Any]]) -> list[Table]:
    """The faster of our algorithms on every graph against stored float32 times.

    What serves a float32 product best differs from graph to graph, and each algorithm has a record of its
    own.

    Args:
        results: Records of one GPU model.
    """
    cells = [
        {**cell, "stored": stored_rivals(result, f"spmm@{cell['width']}", "float32", cell["graph"])}
        for result in results
        for cell in by(result["cells"], dtype="float32", direction="forward")
    ]
    rows = []
    for width in ordered(c["width"] for c in cells):
        speeds: dict[str, dict[str, float]] = {RODE: {}, f"the faster of {RODE} and cuSPARSE": {}}
        group = by(cells, width=width)
        names = ordered(
            c["implementation"].split()[-1] for c in group if c["implementation"].startswith("fast")
        )
        if len(names) < 2:
            continue
        for graph in ordered(c["graph"] for c in group):
            here = by(group, graph=graph)
            ours, cusparse = (
                [time for c in here if c["implementation"].startswith("fast") == own and (time := time_of(c))]
                for own in (True, False)
            )
            rode = here[0]["stored"].get(RODE)
            if not ours or rode is None:
                continue
            for rival, time in zip(speeds, (rode, min([rode, *cusparse])), strict=True):
                speeds[rival][graph] = time / min(ours)
        what = f"the faster of {' and '.join(names)}, forward, float32, F = {width}"
        rows += [compared(what, rival, found) for rival, found in speeds.items() if found]
    return [Table("Rival's time over the faster of ours", COMPARED, rows)] if rows else []
