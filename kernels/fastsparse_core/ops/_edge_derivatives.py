"""Gradients of edge expressions, written as edge expressions, so that they are differentiable too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from fastsparse_core.ops._edge_kernels import Expression, Root, Writer

#: Operator -> function of (gradient of the result, result, arguments) that returns the gradients of the
#: arguments. Operators that are missing here have no second derivative.
_GRADIENTS: dict[str, Callable[..., tuple[Expression, ...]]] = {
    "add": lambda g, y, a, b: (g, g),
    "sub": lambda g, y, a, b: (g, ("neg", g)),
    "mul": lambda g, y, a, b: (("mul", g, b), ("mul", g, a)),
    "div": lambda g, y, a, b: (("div", g, b), ("neg", ("div", ("mul", g, y), b))),
    "neg": lambda g, y, a: (("neg", g),),
    "sigmoid": lambda g, y, a: (("mul", ("mul", g, y), _one_minus(y)),),
    "tanh": lambda g, y, a: (("mul", g, _one_minus(("square", y))),),
    "exp": lambda g, y, a: (("mul", g, y),),
    "silu": lambda g, y, a: (("mul", g, ("add", ("sigmoid", a), ("mul", y, _one_minus(("sigmoid", a))))),),
    "softplus": lambda g, y, a: (("mul", g, ("sigmoid", a)),),
    "relu": lambda g, y, a: (("relu_gradient", g, a),),
    "relu_gradient": lambda g, y, a, b: (("relu_gradient", g, b),),
    "leaky_relu": lambda g, y, a, slope: (("leaky_relu_gradient", g, a, slope),),
    "leaky_relu_gradient": lambda g, y, a, b, slope: (("leaky_relu_gradient", g, b, slope),),
    "square": lambda g, y, a: (("mul", ("mul", g, a), 2.0),),
}
#: Largest number of operators in an expression whose gradients are written as expressions: their formulas
#: grow fast.
_MOST_OPERATORS = 40


def gradients_of(
    roots: Sequence[Root], wanted: Collection[int], grads: Sequence[Expression]
) -> dict[int, Expression] | None:
    """Gradients of the wanted leaves, by number; None if an operator has none or the formulas are too long.

    Args:
        roots: the results.
        wanted: numbers of the leaves whose gradients are computed.
        grads: gradients of the values of the results, per edge.
    """
    writer = Writer()
    for root in roots:
        writer.value(root.value)
    if len(writer.order) > _MOST_OPERATORS or any(each[0] not in _GRADIENTS for each, _ in writer.order):
        return None
    leads = {("leaf", n) for n in wanted}
    for each, _ in writer.order:
        if any(arg in leads for arg in each[1:]):
            leads.add(each)
    found: dict[Expression, Expression] = {}
    for root, grad in zip(roots, grads, strict=True):
        found[root.value] = ("add", found[root.value], grad) if root.value in found else grad
    for each, _ in reversed(writer.order):
        if each in found:
            name, *args = each
            for arg, term in zip(args, _GRADIENTS[name](found[each], each, *args), strict=False):
                if arg in leads:
                    found[arg] = ("add", found[arg], term) if arg in found else term
    return {n: found[("leaf", n)] for n in wanted if ("leaf", n) in found}


def leaves_in(expression: Expression) -> set[int]:
    """The numbers of the leaves that an expression reads."""
    writer = Writer()
    writer.value(expression)
    return {each[1] for each in writer.names if each[0] == "leaf"}


def with_leaves(expression: Expression, numbers: dict[int, int]) -> Expression:
    """The expression with its leaves renumbered."""
    if isinstance(expression, (int, float)):
        return expression
    name, *args = expression
    return (
        (name, numbers[args[0]]) if name == "leaf" else (name, *[with_leaves(arg, numbers) for arg in args])
    )


def _one_minus(y: Expression) -> Expression:
    return ("add", ("neg", y), 1.0)
