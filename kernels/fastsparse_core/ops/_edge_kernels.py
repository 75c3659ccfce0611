"""Kernels for sums of elementwise expressions over edges, written as Triton's source from the expression.

Algorithm: a program has a row of the structure. It reads its edges in tiles, computes the expression of a tile in registers, and adds it up. The
backward pass recomputes the expression: by rows for what belongs to destinations, edges and constants, by rows of the transpose
for what belongs to sources. Nothing of the size of the edges is written but gradients of the edges' own features.

Bytes: the floor is what a product of the same width gathers, a row of every source leaf for each edge and pass.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

#: Name -> (the value of arguments {0}, {1}; the gradient of each argument from that of the value, {g}, and the value, {y}).
OPERATORS: dict[str, tuple[str, tuple[str, ...]]] = {
    "add": ("{0} + {1}", ("{g}", "{g}")),
    "sub": ("{0} - {1}", ("{g}", "-{g}")),
    "mul": ("{0} * {1}", ("{g} * {1}", "{g} * {0}")),
    "div": ("{0} / {1}", ("{g} / {1}", "-{g} * {y} / {1}")),
    "neg": ("-{0}", ("-{g}",)),
    "relu": ("tl.where({0} <= 0, 0.0, {0})", ("tl.where({0} <= 0, 0.0, {g})",)),
    "leaky_relu": ("tl.where({0} > 0, {0}, {0} * {1})", ("tl.where({0} > 0, {g}, {g} * {1})",)),
    "sigmoid": ("1 / (1 + tl.exp(-{0}))", ("{g} * {y} * (1 - {y})",)),
    "tanh": ("2 / (1 + tl.exp(-2 * {0})) - 1", ("{g} * (1 - {y} * {y})",)),
    "exp": ("tl.exp({0})", ("{g} * {y}",)),
    "silu": ("{0} / (1 + tl.exp(-{0}))", ("{g} * (1 + {0} - {y}) / (1 + tl.exp(-{0}))",)),
    "elu": (
        "tl.where({0} > 0, {0}, {1} * (tl.exp({0}) - 1))",
        ("tl.where({0} > 0, {g}, {g} * ({y} + {1}))",),
    ),
    "softplus": (
        "tl.where({0} > 20.0, {0}, tl.log(1 + tl.exp({0})))",
        ("tl.where({0} > 20.0, {g}, {g} / (1 + tl.exp(-{0})))",),
    ),
    "square": ("{0} * {0}", ("2 * {g} * {0}",)),
}


class Leaf(NamedTuple):
    """A tensor of an expression.

    Attributes:
        place: ``"dst"``, ``"src"``, ``"edge"``: a row for each of them; ``"whole"``: one row for all; ``"mapped"``: features of
            edges, of which the next leaf, ``"weight"`` (width, features), makes a row.
        is_scalar: whether a row is one number.
        features: of a ``"mapped"`` leaf.
    """

    place: str
    is_scalar: bool = False
    features: int = 0


#: ``("leaf", n)``, a number, or ``(operator, *expressions)``.
Expression = Any


class Kernels(NamedTuple):
    """Forward by rows, backward by rows, backward by rows of the transpose."""

    forward: Any
    backward_rows: Any
    backward_columns: Any


@lru_cache(maxsize=256)
def kernels_of(expression: Expression, leaves: tuple[Leaf, ...], how: str) -> Kernels:
    """The kernels of an expression, from a file that is written once."""
    source = source_of(expression, leaves, how)
    name = hashlib.sha256(source.encode()).hexdigest()[:24]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastsparse" / "edge_kernels"
    path = home / f"{name}.py"
    if not path.exists():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=home, suffix=".part", delete=False) as file:
            file.write(source)
        os.replace(file.name, path)  # other processes see all of it or nothing
    spec = importlib.util.spec_from_file_location(f"fastsparse_edge_kernels_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Kernels(module.forward, module.backward_rows, module.backward_columns)


class _Writer:
    """Lines of one kernel's body: values once each, then gradients."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.leaves = leaves
        self.lines: list[str] = []
        self.names: dict[Any, str] = {}
        self.order: list[tuple[Any, str]] = []

    def value(self, expression: Expression) -> str:
        if isinstance(expression, (int, float)):
            return repr(float(expression))
        if expression in self.names:
            return self.names[expression]
        name, *args = expression
        if name == "leaf":
            self.names[expression] = f"l{args[0]}"
            return self.names[expression]
        given = [self.value(each) for each in args]
        made = f"v{len(self.order)}"
        self.lines.append(f"{made} = {OPERATORS[name][0].format(*given)}")
        self.names[expression] = made
        self.order.append((expression, made))
        return made

    def gradients(self, expression: Expression, grad: str) -> dict[int, str]:
        """Names of the leaves' gradients, by number."""
        grads: dict[Any, str] = {expression: grad}
        count = 0
        for each, made in reversed(self.order):
            if each not in grads:
                continue
            name, *args = each
            given = [self.value(arg) for arg in args]
            for arg, formula in zip(args, OPERATORS[name][1], strict=False):
                if isinstance(arg, (int, float)):
                    continue
                term = formula.format(*given, g=grads[each], y=made)
                self.lines.append(
                    f"g{count} = {term}" if arg not in grads else f"g{count} = {grads[arg]} + {term}"
                )
                grads[arg] = f"g{count}"
                count += 1
        return {arg[1]: made for arg, made in grads.items() if arg[0] == "leaf"}


def source_of(expression: Expression, leaves: tuple[Leaf, ...], how: str) -> str:
    """The text of the three kernels."""
    return "\n\n".join(
        [
            '"""Written by fastsparse_core.ops._edge_kernels."""\nimport triton\nimport triton.language as tl',
            _forward(expression, leaves, how),
            _backward(expression, leaves, how, by_rows=True),
            _backward(expression, leaves, how, by_rows=False),
        ]
    )


def _parameters(leaves: Sequence[Leaf]) -> str:
    return ", ".join(f"p{n}" for n in range(len(leaves)))


def _load(leaf: Leaf, n: int, row: str, tiled: bool, width: str = "W") -> str:
    """Loads rows of a leaf: a tile of edges, or one row."""
    if leaf.is_scalar:
        where = f"p{n} + {row}" if leaf.place != "whole" else f"p{n}"
        mask = ", mask=m, other=0" if tiled else ""
        loaded = f"tl.load({where}{mask}).to(ACC)"
        return f"{loaded}[:, None]" if tiled else loaded
    if leaf.place == "whole":
        return f"tl.load(p{n} + f, mask=fm, other=0).to(ACC)[None, :]"
    if tiled:
        return f"tl.load(p{n} + {row}[:, None] * {width} + f[None, :], mask=mm, other=0).to(ACC)"
    return f"tl.load(p{n} + {row} * {width} + f, mask=fm, other=0).to(ACC)[None, :]"


def _head(name: str, extra: str, leaves: Sequence[Leaf]) -> list[str]:
    return [
        "@triton.jit",
        f"def {name}(ptr, other, position, {_parameters(leaves)}, {extra}, n, W: tl.constexpr, WP: tl.constexpr, "
        "BE: tl.constexpr, ACC: tl.constexpr, HAS_POSITION: tl.constexpr):",
        "    f = tl.arange(0, WP)",
        "    fm = f < W",
    ]


def _constants(leaves: Sequence[Leaf]) -> list[str]:
    """What is loaded once for a program: whole rows and weights."""
    lines = []
    for n, leaf in enumerate(leaves):
        if leaf.place == "whole":
            lines.append(f"l{n} = {_load(leaf, n, '', False)}")
        elif leaf.place == "weight":
            k = leaf.features
            lines += [
                f"k{n} = tl.arange(0, {_power(k)})",
                f"km{n} = k{n} < {k}",
                f"w{n} = tl.load(p{n} + f[None, :] * {k} + k{n}[:, None], mask=km{n}[:, None] & fm[None, :], other=0).to(ACC)",
            ]
    return lines


def _power(k: int) -> int:
    return max(16, 1 << (k - 1).bit_length())


def _tile(leaves: Sequence[Leaf], by_rows: bool) -> list[str]:
    """Loads of a tile of edges: what lies at the other end, and at the edges."""
    lines = [
        "t = s + tl.arange(0, BE)",
        "m = t < hi",
        "mm = m[:, None] & fm[None, :]",
        "c = tl.load(other + t, mask=m, other=0).to(tl.int64)",
        "if HAS_POSITION:",
        "    q = tl.load(position + t, mask=m, other=0).to(tl.int64)",
        "else:",
        "    q = t.to(tl.int64)",
    ]
    there = "src" if by_rows else "dst"
    for n, leaf in enumerate(leaves):
        if leaf.place == there:
            lines.append(f"l{n} = {_load(leaf, n, 'c', True)}")
        elif leaf.place == "edge":
            lines.append(f"l{n} = {_load(leaf, n, 'q', True)}")
        elif leaf.place == "mapped":
            k, w = leaf.features, n + 1
            lines += [
                f"x{n} = tl.load(p{n} + q[:, None] * {k} + k{w}[None, :], mask=m[:, None] & km{w}[None, :], other=0).to(ACC)",
                f'l{n} = tl.dot(x{n}, w{w}, input_precision="ieee")',
            ]
    return lines


def _indent(lines: Sequence[str], by: int) -> list[str]:
    return [" " * by + line for line in lines]


def _own(leaves: Sequence[Leaf], place: str) -> list[str]:
    return [f"l{n} = {_load(leaf, n, 'i', False)}" for n, leaf in enumerate(leaves) if leaf.place == place]


def _forward(expression: Expression, leaves: Sequence[Leaf], how: str) -> str:
    writer = _Writer(leaves)
    value = writer.value(expression)
    is_max = how in ("max", "min")
    lines = _head("forward", "out, chosen" if is_max else "out", leaves)
    lines += _indent(_constants(leaves), 4)
    lines += [
        "    i = tl.program_id(0).to(tl.int64)",
        "    lo = tl.load(ptr + i)",
        "    hi = tl.load(ptr + i + 1)",
        *_indent(_own(leaves, "dst"), 4),
    ]
    if is_max:
        least = '-float("inf")' if how == "max" else 'float("inf")'
        lines += [f"    total = tl.full((WP,), {least}, ACC)", "    at = tl.full((WP,), -1, tl.int64)"]
    else:
        lines += ["    total = tl.zeros((WP,), ACC)"]
    lines += ["    for s in range(lo, hi, BE):", *_indent(_tile(leaves, True), 8), *_indent(writer.lines, 8)]
    if is_max:
        better = "best > total" if how == "max" else "best < total"
        lines += [
            f"        z = tl.where(mm, {value}, {least})",
            f"        best = tl.{how}(z, 0)",
            f"        which = tl.argmax(z, 0)" if how == "max" else "        which = tl.argmin(z, 0)",
            f"        is_better = ({better}) | (at < 0)",
            "        at = tl.where(is_better, s + which, at)",
            "        total = tl.where(is_better, best, total)",
        ]
    else:
        lines += [f"        total += tl.sum(tl.where(mm, {value}, 0.0), 0)"]
    if how == "mean":
        lines += ["    total = total / tl.maximum(hi - lo, 1).to(ACC)"]
    if is_max:
        lines += [
            "    total = tl.where(lo < hi, total, 0.0)",
            "    if HAS_POSITION:",
            "        at = tl.load(position + at, mask=fm & (at >= 0), other=-1).to(tl.int64)",
            "    tl.store(chosen + i * W + f, at, mask=fm)",
        ]
    lines += ["    tl.store(out + i * W + f, total, mask=fm)"]
    return "\n".join(lines)


def _backward(expression: Expression, leaves: Sequence[Leaf], how: str, by_rows: bool) -> str:
    """Gradients of leaves at this end; by rows those of edges, weights and constants, too."""
    writer = _Writer(leaves)
    writer.value(expression)
    is_max = how in ("max", "min")
    grads = writer.gradients(expression, "go")
    here = "dst" if by_rows else "src"
    places = (here, "edge", "mapped", "weight", "whole") if by_rows else (here,)
    wanted = [n for n, leaf in enumerate(leaves) if leaf.place in places]
    outs = ", ".join(f"d{n}" for n in wanted)
    extra = ", ".join(filter(None, (outs, "grad, degree", "chosen" if is_max else "")))
    lines = _head(f"backward_{'rows' if by_rows else 'columns'}", extra, leaves)
    lines += _indent(_constants(leaves), 4)
    once = [n for n in wanted if leaves[n].place in ("weight", "whole")]
    for n in once:
        leaf = leaves[n]
        size = f"({_power(leaf.features)}, WP)" if leaf.place == "weight" else "(WP,)"
        lines.append(f"    a{n} = tl.zeros({size}, ACC)")
    lines += [
        "    for row in range(tl.program_id(0), n, tl.num_programs(0)):",
        "        i = tl.cast(row, tl.int64)",
        "        lo = tl.load(ptr + i)",
        "        hi = tl.load(ptr + i + 1)",
        *_indent(_own(leaves, here), 8),
    ]
    if by_rows:
        lines += ["        gi = tl.load(grad + i * W + f, mask=fm, other=0).to(ACC)"]
        if how == "mean":
            lines += ["        gi = gi / tl.maximum(hi - lo, 1).to(ACC)"]
        if is_max:
            lines += ["        at = tl.load(chosen + i * W + f, mask=fm, other=-1)"]
    mine = [n for n in wanted if leaves[n].place == here]
    for n in mine:
        lines.append(f"        a{n} = tl.zeros((WP,), ACC)")
    lines += ["        for s in range(lo, hi, BE):", *_indent(_tile(leaves, by_rows), 12)]
    if by_rows:
        lines += ["            go = tl.where(mm, gi[None, :], 0.0)"]
        if is_max:
            lines += ["            go = tl.where(at[None, :] == q[:, None], go, 0.0)"]
    else:
        lines += ["            go = tl.load(grad + c[:, None] * W + f[None, :], mask=mm, other=0).to(ACC)"]
        if how == "mean":
            lines += [
                "            go = go / tl.maximum(tl.load(degree + c, mask=m, other=1), 1).to(ACC)[:, None]"
            ]
        if is_max:
            lines += [
                "            at = tl.load(chosen + c[:, None] * W + f[None, :], mask=mm, other=-1)",
                "            go = tl.where(at == q[:, None], go, 0.0)",
            ]
    lines += _indent(writer.lines, 12)
    for n in wanted:
        leaf, grad = leaves[n], grads.get(n if leaves[n].place != "weight" else n - 1)
        if grad is None:
            continue
        if leaf.place == "weight":
            lines.append(
                f'            a{n} += tl.dot(tl.trans(x{n - 1}), tl.where(mm, {grad}, 0.0), input_precision="ieee")'
            )
        elif leaf.place == "mapped":
            k = leaf.features
            lines += [
                f'            e{n} = tl.dot(tl.where(mm, {grad}, 0.0), tl.trans(w{n + 1}), input_precision="ieee")',
                f"            tl.store(d{n} + q[:, None] * {k} + k{n + 1}[None, :], e{n}, mask=m[:, None] & km{n + 1}[None, :])",
            ]
        elif leaf.place == "edge":
            if leaf.is_scalar:
                lines.append(f"            tl.store(d{n} + q, tl.sum(tl.where(mm, {grad}, 0.0), 1), mask=m)")
            else:
                lines.append(f"            tl.store(d{n} + q[:, None] * W + f[None, :], {grad}, mask=mm)")
        else:
            lines.append(f"            a{n} += tl.sum(tl.where(mm, {grad}, 0.0), 0)")
    for n in mine:
        if leaves[n].is_scalar:
            lines.append(f"        tl.store(d{n} + i, tl.sum(a{n}, 0))")
        else:
            lines.append(f"        tl.store(d{n} + i * W + f, a{n}, mask=fm)")
    for n in once:
        leaf = leaves[n]
        if leaf.place == "weight":
            k = leaf.features
            lines.append(
                f"    tl.store(d{n} + tl.program_id(0).to(tl.int64) * {k} * W + f[None, :] * {k} + k{n}[:, None], a{n}, "
                f"mask=km{n}[:, None] & fm[None, :])"
            )
        else:
            lines.append(f"    tl.store(d{n} + tl.program_id(0).to(tl.int64) * W + f, a{n}, mask=fm)")
    return "\n".join(lines)
