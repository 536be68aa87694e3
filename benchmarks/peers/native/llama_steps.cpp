// Reads a long prompt with llama.cpp in several processes, none of which runs for long, and decodes behind it.
// The state is kept in DIRECTORY/<tokens>, the seconds so far beside it. Prints one JSON object.
// Usage: llama_steps GGUF DIRECTORY THREADS FLASH(0|1) REPACK(0|1) FROM TO      reads the tokens FROM..TO-1
//        llama_steps GGUF DIRECTORY THREADS FLASH(0|1) REPACK(0|1) AT decode N  decodes N tokens at context AT
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "llama.h"

// llama.cpp's defaults: this many tokens at once
static const int BATCH = 512;

static void fail(const std::string & message) {
    fprintf(stderr, "llama_steps: %s\n", message.c_str());
    exit(1);
}

static double seconds_of(llama_context * context, std::vector<llama_token> tokens, int batch) {
    const auto start = std::chrono::steady_clock::now();
    for (size_t i = 0; i < tokens.size(); i += batch) {
        const int32_t count = std::min<size_t>(batch, tokens.size() - i);
        if (llama_decode(context, llama_batch_get_one(tokens.data() + i, count)) != 0) {
            fail("llama_decode failed");
        }
        llama_synchronize(context);
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int main(int argc, char ** argv) {
    const bool decodes = argc == 9 && !strcmp(argv[7], "decode");
    if (argc != 8 && !decodes) {
        fail("usage: llama_steps GGUF DIRECTORY THREADS FLASH REPACK FROM TO | AT decode N");
    }
    const std::string directory = argv[2];
    const int from = atoi(argv[6]);
    const int count = decodes ? atoi(argv[8]) : atoi(argv[7]) - from;
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();

    llama_model_params model_params = llama_model_default_params();
    model_params.use_extra_bufts = atoi(argv[5]) != 0;
    llama_model * model = llama_model_load_from_file(argv[1], model_params);
    if (!model) {
        fail(std::string("cannot load ") + argv[1]);
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx = (from + count + 255) / 256 * 256;
    params.n_batch = params.n_ubatch = BATCH;
    params.n_threads = params.n_threads_batch = atoi(argv[3]);
    params.flash_attn_type = atoi(argv[4]) ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context * context = llama_init_from_model(model, params);
    if (!context) {
        fail("no context");
    }

    // touch every page and start the threads, as llama-bench does
    seconds_of(context, std::vector<llama_token>(16, 1), 16);
    llama_memory_clear(llama_get_memory(context), true);

    double earlier_s = 0;
    if (from > 0) {
        const std::string path = directory + "/" + std::to_string(from);
        std::vector<llama_token> tokens(from);
        size_t found = 0;
        if (!llama_state_load_file(context, path.c_str(), tokens.data(), tokens.size(), &found)) {
            fail("no state " + path + ": read the tokens before it first");
        }
        std::ifstream(path + ".seconds") >> earlier_s;
    }
    std::vector<llama_token> tokens(count);
    const int32_t vocab_size = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (llama_token & token : tokens) {
        token = rand() % vocab_size;
    }
    const double took_s = seconds_of(context, tokens, decodes ? 1 : BATCH);
    if (decodes) {
        printf("{\"context\": %d, \"tokens\": %d, \"decode_tok_s\": %.4f}\n", from, count, count / took_s);
    } else {
        const int to = from + count;
        const std::string path = directory + "/" + std::to_string(to);
        const std::vector<llama_token> all(to, 1);
        std::filesystem::create_directories(directory);
        if (!llama_state_save_file(context, path.c_str(), all.data(), all.size())) {
            fail("cannot write " + path);
        }
        std::ofstream(path + ".seconds") << earlier_s + took_s << "\n";
        printf("{\"from\": %d, \"to\": %d, \"step_tok_s\": %.4f, \"prefill_tok_s\": %.4f}\n", from, to,
               count / took_s, to / (earlier_s + took_s));
    }
    llama_free(context);
    llama_model_free(model);
    llama_backend_free();
    return 0;
}
