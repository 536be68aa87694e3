// Which processors this process may use, and which of them belong to the threads of the pool.
#pragma once

#include <sched.h>

#include <string>
#include <vector>

namespace perilune {

constexpr const char* kSystem = "/sys/devices/system";

// Never 0.
int num_usable_processors();

cpu_set_t only(int processor);

// The numbers that a list such as "0-3,8" names.
std::vector<int> read_list(const std::string& text);

// Usable processors of each memory node that has any: one of each core first, then their siblings.
// `system` is the directory that describes nodes and processors.
std::vector<std::vector<int>> usable_nodes(const cpu_set_t& allowed, const std::string& system);

struct Place {
  int processor;   // the thread's own
  cpu_set_t node;  // where it may run: on one node, near the memory that it touched first
};

// Places of `count` threads, spread over the nodes by the number of their processors.
std::vector<Place> places_of_threads(int count);
std::vector<Place> places_of_threads(int count, const std::vector<std::vector<int>>& nodes);

}  // namespace perilune
