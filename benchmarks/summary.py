"""The results in short: ``python -m benchmarks summary --out docs/results.md``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import record, tables
from .tables.cells import Table, ordered
from .tables.train import train_at_a_glance

PAGE = record.REPOSITORY / "docs" / "results.md"

INTRODUCTION = """# Results
"""

READING = """## How to read this page

Written by `python -m benchmarks summary --out docs/results.md` from the records in `benchmarks/results/`; run
it again after a benchmark instead of editing. `python -m benchmarks tables` prints
every record in full, with spreads and errors.

- Graphs are seeded stand-ins with the size and the degrees of the published graph of that name, unless a
  table says real.
- "2.00x" is a rival's time over ours: above 1, ours is faster.
- *Stored* times of rivals were measured before, with their authors' own kernels, on the same graphs and GPU
  model, and are compared on that model only.
- *Asked* is the goal that was set beforehand for an H200; one that is not reached says so.
- Models are named by layer, number of layers and width: gcn3-128 has three GCN layers, 128 wide, gat3-4x32
  three of GAT with 4 heads of 32.
- Records name the commit they were measured at, which may be older than the code beside this page.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of results")
    parser.add_argument("--out", type=Path, help="file to write; by default the terminal")


def run(options: argparse.Namespace) -> None:
    """Writes the page."""
    folder = Path.cwd() if options.out is None else options.out.resolve().parent
    text = page(options.results, folder)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text)


def page(results: Path, folder: Path) -> str:
    """The page as Markdown.

    Args:
        results: Folder of records.
        folder: Where the page will lie, for its links to plots.
    """
    records = [(path, record.load(path)) for path in tables.stored(results)]
    parts = [INTRODUCTION, *_at_a_glance(records, folder), READING, _goals(records)]
    for name, chapter in tables.CHAPTERS.items():
        parts.append(f"## {chapter.title}\n")
        mine = [(path, result) for path, result in records if result["name"] == name]
        if not mine:
            parts.append(f"Not measured: no record of `python -m benchmarks {name}` is stored.\n")
        for path, result in mine:
            parts += [_one(path, result, chapter, folder)]
        for machine, found in _together(mine, chapter):
            heading = f"### {_machine(mine, machine)}, all records together\n"
            parts += [heading, *(table.markdown() for table in found)]
    return "\n".join(parts)


def _at_a_glance(records: list[tuple[Path, dict[str, Any]]], folder: Path) -> list[str]:
    """What a reader wants first, on one screen: training on the first GPU that was measured."""
    for path, result in records:
        plot = path.with_name(f"{path.stem}_overview.png")
        if result["name"] == "train" and "gpu" in result["machine"] and plot.exists():
            return [
                f"Training on one {result['machine']['gpu']}, full batch, against PyG's layers on an"
                " `edge_index`, and on a `torch.sparse` matrix, which PyG's GCN and GraphSAGE take too.\n"
                "Means are geometric, over the graphs on which both have a time: on the others PyG's layer\n"
                "runs out of memory, or was not run because it needs more than there is.\n"
                "On small graphs the host sets the pace: there a drop-in may be no faster.\n",
                train_at_a_glance(result).markdown(),
                f"![Time and memory of an epoch against PyG]({tables.relative(plot, folder)})\n",
            ]
    return []


def _machine(records: list[tuple[Path, dict[str, Any]]], folder: str) -> str:
    """The machine of a folder of records, in words."""
    machine = next(result["machine"] for path, result in records if path.parent.name == folder)
    return machine.get("gpu") or machine["cpu"]


def _heading(path: Path, result: dict[str, Any]) -> str:
    """A record in words: its machine, and what its name says beyond the benchmark's."""
    rest = path.stem.removeprefix(result["name"]).replace("_", " ").strip()
    return _machine([(path, result)], path.parent.name) + (f": {rest}" if rest else "")


def _together(
    records: list[tuple[Path, dict[str, Any]]], chapter: tables.Chapter
) -> list[tuple[str, list[Table]]]:
    """The tables that several records of a machine make together, by machine; none where there are none."""
    if chapter.together is None:
        return []
    machines = ordered(path.parent.name for path, _ in records)
    made = [
        (machine, chapter.together([result for path, result in records if path.parent.name == machine]))
        for machine in machines
    ]
    return [(machine, found) for machine, found in made if found]


def _goals(records: list[tuple[Path, dict[str, Any]]]) -> str:
    """How many goals were reached, by record; nothing where none was set."""
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
    return Table("Goals", ["benchmark", "reached", "missed"], rows).markdown() if rows else ""


def _one(path: Path, result: dict[str, Any], chapter: tables.Chapter, folder: Path) -> str:
    parts = [f"### {_heading(path, result)}\n", tables.provenance(result) + "\n"]
    parts += [table.markdown() for table in chapter.tables(result) if table.rows]
    parts += [f"- {note}" for note in result["notes"]]
    if result["notes"]:
        parts.append("")
    parts += [
        f"![{plot.stem}]({tables.relative(plot, folder)})\n"
        for plot in tables.plots_of(path)
        if plot.stem.endswith(chapter.plots)
    ]
    return "\n".join(parts)
