"""Table of all names in DGL that are replaced; it is checked before anything is replaced.

The names are the same in DGL 2.1.0 and 1.1.3.
"""

from __future__ import annotations

from fastsparse_core.replacement import Hook, problems
from fastsparse_dgl import dataloading, device_graph
from fastsparse_dgl.compat import dgl
from fastsparse_dgl.first_calls import FIRST_CALLS
from fastsparse_dgl.graph import DGLError
from fastsparse_dgl.hooks import degrees, function_calls, operators

#: Versions of DGL that the table was made for and is tested with.
VERSIONS = ("2.1.0", "1.1.3")

_GSPMM = "gidx, op, reduce_op, lhs_data, rhs_data"
_GSDDMM = "gidx, op, lhs_data, rhs_data, lhs_target, rhs_target"
_GSPMM_HETERO = "g, op, reduce_op, lhs_len, lhs_and_rhs_tuple"
_GSDDMM_HETERO = "g, op, lhs_len, lhs_target, rhs_target, lhs_and_rhs_tuple"
_SOFTMAX = "gidx, logits, eids, norm_by"
_SOFTMAX_HETERO = "gidx, eids, norm_by, logits"

#: DGL's operators, replaced in every build of DGL.
OPERATORS: tuple[Hook, ...] = (
    Hook("dgl.backend", "gspmm", _GSPMM, operators.gspmm),
    Hook("dgl.ops.spmm", "gspmm_internal", _GSPMM, operators.gspmm),
    Hook("dgl.ops.spmm", "gspmm", "g, op, reduce_op, lhs_data, rhs_data", degrees.gspmm, wraps=True),
    Hook("dgl.ops", "gspmm", "g, op, reduce_op, lhs_data, rhs_data", degrees.gspmm, wraps=True),
    Hook("dgl.backend", "gspmm_hetero", _GSPMM_HETERO, operators.gspmm_hetero),
    Hook("dgl.ops.spmm", "gspmm_internal_hetero", _GSPMM_HETERO, operators.gspmm_hetero),
    Hook("dgl.backend", "gsddmm", _GSDDMM, operators.gsddmm),
    Hook("dgl.ops.sddmm", "gsddmm_internal", _GSDDMM, operators.gsddmm),
    Hook("dgl.backend", "gsddmm_hetero", _GSDDMM_HETERO, operators.gsddmm_hetero),
    Hook("dgl.ops.sddmm", "gsddmm_internal_hetero", _GSDDMM_HETERO, operators.gsddmm_hetero),
    Hook("dgl.backend", "edge_softmax", _SOFTMAX, operators.edge_softmax),
    Hook("dgl.ops.edge_softmax", "edge_softmax_internal", _SOFTMAX, operators.edge_softmax),
    Hook("dgl.backend", "edge_softmax_hetero", _SOFTMAX_HETERO, operators.edge_softmax_hetero),
    Hook(
        "dgl.ops.edge_softmax", "edge_softmax_hetero_internal", _SOFTMAX_HETERO, operators.edge_softmax_hetero
    ),
    Hook("dgl.core", "message_passing", "g, mfunc, rfunc, afunc", function_calls.message_passing, wraps=True),
    Hook(
        "dgl.core",
        "invoke_edge_udf",
        "graph, eid, etype, func, orig_eid",
        function_calls.invoke_edge_udf,
        wraps=True,
    ),
    Hook("dgl.backend", "segment_reduce", "op, x, offsets", operators.segment_reduce),
    Hook("dgl.backend", "scatter_add", "x, idx, m", operators.scatter_add),
    Hook("dgl.backend", "segment_mm", "A, B, seglen_A", operators.segment_mm),
    Hook("dgl.backend", "gather_mm", "A, B, idx_A, idx_B", operators.gather_mm),
    Hook(
        "dgl.heterograph_index:HeteroGraphIndex",
        "get_relation_graph",
        "self, etype",
        degrees.get_relation_graph,
        wraps=True,
    ),
)

#: Functions that make graphs on a GPU work with a DGL without CUDA.
DEVICES: tuple[Hook, ...] = (
    Hook("dgl.heterograph_index:HeteroGraphIndex", "copy_to", "self, ctx", device_graph.copy_to, wraps=True),
    Hook("dgl._ffi.function:Function", "__call__", None, device_graph.call, wraps=True),
    Hook("dgl.backend", "zerocopy_to_dgl_ndarray", "data", device_graph.to_library, wraps=True),
    Hook(
        "dgl.backend",
        "zerocopy_to_dgl_ndarray_for_write",
        "input",
        device_graph.to_library_for_write,
        wraps=True,
    ),
    Hook("dgl.backend", "zerocopy_from_dgl_ndarray", "data", device_graph.from_library, wraps=True),
    Hook("dgl.ndarray", "empty", "shape, dtype, ctx", device_graph.empty, wraps=True),
    Hook(
        "dgl.heterograph_index:HeteroGraphIndex", "pin_memory_", "self", device_graph.pin_memory_, wraps=True
    ),
    Hook("dgl.utils", "Filter", "ids", device_graph.make_filter, wraps=True),
    Hook("dgl:DGLGraph", "in_degrees", "self, v, etype", degrees.in_degrees, wraps=True),
    Hook("dgl:DGLGraph", "out_degrees", "self, u, etype", degrees.out_degrees, wraps=True),
)

#: Functions that need a graph on the CPU, or whose library code writes to tensors. They are replaced in all
#: modules of DGL.
ON_HOST = (
    ("dgl.geometry.fps", "farthest_point_sampler"),
    ("dgl.transforms.functional", "to_simple"),
    ("dgl.sampling.neighbor", "sample_etype_neighbors"),
    ("dgl.sampling.neighbor", "sample_neighbors_biased"),
    ("dgl.sampling.neighbor", "select_topk"),
    ("dgl.sampling.node2vec_randomwalk", "node2vec_random_walk"),
)


def _is_of_dgl(module: str) -> bool:
    return module == "dgl" or module.startswith("dgl.")


DEVICES += tuple(
    Hook(place, name, None, device_graph.on_host, wraps=True, holders=_is_of_dgl) for place, name in ON_HOST
)


def _is_foreign(module: str) -> bool:
    return not module.startswith("fastsparse_")


#: Loaders and samplers; they are also replaced in modules that imported them earlier.
LOADERS = tuple(
    Hook("dgl.dataloading", name, None, getattr(dataloading, name), holders=_is_foreign)
    for name in dataloading.__all__
)

#: DGL's layers with a drop-in, by name: importing the drop-ins would take as long as all other modules.
ORIGINALS = (
    "AGNNConv",
    "DotGatConv",
    "EGATConv",
    "EdgeGATConv",
    "GATConv",
    "GATv2Conv",
    "GINConv",
    "GINEConv",
    "GatedGCNConv",
    "GraphConv",
    "HeteroGraphConv",
    "PNAConv",
    "SAGEConv",
)

#: Layers that become drop-ins at their first call. DGL 1.1.3 lacks some of them.
LAYERS = tuple(
    hook
    for original in (getattr(dgl.nn, name) for name in ORIGINALS if hasattr(dgl.nn, name))
    for hook in (
        Hook(f"{original.__module__}:{original.__name__}", "__call__", None, FIRST_CALLS.call),
        Hook(
            f"{original.__module__}:{original.__name__}",
            "__reduce_ex__",
            None,
            FIRST_CALLS.reduce_ex,
            wraps=True,
        ),
    )
)


def check(hooks: tuple[Hook, ...], version: str) -> None:
    """Raises a DGLError that names every hook whose target differs from the table."""
    if found := problems(hooks):
        raise DGLError(
            f"fastsparse_dgl.enable() does not support DGL {version}: {'; '.join(found)}. Nothing was "
            f"changed. Install DGL {' or '.join(VERSIONS)}, or use the "
            "layers of fastsparse_dgl without enable()"
        )
