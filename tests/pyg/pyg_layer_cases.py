"""The table of PyG's layers that have a drop-in: how each is made and called, and over which options."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from pyg_cases import same_on
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.nn.models import LabelPropagation

from fastsparse_pyg.nn import DROP_INS

Options = Mapping[str, Any]
FLOAT32, BOTH = (torch.float32,), (torch.float64, torch.float32)
DIGITS = {torch.float64: 1e-10, torch.float32: 2e-5}
RELATION = ("a", "to", "a")
#: Weights of edges: none, constant ones, trained ones, and trained ones as a column.
WEIGHTS = ("", "constant", "weight", "column")
FLOW: Options = {"flow": "target_to_source"}
#: Options of SAGE layers, one at a time.
SAGE_OPTIONS: list[Options] = [{}, {"normalize": True}, {"root_weight": False}, {"project": True}]
SAGE_OPTIONS += [{"bias": False}, FLOW, {"node_dim": 0}]


class Case(NamedTuple):
    """A layer with some options, and its call.

    Attributes:
        original: PyG's class.
        options: Arguments of the constructor, by name.
        widths: Widths of the features and of the result.
        edges: Width of the features of edges (-1: the nodes' width), one of `WEIGHTS`, or "" for neither.
        arguments: Positional arguments of the constructor, from both widths.
        call: Calls the layer; None: ``layer(x, edges, *rest)``.
        dtypes: Dtypes in which the layer is compared with the original.
        tolerance: Tolerance by dtype; 1e-5 for other dtypes.
        floor: Argument of `pyg_cases.same`.
    """

    original: Any
    options: Options = MappingProxyType({})
    widths: tuple[int, int] = (6, 4)
    edges: int | str = ""
    arguments: Callable[[int, int], tuple[Any, ...]] = lambda i, o: (i, o)
    call: Callable[..., Any] | None = None
    dtypes: Sequence[torch.dtype] = BOTH
    tolerance: Mapping[torch.dtype, float] = MappingProxyType({})
    floor: float = 1e-3

    @property
    def name(self) -> str:
        return str(self.original.__name__)

    @property
    def fast(self) -> type[nn.Module]:
        """The drop-in's class."""
        return DROP_INS[self.original]

    @property
    def id(self) -> str:
        options = [f"{key}={value}" for key, value in self.options.items() if key != "deg"]
        edges = [] if self.edges == "" else [f"edges={self.edges}"]
        return f"{self.name}({','.join([*options, *edges])}){self.widths}".replace(" ", "")

    def make(
        self, cls: Any, device: str = "cpu", dtype: torch.dtype = torch.float32, **options: Any
    ) -> nn.Module:
        given = {**self.options, **options}
        given |= {key: item.to(device) for key, item in given.items() if isinstance(item, Tensor)}
        layer: nn.Module = cls(*self.arguments(*self.widths), **given)
        return layer.to(device, dtype)

    def pair(
        self, device: str = "cpu", dtype: torch.dtype = torch.float32, **options: Any
    ) -> tuple[nn.Module, nn.Module]:
        """PyG's layer and the drop-in with equal parameters. None is constant: zeros would hide faults."""
        reference = self.make(self.original, device, dtype, **options)
        for parameter in reference.parameters():
            if not (parameter - parameter.mean()).any():
                nn.init.normal_(parameter)
        layer = self.make(self.fast, device, dtype, **options)
        layer.load_state_dict(reference.state_dict())
        return reference, layer

    def features(self, rows: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(rows, self.widths[0], device=device, dtype=dtype, requires_grad=True)

    def rest(self, edges: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Features or weights of the edges, as a list of none or one."""
        if self.edges == "":
            return []
        count, made = edges.size(1), {"device": edges.device, "dtype": dtype}
        if isinstance(self.edges, int):
            width = self.widths[0] if self.edges == -1 else self.edges
            return [torch.randn(count, width, **made).requires_grad_()]
        weight = torch.rand(count, generator=torch.Generator().manual_seed(2)).add(0.1).to(**made)
        weight = weight[:, None] if self.edges == "column" else weight
        return [weight.requires_grad_(self.edges != "constant")]

    def bounds(self, dtype: torch.dtype = torch.float32) -> dict[str, float]:
        """Tolerances of results and gradients."""
        return {"tolerance": self.tolerance.get(dtype, 1e-5), "floor": self.floor}

    def check(self, layers: tuple[Any, Any], graphs: Iterable[Any], given: Any, x: Any, *rest: Any) -> None:
        """`pyg_cases.same_on` of this layer's call."""
        dtype = x[0].dtype if isinstance(x, tuple) else x.dtype
        same_on(graphs, given, *layers, x, *rest, run=self.run, **self.bounds(dtype))

    def run(self, layer: Any, x: Any, edges: Any, *rest: Tensor) -> Any:
        return layer(x, edges, *rest) if self.call is None else self.call(layer, x, edges, *rest)


def _cases(
    original: Any,
    options: Iterable[Options] = ({},),
    edges: Iterable[int | str] = ("",),
    widths: Iterable[tuple[int, int]] = ((6, 4),),
    **how: Any,
) -> Iterator[Case]:
    """All combinations of options, widths and kinds of edges; an option `edge_dim` sets the edges' width."""
    for each, of_edges, both in itertools.product(options, edges, widths):
        yield Case(original, each, both, each.get("edge_dim") or of_edges, **how)


def network(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inside, 7), nn.ReLU(), nn.Linear(7, outside))


def _initial(layer: Any, x: Tensor, edges: Any, *rest: Tensor) -> Any:
    return layer(x, x.flip(1), edges, *rest)


def _typed(layer: Any, x: Tensor, edges: Tensor) -> Any:
    return layer(x, edges, torch.arange(edges.size(1), device=edges.device) % 3)


def _hyperedges(layer: Any, x: Tensor, edges: Tensor) -> Any:
    return layer(x, torch.stack([edges[0], edges[1] % 9]))


def _by_type(layer: Any, x: Tensor, edges: Tensor) -> Any:
    return layer({"a": x}, {RELATION: edges})["a"]


def _products() -> Iterator[Case]:
    """Layers that multiply by the graph's matrix."""
    no_loops: Options = {"add_self_loops": False}
    both = ("", "weight")

    def cases(original: Any, *options: Options, edges: Iterable[str] = both, **how: Any) -> Iterator[Case]:
        for case in _cases(original, options, edges, **{"tolerance": DIGITS, "floor": 0.1, **how}):
            is_plain = not case.options and case.edges == ""
            yield case._replace(dtypes=BOTH if is_plain else BOTH[:1])

    wider: dict[str, Any] = {"widths": [(4, 6)]}
    yield from cases(pyg.GraphConv, {}, {"aggr": "mean"}, {"aggr": "max"}, {"bias": False})
    yield from cases(pyg.GraphConv, {}, {"aggr": "mean"}, widths=[(4, 8)])
    yield from cases(pyg.SGConv, {"K": 2}, {"K": 2, **no_loops}, {"K": 3, "cached": True})
    options = [{"K": 2, "bias": False}, {"aggr": "mean"}, FLOW, {"K": 1, **no_loops}]
    yield from cases(pyg.SGConv, *options, **wider)
    yield from cases(pyg.SSGConv, {"alpha": 0.1, "K": 3}, {"alpha": 0.2, "K": 2, "cached": True})
    yield from cases(pyg.SSGConv, *({"alpha": each, "K": 2, **no_loops} for each in (0.1, 0.0)), **wider)
    same: dict[str, Any] = {"widths": [(6, 6)]}
    options = [{}, no_loops, {"cached": True}, {"normalize": False}]
    yield from cases(pyg.APPNP, *options, arguments=lambda i, o: (3, 0.1), **same)
    yield from cases(pyg.TAGConv, {}, {"normalize": False}, {"bias": False, "K": 2}, {"aggr": "mean"})
    yield from cases(pyg.TAGConv, {}, **wider)
    powers = {"powers": [2, 0], "bias": False, **no_loops}
    yield from cases(pyg.MixHopConv, {}, powers, no_loops, {"aggr": "max"})
    deep = {"theta": 0.5, "layer": 2}
    options = [{}, deep, {"shared_weights": False, "cached": True}, {"normalize": False}, no_loops]
    options += [{**deep, "shared_weights": False}]
    yield from cases(pyg.GCN2Conv, *options, arguments=lambda i, o: (i, 0.3), call=_initial, **same)
    yield from cases(pyg.LGConv, {}, {"normalize": False}, arguments=lambda i, o: (), **same)
    stacks: Options = {"num_stacks": 2, "num_layers": 3}
    options = [{}, stacks, {"act": None, "bias": False}, {"shared_weights": True, "num_layers": 2}]
    yield from cases(pyg.ARMAConv, *options)
    degrees = dict.fromkeys(BOTH, 2e-5)  # PyG's degrees are float32
    yield from cases(pyg.ClusterGCNConv, {}, {"diag_lambda": 0.5}, edges=[""], tolerance=degrees)
    yield from cases(pyg.MFConv, {}, {"max_degree": 3, "bias": False}, {"aggr": "mean"}, edges=[""])
    options, how = [{}, {"aggr": "max"}, {"bias": False}], {"arguments": lambda i, o: (max(i, o), 3)}
    yield from cases(pyg.GatedGraphConv, *options, widths=[(5, 8)], **how)
    yield from cases(pyg.ChebConv, {"K": 1}, arguments=lambda i, o: (i, o))
    options = [{}, {"normalization": "rw"}, {"normalization": None}, {"bias": False}]
    options += [{**FLOW, "normalization": "rw"}]
    yield from cases(pyg.ChebConv, *options, arguments=lambda i, o: (i, o, 3))


def _attention() -> Iterator[Case]:
    two, no_loops = {"heads": 2}, {"add_self_loops": False}
    mean: Options = {"heads": 3, "concat": False}
    gat: list[Options] = [
        two,
        {},
        {"heads": 3},
        mean,
        no_loops,
        {**two, "negative_slope": 0.0, "bias": False},
    ]
    gat += [{**two, "negative_slope": 1.5}, {**two, "residual": True}, {**FLOW, **two}, {**FLOW, **no_loops}]
    gat += [{**two, "residual": True, "concat": False}]
    fills = ("mean", "add", "sum", 0.5, None, torch.tensor([0.3, -1.2, 0.8]))
    featured: list[Options] = [
        {**options, "edge_dim": 3, "fill_value": fill}
        for fill in fills
        for options in ({}, mean, {**FLOW, **two, "residual": True}, no_loops)
    ]
    how: dict[str, Any] = {"tolerance": DIGITS, "floor": 1}
    yield from _cases(pyg.GATConv, gat + featured, widths=[(6, 5)], **how)
    shared = {**two, "share_weights": True}
    yield from _cases(pyg.GATv2Conv, [*gat, shared, *featured], widths=[(6, 5)], **how)
    beta = {**two, "beta": True, "concat": False}
    options = [two, {}, {"heads": 3}, mean, {**FLOW, **two}, beta]
    options += [{**two, **each} for each in ({"root_weight": False}, {"bias": False}, {"beta": True})]
    options += [
        {**each, "edge_dim": 3} for each in ({"heads": 3}, beta, {**FLOW, **two}, {"root_weight": False})
    ]
    yield from _cases(pyg.TransformerConv, options, widths=[(6, 5)], **how)
    options = [{}, {"requires_grad": False}, no_loops, FLOW, {"node_dim": 0}, {**FLOW, **no_loops}]
    widths = [(6, 6), (1, 1), (16, 16)]
    yield from _cases(pyg.AGNNConv, options, widths=widths, arguments=lambda i, o: (), **how)


def _edges() -> Iterator[Case]:
    """Layers whose messages join the features of nodes and edges, or are reduced in several ways."""
    how: dict[str, Any] = {"tolerance": DIGITS, "floor": 1, "widths": [(6, 5)]}
    options: list[Options] = [{}, {"eps": 0.5}, {"train_eps": True}, {"edge_dim": 3}]
    options += [{"edge_dim": 40, "train_eps": True}, {**FLOW, "edge_dim": 3}]
    yield from _cases(pyg.GINEConv, options, [-1], arguments=lambda i, o: (network(i, o),), **how)
    no_root: Options = {"root_weight": False}
    options = [{}, no_root, {"bias": False}, {"act": nn.Sigmoid()}, {"edge_dim": 3}, {**FLOW, "edge_dim": 3}]
    yield from _cases(pyg.ResGatedGraphConv, [*options, {"edge_dim": 2, "bias": False, **no_root}], **how)
    scalers = ["identity", "amplification", "attenuation"]

    def pna(*aggregators: str, **more: Any) -> Options:
        degrees = torch.tensor([0, 3, 5, 9, 12, 4, 1])
        return {"aggregators": list(aggregators), "scalers": scalers, "deg": degrees, **more}

    four = ("mean", "min", "max", "std")
    both: Any = ((1, 2), (None, 3), (False, True), (1, 2))
    options = [
        pna(*four, towers=towers, edge_dim=edge_dim, divide_input=divide, post_layers=layers)
        for towers, edge_dim, divide, layers in itertools.product(*both)
    ]
    options += [pna(*four, towers=t, edge_dim=e, pre_layers=2, act="tanh") for t in (1, 2) for e in (None, 3)]
    rich: Options = {"scalers": [*scalers, "linear", "inverse_linear"], "train_norm": True, "edge_dim": 3}
    options += [pna(name, **rich) for name in ("sum", "mean", "min", "max", "var", "std")]
    options += [pna(*four, edge_dim=40), *(pna(*four, edge_dim=3, pre_layers=n, **FLOW) for n in (1, 2))]
    # Only in float64, because the original's variance is a difference of squares.
    exact: dict[str, Any] = {"dtypes": BOTH[:1], "tolerance": {torch.float64: 1e-9}}
    yield from _cases(pyg.PNAConv, options, widths=[(6, 8)], **exact)


def _others() -> Iterator[Case]:
    """Layers that are compared with the original elsewhere: of typed nodes and edges, hyperedges, labels."""
    none: dict[str, Any] = {"dtypes": ()}
    options: list[Options] = [{}, {"use_attention": False, "bias": False}]
    yield from _cases(pyg.HypergraphConv, options, call=_hyperedges, **none)
    yield Case(LabelPropagation, arguments=lambda i, o: (2, 0.9), **none)
    yield Case(pyg.HGTConv, arguments=lambda i, o: (i, o, (["a"], [RELATION])), call=_by_type, **none)
    typed: dict[str, Any] = {"arguments": lambda i, o: (i, o, 3), "call": _typed, **none}
    options = [{}, {"attention_mechanism": "within-relation"}]
    yield from _cases(pyg.RGATConv, [*options, {"attention_mode": "multiplicative-self-attention"}], **typed)
    yield from _cases(pyg.FastRGCNConv, [{}, {"root_weight": False}], **typed)
    options = [{}, {"root_weight": False, "num_bases": 2}, {"aggr": "max"}]
    yield from _cases(pyg.RGCNConv, options, **typed)


def _all() -> Iterator[Case]:
    three, aggregations = [(8, 5), (8, 8), (5, 8)], ("mean", "sum", "add", "max", "min")
    no_loops: Options = {"add_self_loops": False}
    options: list[Options] = [{}, {"improved": True}, no_loops, {"normalize": False}, {"bias": False}, FLOW]
    options += [{**FLOW, **no_loops, "improved": True}, {"node_dim": 0}]
    yield from _cases(pyg.GCNConv, options, WEIGHTS, three, dtypes=FLOAT32)
    grid = [{**each, "aggr": aggr} for each in SAGE_OPTIONS for aggr in aggregations]
    yield from _cases(pyg.SAGEConv, grid, widths=three, dtypes=FLOAT32)
    options = [{}, {"eps": 0.3}, {"train_eps": True, "eps": 0.1}, FLOW]
    grid = [{**each, "aggr": aggr} for each in options for aggr in aggregations]
    yield from _cases(pyg.GINConv, grid, arguments=lambda i, o: (network(i, o),), dtypes=FLOAT32)
    yield from itertools.chain(_products(), _attention(), _edges(), _others())


CASES = list(_all())


def first(original: Any, edges: int | str = "", **changes: Any) -> Case:
    """The first case of a layer whose edges bring this along."""
    found = next(case for case in CASES if (case.original, case.edges) == (original, edges))
    return found._replace(**changes)


ATTENTION = [first(pyg.GATConv), first(pyg.GATv2Conv), first(pyg.TransformerConv), first(pyg.AGNNConv)]
WITH_DROPOUT = ATTENTION[:3]
#: One case of each layer that has its own kernel and only features of nodes and edges.
PLAIN = [
    first(pyg.GCNConv, widths=(6, 4)),
    first(pyg.SAGEConv, widths=(6, 4)),
    first(pyg.GINConv),
    *ATTENTION,
]


def each_case(cases: Iterable[Case]) -> pytest.MarkDecorator:
    """A test's parameter `case`."""
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in cases])
