// Times single ggml operations at the dimensions of Kimi K3 on the CPU backend; one JSON object a line.
// Usage: ops THREADS SECONDS [NAME...]   SECONDS: least time spent on each case; NAME: only these groups.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

static const int64_t HIDDEN = 7168, LATENT = 3584, INTER = 3072, HEADS = 96, HEAD_DIM = 128;
static const int64_t KV_LORA = 512, KEY_DIM = 576;

static ggml_backend_t backend;
static int num_threads;
static double least_seconds;

static ggml_backend_buffer_type_t repack_type() {
    ggml_backend_dev_t device = ggml_backend_get_device(backend);
    auto list = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts"));
    for (ggml_backend_buffer_type_t * type = list ? list(device) : nullptr; type && *type; ++type) {
        if (strcmp(ggml_backend_buft_name(*type), "CPU_REPACK") == 0) {
            return *type;
        }
    }
    fprintf(stderr, "ops: this build of ggml has no CPU_REPACK buffers\n");
    exit(1);
}

// Random contents: small floats; MXFP4 blocks of one scale byte (118..121) and 16 bytes of nibbles.
static void fill(ggml_tensor * tensor) {
    static std::mt19937_64 random(1);
    std::vector<uint8_t> bytes(ggml_nbytes(tensor));
    for (size_t i = 0; i + 8 <= bytes.size(); i += 8) {
        const uint64_t r = random();
        memcpy(&bytes[i], &r, 8);
    }
    const int64_t num_values = ggml_nelements(tensor);
    if (tensor->type == GGML_TYPE_MXFP4) {
        for (size_t i = 0; i < bytes.size(); i += 17) {
            bytes[i] = 118 + bytes[i] % 4;
        }
    } else if (tensor->type != GGML_TYPE_I32) {
        std::vector<float> values(num_values);
        for (int64_t i = 0; i < num_values; ++i) {
            values[i] = (float(bytes[i % bytes.size()]) - 127.5f) / 1024.0f;
        }
        if (tensor->type == GGML_TYPE_F32) {
            memcpy(bytes.data(), values.data(), bytes.size());
        } else {
            ggml_quantize_chunk(tensor->type, values.data(), bytes.data(), 0, num_values / tensor->ne[0],
                                tensor->ne[0], nullptr);
        }
    }
    ggml_backend_tensor_set(tensor, bytes.data(), 0, bytes.size());
}

// A graph under construction: `weights` may live in repacked memory, `inputs` and results never do.
struct Case {
    ggml_context * weights = ggml_init({64 * ggml_tensor_overhead(), nullptr, true});
    ggml_context * inputs = ggml_init({64 * ggml_tensor_overhead(), nullptr, true});
    ggml_context * results = ggml_init({1024 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true});
    ggml_cgraph * graph = ggml_new_graph(results);
    double num_flops = 0, num_bytes = 0;
    std::function<void()> prepare = [] {};
};

static void time_case(Case & c, const std::string & name, const std::string & details, bool repack) {
    std::vector<ggml_backend_buffer_t> buffers;
    if (ggml_get_first_tensor(c.weights)) {
        buffers.push_back(ggml_backend_alloc_ctx_tensors_from_buft(
            c.weights, repack ? repack_type() : ggml_backend_get_default_buffer_type(backend)));
    }
    buffers.push_back(ggml_backend_alloc_ctx_tensors(c.inputs, backend));
    auto release = [&] {
        for (ggml_backend_buffer_t buffer : buffers) {
            ggml_backend_buffer_free(buffer);
        }
        for (ggml_context * context : {c.weights, c.inputs, c.results}) {
            ggml_free(context);
        }
    };
    // no `extra`: ggml has no repacked form of this type on this processor
    if (repack && ggml_get_first_tensor(c.weights)->extra == nullptr) {
        release();
        return;
    }
    for (ggml_context * context : {c.weights, c.inputs}) {
        for (ggml_tensor * t = ggml_get_first_tensor(context); t; t = ggml_get_next_tensor(context, t)) {
            if (!t->view_src) {
                fill(t);
            }
        }
    }
    c.prepare();
    ggml_gallocr_t allocator = ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend));
    ggml_gallocr_alloc_graph(allocator, c.graph);

    std::vector<double> seconds;
    double spent = 0;
    ggml_backend_graph_compute(backend, c.graph);
    while (seconds.size() < 3 || (spent < least_seconds && seconds.size() < 2000)) {
        const auto start = std::chrono::steady_clock::now();
        ggml_backend_graph_compute(backend, c.graph);
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        spent += seconds.back();
    }
    std::sort(seconds.begin(), seconds.end());
    const double median = seconds[seconds.size() / 2];
    printf("{\"op\": \"%s\", %s, \"repack\": %s, \"threads\": %d, \"ms\": %.4f, \"ms_min\": %.4f, \"ms_max\": %.4f, "
           "\"runs\": %zu, \"gflop_per_s\": %.2f, \"gb_per_s\": %.2f}\n",
           name.c_str(), details.c_str(), repack ? "true" : "false", num_threads, 1e3 * median,
           1e3 * seconds.front(), 1e3 * seconds.back(), seconds.size(), 1e-9 * c.num_flops / median,
           1e-9 * c.num_bytes / median);
    fflush(stdout);

    ggml_gallocr_free(allocator);
    release();
}

// One layer's routed gate or up projection: `rows` token rows for each of 32 experts, 16 experts a token.
static void expert_matmul(int64_t rows, bool repack) {
    const int64_t num_experts = 32, num_used = 16, num_tokens = std::max<int64_t>(1, rows * num_experts / num_used);
    Case c;
    ggml_tensor * experts = ggml_new_tensor_3d(c.weights, GGML_TYPE_MXFP4, LATENT, INTER, num_experts);
    ggml_tensor * tokens = ggml_new_tensor_3d(c.inputs, GGML_TYPE_F32, LATENT, 1, num_tokens);
    ggml_tensor * ids = ggml_new_tensor_2d(c.inputs, GGML_TYPE_I32, num_used, num_tokens);
    ggml_build_forward_expand(c.graph, ggml_mul_mat_id(c.results, experts, tokens, ids));
    c.prepare = [&] {
        std::vector<int32_t> chosen(num_used * num_tokens);
        for (size_t i = 0; i < chosen.size(); ++i) {
            chosen[i] = int32_t(i % num_experts);
        }
        ggml_backend_tensor_set(ids, chosen.data(), 0, chosen.size() * 4);
    };
    c.num_flops = 2.0 * LATENT * INTER * num_used * num_tokens;
    c.num_bytes = LATENT * INTER * 17.0 / 32.0 * std::min(num_experts, num_used * num_tokens);
    time_case(c, "expert matmul mxfp4", "\"rows_per_expert\": " + std::to_string(rows), repack);
}

// A chain-free row of equal matrices, together far larger than the cache, each times the same `rows` rows.
static void dense_matmul(ggml_type type, int64_t n_in, int64_t n_out, int64_t rows, bool repack) {
    const int64_t num_matrices = std::max<int64_t>(1, int64_t(200e6 / double(ggml_row_size(type, n_in) * n_out)));
    Case c;
    ggml_tensor * x = ggml_new_tensor_2d(c.inputs, GGML_TYPE_F32, n_in, rows);
    for (int64_t i = 0; i < num_matrices; ++i) {
        ggml_tensor * w = ggml_new_tensor_2d(c.weights, type, n_in, n_out);
        ggml_build_forward_expand(c.graph, ggml_mul_mat(c.results, w, x));
        c.num_bytes += double(ggml_nbytes(w));
    }
    c.num_flops = 2.0 * double(n_in * n_out * rows * num_matrices);
    const std::string details = "\"in\": " + std::to_string(n_in) + ", \"out\": " + std::to_string(n_out) +
                                ", \"rows\": " + std::to_string(rows) +
                                ", \"matrices\": " + std::to_string(num_matrices);
    time_case(c, std::string("matmul ") + ggml_type_name(type), details, repack);
}

// Latent attention of one layer, all heads on the one shared latent row per key.
static void mla_attention(int64_t num_keys, int64_t num_tokens, bool flash) {
    Case c;
    ggml_tensor * q = ggml_new_tensor_3d(c.inputs, GGML_TYPE_F32, KEY_DIM, num_tokens, HEADS);
    ggml_tensor * k = ggml_new_tensor_3d(c.inputs, GGML_TYPE_F16, KEY_DIM, num_keys, 1);
    ggml_tensor * mask = ggml_new_tensor_2d(c.inputs, flash ? GGML_TYPE_F16 : GGML_TYPE_F32, num_keys, num_tokens);
    ggml_tensor * v = ggml_view_3d(c.results, k, KV_LORA, num_keys, 1, k->nb[1], k->nb[2], 0);
    const float scale = 1.0f / 13.856f;
    ggml_tensor * out;
    if (flash) {
        out = ggml_flash_attn_ext(c.results, q, k, v, mask, scale, 0.0f, 0.0f);
        ggml_prec_set_acc(out, GGML_PREC_F32);
    } else {
        ggml_tensor * scores = ggml_mul_mat(c.results, k, q);
        scores = ggml_soft_max_ext(c.results, scores, mask, scale, 0.0f);
        out = ggml_mul_mat(c.results, ggml_cont(c.results, ggml_transpose(c.results, v)), scores);
    }
    ggml_build_forward_expand(c.graph, out);
    c.prepare = [&] {
        const std::vector<uint8_t> zeros(ggml_nbytes(mask));
        ggml_backend_tensor_set(mask, zeros.data(), 0, zeros.size());
    };
    c.num_flops = 2.0 * double(HEADS * num_tokens * num_keys * (KEY_DIM + KV_LORA));
    c.num_bytes = double(ggml_nbytes(k));
    time_case(c, flash ? "mla attention, flash" : "mla attention, plain",
              "\"keys\": " + std::to_string(num_keys) + ", \"tokens\": " + std::to_string(num_tokens), false);
}

static void kda(int64_t num_tokens) {
    Case c;
    auto input = [&](int64_t width) {
        return ggml_new_tensor_4d(c.inputs, GGML_TYPE_F32, width, HEADS, num_tokens, 1);
    };
    ggml_tensor * q = input(HEAD_DIM), * k = input(HEAD_DIM), * v = input(HEAD_DIM), * g = input(HEAD_DIM);
    ggml_tensor * beta = input(1);
    ggml_tensor * state = ggml_new_tensor_4d(c.inputs, GGML_TYPE_F32, HEAD_DIM, HEAD_DIM, HEADS, 1);
    ggml_build_forward_expand(c.graph, ggml_gated_delta_net(c.results, q, k, v, g, beta, state, 1));
    // per token and entry of the state: decay, what it holds for k, the update, what it holds for q
    c.num_flops = 7.0 * double(HEAD_DIM * HEAD_DIM * HEADS * num_tokens);
    c.num_bytes = 2.0 * double(ggml_nbytes(state));
    time_case(c, "kda", "\"tokens\": " + std::to_string(num_tokens), false);
}

static void indexer(int64_t num_keys) {
    Case c;
    ggml_tensor * q = ggml_new_tensor_4d(c.inputs, GGML_TYPE_F32, 128, 64, 1, 1);
    ggml_tensor * k = ggml_new_tensor_4d(c.inputs, GGML_TYPE_F16, 128, 1, num_keys, 1);
    ggml_tensor * weights = ggml_new_tensor_4d(c.inputs, GGML_TYPE_F32, 64, 1, 1, 1);
    ggml_tensor * mask = ggml_new_tensor_4d(c.inputs, GGML_TYPE_F16, num_keys, 1, 1, 1);
    ggml_build_forward_expand(c.graph, ggml_lightning_indexer(c.results, q, k, weights, mask));
    c.num_flops = 2.0 * 64 * 128 * double(num_keys);
    c.num_bytes = double(ggml_nbytes(k));
    time_case(c, "indexer", "\"keys\": " + std::to_string(num_keys) + ", \"tokens\": 1", false);
}

int main(int argc, char ** argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: ops THREADS SECONDS [experts|matvec|dense|mla|kda|indexer...]\n");
        return 2;
    }
    num_threads = atoi(argv[1]);
    least_seconds = atof(argv[2]);
    backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(backend, num_threads);
    auto wanted = [&](const char * group) {
        return argc == 3 || std::any_of(argv + 3, argv + argc, [&](char * arg) { return !strcmp(arg, group); });
    };
    for (bool repack : {true, false}) {
        for (int64_t rows : {0, 4, 9, 16, 64, 512}) {  // 0: a single token, one row for each of its 16 experts
            if (wanted("experts")) {
                expert_matmul(rows, repack);
            }
        }
        if (wanted("matvec")) {
            dense_matmul(GGML_TYPE_MXFP4, LATENT, INTER, 1, repack);
        }
        for (int64_t rows : {1, 512}) {
            if (wanted("dense")) {
                dense_matmul(GGML_TYPE_Q8_0, HIDDEN, HEADS * HEAD_DIM, rows, repack);
            }
        }
    }
    for (int64_t rows : {1, 512}) {
        if (wanted("dense")) {
            dense_matmul(GGML_TYPE_BF16, HIDDEN, HEADS * HEAD_DIM, rows, false);
        }
    }
    for (bool flash : {true, false}) {
        for (int64_t num_keys : {4096, 32768}) {
            if (wanted("mla")) {
                mla_attention(num_keys, 1, flash);
            }
        }
        if (wanted("mla")) {
            mla_attention(4096, 64, flash);
        }
    }
    for (int64_t num_tokens : {1, 64, 512}) {
        if (wanted("kda")) {
            kda(num_tokens);
        }
    }
    for (int64_t num_keys : {4096, 32768}) {
        if (wanted("indexer")) {
            indexer(num_keys);
        }
    }
    ggml_backend_free(backend);
    return 0;
}
