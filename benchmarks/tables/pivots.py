"""Tables that are pivots of a record's cells, a function for each benchmark."""

from __future__ import annotations

import statistics
from typing import Any

from ..roofline import LARGE_EDGES
from ..runner import geometric_mean
from .cells import (
    Cell,
    Column,
    Row,
    Table,
    best_stored,
    by,
    by_graph,
    compared_table,
    first,
    key_column,
    memory_columns,
    number,
    ordered,
    percent,
    pivot,
    quotient,
    ratio,
    shown,
    speedup,
    spread,
    stored_baselines,
    time_columns,
    time_of,
    value,
)

Record = dict[str, Any]

#: A pick of `auto` this much slower than the best is marked: less is within the spread of the timings.
REGRET_SEEN = 1.03
#: Largest accepted time of a pick, relative to the best one.
ACCEPTED_REGRET = 1.10

_BOTH = {"pyg": "PyG ms", "fastsparse": "ours ms"}
_PYG_OVER_OURS = speedup("PyG/ours", "pyg", "fastsparse")
_MS = Column("ms (20-80 %)", lambda row: shown(row.cell) + spread(row.cell))


def _count(number: int) -> str:
    return f"{number:,}"


def cpu(result: Record) -> list[Table]:
    def slower(row: Row) -> str:
        ours = first(row.table, graph=row.cell["graph"], implementation="FastGCNConv")
        return ratio(quotient(time_of(row.cell), time_of(ours)))

    columns = [value("graph"), value("implementation"), _MS, Column("time against ours", slower)]
    columns.append(value("difference from PyG", "error", lambda error: number(error, 2)))
    return pivot(result["cells"], "One GCN layer on the CPU, forward and backward, float32", (), columns)


def breakdown(result: Record) -> list[Table]:
    """Per model and precision: milliseconds of every kind of work in a step."""

    def columns(cells: list[Cell]) -> list[Column]:
        kinds = next((cell["kinds_ms"] for cell in cells if cell["status"] == "ok"), {})
        return [
            value("graph"),
            Column("step", lambda row: shown(row.cell)),
            *(value(kind, "kinds_ms", lambda ms, kind=kind: number((ms or {}).get(kind))) for kind in kinds),
            value("device idle", "idle_ms", number),
        ]

    return pivot(result["cells"], "{model}, {dtype}, ms", (), columns, split=("model", "dtype"))


def pna(result: Record) -> list[Table]:
    """PyG against the drop-in, a row for every graph, width, number of edge features and dtype."""
    columns = [value("graph"), value("width"), value("edge features", "features"), value("dtype")]
    columns += [
        *time_columns(_BOTH),
        _PYG_OVER_OURS,
        *memory_columns({"pyg": "PyG peak GB", "fastsparse": "our peak GB"}),
    ]
    rows = ("graph", "width", "features", "dtype")
    return pivot(result["cells"], "PNA, forward and backward", rows, columns)


def adjacency(result: Record) -> list[Table]:
    columns = [value("graph"), value("edges", form=_count), value("structure")]
    columns += [Column("build ms", lambda row: shown(row.cell))]
    columns += [value("kept GB", "kept_gb", number), value("scratch GB", "scratch_gb", number)]
    return pivot(result["cells"], "Adjacency and its transpose from unsorted edges", (), columns)


def adjacency_in_short(result: Record) -> list[Table]:
    """Large graphs only."""
    large = [cell for cell in result["cells"] if cell["edges"] > LARGE_EDGES]
    return adjacency({**result, "cells": large or result["cells"]})


def large(result: Record) -> list[Table]:
    """Seconds and memory of a step."""
    columns = [value("model"), value("activations in memory of the", "activations")]
    columns += [value("nodes", "num_nodes", _count), value("entries", form=_count)]
    columns += [value("seconds per step", "step_s", number), value("peak GB", "peak_gb", number)]
    columns += [value("status")]
    return pivot(result["cells"], "Forward, backward and Adam", (), columns)


def typed(result: Record) -> list[Table]:
    """Times and peaks of PyG's layers and ours."""

    def memory(row: Row) -> str:
        return ratio(quotient(*((row[name] or {}).get("peak_bytes") for name in ("pyg", "fastsparse"))))

    columns = [
        Column("layer", lambda row: " ".join(filter(None, (row.key["layer"], row.key["options"])))),
        Column("graph", lambda row: f"{row.key['graph']}, {row.key['edges'] / 1e6:.2g} M edges"),
        *time_columns(_BOTH),
        _PYG_OVER_OURS,
        *memory_columns({"pyg": "PyG GB", "fastsparse": "ours GB"}),
        Column("PyG/ours memory", memory),
    ]
    rows = ("layer", "options", "graph", "edges")
    return pivot(result["cells"], "Layers of typed edges, forward and backward", rows, columns)


def any_layer(result: Record) -> list[Table]:
    """One table per graph; the last line of each is the geometric mean."""
    columns = [
        value("layer"),
        Column("computed by", lambda row: (row["fastsparse"] or {}).get("by", "")),
        *time_columns(_BOTH),
        _PYG_OVER_OURS,
        *memory_columns({"pyg": "PyG MB", "fastsparse": "our MB"}, 1e6),
    ]
    title = "Layers of PyG, forward and backward, {graph}"
    return pivot(result["cells"], title, ("layer",), columns, split=("graph",), last="geometric mean")


def messages(result: Record) -> list[Table]:
    """A table per graph and dtype; the last line of each is the geometric mean."""

    def memory(row: Row) -> str:
        return ratio(quotient(*((row[name] or {}).get("peak_bytes") for name in ("pyg", "fastsparse"))))

    names = {**_BOTH, "compiled": "compiled ms", "named": "named ms"}
    columns = [
        value("message"),
        *time_columns(names),
        _PYG_OVER_OURS,
        speedup("compiled/ours", "compiled", "fastsparse"),
        speedup("ours/named", "fastsparse", "named"),
        *memory_columns({"pyg": "PyG MB", "compiled": "compiled MB", "fastsparse": "our MB"}, 1e6),
        Column("PyG/ours memory", memory),
    ]
    title, split = "Messages, forward and backward, {graph}, {dtype}", ("graph", "dtype")
    return pivot(result["cells"], title, ("message",), columns, split=split, last="geometric mean")


def segments(result: Record) -> list[Table]:
    """One table without and one with the gradient."""

    def repeats(row: Row) -> str:
        ours = (row["new index"], row["kept index"])
        return "yes" if all(cell["repeats"] for cell in ours if cell and "repeats" in cell) else "no"

    columns = [
        key_column("graph, width, dtype, reduction"),
        *time_columns({name: f"{name} ms" for name in ("torch", "new index", "kept index")}),
        speedup("torch/new", "torch", "new index"),
        speedup("torch/kept", "torch", "kept index"),
        Column("same bits", repeats),
    ]

    def title(rows: list[Row]) -> str:
        return f"scatter, {'forward and backward' if rows[0].cell['backward'] else 'forward'}"

    rows = ("graph", "width", "dtype", "reduce")
    cells = sorted(result["cells"], key=lambda cell: cell["backward"])
    return pivot(cells, title, rows, columns, split=("backward",))


def masks(result: Record) -> list[Table]:
    """A table for each direction and dtype, with times and what a call takes of memory."""
    names = {"FastSparse": "ours", "dense": "dense mask", "flex": "FlexAttention", "nested": "nested"}
    others = [name for name in names if name != "FastSparse"]
    columns = [
        value("mask"),
        value("tokens", form=_count),
        value("kept", form=lambda share: f"{share:.2%}"),
        *time_columns({name: f"{title} ms" for name, title in names.items()}),
        *(speedup(f"{names[name]}/ours", name, "FastSparse") for name in others),
        *memory_columns({name: f"{title} MB" for name, title in names.items()}, 1e6),
    ]

    def title(rows: list[Row]) -> str:
        cell = rows[0].cell
        return f"{'forward and backward' if cell['backward'] else 'forward'}, {cell['dtype']}"

    return pivot(result["cells"], title, ("mask", "tokens", "kept"), columns, split=("backward", "dtype"))


def enabled(result: Record) -> list[Table]:
    """A table per kind of graph; the start of a script is a row of its own."""
    columns = [
        key_column("call, dtype"),
        *time_columns({"plain": "plain ms", "enabled": "enabled ms"}),
        speedup("plain/enabled", "plain", "enabled"),
    ]

    def title(rows: list[Row]) -> str:
        cell = rows[0].cell
        return f"{cell['graph']}, {'forward and backward' if cell['backward'] else 'forward'}"

    return pivot(result["cells"], title, ("call", "dtype"), columns, split=("graph", "backward"))


def dgl_operators(result: Record) -> list[Table]:
    """A row per graph and operator."""
    others = ("ours", "PyG", "DGL", "DGL, two CPU cores")
    others = [name for name in others if first(result["cells"], implementation=name)]
    columns = [value("graph"), value("operator")]
    columns += time_columns({name: f"{name} ms" for name in ("enabled", *others)})
    columns += [speedup(f"{name}/enabled", name, "enabled") for name in others]
    title = "DGL's operators on FastSparse, forward and backward, float32"
    return pivot(result["cells"], title, ("graph", "operator"), columns)


def edges(result: Record) -> list[Table]:
    """Whole attention layers, their operators alone, and GINE and gated layers."""
    tables = []
    columns = [
        key_column("graph, layer, heads, dtype"),
        *time_columns({"pyg": "PyG ms", "triton": "Triton ms", "fastsparse": "ours ms"}),
        _PYG_OVER_OURS,
        speedup("Triton/ours", "triton", "fastsparse"),
        *memory_columns({"fastsparse": "our peak GB"}),
    ]
    rows = ("graph", "layer", "heads", "dtype")
    for part, title in (("layer", "Layers with edge features"), ("operator", "The operators alone")):
        tables += pivot(by(result["cells"], part=part), f"{title}, forward and backward", rows, columns)
    title = "GINE and gated layers 128 wide, forward and backward"
    columns = [key_column("graph, layer, features of an edge, dtype"), *time_columns(_BOTH), _PYG_OVER_OURS]
    columns += memory_columns({"pyg": "PyG GB", "fastsparse": "our GB"})
    cells, rows = by(result["cells"], part="messages"), ("graph", "layer", "features", "dtype")
    means = [
        table.rows[-1]
        for graph in ordered(cell["graph"] for cell in cells)
        for table in pivot(by(cells, graph=graph), title, rows, columns, last=f"{graph}, geometric mean")
    ]
    messages = pivot(cells, title, rows, columns)
    for table in messages:
        table.rows.extend(row for row in means if row[3] != "-")
    return tables + messages


def maxk(result: Record) -> list[Table]:
    """By dataset: test scores, stored activations and time of every k, next to those of ReLU."""

    def relu(row: Row) -> Cell | None:
        found = first(row.table, activation="ReLU")
        return None if found is row.cell else found

    def within(row: Row) -> str:
        other = relu(row)
        if other is None or other["std"] is None:
            return "-"
        return "yes" if other["mean"] - row.cell["mean"] <= other["std"] else "no"

    def columns(cells: list[Cell]) -> list[Column]:
        return [
            value("activation"),
            Column(f"{cells[0]['metric']}, %", lambda row: _score(row.cell)),
            Column(
                "loss",
                lambda row: f"{100 * (it['mean'] - row.cell['mean']):+.2f}" if (it := relu(row)) else "-",
            ),
            Column("within one std", within),
            value("activations MB", "stored_bytes", lambda found: number(sum(found) / 1e6)),
            Column(
                "of ReLU's",
                lambda row: ratio(
                    quotient(
                        sum(row.cell["stored_bytes"]), sum(it["stored_bytes"]) if (it := relu(row)) else None
                    )
                ),
            ),
            value("step ms", "step_ms", number),
        ]

    def title(rows: list[Row]) -> str:
        return f"{rows[0].cell['implementation'].split(',')[0]}, {rows[0].cell['dataset']}"

    return pivot(result["cells"], title, (), columns, split=("dataset", "operator"))


def _score(cell: Cell) -> str:
    spread = "" if cell["std"] is None else f" ± {100 * cell['std']:.2f}"
    return f"{100 * cell['mean']:.2f}{spread}"


def accuracy(result: Record) -> list[Table]:
    """FlashSparse's table 8: the framework's own layer in float32, and the drop-in in every precision."""

    def columns(cells: list[Cell]) -> list[Column]:
        precisions = ordered(cell["precision"] for cell in cells if cell["conv"] == "fast")

        def found(row: Row, conv: str = "reference", precision: str = "fp32") -> Cell:
            return first(row.cells, conv=conv, precision=precision) or {"status": "-"}

        def score(cell: Cell) -> str:
            return _score(cell) if cell["status"] == "ok" else shown(cell)

        def losses(row: Row) -> list[float]:
            original, ours = found(row), (found(row, "fast", precision) for precision in precisions)
            return [original["mean"] - it["mean"] for it in ours if "mean" in it and "mean" in original]

        def verdict(row: Row) -> str:
            spread, lost = found(row).get("std"), losses(row)
            if not lost or spread is None:
                return "-"
            return "yes" if max(lost) <= spread and len(lost) == len(precisions) else "no"

        return [
            *map(value, group),
            value("metric"),
            Column("original fp32", lambda row: score(found(row))),
            *(Column(f"drop-in {it}", lambda row, it=it: score(found(row, "fast", it))) for it in precisions),
            Column("largest loss", lambda row: f"{100 * max(lost):+.2f}" if (lost := losses(row)) else "-"),
            Column("all within one std", verdict),
        ]

    # Records of the GCN alone may lack the model's name. A failed task has no metric, so it counts for all
    # metrics.
    group = ("dataset", "framework")
    cells = [{"model": "gcn", **cell} for cell in result["cells"]]
    spread_out = []
    for cell in cells:
        alike = by(cells, **{key: cell[key] for key in ("model", *group)})
        metrics = ordered(it["metric"] for it in alike if "metric" in it) or ["-"]
        spread_out += [
            {"metric": metric, **cell} for metric in (metrics if "metric" not in cell else metrics[:1])
        ]
    title = "{model}: test scores, %, mean ± standard deviation"
    return pivot(spread_out, title, (*group, "metric"), columns, split=("model",))


def epochs(result: Record) -> list[Table]:
    """Milliseconds per batch, of epochs by layer and of the loaders alone."""

    def gain(row: Row) -> float | None:
        baselines = (cell for cell in row.table if cell["implementation"].startswith("PyG"))
        known = [time_of(cell) for cell in baselines if "our loader" not in cell["implementation"]]
        return quotient(min(filter(None, known), default=None), time_of(row.cell))

    def columns(cells: list[Cell]) -> list[Column]:
        more = ("of the host", "host_ms") if cells[0]["layer"] == "none" else ("loss", "loss")
        return [
            value("", "implementation"),
            Column("ms per batch", lambda row: shown(row.cell)),
            Column("PyG's fastest / this", lambda row: ratio(gain(row))),
            value(*more, lambda found: "-" if found is None else f"{found:.3g}"),
        ]

    def title(rows: list[Row]) -> str:
        batch, layer = (rows[0].cell[key] for key in ("batch", "layer"))
        return f"Batches of {batch}, {'the loader alone' if layer == 'none' else f'epochs with {layer}'}"

    return pivot(result["cells"], title, (), columns, split=("batch", "layer"))


def regret(result: Record) -> list[Table]:
    """What auto picks and what that costs, by number of uses and dtype."""

    def picked(cell: Cell | None) -> str:
        if cell is None or cell["status"] != "ok":
            return shown(cell)
        better = f" ({cell['best']})" if cell["regret"] > REGRET_SEEN else ""
        return f"{cell['pick']} {ratio(cell['regret'])}{better}"

    def columns(cells: list[Cell]) -> list[Column]:
        widths = ordered(cell["width"] for cell in cells)
        found = [Column(f"F = {it}", lambda row, it=it: picked(row[it])) for it in widths]
        regrets = [cell["regret"] for cell in cells if cell["status"] == "ok"]
        worst = f"worst {ratio(max(regrets, default=None))}"
        found[-1] = found[-1]._replace(last=lambda rows: worst)
        return [value("structure"), value("edges", form=_count), *found]

    def title(rows: list[Row]) -> str:
        cell = rows[0].cell
        use = "first use" if cell["seen"] == "first" else "prepared"
        return f"spmm, {cell['dtype']}, {use}: pick and its regret"

    cells = [cell for cell in result["cells"] if "seen" in cell]
    tables = pivot(cells, title, ("structure",), columns, split=("seen", "dtype"), by="width", last="within")
    for table, (seen, dtype) in zip(tables, ordered((c["seen"], c["dtype"]) for c in cells), strict=True):
        regrets = [cell["regret"] for cell in by(cells, seen=seen, dtype=dtype, status="ok")]
        within = sum(value <= ACCEPTED_REGRET for value in regrets)
        table.rows[-1][0] = f"within 10 %: {within} of {len(regrets)}"
    return tables


def csr_over_flashsparse(cell: Cell) -> float | None:
    """Above 1 where the tensor cores win; None where one of the two has no time."""
    return quotient(cell.get("csr_median_ms"), cell.get("flashsparse_median_ms"))


def choice(result: Record) -> list[Table]:
    """The time of csr over that of flashsparse, and what auto's picks cost."""

    def crossover(cell: Cell | None) -> str:
        if cell is None or cell["status"] != "ok":
            return shown(cell)
        # Two timings of the same call differ by a few per cent.
        mark = cell["pick"][0] + ("!" if cell["regret"] > REGRET_SEEN else "")
        speed = csr_over_flashsparse(cell)
        return f"{ratio(speed)} {mark}" if speed else mark

    def regrets(cells: list[Cell]) -> list[float]:
        return [cell["regret"] for cell in cells if cell["status"] == "ok"]

    def columns(cells: list[Cell]) -> list[Column]:
        def per_edge(row: Row) -> str:
            vectors = row.cell["vectors"]
            return number(None if vectors is None else vectors / max(row.cell["edges"], 1), 2)

        return [
            value("graph"),
            Column("vectors/edge", per_edge),
            Column("edges/row", lambda row: number(row.cell["edges"] / max(row.cell["nodes"], 1))),
            *(
                Column(
                    f"F = {it}",
                    lambda row, it=it: crossover(row[it]),
                    lambda rows, it=it: ratio(
                        geometric_mean(
                            speed for row in rows if row[it] and (speed := csr_over_flashsparse(row[it]))
                        )
                    ),
                )
                for it in ordered(cell["width"] for cell in cells)
            ),
            Column(
                "worst regret",
                lambda row: ratio(max(regrets(row.cells), default=None)),
                lambda rows: f"mean {ratio(geometric_mean(regrets(rows[0].table)))}",
            ),
        ]

    cells = [cell for cell in result["cells"] if "dtype" in cell]
    title = "csr time over flashsparse time, {dtype}; picked: c csr, f flashsparse, ! the slower one"
    return pivot(cells, title, ("graph",), columns, split=("dtype",), by="width", last="geometric mean")


def choice_in_short(result: Record) -> list[Table]:
    """What the picks of `auto` cost: the time of each over that of the better algorithm."""

    def worst(row: Row) -> str:
        cell = max(row.cells, key=lambda cell: cell["regret"])
        return f"{ratio(cell['regret'])} {cell['graph']}, F = {cell['width']}"

    def seen(row: Row) -> str:
        return f"{sum(cell['regret'] > REGRET_SEEN for cell in row.cells)} of {len(row.cells)}"

    columns = [
        value("", "dtype"),
        Column("geometric mean", lambda row: ratio(geometric_mean(cell["regret"] for cell in row.cells))),
        Column("maximum regret", worst),
        Column(f"over {REGRET_SEEN:.2f}x", seen),
    ]
    cells = [cell for cell in by(result["cells"], status="ok") if "dtype" in cell]
    title = "Time of what auto picks over the better of csr and flashsparse"
    return pivot(cells, title, ("dtype",), columns)


def scaling(result: Record) -> list[Table]:
    """Time and speed-up by number of GPUs, of divided graphs and of mini-batches."""

    def faster(row: Row) -> str:
        return ratio(quotient(time_of(first(row.table, gpus=1)), time_of(row.cell)))

    columns = [
        value("variant"),
        value("GPUs", "gpus"),
        Column("step ms", lambda row: shown(row.cell)),
        Column("speed-up", faster),
        value("exchange ms", "exchange_ms", number),
        value("halo MB", "halo_mb", number),
        value("cut", "edge_cut", percent),
        value("halo", "halo_share", percent),
        value("balance", form=number),
        value("peak GB", "peak_gb", number),
        value("build ms", "build_ms", number),
        Column("error", lambda row: f"{row.cell['error']:.1e}" if row.cell["gpus"] > 1 else "-"),
    ]
    full, batches = (by(result["cells"], kind=kind) for kind in ("full", "ddp"))
    title = "full graph, gcn3-256, {graph}, {dtype}"
    tables = pivot(full, title, (), columns, split=("graph", "dtype"))
    columns = [value("GPUs", "gpus")]
    for name, field in (
        ("nodes/s", "seeds_per_s"),
        ("nodes/s without sampling", "seeds_per_s_without_sampling"),
    ):

        def more(row: Row, field: str = field) -> str:
            return ratio(quotient(row.cell[field], (first(row.table, gpus=1) or {}).get(field)))

        columns += [value(name, field, number), Column("speed-up", more)]
    title = "mini-batches of {batch}, sage3-256, {graph}, {dtype}"
    tables += pivot(batches, title, (), columns, split=("batch", "dtype"))
    columns = [value("variant"), value("GPUs", "gpus"), Column("epoch ms", lambda row: shown(row.cell))]
    columns += [Column("speed-up", faster)]
    title = "an epoch of {graph}, mini-batches of {batch}, sage3-256"
    tables += pivot(by(result["cells"], kind="papers"), title, (), columns, split=("graph", "batch"))
    columns = [
        value("model", "variant"),
        value("GPUs", "gpus"),
        Column("step ms", lambda row: shown(row.cell)),
    ]
    columns += [value("peak GB", "peak_gb", number)]
    title = "all nodes of {graph}, 3 x 128"
    return tables + pivot(by(result["cells"], kind="large"), title, (), columns, split=("graph",))


def minibatch(result: Record) -> list[Table]:
    """Steps on new structures and their parts, compared with our layer, captured where it was."""

    def slower(row: Row) -> str:
        name = f"FastSAGEConv ({'DGL' if 'DGL' in row.cell['implementation'] else 'PyG'})"
        ours = first(row.table, implementation=f"{name}, CapturedBatches")
        ours = ours or first(row.table, implementation=name)
        return ratio(quotient(time_of(row.cell), time_of(ours)))

    columns = [
        value("implementation"),
        _MS._replace(title="ms per step (20-80 %)"),
        Column("time against ours", slower),
        *(value(f"{part} ms", f"{part}_ms", number) for part in ("structure", "forward", "backward")),
        value("launches", form=lambda count: "-" if count is None else str(count)),
    ]
    cells = [{"precision": "float32", **cell} for cell in result["cells"]]
    title = "{graph}: GraphSAGE on blocks of {edges:,} edges seen once, {width} wide, {precision}"
    return pivot(cells, title, (), columns, split=("graph", "precision"))


def compile(result: Record) -> list[Table]:
    """Milliseconds of a step by graph and layer, a column for each implementation."""
    names = ordered(cell["implementation"] for cell in result["cells"])

    def over(row: Row, slow: str, fast: str) -> str:
        return ratio(quotient(time_of(row[slow]), time_of(row[fast])))

    columns = [value("layer"), *time_columns({name: f"{name} ms" for name in names})]
    pairs = (("FastSparse", "FastSparse, compiled"), ("FastSparse", "FastSparse, reduce-overhead"))
    for slow, fast in (*pairs, ("PyG, compiled", "FastSparse, compiled")):
        if slow in names and fast in names:
            columns.append(
                Column(f"{slow} / {fast}", lambda row, slow=slow, fast=fast: over(row, slow, fast))
            )
    ours = "FastSparse, compiled"
    columns.append(Column("compilations", lambda row: str((row[ours] or {}).get("compilations", "-"))))
    title = "{graph}, {edges:,} edges, forward and backward"
    return pivot(result["cells"], title, ("layer",), columns, split=("graph",))


def small(result: Record) -> list[Table]:
    """Milliseconds of a step by layer, for every kind of graph and precision."""
    all_ours = ("FastSparse", "captured", "captured model")

    def gain(row: Row, name: str) -> float | None:
        baselines = (time_of(cell) for cell in row.cells if cell["implementation"] not in all_ours)
        return quotient(
            min((time for time in baselines if time is not None), default=None), time_of(row[name])
        )

    def columns(cells: list[Cell]) -> list[Column]:
        here = {cell["implementation"] for cell in cells}
        baselines = [
            name for name in ordered(c["implementation"] for c in result["cells"]) if name not in all_ours
        ]
        baselines, ours = ([name for name in names if name in here] for names in (baselines, all_ours))
        errors = {"losses differ by": "loss_difference", "by rounding": "perturbed"}
        return [
            value("layer"),
            *time_columns({name: name for name in (*baselines, *ours)}),
            *(Column(f"fastest other / {it}", lambda row, it=it: ratio(gain(row, it))) for it in ours),
            *(
                Column(title, lambda row, key=key: _exponent((row["captured"] or {}).get(key)))
                for title, key in errors.items()
                if "captured" in ours
            ),
        ]

    def title(rows: list[Row]) -> str:
        means = []
        for name in all_ours:
            if found := [speed for row in rows if (speed := gain(row, name)) is not None]:
                mean = f"{statistics.geometric_mean(found):.2f}x"
                means.append(mean + ("" if name == "FastSparse" else f" {name}"))
        mean = f", geometric mean {', '.join(means)}" if means else ""
        return f"{rows[0].cell['graph']}, {rows[0].cell['dtype']}: ms per step{mean}"

    return pivot(result["cells"], title, ("layer",), columns, split=("graph", "dtype"))


def _exponent(number: float | None) -> str:
    return "-" if number is None else f"{number:.0e}"


def sampling(result: Record) -> list[Table]:
    """Sampling against plain PyTorch, by device; then epochs, also on a graph with billions of entries."""

    def faster(row: Row) -> str:
        plain = first(row.table, implementation="plain PyTorch, blocks")
        return ratio(quotient(time_of(plain), time_of(row.cell)))

    def ok(field: str, form: Any) -> Any:
        return lambda row: form(row.cell[field]) if row.cell["status"] == "ok" else None

    draws, epochs, papers = (by(result["cells"], part=part) for part in ("draw", "epoch", "papers"))
    columns = [
        value("implementation"),
        value("edges", form=_count),
        _MS._replace(title="ms per batch (20-80 %)"),
        value("million edges/s", "edges_per_s", lambda rate: f"{rate / 1e6:,.0f}"),
        Column("speed-up", faster),
    ]
    tables = pivot(draws, "{graph}: drawing a batch, {where}", (), columns, split=("graph", "where"))
    columns = [
        value("step", "implementation"),
        value("precision"),
        Column("seconds", lambda row: ok("epoch_s", number)(row) or row.cell["status"]),
    ]
    title = "{graph}: an epoch of {nodes:,} training nodes, {where}"
    tables += pivot(epochs, title, (), columns, split=("graph",))

    def place(row: Row) -> str:
        cached = row.cell.get("cached")
        return f"the {row.cell['features_on']}" + (f", {cached:,} cached" if cached else "")

    columns = [
        Column("features on", place),
        value("step", "implementation"),
        value("precision"),
        Column("ms per batch", lambda row: shown(row.cell, "ms_per_batch")),
        Column("batches timed", lambda row: ok("batches", _count)(row) or "-"),
        value("seconds per epoch", "epoch_s", number),
    ]
    title = "{graph}: {num_nodes:,} nodes, {entries:,} entries, {nodes:,} training nodes, {where}"
    return tables + pivot(papers, title, (), columns, split=("graph",))


def inference(result: Record) -> list[Table]:
    """One pass over all nodes, by where features are."""
    columns = [
        value("layers", "model"),
        value("features on", "features_on"),
        value("limit of GPU memory, GB", "memory_gb", lambda gb: "-" if gb is None else f"{gb:g}"),
        Column("seconds", lambda row: shown(row.cell, "seconds")),
        value("peak of GPU memory, GB", "peak_gb", number),
        value("results on", "result_on"),
    ]
    title = "{num_nodes:,} nodes, {entries:,} entries, {where}"
    return pivot(result["cells"], title, (), columns, split=("num_nodes",))


def host(result: Record) -> list[Table]:
    cells = result["cells"]
    title = "Host time on a tiny cached graph"
    if "mode" in cells[0]:  # a record of GCN's forward pass alone
        spans = Column(
            "host us per call (20-80 %)",
            lambda row: "{median_us:.1f} ({p20_us:.1f}-{p80_us:.1f})".format_map(row.cell),
        )
        columns = [value("call", "implementation"), value("mode"), spans]
        columns.append(value("above GEMM us", "above_gemm_us", "{:.1f}".format))
        return pivot(cells, title, (), columns)
    columns = [value("layer"), value("features")]
    for name, part in (("forward", "forward"), ("forward and backward", "step")):
        columns.append(
            Column(f"{name} us (over nn.Linear)", lambda row, part=part: _in_linears(row.cell, part, 1))
        )
    alone = pivot([cell for cell in cells if "features" in cell], title, (), columns)
    # Three layers of a kind: a row, with a column for edges seen before and one for new ones.
    stacks = [cell for cell in cells if "structure" in cell]
    columns = [value("layers", "layer")]
    for structure in ordered(cell["structure"] for cell in stacks):
        columns.append(
            Column(
                f"{structure} structure, us (over three nn.Linear)",
                lambda row, structure=structure: _in_linears(row[structure], "step", 0),
            )
        )
    title = "Three layers on a graph of pubmed's size, forward and backward"
    return alone + pivot(stacks, title, ("layer",), columns, by="structure")


def _in_linears(cell: Cell | None, part: str, digits: int) -> str:
    return f"{cell[f'{part}_us']:.{digits}f} ({cell[f'{part}_ratio']:.2f}x)" if cell else "-"


def sddmm(result: Record) -> list[Table]:
    def columns(cells: list[Cell]) -> list[Column]:
        def stored(row: Row) -> dict[str, float]:
            return stored_baselines(result, f"sddmm@{cells[0]['width']}", cells[0]["dtype"], row.key["graph"])

        names = ordered(cell["implementation"] for cell in cells)
        return [
            value("graph"),
            *time_columns({name: f"{name} ms" for name in names}),
            *best_stored(stored, "fastsparse auto", "auto against it"),
        ]

    title = "sddmm, {dtype}, F = {width}"
    return pivot(result["cells"], title, ("graph",), columns, split=("dtype", "width"), last="geometric mean")


def sddmm_in_short(result: Record) -> list[Table]:
    """Our algorithms, and what `auto` ran, against the fastest stored baseline."""
    found = {}
    for dtype, width, name in ordered((c["dtype"], c["width"], c["implementation"]) for c in result["cells"]):
        found[f"{name.split()[-1]}, {dtype}, F = {width}", "the fastest stored"] = by_graph(
            by(result["cells"], dtype=dtype, width=width, implementation=name),
            lambda cell, of=f"sddmm@{width}": min(
                stored_baselines(result, of, cell["dtype"], cell["graph"]).values(), default=None
            ),
        )
    return [compared_table(found)]
