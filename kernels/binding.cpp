// The module `_C`: every operator of launchers.h as a function, structures and plans as classes, and
// functions that do more than fill a struct. Tensors are converted to addresses and strides here; Python has
// checked them before.
#define FASTSPARSE_BINDING
#include <pybind11/pybind11.h>
#include <structmember.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fastsparse/attention_layer.h"
#include "fastsparse/batch_norm.h"
#include "fastsparse/cpu_pages.h"
#include "fastsparse/edge_messages.h"
#include "fastsparse/gather_graphs.h"
#include "fastsparse/group_rows.h"
#include "fastsparse/head_scores.h"
#include "fastsparse/launchers.h"
#include "fastsparse/on_device.h"
#include "fastsparse/packing.h"
#include "fastsparse/place_batch.h"
#include "fastsparse/sample_neighbors.h"
#include "fastsparse/slab_sums.h"
#include "fastsparse/sort_edges.h"
#include "fastsparse/sort_segments.h"
#include "fastsparse/spmm_extremum.h"

namespace fastsparse {

// The device on which a call runs. device < 0: the CPU, with `queue` threads; otherwise `queue` is a stream.
struct Place {
  int device;
  std::uintptr_t queue;
};
FASTSPARSE_ARGUMENTS(Place, FIELDS(device, queue));

struct Threads {
  int threads;
};
FASTSPARSE_ARGUMENTS(Threads, FIELDS(threads));

struct Device {
  int device;
};
FASTSPARSE_ARGUMENTS(Device, FIELDS(device));

// The stream or number of threads of a call. The plan that is called knows its device.
struct Queue {
  std::uintptr_t queue;
};
FASTSPARSE_ARGUMENTS(Queue, FIELDS(queue));

struct Nothing {};

// ---------------------------------------------------------------- launches

template <typename Args>
using CpuLauncher = void (*)(const Args& args, int threads);
template <typename Args>
using CudaLauncher = int (*)(const Args& args, void* stream);

void* stream_of(std::uintptr_t queue) { return reinterpret_cast<void*>(queue); }

template <typename Args, CpuLauncher<Args> kCpu>
void on_cpu(const Args& args, const Threads& where) {
  const py::gil_scoped_release released;
  kCpu(args, where.threads);
}

template <typename Args, CudaLauncher<Args> kCuda>
void on_cuda(const Args& args, const Place& place) {
  on_device(place.device, [&] { return kCuda(args, stream_of(place.queue)); });
}

template <typename Args, CpuLauncher<Args> kCpu, CudaLauncher<Args> kCuda>
void launch(const Args& args, const Place& place) {
  if (place.device < 0) {
    on_cpu<Args, kCpu>(args, {static_cast<int>(place.queue)});
  } else {
    on_cuda<Args, kCuda>(args, place);
  }
}

// The launchers of `name` for the CPU and for CUDA (launchers.h).
#define FASTSPARSE_LAUNCH(name, Args) launch<Args, &cpu::name, FASTSPARSE_OF_CUDA(name)>

// ---------------------------------------------------------------- calls from Python

// The struct that a list fills; if `List` is not a list, the struct is `List` itself.
template <typename List, typename = void>
struct ArgsOf {
  using Type = List;
};
template <typename List>
struct ArgsOf<List, std::void_t<decltype(Declared<List>::name)>> {
  using Type = typename Declared<List>::Args;
};

template <typename List>
Parameters::Part part_of() {
  if constexpr (kIsDeclared<List>) {
    return {std::begin(Declared<List>::arguments), std::end(Declared<List>::arguments)};
  } else {
    return {};
  }
}

// Sets Python's error for the current C++ exception; called in `catch (...)`.
PyObject* raised(const Parameters& parameters) {
  try {
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const CudaError& error) {
    PyErr_Format(PyExc_RuntimeError, "%s failed: %s", parameters.name(), text_of(error).c_str());
  } catch (const std::invalid_argument& error) {
    PyErr_Format(PyExc_ValueError, "%s: %s", parameters.name(), error.what());
  } catch (const std::exception& error) {
    PyErr_Format(PyExc_RuntimeError, "%s: %s", parameters.name(), error.what());
  }
  return nullptr;
}

template <typename Run>
PyObject* result_of(const Run& run) {
  if constexpr (std::is_void_v<decltype(run())>) {
    run();
    return Py_NewRef(Py_None);
  } else if constexpr (std::is_integral_v<decltype(run())>) {
    return PyLong_FromLongLong(static_cast<long long>(run()));
  } else {
    return run();
  }
}

// A function for Python. It fills the struct of `List` and then `Where`, and calls kRun with both.
template <typename List, typename Where, auto kRun>
struct Function {
  static inline Parameters* parameters = nullptr;

  static PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t count, PyObject* keywords) {
    try {
      typename ArgsOf<List>::Type args{};
      Where where{};
      parameters->read(given, count, keywords, &args, &where);
      return result_of([&] { return kRun(args, where); });
    } catch (...) {
      return raised(*parameters);
    }
  }
};

// Initial values of a method's arguments, before the arguments of the call are read.
template <typename Args, typename C>
Args begin_with(const C&) {
  return {};
}

// A method of C.
template <typename C, typename List, typename Where, auto kRun>
struct Method {
  static inline Parameters* parameters = nullptr;

  static PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* keywords) {
    try {
      const C& object = reinterpret_cast<Instance<C>*>(self)->value;
      auto args = begin_with<typename ArgsOf<List>::Type>(object);
      Where where{};
      parameters->read(given, count, keywords, &args, &where);
      return result_of([&] { return kRun(object, args, where); });
    } catch (...) {
      return raised(*parameters);
    }
  }
};

// Makes an instance of C with kMake, from the struct of `List`.
template <typename C, typename List, auto kMake>
struct Constructor {
  static inline Parameters* parameters = nullptr;

  static PyObject* call(PyObject* type, PyObject* const* given, std::size_t count, PyObject* keywords) {
    try {
      typename ArgsOf<List>::Type args{};
      parameters->read(given, PyVectorcall_NARGS(count), keywords, &args, nullptr);
      const C value = kMake(args);
      auto* of = reinterpret_cast<PyTypeObject*>(type);
      const auto made = reinterpret_cast<Instance<C>*>(of->tp_alloc(of, 0));
      if (made != nullptr) new (&made->value) C(value);
      return reinterpret_cast<PyObject*>(made);
    } catch (...) {
      return raised(*parameters);
    }
  }
};

// Describes a method or function for Python. These descriptions are never freed.
template <typename Call, typename List, typename Where = Nothing>
PyMethodDef method(const char* name, const char* result) {
  Call::parameters = new Parameters(name, part_of<List>(), part_of<Where>(), result);
  const auto call = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Call::call));
  const char* short_name = Call::parameters->doc_name();
  return {short_name, call, METH_FASTCALL | METH_KEYWORDS, Call::parameters->doc()};
}

void add(PyObject* module, const char* name, PyObject* object) {
  if (object == nullptr || PyModule_AddObject(module, name, object) < 0) throw py::error_already_set();
}

template <typename List, auto kRun, typename Where = Nothing>
void define(PyObject* module, const char* name, const char* result = "None") {
  auto* definition = new PyMethodDef(method<Function<List, Where, kRun>, List, Where>(name, result));
  const auto of = held(PyModule_GetNameObject(module));
  add(module, name, PyCFunction_NewEx(definition, nullptr, of.ptr()));
}

template <typename C>
C same(const C& args) {
  return args;
}

// Defines a class; `slots` are Python slots in addition to those of its values.
template <typename C, typename List = C, auto kMake = same<C>>
void define_class(PyObject* module, const char* name, std::vector<PyType_Slot> slots = {}) {
  using Make = Constructor<C, List, kMake>;
  static_assert(std::is_trivially_copyable_v<C>);
  Make::parameters = new Parameters(name, part_of<List>(), {}, "None");
  slots.push_back({Py_tp_doc, const_cast<char*>(Make::parameters->doc())});
  slots.push_back({0, nullptr});
  auto* full_name = new std::string("fastsparse_core._C." + std::string(name));
  PyType_Spec spec{full_name->c_str(), static_cast<int>(sizeof(Instance<C>)), 0,
                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots.data()};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  Instance<C>::type = reinterpret_cast<PyTypeObject*>(type);
  Instance<C>::type->tp_vectorcall = &Make::call;
  add(module, name, Py_NewRef(type));
}

template <typename C, typename List = C, auto kMake = same<C>>
void define_class(PyObject* module, std::vector<PyType_Slot> slots = {}) {
  define_class<C, List, kMake>(module, Declared<List>::name, std::move(slots));
}

// Reads the arguments of a struct from a tuple.
template <typename Struct>
Struct read_tuple(PyObject* items) {
  static Parameters parameters(Declared<Struct>::name, part_of<Struct>(), {}, "None");
  const auto tuple = held(PySequence_Tuple(items));
  Struct args{};
  parameters.read(PySequence_Fast_ITEMS(tuple.ptr()), PyTuple_GET_SIZE(tuple.ptr()), nullptr, &args, nullptr);
  return args;
}

// Applies `read` to every item of a sequence.
template <typename Read>
auto each(PyObject* sequence, const Read& read) {
  const auto items = held(PySequence_Fast(sequence, "expected a sequence"));
  std::vector<decltype(read(sequence))> found;
  found.reserve(PySequence_Fast_GET_SIZE(items.ptr()));
  for (Py_ssize_t nth = 0; nth < PySequence_Fast_GET_SIZE(items.ptr()); ++nth) {
    found.push_back(read(PySequence_Fast_GET_ITEM(items.ptr(), nth)));
  }
  return found;
}

constexpr Argument kItem{"item", {"", "what the stub says"}, nullptr, 0, 0, false};

Given item(PyObject* object) {
  Given given;
  given.function = "_C";
  given.object = object;
  given.argument = &kItem;
  return given;
}

std::vector<std::int64_t> integers(PyObject* sequence) {
  using Limits = std::numeric_limits<std::int64_t>;
  return each(sequence, [](PyObject* object) { return item(object).number(Limits::min(), Limits::max()); });
}

std::vector<std::uintptr_t> addresses(PyObject* sequence) {
  return each(sequence, [](PyObject* object) { return item(object).address(); });
}

template <typename T>
std::vector<T> instances(PyObject* sequence) {
  return each(sequence, [](PyObject* object) { return *item(object).instance<T>(); });
}

PyObject* tuple_of(const std::int64_t* numbers, std::size_t count) {
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(count));
  for (std::size_t nth = 0; tuple != nullptr && nth < count; ++nth) {
    PyTuple_SET_ITEM(tuple, nth, PyLong_FromLongLong(numbers[nth]));
  }
  return tuple;
}

// ---------------------------------------------------------------- spmm

enum class SpmmKernel { kCsr, kTca, kResident, kResidentTca, kHr };

// A kernel of spmm that reads CSR, with the arguments that are the same in all calls of one dtype and width.
struct SpmmPlan {
  SpmmKernel kernel;
  SpmmArgs args;
  std::int64_t num_long;  // only for kHr
  int device;
};
FASTSPARSE_ARGUMENTS(SpmmPlan, FIELDS(kernel), AS(structure, args.a), ALSO(args.split),
                     IN(args, dtype, width), AS(value_dtype, args.value.dtype), AS(heads, args.value.heads),
                     IN(args, tile), FIELDS(num_long, device));

template <>
SpmmArgs begin_with<SpmmArgs>(const SpmmPlan& plan) {
  return plan.args;
}

void run_spmm(const SpmmPlan& plan, const SpmmArgs& args, const Queue& where) {
  if (plan.kernel == SpmmKernel::kCsr) {
    FASTSPARSE_LAUNCH(spmm_csr, SpmmArgs)(args, {plan.device, where.queue});
    return;
  }
  on_device(plan.device, [&] {
#ifdef FASTSPARSE_WITH_CUDA
    void* stream = stream_of(where.queue);
    if (plan.kernel == SpmmKernel::kTca) return cuda::spmm_tca(args, stream);
    if (plan.kernel == SpmmKernel::kHr) return cuda::spmm_hr(args, plan.num_long, stream);
    return cuda::spmm_resident(args, plan.kernel == SpmmKernel::kResidentTca, stream);
#else
    return 0;
#endif
  });
}

struct AggregateLinearBackwardCall {
  AggregateLinearBackwardArgs args;
  float *grad_weight, *grad_root, *grad_bias;
};
FASTSPARSE_ARGUMENTS(AggregateLinearBackwardCall,
                     IN(args, num_rows, grad, out_width, sums, x, width, num_slabs, weights, bias),
                     FIELDS(grad_weight, grad_root, grad_bias), IN(args, num_terms));

void aggregate_linear_backward(const AggregateLinearBackwardCall& call, const Place& place) {
  const auto& args = call.args;
  const SlabSumsArgs sums{args.weights,
                          args.bias,
                          call.grad_weight,
                          call.grad_root,
                          call.grad_bias,
                          args.num_slabs,
                          args.out_width * args.width,
                          args.bias != nullptr ? args.out_width : 0};
  on_cuda<AggregateLinearBackwardArgs, FASTSPARSE_OF_CUDA(aggregate_linear_backward)>(args, place);
  on_cuda<SlabSumsArgs, FASTSPARSE_OF_CUDA(slab_sums)>(sums, place);
}

struct SegmentReduceCall {
  SegmentReduceArgs args;
  const std::int64_t* facts;  // device memory with facts about segments that the host has not read yet; null:
                              // the host knows them
};
FASTSPARSE_ARGUMENTS(SegmentReduceCall, AS(structure, args.a), ALSO(args.split), IN(args, reduction, x),
                     WIDTH(args.width), DTYPE(args.dtype), IN(args, out, extra, partial), FIELDS(facts));

void segment_reduce(const SegmentReduceCall& call, const Place& place) {
  if (call.facts == nullptr) {
    FASTSPARSE_LAUNCH(segment_reduce, SegmentReduceArgs)(call.args, place);
    return;
  }
  on_device(place.device, [&] {
#ifdef FASTSPARSE_WITH_CUDA
    return cuda::segment_reduce_unseen(call.args, call.facts, stream_of(place.queue));
#else
    return 0;
#endif
  });
}

// ---------------------------------------------------------------- attention

AttentionCsrArgs make_attention_csr(const AttentionCsrArgs& given) {
  AttentionCsrArgs args = given;
  if (args.kind == AttentionScore::kAdditive) args.head_width = 0;
  return args;
}

// The arguments of a call whose only argument is a Python object that stores all of them.
template <typename Args>
struct Object {
  Args args;
};
FASTSPARSE_ARGUMENTS(Object<AttentionCsrArgs>, FIELDS(args));
FASTSPARSE_ARGUMENTS(Object<HeadScoresArgs>, FIELDS(args));
FASTSPARSE_ARGUMENTS(Object<CompressArgs>, FIELDS(args));

template <typename Args, CpuLauncher<Args> kCpu>
void launch_object(const Object<Args>& object, const Threads& where) {
  on_cpu<Args, kCpu>(object.args, where);
}

template <>
AttentionLayerForward begin_with<AttentionLayerForward>(const AttentionLayer& layer) {
  return {layer, {}, nullptr, nullptr};
}

template <>
AttentionLayerBackward begin_with<AttentionLayerBackward>(const AttentionLayer& layer) {
  AttentionLayerBackward args{};
  args.layer = layer;
  return args;
}

template <typename Args, CpuLauncher<Args> kCpu>
void run_attention_layer(const AttentionLayer&, const Args& args, const Threads& where) {
  on_cpu<Args, kCpu>(args, where);
}

struct StackMapsCall {
  PyObject *weights, *biases;
  StackedMapsArgs args;
};
FASTSPARSE_ARGUMENTS(StackMapsCall, OBJECT(weights, "Sequence[_Memory]"), OBJECT(biases, "Sequence[_Memory]"),
                     IN(args, weight_size, bias_size, weight, bias, dtype, to_dtype));

void stack_maps(const StackMapsCall& call, const Place& place) {
  StackedMapsArgs args = call.args;
  const auto weights = addresses(call.weights), biases = addresses(call.biases);
  args.num_linears = static_cast<std::int64_t>(std::min<std::size_t>(weights.size(), kMostLinears));
  for (std::int64_t nth = 0; nth < args.num_linears; ++nth) {
    args.weights[nth] = reinterpret_cast<const void*>(weights[nth]);
    if (!biases.empty()) args.biases[nth] = reinterpret_cast<const void*>(biases.at(nth));
  }
  if (biases.empty()) args.bias_size = 0;
  on_cuda<StackedMapsArgs, FASTSPARSE_OF_CUDA(stack_maps)>(args, place);
}

// A layer's attention on CUDA, with the structure of the graph. The backward pass also needs the structure of
// the transposed graph.
struct CudaAttentionLayer {
  CudaAttentionLayerArgs args;
  long long scratch, state;  // sizes as numbers of float32
  int device;
};

struct CudaAttentionLayerCall {
  PyObject *structure, *transposed, *blocks, *transposed_blocks;
  CudaAttentionLayerArgs args;
  bool backward;
  int device;
};
FASTSPARSE_ARGUMENTS(CudaAttentionLayerCall, OBJECT(structure, "CsrStructure | None"),
                     OBJECT(transposed, "CsrStructure | None"), OBJECT(blocks, "BsbStructure | None"),
                     OBJECT(transposed_blocks, "BsbStructure | None"),
                     IN(args, num_slots, num_slots_t, att_rows, num_values, kind, dtype, num_nodes, heads,
                        head_width, num_linears, scale, num_parts),
                     FIELDS(backward, device));

CudaAttentionLayer make_cuda_attention_layer(const CudaAttentionLayerCall& call) {
  CudaAttentionLayer layer{call.args, 0, 0, call.device};
  auto& args = layer.args;
  if (call.structure != Py_None) {
    const auto& structure = *item(call.structure).instance<CsrStructure>();
    args.a = structure.a, args.split = structure.split;
  }
  if (call.transposed != Py_None) {
    const auto& transposed = *item(call.transposed).instance<CsrStructure>();
    args.a_t = transposed.a, args.split_t = transposed.split;
  }
  args.on_blocks = call.blocks != Py_None;
  if (args.on_blocks) args.blocks = *item(call.blocks).instance<BsbView>();
  if (call.transposed_blocks != Py_None) args.blocks_t = *item(call.transposed_blocks).instance<BsbView>();
#ifdef FASTSPARSE_WITH_CUDA
  layer.scratch = cuda::attention_layer_scratch(args, call.backward);
  layer.state = cuda::attention_layer_state(args);
#endif
  return layer;
}

template <>
CudaAttentionLayerArgs begin_with<CudaAttentionLayerArgs>(const CudaAttentionLayer& layer) {
  return layer.args;
}

void run_cuda_attention_layer(const CudaAttentionLayer& layer, const CudaAttentionLayerArgs& args,
                              const Queue& where) {
  on_cuda<CudaAttentionLayerArgs, FASTSPARSE_OF_CUDA(attention_layer)>(args, {layer.device, where.queue});
}

void run_cuda_attention_layer_backward(const CudaAttentionLayer& layer, const CudaAttentionLayerArgs& args,
                                       const Queue& where) {
  on_cuda<CudaAttentionLayerArgs, FASTSPARSE_OF_CUDA(attention_layer_backward)>(args,
                                                                                {layer.device, where.queue});
}

// ---------------------------------------------------------------- edges into structures

std::size_t compress_bytes(const CompressArgs& args, int device) {
  std::size_t bytes = 0;
  if (device >= 0) {
    on_device(device, [&] {
#ifdef FASTSPARSE_WITH_CUDA
      bytes = cuda::compress_scratch_bytes(args);
#endif
      return 0;
    });
  }
  (void)args;
  return bytes;
}

std::size_t compress_scratch_bytes(const Object<CompressArgs>& object, const Device& where) {
  return compress_bytes(object.args, where.device);
}

struct CompressCall {
  CompressArgs args;
  char* scratch;
  std::size_t scratch_bytes;
};
FASTSPARSE_ARGUMENTS(CompressCall, FIELDS(args, scratch, scratch_bytes));

void compress(const CompressCall& call, const Place& place) {
  if (place.device < 0) {
    const py::gil_scoped_release released;
    cpu::compress(call.args);
    return;
  }
  on_device(place.device, [&] {
#ifdef FASTSPARSE_WITH_CUDA
    return cuda::compress(call.args, call.scratch, call.scratch_bytes, stream_of(place.queue));
#else
    return 0;
#endif
  });
}

// The facts that `inspect` or `sort_edges` wrote. On CUDA, the function waits for the device.
template <int kCount>
PyObject* read_facts(const std::int64_t* written, const Place& place) {
  std::int64_t facts[kCount];
  if (place.device < 0) {
    std::copy_n(written, kCount, facts);
  } else {
    const py::gil_scoped_release released;
    on_device(place.device, [&] {
#ifdef FASTSPARSE_WITH_CUDA
      const auto stream = static_cast<cudaStream_t>(stream_of(place.queue));
      check(cudaMemcpyAsync(facts, written, sizeof facts, cudaMemcpyDeviceToHost, stream));
      return static_cast<int>(cudaStreamSynchronize(stream));
#else
      return 0;
#endif
    });
  }
  return tuple_of(facts, kCount);
}

// Inspects edges and returns the facts. On CUDA, `given.facts` must have space for them.
PyObject* inspect(const InspectArgs& given, const Place& place) {
  InspectArgs args = given;
  std::int64_t facts[kNumEdgeFacts];
  if (place.device < 0) args.facts = facts;
  FASTSPARSE_LAUNCH(inspect, InspectArgs)(args, place);
  return read_facts<kNumEdgeFacts>(args.facts, place);
}

struct SortWorkspaceCall {
  std::int64_t num_edges, num_rows, longest;
};
FASTSPARSE_ARGUMENTS(SortWorkspaceCall, FIELDS(num_edges, num_rows, longest));

// Number of bytes of a SortWorkspace, and the offsets of split_ptr and split_row.
PyObject* sort_workspace(const SortWorkspaceCall& call, const Nothing&) {
  const SortWorkspace places(nullptr, call.num_edges, call.num_rows, call.longest);
  const std::int64_t found[] = {reinterpret_cast<std::int64_t>(places.end),
                                reinterpret_cast<std::int64_t>(places.split_ptr),
                                reinterpret_cast<std::int64_t>(places.split_row)};
  return tuple_of(found, 3);
}

struct SortEdgesCall {
  SortEdgesArgs args;
  char* workspace;
};
FASTSPARSE_ARGUMENTS(SortEdgesCall, IN(args.found, row, col, index_is_64bit, num_edges, num_rows),
                     IN(args, num_cols, longest), IN(args.found, rowptr, col_out), IN(args, order),
                     IN(args.found, inv_degree), IN(args, inv_sqrt_degree), FIELDS(workspace));

// Sorts few edges and returns their facts.
PyObject* sort_edges(const SortEdgesCall& call, const Place& place) {
  SortEdgesArgs args = call.args;
  InspectArgs& found = args.found;
  std::int64_t facts[kNumSortFacts];
  const SortWorkspace places(call.workspace, found.num_edges, found.num_rows, args.longest);
  found.square = found.num_rows == args.num_cols;
  found.slices = reinterpret_cast<RowSlice*>(call.workspace);
  found.facts = place.device < 0 ? facts : reinterpret_cast<std::int64_t*>(places.facts);
  args.split_ptr = reinterpret_cast<std::int64_t*>(places.split_ptr);
  args.sums = reinterpret_cast<std::uint64_t*>(places.sums);
  args.split_row = reinterpret_cast<std::int32_t*>(places.split_row);
  args.scratch = reinterpret_cast<std::int32_t*>(places.scratch);
  FASTSPARSE_LAUNCH(sort_edges, SortEdgesArgs)(args, place);
  return read_facts<kNumSortFacts>(found.facts, place);
}

std::size_t round_up(std::size_t bytes, std::size_t step) { return (bytes + step - 1) / step * step; }

struct TransposeCall {
  const std::int64_t* rowptr;
  const std::int32_t* col;
  std::int64_t num_rows, num_cols, num_edges;
  std::int64_t* colptr;
  std::int32_t* row_out;
  char* order;  // position of each entry before the sort; null: not stored
  char* scratch;
  std::size_t scratch_bytes;

  bool order_is_64bit() const { return num_edges > std::numeric_limits<std::int32_t>::max(); }
  std::size_t row_bytes() const { return round_up(num_edges * sizeof(std::int32_t), 256); }
  std::size_t order_bytes() const { return round_up(num_edges * (order_is_64bit() ? 8 : 4), 256); }

  CompressArgs sort(const void* row, void* order_out) const {
    return {col,   row,    false,   num_edges, num_cols,        num_rows,
            false, colptr, row_out, order_out, order_is_64bit()};
  }
};
FASTSPARSE_ARGUMENTS(TransposeCall, FIELDS(rowptr, col, num_rows, num_cols, num_edges, colptr, row_out, order,
                                           scratch, scratch_bytes));

struct TransposeBytesCall {
  TransposeCall sizes;
  bool keeps_order;
};
FASTSPARSE_ARGUMENTS(TransposeBytesCall, IN(sizes, num_rows, num_cols, num_edges), FIELDS(keeps_order));

// Size of the scratch of `transpose`: the row of every entry, the order if the caller does not need it, and
// the scratch of the sort.
std::size_t transpose_scratch_bytes(const TransposeBytesCall& call, const Device& where) {
  char any;
  const std::size_t order = call.keeps_order || where.device < 0 ? 0 : call.sizes.order_bytes();
  return call.sizes.row_bytes() + order + compress_bytes(call.sizes.sort(nullptr, &any), where.device);
}

// Sorts the entries of compressed rows by column, then by row.
void transpose(const TransposeCall& call, const Place& place) {
  auto* row = reinterpret_cast<std::int32_t*>(call.scratch);
  const ExpandRowsArgs rows{call.rowptr, call.num_rows, call.num_edges, row};
  FASTSPARSE_LAUNCH(expand_rows, ExpandRowsArgs)(rows, place);
  std::size_t used = call.row_bytes();
  char* order = call.order;
  if (order == nullptr && place.device >= 0) {  // the radix sort needs the order in any case
    order = call.scratch + used;
    used += call.order_bytes();
  }
  compress({call.sort(row, order), call.scratch + used, call.scratch_bytes - used}, place);
}

struct NumRowsCall {
  std::int64_t num_rows;
};
FASTSPARSE_ARGUMENTS(NumRowsCall, FIELDS(num_rows));

template <std::int64_t (*kCount)(std::int64_t num_rows)>
std::int64_t count(const NumRowsCall& call, const Nothing&) {
  if (kCount == nullptr) throw_without_cuda();
  return kCount(call.num_rows);
}

// An index that a device is sorting; the host can wait for the result later.
struct SegmentSort {
  int device;
  std::int64_t* words;
  void* event;
};

struct SegmentSortCall {
  SortSegmentsArgs args;
  void* scratch;
  std::size_t scratch_bytes;
  Place place;
};
FASTSPARSE_ARGUMENTS(SegmentSortCall,
                     IN(args, index, index_is_64bit, num_rows, num_segments, longest, rowptr, order, slices,
                        split_row, split_ptr, facts),
                     FIELDS(scratch, scratch_bytes), IN(place, device, queue));

#ifdef FASTSPARSE_WITH_CUDA
// A few words of host memory that a device can write, and an event of that device. They are reused, because
// the driver takes longer to create them than to sort an index.
struct HostWords {
  std::int64_t* words = nullptr;
  cudaEvent_t event = nullptr;

  static HostWords take(int device) {
    {
      const std::lock_guard<std::mutex> lock(mutex());
      auto& kept = of_device(device);
      if (!kept.empty()) {
        const HostWords last = kept.back();
        kept.pop_back();
        return last;
      }
    }
    HostWords made;
    check(cudaHostAlloc(reinterpret_cast<void**>(&made.words), kNumSegmentFacts * sizeof *made.words,
                        cudaHostAllocMapped));
    check(cudaEventCreateWithFlags(&made.event, cudaEventDisableTiming));
    return made;
  }
  void keep(int device) const {
    const std::lock_guard<std::mutex> lock(mutex());
    of_device(device).push_back(*this);
  }

 private:
  static std::mutex& mutex() {
    static auto& mutex = *new std::mutex;  // never destroyed, because the driver may be shut down before
    return mutex;
  }
  static std::vector<HostWords>& of_device(int device) {
    static auto& all = *new std::map<int, std::vector<HostWords>>;
    return all[device];
  }
};

#endif

SegmentSort sort_segments([[maybe_unused]] const SegmentSortCall& call) {
#ifdef FASTSPARSE_WITH_CUDA
  SortSegmentsArgs args = call.args;
  const int device = call.place.device;
  const DeviceGuard guard(device);
  const auto stream = static_cast<cudaStream_t>(stream_of(call.place.queue));
  cudaStreamCaptureStatus status;
  check(cudaStreamIsCapturing(stream, &status));
  if (status != cudaStreamCaptureStatusNone) check(cudaErrorStreamCaptureUnsupported);
  // Words of a failed sort are not reused, because one of its kernels may still write to them.
  const HostWords host = HostWords::take(device);
  args.host_facts = host.words;
  check(cuda::sort_segments(args, call.scratch, call.scratch_bytes, stream));
  check(cudaEventRecord(host.event, stream));
  return {device, host.words, host.event};
#else
  throw_without_cuda();
#endif
}

void free_segment_sort(PyObject* self) {
#ifdef FASTSPARSE_WITH_CUDA
  const SegmentSort& sort = reinterpret_cast<Instance<SegmentSort>*>(self)->value;
  const auto event = static_cast<cudaEvent_t>(sort.event);
  // Words that a kernel may still write to must not be reused.
  if (cudaEventSynchronize(event) == cudaSuccess) HostWords{sort.words, event}.keep(sort.device);
#endif
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// Waits for the device and returns the facts.
PyObject* segment_facts(const SegmentSort& sort, const Nothing&, const Nothing&) {
  on_device(sort.device, [&] {
#ifdef FASTSPARSE_WITH_CUDA
    const py::gil_scoped_release released;
    return static_cast<int>(cudaEventSynchronize(static_cast<cudaEvent_t>(sort.event)));
#else
    return 0;
#endif
  });
  return Py_BuildValue("(LLNL)", static_cast<long long>(sort.words[kCutSegments]),
                       static_cast<long long>(sort.words[kSegmentSlots]),
                       PyBool_FromLong(sort.words[kIndexDescends] != 0),
                       static_cast<long long>(sort.words[kEntriesInRange]));
}

struct SegmentSortBytesCall {
  std::int64_t num_rows, num_segments;
};
FASTSPARSE_ARGUMENTS(SegmentSortBytesCall, FIELDS(num_rows, num_segments));

std::size_t num_segment_sort_bytes([[maybe_unused]] const SegmentSortBytesCall& call, const Device& where) {
  std::size_t bytes = 0;
  on_device(where.device, [&] {
#ifdef FASTSPARSE_WITH_CUDA
    SortSegmentsArgs args{};
    args.num_rows = call.num_rows;
    args.num_segments = call.num_segments;
    bytes = cuda::sort_segments_scratch_bytes(args);
#endif
    return 0;
  });
  return bytes;
}

// ---------------------------------------------------------------- batches

struct SampleCall {
  SampleArgs args;
  PyObject *first_nodes, *steps;
};
FASTSPARSE_ARGUMENTS(SampleCall, IN(args, table, sizes, num_sizes, seed),
                     OBJECT(first_nodes, "Sequence[FirstNodes]"), OBJECT(steps, "Sequence[SampleStep]"));

void sample_neighbors(const SampleCall& call, const Place& place) {
  const auto first_nodes = instances<FirstNodes>(call.first_nodes);
  const auto steps = instances<SampleStep>(call.steps);
  SampleArgs args = call.args;
  args.first_nodes = first_nodes.data();
  args.num_lists = static_cast<int>(first_nodes.size());
  args.steps = steps.data();
  args.num_steps = static_cast<int>(steps.size());
  FASTSPARSE_LAUNCH(sample_neighbors, SampleArgs)(args, place);
}

struct PlaceBatchCall {
  PyObject *nodes, *edges, *sources, *targets, *tensors;
  PlaceBatchArgs args;
};
#define FASTSPARSE_HOPS "tuple[Sequence[int], Sequence[int]]"
FASTSPARSE_ARGUMENTS(PlaceBatchCall, OBJECT(nodes, FASTSPARSE_HOPS), OBJECT(edges, FASTSPARSE_HOPS),
                     OBJECT(sources, FASTSPARSE_HOPS), OBJECT(targets, FASTSPARSE_HOPS),
                     IN(args, node_mask, edge_mask, node_ends, edge_ends, edge_index, edge_index_out, padding,
                        edge_index_is_64bit),
                     OBJECT(tensors, "Sequence[tuple[Tensor, Tensor, int, int, bool, bool]]"));

// Where the hops begin in the padded memory, and where they end in the batch.
HopRows hop_rows(PyObject* hops) {
  const auto both = each(hops, integers);
  if (both.size() != 2 || both[1].size() > kMostHops || both[0].size() != both[1].size() + 1) {
    throw std::invalid_argument("expected at most " + std::to_string(kMostHops) + " hops");
  }
  HopRows rows{static_cast<int>(both[1].size()), {}, {}};
  std::copy(both[0].begin(), both[0].end(), rows.start);
  std::copy(both[1].begin(), both[1].end(), rows.end);
  return rows;
}

void place_batch(const PlaceBatchCall& call, const Place& place) {
  PlaceBatchArgs args = call.args;
  args.nodes = hop_rows(call.nodes);
  args.edges = hop_rows(call.edges);
  args.sources = hop_rows(call.sources);
  args.targets = hop_rows(call.targets);
  const auto tensors = each(call.tensors, read_tuple<PlacedRows>);
  std::size_t done = 0;
  do {
    args.num_tensors = static_cast<int>(std::min<std::size_t>(tensors.size() - done, kMostPlaced));
    std::copy_n(tensors.begin() + static_cast<std::ptrdiff_t>(done), args.num_tensors, args.tensor);
    done += args.num_tensors;
    FASTSPARSE_LAUNCH(place_batch, PlaceBatchArgs)(args, place);
    args.edge_index_out = nullptr;
  } while (done < tensors.size());
}

// Arguments of plan_graphs:
//   - index: positions of the batch's graphs; negative ones count from the end. None: `positions` has the
//     `num_graphs` positions.
//   - graph_at: number of the graph at each of `num_positions` positions; null: the position itself.
//   - pointers: one per kind of rows, on the host.
struct PlanGraphsCall {
  PyObject* index;
  const std::int64_t* positions;
  std::int64_t num_graphs;
  const std::int64_t* graph_at;
  std::int64_t num_positions;
  PyObject* pointers;
  std::int64_t* table;
};
FASTSPARSE_ARGUMENTS(PlanGraphsCall, OBJECT(index, "Sequence[int] | None"),
                     FIELDS(positions, num_graphs, graph_at, num_positions),
                     OBJECT(pointers, "Sequence[Tensor]"), FIELDS(table));

// Writes the table of a batch (gather_graphs.h), and returns the batch's number of rows of every kind.
PyObject* plan_graphs(const PlanGraphsCall& call, const Nothing&) {
  std::vector<std::int64_t> chosen(call.positions, call.positions + (call.positions ? call.num_graphs : 0));
  if (call.positions == nullptr) chosen = integers(call.index);
  const auto num_graphs = static_cast<std::int64_t>(chosen.size());
  for (std::int64_t& position : chosen) {
    const std::int64_t from_start = position < 0 ? position + call.num_positions : position;
    if (from_start < 0 || from_start >= call.num_positions) {
      PyErr_Format(PyExc_IndexError, "index: expected positions below %lld, got %lld",
                   static_cast<long long>(call.num_positions), static_cast<long long>(position));
      throw py::error_already_set();
    }
    position = call.graph_at == nullptr ? from_start : call.graph_at[from_start];
  }
  std::vector<std::int64_t> totals;
  std::int64_t* first = call.table;
  for (const std::uintptr_t address : addresses(call.pointers)) {
    const auto* pointer = reinterpret_cast<const std::int64_t*>(address);
    std::int64_t* source = first + num_graphs + 1;
    std::int64_t total = 0;
    for (std::int64_t nth = 0; nth < num_graphs; ++nth) {
      const std::int64_t graph = chosen[nth];
      first[nth] = total;
      source[nth] = pointer[graph];
      total += pointer[graph + 1] - pointer[graph];
    }
    first[num_graphs] = total;
    source[num_graphs] = 0;
    totals.push_back(total);
    first = source + num_graphs + 1;
  }
  return tuple_of(totals.data(), totals.size());
}

// Arguments of gather_graphs:
//   - fields: tensors of the dataset, each as a tuple of `GraphField`'s arguments.
//   - table: on the batch's device.
//   - totals: the result of `plan_graphs`.
struct GatherGraphsCall {
  PyObject *fields, *totals;
  const std::int64_t* table;
  std::int64_t num_graphs;
  PyObject* out;
};
FASTSPARSE_ARGUMENTS(GatherGraphsCall,
                     OBJECT(fields, "Sequence[tuple[_Memory, int, int, int, int, int, int, int]]"),
                     OBJECT(totals, "Sequence[int]"), FIELDS(table, num_graphs),
                     OBJECT(out, "Sequence[Tensor]"));

void gather_graphs(const GatherGraphsCall& call, const Place& place) {
  auto fields = each(call.fields, read_tuple<GraphField>);
  const auto totals = integers(call.totals);
  const auto out = addresses(call.out);
  for (std::size_t nth = 0; nth < fields.size(); ++nth) {
    fields[nth].to = reinterpret_cast<void*>(out.at(nth));
    fields[nth].to_rows = totals.at(fields[nth].rows);
  }
  GatherGraphsArgs args{};
  args.table = call.table;
  args.num_graphs = call.num_graphs;
  for (std::size_t done = 0; done < fields.size(); done += args.num_fields) {
    args.num_fields = static_cast<int>(std::min<std::size_t>(fields.size() - done, kMostGathered));
    std::copy_n(fields.begin() + static_cast<std::ptrdiff_t>(done), args.num_fields, args.field);
    FASTSPARSE_LAUNCH(gather_graphs, GatherGraphsArgs)(args, place);
  }
}

struct HoldSameCall {
  PyObject *containers, *values;
};
FASTSPARSE_ARGUMENTS(HoldSameCall, OBJECT(containers, "Sequence[dict[Any, Any] | list[Any]]"),
                     OBJECT(values, "list[Any]"));

// Tells if `values` are the same objects as those in the containers, one container after another. The objects
// of a large dataset are not in the caches, so they are prefetched.
PyObject* hold_same(const HoldSameCall& call, const Nothing&) {
  constexpr Py_ssize_t kAhead = 8;
  const auto containers = held(PySequence_Fast(call.containers, "expected a sequence"));
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(containers.ptr());
  PyObject** items = PySequence_Fast_ITEMS(containers.ptr());
  if (!PyList_Check(call.values)) throw std::invalid_argument("values: expected a list");
  const Py_ssize_t num_values = PyList_GET_SIZE(call.values);
  PyObject** values = PySequence_Fast_ITEMS(call.values);
  Py_ssize_t at = 0;
  for (Py_ssize_t nth = 0; nth < count; ++nth) {
    if (nth + 2 * kAhead < count) __builtin_prefetch(items[nth + 2 * kAhead]);
    if (nth + kAhead < count && PyDict_Check(items[nth + kAhead])) {
      const void* entries = reinterpret_cast<PyDictObject*>(items[nth + kAhead])->ma_keys;
      __builtin_prefetch(entries);
      __builtin_prefetch(static_cast<const char*>(entries) + 64);
    }
    if (PyList_Check(items[nth])) {
      const Py_ssize_t length = PyList_GET_SIZE(items[nth]);
      if (length > num_values - at ||
          !std::equal(values + at, values + at + length, PySequence_Fast_ITEMS(items[nth]))) {
        return Py_NewRef(Py_False);
      }
      at += length;
      continue;
    }
    PyObject *key, *value;
    Py_ssize_t place = 0;
    while (PyDict_Next(items[nth], &place, &key, &value)) {
      if (at == num_values || value != values[at]) return Py_NewRef(Py_False);
      ++at;
    }
  }
  return PyBool_FromLong(at == num_values);
}

struct GatherRowsOfHostCall {
  const void *table, *index;
  char *staging, *out;
  std::int64_t num_rows, row_bytes;
  int threads;
  std::int64_t piece;
};
FASTSPARSE_ARGUMENTS(GatherRowsOfHostCall,
                     FIELDS(table, index, staging, out, num_rows, row_bytes, threads, piece));

// Gathers rows of host memory with host threads. With a device, the threads write to page-locked memory, and
// every piece is sent to the device as soon as it is full.
void gather_rows_of_host(const GatherRowsOfHostCall& call, const Place& place) {
  const bool sends = place.device >= 0;
  const GatherRowsArgs args{call.table,
                            static_cast<const std::int64_t*>(call.index),
                            sends ? call.staging : call.out,
                            call.num_rows,
                            call.row_bytes,
                            call.row_bytes,
                            nullptr,
                            0,
                            nullptr,
                            nullptr};
  const py::gil_scoped_release released;
  if (!sends) {
    cpu::gather_rows(args, call.threads, call.piece, false, nullptr);
    return;
  }
  on_device(place.device, [&] {
    std::atomic<int> code{0};
#ifdef FASTSPARSE_WITH_CUDA
    cpu::gather_rows(args, call.threads, call.piece, true, [&](std::int64_t first, std::int64_t last) {
      const std::int64_t begin = first * call.row_bytes;
      const int found = cuda::send(call.out + begin, call.staging + begin, (last - first) * call.row_bytes,
                                   stream_of(place.queue));
      if (found != 0) code = found;
    });
#endif
    return code.load();
  });
}

// ---------------------------------------------------------------- the rest

struct PreferHugePagesCall {
  void* out;
  std::int64_t bytes;
  bool collapse;
};
FASTSPARSE_ARGUMENTS(PreferHugePagesCall, FIELDS(out, bytes, collapse));

void prefer_huge_pages(const PreferHugePagesCall& call, const Nothing&) {
  cpu::prefer_huge_pages(call.out, call.bytes, call.collapse);
}

struct KnowDtypesCall {
  PyObject* dtypes;
};
FASTSPARSE_ARGUMENTS(KnowDtypesCall, OBJECT(dtypes, "Sequence[torch.dtype]"));

void know_dtypes(const KnowDtypesCall& call, const Nothing&) {
  known_dtypes() = each(call.dtypes, [](PyObject* dtype) { return Py_NewRef(dtype); });
}

PyObject* build_info(const Nothing&, const Nothing&) {
#ifdef FASTSPARSE_WITH_CUDA
  const char* archs = FASTSPARSE_CUDA_ARCHS;
  const int version = CUDART_VERSION;
#else
  const char* archs = "";
  const int version = 0;
#endif
#ifdef _OPENMP
  PyObject* openmp = Py_True;
#else
  PyObject* openmp = Py_False;
#endif
#ifdef __VERSION__
  const char* compiler = __VERSION__;
#else
  const char* compiler = "unknown";
#endif
  return Py_BuildValue("{s:O,s:s,s:i,s:O,s:s}", "cuda", archs[0] != '\0' ? Py_True : Py_False, "cuda_archs",
                       archs, "cuda_version", version, "openmp", openmp, "compiler", compiler);
}

// ---------------------------------------------------------------- the module

template <typename Definition>
void* keep(std::vector<Definition> definitions) {
  definitions.push_back({});
  return (new std::vector<Definition>(std::move(definitions)))->data();
}

template <typename C, typename List, typename Where, auto kRun>
PyMethodDef method_of(const char* name, const char* result = "None") {
  return method<Method<C, List, Where, kRun>, List, Where>(name, result);
}

void define_all(PyObject* m) {
#define FASTSPARSE_DEFINE_BOTH(name, Args) define<Args, FASTSPARSE_LAUNCH(name, Args), Place>(m, #name);
#define FASTSPARSE_DEFINE_CPU(name, Args) define<Args, on_cpu<Args, &cpu::name>, Threads>(m, #name);
#define FASTSPARSE_DEFINE_CUDA(name, Args) \
  define<Args, on_cuda<Args, FASTSPARSE_OF_CUDA(name)>, Place>(m, #name);

  define<KnowDtypesCall, know_dtypes>(m, "know_dtypes");
  define<Nothing, build_info>(m, "build_info", "dict[str, bool | int | str]");
  define<PreferHugePagesCall, prefer_huge_pages>(m, "prefer_huge_pages");

  define_class<CsrStructure>(m);
  define_class<BsbView>(m);
  define_class<RowPanelsView>(m);
  define_class<CompressArgs>(m);
  define<Object<CompressArgs>, compress_scratch_bytes, Device>(m, "compress_scratch_bytes", "int");
  define<CompressCall, compress, Place>(m, "compress");
  define<InspectArgs, inspect, Place>(m, "inspect", "tuple[int, ...]");
  define<SortWorkspaceCall, sort_workspace>(m, "sort_workspace", "tuple[int, int, int]");
  define<SortEdgesCall, sort_edges, Place>(m, "sort_edges", "tuple[int, ...]");
  define<TransposeBytesCall, transpose_scratch_bytes, Device>(m, "transpose_scratch_bytes", "int");
  define<TransposeCall, transpose, Place>(m, "transpose");

  define_class<SpmmPlan>(
      m,
      {{Py_tp_methods, keep<PyMethodDef>({method_of<SpmmPlan, SpmmCall, Queue, run_spmm>("SpmmPlan.run")})}});
  define<SegmentReduceCall, segment_reduce, Place>(m, "segment_reduce");
  define<AggregateLinearBackwardCall, aggregate_linear_backward, Place>(m, "aggregate_linear_backward");

  define_class<AdditiveAttentionInput>(m);
  define_class<Gatv2AttentionInput>(m);
  define_class<AttentionBsbInput>(m);
  define_class<EdgeAttentionInput>(m);
  define_class<AttentionCsrArgs, AttentionCsrArgs, make_attention_csr>(m);
  define<Object<AttentionCsrArgs>, launch_object<AttentionCsrArgs, &cpu::attention_csr>, Threads>(
      m, "attention_csr");
  define_class<HeadScoresArgs>(m);
  define<Object<HeadScoresArgs>, launch_object<HeadScoresArgs, &cpu::head_scores>, Threads>(m, "head_scores");
  define_class<AttentionLayer>(
      m, {{Py_tp_methods,
           keep<PyMethodDef>(
               {method_of<AttentionLayer, AttentionLayerForward, Threads,
                          run_attention_layer<AttentionLayerForward, &cpu::attention_layer>>(
                    "AttentionLayer.forward"),
                method_of<AttentionLayer, AttentionLayerBackward, Threads,
                          run_attention_layer<AttentionLayerBackward, &cpu::attention_layer_backward>>(
                    "AttentionLayer.backward")})}});
  define<StackMapsCall, stack_maps, Place>(m, "stack_maps");
  constexpr auto kLayer = offsetof(Instance<CudaAttentionLayer>, value);
  define_class<CudaAttentionLayer, CudaAttentionLayerCall, make_cuda_attention_layer>(
      m, "CudaAttentionLayer",
      {{Py_tp_methods,
        keep<PyMethodDef>(
            {method_of<CudaAttentionLayer, CudaAttentionLayerForward, Queue, run_cuda_attention_layer>(
                 "CudaAttentionLayer.forward"),
             method_of<CudaAttentionLayer, CudaAttentionLayerBackward, Queue,
                       run_cuda_attention_layer_backward>("CudaAttentionLayer.backward")})},
       {Py_tp_members,
        keep<PyMemberDef>(
            {{"scratch", T_LONGLONG, kLayer + offsetof(CudaAttentionLayer, scratch), READONLY, "int"},
             {"state", T_LONGLONG, kLayer + offsetof(CudaAttentionLayer, state), READONLY, "int"},
             {"on_blocks", T_BOOL, kLayer + offsetof(CudaAttentionLayer, args.on_blocks), READONLY,
              "bool"}})}});

  define_class<MultiAggregateInput>(m);
  define_class<NodeTable>(m);
  define_class<NodeList>(m);
  define_class<FirstNodes>(m);
  define_class<SampleStep>(m);
  define<SampleCall, sample_neighbors, Place>(m, "sample_neighbors");
  define<PlaceBatchCall, place_batch, Place>(m, "place_batch");
  define<PlanGraphsCall, plan_graphs>(m, "plan_graphs", "tuple[int, ...]");
  define<GatherGraphsCall, gather_graphs, Place>(m, "gather_graphs");
  define<HoldSameCall, hold_same>(m, "hold_same", "bool");
  define<GatherRowsOfHostCall, gather_rows_of_host, Place>(m, "gather_rows_of_host");

  FASTSPARSE_OPERATORS(FASTSPARSE_DEFINE_BOTH, FASTSPARSE_DEFINE_CPU, FASTSPARSE_DEFINE_CUDA)

  define<SegmentSortBytesCall, num_segment_sort_bytes, Device>(m, "num_segment_sort_bytes", "int");
  define<NumRowsCall, count<FASTSPARSE_OF_CUDA(num_row_split_counts)>>(m, "num_row_split_counts", "int");
  define<NumRowsCall, count<FASTSPARSE_OF_CUDA(num_hybrid_rows_counts)>>(m, "num_hybrid_rows_counts", "int");
  define_class<SegmentSort, SegmentSortCall, sort_segments>(
      m, "SegmentSort",
      {{Py_tp_methods, keep<PyMethodDef>({method_of<SegmentSort, Nothing, Nothing, segment_facts>(
                           "SegmentSort.facts", "tuple[int, int, bool, int]")})},
       {Py_tp_dealloc, reinterpret_cast<void*>(&free_segment_sort)}});
  for (const auto& [name, value] : {std::pair<const char*, std::int64_t>{"FEW_EDGES", kFewEdges},
                                    {"HASHES", kHashes},
                                    {"KEY_BITS", kKeyBits},
                                    {"NUM_SEGMENT_FACTS", kNumSegmentFacts}}) {
    add(m, name, PyLong_FromLongLong(value));
  }
}

}  // namespace fastsparse

PYBIND11_MODULE(_C, module) {
  module.doc() = "Torch-free kernels of FastSparse; fastsparse_core.ops is the checked interface.";
  fastsparse::define_all(module.ptr());
}
