// The Python face of the core: integer addresses and sizes in, nothing out. Knows no torch.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "communicator.h"
#include "experts.h"
#include "perilune.h"
#include "program.h"

namespace nb = nanobind;

// Inside, `kernels` is the one of this file.
namespace perilune::bindings {

// The kernels as the functions of this file call them: none of them goes past a recording.
struct Calls {
  Recorded<LinearArgs> linear{"linear", &Kernels::linear};
  Recorded<QuantizeArgs> quantize_rows{"quantize_rows", &Kernels::quantize_rows};
  Recorded<RouteArgs> moe_route{"moe_route", &Kernels::moe_route};
  Recorded<ExpertsArgs> moe_experts{"moe_experts", &Kernels::moe_experts};
  Recorded<SituArgs> situ{"situ", &Kernels::situ};
  Recorded<RmsNormArgs> rms_norm{"rms_norm", &Kernels::rms_norm};
  Recorded<GatedRmsNormArgs> gated_rms_norm{"gated_rms_norm", &Kernels::gated_rms_norm};
  Recorded<LayerNormArgs> layer_norm{"layer_norm", &Kernels::layer_norm};
  Recorded<EmbedArgs> embed_rows{"embed_rows", &Kernels::embed_rows};
  Recorded<StoreArgs> store_rows{"store_rows", &Kernels::store_rows};
  Recorded<AppendArgs> append_rows{"append_rows", &Kernels::append_rows};
  Recorded<StorePackedArgs> store_packed_rows{"store_packed_rows", &Kernels::store_packed_rows};
  Recorded<PairArgs> add_rows{"add_rows", &Kernels::add_rows};
  Recorded<PairArgs> gate_rows{"gate_rows", &Kernels::gate_rows};
  Recorded<PairArgs> swiglu{"swiglu", &Kernels::swiglu};
  Recorded<ScaleArgs> scale_rows{"scale_rows", &Kernels::scale_rows};
  Recorded<AttnResArgs> attn_res_mix{"attn_res_mix", &Kernels::attn_res_mix};
  Recorded<ConvArgs> short_conv{"short_conv", &Kernels::short_conv};
  Recorded<DecayArgs> kda_decay{"kda_decay", &Kernels::kda_decay};
  Recorded<KdaArgs> kda_recurrent{"kda_recurrent", &Kernels::kda_recurrent};
  Recorded<KdaArgs> kda_chunk{"kda_chunk", &Kernels::kda_chunk};
  Recorded<KdaMixArgs> kda_mix{"kda_mix", &Kernels::kda_mix};
  Recorded<KdaVerifyArgs> kda_verify{"kda_verify", &Kernels::kda_verify};
  Recorded<KdaCommitArgs> kda_commit{"kda_commit", &Kernels::kda_commit};
  Recorded<MlaArgs> mla_prefill{"mla_prefill", &Kernels::mla_prefill};
  Recorded<MlaArgs> mla_decode{"mla_decode", &Kernels::mla_decode};
  Recorded<IndexerArgs> indexer_topk{"indexer_topk", &Kernels::indexer_topk};
  Recorded<TurnsArgs> rotary_turns{"rotary_turns", &Kernels::rotary_turns};
  Recorded<RotateArgs> rotate{"rotate", &Kernels::rotate};
  Recorded<GqaRowsArgs> gqa_rows{"gqa_rows", &Kernels::gqa_rows};
  Recorded<GqaArgs> gqa_attention{"gqa_attention", &Kernels::gqa_attention};
  Recorded<PatchAttentionArgs> patch_attention{"patch_attention", &Kernels::patch_attention};
  Recorded<GeluArgs> gelu_tanh{"gelu_tanh", &Kernels::gelu_tanh};
  Recorded<SampleArgs> sample_tokens{"sample_tokens", &Kernels::sample_tokens};
  Recorded<PenaltyArgs> penalize{"penalize", &Kernels::penalize};
};

const Calls& kernels() {
  static const Calls calls;
  return calls;
}

using Address = uintptr_t;
using Int = int64_t;

template <typename T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}
template <typename T = void>
const T* from(Address address) {
  return reinterpret_cast<const T*>(address);
}
Type type_of(int code) { return static_cast<Type>(code); }

using MatrixTuple = std::tuple<Address, Address, Int, Int, int>;  // data, scales, rows, columns, type
Matrix matrix(const MatrixTuple& given) {
  const auto& [data, scales, rows, columns, type] = given;
  return {from(data), from(scales), rows, columns, type_of(type)};
}

using SequencesTuple = std::tuple<Address, Address, Int>;  // cu_seqlens, slots, count
Sequences sequences(const SequencesTuple& given) {
  const auto& [cu_seqlens, slots, count] = given;
  return {from<int64_t>(cu_seqlens), from<int64_t>(slots), count};
}

using PagesTuple = std::tuple<Address, Int, Int, Address, Int, Address>;
Pages pages(const PagesTuple& given) {
  const auto& [pool, row_bytes, block_size, table, table_width, seq_lens] = given;
  return {from(pool), row_bytes, block_size, from<int64_t>(table), table_width, from<int64_t>(seq_lens)};
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const char* const* name = available_isas(); *name != nullptr; ++name) names.emplace_back(*name);
  return names;
}

std::vector<double> read_passes(Int bytes, int streams, int passes) {
  std::vector<double> rates(static_cast<size_t>(passes));
  if (!read_rates(bytes, streams, rates.data(), passes)) throw std::bad_alloc();
  return rates;
}

void linear(Address x, int type, Int tokens, const std::vector<MatrixTuple>& weights, const std::vector<Address>& y,
            bool int8_activations) {
  std::vector<Matrix> matrices;
  std::vector<void*> outputs;
  for (const MatrixTuple& weight : weights) matrices.push_back(matrix(weight));
  for (Address output : y) outputs.push_back(at(output));
  if (matrices.size() != outputs.size()) throw std::invalid_argument("linear: one output per weight");
  kernels().linear({from(x), type_of(type), tokens, matrices.data(), outputs.data(),
                    static_cast<Int>(matrices.size()), int8_activations});
}

void quantize_rows(Address x, int type, Int rows, Int columns, int to, Address values, Address scales) {
  kernels().quantize_rows({from(x), type_of(type), rows, columns, type_of(to), at(values), at<float>(scales)});
}

void moe_route(Address x, int type, Int tokens, const MatrixTuple& weight, Address bias, Int chosen, bool renormalize,
               float scaling, Address ids, Address weights) {
  kernels().moe_route({from(x), type_of(type), tokens, matrix(weight), from<float>(bias), chosen, renormalize, scaling,
                       at<int64_t>(ids), at<float>(weights)});
}

void moe_experts(Address x, int type, Int tokens, Address ids, Address weights, Int chosen, Address addresses,
                 Int num_experts, Int latent, Int inner, int weight_type, float beta, float linear_beta, Address y,
                 bool int8_activations, Int scratch_bytes) {
  kernels().moe_experts({from(x), type_of(type), tokens, from<int64_t>(ids), from<float>(weights), chosen,
                         from<int64_t>(addresses), num_experts, latent, inner, type_of(weight_type), beta, linear_beta,
                         at(y), int8_activations, scratch_bytes});
}

// `places` [layers, experts, 6] are triples of file, offset and bytes.
void new_expert_cache(ExpertCache* self, std::vector<std::string> files, Address places, Int num_places, Int layers,
                      Int slot_bytes, Int num_slots, int num_readers) {
  const auto* first = from<ExpertCache::Place>(places);
  new (self) ExpertCache(std::move(files), {first, first + num_places}, layers, slot_bytes, num_slots, num_readers);
}

std::map<std::string, double> expert_stats(ExpertCache& cache) {
  const ExpertStats stats = cache.stats();
  const auto number = [](int64_t count) { return static_cast<double>(count); };
  return {{"passes", number(stats.passes)},     {"uses", number(stats.uses)},   {"hits", number(stats.hits)},
          {"early", number(stats.early)},       {"expected", number(stats.expected)},
          {"read_bytes", number(stats.read_bytes)}, {"busy_s", stats.busy_s},   {"waited_s", stats.waited_s},
          {"waited_bytes", number(stats.waited_bytes)}};
}

void fetch_experts(ExpertCache& cache, Int layer, Address ids, Int count, bool is_certain) {
  const auto call = [&cache, layer, ids = from<int64_t>(ids), count, is_certain] {
    is_certain ? cache.want(layer, ids, count) : cache.expect(layer, ids, count);
  };
  call();
  if (Program* program = Program::recording()) program->append("fetch_experts", call);
}

void moe_experts_streamed(Address x, int type, Int tokens, Address ids, Address weights, Int chosen, ExpertCache& source,
                          Int layer, Int num_experts, Int latent, Int inner, int weight_type, float beta,
                          float linear_beta, Address y, bool int8_activations, Int scratch_bytes) {
  kernels().moe_experts({from(x), type_of(type), tokens, from<int64_t>(ids), from<float>(weights), chosen, nullptr,
                         num_experts, latent, inner, type_of(weight_type), beta, linear_beta, at(y), int8_activations,
                         scratch_bytes, &source, layer});
}

void situ(Address gate, Address up, int type, Int count, float beta, float linear_beta, Address y) {
  kernels().situ({from(gate), from(up), type_of(type), count, beta, linear_beta, at(y)});
}

void rms_norm(Address x, int type, Int rows, Int columns, Int stride, Address weight, int weight_type, float eps,
              Address y, Int passed) {
  kernels().rms_norm(
      {from(x), type_of(type), rows, columns, stride, from(weight), type_of(weight_type), eps, at(y), passed});
}

void gated_rms_norm(Address x, Address gate, int type, Int rows, Int columns, Address weight, float eps, Address y) {
  kernels().gated_rms_norm({from(x), from(gate), type_of(type), rows, columns, from<float>(weight), eps, at(y)});
}

void layer_norm(Address x, int type, Int rows, Int columns, Address weight, Address bias, int weight_type, float eps,
                Address y) {
  kernels().layer_norm(
      {from(x), type_of(type), rows, columns, from(weight), from(bias), type_of(weight_type), eps, at(y)});
}

void embed_rows(Address weight, int weight_type, Int num_rows, Int columns, Address ids, Int tokens, Address y,
                int type) {
  kernels().embed_rows({from(weight), type_of(weight_type), num_rows, columns, from<int64_t>(ids), tokens, at(y),
                        type_of(type)});
}

void store_rows(Address x, int type, Int tokens, Int columns, Address slots, Address pool, int pool_type,
                Int num_rows) {
  kernels().store_rows({from(x), type_of(type), tokens, columns, from<int64_t>(slots), at(pool), type_of(pool_type),
                        num_rows});
}

void append_rows(Address x, int type, Int tokens, Int columns, Address end, Address pool, int pool_type,
                 Int num_rows) {
  kernels().append_rows({from(x), type_of(type), tokens, columns, at<int64_t>(end), at(pool), type_of(pool_type),
                         num_rows});
}

void store_packed_rows(Address x, int type, Int tokens, Int columns, Int scaled, Address slots, Address pool, int to,
                       Int row_bytes, Int num_rows) {
  kernels().store_packed_rows(
      {from(x), type_of(type), tokens, columns, scaled, from<int64_t>(slots), at(pool), type_of(to), row_bytes, num_rows});
}

template <Recorded<PairArgs> Calls::*kernel>
void pair(Address x, Address z, int type, Int count, Address y) {
  (kernels().*kernel)({from(x), from(z), type_of(type), count, at(y)});
}

void scale_rows(Address x, int type, Int count, float factor, Address y) {
  kernels().scale_rows({from(x), type_of(type), count, factor, at<float>(y)});
}

void attn_res_mix(const std::vector<Address>& candidates, int type, Int tokens, Int columns, Address query,
                  Address norm_weight, int weight_type, float eps, Address y) {
  std::vector<const void*> pointers;
  for (Address candidate : candidates) pointers.push_back(from(candidate));
  kernels().attn_res_mix({pointers.data(), static_cast<Int>(pointers.size()), type_of(type), tokens, columns,
                          from<float>(query), from(norm_weight), type_of(weight_type), eps, at(y)});
}

void short_conv(Address x, int type, Int channels, Int taps, Int stride, Address weight, Address state, int state_type,
                const SequencesTuple& sequences_given, Address y) {
  kernels().short_conv({from(x), type_of(type), channels, taps, stride, from<float>(weight), at(state),
                        type_of(state_type), sequences(sequences_given), at(y)});
}

void kda_decay(Address z, int type, Int tokens, Int heads, Int width, Address a_log, Address dt_bias,
               float lower_bound, Address g) {
  kernels().kda_decay({from(z), type_of(type), tokens, heads, width, from<float>(a_log), from<float>(dt_bias),
                       lower_bound, at<float>(g)});
}

template <Recorded<KdaArgs> Calls::*kernel>
void kda(Address q, Address k, Address v, int type, Int heads, Int width, Int q_stride, Int k_stride, Int v_stride,
         Address g, Address beta, float l2_eps, Address state, const SequencesTuple& sequences_given, Address o) {
  (kernels().*kernel)({from(q), from(k), from(v), type_of(type), heads, width, q_stride, k_stride, v_stride,
                       from<float>(g), from<float>(beta), l2_eps, at<float>(state), sequences(sequences_given), at(o)});
}

using RecordsTuple = std::tuple<Address, Address, Address, Address>;  // inputs, keys, decays, corrections
KdaRecords records(const RecordsTuple& given) {
  const auto& [inputs, keys, decays, corrections] = given;
  return {at(inputs), at(keys), at<float>(decays), at<float>(corrections)};
}

// With the addresses of records it verifies; null ones make the plain step.
void kda_mix(Address q, Address k, Address v, Address z, Address beta, Address gate, int type, Int heads, Int width,
             Int taps, Address q_conv, Address k_conv, Address v_conv, Address a_log, Address dt_bias,
             Address norm_weight, float lower_bound, float l2_eps, float norm_eps, Address state, Address conv_state,
             int conv_type, const SequencesTuple& sequences_given, Address o, const RecordsTuple& records_given) {
  const KdaMixArgs mix{from(q), from(k), from(v), from(z), from(beta), from(gate), type_of(type), heads, width, taps,
                       from<float>(q_conv), from<float>(k_conv), from<float>(v_conv), from<float>(a_log),
                       from<float>(dt_bias), from<float>(norm_weight), lower_bound, l2_eps, norm_eps, at<float>(state),
                       at(conv_state), type_of(conv_type), sequences(sequences_given), at(o)};
  if (std::get<0>(records_given) == 0)
    kernels().kda_mix(mix);
  else
    kernels().kda_verify({mix, records(records_given)});
}

void kda_commit(int type, Int layers, Int heads, Int width, Int taps, Int rows, Int num_slots,
                const RecordsTuple& records_given, Address state, Address conv_state, int conv_type,
                const SequencesTuple& sequences_given, Address counts) {
  kernels().kda_commit({type_of(type), layers, heads, width, taps, rows, num_slots, records(records_given),
                        at<float>(state), at(conv_state), type_of(conv_type), sequences(sequences_given),
                        from<int64_t>(counts)});
}

template <Recorded<MlaArgs> Calls::*kernel>
void mla(Address q, int type, Int q_stride, const PagesTuple& pages_given, int row_type,
         const SequencesTuple& sequences_given, Address w_uk, Address w_uv, int weight_type, Int uk_stride,
         Int uv_stride, Int heads, Int key, Int shared, Int latent, Int value, float scale, Address selected,
         Int num_selected, Address o) {
  (kernels().*kernel)({from(q), type_of(type), q_stride, pages(pages_given), type_of(row_type),
                       sequences(sequences_given), from(w_uk), from(w_uv), type_of(weight_type), uk_stride, uv_stride,
                       heads, key, shared, latent, value, scale, from<int64_t>(selected), num_selected, at(o)});
}

void indexer_topk(Address q, int type, Address weights, const PagesTuple& pages_given, int key_type,
                  const SequencesTuple& sequences_given, Int heads, Int width, Int topk, Address selected) {
  kernels().indexer_topk({from(q), type_of(type), from<float>(weights), pages(pages_given), type_of(key_type),
                          sequences(sequences_given), heads, width, topk, at<int64_t>(selected)});
}

void rotary_turns(Address frequencies, Int pairs, double factor, Address seq_lens, Address cu_seqlens, Int count,
                  Address turns) {
  kernels().rotary_turns({from<double>(frequencies), pairs, factor, from<int64_t>(seq_lens), from<int64_t>(cu_seqlens),
                          count, at<float>(turns)});
}

void rotate(Address x, int type, Int tokens, Int heads, Int width, Int turned, Address turns, bool is_interleaved,
            Address y) {
  kernels().rotate(
      {from(x), type_of(type), tokens, heads, width, turned, from<float>(turns), is_interleaved, at(y)});
}

void gqa_rows(Address k, Address v, int type, Int tokens, Int groups, Int width, Address norm, int norm_type, float eps,
              Address turns, bool is_interleaved, Address rows) {
  kernels().gqa_rows({from(k), from(v), type_of(type), tokens, groups, width, from(norm), type_of(norm_type), eps,
                      from<float>(turns), is_interleaved, at(rows)});
}

void gqa_attention(Address q, int type, const PagesTuple& pages_given, const SequencesTuple& sequences_given, Int heads,
                   Int groups, Int width, float scale, Address o) {
  kernels().gqa_attention({from(q), type_of(type), pages(pages_given), sequences(sequences_given), heads, groups, width,
                           scale, at(o)});
}

void patch_attention(Address qkv, int type, Int heads, Int width, Address cos, Address sin, Address cu_seqlens, Int count,
                     float scale, Int first, Int end, Address o) {
  kernels().patch_attention({from(qkv), type_of(type), heads, width, from<float>(cos), from<float>(sin),
                             from<int64_t>(cu_seqlens), count, scale, first, end, at(o)});
}

void gelu_tanh(Address x, int type, Int count, Address y) {
  kernels().gelu_tanh({from(x), type_of(type), count, at(y)});
}

void sample_tokens(Address logits, int type, Int rows, Int columns, Address mask, Address settings, Address ids,
                   Address best, Address masses) {
  kernels().sample_tokens({from(logits), type_of(type), rows, columns, from<int32_t>(mask), from<double>(settings),
                           at<int64_t>(ids), at<float>(best), at<int64_t>(masses)});
}

void penalize(Address logits, Int columns, Address ids, Int count, Int num_prompt, float repetition, float frequency,
              float presence) {
  kernels().penalize(
      {at<float>(logits), columns, from<int64_t>(ids), count, num_prompt, repetition, frequency, presence});
}

}  // namespace perilune::bindings

NB_MODULE(_native, m) {
  m.doc() = "The native core: see native/include/perilune.h for what each function does.";
  // Every kernel runs without the interpreter lock: it touches no Python object.
  const auto free = nb::call_guard<nb::gil_scoped_release>();
  using namespace perilune;
  using namespace perilune::bindings;
  m.def("isa", [] { return std::string(perilune::kernels().isa); });
  m.def("available_isas", isas);
  m.def("use_isa", [](const std::string& name) { return use_isa(name.c_str()); });
  m.def("num_threads", num_threads);
  m.def("set_num_threads", set_num_threads, free);
  m.def("read_rates", read_passes, free);
  nb::exception<PeerError>(m, "PeerError");
  nb::class_<Communicator>(m, "Communicator")
      .def(nb::init<const std::string&, int, int, int64_t, double>(), free)
      .def("all_reduce", [](Communicator& group, uintptr_t values, int64_t count, int type) {
        group.all_reduce(reinterpret_cast<void*>(values), count, type_of(type));
      }, free)
      .def("all_gather", [](Communicator& group, uintptr_t part, uintptr_t gathered, int64_t num_bytes) {
        group.all_gather(reinterpret_cast<const void*>(part), reinterpret_cast<void*>(gathered), num_bytes);
      }, free)
      .def("broadcast", [](Communicator& group, uintptr_t values, int64_t num_bytes, int source) {
        group.broadcast(reinterpret_cast<void*>(values), num_bytes, source);
      }, free)
      .def("barrier", &Communicator::barrier, free);
  m.def("dot_rate", [](int type, double seconds) { return dot_rate(type_of(type), seconds); }, free);
  m.def("linear", linear, free);
  m.def("quantize_rows", quantize_rows, free);
  m.def("moe_route", moe_route, free);
  m.def("moe_experts", moe_experts, free);
  m.def("fetch_experts", fetch_experts, free);
  m.def("moe_experts_streamed", moe_experts_streamed, free);
  m.def("situ", situ, free);
  m.def("rms_norm", rms_norm, free);
  m.def("gated_rms_norm", gated_rms_norm, free);
  m.def("layer_norm", layer_norm, free);
  m.def("embed_rows", embed_rows, free);
  m.def("store_rows", store_rows, free);
  m.def("append_rows", append_rows, free);
  m.def("store_packed_rows", store_packed_rows, free);
  m.def("add_rows", pair<&Calls::add_rows>, free);
  m.def("gate_rows", pair<&Calls::gate_rows>, free);
  m.def("swiglu", pair<&Calls::swiglu>, free);
  m.def("scale_rows", scale_rows, free);
  m.def("attn_res_mix", attn_res_mix, free);
  m.def("short_conv", short_conv, free);
  m.def("kda_decay", kda_decay, free);
  m.def("kda_recurrent", kda<&Calls::kda_recurrent>, free);
  m.def("kda_chunk", kda<&Calls::kda_chunk>, free);
  m.def("kda_mix", kda_mix, free);
  m.def("kda_commit", kda_commit, free);
  m.def("mla_prefill", mla<&Calls::mla_prefill>, free);
  m.def("mla_decode", mla<&Calls::mla_decode>, free);
  m.def("indexer_topk", indexer_topk, free);
  m.def("rotary_turns", rotary_turns, free);
  m.def("rotate", rotate, free);
  m.def("gqa_rows", gqa_rows, free);
  m.def("gqa_attention", gqa_attention, free);
  m.def("patch_attention", patch_attention, free);
  m.def("gelu_tanh", gelu_tanh, free);
  m.def("sample_tokens", sample_tokens, free);
  m.def("penalize", penalize, free);

  nb::class_<ExpertCache>(m, "ExpertCache")
      .def("__init__", new_expert_cache)
      .def("take_faults", &ExpertCache::take_faults)
      .def("stats", expert_stats)
      .def_prop_ro("is_direct", &ExpertCache::is_direct)
      .def_prop_ro("num_slots", &ExpertCache::num_slots)
      .def_prop_ro("slot_bytes", &ExpertCache::slot_bytes);
  nb::class_<Program>(m, "Program")
      .def(nb::init<>())
      .def("begin", &Program::begin)
      .def_static("end", &Program::end)
      .def("__len__", &Program::size);
  m.def("replay", [](const Program& program) { program.run(); }, free);
  m.def("replay_timed", [](const Program& program) { return program.run_timed(); });
}
