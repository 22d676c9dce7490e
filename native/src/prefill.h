// Many positions at a time: the buffers of a chunk, and the kernels from its ids to its K/V.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda_objects.h"
#include "decode_config.h"
#include "gemm.h"
#include "kv.h"
#include "kv_rows.h"
#include "model_weights.h"
#include "observe.h"
#include "vcuda.h"

namespace vcuda {

// 16-bit parts of activations, and of K/V; 2 is as exact as float32 (config.prefill_exact).
int32_t prefill_parts(const vcuda_decode_config &config);
int32_t kv_parts(const vcuda_decode_config &config);

// Rows of K/V in 16 bits.
int32_t kv_capacity(const vcuda_decode_config &config);

// Floats from one row of a result to the next: whole 32-byte sectors.
constexpr int64_t row_stride(int64_t n) {
    return ceil_div(n, 8) * 8;
}

// The model that a chunk goes through; everything is the decoder's.
struct PrefillModel {
    const vcuda_decode_config &config;
    const std::vector<LayerParams> &layers;
    const ModelWeights &weights;
    const Kv &kv;
    const float *final_norm;
    const float *cos, *sin;
};

class Prefill {
  public:
    // Device memory of a config whose prefill_rows is above 0. PRE: check_config.
    static uint64_t bytes(const vcuda_decode_config &config);

    // Takes it, and fills it with zeros in `stream`. passing: of a segment: the residual stream of
    // a chunk, [rows][padded_row(hidden)], which the caller fills and empties.
    Prefill(const vcuda_decode_config &config, cudaStream_t stream, float *passing);

    // Tokens of a chunk, at most.
    int32_t rows() const { return rows_; }

    // ids [tokens], in device memory, at the positions position ..: their K/V, and their residual
    // stream after the last layer. ids NULL: of a segment, where that stream is there already, as
    // it is before the first layer. *overflow becomes 1 when a value is above the largest float16:
    // the chunk is then void.
    void chunk(Submission &s, const PrefillModel &model, const int32_t *ids, int32_t position,
               int32_t tokens, int32_t *overflow) const;
    // The residual stream of a token of the last chunk, [hidden].
    const float *residual(int32_t token) const;

    // Tokens whose logits fit, and those of [first, first + tokens) of the last chunk: [..][vocab].
    int32_t logit_rows() const { return logit_rows_; }
    const float *logits(Submission &s, const PrefillModel &model, int32_t first, int32_t tokens,
                        int32_t *overflow) const;

  private:
    // Where each buffer begins. What a layer's attention uses, what its MLP uses, and the logits
    // lie at the same place: none outlives the others' beginning.
    struct Plan {
        explicit Plan(const vcuda_decode_config &config);
        int64_t residual, operand;                              // float32 rows; of norm_rows
        int64_t qkv, queries, keys, values, attended, scratch;  // attention
        int64_t hidden;                                         // a dense MLP
        int64_t normed, routing, chosen, weights, slots, tiles, tile_count;  // experts
        int64_t gathered, expert_hidden, expert_out;
        int64_t logits;
        int64_t bytes;
        int32_t rows, logit_rows;
    };
    // What the kernels of one chunk share.
    struct Chunk {
        Submission &s;
        const PrefillModel &model;
        int32_t position, tokens;
        int32_t *overflow;
    };

    template <class T>
    T *at(int64_t offset) const {
        return reinterpret_cast<T *>(static_cast<char *>(memory_.get()) + offset);
    }
    Operand operand(const Tiles &w, int64_t offset, int64_t rows) const;
    Operand normed(const Chunk &c, const float *x, int32_t tokens, const float *norm,
                   const Tiles &w) const;
    void add_product(const Chunk &c, const Tiles &w, const Operand &x, const float *bias) const;
    void attention_part(const Chunk &c, int32_t layer) const;
    void dense_part(const Chunk &c, int32_t layer) const;
    void expert_part(const Chunk &c, int32_t layer) const;

    vcuda_decode_config config_;  // its pointers are not looked at
    Plan plan_;
    int32_t rows_, logit_rows_;
    int32_t parts_;
    DeviceMemory memory_;
    float *residual_;  // [rows][padded_row(hidden)]
};

}  // namespace vcuda
