"""The operators as PyTorch sees them: schemas, fake tensors, autograd, torch.compile, CUDA graphs."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import relative_error
from torch.utils._python_dispatch import TorchDispatchMode

from fastsparse_core import _C, Adjacency, attention, sddmm, spmm
from fastsparse_core.ops._operands import scratch, with_zeros_behind, zero_padded


def graph(device: str, num_dst: int = 20, num_src: int = 30) -> Adjacency:
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, n, (200,), generator=generator).to(device) for n in (num_dst, num_src))
    return Adjacency.from_coo(row, col, (num_dst, num_src))


@pytest.mark.parametrize("valued", [False, True])
@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    [("csr", torch.float32), ("flashsparse", torch.float32), ("tca", torch.float16), ("hr", torch.float16)],
)
def test_opcheck_spmm(device, valued, algorithm, dtype):
    adj = graph(device)
    x = torch.randn(30, 8, device=device, dtype=dtype, requires_grad=True)
    value = torch.randn(200, device=device, requires_grad=True) if valued else None
    scale = torch.rand(20, device=device)
    arguments = (x, value, scale, None, None, 20, adj.handle, False, algorithm, valued)
    torch.library.opcheck(torch.ops.fastsparse.spmm.default, arguments)
    for adds in {False, valued}:
        torch.library.opcheck(
            torch.ops.fastsparse.spmm_extremum.default, (x, value, 20, adj.handle, False, False, adds)
        )


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_compiles_without_graph_breaks(device, reduce):
    adj = graph(device).prepare()

    def model(adj, x, weight, value):
        score = sddmm(adj, x[:20], x).tanh()
        return spmm(adj, (x @ weight).relu(), value * score, reduce, scale_src=adj.inv_sqrt_out_degree())

    x = torch.randn(30, 8, device=device, requires_grad=True)
    weight = torch.randn(8, 4, device=device, requires_grad=True)
    value = torch.randn(200, device=device, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        out, expected = compiled(adj, x, weight, value), model(adj, x, weight, value)
        assert relative_error(out, expected) < 1e-6
        for actual, wanted in zip(
            torch.autograd.grad(out.square().sum(), (x, weight, value)),
            torch.autograd.grad(expected.square().sum(), (x, weight, value)),
            strict=True,
        ):
            assert relative_error(actual, wanted) < 1e-5


def test_second_structure_reuses_or_recompiles_correctly(device):
    torch._dynamo.reset()
    compiled = torch.compile(lambda adj, x: spmm(adj, x), fullgraph=True, backend="aot_eager")
    for num_dst in (20, 25, 31, 40):
        adj = graph(device, num_dst).prepare()
        x = torch.randn(30, 8, device=device)
        assert torch.equal(compiled(adj, x), spmm(adj, x))


@pytest.mark.gpu
def test_captured_in_a_cuda_graph():
    adj = graph("cuda").prepare()
    x = torch.randn(30, 64, device="cuda", requires_grad=True)
    weight = torch.randn(20, 64, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(spmm(adj, x), x, weight)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = spmm(adj, x)
        (grad,) = torch.autograd.grad(out, x, weight)
    with torch.no_grad():
        x.mul_(2)
    out.zero_()
    captured.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, spmm(adj, x))
    assert torch.equal(grad, torch.autograd.grad(spmm(adj, x), x, weight)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("prepared", [False, True])
def test_capture_never_keeps_what_it_only_recorded(prepared):
    adj = graph("cuda", 30)
    x = torch.randn(30, 64, device="cuda", dtype=torch.bfloat16)
    scale = torch.rand(30, device="cuda")
    expected = spmm(graph("cuda", 30), x, scale_src=scale, algorithm="flashsparse")
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    if not prepared:
        with (
            pytest.raises(RuntimeError, match="must be built before a CUDA graph"),
            torch.cuda.graph(captured),
        ):
            adj.inv_sqrt_degree()
        return
    adj.prepare()
    with torch.cuda.graph(captured):
        spmm(adj, x, scale_src=scale)
    assert torch.equal(spmm(adj, x, scale_src=scale), expected)  # before any replay


@pytest.mark.gpu
def test_the_work_list_of_hr_is_read_before_a_capture():
    adj = graph("cuda", 30)
    x = torch.randn(30, 64, device="cuda", dtype=torch.float16)
    adj.hybrid_rows  # noqa: B018  # built, but nobody has asked how long it is
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match="must be built before a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        spmm(adj, x, algorithm="hr")
    expected = spmm(adj, x, algorithm="hr")
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = spmm(adj, x, algorithm="hr")
    captured.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_runs_on_the_current_stream():
    adj = graph("cuda").prepare()
    x = torch.randn(30, 64, device="cuda")
    expected = spmm(adj, x * 2)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        y = x * 2  # waits behind the sleep: a launch on another stream would read it too early
        out = spmm(adj, y)
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_runs_on_a_gpu_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    adj = graph("cuda:1")
    x = torch.randn(30, 64, device="cuda:1")
    with torch.cuda.device(0):
        out = spmm(adj, x)
        assert torch.cuda.current_device() == 0
    assert out.device.index == 1
    assert relative_error(out, spmm(adj.cpu(), x.cpu())) < 1e-6
    assert relative_error(sddmm(adj, x[:20], x), sddmm(adj.cpu(), x[:20].cpu(), x.cpu())) < 1e-6


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_two_to_the_31_edges():
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of free memory")
    num_rows, degree = 1_100_000, 2_000
    rowptr = torch.arange(num_rows + 1, device="cuda") * degree
    assert num_rows * degree > 2**31
    col = torch.arange(degree, device="cuda", dtype=torch.int32).repeat(num_rows)
    adj = Adjacency.from_csr(rowptr, col, (num_rows, degree))
    x = torch.rand(degree, 4, device="cuda")
    out = spmm(adj, x)
    expected = x.double().sum(0).expand(num_rows, 4)
    assert relative_error(out[-1000:], expected[-1000:]) < 1e-6
    value = sddmm(adj, torch.ones(num_rows, 4, device="cuda"), x)
    assert relative_error(value[-degree:], x.double().sum(1)) < 1e-6


def test_scratch_is_one_aligned_allocation(device):
    workspace, (first, _, second) = scratch(torch.device(device), 3, 0, 5)
    assert workspace is not None
    assert [first % 16, second % 16] == [0, 0]
    assert workspace.data_ptr() <= first < first + 3 * 4 <= second
    assert second + 5 * 4 <= workspace.data_ptr() + 4 * workspace.numel()
    assert scratch(torch.device(device), 0, 0) == (None, [0, 0])


def _set_data(x: torch.Tensor, data: torch.Tensor) -> None:
    x.data = data


@pytest.mark.parametrize(
    ("keeps", "edit"),
    [
        (True, lambda x: x.mul_(2)),
        (True, lambda x: x[:, 0].fill_(3)),
        (True, lambda x: x.requires_grad_()),
        # Of a square matrix, lest the shape tell.
        (False, lambda x: x.t_()),
        (False, lambda x: x.resize_(12, 11)),
        (False, lambda x: x.as_strided_((12, 11), (16, 1))),
        (False, lambda x: x.set_(x.detach()[:, :11])),
        (False, lambda x: _set_data(x, x * 2)),
        (False, lambda x: _set_data(x, x.detach()[:, :11])),
        (False, lambda x: _set_data(x, x._base.view(torch.bfloat16)[:, :12])),
    ],
)
def test_zeros_behind_a_matrix_that_was_written(keeps: bool, edit: Callable[[torch.Tensor], object]) -> None:
    x = with_zeros_behind(torch.nn.functional.pad(torch.randn(12, 12).half(), (0, 4)), 12)
    edit(x)
    padded = zero_padded(x, 16)
    assert (padded is not None) == keeps
    if padded is not None:
        assert torch.equal(padded, torch.nn.functional.pad(x, (0, 4)))


def test_zeros_behind_a_copy():
    """The copy of a view and that of its base count what is written to them apart."""
    x = with_zeros_behind(torch.nn.functional.pad(torch.randn(12, 12), (0, 4)), 12)
    copied = copy.deepcopy(x)
    assert torch.equal(copied, x)
    assert zero_padded(copied, 16) is None
    assert zero_padded(x.detach(), 16) is None
    with torch.inference_mode():  # where nothing is counted, and a view does not know its base
        x = with_zeros_behind(torch.nn.functional.pad(torch.randn(12, 12), (0, 4)), 12)
        assert zero_padded(x, 16) is not None


class Seen(TorchDispatchMode):
    """Notes the operators of this package that pass the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fastsparse":
            self.names.append(func.name().removeprefix("fastsparse::"))
        return func(*args, **(kwargs or {}))


def test_backward_passes_show_their_operators_to_modes(device):
    """With a mode the operators run, without one the kernels alone: the same gradients."""
    adj = graph(device).prepare()
    x = torch.randn(30, 8, device=device, requires_grad=True)
    q = torch.randn(20, 8, device=device, requires_grad=True)
    out = attention(adj, q, spmm(adj.t(), q), x, heads=2)
    expected = torch.autograd.grad(out.square().sum(), (q, x), retain_graph=True)
    with Seen() as seen:
        gradients = torch.autograd.grad(out.square().sum(), (q, x))
    assert seen.names == ["attention_backward", "spmm"]
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))


def test_stub_and_extension_agree_on_how_many_arguments_there_are():
    """mypy checks calls against the stub; those of CUDA run in no test without a GPU."""
    found = {}
    for node in ast.parse(Path(_C.__file__).with_name("_C.pyi").read_text()).body:
        for function in [node, *getattr(node, "body", ())]:
            if isinstance(function, ast.FunctionDef) and function.name in (node.name, "__init__"):
                found[node.name] = sum(argument.arg != "self" for argument in function.args.args)
    assert len(found) > 50
    for name, count in found.items():
        if hasattr(_C, name) or _C.build_info()["cuda"]:
            with pytest.raises(TypeError, match=f"expected {count} arguments, got {count + 1}"):
                getattr(_C, name)(*[None] * (count + 1))
