// Converts Python arguments to the fields of structs, with the lists of arguments.h. `_C` is not linked to
// PyTorch, so it reads the Python attributes of tensors.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fastsparse/arguments.h"
#include "fastsparse/views.h"

namespace fastsparse {

namespace py = pybind11;

// Takes ownership of the result of a Python C API function. If the result is null, throws Python's error.
inline py::object held(PyObject* object) {
  if (object == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

// Names of the attributes that are read from tensors.
struct Names {
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* stride = PyUnicode_InternFromString("stride");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* element_size = PyUnicode_InternFromString("element_size");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* numel = PyUnicode_InternFromString("numel");
  PyObject* untyped_storage = PyUnicode_InternFromString("untyped_storage");
  PyObject* nbytes = PyUnicode_InternFromString("nbytes");
  PyObject* zero = PyLong_FromLong(0);
};

inline const Names& names() {
  static const auto& known = *new Names;
  return known;
}

// PyTorch's dtypes in the order of their codes.
inline std::vector<PyObject*>& known_dtypes() {
  static auto& known = *new std::vector<PyObject*>;
  return known;
}

// The argument that is being read, and functions that convert it.
class Given {
 public:
  const char* function = nullptr;
  PyObject* object = nullptr;  // null: the argument was omitted
  const Argument* argument = nullptr;
  double probability = 0;

  [[noreturn]] void throw_wrong_type() const {
    PyErr_Format(PyExc_TypeError, "%s: argument '%s': expected %s, got %s", function, argument->name,
                 argument->kind.words, object == Py_None ? "None" : Py_TYPE(object)->tp_name);
    throw py::error_already_set();
  }

  std::int64_t number(std::int64_t least, std::int64_t most) const {
    const long long value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred() != nullptr) throw_no_number();
    if (value < least || value > most) throw_too_large();
    return value;
  }

  std::uint64_t unsigned_number(std::uint64_t most) const {
    PyObject* index = PyNumber_Index(object);
    const unsigned long long value = index == nullptr ? 0 : PyLong_AsUnsignedLongLong(index);
    Py_XDECREF(index);
    if (PyErr_Occurred() != nullptr) throw_no_number();
    if (value > most) throw_too_large();
    return value;
  }

  double real() const {
    const double value = PyFloat_AsDouble(object);
    if (value == -1 && PyErr_Occurred() != nullptr) throw_no_number();
    return value;
  }

  bool truth() const {
    const int value = object == Py_True ? 1 : object == Py_False ? 0 : PyObject_IsTrue(object);
    if (value < 0) throw py::error_already_set();
    return value != 0;
  }

  // The address of a tensor's data, or the argument as a number; 0 for None.
  std::uintptr_t address() const {
    if (object == Py_None) return 0;
    constexpr auto kMost = std::numeric_limits<std::uintptr_t>::max();
    if (PyLong_Check(object)) return unsigned_number(kMost);
    const auto found = held(known(PyObject_CallMethodNoArgs(object, names().data_ptr)));
    const std::uintptr_t address = PyLong_AsUnsignedLongLong(found.ptr());
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    // If a tensor's storage was freed, the address is the tensor's offset in the storage. Checking the
    // storage size of every tensor would take 90 ns, 1.6 % of the host time of a small spmm.
    if (address < kMinAddress) check_memory();
    return address;
  }

  std::int64_t row_stride() const {
    const auto found = held(known(PyObject_CallMethodOneArg(object, names().stride, names().zero)));
    return PyLong_AsLongLong(found.ptr());
  }

  // Number of rows (dimension 0) or columns (1) of a matrix.
  std::int64_t size(int dimension) const {
    const auto shape = held(known(PyObject_GetAttr(object, names().shape)));
    if (!PyTuple_Check(shape.ptr()) || PyTuple_GET_SIZE(shape.ptr()) != 2) throw_wrong_type();
    return PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), dimension));
  }

  Dtype dtype() const {
    const auto found = held(known(PyObject_GetAttr(object, names().dtype)));
    return code_of(found.ptr());
  }

  Dtype code_of(PyObject* dtype) const {
    const auto& codes = known_dtypes();
    const auto found = std::find(codes.begin(), codes.end(), dtype);
    if (found == codes.end()) throw_wrong_type();
    return static_cast<Dtype>(found - codes.begin());
  }

  std::int64_t element_size() const {
    const auto found = held(known(PyObject_CallMethodNoArgs(object, names().element_size)));
    return PyLong_AsLongLong(found.ptr());
  }

  template <typename T>
  T* instance() const;

 private:
  // Allocators return memory above 4 GiB, unless the program is linked to fixed addresses. Offsets in freed
  // storages are below 4 GiB unless the storage was larger.
  static constexpr auto kMinAddress = std::uintptr_t{1} << 32;

  // Checks that reading an attribute of the object succeeded; otherwise raises an error that names the
  // argument.
  PyObject* known(PyObject* answer) const {
    if (answer == nullptr && PyErr_ExceptionMatches(PyExc_AttributeError) != 0) {
      PyErr_Clear();
      throw_wrong_type();
    }
    return answer;
  }

  [[noreturn]] void throw_no_number() const {
    if (PyErr_ExceptionMatches(PyExc_TypeError) == 0 && PyErr_ExceptionMatches(PyExc_OverflowError) == 0) {
      throw py::error_already_set();
    }
    const bool is_large = PyErr_ExceptionMatches(PyExc_OverflowError) != 0;
    PyErr_Clear();
    if (is_large) throw_too_large();
    throw_wrong_type();
  }

  [[noreturn]] void throw_too_large() const {
    PyErr_Format(PyExc_TypeError, "%s: argument '%s': %R is out of range", function, argument->name, object);
    throw py::error_already_set();
  }

  // Raises an error for tensors whose storage was resized to 0 bytes, as FSDP does between uses; the shape of
  // these tensors does not change. The function is not inlined, because inlining would slow down every call.
  [[gnu::cold, gnu::noinline]] void check_memory() const {
    const auto numel = held(known(PyObject_CallMethodNoArgs(object, names().numel)));
    if (PyLong_AsLongLong(numel.ptr()) == 0) return;
    const auto storage = held(PyObject_CallMethodNoArgs(object, names().untyped_storage));
    const auto nbytes = held(PyObject_CallMethodNoArgs(storage.ptr(), names().nbytes));
    if (PyLong_AsLongLong(nbytes.ptr()) != 0) return;
    const auto shape = held(PyObject_GetAttr(object, names().shape));
    const auto sizes = held(PySequence_Tuple(shape.ptr()));
    PyErr_Format(
        PyExc_RuntimeError,
        "%s: argument '%s': a tensor of shape %R has no memory: its storage was resized to 0 bytes, as "
        "FSDP does with parameters outside their module's forward and backward pass. Give the "
        "storage its memory back before the call",
        function, argument->name, sizes.ptr());
    throw py::error_already_set();
  }
};

template <typename T>
void write(char* args, std::size_t at, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::memcpy(args + at, &value, sizeof value);
}

// ---------------------------------------------------------------- classes

// A struct as a Python object.
template <typename T>
struct Instance {
  PyObject_HEAD T value;

  static inline PyTypeObject* type = nullptr;
};

template <typename T>
T* Given::instance() const {
  if (!PyObject_TypeCheck(object, Instance<T>::type)) throw_wrong_type();
  return &reinterpret_cast<Instance<T>*>(object)->value;
}

// ---------------------------------------------------------------- reading

template <typename T>
void read_field(Given& given, char* args, const Argument& argument) {
  if constexpr (std::is_array_v<T>) {
    using Element = std::remove_extent_t<T>;
    const auto items = held(PySequence_Tuple(given.object));
    if (PyTuple_GET_SIZE(items.ptr()) != static_cast<Py_ssize_t>(std::extent_v<T>)) given.throw_wrong_type();
    for (std::size_t nth = 0; nth < std::extent_v<T>; ++nth) {
      const long value = PyLong_AsLong(PyTuple_GET_ITEM(items.ptr(), nth));
      if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
      write(args, argument.at + nth * sizeof(Element), static_cast<Element>(value));
    }
  } else if constexpr (std::is_pointer_v<T>) {
    write(args, argument.at, given.address());
  } else if constexpr (std::is_same_v<T, bool>) {
    write(args, argument.at, given.truth());
  } else if constexpr (std::is_floating_point_v<T>) {
    write(args, argument.at, static_cast<T>(given.real()));
  } else if constexpr (std::is_same_v<T, Dtype>) {
    write(args, argument.at,
          PyLong_Check(given.object) ? static_cast<Dtype>(given.number(0, 3)) : given.code_of(given.object));
  } else if constexpr (std::is_enum_v<T>) {
    write(args, argument.at, static_cast<T>(given.number(0, std::numeric_limits<int>::max())));
  } else if constexpr (std::is_integral_v<T> && std::is_signed_v<T>) {
    using Limits = std::numeric_limits<T>;
    write(args, argument.at, static_cast<T>(given.number(Limits::min(), Limits::max())));
  } else if constexpr (std::is_integral_v<T>) {
    write(args, argument.at, static_cast<T>(given.unsigned_number(std::numeric_limits<T>::max())));
  } else if constexpr (std::is_same_v<T, CsrView>) {
    write(args, argument.at, given.instance<CsrStructure>()->a);
  } else if constexpr (std::is_same_v<T, RowSplitView>) {
    write(args, argument.at, given.instance<CsrStructure>()->split);
  } else if constexpr (std::is_same_v<T, DenseView>) {
    DenseView view{nullptr, 0};
    if (given.object != Py_None) {
      view = {reinterpret_cast<const void*>(given.address()), given.row_stride()};
    }
    write(args, argument.at, view);
  } else if constexpr (std::is_same_v<T, EdgeValueView>) {
    EdgeValueView view{nullptr, Dtype::kFloat64, 1};
    if (given.object != Py_None) {
      view.data = reinterpret_cast<const void*>(given.address());
      view.dtype = given.dtype();
    }
    write(args, argument.at, view);
  } else if constexpr (std::is_same_v<T, KeptIdsView>) {
    const auto* data = reinterpret_cast<const void*>(given.address());
    write(args, argument.at, KeptIdsView{data, given.element_size() == 2, given.size(1)});
  } else {
    write(args, argument.at, *given.instance<T>());
  }
}

inline void read_num_rows(Given& given, char* args, const Argument& argument) {
  if (given.object != Py_None) write(args, argument.at, given.size(0));
}

inline void read_width(Given& given, char* args, const Argument& argument) {
  if (given.object != Py_None) write(args, argument.at, given.size(1));
}

inline void read_stride(Given& given, char* args, const Argument& argument) {
  if (given.object != Py_None) write(args, argument.at, given.row_stride());
}

inline void read_dtype(Given& given, char* args, const Argument& argument) {
  if (given.object != Py_None) write(args, argument.at, given.dtype());
}

inline void read_object(Given& given, char* args, const Argument& argument) {
  write(args, argument.at, given.object);
}

inline void read_probability(Given& given, char*, const Argument&) { given.probability = given.real(); }

inline void read_dropout(Given& given, char* args, const Argument& argument) {
  using Limits = std::numeric_limits<std::int64_t>;
  write(args, argument.at, make_dropout(given.probability, given.number(Limits::min(), Limits::max())));
}

inline void read_keep_scale(Given& given, char* args, const Argument& argument) {
  write(args, argument.at, 1 / (1 - given.probability));
}

inline void divide(Given&, char* args, const Argument& argument) {
  std::int64_t width, heads;
  std::memcpy(&width, args + argument.at, sizeof width);
  std::memcpy(&heads, args + argument.also, sizeof heads);
  write(args, argument.at, width / std::max<std::int64_t>(heads, 1));
}

// ---------------------------------------------------------------- calls

constexpr std::size_t kMostArguments = 48;

// The arguments of a Python function. They fill one struct and then another one.
class Parameters {
 public:
  // The arguments that fill one of the two structs.
  struct Part {
    const Argument* begin = nullptr;
    const Argument* end = nullptr;
  };

  Parameters(std::string name, Part args, Part where, const char* result)
      : name_(std::move(name)), args_(args), where_(where) {
    std::string text;
    for (const Part& part : {args_, where_}) {
      for (const Argument* argument = part.begin; argument != part.end; ++argument) {
        if (argument->name == nullptr) continue;
        arguments_.push_back(argument);
        names_.push_back(PyUnicode_InternFromString(argument->name));
        text += (text.empty() ? "" : ", ") + std::string(argument->name) + ": " + argument->kind.stub;
        if (argument->is_optional) text += " = ...";
      }
    }
    if (arguments_.size() > kMostArguments) throw std::length_error(name_ + ": too many arguments");
    doc_ = doc_name() + std::string("(") + text + ") -> " + result;
  }

  const char* name() const { return name_.c_str(); }
  const char* doc() const { return doc_.c_str(); }
  // The function's name without its class, if it is a method.
  const char* doc_name() const {
    const std::size_t dot = name_.rfind('.');
    return name_.c_str() + (dot == std::string::npos ? 0 : dot + 1);
  }

  // Fills `args` and `where` from the arguments of a call: first `count` positional arguments, then the
  // arguments that `keywords` names.
  void read(PyObject* const* given, Py_ssize_t count, PyObject* keywords, void* args, void* where) {
    // Reading arguments may let other threads run, which may add other call sites.
    PyObject* objects[kMostArguments];
    if (keywords == nullptr && count == static_cast<Py_ssize_t>(arguments_.size())) {
      std::copy_n(given, arguments_.size(), objects);
    } else {
      const CallSite& site = call_site(count, keywords);
      for (std::size_t nth = 0; nth < arguments_.size(); ++nth) {
        objects[nth] = site.place[nth] == kMissing ? nullptr : given[site.place[nth]];
      }
    }
    PyObject* const* next = objects;
    Given reading;
    reading.function = name();
    next = read(args_, reading, next, static_cast<char*>(args));
    read(where_, reading, next, static_cast<char*>(where));
  }

 private:
  static constexpr std::uint8_t kMissing = 255;

  // The position of every argument in a call. `keywords` is a constant of the calling code, unless the call
  // has more than 15 keywords or a starred argument: then Python makes a new tuple for every call.
  struct CallSite {
    PyObject* keywords = nullptr;
    Py_ssize_t count = -1;
    std::uint8_t place[kMostArguments];
  };

  static PyObject* const* read(const Part& part, Given& given, PyObject* const* next, char* to) {
    for (const Argument* argument = part.begin; argument != part.end; ++argument) {
      if (argument->name != nullptr) {
        given.argument = argument;
        given.object = *next++;
      }
      if (given.object != nullptr) argument->read(given, to, *argument);
    }
    return next;
  }

  static bool are_same(PyObject* known, PyObject* keywords) {
    if (known == keywords) return true;
    if (known == nullptr || keywords == nullptr || PyTuple_GET_SIZE(known) != PyTuple_GET_SIZE(keywords)) {
      return false;
    }
    PyObject** const begin = PySequence_Fast_ITEMS(known);
    return std::equal(begin, begin + PyTuple_GET_SIZE(known), PySequence_Fast_ITEMS(keywords));
  }

  const CallSite& call_site(Py_ssize_t count, PyObject* keywords) {
    for (const CallSite& site : sites_) {
      if (site.count == count && are_same(site.keywords, keywords)) return site;
    }
    CallSite learnt = place_arguments(count, keywords);
    CallSite& site = sites_[next_site_++ % kNumSites];
    Py_XINCREF(keywords);  // keeps the tuple, so that no other tuple can get its address
    std::swap(site, learnt);
    Py_XDECREF(learnt.keywords);
    return site;
  }

  CallSite place_arguments(Py_ssize_t count, PyObject* keywords) const {
    CallSite site;
    site.keywords = keywords;
    site.count = count;
    std::fill(std::begin(site.place), std::end(site.place), kMissing);
    if (count > static_cast<Py_ssize_t>(arguments_.size())) {
      PyErr_Format(PyExc_TypeError, "%s: expected %zu arguments, got %zd", name(), arguments_.size(), count);
      throw py::error_already_set();
    }
    for (Py_ssize_t nth = 0; nth < count; ++nth) site.place[nth] = static_cast<std::uint8_t>(nth);
    const Py_ssize_t num_keywords = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
    for (Py_ssize_t nth = 0; nth < num_keywords; ++nth) {
      PyObject* keyword = PyTuple_GET_ITEM(keywords, nth);
      std::size_t at = 0;
      while (at < names_.size() && PyUnicode_Compare(names_[at], keyword) != 0) ++at;
      if (at == names_.size()) {
        PyErr_Format(PyExc_TypeError, "%s: unexpected argument %R; expected %s", name(), keyword, doc());
        throw py::error_already_set();
      }
      if (site.place[at] != kMissing) {
        PyErr_Format(PyExc_TypeError, "%s: argument %R is given by position and by name", name(), keyword);
        throw py::error_already_set();
      }
      site.place[at] = static_cast<std::uint8_t>(count + nth);
    }
    std::string missing;
    for (std::size_t at = 0; at < arguments_.size(); ++at) {
      if (site.place[at] != kMissing || arguments_[at]->is_optional) continue;
      missing += (missing.empty() ? "'" : ", '") + std::string(arguments_[at]->name) + "'";
    }
    if (!missing.empty()) {
      PyErr_Format(PyExc_TypeError, "%s: missing %s; expected %s", name(), missing.c_str(), doc());
      throw py::error_already_set();
    }
    return site;
  }

  static constexpr std::size_t kNumSites = 4;

  std::string name_, doc_;
  Part args_, where_;
  std::vector<const Argument*> arguments_;
  std::vector<PyObject*> names_;
  CallSite sites_[kNumSites];
  std::size_t next_site_ = 0;
};

}  // namespace fastsparse
