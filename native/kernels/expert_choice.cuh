// Which experts a token goes to, and with what weights: one code for decoding and for many tokens,
// so that both choose the same.
#pragma once

#include <cstdint>

#include "layout.h"
#include "ptx.cuh"

namespace vcuda {

// The rank of every expert: how many have a larger logit, or the same and a lower index. Those
// below `top` are told to found(rank, expert). With NaNs ranks may be shared or missing: the result
// is NaN anyway. Four lanes compare one expert with a quarter of the others each. PRE: a block of
// kBlockWarps warps, all of it; logits [experts], padded with -infinity to a multiple of 16.
template <int kBlockWarps, class Found>
__device__ __forceinline__ void rank_experts(const float *logits, int experts, int top,
                                             const Found &found) {
    constexpr int at_once = kBlockWarps * kWarp / 4;
    const auto *quads = reinterpret_cast<const float4 *>(logits);
    const int part = static_cast<int>(threadIdx.x) % 4;
    for (int base = 0; base < experts; base += at_once) {
        const int e = base + static_cast<int>(threadIdx.x) / 4;
        const float mine = e < experts ? logits[e] : 0.0f;
        int rank = 0;
#pragma unroll 4
        for (int i = part * 4; i < experts; i += 16) {
            const float4 other = quads[i / 4];
            rank += other.x > mine || (other.x == mine && i < e) ? 1 : 0;
            rank += other.y > mine || (other.y == mine && i + 1 < e) ? 1 : 0;
            rank += other.z > mine || (other.z == mine && i + 2 < e) ? 1 : 0;
            rank += other.w > mine || (other.w == mine && i + 3 < e) ? 1 : 0;
        }
        rank += __shfl_xor_sync(kAllLanes, rank, 1);
        rank += __shfl_xor_sync(kAllLanes, rank, 2);
        if (part == 0 && e < experts && rank < top) found(rank, e);
    }
}

// chosen (top,), weights (top,): the softmax of the logits at the experts of each rank, made to add
// up to 1 with `normalise`. A NaN among the logits makes every weight NaN. PRE: the whole block;
// `scratch` (a float a warp) and `best` (a float a rank) are free.
template <int kBlockWarps>
__device__ __forceinline__ void write_choice(const float *logits, int experts, int top,
                                             bool normalise, const int *expert_of, float *scratch,
                                             float *best, int32_t *chosen, float *weights) {
    constexpr int threads = kBlockWarps * kWarp;
    const int thread = static_cast<int>(threadIdx.x);
    float largest = -INFINITY;
    for (int e = thread; e < experts; e += threads) largest = fmaxf(largest, logits[e]);
    largest = warp_max(largest);
    if (thread % kWarp == 0) scratch[thread / kWarp] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kBlockWarps; ++i) largest = fmaxf(largest, scratch[i]);
    __syncthreads();
    float total = 0.0f;
    for (int e = thread; e < experts; e += threads) total += expf(logits[e] - largest);
    total = block_sum<kBlockWarps>(total, scratch);
    if (thread < top) best[thread] = expf(logits[expert_of[thread]] - largest) / total;
    __syncthreads();
    if (thread >= top) return;
    float sum = 0.0f;
    for (int j = 0; j < top; ++j) sum += best[j];
    chosen[thread] = expert_of[thread];
    weights[thread] = normalise ? best[thread] / sum : best[thread];
}

}  // namespace vcuda
