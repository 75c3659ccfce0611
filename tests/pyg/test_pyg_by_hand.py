"""Modules that gather and scatter by hand against their own code: results and all gradients."""

from __future__ import annotations

import copy
import math
import pickle
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCNConv
from torch_geometric.utils import softmax

from fastsparse_core.fallback import Reason
from fastsparse_pyg import accelerate, restore
from fastsparse_pyg.caching import SIGHTS
from fastsparse_pyg.nn import by_hand
from fastsparse_pyg.nn.by_hand import ByHand

NODES, EDGES, WIDTH, EDGE_WIDTH = 200, 5000, 6, 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def unsorted_segment_sum(data: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    result = data.new_full((num_segments, data.size(1)), 0)
    segment_ids = segment_ids.unsqueeze(-1).expand(-1, data.size(1))
    result.scatter_add_(0, segment_ids, data)
    return result


def unsorted_segment_mean(data: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    segment_ids = segment_ids.unsqueeze(-1).expand(-1, data.size(1))
    result = data.new_full((num_segments, data.size(1)), 0)
    count = data.new_full((num_segments, data.size(1)), 0)
    result.scatter_add_(0, segment_ids, data)
    count.scatter_add_(0, segment_ids, torch.ones_like(data))
    return result / count.clamp(min=1)


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.edge_mlp = nn.Sequential(
            nn.Linear(2 * WIDTH + 1 + EDGE_WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU()
        )
        self.node_mlp = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.coord_mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1, bias=False))
        self.lin, self.both = nn.Linear(WIDTH, 4), nn.Linear(2 * WIDTH, 4, bias=False)


class Egnn(Module):
    """E(n) equivariant layer (Satorras et al., 2021) as its authors write it."""

    def edge_model(self, source, target, radial, edge_attr):
        return self.edge_mlp(torch.cat([source, target, radial, edge_attr], dim=1))

    def coord_model(self, coord, edge_index, coord_diff, edge_feat):
        row, _ = edge_index
        return coord + unsorted_segment_mean(coord_diff * self.coord_mlp(edge_feat), row, coord.size(0))

    def node_model(self, x, edge_index, edge_attr):
        row, _ = edge_index
        agg = unsorted_segment_sum(edge_attr, row, num_segments=x.size(0))
        return x + self.node_mlp(torch.cat([x, agg], dim=1))

    def forward(self, h, edge_index, coord, edge_attr):
        row, col = edge_index
        coord_diff = coord[row] - coord[col]
        radial = torch.sum(coord_diff**2, 1).unsqueeze(1)
        edge_feat = self.edge_model(h[row], h[col], radial, edge_attr)
        return self.node_model(h, edge_index, edge_feat), self.coord_model(
            coord, edge_index, coord_diff, edge_feat
        )


class Attention(Module):
    """Softmax over edges and `index_add`."""

    def forward(self, h, coord, edge_attr, edges):
        source, target = edges[0], edges[1]
        h = self.lin(h)
        alpha = softmax(
            F.leaky_relu((h[source] * h.index_select(0, target)).sum(-1)), target, num_nodes=len(h)
        )
        return torch.zeros_like(h).index_add(0, target, alpha.unsqueeze(-1) * h[source]), alpha


class Views(Module):
    """Everything that may be done with gathered rows."""

    def forward(self, h, edge_index, coord, edge_attr):
        row, col = edge_index.unbind(0) if isinstance(edge_index, Tensor) else edge_index
        source, target = h[row], torch.index_select(h, 0, col)
        with torch.no_grad():
            scale = source.abs().max() + len(source) + source.shape[1]
        parts = source.view(-1, 2, 3).sum(1), target[:, :3], source.t()[:3].T, source.chunk(2, 1)[1]
        twice = torch.cat((torch.cat([source, target], -1)[:, :WIDTH], target - source), 1)
        stacked = torch.cat([source, target], 0).sum() + torch.stack([row, col]).sum()
        kept = h.detach()[row]
        with torch.no_grad():
            left = h[col]
        mapped = self.both(torch.cat([source, source], 1)) + self.both(torch.cat([kept, left], 1))
        out = sum(parts) / scale + self.both(twice)[:, :3] * mapped[:, :3]
        return torch.zeros(NODES, 3, dtype=h.dtype, device=h.device).index_add_(0, row, out), stacked


class InPlace(Module):
    def forward(self, h, edge_index, coord, edge_attr):
        row, col = edge_index
        source = h[row]
        source.mul_(2).add_(1)
        F.relu(source, inplace=True)
        target = h[col]
        before = self.lin(target + 1)
        target[:, 0] = 0
        return unsorted_segment_sum(self.both(torch.cat([source, target], 1)) + before, row, NODES)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Functions(Module):
    """Code that PyTorch's overrides do not see, hooks and kept gradients."""

    def forward(self, h, edge_index, coord, edge_attr):
        row, col = edge_index
        hooked, source = h[row], h[col]
        hooked.register_hook(lambda grad: 3 * grad)
        return unsorted_segment_sum(self.lin(Doubled.apply(source)) + self.lin(hooked), row, NODES)


class OtherNodes(Module):
    """Gathers rows of another number, integers, and of one dimension."""

    def forward(self, h, edge_index, coord, edge_attr):
        row, col = edge_index
        more = torch.cat([h, h + 1])
        kind = torch.arange(NODES, device=h.device)
        weight = h[:, 0][row] * kind[col]
        return unsorted_segment_sum(self.lin(more[row]) * weight.unsqueeze(1), col, 2 * NODES)


KINDS = [Egnn, Attention, Views, InPlace, Functions, OtherNodes]


def problem(device: str = "cpu") -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    edge_index = torch.randint(NODES - 20, (2, EDGES), generator=generator)
    sizes = {"h": (NODES, WIDTH), "coord": (NODES, 3), "edge_attr": (EDGES, EDGE_WIDTH)}
    given = {
        name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in sizes.items()
    }
    return edge_index.to(device), {name: x.to(device) for name, x in given.items()}


def results(module: nn.Module, edges: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """Outputs, forces, and gradients of both."""
    given = {name: x.clone().requires_grad_() for name, x in given.items()}
    name = "edges" if isinstance(module, Attention) else "edge_index"
    out = module(**{name: edges}, **given)
    outs = out if isinstance(out, tuple) else (out,)
    energy = sum(x.tanh().sum() for x in outs if x.is_floating_point())
    wanted = [*given.values(), *module.parameters()]
    options: Any = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(energy, wanted, create_graph=True, **options)
    second = torch.autograd.grad(energy + sum((x**2).sum() for x in first[:3]), wanted, **options)
    return [x.detach() for x in (*outs, *first, *second)]


def make(kind: type[Module], device: str = "cpu") -> tuple[Module, nn.Module]:
    module = kind().double().to(device)
    fast = copy.deepcopy(module)
    report = accelerate(nn.ModuleList([fast]), show=False)
    assert len(report.swapped) == 1
    assert isinstance(fast, ByHand)
    assert isinstance(fast, kind)
    return module, fast


def check(module: nn.Module, fast: nn.Module, edges: Any, given: dict[str, Tensor]) -> None:
    expected = results(module, edges, given)
    for want, got in zip(expected, results(fast, edges, given), strict=True):
        assert type(got) is Tensor
        assert (want - got).norm() <= 1e-10 * want.norm().clamp(min=1)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether calls got edges that know their graph."""
    calls: list[bool] = []
    right = by_hand._known_edges

    def recorded(*args: Any) -> Any:
        found = right(*args)
        calls.append(not isinstance(found, Reason))
        return found

    monkeypatch.setattr(by_hand, "_known_edges", recorded)
    return calls


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["tensor", "list", "tuple"])
@pytest.mark.parametrize("kind", KINDS)
def test_modules(kind: type[Module], form: str, device: str, served: list[bool]) -> None:
    module, fast = make(kind, device)
    edge_index, given = problem(device)
    edges: Any = edge_index if form == "tensor" else {"list": list, "tuple": tuple}[form](edge_index.clone())
    for _ in range(SIGHTS + 2):
        check(module, fast, edges, given)
    assert served == SIGHTS * [False] + 2 * [True]
    edge_index.copy_(edge_index.flip(1))  # the edit is detected
    check(module, fast, edges, given)


def test_gathered_rows_are_multiplied_once_per_node(monkeypatch: pytest.MonkeyPatch) -> None:
    module, fast = make(Egnn)
    edges, given = problem()
    rows: list[int] = []
    right = by_hand.linear_before_sum
    monkeypatch.setattr(by_hand, "linear_before_sum", lambda x, w: (rows.append(len(x)), right(x, w))[1])
    for _ in range(SIGHTS + 1):
        check(module, fast, edges, given)
    assert rows == [NODES, NODES]


def test_nodes_without_edges_may_hold_nan() -> None:
    module, fast = make(Egnn)
    edges, given = problem()
    given["h"][-20:] = math.nan
    for _ in range(SIGHTS + 1):
        found = [[x.isnan() for x in results(each, edges, given)] for each in (module, fast)]
    first = 2 + 3 + len(list(module.parameters()))  # second derivatives of NaN are not compared
    expected, got = (each[:first] for each in found)
    assert all(torch.equal(want, have) for want, have in zip(expected, got, strict=True))


class WritesNodes(Module):
    def forward(self, h, edge_index, coord, edge_attr):
        row, _ = edge_index
        h = h * 1
        source = h[row]
        h += 1
        return source * 2


def test_nodes_written_before_their_rows_are_read() -> None:
    _, fast = make(WritesNodes)
    edges, given = problem()
    for _ in range(SIGHTS):
        fast(edge_index=edges, **given)
    with pytest.raises(RuntimeError, match=r"`x = x \+ y` instead of `x \+= y`"):
        fast(edge_index=edges, **given)


def test_few_edges_and_wrong_edges_run_the_module_itself(served: list[bool]) -> None:
    module, fast = make(Egnn)
    edges, given = problem()
    few = {**given, "edge_attr": given["edge_attr"][:100]}
    for _ in range(SIGHTS + 2):
        check(module, fast, edges[:, :100].contiguous(), few)
    for wrong in (edges + NODES, edges.float(), edges[0], [edges[0], edges[1][:5]]):
        for _ in range(SIGHTS + 1):
            with pytest.raises(Exception) as expected:  # noqa: PT011
                module(edge_index=wrong, **given)
            with pytest.raises(expected.type) as got:
                fast(edge_index=wrong, **given)
            # Several indices are wrong, and the error names the end of an edge that is checked first.
            one, other = (re.sub(r"^index \d+", "index", str(each.value)) for each in (got, expected))
            assert one == other
    assert not any(served)


def test_copies_pickles_and_back() -> None:
    module, fast = make(Egnn)
    edges, given = problem()
    for each in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert type(each) is type(fast)
        check(module, each, edges, given)
    restore(fast)
    assert type(fast) is Egnn


def test_verified_modules() -> None:
    module = Egnn().double()
    edges, given = problem()
    accelerate(nn.ModuleList([module]), show=False, verify=True)
    for _ in range(SIGHTS + 2):
        module(edge_index=edges, **given)
    assert isinstance(module, ByHand)


class Mixed(Module):
    """Has a layer that needs the edges as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(WIDTH, WIDTH)

    def forward(self, h, edge_index):
        row, _ = edge_index
        return self.conv(h, edge_index)[row]


class NoGather(Module):
    def forward(self, h, edge_index):
        return self.lin(h)


@pytest.mark.parametrize("kind", [Mixed, NoGather, nn.Linear])
def test_other_modules_are_left(kind: Any) -> None:
    module = kind(2, 2) if kind is nn.Linear else kind()
    assert not by_hand.gathers_by_hand(module)
