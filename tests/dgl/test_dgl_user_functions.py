"""Message and reduce functions as people write them, on DGL's code and planned: results and all gradients."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dgl_cases import dgl, homogeneous
from hook_cases import assert_same, enabled, enabled_for, moved, tensors_of
from torch import Tensor, nn

from fastsparse_core import call_report
from fastsparse_dgl.hooks import function_calls, user_functions

fn = dgl.function
NODES, EDGES, WIDTH, HEADS, EDGE_WIDTH = 60, 700, 6, 3, 4
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
#: Functions of one argument, or of a layer and one argument.
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


# Functions for which there is no plan.


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
    Case(mlp, fn.mean("m", "out"), PER_NODE, "a linear map after the mean"),
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
    """Some nodes have no edges, and some edges are repeated."""
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
    pairs = [(x, seed) for x, seed in zip(results, seeds, strict=True) if x.requires_grad]
    if pairs:
        torch.autograd.backward(*zip(*pairs, strict=True))
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
    """Collects the gains of all plans of a test, and also makes plans for few edges."""
    found: list[tuple[str, ...]] = []
    by_plan = user_functions.results_by_plan

    def recorded(*args: Any) -> Any:
        result = by_plan(*args)
        found.append(result[1])
        return result

    monkeypatch.setattr(user_functions, "results_by_plan", recorded)
    monkeypatch.setattr(function_calls, "FEW_EDGES", {})
    user_functions._traces.clear()
    user_functions._built_in.clear()
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
        assert case.is_planned or GROUPS not in gains  # only the message function


def check(
    call: Callable[[Any, Model], Any], make: Callable[[], Any] = graph, given: Any = None, times: int = 2
) -> None:
    """Checks that a call gives the same with DGL's code and with FastSparse enabled."""
    expected = run(call, g=make(), given=given)
    with enabled():
        for _ in range(times):
            assert_same(run(call, g=make(), given=given), expected, 1e-10)


# ---------------------------------------------------------------- nodes without messages


def squashed(nodes):
    return {"out": torch.sigmoid(nodes.data["out"])}


#: Calls in which an apply function or other relations read the results of nodes without messages.
EXTREMUM_CALLS = {
    "update_all": lambda g, *functions: g.update_all(*functions, squashed, etype="r"),
    "send_and_recv": lambda g, *functions: g.send_and_recv(
        torch.arange(EDGES // 2), *functions, squashed, etype="r"
    ),
    "pull": lambda g, *functions: g.pull(torch.arange(NODES), *functions, squashed, etype="r"),
    "push": lambda g, *functions: g.push(torch.arange(NODES), *functions, squashed, etype="r"),
    "of each relation": lambda g, *functions: g.multi_update_all(
        dict.fromkeys(g.etypes, (*functions, squashed)), "sum"
    ),
}
for _reducer in ("sum", "mean", "max", "min", "stack"):
    EXTREMUM_CALLS[_reducer] = lambda g, *functions, reducer=_reducer: g.multi_update_all(
        dict.fromkeys(g.etypes, functions), reducer, None if reducer == "stack" else squashed
    )


@pytest.mark.parametrize("name", EXTREMUM_CALLS)
@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("message", [copied, fn.copy_u("h", "m")], ids=["own", "built-in"])
def test_extrema_of_nodes_without_messages(
    message: Any, reduce: str, name: str, plans: list[tuple[str, ...]]
) -> None:
    def run_typed() -> list[Tensor]:
        generator = torch.Generator().manual_seed(4)
        relations = {}
        for kind, low, high in (("r", 0, 40), ("s", 20, 50)):
            src = torch.randint(NODES, (EDGES,), generator=generator)
            relations["a", kind, "b"] = src, torch.randint(low, high, (EDGES,), generator=generator)
        g = dgl.heterograph(relations, num_nodes_dict={"a": NODES, "b": NODES})
        h = torch.randn(NODES, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
        g.nodes["a"].data["h"] = h
        EXTREMUM_CALLS[name](g, message, getattr(fn, reduce)("m", "out"))
        out = g.nodes["b"].data["out"]
        out.sum().backward()
        return [out.detach(), h.grad]

    expected = run_typed()
    with enabled():
        assert_same(run_typed(), expected, 1e-10)
    assert bool(plans) is (message is copied)


# ---------------------------------------------------------------- what functions close over


def closes_over_a_layer(g: Any, model: Model) -> None:
    weight, scale, missing = g.ndata["norm"][:, None].mean(0), 0.5, None

    def message(edges):
        out = model.square(edges.src["h"]) * weight * scale
        return {"m": out if missing is None else missing}

    g.update_all(message, lambda nodes: {"out": nodes.mailbox["m"].sum(1) * weight + model.att.sum()})


def test_closures(plans: list[tuple[str, ...]]) -> None:
    check(closes_over_a_layer)
    assert len(plans) == 2
    assert {PER_NODE, GROUPS} <= set(plans[0])


@pytest.mark.parametrize(
    "values", [[1.0, 2.0, 3], [torch.tensor(2.0), torch.tensor([3.0]), 4.0, None], [True, 1, 1.0]], ids=str
)
def test_closures_that_change(values: list[Any], plans: list[tuple[str, ...]]) -> None:
    def with_factor(factor: Any) -> Callable[[Any, Model], Any]:
        def call(g: Any, model: Model) -> None:
            g.update_all(
                lambda edges: {"m": edges.src["h"] if factor is None else edges.src["h"] * factor},
                lambda nodes: {"out": nodes.mailbox["m"].sum(1)},
            )

        return call

    for value in values * 2:
        check(with_factor(value.double() if isinstance(value, Tensor) else value), times=1)
    assert len(plans) == 2 * len(values)


def test_attributes_and_numbers_that_change(
    plans: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for slope, width in ((0.1, 6), (0.4, 6), (0.1, 4)):
        monkeypatch.setattr(Model, "slope", slope)
        monkeypatch.setitem(globals(), "SCALE", width)
        check(called(Case(gat_scores, fn.sum("s", "out"))))
        check(called(Case(scaled, total)))
    monkeypatch.setattr(Model, "activated", lambda self, x: x.tanh())
    check(called(Case(gat_scores, fn.sum("s", "out"))))
    assert len(plans) == 14


SCALE = 6


def scaled(edges):
    return {"m": edges.src["h"] / SCALE}


def test_layers_of_one_class_and_several_shapes(plans: list[tuple[str, ...]]) -> None:
    def call(g: Any, model: Model) -> None:
        for nth, width in enumerate((3, 5, 3)):
            model.square = nn.Linear(WIDTH, width).double()
            torch.nn.init.constant_(model.square.weight, 0.1 * nth)
            model.att = nn.Parameter(torch.ones(2, width).double())
            g.update_all(types.MethodType(of_shape, model), fn.sum("m", f"out{nth}"))

    check(call)
    assert len(plans) == 6


def of_shape(self, edges):
    return {"m": (self.square(edges.src["h"]).unsqueeze(1) * self.att).tanh()}


# ---------------------------------------------------------------- functions that do more than compute


def prints(edges):
    print("called")
    return {"m": edges.src["h"]}


def writes_in_place(edges):
    edges.src["h"].mul_(2)
    return {"m": edges.src["h"]}


def rectifies_in_place(edges):
    F.relu(edges.src["h"], inplace=True)
    return {"m": edges.src["h"]}


def branches(edges):
    if edges.src["h"].sum() > 0:
        return {"m": edges.src["h"]}
    return {"m": -edges.src["h"]}


def loops(edges):
    out = edges.src["h"]
    for row in range(len(edges.data["w"]) % 5):
        out = out + row
    return {"m": out}


def asks_for_ids(edges):
    source, _, ids = edges.edges()
    return {"m": edges.src["h"] * (source + ids)[:, None]}


def asks_for_size(edges):
    return {"m": edges.src["h"] * edges.batch_size()}


def writes_sources(edges):
    edges.src["h"] = 2 * edges.src["h"]
    return {"m": edges.src["h"]}


def gives_a_constant(edges):
    return {"m": torch.ones(EDGES, 2, dtype=torch.float64), "n": edges.src["h"]}


def counts(self, edges):
    self.calls = getattr(self, "calls", 0) + 1
    return {"m": edges.src["h"] * self.calls}


def without_gradient(edges):
    with torch.no_grad():
        out = 2 * edges.src["h"]
    return {"m": out + edges.src["h"]}


def detached(edges):
    return {"m": edges.src["h"].detach() * edges.dst["h"]}


HOSTILE = [
    *(
        prints,
        writes_in_place,
        rectifies_in_place,
        branches,
        loops,
        asks_for_ids,
        asks_for_size,
        writes_sources,
    ),
    *(gives_a_constant, counts, without_gradient),
]


@pytest.mark.parametrize("message", [*HOSTILE, detached], ids=lambda message: message.__name__)
def test_hostile_functions(
    message: Function, plans: list[tuple[str, ...]], reasons: pytest.LogCaptureFixture
) -> None:
    check(called(Case(message, fn.sum("m", "out"))))
    assert bool(plans) == (message is detached)
    assert len(reasons.messages) == (message is not detached)
    assert all(message.__name__ in said for said in reasons.messages)


def test_side_effects_happen_in_every_call(capsys: pytest.CaptureFixture[str]) -> None:
    model, seen = Model().double(), []

    def remembers(edges):
        seen.append(1)
        return {"m": edges.src["h"]}

    g = graph()
    g.ndata["h"] = torch.ones(NODES, 2)
    with enabled():
        for _ in range(3):
            for each in (prints, remembers, types.MethodType(counts, model)):
                g.update_all(each, fn.sum("m", "out"))
    assert capsys.readouterr().out == 3 * "called\n"
    assert (len(seen), model.calls) == (3, 3)


# ---------------------------------------------------------------- graphs, calls and features


def test_blocks_and_bipartite_graphs(plans: list[tuple[str, ...]]) -> None:
    whole = graph()
    given = inputs()
    block = dgl.to_block(dgl.in_subgraph(whole, torch.arange(40)), torch.arange(40))
    pairs = dgl.heterograph({("a", "to", "b"): whole.edges()}, num_nodes_dict={"a": NODES, "b": NODES})
    for g in (block, pairs):
        results = []
        for is_enabled in (False, True):
            source = given["n"]["h"][: g.num_src_nodes()].clone().requires_grad_()
            destination = given["n"]["a"][: g.num_dst_nodes()].clone().requires_grad_()
            g.srcdata["h"], g.dstdata["h"], g.edata["w"] = (
                source,
                destination,
                given["e"]["w"][: g.num_edges()],
            )
            g.dstdata["a"] = destination
            with enabled() if is_enabled else contextlib.nullcontext():
                for reduce in (total, beside_the_node, fn.sum("m", "out")):
                    g.update_all(summed, reduce)
                    loss = g.dstdata.pop("out").square().sum()
                    results += [
                        loss.detach(),
                        *torch.autograd.grad(loss, (source, destination), materialize_grads=True),
                    ]
        assert_same(results[9:], results[:9], 1e-10)
    assert len(plans) == 6


def passes_of_types(g: Any, model: Model) -> None:
    both = (copied, total), (types.MethodType(of_square, model), fn.mean("m", "out"))
    g.multi_update_all(dict(zip(g.etypes, both, strict=True)), "sum")
    g.update_all(copied, average, lambda nodes: {"out": nodes.data["out"] + nodes.data["h"]}, etype="likes")
    g.apply_edges(lambda edges: {"m": edges.src["h"] - edges.dst["h"]}, etype="knows")


def of_square(self, edges):
    return {"m": self.square(edges.src["h"])}


def test_graphs_of_several_types(plans: list[tuple[str, ...]]) -> None:
    source, destination = graph().edges()
    g = dgl.heterograph(
        {("n", "likes", "n"): (source, destination), ("n", "knows", "n"): (destination, source)},
        num_nodes_dict={"n": NODES},
    )
    results = []
    for is_enabled in (False, True):
        model, h = Model().double(), inputs()["n"]["h"].requires_grad_()
        g.ndata["h"] = h
        with enabled() if is_enabled else contextlib.nullcontext():
            passes_of_types(g, model)
        loss = g.ndata["out"].tanh().sum() + g.edges["knows"].data["m"].tanh().sum()
        results.append(
            [loss.detach(), *torch.autograd.grad(loss, (h, model.square.weight), materialize_grads=True)]
        )
    assert_same(results[1], results[0], 1e-10)
    assert len(plans) == 4


def test_other_calls(plans: list[tuple[str, ...]]) -> None:
    def call(g: Any, model: Model) -> None:
        g.ndata["out"] = g.ndata["h"] * 1
        g.send_and_recv(torch.arange(100), copied, total)
        g.pull([1, 2, 3], copied, average)
        g.push([5, 4], types.MethodType(of_square, model), total)
        g.update_all(fn.u_dot_v("h", "a", "m"), total_rows)
        g.apply_edges(summed, torch.arange(20))

    check(call)


def total_rows(nodes):
    return {"sums": nodes.mailbox["m"].sum(1)}


def test_apply_node_function_sees_all_features() -> None:
    def call(g: Any, model: Model) -> None:
        g.update_all(
            copied, total, lambda nodes: {"out": nodes.data["out"] + nodes.data["a"], "b": nodes.data["h"]}
        )

    check(call)


def test_initial_values_of_nodes_without_messages(plans: list[tuple[str, ...]]) -> None:
    def call(g: Any, model: Model) -> None:
        g.set_n_initializer(
            lambda shape, dtype, device, ids: torch.full(shape, 7.0, dtype=dtype, device=device)
        )
        g.update_all(copied, total)

    check(call)
    assert all(GROUPS not in gains for gains in plans)


def test_nodes_without_edges_may_hold_nan() -> None:
    given = inputs()
    touched = torch.cat(graph().edges()).unique()
    for x in given["n"].values():
        x[torch.ones(NODES, dtype=torch.bool).index_fill(0, touched, False)] = math.nan
    messages = {copied: "m", summed: "m", mapped: "m", gated: "gate"}
    for message, name in messages.items():
        for reduce in (fn.sum(name, "out"), fn.mean(name, "out")):
            check(called(Case(message, reduce)), given=given)
    for message, reduce in (
        (copied, quotient),
        (gated, normalised),
        (copied, query_of_node),
        (copied, mapped_rows),
    ):
        check(called(Case(message, reduce)), given=given)


def test_of_equal_messages_the_first_gets_the_gradient() -> None:
    given = inputs()
    given["n"] = {name: x.round() for name, x in given["n"].items()}
    given["e"]["w"] = given["e"]["w"].round()
    for reduce in (largest, smallest):
        for message in (copied, summed):
            check(called(Case(message, reduce)), given=given)


def test_second_derivatives(plans: list[tuple[str, ...]]) -> None:
    g = dgl.graph(([0, 1, 2, 2, 3, 0, 1], [1, 1, 0, 1, 0, 0, 4]), num_nodes=6)
    model = Model().double()

    def call(h: Tensor, e: Tensor, a: Tensor) -> Tensor:
        with g.local_scope():
            g.ndata["h"], g.ndata["a"], g.ndata["b"], g.edata["e"] = h, a, h, e
            g.update_all(types.MethodType(gated, model), normalised)
            first = g.ndata.pop("out")
            g.update_all(copied, types.MethodType(query_of_node, model))
            return first.tanh() + g.ndata["out"]

    given = [torch.randn(*size, dtype=torch.float64) for size in ((6, WIDTH), (7, EDGE_WIDTH), (6, WIDTH))]
    with enabled():
        assert torch.autograd.gradgradcheck(call, [x.requires_grad_() for x in given], atol=1e-6)
    assert all(GROUPS in gains for gains in plans)


def test_errors_are_those_of_dgl() -> None:
    g = graph()
    g.ndata["h"] = torch.ones(NODES, WIDTH)
    wrong: list[Callable[[], Any]] = [
        lambda: g.update_all(lambda edges: {"m": edges.src["nothing"]}, fn.sum("m", "out")),
        lambda: g.update_all(copied, fn.sum("other", "out")),
        lambda: g.update_all(copied, lambda nodes: {"out": nodes.mailbox["other"].sum(1)}),
        lambda: g.apply_edges(lambda edges: {"m": edges.src["h"] @ torch.ones(2, 2)}),
        lambda: g.apply_edges(lambda edges: {"m": edges.src["h"][:5]}),
        lambda: g.apply_edges(lambda edges: {"m": 1}),
    ]
    for call in wrong:
        with pytest.raises(Exception) as expected:  # noqa: PT011
            call()
        with enabled(), pytest.raises(expected.type) as got:
            call()
        assert str(got.value) == str(expected.value)


def test_graphs_without_edges_and_few_edges(
    reasons: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, plans: list[tuple[str, ...]]
) -> None:
    empty = dgl.graph(([], []), num_nodes=3)
    empty.ndata["h"] = torch.ones(3, 2)
    with enabled(), pytest.warns(UserWarning, match="does not contain valid edges"):
        empty.update_all(copied, fn.sum("m", "out"))
    assert not empty.ndata["out"].any()
    assert not plans
    monkeypatch.setattr(function_calls, "FEW_EDGES", {"cpu": EDGES + 1})
    check(called(Case(copied, fn.sum("m", "out"))))
    assert not plans
    assert any("few edges" in said for said in reasons.messages)
    check(called(Case(copied, total)))
    assert len(plans) == 2


def test_features_that_dgl_aligns(plans: list[tuple[str, ...]]) -> None:
    def call(g: Any, model: Model) -> None:
        g.edata["flat"] = g.edata["w"][:, 0] * 1
        g.update_all(fn.u_mul_e("h", "flat", "m"), total)

    check(call)
    assert not plans


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


def test_layers_that_are_no_attributes_are_named() -> None:
    """The report says how to write a lambda that calls a layer of its closure."""
    layer, some = nn.Linear(WIDTH, WIDTH).double(), graph()
    some.ndata["h"] = inputs()["n"]["h"]
    call_report.start_recording()
    try:
        with enabled():
            some.update_all(lambda edges: {"m": layer(edges.src["h"])}, total)
        reasons = {row.reason for row, _ in call_report.report().rows if row.call == "update_all"}
    finally:
        call_report.stop_recording()
    assert reasons == {"calls a Linear that is not an attribute of a module, as in self.lin(...)"}


def test_the_report_names_plans_and_reasons() -> None:
    call_report.start_recording()
    try:
        with enabled():
            for reduce in (total, sorted_messages):
                run(called(Case(mapped, reduce)))
        rows = {(row.call, row.reason): row.by for row, _ in call_report.report().rows}
        callers = {row.call: row.caller for row, _ in call_report.report().rows}
    finally:
        call_report.stop_recording()
    assert callers == {"update_all": "", "apply_edges": "update_all"}
    assert PER_NODE in rows["update_all", ""]
    assert GROUPS in rows["update_all", ""]
    assert PER_NODE in rows["apply_edges", ""]  # only the message functions
    assert [by for (call, reason), by in rows.items() if call == "update_all" and reason] == ["DGL"]


@pytest.mark.parametrize(
    ("reduce", "name"),
    [
        (sorted_messages, "sort"),
        (lambda nodes: {"h": nodes.mailbox["m"].std(1, correction=0)}, "std"),
        (lambda nodes: {"h": nodes.mailbox["m"].logsumexp(1)}, "logsumexp"),
        (lambda nodes: {"h": nodes.mailbox["m"].transpose(1, 2).sum(2)}, "transpose"),
        (lambda nodes: {"h": nodes.mailbox["m"].mT.sum(2)}, "mT"),
        (lambda nodes: {"h": nodes.mailbox["m"][:, 0] / nodes.mailbox["m"].sum(1)}, "getitem"),
        (lambda nodes: {"h": 2 * nodes.mailbox["m"]}, "results without a row per node"),
    ],
)
def test_operations_without_kernels_are_named(reduce: Any, name: str) -> None:
    graph = homogeneous()
    graph.ndata["x"] = torch.randn(graph.num_nodes(), 6)
    with enabled(report=True), contextlib.suppress(dgl.DGLError, RuntimeError):  # of messages as results
        graph.update_all(lambda edges: {"m": edges.src["x"]}, reduce)
    reasons = [row.reason for row, _ in call_report.report().rows if row.call == "update_all"]
    assert reasons == [f"FastSparse has no kernels for {name}"]


def test_the_report_says_that_a_function_asks_for_features() -> None:
    graph = homogeneous()
    layer = dgl.nn.RelGraphConv(6, 4, 3, "basis", 2)
    with enabled(report=True):
        layer(graph, torch.randn(graph.num_nodes(), 6), torch.zeros(graph.num_edges(), dtype=torch.int64))
        reasons = {row.reason for row, _ in call_report.report().rows if row.call == "update_all"}
    assert reasons == {"checks whether there is a feature 'norm'"}


def test_the_report_counts_calls_without_edges() -> None:
    graph = dgl.graph(([], []), num_nodes=3)
    graph.ndata["x"] = torch.randn(3, 4)
    with enabled(report=True):
        graph.update_all(dgl.function.copy_u("x", "m"), lambda nodes: {"h": nodes.mailbox["m"].sum(1)})
        text = str(call_report.report())
    assert "FastSparse computed 0 of 1 calls" in text
    assert "no edges" in text


@pytest.mark.parametrize("is_on", [False, True])
def test_the_report_names_few_edges(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_calls, "FEW_EDGES", {"cpu": EDGES + 1})
    with enabled(report=is_on):
        run(called(Case(mapped, dgl.function.sum("m", "out"))))
        rows = {(row.call, row.by, row.reason) for row, _ in call_report.report().rows}
    assert (("update_all", "DGL", function_calls.FEW.cause) in rows) is is_on
