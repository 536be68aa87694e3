// The thread pool and its threads' scratch memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace perilune {

// One pool for the process. Chunks (fewer than 2^32) are taken from a counter, so a thread that lost its processor delays
// only the chunk it holds. Workers spin for a short, bounded time and then sleep. What a chunk throws reaches the caller
// once the region is over; chunks that had not begun are passed over. Several threads may call at once: one region is
// worked on at a time. A child of fork() starts its own workers when needed.
using ChunkFunction = void (*)(void* context, int64_t chunk);
void set_num_threads(int count);  // 0: one per processor this process may use
int num_threads();
void run_chunks(int64_t num_chunks, ChunkFunction function, void* context);

// Calls body(chunk) for every chunk in [0, num_chunks), in any order and on any thread; nested calls run in place.
template <typename Body>
void parallel(int64_t num_chunks, const Body& body) {
  run_chunks(num_chunks, [](void* context, int64_t chunk) { (*static_cast<const Body*>(context))(chunk); },
             const_cast<Body*>(&body));
}

// Scratch memory of the calling thread, 64-byte aligned, given back when the Scratch goes out of scope. Scopes nest.
// Memory that one thread took may be read and written by chunks of its own parallel region.
class Scratch {
 public:
  Scratch();
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* take_bytes(int64_t bytes);
  template <typename T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(count * static_cast<int64_t>(sizeof(T))));
  }

 private:
  size_t block_, used_;
};

}  // namespace perilune
