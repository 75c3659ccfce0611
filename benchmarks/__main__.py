"""Command line: ``python -m benchmarks spmm --graphs reddit --widths 64 128 --dtypes float32``."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from . import record, suite, summary, tables
from .runner import add_common

COMMANDS = {
    "spmm": "sparse-dense product against cuSPARSE and stored baselines",
    "sddmm": "dot products per edge, csr and flashsparse",
    "ssd": "sparse rows times a structure against stored baselines, the papers' ablations, and maxk",
    "attention": "attention forward and backward: time and memory, against stored baselines",
    "masks": "attention with sparse masks against dense masks, FlexAttention and nested tensors",
    "edges": "layers with edge features against PyG and a Triton kernel",
    "pna": "principal neighbourhood aggregation, a layer on a large graph and on molecules, against PyG",
    "any_layer": "every layer of PyG under accelerate, against itself",
    "messages": "messages written by hand under accelerate, against PyG, torch.compile and the named layer",
    "dgl_operators": "DGL's operators on FastSparse against ours, PyG's and DGL's own",
    "enabled": "calls of PyG and torch.sparse under enable(), against themselves; starting a script",
    "segments": "scatter against torch.index_add and scatter_reduce, with a new index and a kept one",
    "typed": "RGCN, RGAT and HGT against PyG: time and memory",
    "train": "training step, inference and memory of small models against PyG",
    "small": "training steps on small graphs and batches of molecules, against the frameworks' own layers",
    "compile": "training steps under torch.compile, our layers and PyG's",
    "epochs": "epochs on molecules with the loader inside the clock, against PyG's loader and layers",
    "programs": "epochs of complete programs, loading and validation included; forms of captured steps",
    "scaling": "full-graph training and mini-batches on several GPUs",
    "breakdown": "where the time of a training step goes: kinds of device work, and waiting for the host",
    "adjacency": "building an Adjacency and its transpose",
    "formats": "vectors, zeros, instructions and bytes of the tensor-core formats, and their conversion",
    "host": "host time of a layer on a tiny graph",
    "cpu": "one layer on the CPU against PyG and torch.sparse",
    "minibatch": "GraphSAGE on sampled blocks that are seen once, against the frameworks' own layers",
    "inference": "exact inference over all nodes of a large graph: time and peak memory",
    "sampling": "neighbour sampling against plain PyTorch, and an epoch of GraphSAGE from the loader",
    "large": "training on all nodes of a graph of billions of entries",
    "accuracy": "test accuracy of the examples in several precisions, original against drop-in",
    "maxk": "MaxK against ReLU in training: accuracy, stored activations, time",
    "regret": "what auto costs against the best algorithm, for structures seen once and often",
    "sanitizer": "every CUDA kernel under compute-sanitizer; not part of `all`, as it measures nothing",
    "all": "every benchmark of this machine, then plots, tables and summary",
    "tables": "stored results as Markdown tables",
    "summary": "stored results in short, the page docs/results.md",
    "plots": "stored results as plots",
}

#: Commands that `all` runs with and without a GPU. The most important ones come first, in case time runs out.
ON_CUDA = (
    "programs --parts programs forms",
    "attention",
    "masks",
    "edges",
    "pna",
    "any_layer",
    "messages",
    "dgl_operators",
    "segments",
    "enabled",
    "typed",
    "train",
    "small",
    "compile",
    "epochs",
    "breakdown",
    "ssd",
    "accuracy --models gat agnn gt",
    "maxk",
    "spmm --algorithm flashsparse --dtypes float16 bfloat16 float32",
    "sddmm",
    "spmm",
    "formats",
    "adjacency",
    "host",
    "minibatch",
    "sampling",
    "regret",
    "accuracy",
)
ON_CPU = ("cpu", "dgl_operators", "formats", "accuracy")


def make_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser. Only the module of the chosen command is imported: each needs different packages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks of FastSparse.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shape = argparse.ArgumentDefaultsHelpFormatter
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about, formatter_class=shape)
        if name == "all":
            add_common(command)
        elif name == chosen:
            _module(name).add_arguments(command)
    return parser


def _module(name: str) -> Any:
    """The object that declares the arguments of a command and runs it."""
    module = importlib.import_module(f"benchmarks.{name}")
    return getattr(module, "BENCHMARK", module)


def run(arguments: Sequence[str], console: Console) -> None:
    """Runs one command."""
    parser = make_parser(arguments[0] if arguments else None)
    options = parser.parse_args(arguments)
    if options.command == "all":
        names: tuple[str, ...] = ON_CUDA if torch.device(options.device).type == "cuda" else ON_CPU
        if names is ON_CUDA and torch.cuda.device_count() > 1:
            names = (*ON_CUDA, "scaling")
        shared = ["--device", options.device, "--out", str(options.out)]
        if options.commit:
            shared += ["--commit", options.commit]
        steps = [[*name.split(), *shared] for name in names]
        stored = ["--results", str(options.out)]
        page = summary.PAGE if options.out.resolve() == record.RESULTS else options.out / "summary.md"
        steps += [
            ["plots", *stored],
            ["summary", *stored, "--out", str(page)],
        ]
        _run_all(steps, console)
        return
    try:
        suite.check(getattr(options, "graphs", None) or ())
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    result = _module(options.command).run(options)
    if options.command not in ("tables", "plots", "summary"):
        tables.show(result, console)


def _run_all(steps: Sequence[Sequence[str]], console: Console) -> None:
    """Runs commands one after the other, also if one of them fails.

    Raises:
        SystemExit: With code 1, at the end, if one failed.
    """
    failed = []
    for place, step in enumerate(steps, 1):
        console.rule(f"{place} of {len(steps)}: {' '.join(step)}")
        start = time.perf_counter()
        try:
            run(step, console)
        except (Exception, SystemExit):
            # Any error, even the exit of a parser: the other commands take hours, so they still run.
            console.print_exception()
            failed.append(" ".join(step))
        console.print(f"{time.perf_counter() - start:.0f} s")
    if failed:
        console.print(f"[bold red]{len(failed)} of {len(steps)} failed[/]: {'; '.join(failed)}")
        raise SystemExit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    for known in ("Sparse CSR tensor support is in beta", "Sparse invariant checks"):
        warnings.filterwarnings("ignore", known)
    run(sys.argv[1:] if arguments is None else arguments, Console(width=None if sys.stdout.isatty() else 160))


if __name__ == "__main__":
    main()
