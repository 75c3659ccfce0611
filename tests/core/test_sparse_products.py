import gc
import itertools

import pytest
import torch

from fastsparse_core import call_report, sparse_products

LAYOUTS = {
    "coo": lambda dense: dense.to_sparse(),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
}
REGISTRATIONS = ("mm", "addmm", "addmm.out", "transpose.int", "_sparse_mm")


@pytest.fixture
def enabled():
    sparse_products.enable()
    call_report.start_recording()
    yield
    call_report.stop_recording()
    sparse_products.disable()


def served():
    """Numbers of recorded calls that ran on the kernels, and that did not."""
    rows = call_report.report().rows
    ours = sum(count for row, count in rows if row.by == "spmm")
    return ours, sum(count for _, count in rows) - ours


def random_matrix(rows=40, cols=30, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.rand(rows, cols, generator=generator, dtype=torch.float64)
    return torch.where(dense < 0.15, dense + 0.5, 0).to(dtype)


def several_times(call, times=3):
    for _ in range(times):
        out = call()
    return out


PRODUCTS = {
    "torch.sparse.mm": torch.sparse.mm,
    "@": lambda matrix, x: matrix @ x,
    "torch.mm": torch.mm,
    "addmm": lambda matrix, x: torch.addmm(x.new_ones(x.size(1)), matrix, x, beta=0.5, alpha=2),
    "torch.sparse.addmm": lambda matrix, x: torch.sparse.addmm(x.new_ones(matrix.size(0), 1), matrix, x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_and_gradients_are_those_of_the_dense_matrix(enabled, layout, product, transposed):
    dense = random_matrix()
    matrix = LAYOUTS[layout](dense)
    if transposed:
        dense, matrix = dense.t(), matrix.t()
    x = torch.randn(dense.size(1), 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(dense.size(0), 5, dtype=torch.float64)
    expected = PRODUCTS[product](dense, x)
    (expected_grad,) = torch.autograd.grad(expected, x, weight)
    for _ in range(3):
        out = PRODUCTS[product](matrix, x)
        (grad,) = torch.autograd.grad(out, x, weight)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(grad, expected_grad)
    assert served()[0] >= 2


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_the_matrix_has_a_gradient(enabled, layout):
    dense = random_matrix()
    matrix = LAYOUTS[layout](dense).requires_grad_()
    x = torch.randn(30, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(40, 4, dtype=torch.float64)
    for _ in range(3):
        grad, grad_x = torch.autograd.grad(torch.sparse.mm(matrix, x), (matrix, x), weight)
        torch.testing.assert_close(grad_x, dense.t() @ weight)
        torch.testing.assert_close(grad.to_dense(), (weight @ x.t()).where(dense != 0, 0))
        assert grad.layout is matrix.layout
    assert served()[0] >= 2


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_the_values_that_a_matrix_is_made_of_have_a_gradient(enabled, layout):
    dense = random_matrix()
    of = LAYOUTS[layout](dense)
    x = torch.randn(30, 3, dtype=torch.float64)

    def gradient():
        values = of.values().clone().requires_grad_()
        if layout == "coo":
            matrix = torch.sparse_coo_tensor(of.indices(), values, of.shape, is_coalesced=True)
        else:
            matrix = torch.sparse_csr_tensor(of.crow_indices(), of.col_indices(), values, of.shape)
        return torch.autograd.grad(torch.sparse.mm(matrix, x).square().sum(), values)[0]

    grads = [gradient() for _ in range(3)]
    sparse_products.disable()
    for grad in grads:
        torch.testing.assert_close(grad, gradient())


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_an_undefined_gradient_stays_undefined(enabled, layout):
    """As PyTorch's own, which gives no zeros for it."""
    matrix = LAYOUTS[layout](random_matrix()).requires_grad_()
    x = torch.randn(30, 4, dtype=torch.float64, requires_grad=True)
    out = several_times(lambda: torch.sparse.mm(matrix, x))
    assert served()[0]
    out = torch._C._functions.UndefinedGrad()(out)
    grads = torch.autograd.grad(out, (matrix, x), torch.ones_like(out), allow_unused=True)
    assert grads == (None, None)


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_second_derivatives(enabled, layout):
    matrix = LAYOUTS[layout](random_matrix(8, 6))
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    for product in (torch.sparse.mm, torch.mm):
        several_times(lambda product=product: product(matrix, x))
        assert torch.autograd.gradcheck(lambda x, product=product: product(matrix, x), x)
        assert torch.autograd.gradgradcheck(lambda x, product=product: product(matrix, x).square(), x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_matrices_are_summed_in_float32(enabled, layout, dtype):
    dense = random_matrix(200, 3000, torch.float32).to(dtype)
    matrix = LAYOUTS[layout](dense)
    x = torch.rand(3000, 8).to(dtype).requires_grad_()
    out = torch.sparse.mm(matrix, x)
    assert served() == (1, 0)
    torch.testing.assert_close(out, (dense.double() @ x.double()).to(dtype))
    out.sum().backward()
    expected = dense.double().sum(0, keepdim=True).t().expand(-1, 8)
    torch.testing.assert_close(x.grad, expected.to(dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dense_matrix_times_a_sparse_one(enabled, layout):
    dense = random_matrix()
    matrix = LAYOUTS[layout](dense)
    left = torch.randn(3, 40, dtype=torch.float64)
    torch.testing.assert_close(several_times(lambda: left @ matrix), left @ dense)


def outcome(call):
    try:
        out = call()
    except Exception as error:
        return type(error), str(error), None
    return out.layout, out.dtype, out.to_dense()


def unusual_calls():
    dense = random_matrix(9, 9, torch.float32)
    operands = {name: make(dense) for name, make in LAYOUTS.items()}
    operands["dense"] = torch.randn(9, 9)
    for (one, left), (two, right) in itertools.product(operands.items(), repeat=2):
        if one == two == "dense":
            continue
        yield f"{one} @ {two}", lambda left=left, right=right: left @ right
        yield f"sparse.mm {one} {two}", lambda left=left, right=right: torch.sparse.mm(left, right)
        for name in ("dense", "coo", "csr"):  # PyTorch crashes on some with a CSC bias
            bias = operands[name]
            yield f"addmm {name} {one} {two}", lambda b=bias, x=left, y=right: torch.addmm(b, x, y)
    for name in LAYOUTS:
        matrix = operands[name]
        yield f"{name} rows", lambda matrix=matrix: matrix @ torch.randn(8, 2)
        yield f"{name} vector", lambda matrix=matrix: matrix @ torch.ones(9)
        yield f"{name} mm vector", lambda matrix=matrix: torch.mm(matrix, torch.ones(9))
        yield f"{name} float64", lambda matrix=matrix: matrix @ torch.ones(9, 2).double()
        yield f"{name} integers", lambda matrix=matrix: matrix.long() @ torch.ones(9, 2).long()
        yield f"{name} complex", lambda m=matrix: m.to(torch.complex64) @ torch.ones(9, 2).to(torch.complex64)
        yield f"{name} no columns", lambda matrix=matrix: matrix @ torch.ones(9, 0)
        yield f"{name} bias", lambda m=matrix: torch.addmm(torch.ones(3, 1, 9), m, torch.ones(9, 2))
        yield f"{name} bias size", lambda m=matrix: torch.addmm(torch.ones(5), m, torch.ones(9, 2))
        yield f"{name} bias dtype", lambda m=matrix: torch.addmm(torch.ones(2).double(), m, torch.ones(9, 2))
        yield f"{name} out", lambda m=matrix: torch.mm(m, torch.ones(9, 2), out=torch.empty(9, 2))
    yield "dense dimensions", lambda: torch.rand(4, 4, 2).to_sparse(2) @ torch.rand(2, 2)
    yield "transpose", lambda: operands["coo"].transpose(-1, 0)
    yield "transpose nothing", lambda: operands["coo"].transpose(1, 1)
    yield "transpose far", lambda: operands["coo"].transpose(0, 2)
    yield "transpose three", lambda: torch.rand(2, 3, 4).to_sparse().transpose(0, 2)
    yield "transpose dense", lambda: torch.rand(4, 3, 2).to_sparse(1).transpose(1, 2)


CALLS = dict(unusual_calls())


@pytest.mark.parametrize("name", CALLS)
def test_other_calls_give_what_pytorch_gives(name):
    torch.manual_seed(0)
    *expected, expected_result = outcome(CALLS[name])
    sparse_products.enable()
    try:
        for _ in range(3):
            torch.manual_seed(0)
            *kind, result = outcome(CALLS[name])
            assert kind == expected
            if result is not None:
                torch.testing.assert_close(result, expected_result)
    finally:
        sparse_products.disable()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_edits_are_seen(enabled, layout):
    dense = random_matrix()
    matrix, x = LAYOUTS[layout](dense), torch.eye(30, dtype=torch.float64)
    several_times(lambda: matrix @ x)
    values = matrix._values() if layout == "coo" else matrix.values()
    values.mul_(2)
    torch.testing.assert_close(matrix @ x, 2 * dense)
    if layout == "coo":
        matrix._indices()[1].copy_(29 - matrix._indices()[1].clone())
        torch.testing.assert_close(matrix @ x, 2 * dense.flip(1))
    elif layout == "csr":
        matrix.col_indices().copy_(29 - matrix.col_indices().clone())
        torch.testing.assert_close(matrix @ x, 2 * dense.flip(1))
    else:
        matrix.row_indices().copy_(39 - matrix.row_indices().clone())
        torch.testing.assert_close(matrix @ x, 2 * dense.flip(0))


def test_an_edited_buffer_of_which_matrices_are_made_is_seen(enabled):
    x = torch.eye(30, dtype=torch.float64)
    of = random_matrix().to_sparse_csr()
    crow, col = of.crow_indices(), of.col_indices().clone()
    for _ in range(4):
        expected = torch.sparse_csr_tensor(crow, col, of.values(), of.shape).to_dense()
        for _ in range(2):
            matrix = torch.sparse_csr_tensor(crow, col, of.values(), of.shape)
            torch.testing.assert_close(matrix @ x, expected)
        col.copy_(29 - col.clone())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["data", "width", "dtype", "stride", "subclass"])
def test_products_after_repeated_ones_that_differ(enabled, layout, name):
    matrix = LAYOUTS[layout](random_matrix())
    x = torch.randn(30, 4, dtype=torch.float64)
    for _ in range(4):
        torch.testing.assert_close(matrix @ x, matrix.to_dense() @ x)
    if name == "data":
        matrix.data = LAYOUTS[layout](random_matrix(seed=1))
    elif name == "subclass":
        x = torch.nn.Parameter(x)
    elif name == "dtype":
        matrix = matrix.float()
        x = x.float()
    else:
        x = x[:, :3].contiguous() if name == "width" else x.t().contiguous().t()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(matrix @ x, matrix.to_dense() @ x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name", ["same", "values", "data", "width", "stride", "subclass", "wrapped", "no_grad"]
)
def test_gradients_after_repeated_products_that_differ(enabled, layout, name):
    matrix = LAYOUTS[layout](random_matrix())
    x = torch.randn(30, 4, dtype=torch.float64)

    def check(x, is_recorded=True):
        x = x.requires_grad_()
        out, expected = torch.sparse.mm(matrix, x), matrix.to_dense() @ x
        assert out.requires_grad is is_recorded
        torch.testing.assert_close(out, expected)
        if is_recorded:
            weight = torch.randn_like(out)
            (found,), (of_dense,) = (torch.autograd.grad(each, x, weight) for each in (out, expected))
            torch.testing.assert_close(found, of_dense)

    for _ in range(4):
        check(x)
    before = served()
    if name == "values":
        (matrix._values() if layout == "coo" else matrix.values()).mul_(2)
    elif name == "data":
        matrix.data = LAYOUTS[layout](random_matrix(seed=1))
    elif name == "subclass":
        x = torch.nn.Parameter(x.detach())
    elif name == "width":
        x = x.detach()[:, :3].contiguous()
    elif name == "stride":
        x = x.detach().t().contiguous().t()
    if name == "no_grad":
        with torch.no_grad():
            check(x, False)
    else:
        for _ in range(3):
            check(x)
        assert served() == (before[0] + 3, before[1])


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_gradient_of_the_matrix_after_products_without(enabled, layout):
    dense = random_matrix()
    matrix = LAYOUTS[layout](dense)
    matrix = matrix.coalesce() if layout == "coo" else matrix
    x = torch.randn(30, 4, dtype=torch.float64, requires_grad=True)
    several_times(lambda: torch.sparse.mm(matrix, x))
    matrix.requires_grad_()
    (found,) = torch.autograd.grad(torch.sparse.mm(matrix, x).sum(), matrix)
    expected = x.detach().sum(1).expand(40, 30) * (dense != 0)
    torch.testing.assert_close(found.to_dense(), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_second_derivatives_and_autocast_after_repeated_products(enabled, layout):
    dense = random_matrix()
    matrix = LAYOUTS[layout](dense)
    x = torch.randn(30, 4, dtype=torch.float64, requires_grad=True)
    several_times(lambda: torch.sparse.mm(matrix, x))
    results = []
    for product in (lambda x: torch.sparse.mm(matrix, x), lambda x: dense @ x):
        (first,) = torch.autograd.grad((product(x) ** 3).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*results)
    narrow, x = LAYOUTS[layout](dense.float()), x.detach().float().requires_grad_()
    several_times(lambda: torch.sparse.mm(narrow, x))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.sparse.mm(narrow, x).dtype == torch.bfloat16


def test_a_function_transform_after_repeated_products(enabled):
    dense = random_matrix()
    matrix = dense.to_sparse()
    x, weight = torch.randn(30, 4, dtype=torch.float64), torch.randn(40, 4, dtype=torch.float64)
    several_times(lambda: torch.sparse.mm(matrix, x.requires_grad_()))
    _, pull = torch.func.vjp(lambda x: torch.sparse.mm(matrix, x), x.detach())
    torch.testing.assert_close(pull(weight)[0], dense.t() @ weight)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_matrix_and_its_transposed_form_have_one_structure(enabled, layout):
    matrix = LAYOUTS[layout](random_matrix(150, 150))  # PyTorch computes gradients of smaller COO matrices
    x = torch.randn(150, 2, dtype=torch.float64, requires_grad=True)
    several_times(lambda: (matrix @ x).sum().backward())
    before = sparse_products.structures_info()
    assert before.entries == 1
    call_report.start_recording()
    (matrix @ x).sum().backward()
    assert served() == (2, 0)
    assert sparse_products.structures_info().misses == before.misses


def test_a_transposed_copy_that_was_edited_is_another_matrix(enabled):
    matrix = random_matrix().to_sparse()
    x = torch.eye(40, dtype=torch.float64)
    several_times(lambda: matrix.t() @ x)
    several_times(lambda: matrix @ torch.eye(30, dtype=torch.float64))
    turned = matrix.t()
    turned._indices()[1].copy_(39 - turned._indices()[1].clone())
    torch.testing.assert_close(turned @ x, turned.to_dense())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_structures_die_with_the_matrix(enabled, layout):
    matrix, x = LAYOUTS[layout](random_matrix()), torch.randn(30, 2, dtype=torch.float64)
    for _ in range(3):
        matrix @ x
    assert sparse_products.structures_info().entries == 1
    del matrix
    gc.collect()
    assert sparse_products.structures_info().entries == 0


def test_uncoalesced_entries_add_up(enabled):
    indices, values = torch.tensor([[0, 1, 0, 0], [1, 0, 1, 2]]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    matrix = torch.sparse_coo_tensor(indices, values, (2, 3)).requires_grad_()
    x = torch.randn(3, 2, requires_grad=True)
    for _ in range(3):
        out = torch.sparse.mm(matrix, x)
        torch.testing.assert_close(out, matrix.to_dense() @ x)
        grad, grad_x = torch.autograd.grad(out.sum(), (matrix, x))
        torch.testing.assert_close(grad_x, matrix.detach().to_dense().sum(0)[:, None].expand(3, 2))
    sparse_products.disable()
    expected = torch.autograd.grad(torch.sparse.mm(matrix, x).sum(), matrix)[0]
    torch.testing.assert_close(grad.to_dense(), expected.to_dense())


def test_inference_mode_and_parameters(enabled):
    dense = random_matrix(dtype=torch.float32)
    matrix = dense.to_sparse()
    x = torch.nn.Parameter(torch.randn(30, 3))
    with torch.inference_mode():
        out = several_times(lambda: torch.sparse.mm(matrix, x))
        made_here = dense.to_sparse()
        torch.testing.assert_close(several_times(lambda: made_here @ x), dense @ x)
    torch.testing.assert_close(out, dense @ x)
    several_times(lambda: torch.sparse.mm(matrix, x)).sum().backward()
    torch.testing.assert_close(x.grad, dense.sum(0)[:, None].expand(30, 3))


def test_autocast_multiplies_in_bfloat16(enabled):
    dense = random_matrix(dtype=torch.float32)
    matrix, x = dense.to_sparse(), torch.randn(30, 4)
    with torch.autocast("cpu", torch.bfloat16):
        out = several_times(lambda: matrix @ x)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), dense @ x, rtol=0.02, atol=0.02)


def test_disable_puts_the_registrations_back():
    before = [torch._C._dispatch_dump(f"aten::{name}") for name in REGISTRATIONS]
    sparse_products.enable()
    sparse_products.enable()
    assert sparse_products.is_enabled()
    assert [torch._C._dispatch_dump(f"aten::{name}") for name in REGISTRATIONS] != before
    sparse_products.disable()
    sparse_products.disable()
    assert [torch._C._dispatch_dump(f"aten::{name}") for name in REGISTRATIONS] == before


def test_a_new_matrix_in_every_call_is_reported_with_the_cure(enabled):
    x = torch.randn(30, 2, dtype=torch.float64)
    for seed in range(3):
        random_matrix(seed=seed).to_sparse_csr() @ x
    assert served() == (0, 3)
    report = call_report.report()
    (sentence,) = report.advice
    assert "ran 3 times without a kernel: the matrix is new. Make it once and keep it." in sentence
    assert "test_sparse_products.py" in sentence
    assert '"calls": 3' in report.to_json()
    assert "FastSparse computed 0 of 3 calls" in str(report)
