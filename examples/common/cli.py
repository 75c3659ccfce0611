"""The command-line options of all examples, and their main function: load data, compare layers, report."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from rich.console import Console
from torch import nn

from . import framework_data, graph_training, report
from .data import NodeDataset, default_root, load_dataset, node_features
from .errors import ExampleError
from .frameworks import CONVS, make_batch_graph, make_graph
from .graph_data import GraphDataset
from .training import PRECISIONS, LayerResult, LearnedFeatures, Recipe, compare

AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)
AnyStep = TypeVar("AnyStep", bound=Callable[..., Any])

#: Width of the learned features for datasets without features.
LEARNED_WIDTH = 64


class MakeModel(Protocol):
    """Builds an example's model for one layer; returns it with the layer's name."""

    def __call__(
        self, framework: str, conv: str, in_channels: int, num_classes: int, recipe: Recipe
    ) -> tuple[nn.Module, str]: ...


class MakeGraphModel(Protocol):
    """Builds a graph classifier for one layer; returns it with the layer's name."""

    def __call__(
        self, framework: str, conv: str, dataset: GraphDataset, recipe: Recipe
    ) -> tuple[nn.Module, str]: ...


def at_least(minimum: int) -> Callable[[str], int]:
    """Returns a type for argparse that accepts whole numbers from `minimum` on."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {minimum}, got {text!r}")
        return value

    return parse


def above_zero(text: str) -> float:
    """Type for argparse that accepts finite numbers above zero."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above zero, got {text!r}")
    return value


#: The values that --dataset accepts.
DATASETS = (
    "planted (generated) or karate (comes with the framework); the path of an .npz file; a file of that name "
    "in --root; or a name that the framework's loader knows, with its files in --root: "
    + ", ".join(name for name in framework_data.known_names("pyg") if name != "karate")
)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds an option's default to its help, unless the help names it already or the default is None."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or "(default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


def parser(
    description: str,
    *,
    heads: bool = False,
    conv: bool = True,
    datasets: Sequence[str] = (),
    comparing: bool | None = None,
) -> argparse.ArgumentParser:
    """Makes a parser with the options that all examples share.

    Args:
        description: One sentence about the example.
        heads: Whether it has attention heads, so takes ``--heads``.
        conv: Whether the example trains the original and the drop-in layer, so that it takes ``--conv``.
        datasets: For an example that knows only these datasets, with the features they have.
        comparing: Whether it trains both layers where nothing is said; None: unless it has `datasets`, and
            then it trains one at a time.
    """
    comparing = not datasets if comparing is None else comparing
    options = argparse.ArgumentParser(description=description, formatter_class=HelpFormatter)
    add = options.add_argument
    add("--framework", choices=("pyg", "dgl"), default="pyg", help="whose layers to use")
    if conv:
        convs = ("fast", "reference", "both") if comparing else ("fast", "reference")
        add("--conv", choices=convs, default=convs[-1 if comparing else 0], help="drop-in, original, or both")
    if datasets:
        add("--dataset", choices=datasets, default=datasets[0], help="which dataset")
    else:
        add("--dataset", default="planted", help=DATASETS)
        kinds = ("auto", "given", "degree", "learned")
        add("--features", choices=kinds, default="auto", help="input features")
    add("--root", type=Path, default=default_root(), help="folder of datasets; set by FASTSPARSE_DATA")
    add("--download", action="store_true", help="let the dataset's loader fetch missing files")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:N")
    add(
        "--precision",
        choices=tuple(PRECISIONS),
        default="fp32",
        help="fp32 is exact; bf16 and fp16 are autocast",
    )
    add("--layers", type=at_least(1), help="graph convolutions (default: the dataset's recipe)")
    add("--hidden", type=at_least(1), help="width between them (default: the dataset's recipe)")
    if heads:
        add("--heads", type=at_least(1), help="attention heads (default: the dataset's recipe)")
    add("--epochs", type=at_least(1), help="training steps (default: the dataset's recipe)")
    add(
        "--runs",
        type=at_least(1),
        help="repetitions, each with the next seed (default: the dataset's recipe)",
    )
    add("--seed", type=at_least(0), default=0, help="first seed of weights, dropout and drawn splits")
    add("--json", type=Path, help="write settings, scores and curves of all runs here")
    add("--plot", type=Path, help="draw loss and score against epochs and time here (PNG)")
    return options


def parse_device(name: str) -> torch.device:
    """Returns the device that the user named.

    Raises:
        ExampleError: The name is not a device, or this machine or this build of PyTorch lacks the device.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ExampleError(f"--device {name}: expected cpu, cuda or cuda:N.") from error
    if device.type not in ("cpu", "cuda"):
        raise ExampleError(f"--device {name}: expected cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ExampleError(
            f"--device {name}: PyTorch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices."
        )
    return device


def add_capture(options: argparse.ArgumentParser) -> None:
    """Adds the option --capture, which runs steps as CUDA graphs."""
    options.add_argument(
        "--capture",
        action="store_true",
        help="training steps (and the evaluation of small graphs) as CUDA graphs",
    )


def check_capture(options: argparse.Namespace) -> None:
    """Refuses --capture for batches of DGL's graphs.

    Raises:
        ExampleError: The user passed --capture with --framework dgl.
    """
    if options.capture and options.framework != "pyg":
        raise ExampleError("--capture: expected --framework pyg; DGL's batches of graphs are not captured.")


def captured(step: AnyStep, wanted: bool) -> AnyStep:
    """Captures the step if the user asked for it. The terminal shows why a step cannot be captured."""
    if not wanted:
        return step
    from fastsparse_core import capture  # only here: the frameworks' own layers run without FastSparse

    logging.basicConfig(format="%(message)s")
    logging.getLogger("fastsparse_core").setLevel(logging.INFO)
    return capture(step)


def override(recipe: AnyRecipe, options: argparse.Namespace) -> AnyRecipe:
    """Replaces values of the recipe by the options that the user set on the command line."""
    names = [item.name for item in dataclasses.fields(recipe)]
    given = {name: getattr(options, name, None) for name in names}
    return dataclasses.replace(recipe, **{name: value for name, value in given.items() if value is not None})


def train_and_report(
    options: argparse.Namespace,
    recipe_of: Callable[[NodeDataset], Recipe],
    make_model: MakeModel,
    console: Console,
    *,
    convs: Sequence[str] | None = None,
    extras: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], list[LayerResult]]:
    """Runs a complete node-classification example.

    Args:
        options: The parsed options of `parser`.
        recipe_of: The hyper-parameters for a dataset.
        make_model: Builds the model for a layer.
        console: Where to print.
        convs: The layers to compare; by default those of --conv.
        extras: Further entries of the log, as they are after the training.

    Returns:
        The JSON log and the results.

    Raises:
        ExampleError: The user has to change an option or a file.
    """
    report.check_writable(options.json, "--json")
    report.check_plotting(options.plot)
    device = parse_device(options.device)
    dataset = load_dataset(
        options.dataset, options.root, options.framework, seed=options.seed, download=options.download
    )
    recipe = override(recipe_of(dataset), options)
    x, feature_note = node_features(dataset, options.features, normalise=recipe.normalise_features)
    data = {
        "name": dataset.name,
        "nodes": dataset.num_nodes,
        "edges": dataset.num_edges,
        "classes": dataset.num_classes,
        "features": feature_note,
        "split": dataset.split_description(options.seed),
        "notes": list(dataset.notes),
    }
    console.print(
        f"[bold]{dataset.name}[/bold]: {dataset.num_nodes:,} nodes, {dataset.num_edges:,} directed edges,"
        f" {dataset.num_classes} classes; {feature_note}; {data['split']}",
        *(f"[dim]{note}[/dim]" for note in dataset.notes),
        sep="\n",
    )
    console.print(
        f"{options.framework} on {device}, {options.precision}: {recipe.layers} layers,"
        f" hidden {recipe.hidden}, dropout {recipe.dropout}, lr {recipe.lr}, {recipe.epochs} epochs,"
        f" {recipe.runs} run(s), best epoch by validation {recipe.select_by}"
    )

    def model_for(conv: str) -> tuple[nn.Module, str]:
        width = LEARNED_WIDTH if x is None else x.size(1)
        model, name = make_model(options.framework, conv, width, dataset.num_classes, recipe)
        return (LearnedFeatures(model, dataset.num_nodes, width) if x is None else model), name

    if convs is None:
        convs = CONVS if options.conv == "both" else (options.conv,)
    results = compare(
        dataset.to(device),
        None if x is None else x.to(device),
        convs,
        model_for,
        lambda conv: make_graph(
            options.framework, dataset, "reference" if conv == "reference" else "fast", device
        ),
        recipe,
        device=device,
        precision=options.precision,
        seed=options.seed,
    )
    return report_results(options, device, data, recipe, results, console, extras), results


def train_graphs_and_report(
    options: argparse.Namespace,
    dataset: GraphDataset,
    recipe: Recipe,
    make_model: MakeGraphModel,
    console: Console,
) -> tuple[dict[str, Any], list[LayerResult]]:
    """Runs a complete graph-classification example.

    Args:
        options: The parsed options of `parser`.
        dataset: Many small graphs.
        recipe: The hyper-parameters for it.
        make_model: Builds the model for a layer.
        console: Where to print.

    Returns:
        The JSON log and the results.

    Raises:
        ExampleError: The user has to change an option or a file.
    """
    report.check_writable(options.json, "--json")
    report.check_plotting(options.plot)
    device = parse_device(options.device)
    if options.features not in ("auto", "given"):
        raise ExampleError(f"--features {options.features}: graphs in batches have features of their own.")
    recipe = override(recipe, options)
    split = dataset.split(options.seed)
    sizes = "/".join(str(int(mask.sum())) for mask in (split.train, split.val, split.test))
    kind = "random split 80%/10%/10%, another for every run" if dataset.given_split is None else "given split"
    data = {
        "name": dataset.name,
        "graphs": dataset.num_graphs,
        "nodes": dataset.codes.size(0),
        "edges": dataset.edge_index.size(1),
        "classes": dataset.num_classes,
        "features": f"{dataset.codes.size(1)} categorical features",
        "split": f"{kind}, {sizes} graphs",
    }
    console.print(
        f"[bold]{dataset.name}[/bold]: {dataset.num_graphs:,} graphs, {data['nodes']:,} nodes,"
        f" {data['edges']:,} directed edges, {dataset.num_classes} classes; {data['features']};"
        f" {data['split']}"
    )
    console.print(
        f"{options.framework} on {device}, {options.precision}: {recipe.layers} layers,"
        f" hidden {recipe.hidden}, dropout {recipe.dropout}, lr {recipe.lr}, {recipe.epochs} epochs in"
        f" batches of {recipe.batch_size}, {recipe.runs} run(s), best epoch by validation {recipe.select_by}"
    )
    captures = getattr(options, "capture", False)
    results = graph_training.compare(
        dataset,
        CONVS if options.conv == "both" else (options.conv,),
        lambda conv: make_model(options.framework, conv, dataset, recipe),
        lambda conv: lambda batch: make_batch_graph(options.framework, batch, conv),
        recipe,
        device=device,
        precision=options.precision,
        seed=options.seed,
        as_step=(lambda step: captured(step, True)) if captures else None,
        takes_pyg=options.framework == "pyg",
    )
    log = report_results(options, device, data, recipe, results, console)
    report.print_parts(console, results)
    return log, results


def report_results(
    options: argparse.Namespace,
    device: torch.device,
    data: dict[str, Any],
    recipe: Recipe,
    results: list[LayerResult],
    console: Console,
    extras: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Prints the table, writes the files of --json and --plot, and returns the log."""
    title = f"{data['name']}, {options.framework}, {options.precision}, {device}"
    report.print_table(console, title, results)
    settings = {**vars(options), "recipe": dataclasses.asdict(recipe)}
    log = report.to_log(
        {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()},
        data,
        results,
    )
    log.update(extras or {})
    if options.json is not None:
        report.write_json(options.json, log)
        console.print(f"log written to {options.json}")
    if options.plot is not None:
        report.plot(options.plot, title, recipe.select_by, results)
        console.print(f"curves written to {options.plot}")
    return log


def run(main: Callable[[], object]) -> None:
    """Calls an example's main function and turns an `ExampleError` into a message and exit status 2."""
    try:
        main()
    except ExampleError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
