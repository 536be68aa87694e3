// The thread pool, the scratch arenas, and where threads belong.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "processors.h"

using namespace perilune;
using namespace perilune::tests;

static bool counts_each_chunk_once(int64_t num_chunks) {
  std::vector<std::atomic<int>> times(num_chunks);
  parallel(num_chunks, [&](int64_t chunk) { ++times[chunk]; });
  for (const std::atomic<int>& each : times)
    if (each != 1) return false;
  return true;
}

TEST(pool_runs_each_chunk_once) {
  for (int threads : {1, 2, 3, 8}) {
    set_num_threads(threads);
    CHECK(num_threads() == threads);
    for (int64_t chunks : {0, 1, 2, 3, 7, 64, 1000}) CHECK(counts_each_chunk_once(chunks));
    for (int region = 0; region < 2000; ++region) CHECK(counts_each_chunk_once(3));
  }
  set_num_threads(0);
  CHECK(num_threads() == num_usable_processors());
}

TEST(pool_wakes_sleepers) {
  set_num_threads(4);
  for (int region = 0; region < 50; ++region) {
    CHECK(counts_each_chunk_once(16));
    usleep(region % 3 * 100);  // shorter and longer than workers spin
  }
}

TEST(pool_runs_nested_regions_in_place) {
  set_num_threads(4);
  std::atomic<int> count{0};
  std::atomic<bool> has_moved{false};
  parallel(8, [&](int64_t) {
    const auto thread = std::this_thread::get_id();
    parallel(5, [&](int64_t) {
      ++count;
      if (std::this_thread::get_id() != thread) has_moved = true;
    });
  });
  CHECK(count == 40);
  CHECK(!has_moved);
}

TEST(pool_hands_errors_to_the_caller) {
  for (int threads : {1, 2, 4}) {
    set_num_threads(threads);
    for (int64_t bad : {0, 5, 63}) {
      std::string found;
      try {
        parallel(64, [&](int64_t chunk) {
          if (chunk == bad) throw std::runtime_error("chunk " + std::to_string(chunk));
        });
      } catch (const std::runtime_error& error) {
        found = error.what();
      }
      CHECK(found == "chunk " + std::to_string(bad));
      CHECK(counts_each_chunk_once(64));
    }
    int num_caught = 0;
    for (int region = 0; region < 200; ++region) {
      try {
        parallel(8, [](int64_t) { throw std::bad_alloc(); });
      } catch (const std::bad_alloc&) {
        ++num_caught;
      }
    }
    CHECK(num_caught == 200);
  }
}

TEST(pool_serves_several_callers_and_changes_of_its_size) {
  std::atomic<int> num_wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&, caller] {
      for (int region = 0; region < 200; ++region) {
        if (region % 10 == 0) set_num_threads(1 + (caller + region) % 4);
        num_wrong += counts_each_chunk_once(17) ? 0 : 1;
      }
    });
  for (std::thread& caller : callers) caller.join();
  CHECK(num_wrong == 0);
}

TEST(pool_works_in_a_child_of_fork) {
  set_num_threads(3);
  CHECK(counts_each_chunk_once(16));
  std::atomic<bool> is_over{false};
  std::thread other([&] {
    while (!is_over) counts_each_chunk_once(16);
  });
  for (int child = 0; child < 5; ++child) {
    const pid_t process = fork();
    if (process == 0) _exit(num_threads() == 3 && counts_each_chunk_once(16) ? 0 : 1);
    int status = 1;
    CHECK(waitpid(process, &status, 0) == process);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  is_over = true;
  other.join();
}

TEST(scratch_nests_and_keeps_threads_apart) {
  set_num_threads(4);
  std::atomic<int> num_wrong{0};
  for (int round = 0; round < 20; ++round) {
    Scratch outer;
    auto* shared = outer.take<int64_t>(64);
    parallel(64, [&](int64_t chunk) {
      Scratch scratch;
      const int64_t count = 1000 + chunk * 20000;
      auto* mine = scratch.take<int64_t>(count);
      if (reinterpret_cast<uintptr_t>(mine) % 64 != 0) ++num_wrong;
      std::iota(mine, mine + count, chunk);
      {
        Scratch inner;
        auto* more = inner.take<int64_t>(300000);
        more[0] = more[299999] = -1;
      }
      shared[chunk] = std::accumulate(mine, mine + count, int64_t{0}) - count * (count - 1) / 2 - count * chunk;
    });
    for (int64_t chunk = 0; chunk < 64; ++chunk) num_wrong += shared[chunk] == 0 ? 0 : 1;
  }
  CHECK(num_wrong == 0);
}

// ---- places ---------------------------------------------------------------------------------------------------------

TEST(places_lists_of_numbers) {
  CHECK(read_list("0-3,8,10-11\n") == (std::vector<int>{0, 1, 2, 3, 8, 10, 11}));
  CHECK(read_list("5") == std::vector<int>{5});
  CHECK(read_list("\n").empty());
  CHECK(read_list("").empty());
}

static void write(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << text << "\n";
}

static cpu_set_t set_of(const std::vector<int>& processors) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int processor : processors) CPU_SET(processor, &set);
  return set;
}

// Two nodes of two cores of two threads, numbered as machines do, and a node 3 that has memory only.
TEST(places_nodes_that_have_usable_processors) {
  char name[] = "/tmp/perilune-nodes-XXXXXX";
  CHECK(mkdtemp(name) != nullptr);
  const std::filesystem::path system = name;
  write(system / "node/online", "0,2-3");
  write(system / "node/node0/cpulist", "0-1,4-5");
  write(system / "node/node2/cpulist", "2-3,6-7");
  write(system / "node/node3/cpulist", "");
  for (int core = 0; core < 4; ++core)
    for (int thread : {core, core + 4})
      write(system / ("cpu/cpu" + std::to_string(thread)) / "topology/thread_siblings_list",
            std::to_string(core) + "," + std::to_string(core + 4));
  using Nodes = std::vector<std::vector<int>>;
  const auto all = set_of({0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(usable_nodes(all, system) == (Nodes{{0, 1, 4, 5}, {2, 3, 6, 7}}));
  CHECK(usable_nodes(set_of({4, 1, 5}), system) == (Nodes{{1, 4, 5}}));
  CHECK(usable_nodes(set_of({0, 6}), system) == (Nodes{{0}, {6}}));
  CHECK(usable_nodes(set_of({0, 6}), system / "absent") == (Nodes{{0, 6}}));
  std::filesystem::remove_all(system);
}

TEST(places_threads_spread_over_nodes_and_cores) {
  const std::vector<std::vector<int>> nodes = {{0, 1, 4, 5}, {2, 3, 6, 7}};
  std::vector<int> processors;
  for (const Place& place : places_of_threads(4, nodes)) processors.push_back(place.processor);
  CHECK(processors == (std::vector<int>{0, 1, 2, 3}));
  processors.clear();
  for (const Place& place : places_of_threads(8, nodes)) processors.push_back(place.processor);
  CHECK(processors == (std::vector<int>{0, 1, 4, 5, 2, 3, 6, 7}));
  const Place last = places_of_threads(3, nodes)[2];
  CHECK(CPU_COUNT(&last.node) == 4 && CPU_ISSET(2, &last.node) && CPU_ISSET(7, &last.node));
  CHECK(places_of_threads(20, {{3}}).size() == 20);
}
