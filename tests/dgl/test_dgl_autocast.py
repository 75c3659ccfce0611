"""Dtypes under autocast, of every drop-in next to its original."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from dgl_cases import DGLError, dgl, homogeneous, weights
from torch import Tensor, nn

from fastsparse_dgl.nn import DROP_INS

layers = dgl.nn.pytorch
WIDTH, EDGE_WIDTH = 16, 8
#: Results are autocast's, and the original's float32.
OURS = {"GraphConv", "AGNNConv", "EdgeGATConv"}
#: The original multiplies float32 attention by values in 16 bits, which DGL's products refuse.
FAILS = {"GATConv", "GATv2Conv", "EGATConv"}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "precision_determinism.md"
PNA = {"aggregators": ["mean", "std"], "scalers": ["identity"], "delta": 2.5}


class Case(NamedTuple):
    name: str
    arguments: tuple[Any, ...] = (WIDTH, WIDTH)
    options: Mapping[str, Any] = MappingProxyType({})
    edge_width: int = 0
    weighted: bool = False


def network() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


CASES = [
    Case("AGNNConv", ()),
    Case("DotGatConv", (WIDTH, 8, 2)),
    Case("EGATConv", (WIDTH, EDGE_WIDTH, 8, 8, 2), edge_width=EDGE_WIDTH),
    Case("EdgeGATConv", (WIDTH, EDGE_WIDTH, 8, 2), edge_width=EDGE_WIDTH),
    Case("GATConv", (WIDTH, 8, 2)),
    Case("GATv2Conv", (WIDTH, 8, 2)),
    Case("GINConv", (network, "sum")),
    Case("GINConv", (network, "max")),
    Case("GINConv", ()),
    Case("GINEConv", (network,), edge_width=WIDTH),
    Case("GatedGCNConv", (WIDTH, WIDTH, WIDTH), edge_width=WIDTH),
    Case("GatedGCNConv", (WIDTH, WIDTH, WIDTH), {"batch_norm": False, "residual": False}, WIDTH),
    Case("GraphConv"),
    Case("GraphConv", weighted=True),
    Case("PNAConv", options=PNA),
    Case("PNAConv", options=PNA | {"edge_feat_size": EDGE_WIDTH}, edge_width=EDGE_WIDTH),
    *(Case("SAGEConv", (WIDTH, WIDTH, kind)) for kind in ("mean", "gcn", "pool")),
    Case("SAGEConv", (WIDTH, WIDTH, "mean"), weighted=True),
]


def test_every_drop_in_has_a_case():
    named = {each.__name__ for each in DROP_INS} - {"HeteroGraphConv"}  # which has layers of others
    assert named <= {case.name for case in CASES}


def test_the_page_names_the_layers_whose_dtype_is_another():
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("| DGL")]
    assert set(re.findall(r"`Fast(\w+)`", " ".join(rows))) == OURS | FAILS


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.arguments[2:]}{case.weighted}")
def test_dtypes_of_results(case):
    original = getattr(layers, case.name, None)
    if original not in DROP_INS:
        pytest.skip("this DGL has no such layer")
    graph = dgl.add_self_loop(homogeneous())
    feat = torch.randn(30, WIDTH, requires_grad=True)
    rest: list[Tensor] = [weights(graph, case.edge_width)] if case.edge_width else []
    options = {"edge_weight": weights(graph).abs() + 0.5} if case.weighted else {}
    found: list[torch.dtype | None] = []
    for conv in (original, DROP_INS[original]):
        layer = conv(*(each() if each is network else each for each in case.arguments), **case.options)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            try:
                out = layer(graph, feat, *rest, **options)
            except DGLError:
                assert conv is original
                assert case.name in FAILS
                found.append(None)
                continue
        out = out[0] if isinstance(out, tuple) else out
        found.append(out.dtype)
        (grad,) = torch.autograd.grad(out.sum(), feat)
        assert grad.dtype == torch.float32
    if case.name in OURS | FAILS:
        assert found == [torch.float32 if case.name in OURS else None, torch.bfloat16]
    else:
        assert found[0] == found[1]
