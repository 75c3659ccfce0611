"""Message and reduce functions as people write them, on DGL's code and planned: results and all gradients."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dgl_cases import dgl
from hook_cases import assert_same, enabled_for, moved, tensors_of
from torch import Tensor, nn

from fastsparse_dgl.hooks import user_functions

fn = dgl.function
NODES, EDGES, WIDTH, HEADS, EDGE_WIDTH = 60, 700, 6, 3, 4
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
#: Functions take one argument, or a layer and one.
Function = Callable[..., Any]


class Model(nn.Module):
    """What functions may read."""

    p, slope, heads = 0.0, 0.2, HEADS

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.square, self.both = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.all = nn.Linear(2 * WIDTH + EDGE_WIDTH, WIDTH)
        self.of_edge = nn.Linear(EDGE_WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(2 * WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH))
        self.attend = nn.Linear(2 * WIDTH, 1, bias=False)
        self.normed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).eval()
        self.layer_norm = nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.0), nn.Tanh())
        self.att = nn.Parameter(torch.randn(1, HEADS, WIDTH // HEADS))
        self.kinds = nn.Embedding(3, WIDTH)

    def activated(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.slope)


# Message functions.


def copied(edges):
    return {"m": edges.src["h"]}


def summed(edges):
    return {"m": edges.src["h"] + edges.dst["h"] * edges.data["w"]}


def mapped(self, edges):
    return {"m": self.all(torch.cat([edges.src["h"], edges.dst["h"], edges.data["e"]], dim=1))}


def mlp(self, edges):
    return {"m": self.mlp(torch.cat([edges.dst["h"], edges.src["h"] - edges.dst["h"]], -1))}


def gated(self, edges):
    gate = torch.sigmoid(edges.src["a"] + edges.dst["b"] + self.of_edge(edges.data["e"]))
    return {"m": gate * edges.src["h"], "gate": gate}


def gated_by_nodes(edges):
    return {"m": torch.sigmoid(edges.src["a"] + edges.dst["b"]) * edges.src["h"]}


def gat_scores(self, edges):
    both = torch.cat([edges.src["h"], edges.dst["h"]], dim=1)
    return {"s": self.activated(self.attend(both))}


def heads(self, edges):
    e = edges.src["q"] + edges.dst["q"]
    return {"s": (F.leaky_relu(e, 0.2) * self.att).sum(-1), "m": edges.src["q"]}


def dot_product(edges):
    return {
        "s": (edges.src["h"] * edges.dst["h"]).sum(-1, keepdim=True) / math.sqrt(WIDTH),
        "m": edges.src["a"],
    }


def distance(edges):
    way = edges.src["x"] - edges.dst["x"]
    return {"m": torch.exp(-(way**2).sum(-1, keepdim=True)) * edges.src["h"], "way": way}


def of_kinds(self, edges):
    return {"m": F.relu(edges.src["h"] + self.kinds(edges.data["kind"]))}


def of_numbers(edges):
    return {"m": edges.src["h"] * edges.src["norm"].unsqueeze(-1) * edges.dst["norm"][:, None]}


def state_written(self, edges):
    """GatedGCN as its authors wrote it: the function sets the edges' state."""
    edges.data["e"] = self.of_edge(edges.data["e"])[:, :EDGE_WIDTH] + edges.src["a"][:, :EDGE_WIDTH]
    return {"m": edges.src["h"], "e": edges.data["e"]}


# Reduce functions.


def total(nodes):
    return {"out": nodes.mailbox["m"].sum(1)}


def total_by_function(nodes):
    return {"out": torch.sum(nodes.mailbox["m"], dim=1)}


def average(nodes):
    return {"out": torch.mean(nodes.mailbox["m"], dim=1)}


def average_by_size(nodes):
    return {"out": nodes.mailbox["m"].sum(1) / nodes.mailbox["m"].size(1)}


def average_by_shape(nodes):
    return {"out": nodes.mailbox["m"].sum(dim=1) / nodes.mailbox["m"].shape[1]}


def largest(nodes):
    return {"out": nodes.mailbox["m"].max(1)[0]}


def smallest(nodes):
    return {"out": torch.min(nodes.mailbox["m"], dim=1).values}


def attended(nodes):
    alpha = F.softmax(nodes.mailbox["s"], dim=1)
    return {"out": torch.sum(alpha * nodes.mailbox["m"], dim=1)}


def attended_heads(nodes):
    alpha = torch.softmax(nodes.mailbox["s"], 1).unsqueeze(-1)
    return {"out": (alpha * nodes.mailbox["m"]).sum(dim=1).flatten(1)}


def normalised(nodes):
    sums = nodes.mailbox["gate"].sum(1)
    return {"out": nodes.data["a"] + nodes.mailbox["m"].sum(1) / (sums + 1e-6), "sums": sums}


def quotient(nodes):
    """Rows without messages would be 0 / 0."""
    out = nodes.mailbox["m"].sum(1) / nodes.mailbox["m"].abs().sum(1)
    return {"out": out * nodes.data["h"]}


def mapped_rows(self, nodes):
    out = self.both(torch.cat([nodes.data["h"], nodes.mailbox["m"].mean(1)], -1)).relu()
    return {"out": self.layer_norm(out)}


def mapped_mailbox(self, nodes):
    return {"out": torch.sigmoid(self.square(nodes.mailbox["m"])).sum(1)}


def beside_the_node(nodes):
    gate = torch.sigmoid(nodes.data["h"].unsqueeze(1) * nodes.mailbox["m"])
    return {"out": (gate * nodes.mailbox["m"]).sum(1) - nodes.data["h"]}


def query_of_node(self, nodes):
    query = self.square(nodes.data["h"]).unsqueeze(1)
    score = (query * nodes.mailbox["m"]).sum(-1, keepdim=True)
    return {"out": (F.softmax(score, dim=1) * nodes.mailbox["m"]).sum(1)}


def centred(nodes):
    mail = nodes.mailbox["m"]
    return {"out": ((mail - mail.mean(1, keepdim=True)) ** 2).sum(dim=1)}


def own_row(nodes):
    return {"out": nodes.data["h"]}


# What no plan holds.


def first_message(nodes):
    return {"out": nodes.mailbox["m"][:, 0]}


def sorted_messages(nodes):
    return {"out": nodes.mailbox["m"].sort(1)[0][:, -1]}


def normed_per_degree(self, nodes):
    return {"out": self.normed(nodes.mailbox["m"].sum(1))}


def numbered(nodes):
    return {"out": nodes.mailbox["m"].sum(1) * nodes.nodes().unsqueeze(1)}


def by_size_of_batch(nodes):
    return {"out": nodes.mailbox["m"].sum(1) / len(nodes)}


def softmax_of_nodes(nodes):
    return {"out": torch.softmax(nodes.mailbox["m"].sum(1), 0)}


class Case:
    """A call: (message, reduction), whether it is planned, and what the plan gains."""

    def __init__(self, message: Any, reduce: Any = None, *gains: str, planned: bool = True) -> None:
        self.message, self.reduce, self.gains, self.is_planned = message, reduce, gains, planned

    @property
    def name(self) -> str:
        return "-".join(
            getattr(each, "__name__", "") or f"{each.name}" for each in (self.message, self.reduce) if each
        )


PER_NODE, GROUPS = "linear maps per node", "no groups by degree"
CASES = [
    *(
        Case(message)
        for message in (copied, summed, gated, heads, dot_product, distance, of_kinds, of_numbers)
    ),
    *(Case(message, None, PER_NODE) for message in (mapped, mlp)),
    Case(gat_scores, None, PER_NODE),
    Case(state_written),
    *(Case(message, fn.sum("m", "out")) for message in (copied, summed, distance, of_kinds, of_numbers)),
    Case(gated, fn.sum("m", "out")),
    Case(gated_by_nodes, fn.sum("m", "out"), "gated_aggregate"),
    Case(mapped, fn.sum("m", "out"), PER_NODE),
    Case(mlp, fn.mean("m", "out"), PER_NODE, "a linear map behind the mean"),
    Case(mlp, fn.max("m", "out"), PER_NODE),
    Case(summed, fn.min("m", "out")),
    Case(copied, total, GROUPS),
    Case(summed, total_by_function, GROUPS),
    Case(mapped, average, PER_NODE, GROUPS),
    Case(distance, average_by_size, GROUPS),
    Case(summed, average_by_shape, GROUPS),
    Case(summed, largest, GROUPS),
    Case(mlp, smallest, PER_NODE, GROUPS),
    Case(dot_product, attended, "attention", GROUPS),
    Case(heads, attended_heads, "gatv2_attention", GROUPS),
    Case(gated, normalised, GROUPS),
    Case(copied, quotient, GROUPS),
    Case(copied, mapped_rows, GROUPS),
    Case(copied, mapped_mailbox, GROUPS),
    Case(copied, beside_the_node, GROUPS),
    Case(copied, query_of_node, GROUPS),
    Case(summed, centred, GROUPS),
    Case(copied, own_row, GROUPS),
    Case(fn.copy_u("h", "m"), total, GROUPS),
    Case(fn.copy_e("e", "m"), average, GROUPS),
    Case(fn.u_mul_e("h", "w", "m"), largest, GROUPS),
    Case(fn.u_sub_v("h", "a", "m"), mapped_rows, GROUPS),
    *(
        Case(copied, reduce, planned=False)
        for reduce in (
            *(first_message, sorted_messages, normed_per_degree, numbered, by_size_of_batch),
            softmax_of_nodes,
        )
    ),
]


def inputs() -> dict[str, dict[str, Tensor]]:
    """Features of the nodes and of the edges."""
    generator = torch.Generator().manual_seed(1)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    nodes = {"h": draw(NODES, WIDTH), "a": draw(NODES, WIDTH), "b": draw(NODES, WIDTH)}
    nodes |= {"q": draw(NODES, HEADS, WIDTH // HEADS), "x": draw(NODES, 3), "norm": draw(NODES)}
    kinds = torch.randint(3, (EDGES,), generator=generator)
    return {"n": nodes, "e": {"e": draw(EDGES, EDGE_WIDTH), "w": draw(EDGES, 1), "kind": kinds}}


def graph() -> Any:
    """Some nodes have no edges, some edges come twice."""
    generator = torch.Generator().manual_seed(2)
    src = torch.randint(NODES - 4, (EDGES,), generator=generator)
    dst = torch.randint(NODES - 9, (EDGES,), generator=generator)
    dst[EDGES // 2 :] //= 3
    return dgl.graph((src, dst), num_nodes=NODES)


def bound(function: Any, model: Model) -> Any:
    """A function, or a method of the model."""
    if dgl.core.is_builtin(function) or function is None or function.__code__.co_argcount == 1:
        return function
    return types.MethodType(function, model)


def run(
    call: Callable[[Any, Model], Any],
    device: str = "cpu",
    g: Any = None,
    given: Any = None,
    autocast: torch.dtype | None = None,
) -> list[Tensor]:
    """Results by name, and the gradients of everything."""
    model = Model().to(device, torch.float64 if autocast is None else torch.float32)
    given = moved(inputs() if given is None else given, device)
    g = (graph() if g is None else g).to(device)
    g.ndata.update(given["n"])
    g.edata.update(given["e"])
    with torch.autocast(torch.device(device).type, autocast, enabled=autocast is not None):
        call(g, model)
    known = {id(each) for each in tensors_of(given)}
    results = [x for frame in (g.ndata, g.edata) for _, x in sorted(frame.items()) if id(x) not in known]
    seeds = [
        torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype).to(x) for x in results
    ]
    wanted = [x for x in tensors_of(given) if x.requires_grad] + list(model.parameters())
    sum((x * seed).sum() for x, seed in zip(results, seeds, strict=True)).backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in wanted]
    return [x.detach().cpu() for x in results + grads]


def called(case: Case) -> Callable[[Any, Model], Any]:
    def call(g: Any, model: Model) -> None:
        functions = [bound(each, model) for each in (case.message, case.reduce)]
        if case.reduce is None:
            g.apply_edges(functions[0])
        else:
            g.update_all(*functions)

    return call


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What the plans of a test gained; few edges are planned, too."""
    found: list[tuple[str, ...]] = []
    by_plan = user_functions._by_plan

    def recorded(*args: Any) -> Any:
        result = by_plan(*args)
        found.append(result[1])
        return result

    monkeypatch.setattr(user_functions, "_by_plan", recorded)
    monkeypatch.setattr(user_functions, "FEW_EDGES", {})
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_functions(case: Case, device: str, plans: list[tuple[str, ...]]) -> None:
    expected = run(called(case))
    with enabled_for(device):
        for _ in range(2):
            assert_same(run(called(case), device), expected, 1e-10)
    assert len(plans) == 2
    for gains in plans:
        assert set(case.gains) <= set(gains)
        assert case.is_planned or GROUPS not in gains  # the message alone


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [case for case in CASES if case.is_planned], ids=lambda case: case.name)
def test_autocast(case: Case, device: str, plans: list[tuple[str, ...]]) -> None:
    exact = run(called(case))
    given = {
        place: {name: x.float() if x.is_floating_point() else x for name, x in each.items()}
        for place, each in inputs().items()
    }

    def mixed(device: str) -> list[Tensor]:
        return run(called(case), device, given=given, autocast=torch.bfloat16)

    with enabled_for(device):
        found = mixed(device)
        if plans == [] and device != "cpu":
            assert dgl.core.is_builtin(case.message)
            return
        assert len(plans) == 1
    expected = mixed("cpu")
    for got, want, best in zip(found, expected, exact, strict=True):
        if device == "cpu":
            assert got.dtype == want.dtype
        errors = [(each.double() - best).norm() / best.norm().clamp(min=1e-2) for each in (got, want)]
        assert errors[0] <= 0.03 + 2 * errors[1]
