"""Tables from stored results: Markdown for the documentation, rich tables for the terminal."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import record
from . import attention, dlmc, formats, pivots, programs, sanitizer, spmm, ssd, train
from .cells import Table, ordered

#: benchmark -> what a reader of its tables should know first
ABOUT = {
    "spmm": "Sparse-dense product against cuSPARSE, and the best stored baseline where there is one;"
    " 'of roofline' is the time of gathering the same rows at the measured bandwidth, over our time.",
    "dlmc": "Pruned weight matrices (DLMC) times dense columns, microseconds from a cold cache as the stored"
    " baselines were timed; 'warm' is back to back in a CUDA graph. Then what has to be built before hr and"
    " flashsparse can run on a graph, against one product with it.",
    "sddmm": "A dot product per edge, and the best stored baseline where there is one.",
    "ssd": "Kept entries of sparse rows aggregated into dense ones, against the stored kernels of MaxK and a"
    " re-implementation of decoupled SSD, and the papers' own dataflows.",
    "attention": "Softmax attention over neighbours: dot products, GAT (additive) and GATv2, named by heads x"
    " width, against stored baselines. 'Of the results' is the extra memory over that of the results: it"
    " stays small, whatever the number of edges, if nothing has their size.",
    "masks": "Attention with a sparse mask (`fastsparse_core.attention`) against PyTorch's attention with a"
    " dense mask, compiled FlexAttention, and nested tensors; 8 heads of 64 features.",
    "edges": "Layers 256 wide with 8 features per edge, forward and backward with all gradients, and the"
    " attention operator alone, against PyG and a weather model's Triton kernel. GINE and residual gated"
    " layers 128 wide against PyG: one on a large graph, five on molecules whose edges are new every step.",
    "pna": "One layer with four aggregators and three scalers, forward and backward with all gradients, on a"
    " large graph and on batches of 512 molecules whose structures are new each time.",
    "any_layer": "Every layer of PyG that needs no other package, under `accelerate` and as it is: a step is"
    " forward and backward with all gradients in float32, the host's work included.",
    "messages": "Messages written by hand and PyG's layers without a drop-in, under `accelerate`, against"
    " PyG, `torch.compile` of PyG's layer, and the drop-in of the layer that computes the same.",
    "dgl_operators": "DGL's operators after `fastsparse_dgl.enable()`, forward and backward, against ours on"
    " the same structure, PyG's gather and scatter, and DGL's own on the CPU.",
    "enabled": "Calls as scripts make them, plain and under `fastsparse_pyg.enable()`: products of"
    " `torch.sparse` matrices, `scatter`, `softmax` and global pools with a kept index; and the start of a"
    " script under `fastsparse run`.",
    "segments": "Rows reduced by an index, against torch.index_add and scatter_reduce. A new index is checked"
    " and sorted in the call; one that is kept was sorted before.",
    "typed": "Layers of typed edges, 64 wide, forward and backward with all gradients, against PyG's own.",
    "train": "Training step, inference and peak memory of small models (`benchmarks/train.py` defines them).",
    "small": "A training step of a plain loop where the host decides: small graphs, and batches that are"
    " new every step. `captured` is the step as a CUDA graph, docs/minibatch.md.",
    "compile": "Three layers under `torch.compile` with plain edges, forward and backward, against the same"
    " layers without it and PyG's.",
    "epochs": "Epochs on molecules with the loader inside the clock, and the loaders alone. PyG's layers with"
    " PyG's loader and the best number of workers are what the others are compared with.",
    "programs": "Whole epochs of programs as people write them (`benchmarks/program_list.py`): loading,"
    " training and validation, against the framework with its best settings. Loss and metric:"
    " baseline / ours.",
    "breakdown": "Where a training step's time goes: device time by kind of work, and what the device waits"
    " for the host.",
    "scaling": "Several GPUs of one machine (`benchmarks/scaling.py` defines the models); see"
    " docs/dev/distributed.md for what bounds them.",
    "maxk": "examples/maxk.py: a model of three graph convolutions, 256 wide, with MaxK and with ReLU."
    " Stored: what autograd keeps for the backward pass of all three.",
    "adjacency": "Building the structure from edges in arbitrary order.",
    "formats": "FlashSparse's table 2 (zeros in vectors of 16 and of 8 rows), figure 14 (matrix instructions"
    " at 16x1 and at 8x1) and table 7 (ME-BCRS against SR-BCRS), and what grouping similar rows adds.",
    "host": "What the host spends on a call whose device work is next to nothing.",
    "cpu": "The same layers without a GPU.",
    "accuracy": "As FlashSparse's table 8: no precision may lose more than one standard deviation.",
    "choice": "Which algorithm wins where, and what `auto` picks; see docs/dev/choosing.md.",
    "minibatch": "Structure, forward and backward of batches whose structures are new each time.",
    "inference": "Exact results of all nodes of a large graph, layer by layer.",
    "sampling": "Batches of sampled neighbours drawn on the GPU and the CPU, and epochs from the loader.",
    "large": "Training steps on all nodes of a random graph of the size of ogbn-papers100M.",
    "regret": "What the picks of `auto` cost; the better algorithm in brackets where it is another.",
    "sanitizer": "Every kernel on small structures under compute-sanitizer; the parts are those of"
    " `tests/sanitize.py`.",
}

_OWN_MODULES = {
    it.__name__.split(".")[-1]: it for it in (attention, dlmc, formats, programs, sanitizer, spmm, ssd, train)
}
#: benchmark -> the tables of its record, by the function of that name in `pivots` or a module of that name
TABLES: dict[str, Callable[[dict[str, Any]], list[Table]]] = {
    name: getattr(_OWN_MODULES.get(name, pivots), name) for name in ABOUT
}


@dataclass(frozen=True)
class Chapter:
    """The text about a benchmark on the results page.

    Attributes:
        title: Its heading.
        tables: Makes the short tables of a record.
        plots: Ends of the names of the plots to show.
        together: Makes tables of all records of one machine, where one of them alone does not tell.
    """

    title: str
    tables: Callable[[dict[str, Any]], list[Table]]
    plots: tuple[str, ...] = ()
    together: Callable[[list[dict[str, Any]]], list[Table]] | None = None


#: benchmark -> its chapter of the results page, in the page's order
CHAPTERS = {
    "programs": Chapter("Complete programs", TABLES["programs"], ("epochs",)),
    "train": Chapter("Training steps", train.train_in_short, ("time_bf16-amp", "memory_bf16-amp")),
    "small": Chapter("Small graphs and batches", TABLES["small"]),
    "compile": Chapter("Under torch.compile", TABLES["compile"]),
    "epochs": Chapter("Epochs on batches of molecules", TABLES["epochs"]),
    "spmm": Chapter(
        "Aggregation (spmm)",
        spmm.spmm_in_short,
        ("forward_float16", "forward_float32", "roofline"),
        spmm.spmm_together,
    ),
    "dlmc": Chapter("Pruned weight matrices", TABLES["dlmc"]),
    "sddmm": Chapter("Dot products of edges (sddmm)", pivots.sddmm_in_short),
    "attention": Chapter("Attention", attention.attention_in_short, ("forward_float16", "backward_float16")),
    "masks": Chapter("Attention with a sparse mask", TABLES["masks"]),
    "edges": Chapter("Edge features", TABLES["edges"]),
    "pna": Chapter("Several aggregations (PNA)", TABLES["pna"]),
    "any_layer": Chapter("All layers of PyG", TABLES["any_layer"]),
    "messages": Chapter("Messages written by hand", TABLES["messages"]),
    "dgl_operators": Chapter("DGL's operators", TABLES["dgl_operators"]),
    "enabled": Chapter("Scripts without changes", TABLES["enabled"]),
    "segments": Chapter("Segments and scatter", TABLES["segments"]),
    "typed": Chapter("Typed edges", TABLES["typed"]),
    "ssd": Chapter("Sparse activations (MaxK, ssd)", ssd.ssd_in_short, ("scaling",)),
    "maxk": Chapter("Training with MaxK", TABLES["maxk"]),
    "scaling": Chapter("Several GPUs", TABLES["scaling"], ("speedup",)),
    "choice": Chapter("Choice of the algorithm", pivots.choice_in_short, ("choice",)),
    "minibatch": Chapter("Mini-batches", TABLES["minibatch"]),
    "inference": Chapter("Exact inference", TABLES["inference"]),
    "sampling": Chapter("Neighbour sampling", TABLES["sampling"]),
    "large": Chapter("Full-graph training beyond the GPU's memory", TABLES["large"]),
    "regret": Chapter("Choice of the algorithm, by number of uses", TABLES["regret"]),
    "accuracy": Chapter("Accuracy of trained models", TABLES["accuracy"]),
    "adjacency": Chapter("Building a structure", pivots.adjacency_in_short),
    "formats": Chapter("Formats", formats.formats_in_short),
    "breakdown": Chapter("Where the time of a step goes", TABLES["breakdown"]),
    "host": Chapter("Time of the host", TABLES["host"]),
    "cpu": Chapter("On the CPU", TABLES["cpu"]),
    "sanitizer": Chapter("Memory and races", sanitizer.sanitizer_in_short),
}

INTRODUCTION = """# Benchmark results

Written by `python -m benchmarks tables` from stored records (`.json`). Times are medians; a record holds the
spread, the machine, the software and a digest of the kernels' sources. Graphs are seeded stand-ins for
published graphs of that name (`benchmarks/suite.py`) or, in `formats`, `choice` and
`accuracy`, also the real ones.
"""


def provenance(result: dict[str, Any]) -> str:
    """One sentence: which machine, when, from which commit."""
    facts, versions = result["machine"], result["software"]
    place = (
        facts.get("gpu")
        or f"{facts['cpu']}, {facts['threads']} threads, load {facts.get('load_average', '-')}"
    )
    if facts.get("gpu"):
        place += f" (driver {facts.get('driver')}, CUDA {facts.get('cuda')})"
    commit = result["source"].get("commit") or "unknown"
    commit = commit[:12] + "+" * commit.endswith("+")  # "+": files differed from the commit
    digest = result["source"]["kernels_digest"][:12]
    parts = [place, f"torch {versions.get('torch', '-')}", result["date"][:10], f"commit {commit}"]
    return ", ".join([*parts, f"kernels {digest}"]) + "."


def report(result: dict[str, Any], heading: str | None = None) -> str:
    """A record as Markdown: what it is, provenance, tables, notes.

    Args:
        result: The record.
        heading: Instead of its name.
    """
    parts = [f"### {heading or result['name']}", "", ABOUT[result["name"]], "", provenance(result), ""]
    for table in TABLES[result["name"]](result):
        parts += [table.markdown()]
    parts += [f"- {note}" for note in result["notes"]]
    return "\n".join(parts) + "\n"


def show(path: Path, console: Console) -> None:
    """Prints a record's tables on the terminal."""
    result = record.load(path)
    for table in TABLES[result["name"]](result):
        table.print(console)
    console.print(f"[dim]{provenance(result)} {path}[/dim]")


def stored(root: Path) -> list[Path]:
    """Records below a folder of results that there are tables for, in the order of `TABLES`."""
    return [
        path
        for name in TABLES
        for pattern in (f"*/{name}.json", f"*/{name}_*.json")
        for path in sorted(root.glob(pattern))
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of results")
    parser.add_argument("--out", type=Path, help="file to write; by default the terminal")


def run(options: argparse.Namespace) -> None:
    """Writes the tables of all stored results as Markdown, with the plots next to them."""
    target = Path.cwd() if options.out is None else options.out.resolve().parent
    paths = stored(options.results)
    parts = [INTRODUCTION]
    for folder in ordered(sorted(path.parent for path in paths)):
        parts.append(f"## {folder.name}\n")
        for path in paths:
            if path.parent == folder:
                parts.append(report(record.load(path), path.stem))
                parts += [f"![{plot.stem}]({relative(plot, target)})\n" for plot in plots_of(path)]
    text = "\n".join(parts)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text)


def relative(path: Path, folder: Path) -> str:
    """A file's path as a link from a folder."""
    return Path(os.path.relpath(path.resolve(), folder)).as_posix()


def plots_of(path: Path) -> list[Path]:
    """The plots of a record: those whose names begin with its name, but not with a longer record's name."""

    def owner(plot: Path) -> str:
        stems = (other.stem for other in path.parent.glob("*.json"))
        return max((s for s in stems if f"{plot.stem}_".startswith(f"{s}_")), key=len, default="")

    return [plot for plot in sorted(path.parent.glob("*.png")) if owner(plot) == path.stem]
