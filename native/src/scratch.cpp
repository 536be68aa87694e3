// The scratch arenas.
#include <cstdlib>
#include <new>
#include <vector>

#include "perilune.h"

namespace perilune {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kSmallestBlock = size_t{1} << 20;

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
    for (Block& each : blocks) std::free(each.data);
    blocks.clear();
  }

  void add(size_t size) {
    void* data = std::aligned_alloc(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment);
    if (data == nullptr) throw std::bad_alloc();
    blocks.push_back({static_cast<char*>(data), size});
  }

  void* take(size_t bytes) {
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    while (block < blocks.size() && used + bytes > blocks[block].size) {
      ++block;
      used = 0;
    }
    if (block == blocks.size()) add(bytes > kSmallestBlock ? bytes : kSmallestBlock);
    void* taken = blocks[block].data + used;
    used += bytes;
    return taken;
  }

  void release(size_t to_block, size_t to_used) {
    block = to_block;
    used = to_used;
    if (block != 0 || used != 0 || blocks.size() < 2) return;
    size_t total = 0;
    for (const Block& each : blocks) total += each.size;
    drop();
    add(total);
  }
};

thread_local Arena arena;

}  // namespace

Scratch::Scratch() : block_(arena.block), used_(arena.used) {}
Scratch::~Scratch() { arena.release(block_, used_); }
void* Scratch::take_bytes(int64_t bytes) { return arena.take(static_cast<size_t>(bytes)); }

}  // namespace perilune
