#include "check.h"

#include <cmath>
#include <cstdio>
#include <cstring>

#include "simd/element.h"

namespace perilune {
#ifdef PERILUNE_EMULATE_AVX512
namespace avx512 { extern const Kernels table; }
#endif

namespace tests {
namespace {

int num_failures = 0;

double number_at(const Array& array, int64_t i) {
  switch (array.type()) {
    case Type::f32: return array.as<float>()[i];
    case Type::bf16: return widen(array.as<bf16>()[i]);
    default: return array.as<int8_t>()[i];
  }
}

double root_mean_square(const std::vector<double>& numbers) {
  double total = 0.0;
  for (double number : numbers) total += std::isfinite(number) ? number * number : 0.0;
  return std::sqrt(total / static_cast<double>(numbers.size() + 1));
}

// The largest error of `found`, infinite where NaNs or sizes differ.
double largest_error(const std::vector<double>& expected, const std::vector<double>& found) {
  if (expected.size() != found.size()) return INFINITY;
  const double floor = root_mean_square(expected);
  double worst = 0.0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i] == found[i] || (std::isnan(expected[i]) && std::isnan(found[i]))) continue;
    const double error = std::fabs(expected[i] - found[i]) / (std::fabs(expected[i]) + floor);
    worst = error < worst ? worst : error;  // a NaN is never less
  }
  return std::isnan(worst) ? INFINITY : worst;
}

bool are_same(const std::vector<Output>& a, const std::vector<Output>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (a[i].bytes != b[i].bytes) return false;
  return true;
}

std::vector<Output> row_after_row(const Kernels& kernels, int64_t rows, const Call& call) {
  std::vector<Output> joined;
  for (int64_t row = 0; row < rows; ++row) {
    const std::vector<Output> one = call(kernels, row, 1);
    joined.resize(one.size());
    for (size_t i = 0; i < one.size(); ++i) joined[i].bytes += one[i].bytes;
  }
  return joined;
}

}  // namespace

std::vector<Test>& all_tests() {
  static std::vector<Test> tests;
  return tests;
}

void fail(const char* file, int line, const std::string& what) {
  std::printf("%s:%d: %s\n", file, line, what.c_str());
  ++num_failures;
}

// Memory is aligned to 16 bytes; one element on, nothing wider than an element is aligned.
Array::Array(Type type, int64_t count) : type_(type), count_(count) {
  const int64_t element = type == Type::mxfp4 ? 1 : type_bytes(type, 1);
  memory_.reset(new char[element + bytes()]);
  data_ = memory_.get() + element;
  std::memset(data_, 0xff, bytes());
}

Array Array::copy() const {
  Array copied(type_, count_);
  std::memcpy(copied.data_, data_, bytes());
  return copied;
}

Array random_array(Type type, int64_t count, std::mt19937& random, float scale) {
  Array array(type, count);
  std::uniform_real_distribution<float> number(-scale, scale);
  for (int64_t i = 0; i < (type == Type::f32 || type == Type::bf16 ? count : 0); ++i) {
    if (type == Type::f32)
      array.as<float>()[i] = number(random);
    else
      array.as<bf16>()[i] = to_bf16(number(random));
  }
  if (type == Type::f32 || type == Type::bf16) return array;
  for (int64_t i = 0; i < array.bytes(); ++i) {
    uint8_t byte = static_cast<uint8_t>(random());
    if (type == Type::f8 && (byte & 0x7f) == 0x7f) byte ^= 1;
    if (type == Type::i8 && byte == 0x80) byte = 0;
    array.as<uint8_t>()[i] = byte;
  }
  return array;
}

Array random_floats(int64_t count, float low, float high, std::mt19937& random) {
  Array array(Type::f32, count);
  std::uniform_real_distribution<float> number(low, high);
  for (int64_t i = 0; i < count; ++i) array.as<float>()[i] = number(random);
  return array;
}

RandomMatrix random_matrix(Type type, int64_t rows, int64_t columns, std::mt19937& random) {
  const float size = 1.0f / std::sqrt(static_cast<float>(columns));
  Array data = random_array(type, rows * columns, random, size);
  if (type == Type::f32 || type == Type::bf16) {
    const Matrix matrix = {data.data(), nullptr, rows, columns, type};
    return {std::move(data), Array(Type::f32, 0), matrix};
  }
  if (type != Type::mxfp4) {
    const float largest = type == Type::i8 ? 127.0f : 448.0f;
    Array scales = random_floats(rows, 0.5f * size / largest, size / largest, random);
    const Matrix matrix = {data.data(), scales.data(), rows, columns, type};
    return {std::move(data), std::move(scales), matrix};
  }
  Array scales(Type::i8, rows * columns / 32);
  for (int64_t i = 0; i < scales.bytes(); ++i) scales.as<uint8_t>()[i] = static_cast<uint8_t>(117 + random() % 5);
  const Matrix matrix = {data.data(), scales.data(), rows, columns, type};
  return {std::move(data), std::move(scales), matrix};
}

Output output(const Array& array) {
  Output made{std::string(array.as<char>(), array.bytes()), {}};
  const int64_t count = array.bytes() / type_bytes(array.type(), 1);
  for (int64_t i = 0; i < count; ++i) made.numbers.push_back(number_at(array, i));
  return made;
}

Output output(const std::vector<int64_t>& integers) {
  return {std::string(reinterpret_cast<const char*>(integers.data()), 8 * integers.size()),
          std::vector<double>(integers.begin(), integers.end())};
}

const std::vector<const Kernels*>& tables() {
  static const std::vector<const Kernels*> found = [] {
    std::vector<const Kernels*> here;
    for (const char* const* name = available_isas(); *name != nullptr; ++name)
      if (use_isa(*name)) here.push_back(&kernels());
#ifdef PERILUNE_EMULATE_AVX512
    here.push_back(&avx512::table);
#endif
    return here;
  }();
  return found;
}

void check_laws(const std::string& name, int64_t rows, double tolerance, const Call& call,
                std::vector<std::vector<double>> expected) {
  for (const Kernels* each : tables()) {
    const std::string where = name + ", " + each->isa;
    set_num_threads(1);
    const std::vector<Output> together = call(*each, 0, rows);
    if (rows > 0 && !are_same(together, row_after_row(*each, rows, call)))
      fail(__FILE__, __LINE__, where + ": a row alone differs from the row among others");
    for (int threads : {2, 5}) {
      set_num_threads(threads);
      if (!are_same(together, call(*each, 0, rows)))
        fail(__FILE__, __LINE__, where + ": " + std::to_string(threads) + " threads differ from one");
    }
    if (expected.empty())
      for (const Output& each : together) expected.push_back(each.numbers);
    if (expected.size() != together.size()) fail(__FILE__, __LINE__, where + ": another number of outputs");
    for (size_t i = 0; i < together.size() && i < expected.size(); ++i) {
      const double error = largest_error(expected[i], together[i].numbers);
      if (!(error <= tolerance))
        fail(__FILE__, __LINE__, where + ": output " + std::to_string(i) + " is off by " + std::to_string(error));
    }
  }
}

}  // namespace tests
}  // namespace perilune

// Runs all tests, or those whose names begin with an argument.
int main(int count, char** arguments) {
  using namespace perilune::tests;
  int num_run = 0;
  for (const Test& test : all_tests()) {
    bool is_wanted = count == 1;
    for (int i = 1; i < count; ++i) is_wanted |= std::string(test.name).rfind(arguments[i], 0) == 0;
    if (!is_wanted) continue;
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.run();
    ++num_run;
  }
  std::string names;
  for (const perilune::Kernels* each : tables()) names += std::string(" ") + each->isa;
  std::printf("%d tests,%s: %d failures\n", num_run, names.c_str(), num_failures);
  return num_run == 0 || num_failures > 0 ? 1 : 0;
}
