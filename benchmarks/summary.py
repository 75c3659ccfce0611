"""The results in short: ``python -m benchmarks summary --out docs/results.md``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import record, tables

PAGE = record.REPOSITORY / "docs" / "results.md"

INTRODUCTION = """# Results

Written by `python -m benchmarks summary --out docs/results.md` from the records in `benchmarks/results/`; run
it again after a benchmark instead of editing. `python -m benchmarks tables` prints
every record in full, with spreads and errors.

Graphs are seeded stand-ins with the size and the degrees of the published graph of that name, unless a table
says real. "2.00x" is a rival's time over ours: above 1, ours is faster. *Stored* times of rivals were
measured before, with their authors' own kernels, on the same graphs and GPU model, and are compared on that
model only. *Asked* is the goal that was set beforehand for an H200; one that is not reached says so. Records
name the commit they were measured at, which may be older than the code beside this page.
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
    parts = [INTRODUCTION, _goals(records)]
    for name, chapter in tables.CHAPTERS.items():
        parts.append(f"## {chapter.title}\n")
        mine = [(path, result) for path, result in records if result["name"] == name]
        if not mine:
            parts.append(f"Not measured: no record of `python -m benchmarks {name}` is stored.\n")
        for path, result in mine:
            parts += [_one(path, result, chapter, folder)]
        for machine, found in _together(mine, chapter):
            parts += [f"### {name}, {machine}, records together\n", *(table.markdown() for table in found)]
    return "\n".join(parts)


def _together(
    records: list[tuple[Path, dict[str, Any]]], chapter: tables.Chapter
) -> list[tuple[str, list[tables.Table]]]:
    """The tables that several records of a machine make together, by machine; none where there are none."""
    if chapter.together is None:
        return []
    machines = tables.ordered(path.parent.name for path, _ in records)
    made = [
        (machine, chapter.together([result for path, result in records if path.parent.name == machine]))
        for machine in machines
    ]
    return [(machine, found) for machine, found in made if found]


def _goals(records: list[tuple[Path, dict[str, Any]]]) -> str:
    """How many goals were reached, by record; nothing where none was set."""
    made = [
        (f"{path.parent.name}, {path.stem}", tables.CHAPTERS[result["name"]].tables(result))
        for path, result in records
    ]
    for name, chapter in tables.CHAPTERS.items():
        mine = [(path, result) for path, result in records if result["name"] == name]
        made += [
            (f"{machine}, {name}, records together", found) for machine, found in _together(mine, chapter)
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
    return tables.Table("Goals", ["record", "reached", "missed"], rows).markdown() if rows else ""


def _one(path: Path, result: dict[str, Any], chapter: tables.Chapter, folder: Path) -> str:
    parts = [f"### {path.stem}, {path.parent.name}\n", tables.provenance(result) + "\n"]
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
