"""Message passing over few edges: PyG's steps by PyTorch's operators, without what PyG asks between.

The step of a small graph takes as long as the host needs for it. PyG's generated `propagate` looks for hooks,
scripts and traces before and after each of its methods, a sum goes through five calls, and a mean counts its
terms anew.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric import typing
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.conv import MessagePassing

from fastsparse_pyg.nn.base import REDUCE, has_message_hook, known
from fastsparse_pyg.nn.layer_arguments import Signature

_SPECIAL = frozenset(
    ("edge_index", "edge_index_i", "edge_index_j", "ptr", "index", "size", "size_i", "size_j", "dim_size")
)


class FewEdges(NamedTuple):
    """What calls of one kind (class, aggregation, names and dtypes of arguments) share.

    Attributes:
        lifted: the arguments that are read per edge: (the caller's, its name at the destinations, that at the
            sources), "" where it is not read there.
        message: names that `message` takes.
        aggregate: those of `aggregate`; None: it is the base class', and :func:`_reduced` does the same.
        update: those of `update`; None: it is the base class', which does nothing.
        defaults: of arguments that the caller does not hand over.
        asks_special: whether a method asks for what message passing itself knows.
        how: the reduction, "" where it is another than sum, mean, max and min.
    """

    lifted: tuple[tuple[str, str, str], ...]
    message: tuple[str, ...]
    aggregate: tuple[str, ...] | None
    update: tuple[str, ...] | None
    defaults: dict[str, Any]
    asks_special: bool
    how: str

    @classmethod
    def of(cls, layer: MessagePassing, names: Signature, given: dict[str, Any]) -> FewEdges | None:
        """For calls like one at hand; None where PyG's `propagate` has to run."""
        kind = type(layer)
        lifted = {name for name, *_ in names.lifted}
        bases = dict.fromkeys(base for _, base, _ in names.lifted)
        asked = {*names.message, *names.aggregate, *names.update}
        if (
            "adj_t" in asked
            or any(base not in given for base in bases)
            or any(name not in given and name not in names.defaults for name in asked - _SPECIAL - lifted)
        ):
            return None
        aggregation = type(layer._modules.get("aggr_module"))
        how = REDUCE.get(aggregation, "")
        is_plain = getattr(aggregation, "__call__", None) is Aggregation.__call__  # noqa: B004
        reduces = kind.aggregate is MessagePassing.aggregate and is_plain
        update = None if kind.update is MessagePassing.update else names.update
        asked = {*names.message, *(() if reduces else names.aggregate), *(update or ())}
        ends = [
            tuple(name if name in lifted else "" for name in (f"{base}_i", f"{base}_j")) for base in bases
        ]
        return cls(
            tuple((base, *end) for base, end in zip(bases, ends, strict=True)),  # type: ignore[misc]
            names.message,
            None if reduces else names.aggregate,
            update,
            {name: value for name, value in names.defaults.items() if name not in given},
            not asked.isdisjoint(_SPECIAL),
            how,
        )

    def propagate(self, layer: Any, edge_index: Tensor, size: Any, given: dict[str, Any]) -> Any:
        """The result of `propagate`; NotImplemented: PyG's own has to find it, or what is wrong."""
        state = layer.__dict__
        if (
            edge_index.dtype not in (torch.int64, torch.int32)
            or edge_index.layout is not torch.strided
            or edge_index.dim() != 2
            or edge_index.shape[0] != 2
            or state["_explain"]
            or state["_decomposed_layers"] > 1
            or has_message_hook(state)
        ):
            return NotImplemented
        dim, is_turned = state["node_dim"], state["flow"] != "source_to_target"
        sizes = [None, None] if size is None else list(size)
        ends = edge_index.unbind(0)
        found = {**self.defaults, **given}
        try:
            if not self._lift(found, ends, sizes, dim, is_turned):
                return NotImplemented
        except (IndexError, RuntimeError):
            return NotImplemented
        src, dst = reversed(sizes) if is_turned else sizes
        index = ends[not is_turned]
        num_dst = src if dst is None else dst
        num_src = dst if src is None else src
        if self.asks_special:
            found["edge_index"], found["edge_index_i"], found["edge_index_j"] = (
                edge_index,
                index,
                ends[is_turned],
            )
            found["ptr"], found["index"], found["size"] = None, index, sizes
            found["size_i"], found["size_j"], found["dim_size"] = num_dst, num_src, num_dst
        out = layer.message(**{name: found[name] for name in self.message})
        if self.aggregate is not None:
            out = layer.aggregate(out, **{name: found[name] for name in self.aggregate})
        else:
            reduced = _reduced(self.how, state, out, index, dim, num_dst)
            if reduced is None:
                out = layer.aggregate(out, index, None, num_dst)
            elif self.how == "mean":
                options = (num_dst, num_src, state["flow"], False)
                out = reduced / _count(edge_index, options, index, dim, reduced)
            else:
                out = reduced
        return (
            out if self.update is None else layer.update(out, **{name: found[name] for name in self.update})
        )

    def _lift(
        self,
        found: dict[str, Any],
        ends: tuple[Tensor, ...],
        sizes: list[int | None],
        dim: int,
        is_turned: bool,
    ) -> bool:
        """Reads features per edge into ``found``, and their numbers of rows into ``sizes``.

        False: they do not fit together, or are of another kind.
        """
        for base, *names in self.lifted:
            value = found[base]
            if is_turned:
                names.reverse()
            at_1, at_0 = names  # the destinations are the second end, unless the flow is turned
            if type(value) is not tuple:
                pair = (value if at_0 else None, value if at_1 else None)
            elif len(value) == 2:
                pair = value
            else:
                return False
            for end, each in enumerate(pair):
                if type(each) is Tensor:
                    rows = each.shape[dim]
                    if sizes[end] is None:
                        sizes[end] = rows
                    elif sizes[end] != rows:
                        return False
                elif each is not None:
                    return False
            if at_0:
                found[at_0] = None if pair[0] is None else pair[0].index_select(dim, ends[0])
            if at_1:
                found[at_1] = None if pair[1] is None else pair[1].index_select(dim, ends[1])
        return True


def _reduced(
    how: str, state: dict[str, Any], messages: Any, index: Tensor, dim: int, num_dst: int | None
) -> Tensor | None:
    """Reduced messages, of a mean the sums; None: `aggregate` has to find them, or what is wrong."""
    aggregation = state["_modules"]["aggr_module"]
    if (
        num_dst is None
        or type(messages) is not Tensor
        or not -messages.dim() <= dim < messages.dim()
        or "aggregate" in state
        or (how and (aggregation._forward_hooks or aggregation._forward_pre_hooks))
    ):
        return None
    try:
        if not how:  # what the module does before is to look for errors, and for modes of PyG's
            out: Tensor = Module.__call__(
                aggregation, messages, index=index, ptr=None, dim_size=num_dst, dim=dim
            )
            return out
        shape = list(messages.shape)
        shape[dim] = num_dst
        adds = how in ("sum", "mean")
        if not adds and typing.WITH_TORCH_SCATTER and messages.is_cuda and messages.requires_grad:
            return None  # PyG takes its operators
        beside = [1] * messages.dim()
        beside[dim] = -1
        every = index.view(beside).expand_as(messages)
        zeros = messages.new_zeros(shape)
        if adds:  # not index_add_, whose gradient of an expanded one, as of a sum, takes longer on the CPU
            return zeros.scatter_add_(dim, every, messages)
        return zeros.scatter_reduce_(dim, every, messages, f"a{how}", include_self=False)
    except (IndexError, RuntimeError):
        return None


def _count(edge_index: Tensor, options: Any, index: Tensor, dim: int, sums: Tensor) -> Tensor:
    """Numbers of terms, at least 1, beside the sums; counted once for edges that are known."""
    adj = known(edge_index, options)
    key = ("number of terms", sums.dtype, sums.dim(), dim)
    count: Tensor | None = None if adj is None else adj.plans.get(key)
    if count is None:
        beside = [1] * sums.dim()
        beside[dim] = -1
        terms = sums.new_ones(index.shape[0])
        count = sums.new_zeros(sums.shape[dim]).scatter_add_(0, index, terms).clamp_(min=1).view(beside)
        if adj is not None and not torch.is_inference_mode_enabled():  # else no training could use it
            adj.plans[key] = count
    return count
