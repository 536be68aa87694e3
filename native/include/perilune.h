// The whole surface of the native core: element types, thread pool, kernel table, this machine's ceilings.
//
// The core knows neither Python nor torch. Kernels take plain structs of pointers and sizes; pointers are to arrays that
// are contiguous unless a stride is named, counts are in elements unless the name ends in _bytes. Every kernel divides
// its work over the pool itself and returns when all of it is done. A row's result depends on that row alone: the order
// of every sum is fixed by the sizes of one row, never by how many rows a call has or how work was divided.
#pragma once

#include <cstddef>
#include <cstdint>

namespace perilune {

// i8 and f8 (E4M3 with NaN, no infinity) carry one float scale per output row; mxfp4 is E2M1 pairs, low nibble first,
// with one E8M0 scale byte per 32 columns.
enum class Type : int { f32 = 0, bf16 = 1, i8 = 2, f8 = 3, mxfp4 = 4 };

// Bytes of `count` elements.
constexpr int64_t type_bytes(Type type, int64_t count) {
  switch (type) {
    case Type::f32: return 4 * count;
    case Type::bf16: return 2 * count;
    case Type::mxfp4: return count / 2;
    default: return count;
  }
}

// ---- threads ------------------------------------------------------------------------------------------------------

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

// ---- arguments of the kernels -------------------------------------------------------------------------------------

// A weight [rows, columns] as it lies in the checkpoint, or as online quantisation made it.
// `scales`: null for f32 and bf16; float [rows] for i8 and f8; E8M0 bytes [rows, columns / 32] for mxfp4.
struct Matrix {
  const void* data;
  const void* scales;
  int64_t rows, columns;
  Type type;
};

// y[i] [tokens, weights[i].rows] = x [tokens, columns] weights[i]^T for `count` matrices that read the same x.
// x and y are f32 or bf16, both `type`. With `int8_activations` x is quantised per 32 columns first
// (scale = absmax / 127, rounded to nearest even), for i8 and mxfp4 weights; other weights ignore it.
struct LinearArgs {
  const void* x;
  Type type;
  int64_t tokens;
  const Matrix* weights;
  void* const* y;
  int64_t count;
  bool int8_activations;
};

// values [rows, columns] of `to` (i8 or f8) and scales [rows] with x ~ values * scales, per row: scale = m / L and value =
// x * (L / m) to the nearest even, m the row's largest magnitude (at least 1e-30), L the largest number of `to` (127 or
// 448). A row with a number that is not finite gets the scale NaN.
struct QuantizeArgs {
  const void* x;
  Type type;
  int64_t rows, columns;
  Type to;
  void* values;
  float* scales;
};

// Sigmoid router, wholly in float32: ids [tokens, chosen] and weights [tokens, chosen] of the largest scores + bias,
// in descending order, ties to the lower id; weight = score (/ sum over the chosen + 1e-20) * scaling.
struct RouteArgs {
  const void* x;  // [tokens, columns]
  Type type;
  int64_t tokens;
  Matrix weight;  // [experts, columns], f32 or bf16
  const float* bias;
  int64_t chosen;
  bool renormalize;
  float scaling;
  int64_t* ids;
  float* weights;
};

// Where a pass over one layer gets experts that do not all lie in memory; see experts.h. One pass at a time.
class ExpertSource {
 public:
  virtual ~ExpertSource() = default;
  // The pass will take `experts` [count], each once.
  virtual void begin(int64_t layer, const int32_t* experts, int64_t count) = 0;
  // Waits until one of them is there, and gives all that are: how many, their numbers, and their rows of `addresses`
  // [experts, 6] as in ExpertsArgs, which hold until they are given back. The address 0 is that of an expert that cannot
  // be read. None are given once all were.
  virtual int64_t take(int32_t* taken, int64_t* addresses) = 0;
  virtual void give_back(const int32_t* experts, int64_t count) = 0;
  // The results of `tokens` [count], counted from `first`, are void, because the expert cannot be read.
  virtual void spoil(int32_t expert, const int32_t* tokens, int64_t count, int64_t first) = 0;
};

// y [tokens, latent] = sum over the chosen experts of weight * w2 situ(w1 x, w3 x). w1, w3 [inner, latent],
// w2 [latent, inner]; situ's result and each expert's output are rounded to `type`, their weighted sum is float32 in the
// order of `ids`.
struct ExpertsArgs {
  const void* x;
  Type type;
  int64_t tokens;
  const int64_t* ids;    // [tokens, chosen]
  const float* weights;  // [tokens, chosen]
  int64_t chosen;
  const int64_t* addresses;  // [experts, 6]: data and scales of w1, w3, w2 (scales 0 where the type has none)
  int64_t num_experts, latent, inner;
  Type weight_type;  // f32, bf16 or mxfp4
  float beta, linear_beta;
  void* y;
  bool int8_activations;
  int64_t scratch_bytes;  // about what the call may take, more only where one token or one expert needs more
  ExpertSource* source = nullptr;  // where there is one, `addresses` is null, and void tokens get NaN
  int64_t layer = 0;               // of the source
};

// y = beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta), `count` elements.
struct SituArgs {
  const void* gate;
  const void* up;
  Type type;
  int64_t count;
  float beta, linear_beta;
  void* y;
};

// y = rms(x) rounded to `type`, times weight; x [rows, columns] with `stride` elements from row to row. `passed` further
// columns of each row follow unchanged: y [rows, columns + passed].
struct RmsNormArgs {
  const void* x;
  Type type;
  int64_t rows, columns, stride;
  const void* weight;
  Type weight_type;
  float eps;
  void* y;
  int64_t passed = 0;
};

// y = rms(x) * weight * sigmoid(gate), float32 inside; x, gate, y [rows, columns] of `type`.
struct GatedRmsNormArgs {
  const void* x;
  const void* gate;
  Type type;
  int64_t rows, columns;
  const float* weight;
  float eps;
  void* y;
};

// y [rows, columns] of `type` = LayerNorm(x) with biased variance; bias may be null.
struct LayerNormArgs {
  const void* x;
  Type type;
  int64_t rows, columns;
  const void* weight;
  const void* bias;
  Type weight_type;
  float eps;
  void* y;
};

// y [tokens, columns] of `type` = rows `ids` [tokens] of weight [num_rows, columns], f32 or bf16.
struct EmbedArgs {
  const void* weight;
  Type weight_type;
  int64_t num_rows, columns;
  const int64_t* ids;
  int64_t tokens;
  void* y;
  Type type;
};

// Row slots[t] of pool [num_rows, columns] becomes row t of x [tokens, columns].
struct StoreArgs {
  const void* x;
  Type type;
  int64_t tokens, columns;
  const int64_t* slots;
  void* pool;
  Type pool_type;
  int64_t num_rows;
};

// Row slots[t] of a pool of packed rows (ops/packed_rows; `to` is f8, i8 or mxfp4) becomes row t of x [tokens, columns],
// its first `scaled` columns quantised.
struct StorePackedArgs {
  const void* x;
  Type type;
  int64_t tokens, columns, scaled;
  const int64_t* slots;
  void* pool;
  Type to;
  int64_t row_bytes, num_rows;
};

// `count` elements of x and z, of the same type as y: x + z; or x times the sigmoid of z, which is rounded first; or
// x times its own sigmoid, rounded, times z.
struct PairArgs {
  const void* x;
  const void* z;
  Type type;
  int64_t count;
  void* y;
};

// y float32 = x * factor, `count` elements.
struct ScaleArgs {
  const void* x;
  Type type;
  int64_t count;
  float factor;
  float* y;
};

// y [tokens, columns] = rms(mix of the candidates) * norm weight, see ops/attn_res. A single candidate is its own mix.
struct AttnResArgs {
  const void* const* candidates;  // count pointers to [tokens, columns]
  int64_t count;
  Type type;
  int64_t tokens, columns;
  const float* query;  // [columns]
  const void* norm_weight;
  Type weight_type;
  float eps;
  void* y;
};

// Sequences of a call: tokens cu_seqlens[n] .. cu_seqlens[n + 1] belong to sequence n, whose state seat is slots[n].
struct Sequences {
  const int64_t* cu_seqlens;  // [count + 1]
  const int64_t* slots;       // [count]
  int64_t count;
};

// y_t = SiLU(sum_j weight[:, j] x_{t-K+1+j}); x rows are `stride` apart, y is contiguous.
// state [slots, taps - 1, channels] of `state_type` is read and replaced, or null.
struct ConvArgs {
  const void* x;
  Type type;
  int64_t channels, taps, stride;
  const float* weight;  // [channels, taps]
  void* state;
  Type state_type;
  Sequences sequences;
  void* y;
};

// g = lower_bound * sigmoid(exp(a_log[h]) (z + dt_bias)); z [tokens, heads, width] -> g float32.
struct DecayArgs {
  const void* z;
  Type type;
  int64_t tokens, heads, width;
  const float* a_log;
  const float* dt_bias;  // [heads, width]
  float lower_bound;
  float* g;
};

// The gated delta rule. q, k, v [tokens, heads, width] with their own strides from token to token; g float32 of the
// same shape, beta float32 [tokens, heads], both contiguous. state float32 [slots, heads, width(key), width(value)] is
// read and replaced, or null for a zero state that is not kept. o [tokens, heads, width] of `type`.
struct KdaArgs {
  const void* q;
  const void* k;
  const void* v;
  Type type;
  int64_t heads, width;
  int64_t q_stride, k_stride, v_stride;
  const float* g;
  const float* beta;
  float l2_eps;
  float* state;
  Sequences sequences;
  void* o;
};

// Everything of a KDA layer between its projections: convolution and SiLU of q, k, v; L2 norm; decay; beta; the gated
// delta rule (token by token for sequences of one token, in chunks else); gated norm.
struct KdaMixArgs {
  const void* q;  // [tokens, heads * width], before the convolution
  const void* k;
  const void* v;
  const void* z;     // decay logits [tokens, heads * width]
  const void* beta;  // beta logits [tokens, heads]
  const void* gate;  // [tokens, heads * width]
  Type type;
  int64_t heads, width, taps;
  const float* q_conv;  // [heads * width, taps]
  const float* k_conv;
  const float* v_conv;
  const float* a_log;    // [heads]
  const float* dt_bias;  // [heads, width]
  const float* norm_weight;  // [width]
  float lower_bound, l2_eps, norm_eps;
  float* state;       // [slots, heads, width, width] or null
  void* conv_state;   // [slots, taps - 1, 3 * heads * width] of conv_type, streams q, k, v side by side; or null
  Type conv_type;
  Sequences sequences;
  void* o;  // [tokens, heads * width]
};

// What a verifying pass leaves of each of its tokens for the commit of those that stay, one layer after the other:
// `rows` rows a layer, of which the tokens of the pass are the first ones.
struct KdaRecords {
  void* inputs;  // [layers, rows, 3 * heads * width] of the activations' type: q, k, v before the convolution
  void* keys;    // [layers, rows, heads, width] of the same type, normalised
  float* decays;       // [layers, rows, heads, width]
  float* corrections;  // [layers, rows, heads, width]: beta (v - S^T k)
};

// KdaMixArgs whose states are read and left as they are; every sequence takes the recurrence, token by token.
struct KdaVerifyArgs {
  KdaMixArgs mix;
  KdaRecords records;  // those of the layer
};

// The states of all layers after the first counts[n] tokens of each sequence of a verifying pass, from its records.
struct KdaCommitArgs {
  Type type;
  int64_t layers, heads, width, taps, rows, num_slots;
  KdaRecords records;
  float* state;      // [layers, slots, heads, width, width]
  void* conv_state;  // [layers, slots, taps - 1, 3 * heads * width] of conv_type
  Type conv_type;
  Sequences sequences;
  const int64_t* counts;
};

// Paged rows of a call's sequences. Row r of sequence n lies in block table[n, r / block_size], at r % block_size.
struct Pages {
  const void* pool;  // [blocks, block_size, row]
  int64_t row_bytes;
  int64_t block_size;
  const int64_t* table;  // [count, table_width]
  int64_t table_width;
  const int64_t* seq_lens;  // [count], rows of each sequence, those of this call included
};

// Latent attention, see ops/mla. w_uk [heads, key, latent], w_uv [heads, value, latent] with their own strides from head
// to head. selected [tokens, num_selected] holds positions, -1 for none, or is null for every visible row.
struct MlaArgs {
  const void* q;  // [tokens, heads, key + shared], `q_stride` from token to token
  Type type;
  int64_t q_stride;
  Pages pages;  // rows [latent | shared] of row_type; of i8 and f8 packed, the latent quantised
  Type row_type;
  Sequences sequences;
  const void* w_uk;
  const void* w_uv;
  Type weight_type;
  int64_t uk_stride, uv_stride;
  int64_t heads, key, shared, latent, value;
  float scale;
  const int64_t* selected;
  int64_t num_selected;
  void* o;  // [tokens, heads, value]
};

// turns [tokens, 2 * pairs]: cosines and sines of position * frequency, times `factor`.
struct TurnsArgs {
  const double* frequencies;  // [pairs]
  int64_t pairs;
  double factor;
  const int64_t* seq_lens;  // [count], tokens of each sequence, those of this call included
  const int64_t* cu_seqlens;
  int64_t count;
  float* turns;
};

// y = x [tokens, heads, width] with the last `turned` columns of each head turned: pairs (2 p, 2 p + 1) of them, or
// (p, p + turned / 2).
struct RotateArgs {
  const void* x;
  Type type;
  int64_t tokens, heads, width, turned;
  const float* turns;  // [tokens, turned]: cosines, then sines
  bool is_interleaved;
  void* y;
};

// rows [tokens, 2 * groups * width]: heads of k normed and turned, then v; k and v [tokens, groups * width].
struct GqaRowsArgs {
  const void* k;
  const void* v;
  Type type;
  int64_t tokens, groups, width;
  const void* norm;  // [width]
  Type norm_type;
  float eps;
  const float* turns;  // [tokens, width]
  bool is_interleaved;
  void* rows;
};

// Grouped-query attention, see ops/gqa: rows [keys of all groups | values of all groups] of `type`.
struct GqaArgs {
  const void* q;  // [tokens, heads, width]
  Type type;
  Pages pages;
  Sequences sequences;
  int64_t heads, groups, width;
  float scale;
  void* o;
};

// The lightning indexer, see ops/indexer: selected [tokens, topk], ties to the lower position, -1 fills the rest.
struct IndexerArgs {
  const void* q;  // [tokens, heads, width]
  Type type;
  const float* weights;  // [tokens, heads]
  Pages pages;           // keys [width] of key_type; of i8, f8 and mxfp4 packed
  Type key_type;
  Sequences sequences;
  int64_t heads, width, topk;
  int64_t* selected;
};

// Rotary attention among the patches of each picture, see ops/vision. Patches cu_seqlens[n] .. cu_seqlens[n + 1] belong to
// picture n of `count`; cos and sin turn the adjacent pairs of a row of q or k. Patches first .. end - 1 are queries.
struct PatchAttentionArgs {
  const void* qkv;  // [patches, 3, heads, width]
  Type type;
  int64_t heads, width;
  const float* cos;  // [patches, width / 2]
  const float* sin;
  const int64_t* cu_seqlens;  // [count + 1]
  int64_t count;
  float scale;
  int64_t first, end;
  void* o;  // [end - first, heads, width]
};

// y = GELU(x) in its tanh form, `count` elements.
struct GeluArgs {
  const void* x;
  Type type;
  int64_t count;
  void* y;
};

// One token per row, see ops/sampling. settings [rows, 5]: temperature (0 takes the best), top-k (0 is off), top-p, min-p,
// and the number in [0, 1) that draws. mask [rows, ceil(columns / 32)]: bit i % 32 of word i / 32 allows token i; or null.
// best [rows]: the largest allowed logit, NaN if one is; where it is not finite the token is -1.
constexpr int64_t kSampleSettings = 5;
struct SampleArgs {
  const void* logits;  // [rows, columns]
  Type type;
  int64_t rows, columns;
  const int32_t* mask;
  const double* settings;
  int64_t* ids;
  float* best;
  int64_t* masses;  // [rows, columns]: of every token that the draw chooses among, else 0; or null
};

// Penalises logits [columns] of the tokens `ids` [count], the prompt's `num_prompt` and then the output's, in place.
struct PenaltyArgs {
  float* logits;
  int64_t columns;
  const int64_t* ids;
  int64_t count, num_prompt;
  float repetition, frequency, presence;
};

// ---- the kernel table -----------------------------------------------------------------------------------------------

struct Kernels {
  const char* isa;
  void (*linear)(const LinearArgs&);
  void (*quantize_rows)(const QuantizeArgs&);
  void (*moe_route)(const RouteArgs&);
  void (*moe_experts)(const ExpertsArgs&);
  void (*situ)(const SituArgs&);
  void (*rms_norm)(const RmsNormArgs&);
  void (*gated_rms_norm)(const GatedRmsNormArgs&);
  void (*layer_norm)(const LayerNormArgs&);
  void (*embed_rows)(const EmbedArgs&);
  void (*store_rows)(const StoreArgs&);
  void (*store_packed_rows)(const StorePackedArgs&);
  void (*add_rows)(const PairArgs&);
  void (*gate_rows)(const PairArgs&);
  void (*swiglu)(const PairArgs&);
  void (*scale_rows)(const ScaleArgs&);
  void (*attn_res_mix)(const AttnResArgs&);
  void (*short_conv)(const ConvArgs&);
  void (*kda_decay)(const DecayArgs&);
  void (*kda_recurrent)(const KdaArgs&);
  void (*kda_chunk)(const KdaArgs&);
  void (*kda_mix)(const KdaMixArgs&);
  void (*kda_verify)(const KdaVerifyArgs&);
  void (*kda_commit)(const KdaCommitArgs&);
  void (*mla_prefill)(const MlaArgs&);
  void (*mla_decode)(const MlaArgs&);
  void (*indexer_topk)(const IndexerArgs&);
  void (*rotary_turns)(const TurnsArgs&);
  void (*rotate)(const RotateArgs&);
  void (*gqa_rows)(const GqaRowsArgs&);
  void (*gqa_attention)(const GqaArgs&);
  void (*patch_attention)(const PatchAttentionArgs&);
  void (*gelu_tanh)(const GeluArgs&);
  void (*sample_tokens)(const SampleArgs&);
  void (*penalize)(const PenaltyArgs&);
  int64_t (*dots)(Type type, int64_t rounds);  // see kernels/ceilings.h
};

// The table in use. The first call picks the widest instruction set that the processor has.
const Kernels& kernels();
// Uses the named instruction set from now on ("baseline", "avx2", "avx512"); false where the processor lacks it.
bool use_isa(const char* name);
// Names of the instruction sets this processor can run, narrowest first, null at the end.
const char* const* available_isas();

// ---- what this machine can do at most -------------------------------------------------------------------------------

// Bytes per second that all threads read together, pass by pass, from `bytes` of fresh memory on huge pages. Each
// thread reads `streams` sequential streams in turns: which number is best differs between processors. False where
// there is no such memory.
bool read_rates(int64_t bytes, int streams, double* rates, int passes);
// The most multiplications and additions per second that all threads reached in registers within `seconds`; see
// kernels/ceilings.h for what is counted. Zero where the instruction set in use has no such product.
double dot_rate(Type type, double seconds);

}  // namespace perilune
