// Kernel calls that were recorded once and are made again by one call.
//
// A call keeps its arguments: addresses and sizes. Made again, it reads what lies at these addresses by then, so whoever
// records keeps that memory, and gives sizes that hold for every later run.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "perilune.h"

namespace perilune {

// Arguments that outlive the call they came with. Whatever in them points to memory of the caller of the kernel, and not
// to a tensor, is copied: such arguments need a version of their own.
template <typename Args>
struct Kept {
  explicit Kept(const Args& given) : args(given) {}
  Args get() const { return args; }

  Args args;
};

template <>
struct Kept<LinearArgs> {
  explicit Kept(const LinearArgs& given)
      : args(given), weights(given.weights, given.weights + given.count), y(given.y, given.y + given.count) {}
  LinearArgs get() const {
    LinearArgs own = args;
    own.weights = weights.data();
    own.y = y.data();
    return own;
  }

  LinearArgs args;
  std::vector<Matrix> weights;
  std::vector<void*> y;
};

template <>
struct Kept<AttnResArgs> {
  explicit Kept(const AttnResArgs& given)
      : args(given), candidates(given.candidates, given.candidates + given.count) {}
  AttnResArgs get() const {
    AttnResArgs own = args;
    own.candidates = candidates.data();
    return own;
  }

  AttnResArgs args;
  std::vector<const void*> candidates;
};

class Program {
 public:
  // From now on the calling thread's calls are appended, until `end`. One program at a time.
  void begin() { recording() = this; }
  static void end() { recording() = nullptr; }
  static Program*& recording() {
    thread_local Program* current = nullptr;
    return current;
  }

  void append(const char* name, std::function<void()> function) { calls_.push_back({name, std::move(function)}); }
  int64_t size() const { return static_cast<int64_t>(calls_.size()); }

  void run() const {
    for (const Call& call : calls_) call.function();
  }

  // The same, and the seconds that the calls of each kernel took.
  std::map<std::string, double> run_timed() const {
    using Clock = std::chrono::steady_clock;
    std::map<std::string, double> seconds;
    for (const Call& call : calls_) {
      const auto start = Clock::now();
      call.function();
      seconds[call.name] += std::chrono::duration<double>(Clock::now() - start).count();
    }
    return seconds;
  }

 private:
  struct Call {
    const char* name;
    std::function<void()> function;
  };

  std::vector<Call> calls_;
};

// A kernel of the table in use. Calling it makes the call, and appends it where the thread records.
template <typename Args>
struct Recorded {
  const char* name;
  void (*Kernels::*slot)(const Args&);

  void operator()(const Args& args) const {
    (kernels().*slot)(args);
    if (Program* program = Program::recording())
      program->append(name, [slot = slot, kept = Kept<Args>(args)] { (kernels().*slot)(kept.get()); });
  }
};

}  // namespace perilune
