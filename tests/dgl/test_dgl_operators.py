"""DGL's operators on FastSparse: results and gradients of every one are DGL's own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from dgl_cases import GRAPHS, DGLError, bipartite, dgl, fastsparse_dgl, homogeneous
from hook_cases import AWAY, check, enabled, enabled_for, run
from torch import Tensor

from fastsparse_core import call_report
from fastsparse_dgl.hooks import operators

ops, fn = dgl.ops, dgl.function


@pytest.fixture(params=["cpu", *AWAY])
def device(request: pytest.FixtureRequest) -> str:
    """On the CPU DGL's own kernels remain where they are faster; elsewhere all are ours."""
    return request.param  # type: ignore[no-any-return]


def draw(rows: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers that are not close to 0, for divisions."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(rows, *shape, generator=generator) + 0.5
    sign = torch.randint(2, numbers.shape, generator=generator) * 2 - 1
    return (numbers * sign).to(dtype)


def hostile() -> Any:
    """Isolated nodes, a repeated edge, a heavy row, in no order."""
    src = torch.tensor([5, 3, 3, 0, 1, 2, 4, 5, 6, 0, 8])
    dst = torch.tensor([3, 3, 3, 3, 7, 3, 3, 0, 3, 0, 3])
    return dgl.graph((src, dst), num_nodes=12)


def without_infinity(out: Any) -> Any:
    """What `update_all` makes of an operator's result; DGL gives its gradient in empty rows to row 0."""
    if isinstance(out, (tuple, list)):
        return [without_infinity(part) for part in out]
    return dgl.backend.replace_inf_with_zero(out)


#: Feature shapes of nodes and of edges that broadcast.
SHAPES = [((), ()), ((3,), (3,)), ((3,), (1,)), ((1,), (4,)), ((), (3,)), ((2, 3), (2, 1)), ((2, 3), (1, 3)),
          ((2, 3), (3,)), ((4, 1, 3), (2, 1)), ((2, 1, 3), (1, 5, 1)), ((67,), (67,)),
          ((40,), (1,))]  # fmt: skip


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("reduce", ["sum", "max", "min", "mean"])
def test_gspmm(op: str, reduce: str, device: str) -> None:
    graph = hostile()
    inputs = [(draw(12, *shapes[0]), draw(11, *shapes[1], seed=1)) for shapes in SHAPES]

    def all_shapes(g: Any, *pairs: Any) -> Any:
        return [without_infinity(getattr(ops, f"u_{op}_e_{reduce}")(g, *pair)) for pair in pairs]

    check(all_shapes, graph, inputs, device)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("reduce", ["sum", "max", "min", "mean"])
def test_copies(graph: str, reduce: str, device: str) -> None:
    made = GRAPHS[graph]()
    shapes: Any = [(), (7,), (2, 3), (33,)]
    x = [draw(made.num_src_nodes(), *shape) for shape in shapes]
    check(lambda g, *x: [getattr(ops, f"copy_u_{reduce}")(g, it) for it in x], made, x, device)
    if graph != "csc":  # DGL itself cannot: "Check notnull: edges"
        e = [draw(made.num_edges(), *shape) for shape in shapes]
        check(lambda g, *e: [getattr(ops, f"copy_e_{reduce}")(g, it) for it in e], made, e, device)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_empty_rows_of_extrema(reduce: str, device: str) -> None:
    graph = hostile()
    x = draw(12, 2)
    expected = getattr(ops, f"copy_u_{reduce}")(graph, x)
    with enabled_for(device):
        found = getattr(ops, f"copy_u_{reduce}")(graph.to(device), x.to(device))
        assert torch.equal(found.cpu(), expected)
    assert expected.isinf().any()


@pytest.mark.parametrize("x_at", "uve")
@pytest.mark.parametrize("y_at", "uve")
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "dot"])
def test_gsddmm(x_at: str, y_at: str, op: str, device: str) -> None:
    graph = bipartite()
    rows = {"u": graph.num_src_nodes(), "v": graph.num_dst_nodes(), "e": graph.num_edges()}
    if op == "dot":
        shapes: Any = [((), ()), ((3,), (3,)), ((2, 3), (2, 3)), ((2, 3), (1, 3)), ((5, 1, 3), (2, 3))]
    else:
        shapes = SHAPES
    inputs = [(draw(rows[x_at], *x_shape), draw(rows[y_at], *y_shape, seed=1)) for x_shape, y_shape in shapes]
    check(lambda g, *pairs: [ops.gsddmm(g, op, *pair, x_at, y_at) for pair in pairs], graph, inputs, device)


@pytest.mark.parametrize("graph", ["homogeneous", "batched", "block-int32"])
def test_copies_to_edges(graph: str, device: str) -> None:
    made = GRAPHS[graph]()
    check(lambda g, x: ops.copy_u(g, x), made, (draw(made.num_src_nodes(), 3),), device)
    check(lambda g, x: ops.copy_v(g, x), made, (draw(made.num_dst_nodes()),), device)


@pytest.mark.parametrize("norm_by", ["dst", "src"])
@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3, 1)], ids=str)
def test_edge_softmax(norm_by: str, shape: Any, device: str) -> None:
    graph = hostile()
    check(lambda g, e: ops.edge_softmax(g, e, norm_by=norm_by), graph, (draw(11, *shape),), device)
    some = torch.tensor([0, 3, 4, 9])
    check(
        lambda g, e, ids: ops.edge_softmax(g, e, eids=ids, norm_by=norm_by),
        graph,
        (draw(4, *shape), some),
        device,
    )


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("op", ["copy_u", "copy_e", "u_mul_e", "u_add_e"])
@pytest.mark.parametrize("width", [2, 150])
def test_ties_go_to_the_first_edge(op: str, reduce: str, width: int, device: str) -> None:
    """As in DGL's CUDA kernels; its CPU's take the first or the last, by the shapes and the processor."""
    call = getattr(ops, f"{op}_{reduce}")
    operands = {"copy_u": "u", "copy_e": "e"}.get(op, "ue")
    inputs = [torch.ones(12 if which == "u" else 11, width) for which in operands]
    with enabled_for(device):
        _, *gradients = run(lambda *it: without_infinity(call(*it)), hostile(), inputs, device)
    upstream = torch.randn(12, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    edge, row = torch.tensor([7, 0, 4]), torch.tensor([0, 3, 7])
    for which, gradient in zip(operands, gradients, strict=True):
        expected = torch.zeros_like(gradient)
        expected.index_add_(0, hostile().edges()[0][edge] if which == "u" else edge, upstream[row])
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("op", ["copy_e", "u_add_e", "u_mul_e"])
@pytest.mark.parametrize("width", [2, 150])
def test_nan_wins(op: str, reduce: str, width: int, device: str) -> None:
    """As in PyTorch's `amax`, whatever the size; DGL's kernels ignore it on the CPU."""
    call, graph = getattr(ops, f"{op}_{reduce}"), dgl.graph(([0, 1, 2, 0], [0, 0, 0, 1]), num_nodes=3)
    for place in range(3):
        e = torch.arange(4.0)[:, None].repeat(1, width)
        e[place] = torch.nan
        x = (torch.zeros if op == "u_add_e" else torch.ones)(3, width)
        operands = (e,) if op == "copy_e" else (x, e)
        with enabled_for(device):
            out = call(graph.to(device), *(it.to(device) for it in operands)).cpu()
        assert out[0].isnan().all()
        assert (out[1] == 3).all()


@pytest.mark.parametrize("reduce", ["max", "min"])
@pytest.mark.parametrize("first", [True, False])
def test_nan_of_one_edge_type_wins(reduce: str, first: bool, device: str) -> None:
    kinds = [("user", "a", "item"), ("user", "b", "item")]
    graph = dgl.heterograph(dict.fromkeys(kinds, ([0], [0])))
    e = [torch.tensor([torch.nan if nan else 1.0]) for nan in (first, not first)]
    with enabled_for(device):
        out = getattr(ops, f"copy_e_{reduce}")(graph.to(device), [it.to(device) for it in e])
    assert out[graph.get_ntype_id("item")].cpu().isnan().all()


@pytest.mark.parametrize("reduce", ["sum", "max", "min", "mean"])
def test_segment_reduce(reduce: str, device: str) -> None:
    length = torch.tensor([3, 0, 1, 5, 0])
    for x in (draw(9), draw(9, 4), torch.ones(9, 2, 3)):
        check(lambda _, x, n: ops.segment_reduce(n, x, reduce), homogeneous(), (x, length), device)
    softmax = lambda _, x, n: ops.segment_softmax(n, x)  # noqa: E731
    check(softmax, homogeneous(), (draw(9, 4), length), device)


@pytest.mark.parametrize("width", [4, 33])
def test_products_by_type(width: int, device: str) -> None:
    a, b = draw(9, width), draw(5, width, 3, seed=1)
    length = torch.tensor([3, 0, 1, 5, 0])
    kind = torch.tensor([0, 3, 3, 1, 0, 3, 4, 4, 0])
    check(lambda _, a, b: ops.segment_mm(a, b, length), homogeneous(), (a, b), device)
    check(lambda _, a, b, kind: ops.gather_mm(a, b, idx_b=kind), homogeneous(), (a, b, kind), device)
    with enabled_for(device):
        run(lambda _, a, b: ops.segment_mm(a, b, length.new_zeros(5)), homogeneous(), (a[:0], b), device)


def heterogeneous(idtype: torch.dtype = torch.int64) -> Any:
    """Two types of nodes, three of edges, and two of these end in the same type."""
    generator = torch.Generator().manual_seed(0)
    edges = {
        ("user", "follows", "user"): (torch.randint(6, (15,), generator=generator),
                                      torch.randint(6, (15,), generator=generator)),
        ("item", "near", "user"): (torch.randint(5, (9,), generator=generator),
                                   torch.randint(4, (9,), generator=generator)),
        ("user", "rates", "item"): (torch.randint(6, (11,), generator=generator),
                                    torch.randint(5, (11,), generator=generator)),
    }  # fmt: skip
    return dgl.heterograph(edges, num_nodes_dict={"user": 6, "item": 5}, idtype=idtype)


@pytest.mark.parametrize("reduce", ["sum", "max", "min"])
def test_heterogeneous_gspmm(reduce: str, device: str) -> None:
    graph = heterogeneous()
    x = [draw(graph.num_nodes(kind), 3, seed=nth) for nth, kind in enumerate(graph.ntypes)]
    e = [draw(graph.num_edges(kind), 3, seed=nth + 5) for nth, kind in enumerate(graph.etypes)]
    check(lambda g, *x: without_infinity(getattr(ops, f"copy_u_{reduce}")(g, list(x))), graph, x, device)
    check(lambda g, *e: without_infinity(getattr(ops, f"copy_e_{reduce}")(g, list(e))), graph, e, device)
    if reduce == "sum":
        for op in ("add", "sub", "mul", "div"):
            name = f"u_{op}_e_sum"
            call = lambda g, *it: getattr(ops, name)(g, list(it[:2]), list(it[2:]))  # noqa: B023, E731
            check(call, graph, x + e, device)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "dot"])
@pytest.mark.parametrize("ends", ["u v", "v u", "e v", "u e"])
def test_heterogeneous_gsddmm(op: str, ends: str, device: str) -> None:
    graph = heterogeneous()
    rows = {"e": [graph.num_edges(kind) for kind in graph.etypes]}
    rows["u"] = rows["v"] = [graph.num_nodes(kind) for kind in graph.ntypes]
    x_at, y_at = ends.split()
    x = [draw(count, 3, seed=nth) for nth, count in enumerate(rows[x_at])]
    y = [draw(count, 3, seed=nth + 5) for nth, count in enumerate(rows[y_at])]
    call = lambda g, *it: getattr(ops, f"{x_at}_{op}_{y_at}")(g, list(it[: len(x)]), list(it[len(x) :]))  # noqa: E731
    with torch.no_grad():  # DGL's own gradients of these are wrong or missing
        expected = [out.detach() for out in call(graph, *x, *y)]
        with enabled_for(device):
            found = call(graph.to(device), *(it.to(device) for it in x + y))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got.cpu(), want)


@pytest.mark.parametrize("norm_by", ["dst", "src"])
def test_heterogeneous_edge_softmax(norm_by: str, device: str) -> None:
    graph = heterogeneous()
    e = {kind: draw(graph.num_edges(kind), 2) for kind in graph.canonical_etypes}
    check(lambda g, e: ops.edge_softmax(g, e, norm_by=norm_by), graph, (e,), device)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype, device: str) -> None:
    """Those that DGL lacks on the CPU too: like float32's results for the same numbers."""
    graph = homogeneous()
    x, e = draw(30, 2, 4, dtype=dtype), draw(120, 2, 1, dtype=dtype, seed=1)

    def layer(g: Any, x: Tensor, e: Tensor) -> list[Tensor]:
        weight = ops.edge_softmax(g, ops.e_add_v(g, e, x.sum(-1, keepdim=True)))
        return [ops.u_mul_e_sum(g, x, weight), ops.u_add_e_max(g, x, e), ops.u_dot_v(g, x, x)]

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = run(layer, graph, (x.to(wide), e.to(wide)))
    with enabled_for(device):
        found = run(layer, graph, (x, e), device)
    bound = {torch.float64: 1e-12, torch.float16: 8e-3, torch.bfloat16: 6e-2}[dtype]
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.to(wide), want, rtol=0, atol=bound * float(want.abs().max()))


def test_second_derivatives() -> None:
    graph = hostile()
    x, e = draw(12, 2, 2, dtype=torch.float64), draw(11, 2, 1, dtype=torch.float64)
    y = draw(12, 2, 2, dtype=torch.float64, seed=4)
    calls = {
        "u_mul_e_sum": (ops.u_mul_e_sum, (x, e)),
        "u_add_e_mean": (ops.u_add_e_mean, (x, e)),
        "u_mul_v": (ops.u_mul_v, (x, y)),
        "e_mul_v": (ops.e_mul_v, (e, y)),
        "u_dot_e": (ops.u_dot_e, (x, draw(11, 2, 2, dtype=torch.float64, seed=5))),
        "copy_e_max": (lambda *it: without_infinity(ops.copy_e_max(*it)), (e,)),
        "u_add_e_max": (lambda *it: without_infinity(ops.u_add_e_max(*it)), (x, e)),
    }
    with enabled():
        for name, (call, inputs) in calls.items():
            leaves = moved_leaves(inputs)
            assert torch.autograd.gradcheck(lambda *it: call(graph, *it), leaves), name  # noqa: B023
            assert torch.autograd.gradgradcheck(lambda *it: call(graph, *it), leaves), name  # noqa: B023


def moved_leaves(inputs: Any) -> tuple[Tensor, ...]:
    return tuple(it.clone().requires_grad_() for it in inputs)


def test_graphs_without_edges_or_nodes(device: str) -> None:
    with enabled_for(device):
        for graph in (dgl.graph(([], []), num_nodes=4), dgl.graph(([], []), num_nodes=0)):
            n = graph.num_nodes()
            x, e = torch.ones(n, 3), torch.ones(0, 3)
            for reduce in ("sum", "max", "mean"):
                call = getattr(ops, f"u_mul_e_{reduce}")
                (out, *_) = run(call, graph, (x, e), device)
                assert out.shape == (n, 3)
                assert not out.any()
            (out, *_) = run(lambda g, x, e: ops.u_add_v(g, x, x), graph, (x, e), device)
            assert out.shape == (0, 3)
            (out, *_) = run(lambda g, x, e: ops.edge_softmax(g, e), graph, (x, e), device)
            assert out.shape == (0, 3)


@pytest.mark.parametrize(
    "shapes", [((0,), (0,)), ((1,), (0,)), ((0,), (1,)), ((2, 0), (2, 1)), ((0, 2), (1, 2))]
)
@pytest.mark.parametrize("op", ["add", "div"])
def test_features_of_no_width(shapes: Any, op: str, device: str) -> None:
    """DGL itself takes them where there are no edges, or refuses them by an assertion of its library."""
    x, e = draw(12, *shapes[0]), draw(11, *shapes[1], dtype=torch.float16)
    x = x.half()  # DGL's own kernels do not run in float16
    shape = torch.broadcast_shapes(*shapes)
    with enabled_for(device):
        for reduce in ("sum", "max", "mean"):
            out, *gradients = run(getattr(ops, f"u_{op}_e_{reduce}"), hostile(), (x, e), device)
            assert out.shape == (12, *shape)
            assert not any(gradient.any() for gradient in gradients)
        (out, *_) = run(lambda g, x, e: ops.gsddmm(g, op, x, e, "u", "e"), hostile(), (x, e), device)
        assert out.shape == (11, *shape)
        (out, *_) = run(ops.u_dot_v, hostile(), (draw(12, 2, 0), draw(12, 1, 0)), device)
        assert out.shape == (11, 2, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: ops.copy_u_sum(g, torch.ones(29, 2)), "30 rows"),
        (lambda g: ops.u_mul_e_sum(g, torch.ones(30, 2), torch.ones(120, 2).double()), "one data type"),
        (lambda g: ops.u_mul_e_sum(g, torch.ones(30, 2), torch.ones(120, 3)), "broadcasting"),
        (lambda g: ops.u_dot_v(g, torch.ones(30, 2), torch.ones(30, 1)), "last dimension"),
        (lambda g: ops.copy_u_sum(g, torch.ones(30, 2).long()), "int64"),
        (lambda g: ops.copy_u_sum(g, torch.ones(30, 2, device="meta")), "like the graph"),
        (
            lambda g: ops.segment_mm(torch.ones(6, 2), torch.ones(2, 2, 1), torch.tensor([2, 2])),
            "add up to 4",
        ),
        (lambda g: ops.segment_mm(torch.ones(6, 2), torch.ones(2, 2, 1), torch.tensor([6])), "got 1"),
        (
            lambda g: ops.segment_reduce(torch.tensor([2, 2]), torch.ones(6, 2)),
            r"seglen: .* 6 rows .* got \[2, 2\] adding up to 4",
        ),
        (lambda g: ops.segment_reduce(torch.tensor([-2, 8]), torch.ones(6, 2)), r"seglen: .*\[-2, 8\]"),
        (lambda g: ops.segment_reduce(torch.tensor([2.0, 4.0]), torch.ones(6, 2)), "seglen: .*float32"),
        (lambda g: ops.gather_mm(torch.ones(6, 2), torch.ones(2, 2, 1), idx_b=torch.tensor([0])), "got 1"),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with enabled(), pytest.raises(DGLError, match=message):
        call(homogeneous())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_no_message_is_kept_of_every_edge(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features of nodes, reduced: no tensor of all edges and features, forward or backward."""
    monkeypatch.setattr(operators, "_dgl_combines_faster", lambda *_: False)  # DGL would make such a tensor
    edges, width = 100_000, 64
    ends = torch.randint(200, (2, edges), generator=torch.Generator().manual_seed(0))
    graph = dgl.graph((ends[0], ends[1]), num_nodes=200)
    with enabled():
        graph = graph.to(device)
        x = draw(200, 8, width // 8).to(device).requires_grad_()
        e = draw(edges, 8, 1).to(device).requires_grad_()
        for name in ("copy_u_sum", "copy_u_mean", "copy_u_max", "u_mul_e_sum", "u_mul_e_mean", "u_mul_e_max",
                     "u_add_e_sum", "u_add_e_max", "u_dot_v"):  # fmt: skip
            leaves = (x,) if name.startswith("copy") else (x, x) if name == "u_dot_v" else (x, e)

            def step(name: str = name, leaves: Any = leaves) -> None:
                out = getattr(ops, name)(graph, *leaves)
                torch.autograd.grad(out.sum(), set(leaves))

            step()  # structures are made once
            assert most_memory(step, device) < edges * width * 4 / 2, name


def most_memory(step: Any, device: str) -> int:
    """Bytes of the largest tensor that a step makes on the CPU, of all at a time on a GPU."""
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    results = profile.profiler.kineto_results.events()
    return max(int(event.nbytes()) for event in results if event.name() == "[memory]")


def test_enable_is_undone() -> None:
    before = [ops.gspmm, dgl.backend.gspmm, dgl.heterograph_index.HeteroGraphIndex.copy_to]
    fastsparse_dgl.enable()
    fastsparse_dgl.enable()
    assert fastsparse_dgl.is_enabled()
    assert ops.gspmm is not before[0]
    fastsparse_dgl.disable()
    fastsparse_dgl.disable()
    assert [ops.gspmm, dgl.backend.gspmm, dgl.heterograph_index.HeteroGraphIndex.copy_to] == before
    assert "__call__" not in vars(dgl._ffi.function.Function)


def test_another_dgl_is_refused_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    original = dgl.ops.spmm.gspmm
    monkeypatch.setattr(dgl.backend, "segment_reduce", lambda op, x: None)
    monkeypatch.delattr(dgl.backend, "gather_mm")
    with pytest.raises(DGLError, match=r"segment_reduce takes \(op, x\).*gather_mm does not exist"):
        fastsparse_dgl.enable()
    assert not fastsparse_dgl.is_enabled()
    assert dgl.ops.spmm.gspmm is original


def calls_of_every_operator() -> None:
    graph, hetero = homogeneous(), heterogeneous()
    graph.ndata["h"], graph.edata["w"] = draw(graph.num_nodes(), 4), draw(graph.num_edges(), 1)
    for message in (fn.copy_u("h", "m"), fn.u_mul_e("h", "w", "m"), fn.copy_e("w", "m")):
        for reduce in (fn.sum, fn.mean, fn.max):
            graph.update_all(message, reduce("m", "out"))
    graph.apply_edges(fn.u_dot_v("h", "h", "score"))
    graph.apply_edges(fn.u_add_v("h", "h", "sum"))
    dgl.nn.functional.edge_softmax(graph, graph.edata["score"])
    dgl.sum_nodes(graph, "h")
    dgl.ops.gather_mm(draw(3, 4), draw(2, 4, 5), idx_b=torch.tensor([0, 1, 1]))
    hetero.ndata["h"] = {kind: draw(hetero.num_nodes(kind), 4) for kind in hetero.ntypes}
    hetero.update_all(fn.copy_u("h", "m"), fn.max("m", "out"))
    hetero.apply_edges(fn.copy_u("h", "m"))


@pytest.mark.parametrize("is_on_before", [False, True])
def test_the_report_has_every_operator_with_its_line(is_on_before: bool) -> None:
    with enabled(report=not is_on_before):
        fastsparse_dgl.enable(report=True)
        calls_of_every_operator()
        rows = call_report.report().rows
    served = Counter((row.call, row.by) for row, count in rows for _ in range(count) if not row.reason)
    expected = [("u_dot_v", "sddmm"), ("copy_u", "sddmm"), ("edge_softmax", "edge_softmax")]
    expected += [("segment_reduce", "segments"), ("gather_mm", "grouped product")]
    expected += [("copy_u_max", "spmm")]  # for several edge types
    for message, kernel in (("copy_u", "spmm"), ("u_mul_e", "spmm"), ("copy_e", "segments")):
        expected += [(f"{message}_{reduce}", kernel) for reduce in ("sum", "mean", "max")]
    assert served == Counter(expected)
    ((narrow, _),) = ((row, count) for row, count in rows if row.reason)
    assert (narrow.call, narrow.by) == ("u_add_v", "DGL")
    assert all("test_dgl_operators.py" in row.place for row, _ in rows)


def test_operators_are_not_wrapped_while_nothing_is_recorded() -> None:
    with enabled():
        assert dgl.backend.gspmm is operators.gspmm
        assert dgl.backend.edge_softmax is operators.edge_softmax
