// Which instruction sets the processor has, and the kernel table in use.
#include <cstring>

#include "perilune.h"

namespace perilune {

namespace baseline { extern const Kernels table; }
#ifdef PERILUNE_X86
namespace avx2 { extern const Kernels table; }
namespace avx512 { extern const Kernels table; }
#endif

namespace {

struct Candidate {
  const Kernels* table;
  bool is_here;
};

// Narrowest first.
const Candidate* candidates() {
  static const Candidate list[] = {
      {&baseline::table, true},
#ifdef PERILUNE_X86
      {&avx2::table, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
                         __builtin_cpu_supports("f16c")},
      {&avx512::table, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
                           __builtin_cpu_supports("avx512bf16")},
#endif
      {nullptr, false},
  };
  return list;
}

const Kernels* widest() {
  const Kernels* found = nullptr;
  for (const Candidate* each = candidates(); each->table != nullptr; ++each)
    if (each->is_here) found = each->table;
  return found;
}

const Kernels*& current() {
  static const Kernels* table = widest();
  return table;
}

}  // namespace

const Kernels& kernels() { return *current(); }

bool use_isa(const char* name) {
  for (const Candidate* each = candidates(); each->table != nullptr; ++each)
    if (each->is_here && std::strcmp(each->table->isa, name) == 0) {
      current() = each->table;
      return true;
    }
  return false;
}

const char* const* available_isas() {
  static const char* names[4] = {};
  int count = 0;
  for (const Candidate* each = candidates(); each->table != nullptr; ++each)
    if (each->is_here) names[count++] = each->table->isa;
  return names;
}

}  // namespace perilune
