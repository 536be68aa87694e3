// Reads anonymous memory on huge pages with one sequential stream per thread; prints the GB/s of each pass as JSON.
// Usage: read_probe THREADS MEBIBYTES PASSES
#include <sys/mman.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

// eight independent vectors a step: the adds must not wait for each other
static uint64_t read_region(const uint64_t * data, size_t num_words) {
    typedef uint64_t vec __attribute__((vector_size(32)));
    const vec * v = reinterpret_cast<const vec *>(data);
    vec sums[8] = {};
    for (size_t i = 0; i < num_words / 4; i += 8) {
        for (int j = 0; j < 8; ++j) {
            sums[j] += v[i + j];
        }
    }
    uint64_t total = 0;
    for (const vec & sum : sums) {
        total += sum[0] + sum[1] + sum[2] + sum[3];
    }
    return total;
}

int main(int argc, char ** argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: read_probe THREADS MEBIBYTES PASSES\n");
        return 2;
    }
    const int num_threads = atoi(argv[1]);
    const size_t region_bytes = (size_t(atoi(argv[2])) << 20) / num_threads / 4096 * 4096;
    const int num_passes = atoi(argv[3]);

    std::vector<uint64_t *> regions(num_threads);
    std::vector<uint64_t> sums(num_threads);
    auto each = [&](auto && work) {
        std::vector<std::thread> threads;
        for (int t = 0; t < num_threads; ++t) {
            threads.emplace_back(work, t);
        }
        for (std::thread & thread : threads) {
            thread.join();
        }
    };
    each([&](int t) {
        void * p = mmap(nullptr, region_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) {
            perror("read_probe");
            exit(1);
        }
        madvise(p, region_bytes, MADV_HUGEPAGE);
        memset(p, t + 1, region_bytes);
        regions[t] = static_cast<uint64_t *>(p);
    });
    printf("{\"threads\": %d, \"gb_per_s\": [", num_threads);
    for (int pass = 0; pass < num_passes; ++pass) {
        const auto start = std::chrono::steady_clock::now();
        each([&](int t) { sums[t] += read_region(regions[t], region_bytes / 8); });
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        printf("%s%.2f", pass ? ", " : "", 1e-9 * double(region_bytes) * num_threads / took.count());
    }
    uint64_t sum = 0;
    for (uint64_t s : sums) {
        sum += s;
    }
    printf("], \"sum\": %llu}\n", static_cast<unsigned long long>(sum));
    return 0;
}
