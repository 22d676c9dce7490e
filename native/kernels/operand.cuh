// The activation of a product, as the tensor cores take it: from float32 in memory, RMS-normalised
// or not, to operand B of mma_s8 or mma_bf16 in shared memory.
//
// Every block makes its own. What that costs is time in which the block's weights are on their way,
// so the way there is kept short: all loads are issued before the first is used, the norm's weights
// even before the kernel before this one has ended, and the activation is read once.
#pragma once

#include <cstdint>

#include "layout.h"
#include "ptx.cuh"

namespace vcuda {

// int16 activations: q = 256 hi + lo with hi in [-127, 127], lo in [-128, 127].
constexpr float kActivationMax = 32639.0f;

// Bytes of the operand in shared memory for one step along k.
VCUDA_BOTH constexpr int operand_step_bytes(int kind) {
    // q8, q4: 32 lanes * 8 bytes and 4 scales; bf16: 4 products * 12 lanes * 8 bytes
    return kind == VCUDA_BF16 ? 4 * 12 * 8 : kWarp * 8 + 4 * 4;
}

// A warp makes 128 elements at a time, four a lane: one step of q8 and q4, two of bf16.
constexpr int kSpan = 128;

// Spans that a warp holds in registers when it has more than one.
constexpr int kLongHeld = 3;

// Elements i .. i + 3 of a vector of weights of k that is padded with zeros to a multiple of 4, as
// i is; 0 behind its end.
__device__ __forceinline__ float4 load_quad(const float *__restrict__ x, int i, int k) {
    return i < k ? *reinterpret_cast<const float4 *>(x + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// The same of an activation, which another kernel wrote.
__device__ __forceinline__ float4 load_activation(const float *__restrict__ x, int i, int k) {
    return i < k ? load_fresh(reinterpret_cast<const float4 *>(x + i))
                 : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

__device__ __forceinline__ float square_sum(const float4 &v) {
    return fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, v.w * v.w)));
}

// A NaN or an infinity must reach the result: it counts as infinite, and so does what is above
// 2^126 (8.5e37), of which fast_divide would make 0.
__device__ __forceinline__ float magnitude(float v) {
    const float size = fabsf(v);
    return size <= 8.5e37f ? size : INFINITY;
}

// int16 codes of a pair of neighbours would not fit a byte each: the high and the low planes of
// four values as two words.
__device__ __forceinline__ void split_planes(const float4 &v, float inverse, uint32_t &high,
                                             uint32_t &low) {
    // (q + 128) >> 8 is the high byte, and q's own low byte is the low one: lo = q - 256 hi lies in
    // [-128, 127] just so.
    const int q0 = __float2int_rn(v.x * inverse);
    const int q1 = __float2int_rn(v.y * inverse);
    const int q2 = __float2int_rn(v.z * inverse);
    const int q3 = __float2int_rn(v.w * inverse);
    const auto bytes = [](int a, int b, int c, int d, unsigned select) {
        const unsigned ab = __byte_perm(static_cast<unsigned>(a), static_cast<unsigned>(b), select);
        const unsigned cd = __byte_perm(static_cast<unsigned>(c), static_cast<unsigned>(d), select);
        return __byte_perm(ab, cd, 0x5410u);
    };
    low = bytes(q0, q1, q2, q3, 0x0040u);
    high = bytes(q0 + 128, q1 + 128, q2 + 128, q3 + 128, 0x0051u);
}

// One step of q8 and q4 weights: groups of 32 as two int8 planes in the order of mma_s8's B
// operand, and a scale a group.
template <int kKind>
__device__ __forceinline__ void store_span_int(unsigned char *operand, const float4 &v, int span,
                                               int steps, int lane) {
    auto *planes = reinterpret_cast<uint32_t *>(operand);
    auto *scales = reinterpret_cast<float *>(operand + static_cast<size_t>(steps) * kWarp * 8);
    const int group = lane / 8;  // of the step
    const int quad = lane % 8;   // elements 4 quad .. 4 quad + 3 of the group
    float largest =
        fmaxf(fmaxf(magnitude(v.x), magnitude(v.y)), fmaxf(magnitude(v.z), magnitude(v.w)));
#pragma unroll
    for (int o = 4; o > 0; o >>= 1) {
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, o));
    }
    // a smaller group is taken for zeros: its inverse would not be finite
    const float inverse = largest > 1.0e-30f ? fast_divide(kActivationMax, largest) : 0.0f;
    uint32_t high = 0;
    uint32_t low = 0;
    split_planes(v, inverse, high, low);
    const int at = (span * kWarp + group * 8 + quad % 4) * 2 + quad / 4;
    planes[at] = high;
    planes[at + 8] = low;  // four lanes further
    if (quad == 0) {
        // the codes of q4 stand in the high nibbles: 16 times too large
        scales[span * 4 + group] =
            largest * (1.0f / kActivationMax) * (kKind == VCUDA_Q4 ? 0.0625f : 1.0f);
    }
}

// Two steps of bf16 weights: three bfloat16 parts that add up to the float32, in the order of
// mma_bf16's B operand.
__device__ __forceinline__ void store_span_bf16(unsigned char *operand, const float4 &quad,
                                                int span, int steps, int lane) {
    const int step = span * 2 + lane / 16;
    if (step >= steps) return;
    auto *words = reinterpret_cast<uint32_t *>(operand);
    const float v[4] = {quad.x, quad.y, quad.z, quad.w};
    const int chunk = lane % 16 / 4;  // 16 columns each
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int pair = lane % 4 * 2 + half;  // columns 2 pair, 2 pair + 1 of the chunk
        uint32_t part[3] = {0, 0, 0};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float rest = v[half * 2 + i];
#pragma unroll
            for (int n = 0; n < 3; ++n) {
                // rounding would carry some NaNs over to 0
                const uint32_t bits = fabsf(rest) <= 3.0e38f ? bf16_bits(rest) : 0x7fc0u;
                part[n] |= bits << (16 * i);
                rest -= bf16_value(bits);
            }
        }
        const int at = ((step * 4 + chunk) * 12 + pair % 4) * 2 + pair / 4;
#pragma unroll
        for (int n = 0; n < 3; ++n) words[at + n * 8] = part[n];
    }
}

// PRE: one warp, all lanes; v is elements 128 span + 4 lane .. of the vector; 128 span < k.
template <int kKind>
__device__ __forceinline__ void store_span(unsigned char *operand, const float4 &v, int span,
                                           int steps, int lane) {
    if constexpr (kKind == VCUDA_BF16) {
        store_span_bf16(operand, v, span, steps, lane);
    } else {
        store_span_int<kKind>(operand, v, span, steps, lane);
    }
}

// The operand of a vector of k, made by all kWarps warps of a block in three parts, so that a
// kernel can put its other loads between them:
//
//     OperandBuilder<..> builder(norm, k, warp, lane);   before pdl_wait
//     builder.load(x);                                   after it
//     builder.store(operand, x, steps, eps, scratch);    the caller puts a barrier behind it
//
// A warp holds kHeld spans in registers; a longer vector is taken in rounds of that many. kHeld = 1
// is for vectors of one span a warp, and is a third of the code.
template <int kKind, int kWarps, bool kNorm, int kHeld>
class OperandBuilder {
  public:
    static constexpr int kLongest = kHeld == 1 ? kWarps * kSpan : 1 << 30;

    __device__ __forceinline__ OperandBuilder(const float *__restrict__ norm, int k, int warp,
                                              int lane)
        : norm_(norm), k_(k), warp_(warp), lane_(lane) {
        if constexpr (kNorm) {
#pragma unroll
            for (int i = 0; i < kHeld; ++i) weight_[i] = load_quad(norm_, element(i), k_);
        }
    }

    __device__ __forceinline__ void load(const float *__restrict__ x) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) value_[i] = load_activation(x, element(i), k_);
    }

    // `scratch`: kWarps floats of shared memory, used for the norm only.
    __device__ __forceinline__ void store(unsigned char *operand, const float *__restrict__ x,
                                          int steps, float eps, float *scratch) {
        float factor = 1.0f;
        if constexpr (kNorm) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kHeld; ++i) sum += square_sum(value_[i]);
            if constexpr (kHeld > 1) {
#pragma unroll 1
                for (int i = kHeld; span(i) * kSpan < k_; ++i) {
                    sum += square_sum(load_activation(x, element(i), k_));
                }
            }
            const float mean = block_sum<kWarps>(sum, scratch) / static_cast<float>(k_);
            factor = rsqrtf(finite_or_nan(mean) + eps);
        }
        int first = 0;
        do {
#pragma unroll
            for (int i = 0; i < kHeld; ++i) {
                if (span(first + i) * kSpan < k_) put(operand, i, factor, span(first + i), steps);
            }
            first += kHeld;
            if constexpr (kHeld > 1) {
                if (span(first) * kSpan < k_) {
#pragma unroll
                    for (int i = 0; i < kHeld; ++i) {
                        value_[i] = load_activation(x, element(first + i), k_);
                        if constexpr (kNorm) weight_[i] = load_quad(norm_, element(first + i), k_);
                    }
                }
            }
        } while (kHeld > 1 && span(first) * kSpan < k_);
    }

  private:
    __device__ __forceinline__ int span(int i) const { return warp_ + i * kWarps; }
    __device__ __forceinline__ int element(int i) const { return span(i) * kSpan + lane_ * 4; }

    __device__ __forceinline__ void put(unsigned char *operand, int i, float factor, int span,
                                        int steps) const {
        float4 v = value_[i];
        if constexpr (kNorm) {
            v.x = v.x * factor * weight_[i].x;
            v.y = v.y * factor * weight_[i].y;
            v.z = v.z * factor * weight_[i].z;
            v.w = v.w * factor * weight_[i].w;
        }
        store_span<kKind>(operand, v, span, steps, lane_);
    }

    const float *norm_;
    int k_, warp_, lane_;
    float4 value_[kHeld];
    float4 weight_[kHeld];
};

}  // namespace vcuda
