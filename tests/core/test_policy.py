"""Which algorithm a call runs: the `algorithms` context, its threads and tasks, and torch.compile."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import threading
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fastsparse_core import Adjacency, algorithms, gpu, policy, sddmm, spmm
from fastsparse_core.formats import lengths
from fastsparse_core.gpu import GpuProfile
from fastsparse_core.policy import Facts, algorithm_context


def ring(device: str = "cpu", num_nodes: int = 16) -> Adjacency:
    node = torch.arange(num_nodes, device=device)
    return Adjacency.from_coo(node, (node + 1) % num_nodes, (num_nodes, num_nodes))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The algorithms that products are called with, in order, forward and backward."""
    seen: list[str] = []
    launch = sys.modules["fastsparse_core.ops._spmm_plan"]
    original = launch.launch_spmm

    def record(*arguments: Any, **options: Any) -> Tensor:
        seen.append(next(each for each in arguments if isinstance(each, str)))
        return original(*arguments, **options)

    for name, module in list(sys.modules.items()):
        if name.startswith("fastsparse_core.") and vars(module).get("launch_spmm") is original:
            monkeypatch.setattr(module, "launch_spmm", record)
    return seen


class Calls(TorchDispatchMode):
    """Collects operator names and algorithms."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fastsparse":
            self.seen.append((func._opname, next(each for each in args if isinstance(each, str))))
        return func(*args, **(kwargs or {}))


def test_replaces_auto_and_nothing_else(device, asked):
    adj, x = ring(device), torch.randn(16, 8, device=device)
    spmm(adj, x)
    with algorithms(spmm="flashsparse"):
        spmm(adj, x)
        spmm(adj, x, algorithm="csr")
        with algorithms(sddmm="csr"):
            spmm(adj, x)
        with algorithms(spmm="csr"):
            spmm(adj, x, reduce="mean")
        with algorithms(spmm="auto"):
            spmm(adj, x)
        spmm(adj, x)
    spmm(adj, x)
    assert asked == ["auto", "flashsparse", "csr", "flashsparse", "csr", "auto", "flashsparse", "auto"]


def test_is_left_after_an_error_and_decorates(asked):
    adj, x = ring(), torch.randn(16, 8)
    with pytest.raises(ValueError, match="x: expected"), algorithms(spmm="csr"):
        spmm(adj, x[:3])
    spmm(adj, x)
    algorithms(spmm="csr")(spmm)(adj, x)
    assert asked == ["auto", "csr"]


@pytest.mark.parametrize("where", ["inside", "outside", "another context"])
def test_backward_keeps_the_algorithm_of_the_forward_pass(device, asked, where):
    adj, x = ring(device), torch.randn(16, 8, device=device, requires_grad=True)
    with algorithms(spmm="csr"):
        out = spmm(adj, x)
        if where == "inside":
            out.sum().backward()
    if where == "outside":
        out.sum().backward()
    elif where == "another context":
        with algorithms(spmm="flashsparse"):
            thread = threading.Thread(target=lambda: out.sum().backward())
            thread.start()
            thread.join()
    assert x.grad is not None
    assert asked == ["csr", "csr"]


def test_reaches_sddmm_and_both_operators_gradients(device):
    adj = ring(device)
    x = torch.randn(16, 8, device=device, requires_grad=True)
    value = torch.randn(16, device=device, requires_grad=True)
    with Calls() as calls:
        with algorithms(spmm="flashsparse", sddmm="csr"):
            product, score = spmm(adj, x, value), sddmm(adj, x, x)
        score.sum().backward()
        product.sum().backward()
    assert calls.seen[:2] == [("spmm", "flashsparse"), ("sddmm", "csr")]
    assert calls.seen[2:4] == [("spmm", "csr")] * 2
    assert sorted(calls.seen[4:]) == [("sddmm", "flashsparse"), ("spmm", "flashsparse")]


def test_recomputation_takes_the_context_it_is_given(asked):
    adj, x = ring(), torch.randn(16, 8, requires_grad=True)

    def contexts() -> tuple[Any, Any]:
        return algorithms(spmm="csr"), algorithms(spmm="csr")

    out = checkpoint(lambda x: spmm(adj, x).relu(), x, use_reentrant=False, context_fn=contexts)
    out.sum().backward()
    assert asked == ["csr"] * 3  # forward, forward again, backward


def test_results_do_not_depend_on_it(device):
    adj = ring(device).prepare()
    x = torch.randn(16, 64, device=device)
    expected = spmm(adj, x, algorithm="csr")
    for name in policy.SPMM_ALGORITHMS:
        with algorithms(spmm=name):
            torch.testing.assert_close(spmm(adj, x), expected, rtol=1e-5, atol=1e-5)


def test_other_threads_are_left_alone(asked):
    adj, x = ring(), torch.randn(16, 8)
    with algorithms(spmm="csr"):
        thread = threading.Thread(target=lambda: spmm(adj, x))
        thread.start()
        thread.join()
        spmm(adj, x)
    assert asked == ["auto", "csr"]


def test_tasks_that_take_turns_keep_their_own():
    seen: dict[str, list[str]] = {}

    async def work(name: str) -> None:
        with algorithms(spmm=name):
            for _ in range(3):
                seen.setdefault(name, []).append(policy.requested("spmm", "auto"))
                await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(work("csr"), work("flashsparse"))

    asyncio.run(both())
    assert seen == {"csr": ["csr"] * 3, "flashsparse": ["flashsparse"] * 3}
    assert policy.requested("spmm", "auto") == "auto"


def test_contexts_left_out_of_order_do_not_stick():
    first, second = algorithms(spmm="csr"), algorithms(spmm="flashsparse")
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with second:
            entered.set()
            leave.wait(1800)

    thread = threading.Thread(target=hold)
    with first:
        thread.start()
        assert entered.wait(1800)
        assert algorithm_context._last_opened == {"spmm": "flashsparse"}
    assert algorithm_context._last_opened == {"spmm": "flashsparse"}
    leave.set()
    thread.join()
    assert algorithm_context._last_opened is None


def test_compiled_code_follows_the_context(device, asked):
    adj, x = ring(device), torch.randn(16, 8, device=device, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(lambda adj, x: spmm(adj, x).relu(), fullgraph=True, backend="aot_eager")
    for name in ("auto", "csr", "flashsparse", "auto"):
        asked.clear()
        with algorithms(spmm=name):
            out = compiled(adj, x)
        out.sum().backward()
        assert asked == [name, name]


def test_context_inside_compiled_code(device, asked):
    adj, x = ring(device), torch.randn(16, 8, device=device)

    def model(adj: Adjacency, x: torch.Tensor) -> torch.Tensor:
        with algorithms(spmm="csr"):
            x = spmm(adj, x)
        return spmm(adj, x)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(adj, x), model(adj, x))
    assert asked == ["csr", "auto"] * 4


def test_costs_few_calls_unused():
    """Calls are counted, for time depends on the machine's load."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            calls.append(getattr(argument, "__name__", frame.f_code.co_name))

    sys.setprofile(note)
    policy.requested("spmm", "auto")
    sys.setprofile(None)
    assert calls[0] == "requested"
    assert len(calls) <= 6  # including PyTorch's check for compilation and the last line above


@pytest.mark.parametrize("operator", policy.ALGORITHMS)
def test_unknown_names_are_refused(operator):
    with pytest.raises(ValueError, match=f"{operator}: expected one of 'auto', .*, got 'magic'"):
        algorithms(**{operator: "magic"}).__enter__()
    with pytest.raises(ValueError, match="algorithm: expected one of 'auto', .*, got 'magic'"):
        policy.requested(operator, "magic")
    with pytest.raises(TypeError, match="dense"):
        algorithms(dense="csr")


H200 = gpu.read(gpu.MEASURED / "nvidia_h200.json")


def structure(device: str = "cuda", num_edges: int = 1_000_000, **facts: Any) -> Facts:
    """Facts about a converted structure; the machine need not have its device."""
    given: dict[str, Any] = {
        "num_src": 100_000,
        "num_dst": 100_000,
        "num_vectors": num_edges,
        "converted": True,
        "has_sddmm_structure": True,
    }
    return Facts(device == "cuda", num_edges=num_edges, **(given | facts))


def spmm_of(facts: Facts, *call: Any, gpu: GpuProfile = H200) -> str:
    return policy.spmm_algorithm(facts, gpu, *call).algorithm


def sddmm_of(facts: Facts, *call: Any, gpu: GpuProfile = H200) -> str:
    return policy.sddmm_algorithm(facts, gpu, *call).algorithm


def is_resident(facts: Facts, *call: Any, gpu: GpuProfile = H200) -> bool:
    return policy.spmm_resident(facts, gpu, *call)


@pytest.mark.parametrize(
    ("device", "dtype", "head_bytes", "heads", "aligned", "num_src", "able"),
    [
        ("cuda", torch.float16, 64, 1, True, 1000, True),
        ("cuda", torch.float32, 2048, 4, True, 1000, True),
        ("cuda", torch.float16, 64, 1, False, 1000, False),
        ("cuda", torch.float16, 64, 65_536, True, 1000, False),
        ("cuda", torch.float16, 0, 1, True, 1000, False),
        ("cuda", torch.float16, 64, 1, True, 2**24 + 1, False),
        ("cuda", torch.float64, 128, 1, True, 1000, False),
        ("cpu", torch.float32, 128, 1, True, 1000, False),
    ],
)
def test_sddmm_takes_the_tensor_cores_where_they_serve(
    device, dtype, head_bytes, heads, aligned, num_src, able
):
    adj = structure(device, num_src=num_src)
    arguments = (dtype, head_bytes, heads, aligned)
    served = "flashsparse" if able else "csr"
    assert sddmm_of(adj, "csr", *arguments) == "csr"
    assert sddmm_of(adj, "flashsparse", *arguments) == served
    assert sddmm_of(adj, "auto", *arguments, True) == served  # dense vectors
    if not able:
        assert sddmm_of(adj, "auto", *arguments) == "csr"


@pytest.mark.parametrize("algorithm", ["tca", "hr"])
@pytest.mark.parametrize(
    ("device", "dtype", "width", "heads", "aligned", "able"),
    [
        ("cuda", torch.float16, 64, 1, True, True),
        ("cuda", torch.bfloat16, 8, 1, True, True),
        ("cuda", torch.float16, 64, 2, True, False),
        ("cuda", torch.float16, 64, 1, False, False),
        ("cuda", torch.float16, 0, 1, True, False),
        ("cuda", torch.float32, 64, 1, True, False),
        ("cuda", torch.float64, 64, 1, True, False),
        ("cpu", torch.float16, 64, 1, True, False),
    ],
)
def test_direct_kernels_serve_where_they_can(algorithm, device, dtype, width, heads, aligned, able):
    adj = structure(device)
    picked = spmm_of(adj, algorithm, dtype, width, heads, aligned)
    assert picked == (algorithm if able else "csr")


@pytest.mark.parametrize(
    ("dtype", "width", "heads", "num_edges", "picked"),
    [
        (torch.float16, 32, 1, 5_000_000, "csr"),
        (torch.float16, 64, 1, 1_000_000, "flashsparse"),
        (torch.float16, 128, 1, 1_000_000, "flashsparse"),
        (torch.float16, 128, 1, 250_000, "csr"),  # fewer than three entries per row
        (torch.bfloat16, 512, 1, 1_000_000, "flashsparse"),
        (torch.float32, 32, 1, 5_000_000, "csr"),
        (torch.float32, 128, 1, 5_000_000, "csr"),
        (torch.float16, 128, 4, 1_000_000, "csr"),
    ],
)
def test_sddmm_by_itself_takes_what_measured_faster(dtype, width, heads, num_edges, picked):
    arguments = ("auto", dtype, width * dtype.itemsize, heads, True)
    assert sddmm_of(structure(num_edges=num_edges), *arguments) == picked
    few = structure(num_dst=10_000, num_edges=100_000)
    assert sddmm_of(few, *arguments) == "csr"


@pytest.mark.parametrize(
    ("width", "num_edges", "vectors", "picked"),
    [
        (64, 1_000_000, 0.80, "flashsparse"),
        (64, 1_000_000, 0.90, "csr"),
        (64, 300_000, 0.80, "flashsparse"),
        (16, 300_000, 0.90, "flashsparse"),
        (17, 300_000, 0.90, "csr"),
        (100, 100_000, 0.90, "csr"),
    ],
)
def test_spmm_in_float32_takes_what_measured_faster(width, num_edges, vectors, picked):
    adj = structure(num_edges=num_edges, num_vectors=int(vectors * num_edges))
    assert spmm_of(adj, "auto", torch.float32, width, 1, True) == picked
    assert spmm_of(adj, "auto", torch.float32, width, 1, True, True) == "flashsparse"  # dense vectors
    assert spmm_of(adj, "auto", torch.float16, width, 1, True) == "flashsparse"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("shape", "width", "in_csr", "in_tca"),
    [
        ((2048, 512), 256, True, True),
        ((512, 512), 256, True, True),
        ((511, 512), 256, False, False),
        ((256, 1024), 256, False, False),
        ((9000, 802), 256, True, True),
        ((9000, 803), 256, False, False),
        ((2, 1), 256, True, True),
        ((2, 0), 256, False, False),
    ],
)
def test_spmm_gathers_from_shared_memory_where_sources_fit(shape, width, dtype, in_csr, in_tca):
    adj = structure(num_dst=shape[0], num_src=shape[1], converted=False)
    arguments = (dtype, width, 1, True)
    assert is_resident(adj, "csr", *arguments) == in_csr
    assert is_resident(adj, "tca", *arguments) == in_tca
    assert not is_resident(adj, "flashsparse", *arguments)
    assert not is_resident(adj, "hr", *arguments)
    if in_csr:
        assert spmm_of(adj, "auto", *arguments) == "csr"
        assert spmm_of(adj, "flashsparse", *arguments) == "flashsparse"
        assert spmm_of(adj, "auto", *arguments, True) == "flashsparse"  # dense vectors


@pytest.mark.parametrize(
    ("dtype", "width", "resident"),
    [
        (torch.float32, 28, False),
        (torch.float32, 32, True),
        (torch.float16, 64, False),
        (torch.float16, 72, True),
        (torch.bfloat16, 64, False),
    ],
)
def test_shared_memory_wants_half_a_tile_of_features(dtype, width, resident):
    adj = structure(num_dst=2048, num_src=512, converted=False)
    for algorithm in ("csr", "tca"):
        assert is_resident(adj, algorithm, dtype, width, 1, True) == resident


def test_what_cannot_gather_from_shared_memory():
    adj = structure(num_dst=2048, num_src=512)
    for algorithm in ("csr", "tca"):
        assert is_resident(adj, algorithm, torch.float16, 256, 1, True)
        assert not is_resident(adj, algorithm, torch.float16, 256, 2, True)
        assert not is_resident(adj, algorithm, torch.float16, 256, 1, False)
        assert not is_resident(adj, algorithm, torch.float64, 256, 1, True)
        cpu = structure("cpu", num_dst=2048, num_src=512)
        assert not is_resident(cpu, algorithm, torch.float16, 256, 1, True)
        padded = structure(num_dst=2048, num_src=512, is_padded=True)
        assert not is_resident(padded, algorithm, torch.float16, 256, 1, True)
    consumer = dataclasses.replace(H200, shared_memory=99 * 1024)
    assert not is_resident(adj, "csr", torch.float16, 256, 1, True, gpu=consumer)
    small = structure(num_dst=2048, num_src=290)
    assert is_resident(small, "csr", torch.float16, 256, 1, True, gpu=consumer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_dst", "num_edges", "picked"),
    [
        (512, 209_715, "csr"),  # a pruned matrix
        (4223, 40_000, "csr"),
        (4224, 40_000, "flashsparse"),
        (2708, 10_556, "flashsparse"),  # cora: rows are short
        (13_752, 491_722, "flashsparse"),  # amazon_computers
    ],
)
def test_spmm_of_few_long_windows_leaves_the_tensor_cores(dtype, num_dst, num_edges, picked):
    adj = structure(num_dst=num_dst, num_edges=num_edges, num_vectors=num_edges // 2)
    assert spmm_of(adj, "auto", dtype, 64, 1, True) == picked


@pytest.mark.parametrize(
    "rule",
    [
        lambda facts: policy.spmm_algorithm(facts, H200, "auto", torch.float16, 64, 1, True),
        lambda facts: policy.sddmm_algorithm(facts, H200, "auto", torch.float16, 256, 1, True),
    ],
    ids=["spmm", "sddmm"],
)
def test_converts_what_is_reused(rule):
    new = structure(converted=False)
    csr, reused = rule(new), new._replace(uses=policy.REUSE)
    assert csr == policy.Choice("csr", is_final=False, counts=True)
    assert rule(new._replace(uses=policy.REUSE - 1)) == csr
    for change in ({"capturing": True}, {"deterministic": True}, {"can_convert": False}):
        assert rule(reused._replace(**change)) == csr
    assert rule(reused) == csr._replace(converts=True)
    assert rule(reused._replace(converted=True)) == policy.Choice("flashsparse")


def test_sddmm_builds_no_work_list_under_capture():
    adj = structure(has_sddmm_structure=False)
    arguments = ("auto", torch.float16, 256, 1, True)
    assert sddmm_of(adj, *arguments) == "flashsparse"
    assert sddmm_of(adj._replace(capturing=True), *arguments) == "csr"
    assert sddmm_of(adj._replace(capturing=True, has_sddmm_structure=True), *arguments) == "flashsparse"


def test_other_gpus_get_constants_by_their_sizes():
    sizes = {"name": "half", "num_sms": 66, "shared_memory": 99 * 1024}
    half = gpu.scaled(H200, sizes | {"l2_bytes": H200.l2_bytes // 10, "bandwidth": H200.bandwidth / 10})
    assert half.few_edges == H200.few_edges / 2
    assert half.kept_result_bytes == pytest.approx(H200.kept_result_bytes / 10)
    assert half.gradient_rate == pytest.approx(H200.gradient_rate / 10)
    assert half.shared == H200.shared
    assert half.resident_warps == H200.resident_warps / 2


def test_profiles_are_stored_and_read(tmp_path):
    gpu.write(H200, tmp_path / "cache" / "some.json")
    assert gpu.read(tmp_path / "cache" / "some.json") == H200
    stored = (tmp_path / "cache" / "some.json").read_text()
    (tmp_path / "older.json").write_text(stored.replace("{", '{"much_gathered": 4e7,', 1))
    assert gpu.read(tmp_path / "older.json") == H200
    (tmp_path / "old.json").write_text("{}")
    with pytest.raises(ValueError, match=r"old\.json: expected a GPU profile.*fastsparse_core\.tune"):
        gpu.read(tmp_path / "old.json")
    assert {path.stem for path in gpu.MEASURED.glob("*.json")} == {"nvidia_h100", "nvidia_h200"}
    assert gpu.file_name("NVIDIA H100 80GB HBM3") == "nvidia_h100"
    with gpu.use(few_edges=0, resident_warps=4) as changed:
        assert gpu.profile_of(torch.device("cpu")) is changed
        assert (changed.few_edges, changed.resident_warps) == (0, 4)
    assert gpu.profile_of(torch.device("cpu")) == H200


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        (lengths.sddmm_slice_blocks, {8, 16, 64}),
        (lambda blocks: lengths.sddmm_run_blocks(blocks, H200), {1, 2, 4, 8}),
    ],
)
def test_work_lists_of_sddmm_grow_with_the_structure(rule, values):
    found = [rule(1 << bits) for bits in range(30)]
    assert found == sorted(found)
    assert set(found) == values
