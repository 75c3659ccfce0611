"""The operators as PyTorch sees them: schemas, fake tensors, autograd, torch.compile, CUDA graphs."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import relative_error
from stub import STUB, stub
from torch.utils._python_dispatch import TorchDispatchMode

from fastsparse_core import _C, Adjacency, attention, sddmm, spmm
from fastsparse_core.ops._operands import scratch, with_zeros_behind, zero_padded


def graph(device: str, num_dst: int = 20, num_src: int = 30) -> Adjacency:
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, n, (200,), generator=generator).to(device) for n in (num_dst, num_src))
    return Adjacency.from_coo(row, col, (num_dst, num_src))


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
    adj.hybrid_rows  # noqa: B018  # built, but its length was not read
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
        # x is square, so its shape does not show this edit.
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
    """Copies of a view and of its base are separate tensors, so the zeros are not known any more."""
    x = with_zeros_behind(torch.nn.functional.pad(torch.randn(12, 12), (0, 4)), 12)
    copied = copy.deepcopy(x)
    assert torch.equal(copied, x)
    assert zero_padded(copied, 16) is None
    assert zero_padded(x.detach(), 16) is None
    with torch.inference_mode():  # no version counters, and views do not have their base
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


def test_the_stub_is_current():
    """mypy checks calls against it, those of CUDA, too. `python tests/stub.py` makes it."""
    assert STUB.read_text() == stub()


#: Fields that no argument fills: results of functions, and the plan that a method belongs to.
_GIVEN_BY_NOBODY = {"GraphField.to", "GraphField.to_rows"} | {
    f"{struct}.{field}"
    for struct, fields in {
        "AttentionLayerForward": ("layer",),
        "AttentionLayerBackward": ("layer",),
        "CudaAttentionLayerArgs": ("a", "a_t", "split", "split_t", "blocks_t", "on_blocks"),
        "SortEdgesArgs": ("split_ptr", "sums", "split_row", "scratch"),
        "StackedMapsArgs": ("num_linears",),
        "SampleArgs": ("num_lists", "num_steps"),
        "PlaceBatchArgs": ("num_tensors", "tensor"),
        "SortSegmentsArgs": ("host_facts",),
    }.items()
    for field in fields
}


def test_every_field_of_a_struct_is_an_argument():
    """A field that a list of arguments leaves out would be 0 in every call."""
    kernels = Path(__file__).resolve().parents[2] / "kernels"
    files = [kernels / "binding.cpp", *sorted((kernels / "include" / "fastsparse").glob("*.h"))]
    text = re.sub(r"//.*", "", "\n".join(file.read_text() for file in files))
    structs = dict(re.findall(r"^struct (\w+) \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL))
    aliases = dict(re.findall(r"^using (\w+) = (\w+);", text, re.MULTILINE))
    lists: dict[str, str] = {}
    of_structs = r"^FASTSPARSE_ARGUMENTS(_AS)?\((\w+),\s*(.*?)\);$"
    for of_call, name, listed in re.findall(of_structs, text, re.MULTILINE | re.DOTALL):
        struct = listed.split(",")[0] if of_call else aliases.get(name, name)
        nested = re.findall(r"^  (\w+) args;", structs[struct], re.MULTILINE)
        for each in [struct, *nested]:
            lists[each] = lists.get(each, "") + listed
    missing, num_fields = set(), 0
    for struct, listed in lists.items():
        for fields in re.findall(
            r"^  (?:const )?[\w:]+(?:<\w+>)?[*]? ([*\w\[\], \n]+);", structs[struct], re.MULTILINE
        ):
            names = re.findall(r"\w+", re.sub(r"\[\w+\]", "", fields))
            num_fields += len(names)
            missing |= {f"{struct}.{name}" for name in names if not re.search(rf"\b{name}\b", listed)}
    assert num_fields > 700
    assert missing == _GIVEN_BY_NOBODY


def expand(**replaced):
    """`_C.expand_rows` with arguments exchanged, those that are None left out."""
    rowptr, row = torch.tensor([0, 2, 3]), torch.empty(3, dtype=torch.int32)
    given = {"rowptr": rowptr, "num_rows": 2, "num_edges": 3, "row": row, "device": -1, "queue": 1} | replaced
    _C.expand_rows(**{name: value for name, value in given.items() if value is not Ellipsis})
    return row.tolist()


def test_arguments_by_name_in_any_order():
    rowptr, row = torch.tensor([0, 2, 3]), torch.empty(3, dtype=torch.int32)
    given = {"rowptr": rowptr, "num_rows": 2, "num_edges": 3, "row": row, "device": -1, "queue": 1}
    for _ in range(2):
        for names in itertools.islice(itertools.permutations(given), 0, None, 7):  # more than are cached
            row.zero_()
            _C.expand_rows(**{name: given[name] for name in names})
            assert row.tolist() == [0, 0, 1]
    row.zero_()
    _C.expand_rows(rowptr, 2, queue=1, row=row, device=-1, num_edges=3)
    assert row.tolist() == [0, 0, 1]
    row.zero_()
    _C.expand_rows(*given.values())
    assert row.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"row": ...}, "expand_rows: missing 'row'; expected expand_rows"),
        ({"row": ..., "num_rows": ...}, "missing 'num_rows', 'row'"),
        ({"rows": 3}, "expand_rows: unexpected argument 'rows'; expected expand_rows"),
        (
            {"row": "x"},
            "expand_rows: argument 'row': expected a tensor, an address or None, got str",
        ),
        ({"num_rows": torch.ones(2)}, "argument 'num_rows': expected an integer, got Tensor"),
        ({"num_rows": None}, "argument 'num_rows': expected an integer, got None"),
        ({"num_rows": 2**63}, "argument 'num_rows': 9223372036854775808 is out of range"),
        ({"device": 2**31}, "argument 'device': 2147483648 is out of range"),
        ({"rowptr": -1}, "argument 'rowptr': -1 is out of range"),
        ({"rowptr": 0.5}, "argument 'rowptr': expected a tensor, an address or None, got float"),
    ],
)
def test_errors_name_the_argument(replaced, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        expand(**replaced)
    assert expand() == [0, 0, 1]


def test_errors_of_arguments_by_position():
    with pytest.raises(TypeError, match="expand_rows: expected 6 arguments, got 7"):
        _C.expand_rows(*[None] * 7)
    with pytest.raises(TypeError, match="argument 'rowptr' is given by position and by name"):
        _C.expand_rows(None, rowptr=None)


def test_errors_of_structs_and_matrices():
    sizes = {"num_rows": 0, "num_cols": 0, "num_edges": 0, "edge_id_is_64bit": False}
    structure = _C.CsrStructure(rowptr=None, col=None, edge_id=None, **sizes)
    given = {"input": torch.ones(2, 2), "grad": None, "out": None, "partial": None, "device": -1, "queue": 1}
    for name, value, message in (
        ("structure", 3, "argument 'structure': expected a CsrStructure, got int"),
        ("structure", None, "argument 'structure': expected a CsrStructure, got None"),
        ("input", torch.ones(2), "argument 'input': expected a tensor or None"),
        ("input", torch.ones(2, 2, dtype=torch.int8), "argument 'input': expected a tensor or None"),
    ):
        with pytest.raises(TypeError, match=message):
            _C.edge_softmax(**{"structure": structure} | given | {name: value})
    with pytest.raises(TypeError, match="SpmmPlan: missing 'structure'"):
        _C.SpmmPlan(kernel=0, dtype=torch.float32, width=1, value_dtype=torch.float32, heads=1, tile=1,
                    num_long=0, device=-1)  # fmt: skip
