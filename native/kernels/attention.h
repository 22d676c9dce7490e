// Attention of one token: q/k norm, RoPE, the K/V row of this position, and the scores.
#pragma once

#include <cstdint>

#include "launch.h"
#include "step.h"

namespace vcuda {

// out [heads * head_dim] = attention of the token at step->position over the K/V of its layer.
//
// One launch does all of it. Every block normalises and turns the queries it needs. The block that
// owns the newest position of a KV head normalises and turns its key and writes key and value (the
// other blocks look at older positions only). K/V is split among blocks by position; the last block
// of a KV head to finish joins the parts, always in the order of the positions. How many parts are
// used grows with the position and is computed on the device, so that a captured graph stays right.
struct Attention {
    const float *qkv = nullptr;     // [q_dim + 2 kv_dim]: q, k, v before norm and RoPE
    const float *q_norm = nullptr;  // [head_dim] or NULL: RMSNorm over head_dim
    const float *k_norm = nullptr;  // [head_dim] or NULL
    float eps = 0;
    const float *cos = nullptr;  // [ctx_size][head_dim / 2]; pairs are (i, i + head_dim / 2)
    const float *sin = nullptr;
    int32_t heads = 0, kv_heads = 0, head_dim = 0;
    int32_t window = 0;                              // positions seen, the own one included; 0: all
    int32_t kv = 0;                                  // VCUDA_KV_*
    void *k = nullptr, *v = nullptr;                 // [ctx_size][kv_dim] of this layer
    float *k_scales = nullptr, *v_scales = nullptr;  // [ctx_size][kv_heads]; int8 only
    const Step *step = nullptr;
    float *partial = nullptr;     // [attention_scratch floats]
    uint32_t *arrived = nullptr;  // [attention_counters]; 0 before and after
    int32_t max_splits = 0;       // of attention_splits()
    float *out = nullptr;         // [q_dim]
};
void attend(Launcher &to, const Attention &p);

// The most parts that K/V of ctx_size positions is split into on a device of sm_count
// multiprocessors, and the floats and counters that this takes.
int32_t attention_splits(int32_t heads, int32_t kv_heads, int32_t head_dim, int32_t ctx_size,
                         int32_t sm_count);
uint64_t attention_scratch(int32_t heads, int32_t head_dim, int32_t max_splits);
uint64_t attention_counters(int32_t heads, int32_t kv_heads);

}  // namespace vcuda
