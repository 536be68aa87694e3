// The thread pool.
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "perilune.h"
#include "processors.h"

namespace perilune {
namespace {

using Clock = std::chrono::steady_clock;
using Futex = std::atomic<uint32_t>;
static_assert(sizeof(Futex) == 4 && Futex::is_always_lock_free, "the system reads the integer itself");

// A worker that waits this long has outlived the gap between two ops of a step, and sleeps.
constexpr auto kSpin = std::chrono::microseconds(50);
// A caller that waits this long looks whether a worker lost its processor in the middle of a chunk.
constexpr auto kPatience = std::chrono::microseconds(60);
// A thread whose processor time stands still for this long is not running.
constexpr auto kGlance = std::chrono::microseconds(20);
// Chunks left are in the low half of the ticket, the region's number in the high half.
constexpr uint64_t kLeft = 0xffffffffu;

thread_local bool is_inside_region = false;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns when woken, at once where `futex` is not `expected`, and now and then for no reason.
void sleep_on(Futex& futex, uint32_t expected) {
  syscall(SYS_futex, &futex, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}
void wake_from(Futex& futex, int64_t count) {
  syscall(SYS_futex, &futex, FUTEX_WAKE_PRIVATE, count < INT_MAX ? count : INT_MAX, nullptr, nullptr, 0);
}

void run_here(int64_t num_chunks, ChunkFunction function, void* context) {
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) function(context, chunk);
}

void bind(pthread_t thread, const cpu_set_t& processors) {
  pthread_setaffinity_np(thread, sizeof(processors), &processors);
}

struct alignas(64) Worker {
  std::thread thread;
  Place place;
  std::atomic<bool> is_working{false}, is_displaced{false};

  bool is_running() {
    clockid_t clock;
    timespec before, after;
    if (pthread_getcpuclockid(thread.native_handle(), &clock) != 0) return true;
    clock_gettime(clock, &before);
    for (const auto until = Clock::now() + kGlance; Clock::now() < until;) relax();
    clock_gettime(clock, &after);
    return after.tv_nsec != before.tv_nsec || after.tv_sec != before.tv_sec;
  }
};

class Pool {
 public:
  explicit Pool(int size) : size_(size) {}

  int size() const { return size_.load(std::memory_order_relaxed); }

  void resize(int count) {
    std::lock_guard<std::mutex> turn(turn_);
    stop();
    size_ = count > 0 ? count : num_usable_processors();
  }

  void run(int64_t num_chunks, ChunkFunction function, void* context) {
    if (is_inside_region || num_chunks <= 1 || size() == 1) return run_here(num_chunks, function, context);
    std::lock_guard<std::mutex> turn(turn_);
    if (static_cast<int>(workers_.size()) != size() - 1) start();
    open(num_chunks, function, context);
    is_inside_region = true;
    work();
    is_inside_region = false;
    wait_for_others();
    if (has_failed_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  void start() {
    stop();
    const std::vector<Place> places = places_of_threads(size());
    caller_home_ = places[0].processor;
    try {
      for (int index = 1; index < size(); ++index) {
        auto worker = std::make_unique<Worker>();
        worker->place = places[index];
        worker->thread = std::thread([this, at = worker.get()] { serve(*at); });
        workers_.push_back(std::move(worker));
      }
    } catch (const std::system_error&) {  // the system grants no more threads
      size_ = static_cast<int>(workers_.size()) + 1;
    }
  }

  void stop() {
    is_stopping_ = true;
    ++doorbell_;
    wake_from(doorbell_, INT_MAX);
    for (auto& worker : workers_) worker->thread.join();
    workers_.clear();
    is_stopping_ = false;
  }

  void open(int64_t num_chunks, ChunkFunction function, void* context) {
    function_ = function;
    context_ = context;
    total_ = num_chunks;
    caller_processor_.store(sched_getcpu(), std::memory_order_relaxed);
    has_failed_.store(false, std::memory_order_relaxed);
    unfinished_.store(static_cast<uint32_t>(num_chunks), std::memory_order_relaxed);
    const uint64_t region = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(region << 32 | static_cast<uint64_t>(num_chunks));
    ++doorbell_;
    if (sleepers_ > 0) wake_from(doorbell_, num_chunks - 1);
  }

  bool is_open() const { return (ticket_.load(std::memory_order_relaxed) & kLeft) != 0; }

  void serve(Worker& self) {
    is_inside_region = true;  // what a chunk calls runs in place
    bind(pthread_self(), self.place.node);
    auto asleep_at = Clock::now() + kSpin;
    for (unsigned turn = 1;; ++turn) {
      // Heard before looking: a region that opens after the look rings once more, and the sleep ends at once.
      const uint32_t heard = doorbell_;
      if (is_stopping_) return;
      if (is_open()) {
        self.is_working.store(true);
        work();
        self.is_working.store(false);
        if (self.is_displaced || sched_getcpu() == caller_processor_.load(std::memory_order_relaxed)) leave_caller(self);
        asleep_at = Clock::now() + kSpin;
      }
      relax();
      if (turn % 32 != 0 || Clock::now() < asleep_at) continue;
      sleep(self, heard);
      asleep_at = Clock::now() + kSpin;
    }
  }

  // Asleep it is bound to a processor of its own. Left to itself the system often wakes it where the caller runs, most
  // of all in a virtual machine, and both then share one processor for milliseconds. Awake it may be moved away from
  // busy processors.
  void sleep(Worker& self, uint32_t heard) {
    bind(pthread_self(), only(home(self)));
    ++sleepers_;
    sleep_on(doorbell_, heard);
    --sleepers_;
    bind(pthread_self(), self.place.node);
  }

  void leave_caller(Worker& self) {
    self.is_displaced = false;
    bind(pthread_self(), only(home(self)));
    bind(pthread_self(), self.place.node);
  }

  int home(const Worker& worker) const {
    const int taken = caller_processor_.load(std::memory_order_relaxed);
    return worker.place.processor == taken ? caller_home_ : worker.place.processor;
  }

  // Takes chunks until none is left. A chunk taken and not yet counted as done keeps the region open, so its fields
  // are only read then.
  void work() {
    uint32_t done = 0;
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while ((ticket & kLeft) != 0) {
      if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
      run_chunk(total_ - static_cast<int64_t>(ticket & kLeft));
      ++done;
      ticket = ticket_.load(std::memory_order_acquire);
    }
    if (done > 0 && unfinished_.fetch_sub(done) == done && is_caller_asleep_) wake_from(unfinished_, 1);
  }

  // Once a chunk has failed the rest of its region is passed over; the caller throws the first error.
  void run_chunk(int64_t chunk) {
    if (has_failed_.load(std::memory_order_relaxed)) return;
    try {
      function_(context_, chunk);
    } catch (...) {
      if (!has_failed_.exchange(true)) error_ = std::current_exception();
    }
  }

  void wait_for_others() {
    auto look_at = Clock::now() + kPatience;
    for (unsigned turn = 1; unfinished_.load(std::memory_order_acquire) != 0; ++turn) {
      relax();
      if (turn % 16 != 0 || Clock::now() < look_at) continue;
      if (lend_processor()) sleep_until_done();
      look_at = Clock::now() + kPatience;
    }
  }

  // Another process may hold the processor of a worker for milliseconds, and the worker a chunk: it gets the caller's,
  // which has nothing else to do, and leaves it after that chunk.
  bool lend_processor() {
    bool is_lent = false;
    for (auto& worker : workers_) {
      if (!worker->is_working || worker->is_running() || !worker->is_working) continue;
      worker->is_displaced = true;
      bind(worker->thread.native_handle(), only(sched_getcpu()));
      is_lent = true;
    }
    return is_lent;
  }

  void sleep_until_done() {
    is_caller_asleep_ = true;
    for (uint32_t left; (left = unfinished_) != 0;) sleep_on(unfinished_, left);
    is_caller_asleep_ = false;
  }

  std::atomic<int> size_;
  std::vector<std::unique_ptr<Worker>> workers_;
  int caller_home_ = 0;  // where a worker sleeps while the caller runs on the worker's own processor
  std::mutex turn_;      // one region at a time
  ChunkFunction function_ = nullptr;
  void* context_ = nullptr;
  int64_t total_ = 0;
  std::atomic<int> caller_processor_{0};
  std::exception_ptr error_;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  Futex doorbell_{0};  // rung when a region opens
  std::atomic<bool> is_stopping_{false}, has_failed_{false};
  alignas(64) Futex unfinished_{0};
  std::atomic<bool> is_caller_asleep_{false};
  alignas(64) std::atomic<int> sleepers_{0};
};

// Never destroyed: a worker may still wait when the process ends.
Pool& pool() {
  alignas(Pool) static char storage[sizeof(Pool)];
  static Pool* const one = [] {
    // In the child of a fork there are no workers, and the locks may have been held by a thread that is gone.
    pthread_atfork(nullptr, nullptr, [] { new (storage) Pool(pool().size()); });
    return new (storage) Pool(num_usable_processors());
  }();
  return *one;
}

}  // namespace

void set_num_threads(int count) { pool().resize(count); }
int num_threads() { return pool().size(); }
void run_chunks(int64_t num_chunks, ChunkFunction function, void* context) {
  pool().run(num_chunks, function, context);
}

}  // namespace perilune
