// Rows of head_dim numbers as attention needs them: the new ones of a token (RMSNorm, RoPE,
// quantisation), each done by one warp, and those of the K/V in memory, eight numbers a lane.
#pragma once

#include <cstdint>

#include "layout.h"
#include "ptx.cuh"
#include "vcuda.h"

namespace vcuda::attention {

constexpr int kChunk = 8;  // numbers of a row that a lane reads at once
constexpr int kMaxHeadDim = 256;

// Pairs of a row of up to 8 LP numbers that a lane of the warp that makes it holds.
template <int LP>
constexpr int kPairs = (LP * kChunk / 2 + kWarp - 1) / kWarp;

// ------------------------------------------------------------------------------- rows of the K/V

// How eight numbers of a row lie in memory.
template <int KV>
struct Stored;

template <>
struct Stored<VCUDA_KV_INT8> {
    using Chunk = uint2;
    using Number = int8_t;

    // A code, made unsigned, is put into the mantissa of 2^23: one permutation and one subtraction
    // a number, at four times the rate of an integer conversion. The scale is not applied here.
    __device__ static __forceinline__ void unpack(const Chunk &chunk, float (&v)[kChunk]) {
        const uint32_t words[2] = {chunk.x ^ 0x80808080u, chunk.y ^ 0x80808080u};
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            v[i] = __uint_as_float(__byte_perm(words[i / 4], 0x4b000000u, 0x7440u + i % 4)) -
                   (8388608.0f + 128.0f);
        }
    }
};

template <>
struct Stored<VCUDA_KV_F16> {
    using Chunk = uint4;
    using Number = uint16_t;

    __device__ static __forceinline__ void unpack(const Chunk &chunk, float (&v)[kChunk]) {
        const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            v[i] = half_value(i % 2 == 0 ? words[i / 2] & 0xffffu : words[i / 2] >> 16);
        }
    }
};

template <>
struct Stored<VCUDA_KV_F32> {
    struct Chunk {
        float4 low, high;
    };
    using Number = float;

    __device__ static __forceinline__ void unpack(const Chunk &chunk, float (&v)[kChunk]) {
        const float4 &low = chunk.low, &high = chunk.high;
        v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
        v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    }
};

// -------------------------------------------------------------------------------------- new rows

// A lane's part of a row of 2 * half numbers: the pairs (i, i + half) that RoPE turns together,
// i = lane + 32 j. Zeros beyond the row.
template <int LP>
struct Pairs {
    float a[kPairs<LP>];  // i
    float b[kPairs<LP>];  // i + half
};

// x NULL: zeros.
template <int LP>
__device__ __forceinline__ Pairs<LP> load_pairs(const float *x, int half, int lane) {
    Pairs<LP> row;
#pragma unroll
    for (int j = 0; j < kPairs<LP>; ++j) {
        const int i = lane + kWarp * j;
        const bool inside = x != nullptr && i < half;
        row.a[j] = inside ? x[i] : 0.0f;
        row.b[j] = inside ? x[i + half] : 0.0f;
    }
    return row;
}

// One number a pair: of a table [half], or of half a row.
template <int LP>
__device__ __forceinline__ void load_half(const float *x, int half, int lane,
                                          float (&to)[kPairs<LP>]) {
#pragma unroll
    for (int j = 0; j < kPairs<LP>; ++j) {
        const int i = lane + kWarp * j;
        to[j] = i < half ? x[i] : 0.0f;
    }
}

// This lane's part of the sum of the squares of a row.
template <int LP>
__device__ __forceinline__ float square_of_lane(const Pairs<LP> &row) {
    float square = 0.0f;
#pragma unroll
    for (int j = 0; j < kPairs<LP>; ++j) square += row.a[j] * row.a[j] + row.b[j] * row.b[j];
    return square;
}

// 1 / sqrt(mean(row^2) + eps) of a row of 2 * half numbers whose squares have this sum.
__device__ __forceinline__ float norm_factor(float squares, float eps, int half) {
    const float mean = squares / static_cast<float>(2 * half);
    return 1.0f / sqrtf(finite_or_nan(mean) + eps);
}

template <int LP>
__device__ __forceinline__ void multiply(Pairs<LP> &row, float factor, const Pairs<LP> &weight) {
#pragma unroll
    for (int j = 0; j < kPairs<LP>; ++j) {
        row.a[j] *= factor * weight.a[j];
        row.b[j] *= factor * weight.b[j];
    }
}

// row / sqrt(mean(row^2) + eps) * weight
template <int LP>
__device__ __forceinline__ void normalise(Pairs<LP> &row, const Pairs<LP> &weight, float eps,
                                          int half) {
    multiply(row, norm_factor(warp_sum(square_of_lane(row)), eps, half), weight);
}

// (a, b) -> (a cos - b sin, b cos + a sin), each product rounded, as NumPy has it: a fused one
// would give other codes than CpuEngine where a value lies halfway between two.
template <int LP>
__device__ __forceinline__ void turn(Pairs<LP> &row, const float (&cos)[kPairs<LP>],
                                     const float (&sin)[kPairs<LP>]) {
#pragma unroll
    for (int j = 0; j < kPairs<LP>; ++j) {
        const float a = row.a[j], b = row.b[j];
        row.a[j] = __fsub_rn(__fmul_rn(a, cos[j]), __fmul_rn(b, sin[j]));
        row.b[j] = __fadd_rn(__fmul_rn(b, cos[j]), __fmul_rn(a, sin[j]));
    }
}

// Where the four numbers 4 quad .. 4 quad + 3 of a row in shared memory are: first the lower halves
// of all lanes' eights, then the upper ones, so that neighbouring lanes read neighbouring words.
template <int LP>
__device__ __forceinline__ int place_of_quad(int quad) {
    return quad % 2 * LP + quad / 2;
}

// to [2 LP], by place_of_quad: row * factor, zeros behind it.
template <int LP>
__device__ __forceinline__ void store_query(const Pairs<LP> &row, float factor, int half, int lane,
                                            float4 *to) {
    float *numbers = reinterpret_cast<float *>(to);
#pragma unroll
    for (int j = 0; j < kPairs<LP>; ++j) {
        const int i = lane + kWarp * j;
        if (i >= half) continue;
        numbers[place_of_quad<LP>(i / 4) * 4 + i % 4] = row.a[j] * factor;
        numbers[place_of_quad<LP>((i + half) / 4) * 4 + (i + half) % 4] = row.b[j] * factor;
    }
#pragma unroll 1
    for (int i = 2 * half + lane; i < LP * kChunk; i += kWarp) {
        numbers[place_of_quad<LP>(i / 4) * 4 + i % 4] = 0.0f;
    }
}

// The largest size in this lane's part of a row, as bits: a NaN is above every number.
template <int LP>
__device__ __forceinline__ unsigned largest_of_lane(const Pairs<LP> &row) {
    unsigned largest = 0;
#pragma unroll
    for (int j = 0; j < kPairs<LP>; ++j) {
        const unsigned a = __float_as_uint(fabsf(row.a[j]));
        const unsigned b = __float_as_uint(fabsf(row.b[j]));
        largest = a > largest ? a : largest;
        largest = b > largest ? b : largest;
    }
    return largest;
}

// The scale of a row of int8 with this largest size: largest / 127, and never 0. A NaN in the row
// makes it NaN, so that it is not lost among the codes.
__device__ __forceinline__ float scale_of_largest(unsigned largest) {
    constexpr float kTiny = 1e-30f;  // of a row of zeros: 0 / 0 would make its codes NaN
    const float scale = __fmul_rn(__uint_as_float(largest), static_cast<float>(1.0 / 127.0));
    return scale < kTiny ? kTiny : scale;
}

// The scale of a row of int8 and 1 for the others.
template <int KV, int LP>
__device__ __forceinline__ float row_scale(const Pairs<LP> &row) {
    if constexpr (KV != VCUDA_KV_INT8) return 1.0f;
    unsigned largest = largest_of_lane(row);
#pragma unroll
    for (int o = kWarp / 2; o > 0; o >>= 1) {
        const unsigned other = __shfl_xor_sync(kAllLanes, largest, o);
        largest = other > largest ? other : largest;
    }
    return scale_of_largest(largest);
}

// One number as it is stored.
template <int KV>
__device__ __forceinline__ typename Stored<KV>::Number stored_number(float v, float scale) {
    if constexpr (KV == VCUDA_KV_INT8) {
        return static_cast<int8_t>(__float2int_rn(__fdiv_rn(v, scale)));
    } else if constexpr (KV == VCUDA_KV_F16) {
        return static_cast<uint16_t>(half_bits(v));
    } else {
        return v;
    }
}

// to [2 half] = row as it is stored with this scale.
template <int KV, int LP>
__device__ __forceinline__ void store_numbers(const Pairs<LP> &row, float scale, int half, int lane,
                                              typename Stored<KV>::Chunk *to) {
    auto *numbers = reinterpret_cast<typename Stored<KV>::Number *>(to);
#pragma unroll
    for (int j = 0; j < kPairs<LP>; ++j) {
        const int i = lane + kWarp * j;
        if (i < half) {
            numbers[i] = stored_number<KV>(row.a[j], scale);
            numbers[i + half] = stored_number<KV>(row.b[j], scale);
        }
    }
}

// to [2 half] = row as it is stored; *scale its scale.
template <int KV, int LP>
__device__ __forceinline__ void store_row(const Pairs<LP> &row, int half, int lane,
                                          typename Stored<KV>::Chunk *to, float *scale) {
    const float s = row_scale<KV, LP>(row);
    store_numbers<KV>(row, s, half, lane, to);
    if (lane == 0) *scale = s;
}

}  // namespace vcuda::attention
