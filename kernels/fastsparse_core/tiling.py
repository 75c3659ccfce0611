"""Full-graph training in tiles of rows, for models whose activations do not fit into memory.

Between two neighbour sums, a model computes each row independently. These parts of the model run for one tile
of rows at a time. Only the inputs of the sums are stored as whole matrices. The backward pass computes all
other activations again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Module

from fastsparse_core.formats.compress import expand_rows, row_pieces, select_rows
from fastsparse_core.ops._dtypes import accumulation_dtype
from fastsparse_core.ops._spmm_plan import launch_spmm
from fastsparse_core.structure.adjacency import Adjacency

#: Number of bytes of a tile's features. In the backward pass, about ten such matrices exist at a time.
_TILE_BYTES = 2**28
#: Number of rows with which :meth:`_Run.check` tests that the model works row by row.
_ROWS_CHECKED = 64
#: Relative difference up to which two results of the check are the same except for rounding.
_ROUNDING = 0.02
#: Largest relative difference between results of equal operations on equally many rows, in dtypes of more
#: than 16 bits.
_SAME_OPERATIONS = 1e-4


class NeighbourSum(NamedTuple):
    r"""A weighted sum over neighbours.

    .. math::
        \mathrm{diag}(s) \, (\mathbf{A} + l \, \mathbf{I}) \, \mathrm{diag}(t)

    Attributes:
        adj: structure (num_dst, num_src) of A. With ``part``, its columns are the own nodes, then the halo.
        scale_dst: s, (num_dst,) in the accumulation dtype; None: 1.
        scale_src: t, (num_src,) in the accumulation dtype; None: 1.
        loop: l, one number in the accumulation dtype, for square structures; None: 0.
        reads_own: True if the layer reads a node's own features after the sum.
        part: the :class:`fastsparse_core.distributed.PartitionedAdjacency` whose rows ``adj`` has; None:
            there is one process.
        exchange: the `ColumnExchange` that exchanges features of the columns between processes; None without
            ``part``.
    """

    adj: Adjacency
    scale_dst: Tensor | None = None
    scale_src: Tensor | None = None
    loop: Tensor | None = None
    reads_own: bool = True
    part: Any = None
    exchange: Any = None

    def of_this_process(self, like: Tensor) -> NeighbourSum:
        """If the structure is partitioned, the sum with this rank's rows, else self. Collective.

        Args:
            like: features (num_src, width), for their dtype.
        """
        part: Any = self.adj
        if not part.is_partitioned:
            return self
        scale_src = None if self.scale_src is None else part.scales(self.scale_src, like)[1]
        return self._replace(adj=part.rows, scale_src=scale_src, part=part, exchange=part.column_exchange)

    def reader(self, x: Tensor, tile_rows: int) -> Callable[[int, int], tuple[Tensor, Tensor]]:
        """Returns a function (begin, end) -> sums and own features of these rows. Collective.

        Args:
            x: input of the layer (own nodes, width).
            tile_rows: number of rows of a tile with all columns.
        """
        if self.part is None:
            return lambda begin, end: (self.tile(x, begin, end), x[begin:end])
        sums = self.of_all_rows(x, tile_rows)
        return lambda begin, end: (sums[begin:end], x[begin:end])

    def of_all_rows(self, x: Tensor, tile_rows: int) -> Tensor:
        """Computes the sums of all rows of a partitioned structure, (num_dst, width). Collective."""
        out = x.new_empty(self.adj.num_dst, x.size(1))
        # Every tile of columns would gather the factors of its sources again, so sources are multiplied once.
        of_scaled = self._replace(scale_src=None)
        for columns, sources in self.exchange.sources(x, self.scale_src):
            for begin, end in _tiles(out.size(0), tile_rows, x.size(1), sources.size(1)):
                out[begin:end, columns] = of_scaled.tile(sources, begin, end)
        return out

    def to_owners(self, of_sums: Tensor, tile_rows: int) -> Tensor:
        """Computes the gradients of the own nodes' features. Collective.

        Args:
            of_sums: gradients of the sums, (num_dst, width).
            tile_rows: number of rows of a tile with all columns.
        """
        back, factor = self.transposed()._replace(scale_src=None), self.scale_dst

        def of_sources(columns: slice) -> Tensor:
            given = of_sums[:, columns]
            if factor is not None:  # as in `of_all_rows`
                given = torch.mul(given, factor[:, None], out=torch.empty_like(given))
            total = of_sums.new_empty(back.adj.num_dst, given.size(1))
            for begin, end in _tiles(total.size(0), tile_rows, of_sums.size(1), given.size(1)):
                total[begin:end] = back.tile(given, begin, end)
            return total

        grad: Tensor = self.exchange.to_owners(of_sums, of_sources)
        return grad

    def tile(self, x: Tensor, begin: int, end: int) -> Tensor:
        """Computes the sums of the rows from ``begin`` to ``end - 1``, (end - begin, width)."""
        adj = self.adj
        # The pointers are read from the device once and cached, so later passes do not wait for the device.
        place = ("fastsparse_core.tiling", begin, end)
        first, last = adj.derived(place, lambda: adj.rowptr[[begin, end]].tolist())
        rows = Adjacency(adj.rowptr[begin : end + 1] - first, adj.col[first:last], (end - begin, adj.num_src))
        scale_dst = None if self.scale_dst is None else self.scale_dst[begin:end]
        # "csr", because a tile is used once, which is not worth a conversion for the tensor cores.
        out = launch_spmm(rows, x, None, scale_dst, self.scale_src, None, "csr")
        return self.with_own(out, x[begin:end], slice(begin, end))

    def with_own(self, out: Tensor, x: Tensor, rows: slice | Tensor) -> Tensor:
        """Adds the terms of the loops of some rows, whose features are ``x``, to ``out``, in place."""
        if self.loop is None:
            return out
        weight = self.loop
        for scale in (self.scale_dst, self.scale_src):
            weight = weight if scale is None else weight * scale[rows, None]
        return torch.addcmul(out, x, weight, out=out)  # in the weight's dtype, rounded once

    def transposed(self) -> NeighbourSum:
        """The transposed sum, without loops, for gradients."""
        return NeighbourSum(self.adj.t(valued=False), self.scale_src, self.scale_dst)

    def of_rows(self, rows: Tensor) -> NeighbourSum:
        """The sum for some of the rows, int64 (num_rows,), without loops. Collective with ``part``."""
        adj, scale_src, exchange = self.adj, self.scale_src, None
        rowptr, col = select_rows(adj.rowptr, adj.col, rows)
        scale_dst = None if self.scale_dst is None else self.scale_dst[rows]
        num_src = adj.num_src
        if self.part is not None:
            col, kept, exchange = self.part.needed_sources(col)
            num_src, scale_src = kept.numel(), None if scale_src is None else scale_src[kept]
        some = Adjacency(rowptr, col, (rows.numel(), num_src))
        return NeighbourSum(some, scale_dst, scale_src, part=self.part, exchange=exchange)


def is_free_of_loops(part: Any) -> bool:
    """Returns True if no edge of the whole graph is a loop. Collective.

    Args:
        part: :class:`fastsparse_core.distributed.PartitionedAdjacency`.
    """
    rows = part.rows
    found = torch.full((1,), int(part.has_inserted_loops), dtype=torch.int32, device=part.device)
    for first, last, col in row_pieces(rows.rowptr, rows.col):
        row = expand_rows(rows.rowptr[first : last + 1] - rows.rowptr[first], col.numel()).add_(first)
        found |= (row == col).any()
    dist.all_reduce(found, dist.ReduceOp.MAX, group=part.exchange.group)
    return not bool(found)


class TiledLayer(Protocol):
    """Methods that a layer needs to run in tiles."""

    def _neighbour_sum(self, x: Tensor, edges: Any) -> NeighbourSum:
        """The sum with which the layer begins. Only the shape and the dtype of ``x`` are used.

        Raises:
            ValueError: the layer does not begin with a sum.
        """
        ...

    def _after_sum(self, sums: Tensor, x: Tensor) -> Tensor:
        """Computes the layer's result for some rows from the rows' sums and own features."""
        ...


class TiledModel:
    """A model whose calls run in tiles of rows; a plugin's ``tiled`` makes it.

    Args:
        model: called as ``model(x, edges)``.
        layers: the model's graph layers, each with the methods of `TiledLayer`.
        tile_rows: number of rows per tile; None: the number of rows that take 256 MiB at the model's widest
            layer.
        offload: if True, the sums for the backward pass are stored in host memory.
    """

    def __init__(
        self, model: Module, layers: Sequence[Any], *, tile_rows: int | None = None, offload: bool = False
    ) -> None:
        if tile_rows is not None and tile_rows < 1:
            raise ValueError(f"tile_rows: expected at least 1 row or None, got {tile_rows}")
        self.model, self.layers = model, layers
        self.tile_rows, self.offload = tile_rows, offload
        self._is_checked = False

    def __call__(self, x: Tensor, edges: Any, *, rows: Tensor | None = None) -> Tensor:
        """Computes the model's result for all nodes, or for some of them.

        Args:
            x: node features (N, F), on the device of the edges or on the host.
            edges: second argument of the model: edge_index (2, E), or an Adjacency.
            rows: nodes to compute results for, int64 (num_rows,); None: all nodes, in their order.

        Returns:
            (num_rows, C), differentiable once in the parameters and in ``x``.

        Raises:
            TypeError: ``x`` is not a floating-point matrix, ``edges`` has another type, or ``rows`` is not
                int64.
            ValueError: the model is not a chain of layers with row-wise functions between them.
            IndexError: a row is outside the graph.
        """
        if not (isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point()):
            raise TypeError(f"x: expected a floating-point matrix (num_nodes, width), got {_kind(x)}")
        if not isinstance(edges, (Tensor, Adjacency)):
            raise TypeError(f"edge_index: expected a tensor or an Adjacency, got {_kind(edges)}")
        if rows is not None:
            if not (isinstance(rows, Tensor) and rows.dtype == torch.int64 and rows.dim() == 1):
                raise TypeError(f"rows: expected int64 node indices of one dimension, got {_kind(rows)}")
            if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < x.size(0):
                raise IndexError(
                    f"rows: expected node indices from 0 to {x.size(0) - 1}, got "
                    f"{int(rows.min())} to {int(rows.max())}"
                )
        for module in self.model.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training:
                raise ValueError(
                    f"model: {type(module).__name__} in training mode needs the statistics of all rows, and "
                    "tiled() computes a tile of rows at a time; use torch.nn.LayerNorm"
                )
        run = _Run(self, x, edges, rows)
        if not self._is_checked:
            run.check(x)
            self._is_checked = True
        parameters = [each for each in self.model.parameters() if each.requires_grad]
        if torch.is_grad_enabled() and (parameters or x.requires_grad):
            out: Tensor = _Tiled.apply(run, x, *parameters)
            return out
        with run.in_its_state(), torch.no_grad():
            return run.forward(x)


class _Reached(BaseException):
    """Raised when the model reaches the layer at which the current part ends; ``x``: the layer's input."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x


class _Run:
    """One call of a `TiledModel`, forward and backward.

    Part 0 of the model begins with the model's input, and ends with the input of the first layer. Part k
    begins with the sums of layer k, and ends with the input of the next layer, or with the model's result.
    """

    def __init__(self, tiled: TiledModel, x: Tensor, edges: Any, rows: Tensor | None) -> None:
        self.model, self.layers, self.offload = tiled.model, tiled.layers, tiled.offload
        self.edges, self.num_nodes = edges, x.size(0)
        self.device: torch.device = edges.device
        self.rows = None if rows is None else rows.to(self.device)
        # The random numbers of a tile depend on this seed and on the numbers of the part and the tile, so
        # that the backward pass can draw them again.
        self.seed = int(torch.randint(2**62, ()))
        kind = self.device.type
        self.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self.called: list[Any] = []
        self._inputs: list[Tensor] = []
        self._part = self._count = 0
        self._records = self._is_whole = False
        with self.in_its_state(), torch.no_grad():
            few = x[:1].to(self.device)
            self.begins_with_layer = self._first_part(few) is few
            self._none = x[:0].to(self.device)
            out = self._call(self._none, records=True)
        if not self.called:
            raise ValueError("model: expected a model that calls at least one of its layers, got none")
        row_bytes = max(each.size(1) * each.itemsize for each in (x, out, *self._inputs))
        self.tile_rows = tiled.tile_rows or max(_TILE_BYTES // max(row_bytes, 1), 1)
        shapes = [each.new_empty(1, 1).expand(self.num_nodes, each.size(1)) for each in self._inputs]
        self.sums: list[NeighbourSum] = [
            layer._neighbour_sum(like, edges).of_this_process(like)
            for layer, like in zip(self.called, shapes, strict=True)
        ]

    # ---------------------------------------------------------------- the model, part by part

    @contextlib.contextmanager
    def in_its_state(self) -> Iterator[None]:
        """Context in which layers run in parts, with the autocast state of the call.

        It restores PyTorch's random generators and the layers' ``forward`` at its end.
        """
        cuda = [self.device] if self.device.type == "cuda" else []
        is_on, dtype = self.autocast
        # A cast that autocast caches without gradients would hide the parameter from calls that need
        # gradients.
        precision = torch.autocast(self.device.type, dtype, enabled=is_on, cache_enabled=False)
        given = {layer: layer.__dict__.get("forward") for layer in self.layers}
        with torch.random.fork_rng(cuda), precision:
            try:
                for layer in self.layers:
                    layer.__dict__["forward"] = self._forward_of(layer)
                yield
            finally:
                for layer, forward in given.items():
                    layer.__dict__.pop("forward", None)
                    if forward is not None:
                        layer.__dict__["forward"] = forward

    def _forward_of(self, layer: Any) -> Callable[..., Tensor]:
        def forward(x: Tensor, edges: Any, *args: Any, **kwargs: Any) -> Tensor:
            if edges is not self.edges or any(each is not None for each in (*args, *kwargs.values())):
                raise ValueError(
                    f"model: tiled() needs layers that are called as layer(x, edges) with the edges of the "
                    f"call, and {type(layer).__name__} got other arguments"
                )
            nth = self._count = self._count + 1
            if self._records:
                self.called.append(layer)
                self._inputs.append(x)
            elif nth == self._part + 1:
                raise _Reached(x)
            elif nth == self._part:
                own: Tensor = layer._after_sum(self._sums, self._own)
                return own
            if self._is_whole:
                self._set_seed(nth, 0)
            # Parts before the current one get tensors without rows, so they compute nothing.
            found: Tensor = layer._after_sum(x, x)
            return found

        return forward

    def _call(self, x: Tensor, *, records: bool = False) -> Tensor:
        self._count, self._records = 0, records
        try:
            found = self.model(x, self.edges)
        except _Reached as reached:
            found = reached.x
        if not isinstance(found, Tensor) or found.dim() != 2:
            raise ValueError(
                f"model: tiled() needs matrices between layers and as result, got {_kind(found)}"
            )
        return found

    def _first_part(self, x: Tensor) -> Tensor:
        self._part = 0
        return self._call(x)

    def _whole(self, x: Tensor) -> Tensor:
        """The model's result for a graph in which every node has only itself as a neighbour."""
        self._part, self._is_whole = len(self.called) + 1, True
        self._set_seed(0, 0)
        try:
            return self._call(x)
        finally:
            self._is_whole = False

    def _set_seed(self, nth: int, number: int) -> None:
        """Seeds the random generators for part ``nth`` and tile ``number``."""
        seed = (self.seed + (nth << 32) + number) % 2**63
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(seed)

    def part(self, nth: int, number: int, sums: Tensor, own: Tensor) -> Tensor:
        """Computes a part of the model for a tile.

        Args:
            nth: number of the part, from 0.
            number: number of the tile, for its random numbers.
            sums: neighbour sums (tile rows, width); for part 0, the model's input.
            own: input of the layer (tile rows, width).

        Raises:
            ValueError: the part returns another number of rows.
        """
        self._set_seed(nth, number)
        if nth == 0:
            found = self._first_part(sums)
        else:
            self._part, self._sums, self._own = nth, sums, own
            try:
                found = self._call(self._none)
            finally:
                del self._sums, self._own
        if found.size(0) != sums.size(0):
            raise ValueError(
                f"model: tiled() needs a row for every node between layers, but part {nth} of the model "
                f"returned {found.size(0)} rows for {sums.size(0)} rows"
            )
        return found

    def check(self, x: Tensor) -> None:
        """Compares parts on a few rows with parts on half of these rows, and all parts with the model.

        Args:
            x: features of the call.

        Raises:
            ValueError: a part needs more than the sums of its layer, or a row's result depends on other rows.
        """
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()  # without dropout, whose masks would differ
        try:
            with self.in_its_state(), torch.no_grad():
                for nth in range(len(self.sums) + 1):
                    self._check_part(nth)
                # Both are needed: functions between layers may be undefined for random numbers, and the
                # caller's features may be all 0.
                self._check_connections(self._none.new_empty(_ROWS_CHECKED, x.size(1)).normal_())
                self._check_connections(x[:_ROWS_CHECKED].detach().to(self.device))
        finally:
            for module, mode in modes:
                module.training = mode

    def _check_part(self, nth: int) -> None:
        like = self._none if nth == 0 else self._inputs[nth - 1]
        sums, own = (like.new_empty(_ROWS_CHECKED, like.size(1)).normal_() for _ in range(2))
        half = _ROWS_CHECKED // 2
        try:
            whole = self.part(nth, 0, sums, own)[:half]
        except RuntimeError as error:
            raise ValueError(
                f"model: tiled() needs a chain of layers, but the code after layer {nth} failed "
                f"with the result of that layer alone ({error}). Connections that skip a layer "
                "are not supported"
            ) from error
        alone = self.part(nth, 0, sums[:half], own[:half])
        if not _is_close(alone, whole, _ROUNDING):
            raise ValueError(
                "model: tiled() needs row-wise functions between layers. In part "
                f"{nth} of the model the result of a row depends on other rows, as in a "
                "normalisation over nodes; use torch.nn.LayerNorm"
            )

    def _check_connections(self, x: Tensor) -> None:
        """Compares the parts, one after the other, with the whole model.

        The comparison finds parts that read a sum or mean over all nodes from an earlier part. In
        :meth:`_check_part`, earlier parts have no rows, so such sums are 0 and means are NaN.
        """
        expected = self._whole(x)
        found = x
        for nth in range(len(self.sums) + 1):
            found = self.part(nth, 0, found, found)
        if not _is_close(found, expected, _SAME_OPERATIONS if found.itemsize > 2 else _ROUNDING):
            raise ValueError(
                "model: tiled() needs a chain of layers, but the model's result differs from that of its "
                "parts one after the other. Connections that skip a layer, and sums or means over all "
                "nodes, are not supported"
            )

    # ---------------------------------------------------------------- forward

    def forward(self, x: Tensor, kept: list[_Kept] | None = None) -> Tensor:
        """Computes the result; appends to ``kept``, for every layer, the data for the backward pass."""
        features = self._first_input(x)
        for nth in range(1, len(self.sums) + 1):
            layer = self._layer(nth, features, x, needs_gradients=kept is not None)
            whole: Tensor | None = None
            for number, (begin, end) in enumerate(_tiles(layer.num_rows, self.tile_rows)):
                tile = self.part(nth, number, *layer.compute(begin, end))
                if whole is None:
                    whole = tile.new_empty(layer.num_rows, tile.size(1))
                whole[begin:end] = tile
                del tile
            features = self.part(nth, 0, *layer.compute(0, 0)) if whole is None else whole
            layer.finish()
            if kept is not None:
                kept.append(layer)
            del layer, whole
        return features

    def _layer(self, nth: int, features: Tensor, x: Tensor, *, needs_gradients: bool) -> _Kept:
        """Makes the object that stores a layer's data for the backward pass."""
        sums, is_first = self.sums[nth - 1], nth == 1
        if nth == len(self.sums) and self.rows is not None:
            return _LastRows(sums, features, self.rows, self.tile_rows)
        if self.offload and needs_gradients:
            given = x.detach() if is_first and self.begins_with_layer else None
            return _Offloaded(sums, features, self.tile_rows, given)
        if sums.part is not None:
            is_callers = is_first and self.begins_with_layer
            return _Divided(sums, features, self.tile_rows, is_callers)
        again = (lambda: self._first_input(x)) if is_first and not self.begins_with_layer else None
        return _Recomputed(sums, features, self.tile_rows, again)

    def _first_input(self, x: Tensor) -> Tensor:
        """Computes the input of the first layer, (num_nodes, width), on the device."""
        if self.begins_with_layer:
            return x.detach().to(self.device, non_blocking=True)
        like = self._inputs[0]
        whole = like.new_empty(self.num_nodes, like.size(1))
        for number, (begin, end) in enumerate(_tiles(self.num_nodes, self.tile_rows)):
            given = x[begin:end].detach().to(self.device, non_blocking=True)
            whole[begin:end] = self.part(0, number, given, given)
        return whole

    # ---------------------------------------------------------------- backward

    def backward(
        self, grad: Tensor, x: Tensor, parameters: Sequence[Tensor], kept: list[_Kept]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Computes the gradients of the input and the parameters; empties ``kept``, to free memory early."""
        totals = _Totals(parameters)
        gradients = [grad]  # the only reference to the gradient, so that it can be overwritten or freed
        del grad
        for nth in range(len(self.sums), 0, -1):
            continues = nth > 1 or x.requires_grad or not self.begins_with_layer
            self._back(nth, kept, gradients, totals, continues=continues)
        if not self.begins_with_layer:
            self._back_to_x(x, gradients, totals)
        of_x = gradients.pop().to(x.device) if x.requires_grad else None
        return of_x, totals.result()

    def _back(
        self, nth: int, kept: list[_Kept], gradients: list[Tensor], totals: _Totals, *, continues: bool
    ) -> None:
        """Adds the parameters' gradients of a part to ``totals``.

        If ``continues`` is True, replaces the gradient of the part's result in ``gradients`` by the gradient
        of the layer's input. Otherwise, removes it.
        """
        grad, layer = gradients.pop(), kept.pop()
        of_sums: Tensor | None = None
        of_own: Tensor | None = None
        for number, (begin, end, sums, own) in enumerate(layer.tiles()):
            given = [each.detach().requires_grad_(continues) for each in (sums, own)]
            with torch.enable_grad():
                out = self.part(nth, number, *given)
            found = totals.add(out, given if continues else [], grad[begin:end])
            del out, given
            if not continues:
                continue
            if of_sums is None:
                # The gradient of the last part's result belongs to the caller; others may be overwritten.
                fits = nth < len(self.sums) and grad.shape[1] == sums.shape[1] and grad.dtype == sums.dtype
                of_sums = grad if fits else sums.new_empty(layer.num_rows, sums.size(1))
                if found[1] is not None:
                    of_own = layer.unneeded
                    of_own = own.new_empty(layer.num_rows, own.size(1)) if of_own is None else of_own
            _put(of_sums[begin:end], found[0])
            if of_own is not None:
                _put(of_own[begin:end], found[1])
            del sums, own, found
        if not continues:
            return
        like, rows, num_rows = layer.like, layer.rows, layer.num_rows
        of_layer, sums_of = layer.sums, self.sums[nth - 1]
        del grad, layer
        of_sums = like.new_empty(0, like.size(1)) if of_sums is None else of_sums
        is_added = of_own is not None and rows is None and sums_of.part is None
        if sums_of.part is not None:
            grad = of_layer.to_owners(of_sums, self.tile_rows)
        else:
            back = of_layer.transposed()
            total = of_own if is_added else like.new_empty(back.adj.num_dst, like.size(1))
            assert total is not None
            for begin, end in _tiles(total.size(0), self.tile_rows):
                tile = back.tile(of_sums, begin, end)
                if is_added:
                    tile += total[begin:end]
                total[begin:end] = tile
                del tile
            grad = total
            del total
        # Adds the other gradients of the nodes' own features: from the layer, and from loops.
        for begin, end in _tiles(num_rows, self.tile_rows):
            if sums_of.loop is None and (of_own is None or is_added):
                break
            nodes = slice(begin, end) if rows is None else rows[begin:end]
            own = torch.zeros_like(of_sums[begin:end]) if of_own is None or is_added else of_own[begin:end]
            own = sums_of.with_own(own, of_sums[begin:end], nodes).to(grad.dtype)
            if isinstance(nodes, slice):
                grad[nodes] += own
            else:
                grad.index_add_(0, nodes, own)
        gradients.append(grad)

    def _back_to_x(self, x: Tensor, gradients: list[Tensor], totals: _Totals) -> None:
        """Replaces the gradient of the first layer's input by the gradient of the model's input."""
        grad = gradients.pop()
        of_x = torch.empty(x.shape, dtype=x.dtype, device=self.device) if x.requires_grad else None
        for number, (begin, end) in enumerate(_tiles(self.num_nodes, self.tile_rows)):
            given = x[begin:end].detach().to(self.device, non_blocking=True).requires_grad_(x.requires_grad)
            with torch.enable_grad():
                out = self.part(0, number, given, given)
            found = totals.add(out, [given] if of_x is not None else [], grad[begin:end])
            if of_x is not None:
                _put(of_x[begin:end], found[0])
        if of_x is not None:
            gradients.append(of_x)


class _Totals:
    """Gradients of parameters, added over tiles in the accumulation dtype."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.sums: list[Tensor | None] = [None] * len(parameters)

    def add(self, out: Tensor, inputs: list[Tensor], grad: Tensor) -> list[Tensor | None]:
        """Adds the parameters' gradients from a tile; returns the gradients of the inputs."""
        if not out.requires_grad:
            return [None] * len(inputs)
        found = torch.autograd.grad(out, [*inputs, *self.parameters], grad, allow_unused=True)
        for nth, each in enumerate(found[len(inputs) :]):
            if each is not None:
                each = each.to(accumulation_dtype(each.dtype))
                total = self.sums[nth]
                self.sums[nth] = each if total is None else total.add_(each)
        return list(found[: len(inputs)])

    def result(self) -> list[Tensor | None]:
        """The gradients in the parameters' dtypes."""
        pairs = zip(self.sums, self.parameters, strict=True)
        return [None if total is None else total.to(of.dtype) for total, of in pairs]


class _Tiled(torch.autograd.Function):
    """A call in tiles as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, run: _Run, x: Tensor, *parameters: Tensor) -> Tensor:
        kept: list[_Kept] = []
        ctx.run, ctx.kept = run, kept
        ctx.save_for_backward(x, *parameters)
        with run.in_its_state():
            return run.forward(x, kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        if not ctx.kept:
            raise RuntimeError(
                "tiled(): the backward pass of this call has already run and freed its data; call the model "
                "again"
            )
        with ctx.run.in_its_state():
            of_x, of_parameters = ctx.run.backward(grad.contiguous(), x, parameters, ctx.kept)
        return None, of_x, *of_parameters


# ---------------------------------------------------------------- what a layer keeps for the backward pass


class _Kept:
    """Provides a layer's sums and own features tile by tile, in the forward and in the backward pass.

    Attributes:
        sums: the neighbour sum of the layer.
        rows: nodes that the layer computes, int64; None: all.
        num_rows: number of these nodes.
        tile_rows: number of rows per tile.
        like: empty tensor (0, width) with the dtype and device of the layer's input.
        unneeded: matrix (num_rows, width) whose rows are not read after the backward pass of their tile, for
            the gradients of the own features; None: there is none.
    """

    unneeded: Tensor | None = None

    def __init__(
        self, sums: NeighbourSum, features: Tensor, tile_rows: int, rows: Tensor | None = None
    ) -> None:
        self.sums, self.rows, self.tile_rows = sums, rows, tile_rows
        self.num_rows = features.size(0) if rows is None else rows.numel()
        self.like = features.new_empty(0, features.size(1))

    def compute(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Sums and own features of a tile, in the forward pass."""
        raise NotImplementedError

    def finish(self) -> None:
        """Ends the forward pass."""

    def tiles(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Yields begin, end, sums and own features of every tile, in the order of the forward pass."""
        for begin, end in _tiles(self.num_rows, self.tile_rows):
            yield begin, end, *self.compute(begin, end)


class _Recomputed(_Kept):
    """Stores the layer's input, from which the backward pass computes the sums again.

    Args:
        sums: the neighbour sum of the layer.
        features: the layer's input (num_nodes, width).
        tile_rows: number of rows per tile.
        again: function that computes the input again; None: the input is stored.
    """

    def __init__(
        self, sums: NeighbourSum, features: Tensor, tile_rows: int, again: Callable[[], Tensor] | None
    ) -> None:
        super().__init__(sums, features, tile_rows)
        self.again = (lambda: features) if again is None else again
        self.sources: Tensor | None = features

    def compute(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        assert self.sources is not None
        return self.sums.tile(self.sources, begin, end), self.sources[begin:end]

    def finish(self) -> None:
        self.sources = None

    def tiles(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        self.sources = self.again()
        yield from super().tiles()


class _Divided(_Kept):
    """Stores the sums of a partitioned graph: to compute them again, processes would exchange features.

    Args:
        sums: the neighbour sum of the layer.
        features: the layer's input (num_nodes, width).
        tile_rows: number of rows per tile.
        is_callers: whether the input is the caller's tensor.
    """

    def __init__(self, sums: NeighbourSum, features: Tensor, tile_rows: int, is_callers: bool) -> None:
        super().__init__(sums, features, tile_rows)
        self.sum, self.own = sums.of_all_rows(features, tile_rows), features
        self.unneeded = None if is_callers else features

    def compute(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        return self.sum[begin:end], self.own[begin:end]

    def finish(self) -> None:
        if not self.sums.reads_own:
            self.own = self.sum
            self.unneeded = None


class _LastRows(_Kept):
    """Stores the sums and own features of the requested rows of the last layer."""

    def __init__(self, sums: NeighbourSum, features: Tensor, rows: Tensor, tile_rows: int) -> None:
        of_rows = sums.of_rows(rows)
        super().__init__(of_rows, features, tile_rows, rows)
        self.own = features[rows]
        if sums.part is not None:
            found = of_rows.of_all_rows(features, tile_rows)
        else:
            pieces = [of_rows.tile(features, *each) for each in _tiles(rows.numel(), tile_rows)]
            found = torch.cat([self.like, *pieces])
        self.sum = sums.with_own(found, self.own, rows)

    def compute(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        return self.sum[begin:end], self.own[begin:end]


class _Offloaded(_Kept):
    """Stores sums and own features in host memory. They are copied while other tiles are computed.

    Args:
        sums: the neighbour sum of the layer.
        features: the layer's input (num_nodes, width).
        tile_rows: number of rows per tile.
        given: the input in the caller's memory, which is not copied; None: the input is copied.
    """

    def __init__(self, sums: NeighbourSum, features: Tensor, tile_rows: int, given: Tensor | None) -> None:
        super().__init__(sums, features, tile_rows)
        self.given = given
        self.read: Callable[[int, int], tuple[Tensor, Tensor]] | None = sums.reader(features, tile_rows)
        self.of_sums, self.of_own = _HostTiles(features.device), _HostTiles(features.device)

    def compute(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        assert self.read is not None
        sums, own = self.read(begin, end)
        self.of_sums.append(sums)
        if self.sums.reads_own and self.given is None:
            self.of_own.append(own)
        return sums, own

    def finish(self) -> None:
        if self.given is not None:
            self.of_own.tiles = list(self.given.split(self.tile_rows))
        self.of_sums.finish()
        self.of_own.finish()
        self.read = None

    def tiles(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        own = self.of_own.read() if self.sums.reads_own else None
        places = _tiles(self.num_rows, self.tile_rows)
        for (begin, end), sums in zip(places, self.of_sums.read(), strict=True):
            yield begin, end, sums, sums if own is None else next(own)


class _HostTiles:
    """Tiles of a matrix in page-locked memory, copied through two alternating buffers on the GPU.

    Copies run on a separate stream, so the computation does not wait for them. Tiles of 256 MiB waste no
    memory, although PyTorch rounds sizes of page-locked memory up to powers of two.
    """

    def __init__(self, device: torch.device) -> None:
        self.tiles: list[Tensor] = []
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.buffers: list[Tensor] = []
        self.copied: list[torch.cuda.Event] = []

    def append(self, tile: Tensor) -> None:
        """Copies a tile to the host."""
        if self.stream is None:
            self.tiles.append(tile.clone())
            return
        kept = torch.empty(tile.shape, dtype=tile.dtype, pin_memory=True)
        nth, stream = len(self.tiles), self.stream
        current = torch.cuda.current_stream(self.device)
        if nth < 2:
            self.buffers.append(torch.empty_like(tile, memory_format=torch.contiguous_format))
        else:
            current.wait_event(self.copied[nth - 2])
        buffer = self.buffers[nth % 2][: tile.size(0)]
        buffer.copy_(tile)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            kept.copy_(buffer, non_blocking=True)
            self.copied.append(stream.record_event())
        self.tiles.append(kept)

    def finish(self) -> None:
        """Frees the buffers after the last copies."""
        for event in self.copied[-2:]:
            torch.cuda.current_stream(self.device).wait_event(event)
        self.buffers = []

    def read(self) -> Iterator[Tensor]:
        """Yields the tiles on the device. A tile is valid until the next tile is requested."""
        if self.stream is None:
            yield from self.tiles
            return
        current = torch.cuda.current_stream(self.device)
        arrived: list[torch.cuda.Event] = []
        for nth in range(len(self.tiles) + 1):
            if nth < len(self.tiles):
                arrived.append(self._fetch(nth))
            if nth:
                current.wait_event(arrived[nth - 1])
                yield self.buffers[(nth - 1) % 2][: self.tiles[nth - 1].size(0)]

    def _fetch(self, nth: int) -> torch.cuda.Event:
        """Starts to copy tile ``nth`` to the device, into the buffer of tile ``nth - 2``."""
        assert self.stream is not None
        tile = self.tiles[nth]
        if nth < 2:
            self.buffers.append(torch.empty(tile.shape, dtype=tile.dtype, device=self.device))
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self.buffers[nth % 2][: tile.size(0)].copy_(tile, non_blocking=True)
            return self.stream.record_event()


def _tiles(num_rows: int, tile_rows: int, width: int = 1, columns: int = 1) -> Iterator[tuple[int, int]]:
    """Yields begin and end of every tile. Tiles that have only some of the columns have more rows.

    Args:
        num_rows: number of rows.
        tile_rows: number of rows of a tile with all columns.
        width: number of all columns.
        columns: number of columns of the tiles.
    """
    tile_rows = max(tile_rows * width // max(columns, 1), 1)
    for begin in range(0, num_rows, tile_rows):
        yield begin, min(begin + tile_rows, num_rows)


def _put(to: Tensor, found: Tensor | None) -> None:
    """Copies a gradient into ``to``; for None, sets ``to`` to 0."""
    if found is None:
        to.zero_()
    else:
        to.copy_(found)


def _is_close(found: Tensor, expected: Tensor, bound: float) -> bool:
    """Returns True if results differ by at most ``bound`` times the largest result; NaN equals NaN."""
    if found.shape != expected.shape:
        return False
    if not expected.numel():
        return True
    found, expected = found.float(), expected.float()
    largest = expected.nan_to_num(0.0, 0.0, 0.0).abs().max()
    is_close = (found - expected).abs() <= bound * largest
    return bool((is_close | (found == expected) | (found.isnan() & expected.isnan())).all())


def _kind(thing: object) -> str:
    if isinstance(thing, Tensor):
        return f"a tensor of shape {tuple(thing.shape)} and dtype {thing.dtype}"
    return type(thing).__name__
