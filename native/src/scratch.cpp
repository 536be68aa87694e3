// The scratch arenas.
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "perilune.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace perilune {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kSmallestBlock = size_t{1} << 20;

// With AddressSanitizer what nobody took, or gave back, is out of bounds, takings lie apart, and new ones hold NaN.
#ifdef __SANITIZE_ADDRESS__
constexpr size_t kGap = 64;
void forbid(char* data, size_t bytes) { ASAN_POISON_MEMORY_REGION(data, bytes); }
void allow(char* data, size_t bytes) { ASAN_UNPOISON_MEMORY_REGION(data, bytes); }
void make_garbage(char* data, size_t bytes) { std::memset(data, 0xff, bytes); }
#else
constexpr size_t kGap = 0;
void forbid(char*, size_t) {}
void allow(char*, size_t) {}
void make_garbage(char*, size_t) {}
#endif

size_t rounded_up(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Blocks never move while something in them is in use; when nothing is, several are exchanged for one.
struct Arena {
  struct Block {
    char* data;
    size_t size;
  };
  std::vector<Block> blocks;
  size_t block = 0, used = 0;

  ~Arena() { drop(); }

  void drop() {
    for (Block& each : blocks) {
      allow(each.data, each.size);
      std::free(each.data);
    }
    blocks.clear();
  }

  bool add(size_t size) {
    void* data = std::aligned_alloc(kAlignment, rounded_up(size));
    if (data == nullptr) return false;
    blocks.push_back({static_cast<char*>(data), rounded_up(size)});
    forbid(blocks.back().data, blocks.back().size);
    return true;
  }

  void* take(size_t bytes) {
    const size_t room = rounded_up(bytes + kGap);
    while (block < blocks.size() && used + room > blocks[block].size) {
      ++block;
      used = 0;
    }
    if (block == blocks.size() && !add(room > kSmallestBlock ? room : kSmallestBlock)) throw std::bad_alloc();
    char* taken = blocks[block].data + used;
    used += room;
    allow(taken, bytes);
    make_garbage(taken, bytes);
    return taken;
  }

  void release(size_t to_block, size_t to_used) {
    for (size_t i = to_block; i < blocks.size(); ++i) {
      const size_t kept = i == to_block ? to_used : 0;
      forbid(blocks[i].data + kept, blocks[i].size - kept);
    }
    block = to_block;
    used = to_used;
    if (block != 0 || used != 0 || blocks.size() < 2) return;
    size_t total = 0;
    for (const Block& each : blocks) total += each.size;
    drop();
    add(total);  // where that fails the next taking says so
  }
};

thread_local Arena arena;

}  // namespace

Scratch::Scratch() : block_(arena.block), used_(arena.used) {}
Scratch::~Scratch() { arena.release(block_, used_); }
void* Scratch::take_bytes(int64_t bytes) { return arena.take(static_cast<size_t>(bytes)); }

}  // namespace perilune
