// Lists of the Python arguments that fill the fields of a struct. A list follows its struct and is the only
// declaration of the arguments: parsing, error messages and `_C.pyi` are generated from it.
//
//   FASTSPARSE_ARGUMENTS(MaskRowsArgs, FIELDS(dense), NUM_ROWS(num_rows), WIDTH(width), DTYPE(dtype),
//                        FIELDS(kept, out));
//
// Arguments, in the order in which they may be passed by position:
//
//   FIELDS(a, b, ...)     arguments with the names of the fields; the fields' types say what Python passes
//   OPTIONAL(a, b, ...)   the same, but they may be omitted; then the field is 0
//   AS(name, field)       an argument of another name; the field may be nested or an array's element
//   IN(member, a, b, ...) fields of the struct `member`
//   OPTIONAL_IN(member, a, b, ...)
//   MATRIX(a)             a pointer; the facts that follow also read other properties of its tensor
//   MATRIX_AS(name, field)
//   OBJECT(field, type)   an unconverted PyObject*, of that type in the stub
//   DROPOUT(field)        `dropout_p` and `seed`
//
// Facts read a property of the argument before them into a field. If that argument is None, they leave the
// field unchanged:
//
//   ALSO(field)           the same argument, read as that field's type
//   NUM_ROWS(field), WIDTH(field), STRIDE(field), DTYPE(field)
//   KEEP_SCALE(field)     1 / (1 - dropout_p)
//   PER(field, heads)     field /= heads, after both have been read
//
// FASTSPARSE_ARGUMENTS_AS(Name, Struct, ...) is another list for `Struct`, under another name, for a call
// that fills only some of its fields.
#pragma once

#ifndef FASTSPARSE_BINDING  // only the binding needs lists
#define FASTSPARSE_ARGUMENTS(...) static_assert(true)
#define FASTSPARSE_ARGUMENTS_AS(...) static_assert(true)
#else

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace fastsparse {

enum class Dtype : int;
struct CsrView;
struct RowSplitView;
struct DenseView;
struct EdgeValueView;
struct KeptIdsView;
class Given;

// The Python type of a field, for the stub and for error messages.
struct Kind {
  const char* stub;
  const char* words;
};
constexpr Kind kRows{"_Rows", "a tensor or None"};

// One argument of a list, or a fact. Facts have no name.
struct Argument {
  using Read = void (*)(Given& given, char* args, const Argument& argument);

  const char* name;
  Kind kind;
  Read read;
  std::size_t at;    // offset of the field
  std::size_t also;  // for PER: offset of the number of heads
  bool is_optional;
};

// The list of a struct. Struct: the name of the list, which is usually the struct itself.
template <typename Struct>
struct Declared;

template <typename T, typename = void>
constexpr bool kIsDeclared = false;
template <typename T>
constexpr bool kIsDeclared<T, std::void_t<decltype(Declared<T>::name)>> = true;

template <typename T>
constexpr Kind kind_of() {
  if constexpr (std::is_array_v<T>) {
    return {"Sequence[int]", "a sequence of integers, as many as there are places"};
  } else if constexpr (std::is_pointer_v<T>) {
    return {"_Memory", "a tensor, an address or None"};
  } else if constexpr (std::is_same_v<T, bool>) {
    return {"bool", "a truth value"};
  } else if constexpr (std::is_floating_point_v<T>) {
    return {"float", "a number"};
  } else if constexpr (std::is_same_v<T, Dtype>) {
    return {"_Dtype", "a dtype that kernels know"};
  } else if constexpr (std::is_integral_v<T> || std::is_enum_v<T>) {
    return {"int", "an integer"};
  } else if constexpr (std::is_same_v<T, CsrView> || std::is_same_v<T, RowSplitView>) {
    return {"CsrStructure", "a CsrStructure"};
  } else if constexpr (std::is_same_v<T, KeptIdsView>) {
    return {"Tensor", "a tensor"};
  } else if constexpr (kIsDeclared<T>) {
    return {Declared<T>::name, Declared<T>::name};
  } else {
    static_assert(std::is_same_v<T, DenseView> || std::is_same_v<T, EdgeValueView>);
    return kRows;
  }
}

// Reads a field from a Python object (packing.h).
template <typename T>
void read_field(Given& given, char* args, const Argument& argument);
void read_num_rows(Given& given, char* args, const Argument& argument);
void read_width(Given& given, char* args, const Argument& argument);
void read_stride(Given& given, char* args, const Argument& argument);
void read_dtype(Given& given, char* args, const Argument& argument);
void read_keep_scale(Given& given, char* args, const Argument& argument);
void read_object(Given& given, char* args, const Argument& argument);
void read_probability(Given& given, char* args, const Argument& argument);
void read_dropout(Given& given, char* args, const Argument& argument);
void divide(Given& given, char* args, const Argument& argument);

template <typename Field>
constexpr Argument argument(const char* name, std::size_t at, bool is_optional = false) {
  return {name, kind_of<Field>(), read_field<Field>, at, 0, is_optional};
}

template <typename Field>
constexpr Argument matrix(const char* name, std::size_t at) {
  static_assert(std::is_pointer_v<Field>);
  return {name, kRows, read_field<Field>, at, 0, false};
}

// T: the C++ type as which `read` writes the field.
template <typename T, typename Field>
constexpr Argument fact(std::size_t at, Argument::Read read, std::size_t also = 0) {
  static_assert(std::is_same_v<T, Field>);
  return {nullptr, {}, read, at, also, false};
}

}  // namespace fastsparse

#define FASTSPARSE_ARGUMENTS(Struct, ...) FASTSPARSE_ARGUMENTS_AS(Struct, Struct, __VA_ARGS__)
#define FASTSPARSE_ARGUMENTS_AS(Name, Struct, ...)         \
  template <>                                              \
  struct Declared<Name> {                                  \
    using Args = Struct;                                   \
    static constexpr const char* name = #Name;             \
    static constexpr Argument arguments[] = {__VA_ARGS__}; \
  }

#define FASTSPARSE_TYPE(field) std::remove_reference_t<decltype(std::declval<Args&>().field)>
#define FASTSPARSE_FACT(T, field, ...) fact<T, FASTSPARSE_TYPE(field)>(offsetof(Args, field), __VA_ARGS__)

#define AS(name, field) argument<FASTSPARSE_TYPE(field)>(#name, offsetof(Args, field))
#define MATRIX_AS(name, field) matrix<FASTSPARSE_TYPE(field)>(#name, offsetof(Args, field))
#define MATRIX(field) MATRIX_AS(field, field)
#define OBJECT(field, type) \
  Argument { #field, {type, type}, read_object, offsetof(Args, field), 0, false }
#define DROPOUT(field)                                                                    \
  Argument{"dropout_p", {"float", "a number"}, read_probability, 0, 0, false}, Argument { \
    "seed", {"int", "an integer"}, read_dropout, offsetof(Args, field), 0, false          \
  }
#define ALSO(field) argument<FASTSPARSE_TYPE(field)>(nullptr, offsetof(Args, field))
#define NUM_ROWS(field) FASTSPARSE_FACT(std::int64_t, field, read_num_rows)
#define WIDTH(field) FASTSPARSE_FACT(std::int64_t, field, read_width)
#define STRIDE(field) FASTSPARSE_FACT(std::int64_t, field, read_stride)
#define DTYPE(field) FASTSPARSE_FACT(Dtype, field, read_dtype)
#define KEEP_SCALE(field) FASTSPARSE_FACT(double, field, read_keep_scale)
#define PER(field, heads) FASTSPARSE_FACT(std::int64_t, field, divide, offsetof(Args, heads))

#define FASTSPARSE_FIELD(none, field) AS(field, field)
#define FASTSPARSE_OPTIONAL(none, field) argument<FASTSPARSE_TYPE(field)>(#field, offsetof(Args, field), true)
#define FASTSPARSE_MEMBER(member, field) AS(field, member.field)
#define FASTSPARSE_OPTIONAL_MEMBER(member, field) \
  argument<FASTSPARSE_TYPE(member.field)>(#field, offsetof(Args, member.field), true)
#define FIELDS(...) FASTSPARSE_EACH(FASTSPARSE_FIELD, , __VA_ARGS__)
#define OPTIONAL(...) FASTSPARSE_EACH(FASTSPARSE_OPTIONAL, , __VA_ARGS__)
#define IN(member, ...) FASTSPARSE_EACH(FASTSPARSE_MEMBER, member, __VA_ARGS__)
#define OPTIONAL_IN(member, ...) FASTSPARSE_EACH(FASTSPARSE_OPTIONAL_MEMBER, member, __VA_ARGS__)

// macro(first, second) for every `second`, at most 64, separated by commas.
#define FASTSPARSE_EACH(macro, first, ...) FASTSPARSE_64(FASTSPARSE_NEXT(macro, first, __VA_ARGS__))
#define FASTSPARSE_NEXT(macro, first, second, ...) \
  macro(first, second) __VA_OPT__(, FASTSPARSE_AGAIN FASTSPARSE_NONE(macro, first, __VA_ARGS__))
#define FASTSPARSE_AGAIN() FASTSPARSE_NEXT
#define FASTSPARSE_NONE ()
#define FASTSPARSE_64(...) FASTSPARSE_16(FASTSPARSE_16(FASTSPARSE_16(FASTSPARSE_16(__VA_ARGS__))))
#define FASTSPARSE_16(...) FASTSPARSE_4(FASTSPARSE_4(FASTSPARSE_4(FASTSPARSE_4(__VA_ARGS__))))
#define FASTSPARSE_4(...) FASTSPARSE_1(FASTSPARSE_1(FASTSPARSE_1(FASTSPARSE_1(__VA_ARGS__))))
#define FASTSPARSE_1(...) __VA_ARGS__

#endif
