// Queries, keys and values of many tokens: made from the products, stored, and laid out for the
// tensor cores (flash.h).
#pragma once

#include <cstdint>

#include "launch.h"
#include "layout.h"

namespace vcuda {

constexpr int kKvBlock = 64;  // features of a block of K or V in 16 bits
constexpr int kKvRows = 128;  // its rows begin at a multiple of this, and are as many

// Features of a row of K or V in 16 bits, zeros behind head_dim: what there are kernels for.
VCUDA_BOTH constexpr int32_t kv_width(int32_t head_dim) {
    return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
}

// K and V of the positions that a chunk sees, of one layer, as float16.
//
//   [part][kv head][block of 64 features][row][64]: value = part 0 (+ part 1, what rounding part 0
//   lost). A row of a block is 128 bytes, 8 chunks of 16 bytes; chunk c lies at c ^ (row % 8), so
//   that a stretch of rows of a block lies in shared memory as it lies here: ldmatrix and wgmma
//   read it without conflicts.
//
//   Features of K: in their order. Of V: within 32, feature 8t + 2j + e (t, j = 0..3, e = 0, 1) is
//   number 8j + 2t + e. A lane of a matrix product has the columns 8j + 2t + e of the result, so it
//   has 8 neighbouring features, and writes them at once.
struct KvOperand {
    int32_t parts = 1;     // 2: exact to 2^-21, and to 2^-25 of 1; of float16 K/V 1 is exact
    int32_t width = 0;     // kv_width(head_dim)
    int32_t first = 0;     // position of row 0, a multiple of kKvRows
    int32_t capacity = 0;  // rows of a KV head, a multiple of kKvRows
    uint16_t *k = nullptr, *v = nullptr;

    // Numbers of k, and of v, of this many KV heads.
    VCUDA_BOTH int64_t part_stride(int32_t kv_heads) const {
        return static_cast<int64_t>(kv_heads) * width * capacity;
    }
};

// The K/V of one layer as a session keeps it.
struct KvStored {
    int32_t kv = 0;                                  // VCUDA_KV_*
    void *k = nullptr, *v = nullptr;                 // [ctx_size][kv_heads][head_dim]
    float *k_scales = nullptr, *v_scales = nullptr;  // [ctx_size][kv_heads]; int8 only
};

// q/k norm and RoPE of `tokens` tokens at the positions position ..; K and V rows stored as
// attend() stores them, bit for bit; queries * head_dim^-0.5 * log2(e) as float16 parts (flash.h
// works with powers of 2).
struct QkvRows {
    const float *qkv = nullptr;     // [tokens][q_dim + 2 kv_dim]: before norm and RoPE
    const float *q_norm = nullptr;  // [head_dim] or NULL: RMSNorm over head_dim
    const float *k_norm = nullptr;  // [head_dim] or NULL
    float eps = 0;
    const float *cos = nullptr;  // [ctx_size][head_dim / 2]; pairs are (i, i + head_dim / 2)
    const float *sin = nullptr;
    int32_t heads = 0, kv_heads = 0, head_dim = 0;
    int32_t tokens = 0, position = 0;
    KvStored to;
    uint16_t *q = nullptr;  // [q_parts][tokens][heads][head_dim]
    int32_t q_parts = 1;
    int32_t *overflow = nullptr;  // set to 1 when a query is above the largest float16
};
void qkv_rows(Launcher &to, const QkvRows &p);

// The rows of the positions [from, end) of `to`, from stored K/V; from >= to.first. Those behind
// them up to a multiple of kKvRows become 0: attention reads whole tiles of rows, from to.first on,
// and what is no number in V would come through. *overflow = 1 when a value is above the largest
// float16.
void kv_operand(Launcher &to, const KvStored &stored, int32_t kv_heads, int32_t head_dim,
                int32_t from, int32_t end, const KvOperand &operand, int32_t *overflow);

}  // namespace vcuda
