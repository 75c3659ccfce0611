"""Dtypes under autocast, of every drop-in next to its original, and what calls keep for later ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from pyg_cases import close, random_graph
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.nn.models import LabelPropagation

import fastsparse_pyg
from fastsparse_pyg.nn import DROP_INS

WIDTH, EDGE_WIDTH = 16, 8
#: Results are autocast's, and the original's float32: it multiplies by float32 numbers, or nothing by a map.
OURS = {"GCNConv", "GATConv", "GATv2Conv", "AGNNConv", "LGConv"}
#: On CUDA autocast leaves exponentials in float32.
OURS_ON_CUDA = OURS | {"TransformerConv"}
#: The original adds float32 features to products in 16 bits.
FAILS = {"MFConv"}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "precision_determinism.md"


class Case(NamedTuple):
    original: Any
    arguments: tuple[Any, ...] = (WIDTH, WIDTH)
    options: Mapping[str, Any] = MappingProxyType({})
    edge_width: int = 0
    weighted: bool = False
    call: Callable[[Any, Tensor, Tensor], Any] | None = None

    @property
    def name(self) -> str:
        return str(self.original.__name__)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def kinds(edges: Tensor) -> Tensor:
    return torch.arange(edges.size(1), device=edges.device) % 3


RELATION = ("a", "to", "a")
TYPED = {"call": lambda conv, x, edges: conv(x, edges, kinds(edges))}
PNA = {"aggregators": ["mean", "std"], "scalers": ["identity"], "deg": torch.tensor([0, 3, 9])}
CASES = [
    Case(pyg.AGNNConv, ()),
    Case(pyg.APPNP, (3, 0.1)),
    Case(pyg.APPNP, (3, 0.1), weighted=True),
    Case(pyg.ARMAConv),
    Case(pyg.ChebConv, (WIDTH, WIDTH, 3)),
    Case(pyg.ClusterGCNConv),
    Case(pyg.GATConv),
    Case(pyg.GATConv, options={"edge_dim": EDGE_WIDTH}, edge_width=EDGE_WIDTH),
    Case(pyg.GATv2Conv),
    Case(pyg.GATv2Conv, options={"edge_dim": EDGE_WIDTH}, edge_width=EDGE_WIDTH),
    Case(pyg.GCN2Conv, (WIDTH, 0.1), call=lambda conv, x, edges: conv(x, x, edges)),
    Case(pyg.GCNConv),
    Case(pyg.GCNConv, weighted=True),
    Case(pyg.GINConv, (network,)),
    Case(pyg.GINEConv, (network,), edge_width=WIDTH),
    Case(pyg.GINEConv, (network,), {"edge_dim": EDGE_WIDTH}, edge_width=EDGE_WIDTH),
    Case(pyg.ResGatedGraphConv),
    Case(pyg.ResGatedGraphConv, options={"edge_dim": EDGE_WIDTH}, edge_width=EDGE_WIDTH),
    Case(pyg.PNAConv, options=PNA),
    Case(pyg.GatedGraphConv, (WIDTH, 2)),
    Case(pyg.GraphConv),
    Case(pyg.GraphConv, weighted=True),
    Case(pyg.HypergraphConv, call=lambda conv, x, edges: conv(x, torch.stack([edges[0], edges[1] % 9]))),
    Case(pyg.LGConv, ()),
    Case(pyg.MFConv),
    Case(pyg.MixHopConv),
    Case(LabelPropagation, (2, 0.9)),
    Case(
        pyg.HGTConv,
        (WIDTH, WIDTH, (["a"], [RELATION])),
        call=lambda conv, x, edges: conv({"a": x}, {RELATION: edges})["a"],
    ),
    Case(pyg.RGATConv, (WIDTH, WIDTH, 3), **TYPED),
    Case(pyg.FastRGCNConv, (WIDTH, WIDTH, 3), **TYPED),
    Case(pyg.RGCNConv, (WIDTH, WIDTH, 3), **TYPED),
    Case(pyg.SAGEConv),
    Case(pyg.SGConv, options={"K": 2}),
    Case(pyg.SSGConv, options={"alpha": 0.1, "K": 2}),
    Case(pyg.TAGConv),
    Case(pyg.TransformerConv),
    Case(pyg.TransformerConv, options={"edge_dim": EDGE_WIDTH}, edge_width=EDGE_WIDTH),
]


def test_every_drop_in_has_a_case():
    assert {case.original for case in CASES} == set(DROP_INS)


def test_the_page_names_the_layers_whose_dtype_is_another():
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("| PyG")]
    named = set(re.findall(r"`Fast(\w+)`", " ".join(rows)))
    assert named == OURS_ON_CUDA | FAILS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.options or ''}{case.weighted}")
def test_dtypes_of_results(device, case, dtype):
    edges = random_graph(device=device)
    x = torch.randn(40, WIDTH, device=device, requires_grad=True)
    rest: list[Tensor] = []
    if case.edge_width:
        rest = [torch.randn(edges.size(1), case.edge_width, device=device)]
    elif case.weighted:
        rest = [torch.rand(edges.size(1), device=device)]
    found: list[torch.dtype | None] = []
    for conv in (case.original, DROP_INS[case.original]):
        arguments = [each() if each is network else each for each in case.arguments]
        layer = conv(*arguments, **case.options).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            try:
                if case.call is None:
                    out = layer(x.to(dtype), edges, *rest)
                else:
                    out = case.call(layer, x.to(dtype), edges)
            except RuntimeError:
                assert conv is case.original
                assert case.name in FAILS
                found.append(None)
                continue
        found.append(out.dtype)
        if out.requires_grad:
            (grad,) = torch.autograd.grad(out.sum(), x)
            assert grad.dtype == torch.float32
    theirs, ours = found
    if case.name in (OURS_ON_CUDA if device == "cuda" else OURS):
        assert ours == torch.bfloat16
        assert theirs == torch.float32 or dtype == torch.bfloat16
    elif theirs is not None:
        assert ours == theirs


@pytest.mark.parametrize("name", ["SGConv", "SSGConv"])
@pytest.mark.usefixtures("kernels_only")
def test_what_was_kept_under_autocast_serves_without(device, name):
    edges = random_graph(device=device)
    x = torch.randn(40, WIDTH, device=device)
    options = {"K": 2, "cached": True} | ({"alpha": 0.1} if name == "SSGConv" else {})
    layers = [
        conv(WIDTH, WIDTH, **options).to(device)
        for conv in (getattr(pyg, name), getattr(fastsparse_pyg, f"Fast{name}"))
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    with torch.autocast(device, dtype=torch.bfloat16):
        close(layers[1](x, edges), layers[0](x, edges), 1e-2)
    close(layers[1](x, edges), layers[0](x, edges))


def test_appnp_under_autocast_is_rounded_in_between_alone(device):
    edges = random_graph(device=device)
    x = torch.randn(40, WIDTH, device=device, requires_grad=True)
    layers = [conv(3, 0.1) for conv in (pyg.APPNP, fastsparse_pyg.FastAPPNP)]
    with torch.autocast(device, dtype=torch.bfloat16):
        expected, found = (layer(x, edges) for layer in layers)
    close(found, expected, 2e-2)
    for layer, out in zip(layers, (expected, found), strict=True):
        assert layer is layers[0] or not torch.equal(out, out.bfloat16().float())
    gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in (expected, found)]
    close(gradients[1], gradients[0], 2e-2)
