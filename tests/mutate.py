"""Do the tests notice a fault? Plants single faults in kernels (CPU) and Python, one at a time.

    python tests/mutate.py          all of them
    python tests/mutate.py 3 17     some of them

Works in a copy of the checkout: changes one file, builds the extension if it is C++ (objects are cached, so
one file compiles), runs the tests that are named with the fault, and puts the file back. A fault that no test
notices needs a test. Run it after a change to how the tests are cut or parametrised. It takes about five
minutes on two idle cores and is no part of ``make test``; `tests/packaging/test_mutate.py` checks that the
list still fits the code.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

CHECKOUT = Path(__file__).resolve().parents[1]
#: What the tests need of the checkout.
COPIED = (
    *("kernels", "fastsparse_pyg", "fastsparse_dgl", "fastsparse_run", "examples", "benchmarks", "tests"),
    *("setup.py", "pyproject.toml", "README.md", "LICENSE"),
)
SECONDS = 900  # after which tests count as hanging
TESTS_FAILED = 1  # pytest's exit status; others above 0 mean that it could not run them


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        what: What is wrong then, for the table.
        file: Where, from the checkout on.
        text: What stands there, exactly once.
        replacement: What is put in its place.
        tests: Tests, at least one of which must fail, as pytest names them, without parameters.
    """

    what: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]


FAULTS = (
    # ------------------------------------------------------------------------------------ kernels
    Fault(
        "the last entries of a long row are left out",
        "kernels/cpu/spmm_csr.cpp",
        "block < end; block += kEntriesPerSum) {\n    const std::int64_t block_end",
        "block == begin || block + kEntriesPerSum <= end; block += kEntriesPerSum) {\n"
        "    const std::int64_t block_end",
        ("tests/core/test_spmm.py::test_row_lengths",),
    ),
    Fault(
        "the scale of destinations is dropped in the last features",
        "kernels/cpu/spmm_csr.cpp",
        "if (args.scale_dst != nullptr) total *= static_cast<const A*>(args.scale_dst)[row];",
        "",
        ("tests/core/test_spmm.py::test_equals_reference",),
    ),
    Fault(
        "arguments by name are read where another call has them",
        "kernels/include/fastsparse/packing.h",
        "if (site.count == count && are_same(site.keywords, keywords)) return site;",
        "if (site.count == count) return site;",
        ("tests/core/test_library.py::test_arguments_by_name_in_any_order",),
    ),
    Fault(
        "both ends of a batch's edges are counted from the same kind of nodes",
        "kernels/cpu/gather_graphs.cpp",
        "field.added[outer == 1]",
        "field.added[0]",
        (
            "tests/core/test_graph_store.py"
            "::test_rows_of_another_kind_are_counted_from_the_start_of_the_batch",
        ),
    ),
    Fault(
        "a loader of stored graphs does not look at its dataset again",
        "fastsparse_pyg/loader/data_loader.py",
        " or not graphs.is_current()",
        "",
        ("tests/pyg/test_pyg_data_loader.py::test_changes_between_epochs_are_seen",),
    ),
    Fault(
        "the transposed product overwrites what it is to be added to",
        "kernels/cpu/spmm_csr_transposed.cpp",
        "std::max(col_begin, args.num_given)",
        "col_begin",
        ("tests/core/test_aggregate_linear.py::test_add_transposed_equals_reference",),
    ),
    Fault(
        "ties of the maximum go to the last entry",
        "kernels/cpu/spmm_extremum.cpp",
        "candidate > so_far",
        "candidate >= so_far",
        ("tests/core/test_spmm_gradients.py::test_ties_go_to_the_first_entry",),
    ),
    Fault(
        "softmax without subtraction of the maximum",
        "kernels/cpu/edge_softmax.cpp",
        "exponential(term - highest)",
        "exponential(term)",
        ("tests/core/test_edge_softmax.py::test_extreme_scores",),
    ),
    Fault(
        "wrong sign in the gradient of softmax",
        "kernels/cpu/edge_softmax.cpp",
        "widen(grad[at]) - sum",
        "widen(grad[at]) + sum",
        ("tests/core/test_operators.py::test_derivatives",),
    ),
    Fault(
        "the sum of weights is not rescaled where a later block has a larger maximum",
        "kernels/cpu/attention_csr.cpp",
        "sum[head] *= rescale;",
        "",
        ("tests/core/test_attention.py::test_hub_row",),
    ),
    Fault(
        "the sums of edges' features are not rescaled where a later block has a larger maximum",
        "kernels/cpu/attention_csr.cpp",
        "if (edges.in_values) scale(of_edges, rescale, edges.width);",
        "",
        ("tests/core/test_operators.py::test_matches_the_reference_in_every_dtype",),
    ),
    Fault(
        "the features of edges beyond the first 64 are left out of products with the nodes",
        "kernels/include/fastsparse/cpu_attention.h",
        "head_width, to.data() + place + a);",
        "head_width, to.data() + place);",
        ("tests/core/test_operators.py::test_matches_the_reference_for_every_shape",),
    ),
    Fault(
        "an empty row is divided by its sum",
        "kernels/cpu/attention_csr.cpp",
        "empty ? A{0} : static_cast<A>(1 / sum[head])",
        "static_cast<A>(1 / sum[head])",
        ("tests/core/test_attention.py::test_rows_without_edges_give_zero",),
    ),
    Fault(
        "the backward pass over columns drops the transposed edges",
        "kernels/cpu/attention_csr_backward.cpp",
        "keep_factor<A>(forward, block.col[i], col, head)",
        "keep_factor<A>(forward, col, block.col[i], head)",
        ("tests/core/test_attention_gradients.py::test_gradients",),
    ),
    Fault(
        "features where two vectors overlap are summed twice",
        "kernels/cpu/attention_blocks.cpp",
        "if (skip > 0) clear_lanes<A>(skip, block);",
        "",
        ("tests/core/test_attention.py::test_equals_reference",),
    ),
    Fault(
        "MaxK keeps too few of equal entries",
        "kernels/cpu/maxk.cpp",
        "ties -= keys[c] > least;",
        "ties -= keys[c] >= least;",
        ("tests/core/test_maxk.py::test_ties_go_to_the_lower_column",),
    ),
    Fault(
        "columns beyond 65,536 are not sorted",
        "kernels/cpu/compress.cpp",
        "shift == 0 || (num_minor - 1) >> shift > 0;",
        "shift == 0;",
        ("tests/core/test_adjacency.py::test_columns_of_more_than_16_bits",),
    ),
    Fault(
        "the gradient of edges' maps leaves out all groups of rows but the first",
        "kernels/cpu/edge_messages.cpp",
        "i < parts.size(); i += size) {",
        "i < static_cast<std::size_t>(size); i += size) {",
        ("tests/core/test_operators.py::test_matches_the_reference_in_every_dtype",),
    ),
    Fault(
        "the slope of a gate forgets its other half",
        "kernels/cpu/edge_messages.cpp",
        "slope = gate * (A{1} - gate);",
        "slope = gate;",
        ("tests/core/test_operators.py::test_matches_the_reference_in_every_dtype",),
    ),
    Fault(
        "variances below the smallest are not cut off",
        "kernels/cpu/multi_aggregate.cpp",
        "variance[f] <= static_cast<A>(input.min_variance) ? A{0} : std::sqrt(variance[f]);",
        "std::sqrt(variance[f]);",
        ("tests/core/test_multi_aggregate.py::test_small_variances_are_no_deviation",),
    ),
    Fault(
        "dot products of edges forget the scale of their source",
        "kernels/cpu/sddmm_csr.cpp",
        "args.scale_src != nullptr ? row_scale * static_cast<const A*>(args.scale_src)[col] : row_scale;",
        "row_scale;",
        ("tests/core/test_operators.py::test_derivatives", "tests/core/test_sddmm.py::test_equals_reference"),
    ),
    # ------------------------------------------------------------------------------------ core
    Fault(
        "the transpose ignores the caller's edge order",
        "kernels/fastsparse_core/structure/adjacency.py",
        "order if given is None else given.index_select(0, order)",
        "order",
        ("tests/core/test_adjacency.py::test_transpose",),
    ),
    Fault(
        "the transpose of a symmetric structure ignores the caller's edge order",
        "kernels/cpu/compress.cpp",
        "edge_id != nullptr ? edge_id[reverse] : static_cast<decltype(id)>(reverse)",
        "static_cast<decltype(id)>(reverse)",
        ("tests/core/test_adjacency.py::test_ids_of_a_symmetric_transpose_are_those_of_a_sort",),
    ),
    Fault(
        "a structure with the degrees of its transpose is taken for symmetric",
        "kernels/fastsparse_core/structure/adjacency.py",
        " & (row == self.col).all())",
        ")",
        ("tests/core/test_adjacency.py::test_equal_degrees_make_no_symmetric_structure",),
    ),
    Fault(
        "wrong exponent of out-degrees",
        "kernels/fastsparse_core/structure/degrees.py",
        "_power(self.out_degree(), -0.5, dtype)",
        "_power(self.out_degree(), -1.0, dtype)",
        ("tests/core/test_adjacency.py::test_degree_powers",),
    ),
    Fault(
        "the cache's latest entry serves a graph that was changed",
        "kernels/fastsparse_core/cache.py",
        " and latest[1] == stamp",
        "",
        ("tests/core/test_cache.py::test_the_latest_entry_needs_all_three_too",),
    ),
    Fault(
        "locks are not renewed after a fork",
        "kernels/fastsparse_core/locks.py",
        "after_in_child=_renew_all",
        "after_in_child=lambda: None",
        ("tests/core/test_locks.py",),
    ),
    Fault(
        "a mean with scales does not divide by the degree",
        "kernels/fastsparse_core/ops/spmm.py",
        "else scale_dst * mean",
        "else scale_dst",
        ("tests/core/test_spmm.py::test_equals_reference",),
    ),
    Fault(
        "scales are exchanged in the second derivative of a product",
        "kernels/fastsparse_core/ops/spmm.py",
        "scales = (scale_src, scale_dst) if ctx.transpose else (scale_dst, scale_src)",
        "scales = (scale_dst, scale_src)",
        ("tests/core/test_operators.py::test_derivatives",),
    ),
    Fault(
        "wrong sign in the second derivative of softmax",
        "kernels/fastsparse_core/ops/edge_softmax.py",
        "- grad * row_sums(weight * outer)",
        "+ grad * row_sums(weight * outer)",
        ("tests/core/test_operators.py::test_derivatives",),
    ),
    Fault(
        "a bias of edges' features of another width is accepted",
        "kernels/fastsparse_core/ops/edge_messages.py",
        "if edge_bias.shape != (x.size(1),):",
        "if edge_bias.dim() != 1:",
        ("tests/core/test_operators.py::test_bad_input",),
    ),
    Fault(
        "autocast lowers float64",
        "kernels/fastsparse_core/ops/_autocast.py",
        "tensor.dtype not in (dtype, torch.float64)",
        "tensor.dtype != dtype",
        ("tests/core/test_spmm.py::test_autocast_casts_features_as_a_matrix_product_does",),
    ),
    Fault(
        "rows are summed in 16 bits",
        "kernels/fastsparse_core/ops/_sum_of_rows.py",
        "return rows.sum(0) if rows.dtype is dtype else rows.sum(0, dtype=dtype)",
        "return rows.sum(0).to(dtype)",
        (
            "tests/core/test_sum_of_rows.py",
            "tests/core/test_spmm_gradients.py::test_gradient_of_a_bias_is_summed_in_its_dtype",
        ),
    ),
    Fault(
        "second derivatives take the sums of features as constant",
        "kernels/fastsparse_core/fused/aggregate_transform.py",
        "needs_weight and not transform_first and (needs_x or needs_value)",
        "needs_weight and not transform_first and needs_value",
        ("tests/core/test_aggregate_linear.py::test_double_backward",),
    ),
    Fault(
        "RGCN's result stays in autocast's dtype",
        "fastsparse_pyg/nn/rgcn_conv.py",
        "return whole.to(torch.promote_types(whole.dtype, bias.dtype))",
        "return whole",
        ("tests/pyg/test_pyg_typed.py::test_rgcn_of_few_nodes_in_16_bits",),
    ),
    # ------------------------------------------------------------------------------------ plugins
    Fault(
        "edges edited in place are not seen",
        "fastsparse_pyg/caching.py",
        'attrgetter("_version", "shape", "dtype", "device")',
        'attrgetter("ndim", "shape", "dtype", "device")',
        ("tests/pyg/test_pyg_cache.py::test_edges_edited_in_place_are_seen",),
    ),
    Fault(
        "one structure for all devices",
        "fastsparse_dgl/caching.py",
        "return _cache.lookup(host, None, device, lambda",
        "return _cache.lookup(host, None, None, lambda",
        ("tests/dgl/test_dgl_cache.py::test_every_device_has_its_own_structure",),
    ),
    Fault(
        "the graph's own self loops stay beside those of the layer",
        "fastsparse_pyg/graph.py",
        'True: "replace", BY_KERNEL: "replace_if_some"',
        'True: "append", BY_KERNEL: "append"',
        ("tests/pyg/test_pyg_every_layer.py::test_matches_the_original",),
    ),
    Fault(
        "an edited sparse matrix keeps its structure",
        "kernels/fastsparse_core/sparse_products.py",
        "    return matrix._version, pointers.data_ptr()",
        "    return 0, pointers.data_ptr()",
        ("tests/core/test_sparse_products.py::test_edits_are_seen",),
    ),
    Fault(
        "a CSC view has the structure of its CSR matrix",
        "kernels/fastsparse_core/sparse_products.py",
        "    return adj if owner.layout is matrix.layout else adj.t()",
        "    return adj",
        ("tests/core/test_sparse_products.py::test_products_and_gradients_are_those_of_the_dense_matrix",),
    ),
    Fault(
        "a product that comes again does not see an edit of its matrix",
        "kernels/fastsparse_core/sparse_products.py",
        "    if known is None or known[0]() is not matrix or matrix._version != known[1]:",
        "    if known is None or known[0]() is not matrix:",
        ("tests/core/test_sparse_products.py::test_edits_are_seen",),
    ),
    Fault(
        "rows of an edge_index share one sorted order",
        "kernels/fastsparse_core/ops/_segment.py",
        "        key.data_ptr(),",
        "        0,",
        ("tests/core/test_segment.py::test_rows_of_an_edge_index_are_sorted_once_each",),
    ),
    Fault(
        "a layer that restore() was called on becomes a drop-in again",
        "fastsparse_pyg/layer_swap.py",
        '            FIRST_CALLS.forget(module, left="restore() was called on this layer")',
        "            FIRST_CALLS.forget(module)",
        ("tests/pyg/test_pyg_enable.py::test_accelerate_and_restore_rule",),
    ),
    Fault(
        "disable() leaves names that a class inherited",
        "kernels/fastsparse_core/replacement.py",
        "            delattr(owner, name)",
        "            pass",
        ("tests/core/test_replacement.py::test_a_name_that_a_class_inherited_is_gone_afterwards",),
    ),
    Fault(
        "few edges on a GPU are new in every call",
        "fastsparse_pyg/caching.py",
        "    return _met.count(edges) <= SIGHTS and _met.previous < SIGHTS",
        "    return True",
        ("tests/pyg/test_pyg_any_layer.py::test_few_edges_on_a_gpu",),
    ),
    Fault(
        "a pruned bias of an attention layer counts nothing",
        "fastsparse_pyg/nn/attention.py",
        "            bias,\n",
        '            state["_parameters"].get("bias"),\n',
        ("tests/pyg/test_pyg_changed_parameters.py::test_changed_parameters",),
    ),
    Fault(
        "terms of several products get the whole gradient",
        "kernels/fastsparse_core/fused/propagation.py",
        "of_terms[step] = total if alpha is None else total * alpha",
        "of_terms[step] = total",
        ("tests/pyg/test_pyg_every_layer.py::test_matches_the_original",),
    ),
    Fault(
        "scaled aggregations pass their gradient on unscaled",
        "kernels/fastsparse_core/fused/principal_aggregation.py",
        "parts.append(own if factor is None else own * factor.to(own.dtype).view(-1, 1, 1, 1))",
        "parts.append(own)",
        ("tests/pyg/test_pyg_every_layer.py::test_matches_the_original",),
    ),
    Fault(
        "the gradient of GINE's features leaves out the node itself on the CPU",
        "kernels/fastsparse_core/fused/edge_messages.py",
        "kept if has_root else None",
        "None",
        ("tests/core/test_edge_layers.py::test_gine",),
    ),
    Fault(
        "RGAT's joined maps give keys the columns of queries",
        "kernels/fastsparse_core/fused/relational_attention.py",
        "by_feature @ key, by_feature @ query",
        "by_feature @ query, by_feature @ key",
        ("tests/pyg/test_pyg_typed.py::test_rgat",),
    ),
    Fault(
        "GINE with a learned eps counts the node itself twice",
        "kernels/fastsparse_core/fused/edge_messages.py",
        "root = None if eps is None else operands.q",
        "root = operands.q",
        ("tests/pyg/test_pyg_every_layer.py::test_matches_the_original",),
    ),
    Fault(
        "features of edges get no gradient through additive scores",
        "kernels/fastsparse_core/fused/attention_layer.py",
        "grad_edge = more if grad_edge is None else grad_edge.add_(more)",
        "grad_edge = torch.zeros_like(more) if grad_edge is None else grad_edge",
        ("tests/core/test_attention_layer.py::test_features_of_edges_join_on_the_cpu",),
    ),
    Fault(
        "features of edges join no values of additive attention",
        "kernels/include/fastsparse/cpu_attention.h",
        "in_values(width > 0 && args.kind != AttentionScore::kGatv2)",
        "in_values(width > 0 && args.kind == AttentionScore::kDotProduct)",
        ("tests/core/test_attention_layer.py::test_features_of_edges_join_on_the_cpu",),
    ),
    Fault(
        "a cached layer has no room for nodes that came later",
        "fastsparse_pyg/nn/propagation.py",
        "return adj.is_partitioned or adj.num_src == x.size(-2)",
        "return adj.is_partitioned or True",
        ("tests/pyg/test_pyg_spmm_convs.py::test_cached_goes_on_with_more_nodes",),
    ),
    Fault(
        "a cached layer gives its edge weights in another order",
        "fastsparse_pyg/nn/propagation.py",
        "self.value[adj.edge_id.sort().values.long()]",
        "self.value[adj.edge_id.long()]",
        ("tests/pyg/test_pyg_gcn_conv.py::test_cached_form_is_the_original_s",),
    ),
    Fault(
        "the bias is forgotten where the linear map comes first",
        "fastsparse_pyg/nn/base.py",
        "value, bias=lin.bias)",
        "value)",
        ("tests/pyg/test_pyg_every_layer.py::test_matches_the_original",),
    ),
    Fault(
        "eps does not count for the destinations of a pair",
        "fastsparse_pyg/nn/gin_conv.py",
        "out = torch.addcmul(out, 1 + eps, x_dst)",
        "out = out + x_dst",
        ("tests/pyg/test_pyg_every_layer.py::test_bipartite",),
    ),
    Fault(
        "results are not normalised",
        "fastsparse_pyg/nn/sage_conv.py",
        'F.normalize(out, p=2.0, dim=-1) if state["normalize"] else out',
        "out",
        ("tests/pyg/test_pyg_every_layer.py::test_matches_the_original",),
    ),
    Fault(
        "negative node numbers are no error of the caller's",
        "fastsparse_pyg/graph.py",
        "if low < 0 or high >= size:",
        "if high >= size:",
        ("tests/pyg/test_pyg_every_layer.py::test_index_out_of_range",),
    ),
    Fault(
        "complex numbers are taken for edges",
        "fastsparse_pyg/graph.py",
        "if edges.is_floating_point() or edges.is_complex() or not add_self_loops:",
        "if edges.is_floating_point() or not add_self_loops:",
        ("tests/pyg/test_pyg_every_layer.py::test_what_is_no_graph",),
    ),
    Fault(
        "heads are summed, not averaged",
        "fastsparse_pyg/nn/attention.py",
        "self.out_channels).mean(dim=1)",
        "self.out_channels).sum(dim=1)",
        ("tests/pyg/test_pyg_every_layer.py::test_matches_the_original",),
    ),
    Fault(
        "the mean of edge features that fills self loops counts the loop",
        "fastsparse_pyg/nn/attention.py",
        "(by_row.in_degree() - 1)",
        "by_row.in_degree()",
        ("tests/pyg/test_pyg_every_layer.py::test_matches_the_original",),
    ),
    Fault(
        'norm="left" divides by in-degrees',
        "fastsparse_dgl/nn/graph_conv.py",
        '"left": ("", "inv_out_degree"),',
        '"left": ("", "inv_degree"),',
        ("tests/dgl/test_dgl_graph_conv.py::test_parity",),
    ),
    Fault(
        "the residual takes the sources of a pair",
        "fastsparse_dgl/nn/gat_conv.py",
        "self.res_fc(destination)",
        "self.res_fc(source[: adjacency.num_dst])",
        ("tests/dgl/test_dgl_gat_conv.py::test_residual_of_a_pair",),
    ),
    Fault(
        "nodes of zero in-degree are accepted",
        "fastsparse_dgl/nn/base.py",
        "if not adjacency.is_padded and adjacency.has_empty_rows():",
        "if False:",
        ("tests/dgl/test_dgl_drop_ins.py::test_zero_in_degree_raises_dgls_kind_of_error",),
    ),
    Fault(
        "features of too many nodes are accepted",
        "fastsparse_dgl/nn/base.py",
        "if source.shape[0] != adjacency.num_src:",
        "if source.shape[0] < adjacency.num_src:",
        ("tests/dgl/test_dgl_drop_ins.py::test_wrong_number_of_rows",),
    ),
    Fault(
        "the first sources stand for the destinations of any graph",
        "fastsparse_dgl/nn/base.py",
        "if num_dst < num_src and (graph is adjacency or graph.is_block):",
        "if num_dst < num_src:",
        ("tests/dgl/test_dgl_drop_ins.py::test_bipartite_graphs_need_a_pair",),
    ),
    Fault(
        "eps is left out where the sum is no node of its own",
        "fastsparse_dgl/nn/gin_conv.py",
        "torch.addcmul(neighbour, destination, 1 + self.eps)",
        "neighbour + destination",
        ("tests/dgl/test_dgl_drop_ins.py::test_float64",),
    ),
    # ------------------------------------------------------------------------------------ examples
    Fault(
        "layers that are compared drop different numbers",
        "examples/common/training.py",
        'run {run + 1}/{recipe.runs}")\n                torch.manual_seed(seed + run)',
        'run {run + 1}/{recipe.runs}")\n                torch.seed()',
        ("tests/examples/test_example_gcn.py::test_both_layers_train_alike",),
    ),
    Fault(
        "the best epoch is chosen by the test score",
        "examples/common/training.py",
        "if result.val[-1] > best:\n            best = result.val[-1]",
        "if result.test[-1] > best:\n            best = result.test[-1]",
        ("tests/examples/test_example_gcn.py::test_the_first_epoch_with_the_best_validation_score_counts",),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What the tests said.

    Attributes:
        caught: Whether they noticed.
        by: The first test that failed, or what went wrong.
    """

    caught: bool
    by: str


class Copy:
    """A copy of the checkout in which faults are planted."""

    def __init__(self, root: Path) -> None:
        self.root = root
        unwanted = shutil.ignore_patterns("__pycache__", "results")
        for name in COPIED:
            source = CHECKOUT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=unwanted)
            else:
                shutil.copy(source, root)
        objects = CHECKOUT / "build" / "objects"
        objects.mkdir(parents=True, exist_ok=True)
        (root / "build").mkdir()
        (root / "build" / "objects").symlink_to(objects.resolve(), target_is_directory=True)
        self._env = {
            **os.environ,
            "FASTSPARSE_CUDA_ARCHS": "none",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
            "PYTHONDONTWRITEBYTECODE": "1",  # bytecode of a fault must not outlive it
            "PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels")]),
        }

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs Python in the copy, both streams in one."""
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env=self._env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
        )

    def build(self) -> None:
        """Builds the extension where it is imported from.

        Raises:
            RuntimeError: with the compiler's words.
        """
        done = self.python("setup.py", "build_ext", "--inplace")
        if done.returncode:
            raise RuntimeError(done.stdout[-4000:])

    def test(self, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Runs tests up to the first that fails."""
        return self.python("-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests)

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """The copy with one fault in it, built."""
        path = self.root / fault.file
        right = path.read_text()
        extensions = {
            built: built.read_bytes() for built in (self.root / "kernels/fastsparse_core").glob("_C*.so")
        }
        try:
            path.write_text(right.replace(fault.text, fault.replacement))
            if path.suffix in (".cpp", ".h"):
                self.build()
            yield
        finally:
            path.write_text(right)
            for built, content in extensions.items():
                built.write_bytes(content)

    def outcome(self, fault: Fault) -> Outcome:
        """Plants a fault and runs its tests."""
        try:
            with self.planted(fault):
                done = self.test(fault.tests)
        except subprocess.TimeoutExpired:
            return Outcome(True, "the tests hang")
        if done.returncode < 0:
            return Outcome(True, f"the tests crash (signal {-done.returncode})")
        failed = re.search(r"^FAILED (?:\S*?tests/)?(.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
        if done.returncode == TESTS_FAILED and failed:
            return Outcome(True, failed[1])
        return Outcome(False, "" if done.returncode == 0 else done.stdout[-2000:])


def main() -> int:
    """Plants the given faults; returns the number of faults that no test noticed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", nargs="*", type=int, help=f"which faults, from 1 to {len(FAULTS)}")
    numbers = parser.parse_args().numbers or range(1, len(FAULTS) + 1)
    if not all(1 <= number <= len(FAULTS) for number in numbers):
        parser.error(f"numbers: expected 1 to {len(FAULTS)}, got {numbers}")
    console = Console(markup=False)
    table = Table("", "fault")
    table.add_column("noticed by", overflow="fold")
    missed = 0
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as progress:
        bar = progress.add_task("build", total=len(numbers) + 1)
        copy = Copy(Path(folder))
        copy.build()
        progress.update(bar, description="the tests without a fault")
        done = copy.test(sorted({test for number in numbers for test in FAULTS[number - 1].tests}))
        if done.returncode:
            console.print(done.stdout[-4000:])
            console.print("the tests fail without any fault")
            return 1
        for number in numbers:
            fault = FAULTS[number - 1]
            progress.update(bar, advance=1, description=f"{number}: {fault.what}")
            outcome = copy.outcome(fault)
            missed += not outcome.caught
            verdict = outcome.by if outcome.caught else f"NOT caught {outcome.by}"
            table.add_row(str(number), f"{fault.file}: {fault.what}", verdict)
            console.print(f"{number:3}  {verdict}", highlight=False, soft_wrap=True)
        progress.update(bar, advance=1, description="done")
    console.print(table)
    console.print(f"{len(numbers) - missed} of {len(numbers)} faults caught")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
