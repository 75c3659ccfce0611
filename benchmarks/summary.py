"""The results pages: ``python -m benchmarks summary --out docs/results.md``."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import record, tables
from .bars import Chart
from .tables.cells import Table, ordered
from .tables.train import train_at_a_glance

PAGE = record.REPOSITORY / "docs" / "results.md"

Record = tuple[Path, dict[str, Any]]


@dataclass(frozen=True)
class Topic:
    """One page of results.

    Attributes:
        title: Its heading.
        about: Description of the measurements, for a reader who knows PyTorch.
        benchmarks: Beginnings of the names of its records. If several topics match, the longest one counts.
        on_gpu: Whether it shows records of machines with a GPU, or of those without.
        chart: Content of its chart. None: the first plot in the folder of its records.
    """

    title: str
    about: str
    benchmarks: tuple[str, ...]
    on_gpu: bool = True
    chart: Chart | None = None


#: name of the page -> what it shows, in the order of the overview
TOPICS = {
    "training": Topic(
        "Training",
        "Epochs of complete programs, with data loading and validation, and single training steps on one"
        " graph (full batch). A program's baseline is PyG with its best settings. `captured` means that the"
        " training step is replayed as a CUDA graph.",
        ("programs", "train"),
    ),
    "batches": Topic(
        "Small graphs and batches of molecules",
        "Training steps and epochs that launch many short kernels, so that launch overhead decides."
        " `captured` means that the step is replayed as a CUDA graph.",
        ("small", "epochs"),
        chart=Chart(
            "nvidia-h200/small",
            "molecules-512, float32",
            ("layer",),
            ("PyG", "FastSparse", "captured"),
            "Training step on 512 molecules, ms, H200, float32",
        ),
    ),
    "attention": Topic(
        "Attention",
        "Softmax attention over neighbors as single operators: dot products, GAT (additive) and GATv2. Cases"
        " are named by heads x width.",
        ("attention", "masks"),
    ),
    "edge_features": Topic(
        "Edge features",
        "Layers that read features of edges: attention 256 wide with 8 features per edge, GINE and residual"
        " gated layers 128 wide, and PNA. Times are for forward and backward.",
        ("edges", "pna"),
    ),
    "layers": Topic(
        "All layers of PyG and DGL's operators",
        "Every PyG layer that needs no other package, with and without `accelerate`; messages written by"
        " hand; layers with typed edges; and DGL's operators after `fastsparse_dgl.enable()`. Times are for"
        " forward and backward.",
        ("any_layer", "messages", "compile", "typed", "dgl_operators"),
        chart=Chart(
            "nvidia-h200/any_layer",
            "Layers of PyG, forward and backward, ogbn-arxiv",
            ("layer",),
            ("PyG/ours",),
            "PyG's time divided by ours, ogbn-arxiv's size, H200, float32",
            longest=20,
        ),
    ),
    "sampling": Topic(
        "Sampled mini-batches",
        "Neighbor sampling, epochs of GraphSAGE from the loader, and training steps on sampled blocks.",
        ("sampling", "minibatch", "inference"),
        chart=Chart(
            "nvidia-h200/sampling",
            "ogbn-products: an epoch",
            ("step", "precision"),
            ("seconds",),
            "Epoch of GraphSAGE on sampled batches, seconds, H200",
        ),
    ),
    "scaling": Topic(
        "Several GPUs",
        "Full-graph training with the graph divided among GPUs, data-parallel mini-batches, and training on"
        " all nodes of a graph that is larger than a GPU's memory.",
        ("scaling", "large"),
    ),
    "operators": Topic(
        "Operators",
        "Sparse-dense products (`spmm`), dot products per edge (`sddmm`), scatter and segments, pruned weight"
        " matrices, and calls of scripts that run without changes.",
        ("spmm", "sddmm", "segments", "enabled", "dlmc"),
    ),
    "maxk": Topic(
        "MaxK",
        "Sparse activations: training steps with MaxK in place of ReLU, the operator `ssd`, and accuracy.",
        ("train_maxk", "ssd", "maxk"),
    ),
    "accuracy": Topic(
        "Accuracy",
        "Test scores of models that were trained with the original layers and with the drop-ins, in several"
        " precisions.",
        ("accuracy",),
        chart=Chart(
            "nvidia-h200/accuracy",
            "gcn: test scores",
            ("dataset", "framework", "metric"),
            ("original fp32", "drop-in fp32", "drop-in bf16"),
            "Test score of a GCN in %, mean of all runs, H200",
        ),
    ),
    "cpu": Topic(
        "On the CPU",
        "Every record of a machine without a GPU. The line below a machine's name has the number of threads.",
        ("cpu", *(name for name in tables.CHAPTERS if name != "cpu")),
        on_gpu=False,
        chart=Chart(
            "amd-epyc/cpu",
            "One GCN layer",
            ("implementation",),
            ("ms (20-80 %)",),
            "One GCN layer, forward and backward, ms, ogbn-arxiv's size, two CPU threads",
        ),
    ),
    "internals": Topic(
        "Inside a step",
        "For developers: where the time of a step goes, host time, what `auto` picks and what that costs,"
        " the cost of building structures, and checks for memory errors and races.",
        ("breakdown", "host", "choice", "regret", "adjacency", "formats", "sanitizer"),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of results")
    parser.add_argument(
        "--out", type=Path, help="the overview; a folder of that name next to it gets the pages"
    )


def run(options: argparse.Namespace) -> None:
    """Writes the pages, or prints them one after the other."""
    out = options.out and options.out.resolve()
    for path, text in pages(options.results, out or Path.cwd() / "results.md").items():
        if out is None:
            print(text)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)


def pages(results: Path, out: Path) -> dict[Path, str]:
    """All pages as Markdown, the overview first.

    Args:
        results: Folder of records.
        out: The file of the overview; the other pages go into a folder of the same name next to it.
    """
    records = [(path, record.load(path)) for path in tables.stored(results)]
    folder = out.with_suffix("")
    written = {out: _overview(records, out.parent, folder.name)}
    for name, topic in TOPICS.items():
        chart = None
        for path, result in records:
            if topic.chart and f"{path.parent.name}/{path.stem}" == topic.chart.record:
                chart = folder / f"chart_{name}.svg", path
                written[chart[0]] = topic.chart.draw(tables.CHAPTERS[result["name"]].tables(result))
        written[folder / f"{name}.md"] = _page(topic, records, folder, chart)
    return written


def _overview(records: list[Record], folder: Path, name: str) -> str:
    """The page that links to the others: training at a glance, topics, goals."""
    links = [f"- [{topic.title}]({name}/{key}.md). {topic.about}" for key, topic in TOPICS.items()]
    children = "\n".join(f"{name}/{key}" for key in ("method", *TOPICS))
    return "\n".join(
        [
            "# Results\n",
            *_at_a_glance(records, folder),
            f"[How the results were measured]({name}/method.md) explains names, ratios and baselines.\n",
            "## Pages\n",
            *links,
            "",
            "## Targets\n",
            "How many of the targets that were set before measuring were reached:\n",
            _goals(records),
            f"```{{toctree}}\n:hidden:\n\n{children}\n```\n",
        ]
    )


def _at_a_glance(records: list[Record], folder: Path) -> list[str]:
    """The first section of the results: training on the first GPU that was measured."""
    for path, result in records:
        plot = path.with_name(f"{path.stem}_overview.png")
        if result["name"] == "train" and "gpu" in result["machine"] and plot.exists():
            return [
                f"One training step on one {result['machine']['gpu']}, full batch: PyG's time and memory"
                " divided by ours. Models have three layers, 128 wide; AGNN has two, 32 wide. Means are"
                " geometric, over the graphs on which PyG runs. PyG's layers get an `edge_index`, or a"
                " `torch.sparse` matrix where a column says so. In the chart, an epoch is one such step.\n",
                readable(train_at_a_glance(result))[0].markdown(),
                f"![Time and memory of a training step against PyG]({tables.relative(plot, folder)})\n",
            ]
    return []


def _page(topic: Topic, records: list[Record], folder: Path, drawn: tuple[Path, Path] | None) -> str:
    """One topic's page: its chart, or else the first plot of its records; other plots are linked."""
    parts = [f"# {topic.title}\n", f"{topic.about} [How to read the numbers](method.md).\n"]
    if topic.chart and drawn:
        chart, source = (tables.relative(path, folder) for path in drawn)
        parts += [f"![{topic.chart.title}]({chart})\n", f"[Record of the chart]({source}).\n"]
    is_first_plot = drawn is None
    for name in topic.benchmarks:
        mine = [
            (path, result)
            for path, result in records
            if ("gpu" in result["machine"]) == topic.on_gpu
            and name == (_beginning(path) if topic.on_gpu else result["name"])
        ]
        if not mine and not topic.on_gpu:
            continue
        chapter = tables.CHAPTERS[name if name in tables.CHAPTERS else name.partition("_")[0]]
        level = "##"
        if len(topic.benchmarks) > 1:
            parts.append(f"## {chapter.title}\n")
            level = "###"
        if not mine:
            parts.append(f"Not measured: no record of `python -m benchmarks {name}` is stored.\n")
        for path, result in mine:
            plots = [plot for plot in tables.plots_of(path) if plot.stem.endswith(chapter.plots)]
            parts += [f"{level} {_heading(path, result)}\n", tables.provenance(result) + "\n"]
            if plots and is_first_plot:
                is_first_plot, first, *plots = False, *plots
                parts.append(f"![{_caption(first, path)}]({tables.relative(first, folder)})\n")
            if plots:
                links = [f"[{_caption(plot, path)}]({tables.relative(plot, folder)})" for plot in plots]
                parts.append(f"Charts: {', '.join(links)}.\n")
            found = [table for table in chapter.tables(result) if table.rows]
            parts += [shown.markdown() for table in found for shown in readable(table)]
            parts += [f"- {note}" for note in result["notes"]]
            parts += [""] if result["notes"] else []
        for machine, together in _together(mine, chapter):
            parts.append(f"{level} {_machine(mine, machine)}, all records together\n")
            parts += [shown.markdown() for table in together for shown in readable(table)]
    return "\n".join(parts)


def _beginning(path: Path) -> str:
    """The longest of the topics' names with which a record's name begins."""
    names = (name for topic in TOPICS.values() if topic.on_gpu for name in topic.benchmarks)
    return max((name for name in names if path.stem.startswith(name)), key=len, default="")


def _caption(plot: Path, path: Path) -> str:
    return plot.stem.removeprefix(path.stem).replace("_", " ").strip() or plot.stem


#: Words of the tables -> the usual ones.
_WORDS = {
    "rival": "baseline",
    "Rival": "Baseline",
    "least": "worst case",
    "most": "best case",
    "asked": "target",
}


def _plain(text: str) -> str:
    return re.sub(r"\b(rival|Rival|least|most|asked)\b", lambda found: _WORDS[found[0]], text)


_IN_ONE_CELL = re.compile(r"[\d.e+-]+x?(, [\d.e+-]+( GB|x))+")
_WITH_A_NAME = re.compile(r"([\d.]+x) ([\w., =-]+)")
_OF_BOTH = re.compile(r"([\d.]+|-) / ([\d.]+|-)(?: (\w+))?")
#: Meaning of the numbers in a cell, by their suffix: title -> suffix.
_UNITS = {"time, ms": "", "baseline / ours": "x", "peak memory, GB": " GB"}


def readable(table: Table) -> list[Table]:
    """The table with one number in a cell: those of several units become a table for each unit."""
    titles = [_plain(title).removesuffix(", ms, peak GB") for title in table.columns]
    plain = replace(table, title=_plain(table.title), columns=titles)
    if not any(_IN_ONE_CELL.fullmatch(cell) for row in table.rows for cell in row):
        return [_apart(plain)]
    made = []
    for unit, end in _UNITS.items():
        rows = [[row[0], *(_part(cell, unit, end) for cell in row[1:])] for row in table.rows]
        kept = [at for at in range(len(titles)) if any(row[at] not in ("-", "") for row in rows)]
        if len(kept) > 1:
            picked = [[row[at] for at in kept] for row in rows]
            made.append(Table(f"{plain.title}: {unit}", [titles[at] for at in kept], picked))
    return made


def _part(cell: str, unit: str, end: str) -> str:
    """The number with one unit in a cell. Words, and cells with one number, belong to the times."""
    if not _IN_ONE_CELL.fullmatch(cell):
        return cell if unit == "time, ms" else "-"
    for part in cell.split(", "):
        if end and part.endswith(end):
            return part.removesuffix(" GB")
        if not end and part[-1].isdigit():
            return part
    return "-"


def _apart(table: Table) -> Table:
    """Cells such as "1.76x pubmed" or "0.74 / 0.75 accuracy" as several: numbers, and what they belong to."""
    columns: list[str] = []
    rows: list[list[str]] = [[] for _ in table.rows]
    for at, title in enumerate(table.columns):
        cells = [row[at] for row in table.rows]
        titles, parts = [title], [[cell] for cell in cells]
        if at and all(_OF_BOTH.fullmatch(cell) for cell in cells):
            groups = [_OF_BOTH.fullmatch(cell).groups() for cell in cells]  # type: ignore[union-attr]
            has_name = any(group[2] for group in groups)
            titles = [*([title] if has_name else []), f"{title}, baseline", f"{title}, ours"]
            parts = [[*([group[2] or ""] if has_name else []), group[0], group[1]] for group in groups]
        elif at and any(_WITH_A_NAME.fullmatch(cell) for cell in cells):
            titles = [title, "on"]
            found = [_WITH_A_NAME.fullmatch(cell) for cell in cells]
            parts = [[*one.groups()] if one else [cell, ""] for one, cell in zip(found, cells, strict=True)]
        columns += titles
        for row, part in zip(rows, parts, strict=True):
            row += part
    return replace(table, columns=columns, rows=rows)


def _machine(records: list[Record], folder: str) -> str:
    """The machine of a folder of records, in words."""
    machine = next(result["machine"] for path, result in records if path.parent.name == folder)
    return machine.get("gpu") or machine["cpu"]


def _heading(path: Path, result: dict[str, Any]) -> str:
    """A record in words: its machine, and what its name says beyond the benchmark's."""
    rest = path.stem.removeprefix(result["name"]).replace("_", " ").strip()
    return _machine([(path, result)], path.parent.name) + (f": {rest}" if rest else "")


def _together(records: list[Record], chapter: tables.Chapter) -> list[tuple[str, list[Table]]]:
    """The tables that several records of a machine make together, by machine; none where there are none."""
    if chapter.together is None:
        return []
    machines = ordered(path.parent.name for path, _ in records)
    made = [
        (machine, chapter.together([result for path, result in records if path.parent.name == machine]))
        for machine in machines
    ]
    return [(machine, found) for machine, found in made if found]


def _goals(records: list[Record]) -> str:
    """Number of goals that were reached, by record; empty if there are none."""
    made = [
        (f"{chapter.title}, {_heading(path, result)}", chapter.tables(result))
        for path, result in records
        for chapter in [tables.CHAPTERS[result["name"]]]
    ]
    for name, chapter in tables.CHAPTERS.items():
        mine = [(path, result) for path, result in records if result["name"] == name]
        made += [
            (f"{chapter.title}, {_machine(mine, machine)}, all records together", found)
            for machine, found in _together(mine, chapter)
        ]
    rows = []
    for what, found in made:
        verdicts = [
            row[table.columns.index("asked")]
            for table in found
            if "asked" in table.columns
            for row in table.rows
        ]
        asked = [verdict for verdict in verdicts if verdict]
        missed = sum(verdict.endswith("missed") for verdict in asked)
        if asked:
            rows.append([what, str(len(asked) - missed), str(missed)])
    return Table("Targets", ["benchmark", "reached", "missed"], rows).markdown() if rows else ""
