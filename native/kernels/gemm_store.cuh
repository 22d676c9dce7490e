// From the sums of a warp to memory: rows of float32, or the operand of the next product.
#pragma once

#include <cstdint>

#include "gemm_tile.cuh"
#include "tile_product.cuh"

namespace vcuda::tiled {

// The bias of a feature.
__device__ __forceinline__ float bias_at(const Problem &p, const float *bias, const Work &work,
                                         int feature) {
    if (bias == nullptr || feature >= p.w.n) return 0.0f;
    const int64_t matrix = p.map.tiles != nullptr ? work.matrix : 0;
    return bias[matrix * p.w.n + feature];
}

// put(j, v) for j = 0, 8, .. below the tile's tokens, of a row tile's sums of at most kColumns of
// them. Lane 4 g + t has of columns 8 j + 2t and the next: rows g in sums[4 j], [4 j + 1], and g +
// 8 in the other two. Lanes of neighbouring features exchange tokens until each has four features
// of one: v of lane r of the four that 4 q + r = g makes is features 8 (r / 2) + 4 q .. of column
// 8 j + 2t + r % 2.
template <int kColumns, class Put>
__device__ __forceinline__ void gather_features(const float (&sums)[kColumns / 2],
                                                const float (&bias)[2], int count, int lane,
                                                const Put &put) {
    const bool odd = lane / 4 % 2 != 0;
    const bool high = lane / 4 % 4 >= 2;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
        if (8 * j >= count) break;
        float pair[2][2];  // [row g or g + 8][feature]
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float first = sums[4 * j + 2 * h] + bias[h];
            const float second = sums[4 * j + 2 * h + 1] + bias[h];
            const float other = __shfl_xor_sync(kAllLanes, odd ? first : second, 4);
            pair[h][0] = odd ? other : first;
            pair[h][1] = odd ? second : other;
        }
        float other[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            other[i] = __shfl_xor_sync(kAllLanes, high ? pair[0][i] : pair[1][i], 8);
        }
        put(j, make_float4(high ? other[0] : pair[0][0], high ? other[1] : pair[0][1],
                           high ? pair[1][0] : other[0], high ? pair[1][1] : other[1]));
    }
}

// y (rows, n) (+)= a row tile's sums of the tile's tokens, kColumns of them at most; a lane has
// them as gather_features says.   BYTES: a warp's store is 64 bytes of each of 8 tokens.
template <int kColumns>
__device__ __forceinline__ void store_sums(const Problem &p, const Work &work, int row_tile,
                                           const float (&sums)[kColumns / 2], int lane) {
    const int g = lane / 4;
    const float bias[2] = {bias_at(p, p.bias, work, row_tile * kRowTile + g),
                           bias_at(p, p.bias, work, row_tile * kRowTile + g + 8)};
    const int feature = row_tile * kRowTile + g % 4 / 2 * 8 + g / 4 * 4;
    const int token = lane % 4 * 2 + g % 2;
    const int left = p.w.n - feature;
    const int count = left > 0 ? work.count - token : 0;
    float *y = p.y + (work.first + token) * p.stride + feature;
    const int64_t eight_rows = 8 * p.stride;
    const bool quads = (left >= 4 || left <= 0) && p.stride % 4 == 0 &&
                       reinterpret_cast<uintptr_t>(p.y) % sizeof(float4) == 0;
    if (__all_sync(kAllLanes, quads ? 1 : 0) != 0) {
        gather_features<kColumns>(sums, bias, work.count, lane, [&](int j, const float4 &v) {
            auto *to = reinterpret_cast<float4 *>(y + j * eight_rows);
            if (8 * j >= count) return;
            if (p.add != 0) {
                add_to_memory(to, v);
            } else {
                *to = v;
            }
        });
    } else {
        gather_features<kColumns>(sums, bias, work.count, lane, [&](int j, const float4 &v) {
            float *to = y + j * eight_rows;
            const float each[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (8 * j >= count || i >= left) break;
                to[i] = p.add != 0 ? to[i] + each[i] : each[i];
            }
        });
    }
}

// One part of two numbers, which keep what rounding it lost.
__device__ __forceinline__ uint32_t take_part(float (&v)[2], bool bf16) {
    uint32_t bits;
    if (bf16) {
        bits = bf16x2_bits(v[0], v[1]);
        v[0] -= bf16_value(bits & 0xffffu);
        v[1] -= bf16_value(bits >> 16);
    } else {
        bits = half2_bits(v[0], v[1]);
        v[0] -= half_value(bits & 0xffffu);
        v[1] -= half_value(bits >> 16);
    }
    return bits;
}

// Lanes of features g, g ^ 1 have two tokens each, and get two features of one token each.
__device__ __forceinline__ uint32_t exchange_tokens(uint32_t bits, bool odd) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, bits, 4);
    return odd ? __byte_perm(other, bits, 0x7632u) : __byte_perm(bits, other, 0x5410u);
}

// Of two words of two lanes: the first words to the lane that takes the first, the others to the
// one `partner` lanes away; that of the lane that takes the first comes first.
__device__ __forceinline__ uint2 exchange_words(const uint32_t (&word)[2], bool takes_first,
                                                int partner) {
    const uint32_t own = takes_first ? word[0] : word[1];
    const uint32_t other = __shfl_xor_sync(kAllLanes, takes_first ? word[1] : word[0], partner);
    return takes_first ? make_uint2(own, other) : make_uint2(other, own);
}

// hidden (rows, n) = silu(gate) * up as an operand, of a row tile's sums of gate and of up; places
// as in store_sums. Features from n on become 0.
//
// Two shuffles bring the numbers that lie together in the operand into one lane: first lanes of
// features g, g ^ 1 exchange tokens, so that each has one token of two features; then the pair of
// rows below 8 goes to one lane and that of rows g + 8 to another, with the neighbours that the
// order of the operand gives them.
template <int kColumns>
__device__ __forceinline__ void store_hidden(const Problem &p, const Work &work, int row_tile,
                                             const float (&gate)[kColumns / 2],
                                             const float (&up)[kColumns / 2], int lane) {
    const Operand &to = p.hidden;
    const int g = lane / 4;
    const int feature = row_tile * kRowTile + g;
    float gate_bias[2], up_bias[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        gate_bias[h] = bias_at(p, p.bias, work, feature + 8 * h);
        up_bias[h] = bias_at(p, p.up_bias, work, feature + 8 * h);
    }
    const bool inside[2] = {feature < p.w.n, feature + 8 < p.w.n};
    const int block = row_tile / (kOperandBlock / kRowTile);

    const int pair = g / 2;  // features 2 pair, 2 pair + 1 (and 8 more) after the first exchange
    const bool odd_token = g % 2 != 0;
    const int partner = to.bf16 ? 8 : 16;  // lanes away: the pair that stands beside this one
    const bool takes_low = to.bf16 ? pair % 2 == 0 : pair < 2;
    const int token = lane % 4 * 2;
    const int row_in_eight = token + (odd_token ? 1 : 0);
    const int chunk = (row_tile % (kOperandBlock / kRowTile) * 2 + pair % 2) ^ row_in_eight;
    uint16_t *out = to.data + block * to.block_stride() +
                    static_cast<int64_t>(work.first + token + (odd_token ? 1 : 0)) * kOperandBlock +
                    chunk * 8 + pair / 2 * 4;
    bool large = false;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
        float v[2][2];  // [row g or g + 8][token]
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int h = i / 2;
            const float value =
                silu_times(gate[4 * j + i] + gate_bias[h], up[4 * j + i] + up_bias[h]);
            v[h][i % 2] = inside[h] ? value : 0.0f;
            large |= token + 8 * j + i % 2 < work.count && !(fabsf(v[h][i % 2]) <= 65504.0f);
        }
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            if (part >= to.parts) break;
            uint32_t word[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                word[h] = exchange_tokens(take_part(v[h], to.bf16), odd_token);
            }
            const uint2 both = exchange_words(word, takes_low, partner);
            if (block < to.blocks && token + (odd_token ? 1 : 0) + 8 * j < work.count) {
                *reinterpret_cast<uint2 *>(out + part * to.part_stride() + 8 * j * kOperandBlock) =
                    both;
            }
        }
    }
    if (large && !to.bf16) *p.overflow = 1;
}

// The same of half a row tile, features 8 half + g of it, of sums in which gate's and up's
// alternate: columns 8 j + 2t and the next of gate in sums[4 j], [4 j + 1], and of up in the other
// two. Lanes that exchange words here get those of eight tokens or of the eight behind them.
template <int kColumns>
__device__ __forceinline__ void store_mixed(const Problem &p, const Work &work, int row_tile,
                                            int half, const float (&sums)[kColumns / 2], int lane) {
    static_assert(kColumns % 16 == 0, "pairs of eight tokens");
    const Operand &to = p.hidden;
    const int g = lane / 4;
    const int feature = row_tile * kRowTile + 8 * half + g;
    const float gate_bias = bias_at(p, p.bias, work, feature);
    const float up_bias = bias_at(p, p.up_bias, work, feature);
    const bool inside = feature < p.w.n;
    const int block = row_tile / (kOperandBlock / kRowTile);

    const int pair = g / 2;
    const bool odd_token = g % 2 != 0;
    const int partner = to.bf16 ? 8 : 16;  // as in store_hidden
    const bool takes_first = to.bf16 ? pair % 2 == 0 : pair < 2;
    const int token = lane % 4 * 2;
    const int row = token + (odd_token ? 1 : 0);                            // of eight
    const int piece = to.bf16 ? half * 2 + pair / 2 : pair % 2 * 2 + half;  // of 4 features
    const int chunk = (row_tile % (kOperandBlock / kRowTile) * 2 + piece / 2) ^ row;
    const int own_row = row + (takes_first ? 0 : 8);
    uint16_t *out = to.data + block * to.block_stride() +
                    static_cast<int64_t>(work.first + own_row) * kOperandBlock + chunk * 8 +
                    piece % 2 * 4;
    bool large = false;
#pragma unroll
    for (int j = 0; j < kColumns / 8; j += 2) {
        if (8 * j >= work.count) break;
        float v[2][2];  // [eight tokens][token]
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = 4 * (j + i / 2) + i % 2;
            const float value = silu_times(sums[at] + gate_bias, sums[at + 2] + up_bias);
            v[i / 2][i % 2] = inside ? value : 0.0f;
            large |= token + 8 * (j + i / 2) + i % 2 < work.count &&
                     !(fabsf(v[i / 2][i % 2]) <= 65504.0f);
        }
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            if (part >= to.parts) break;
            uint32_t word[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                word[i] = exchange_tokens(take_part(v[i], to.bf16), odd_token);
            }
            const uint2 both = exchange_words(word, takes_first, partner);
            if (block < to.blocks && own_row + 8 * j < work.count) {
                *reinterpret_cast<uint2 *>(out + part * to.part_stride() + 8 * j * kOperandBlock) =
                    both;
            }
        }
    }
    if (large && !to.bf16) *p.overflow = 1;
}

}  // namespace vcuda::tiled
