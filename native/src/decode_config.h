// What decode_init is given: checked, measured, and copied to the device.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda_objects.h"
#include "vcuda.h"

namespace vcuda {

// The buffers of a decoder besides its K/V.
enum class Buffer {
    kStep,          // Step, then int32 ids[ctx_size]; of a segment: then x of segment_rows rows
    kOutput,        // Output, then float logits[vocab]; not of a segment
    kResidual,      // x [hidden]; not of a segment
    kQkv,           // [q_dim + 2 kv_dim]
    kAttended,      // [q_dim]
    kHidden,        // [F] of dense layers, then [top][F] of the experts; padded rows
    kRouterLogits,  // [experts]
    kChosen,        // int32 [top]
    kWeights,       // [top]
    kPartial,       // attention's parts
    kCounters,      // uint32: attention's
    kSample,        // uint32: scratch of the sampling kernels; not of a segment
    kParams,        // norms and biases of all layers
    kCos,           // [ctx_size][head_dim / 2]
    kSin,
    kCount
};
constexpr int kBuffers = static_cast<int>(Buffer::kCount);

// The small weights of one layer, in Buffer::kParams.
struct LayerParams {
    bool moe = false;
    int32_t window = 0;
    const float *input_norm = nullptr;
    const float *post_norm = nullptr;
    const float *q_norm = nullptr;
    const float *k_norm = nullptr;
    const float *qkv_bias = nullptr;
    const float *o_bias = nullptr;
    const float *gate_up_bias = nullptr;
    const float *down_bias = nullptr;
};

// Extents that follow from a config.
inline int32_t q_dim(const vcuda_decode_config &c) {
    return c.heads * c.head_dim;
}
inline int32_t kv_dim(const vcuda_decode_config &c) {
    return c.kv_heads * c.head_dim;
}
inline int32_t qkv_dim(const vcuda_decode_config &c) {
    return q_dim(c) + 2 * kv_dim(c);
}

// Rows of the residual stream [segment_rows][padded_row(hidden)] that go into a segment, and come
// out, by one copy.
int64_t segment_rows(const vcuda_decode_config &config);

// Layer i of the caller's array, whose elements have the size that the first one says.
const vcuda_layer &layer_of(const vcuda_decode_config &config, int32_t i);

// Whether there is a layer with experts (moe 1), or a dense one (0).
bool any_layer(const vcuda_decode_config &config, int32_t moe);

// Throws Error, with the number, for everything that is not supported whatever the device.
void check_config(const vcuda_decode_config &config);

// Multiprocessors that the scratch of attention is made for: more than any device has, so that
// vcuda_decode_size needs none.
constexpr int32_t kMostMultiprocessors = 256;

// Floats of Buffer::kHidden that dense layers use. Those of the experts follow. PRE: check_config.
int64_t dense_hidden(const vcuda_decode_config &config);

// Bytes of one buffer; 0: the model needs none. PRE: check_config.
uint64_t buffer_bytes(const vcuda_decode_config &config, Buffer buffer);

// Device memory of everything: K/V, buffers, the graphs. PRE: check_config.
uint64_t decode_bytes(const vcuda_decode_config &config);

// The norms and biases of all layers one after another, as they go to Buffer::kParams at `base`,
// and where each is; `final_norm` is NULL in a segment. PRE: check_config.
std::vector<float> gather_params(const vcuda_decode_config &config, const float *base,
                                 std::vector<LayerParams> &layers, const float *&final_norm);

}  // namespace vcuda
