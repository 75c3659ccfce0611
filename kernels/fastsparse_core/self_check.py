"""Compares every operator with its float64 reference on a small graph, for the doctor.

The import of this module must not fail if PyTorch is missing or broken. So PyTorch is imported inside of
functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

#: Size of the graph that the operators are checked on.
_NUM_DST, _NUM_SRC, _NUM_EDGES = 24, 32, 400

#: Shapes of an operator's tensors.
Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Check:
    """Result of one operator's self-check on one device.

    Attributes:
        operator: name of the operator and its options.
        device: name of the device.
        error: largest relative error of outputs and gradients; None if the check raised an exception.
        milliseconds: time of a forward and backward pass on the host, after a first call.
        message: the exception's type and message; "" if there was none.
    """

    operator: str
    device: str
    error: float | None
    milliseconds: float = 0.0
    message: str = ""

    @property
    def passed(self) -> bool:
        """True if output and gradients agree with the reference up to a relative error of 1e-5."""
        return self.error is not None and self.error <= 1e-5


def check_operators(device: str) -> list[Check]:
    """Compares every operator, its output and its gradients, with the float64 reference on a small graph.

    The graph has an empty row, a row with many entries and repeated edges. Each check takes about 10 ms.

    Args:
        device: ``"cpu"`` or ``"cuda:0"`` and so on.

    Returns:
        One result for each operator, also for an operator that raises an exception.
    """
    num_dst, num_src, num_edges, heads, width = _NUM_DST, _NUM_SRC, _NUM_EDGES, 2, 16
    matrices = ((num_dst, width), (num_src, width))
    rows_dst, rows_src = (num_dst, heads, width), (num_src, heads, width)
    scores = ((num_dst, heads), (num_src, heads))
    on_gpu = "auto" if device == "cpu" else "flashsparse"  # "flashsparse" warns on the CPU
    operators: list[tuple[str, str, Shapes, dict[str, Any]]] = [
        *(
            (f"spmm {reduce}", "spmm", ((num_src, width), (num_edges,)), {"reduce": reduce})
            for reduce in ("sum", "mean", "max", "min")
        ),
        ("sddmm", "sddmm", matrices, {}),
        ("sddmm flashsparse", "sddmm", matrices, {"algorithm": on_gpu}),
        ("edge_softmax", "edge_softmax", ((num_edges, heads),), {}),
        *(
            (f"scatter {reduce}", "scatter", ((num_edges, width),), {"reduce": reduce})
            for reduce in ("mean", "max", "std")
        ),
        ("scatter_softmax", "scatter_softmax", ((num_edges, heads),), {}),
        ("attention", "attention", (rows_dst, rows_src, rows_src), {}),
        ("additive_attention", "additive_attention", (*scores, rows_src), {}),
        ("gatv2_attention", "gatv2_attention", (rows_dst, rows_src, (heads, width)), {}),
        ("attention_weights", "attention_weights", (rows_dst, rows_src), {}),
        ("additive_attention_weights", "additive_attention_weights", scores, {}),
        ("gatv2_attention_weights", "gatv2_attention_weights", (rows_dst, rows_src, (heads, width)), {}),
        ("maxk and ssd", "ssd", ((num_src, width), (num_edges,)), {"k": width // 4}),
    ]
    features = {"edge_attr": (num_edges, 8), "edge_weight": (heads * width, 8)}
    operators += [
        (f"{name} edge_attr", name, (*shapes, *features.values()), {"named": tuple(features)})
        for _, name, shapes, _ in operators
        if name in ("attention", "gatv2_attention")
    ]
    edges = {"edge_attr": (num_edges, 8), "edge_weight": (width, 8), "x_dst": (num_dst, width)}
    several = {"aggregations": ("sum", "mean", "min", "max", "var", "std"), "named": tuple(edges)}
    operators.append(("multi_aggregate", "multi_aggregate", ((num_src, width), *edges.values()), several))
    edge_rows, maps = (num_edges, width), dict.fromkeys(("gate_weight", "value_weight"), (width, 8))
    raw = {"edge_attr": (num_edges, 8)}
    of_gine = raw | {"edge_weight": (width, 8), "edge_bias": (width,)}
    sides = (matrices[0], matrices[1], matrices[1])
    operators += [
        ("gine_aggregate", "gine_aggregate", (matrices[1], edge_rows), {}),
        ("gated_aggregate", "gated_aggregate", sides, {}),
        ("gated_edges", "gated_edges", (*sides, edge_rows), {}),
    ]
    operators += [
        (f"{name} edge_attr", name, (*shapes, *named.values()), {"named": tuple(named)})
        for name, shapes, named in (
            ("gine_aggregate", (matrices[1],), of_gine),
            ("gated_aggregate", sides, raw | maps),
        )
    ]
    return [_check(*operator, device) for operator in operators]


def _check(title: str, name: str, shapes: Shapes, options: dict[str, Any], device: str) -> Check:
    """Runs one operator's self-check on random tensors of the given shapes.

    ``options["named"]`` has the names of the last tensors that are keyword arguments.
    """
    try:
        import torch

        import fastsparse_core
        from fastsparse_core import reference

        generator = torch.Generator().manual_seed(0)
        row = torch.randint(1, _NUM_DST, (_NUM_EDGES,), generator=generator)
        row[:150] = 3  # a row with many entries; row 0 stays empty
        col = torch.randint(0, _NUM_SRC, (_NUM_EDGES,), generator=generator)
        adj = fastsparse_core.Adjacency.from_coo(row.to(device), col.to(device), (_NUM_DST, _NUM_SRC))
        inputs = [torch.randn(shape, generator=generator).to(device) for shape in shapes]

        def outputs(operator: Callable[..., Any], copies: list[Any], options: dict[str, Any]) -> list[Any]:
            wanted = [copy.requires_grad_() for copy in copies]
            names = options.get("named", ())
            options = {key: option for key, option in options.items() if key != "named"}
            options |= dict(zip(names, wanted[len(wanted) - len(names) :], strict=True))
            found = operator(adj, *wanted[: len(wanted) - len(names)], **options)
            results = found if isinstance(found, tuple) else (found,)
            total = sum(result.square().sum() for result in results)
            return [*(result.detach() for result in results), *torch.autograd.grad(total, copies)]

        # References have no argument `algorithm`.
        formula = {key: option for key, option in options.items() if key != "algorithm"}
        operator, exact = getattr(fastsparse_core, name), getattr(reference, name)
        if name == "ssd":  # its sparse rows are the entries that maxk keeps

            def operator(adj: Any, x: Any, value: Any, k: int) -> Any:
                return fastsparse_core.ssd(adj, fastsparse_core.maxk(x, k), value)

            def exact(adj: Any, x: Any, value: Any, k: int) -> Any:
                return reference.ssd(adj, *reference.maxk(x, k), x.size(1), value)

        if name in ("scatter", "scatter_softmax"):  # these operators get the row of every edge as their index
            index = row.to(device)
            by_index, by_index_exact = operator, exact

            def operator(adj: Any, src: Any, **options: Any) -> Any:
                return by_index(src, index, _NUM_DST, **options)

            def exact(adj: Any, src: Any, **options: Any) -> Any:
                return by_index_exact(src, index, _NUM_DST, **options)

        expected = outputs(exact, [tensor.double() for tensor in inputs], formula)
        # The first call builds the cached formats.
        outputs(operator, [tensor.clone() for tensor in inputs], options)
        start = time.perf_counter()
        computed = outputs(operator, [tensor.clone() for tensor in inputs], options)
        errors = [
            float((got.double() - want).abs().max() / want.abs().max().clamp(min=1.0))
            for got, want in zip(computed, expected, strict=True)
        ]
        milliseconds = 1e3 * (time.perf_counter() - start)
        # max() would lose a NaN.
        error = float("inf") if any(value != value for value in errors) else max(errors)
        return Check(title, device, error, milliseconds)
    except Exception as error:
        return Check(title, device, None, message=f"{type(error).__name__}: {first_line(error)}")


def first_line(error: object) -> str:
    """Shortens an error message for a table: its last line that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
