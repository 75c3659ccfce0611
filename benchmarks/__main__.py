"""Command line: ``python -m benchmarks spmm --graphs reddit --widths 64 128 --dtypes float32``."""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from collections.abc import Sequence

import torch
from rich.console import Console

from . import suite, tables
from .common import add_common

COMMANDS = {
    "spmm": "sparse-dense product against cuSPARSE and stored rivals",
    "sddmm": "dot products per edge, csr and flashsparse",
    "ssd": "sparse rows times a structure against stored rivals, the papers' ablations, and maxk",
    "attention": "attention forward and backward: time and memory, against stored rivals",
    "train": "training step, inference and memory of small models against PyG",
    "breakdown": "where the time of a training step goes: kinds of device work, and waiting for the host",
    "adjacency": "building an Adjacency and its transpose",
    "formats": "vectors, zeros, instructions and bytes of the tensor-core formats, and their conversion",
    "host": "host time of a layer on a tiny graph",
    "cpu": "one layer on the CPU against PyG and torch.sparse",
    "minibatch": "GraphSAGE on sampled blocks that are seen once, against the frameworks' own layers",
    "accuracy": "test accuracy of the examples in several precisions, original against drop-in",
    "choice": "csr against flashsparse, what auto picks, and what the pick costs",
    "regret": "what auto costs against the best algorithm, for structures seen once and often",
    "sparse_linear": "pruned linear layers, sparse and dense products, and what auto picks",
    "all": "every benchmark of this machine, then plots and tables",
    "tables": "stored results as Markdown tables",
    "plots": "stored results as plots",
}

#: What `all` runs where there is a GPU and where there is none; first what matters most, in case time ends.
ON_CUDA = (
    "attention",
    "train",
    "breakdown",
    "ssd",
    "accuracy --models gat agnn gt",
    "spmm --algorithm flashsparse --dtypes float16 bfloat16 float32",
    "sddmm",
    "spmm",
    "formats",
    "adjacency",
    "host",
    "minibatch",
    "choice",
    "regret",
    "sparse_linear",
    "accuracy",
)
ON_CPU = ("cpu", "formats", "accuracy")


def make_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser; only the chosen command's module is imported, since each needs other packages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks of FastSparse.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shape = argparse.ArgumentDefaultsHelpFormatter
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, formatter_class=shape)
        if name == "all":
            add_common(command)
        elif name == chosen:
            importlib.import_module(f"benchmarks.{name}").add_arguments(command)
    return parser


def run(arguments: Sequence[str], console: Console) -> None:
    """Runs one command."""
    parser = make_parser(arguments[0] if arguments else None)
    options = parser.parse_args(arguments)
    if options.command == "all":
        names = ON_CUDA if torch.device(options.device).type == "cuda" else ON_CPU
        shared = ["--device", options.device, "--out", str(options.out)]
        if options.commit:
            shared += ["--commit", options.commit]
        for name in names:
            run([*name.split(), *shared], console)
        run(["plots", "--results", str(options.out)], console)
        run(["tables", "--results", str(options.out), "--out", str(options.out / "README.md")], console)
        return
    try:
        suite.check(getattr(options, "graphs", ()))
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    result = importlib.import_module(f"benchmarks.{options.command}").run(options)
    if options.command not in ("tables", "plots"):
        tables.show(result, console)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    for known in ("Sparse CSR tensor support is in beta", "Sparse invariant checks"):
        warnings.filterwarnings("ignore", known)
    run(sys.argv[1:] if arguments is None else arguments, Console(width=None if sys.stdout.isatty() else 160))


if __name__ == "__main__":
    main()
