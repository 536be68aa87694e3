// What the tests of the core share: named tests, memory that ends where an array ends, and the laws of a kernel.
#pragma once

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "perilune.h"

namespace perilune::tests {

// ---- tests ----------------------------------------------------------------------------------------------------------

struct Test {
  const char* name;
  void (*run)();
};
std::vector<Test>& all_tests();
void fail(const char* file, int line, const std::string& what);

struct Registration {
  Registration(const char* name, void (*run)()) { all_tests().push_back({name, run}); }
};

#define TEST(name)                                                        \
  static void name();                                                     \
  static const perilune::tests::Registration registration_##name(#name, name); \
  static void name()

#define CHECK(condition)                                                    \
  do {                                                                      \
    if (!(condition)) perilune::tests::fail(__FILE__, __LINE__, #condition); \
  } while (false)

// ---- data -----------------------------------------------------------------------------------------------------------

// `count` elements, aligned as one element and no better, and nothing after the last: a sanitizer sees every step beyond.
// New ones hold NaN, or the byte 0xff.
class Array {
 public:
  Array(Type type, int64_t count);
  Type type() const { return type_; }
  int64_t bytes() const { return type_bytes(type_, count_); }
  void* data() const { return data_; }
  const void* at(int64_t element) const { return data_ + type_bytes(type_, element); }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  Array copy() const;

 private:
  Type type_;
  int64_t count_;
  std::unique_ptr<char[]> memory_;
  char* data_;
};

// Numbers from about -`scale` to `scale` in f32 or bf16; any bytes but NaN's in i8, f8 and mxfp4.
Array random_array(Type type, int64_t count, std::mt19937& random, float scale = 1.0f);
// Floats between `low` and `high`.
Array random_floats(int64_t count, float low, float high, std::mt19937& random);

struct RandomMatrix {
  Array data, scales;
  Matrix matrix;
};
RandomMatrix random_matrix(Type type, int64_t rows, int64_t columns, std::mt19937& random);

// ---- laws -----------------------------------------------------------------------------------------------------------

// What a kernel wrote, row after row: the bytes, and the numbers they stand for.
struct Output {
  std::string bytes;
  std::vector<double> numbers;
};
Output output(const Array& array);  // f32, bf16 or i8
Output output(const std::vector<int64_t>& integers);

// The kernel tables that can run here; with PERILUNE_EMULATE_AVX512 that of AVX-512 is always among them.
const std::vector<const Kernels*>& tables();

// `call` runs a kernel on rows (tokens, sequences) [first, first + count) and gives its outputs.
// Each instruction set must give the same bits by any number of threads, and for a row alone as for all of them; and
// all sets must agree within `tolerance` of a number and the root mean square together: with `expected`, output by
// output, or where it is empty with each other.
using Call = std::function<std::vector<Output>(const Kernels&, int64_t first, int64_t count)>;
void check_laws(const std::string& name, int64_t rows, double tolerance, const Call& call,
                std::vector<std::vector<double>> expected = {});

constexpr double kFloat32 = 1e-5;   // sums taken in another order
constexpr double kBfloat16 = 2e-2;  // a result or intermediate rounded to the other neighbour
inline double tolerance_of(Type type) { return type == Type::f32 ? kFloat32 : kBfloat16; }
constexpr Type kActivations[] = {Type::f32, Type::bf16};

inline std::string shown(Type type) {
  constexpr const char* kNames[] = {"f32", "bf16", "i8", "f8", "mxfp4"};
  return kNames[static_cast<int>(type)];
}

}  // namespace perilune::tests
