// The product of one block: row tiles of a tiled matrix times one vector, on the tensor cores.
//
// Why tensor cores for one column: the product itself is bound by memory, and one m16n8k32 takes
// 512 weights for the price of an instruction a lane, so int16 activations (an int8 high and an
// int8 low plane) cost nothing. Four groups share one accumulator: group j's planes stand in
// columns 2j and 2j + 1 of its operand and all other columns are 0, so after four instructions lane
// (g, t) holds both planes of group t for its two rows, and every lane scales one group.
#pragma once

#include <cstdint>

#include "layout.h"
#include "operand.cuh"
#include "ptx.cuh"

namespace vcuda {

// One block fills a multiprocessor: its operand is made once for all row tiles that fall to it.
constexpr int kWarps = 16;                // of a block
constexpr int kThreads = kWarps * kWarp;  // of a block

// Steps of row tiles whose weights a warp has in flight while it multiplies as many: what the
// registers allow. 16 warps of 2 q8 steps are 70 KB a multiprocessor; 25 KB would hide the latency.
template <int kKind>
constexpr int kSlots = kKind == VCUDA_Q4 ? 3 : 2;

// --------------------------------------------------------------------------------- the weights

// What one lane holds of one step of one row tile.
template <int kKind>
struct StepWeights {
    uint4 codes[step_vectors(kKind)];
    uint32_t scales;
};

// `tile` counts the row tiles of the whole stack. PRE: step < w.steps
template <int kKind>
__device__ __forceinline__ void load_step(StepWeights<kKind> &to, const Tiles &w, int64_t tile,
                                          int step, int lane) {
    constexpr int vectors = step_vectors(kKind);
    const int64_t at = tile * w.steps + step;
    const auto *codes = static_cast<const uint4 *>(w.codes) + at * (vectors * kWarp) + lane;
#pragma unroll
    for (int i = 0; i < vectors; ++i) to.codes[i] = load_weights(codes + i * kWarp);
    if constexpr (kKind != VCUDA_BF16) {
        to.scales = load_weights(static_cast<const uint32_t *>(w.scales) + at * kWarp + lane);
    }
}

// rows[0] += row g, rows[1] += row g + 8 of the tile, over this lane's share of the step's columns.
template <int kKind>
__device__ __forceinline__ void multiply_step(float (&rows)[2], const StepWeights<kKind> &w,
                                              const unsigned char *operand, int step, int steps,
                                              int lane) {
    if constexpr (kKind == VCUDA_BF16) {
        const auto *parts = reinterpret_cast<const uint2 *>(operand) + step * 48;
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t a[4] = {w.codes[i].x, w.codes[i].y, w.codes[i].z, w.codes[i].w};
            uint2 b = make_uint2(0, 0);
            if (lane < 12) b = parts[i * 12 + lane];
            mma_bf16(c, a, b.x, b.y);
        }
        rows[0] += c[0] + c[1];
        rows[1] += c[2] + c[3];
    } else {
        const uint2 planes = reinterpret_cast<const uint2 *>(operand)[step * kWarp + lane];
        const auto *scales =
            reinterpret_cast<const float *>(operand + static_cast<size_t>(steps) * kWarp * 8);
        const float scale = scales[step * 4 + lane % 4];
        int c[4] = {0, 0, 0, 0};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint32_t a[4];
            if constexpr (kKind == VCUDA_Q8) {
                a[0] = w.codes[j].x;
                a[1] = w.codes[j].y;
                a[2] = w.codes[j].z;
                a[3] = w.codes[j].w;
            } else {
                constexpr uint32_t high = 0xf0f0f0f0u;
                const uint32_t even = j % 2 == 0 ? w.codes[j / 2].x : w.codes[j / 2].z;
                const uint32_t odd = j % 2 == 0 ? w.codes[j / 2].y : w.codes[j / 2].w;
                a[0] = (even << 4) & high;
                a[1] = (odd << 4) & high;
                a[2] = even & high;
                a[3] = odd & high;
            }
            const bool mine = lane / 8 == j;  // columns 2j and 2j + 1
            mma_s8(c, a, mine ? planes.x : 0u, mine ? planes.y : 0u);
        }
        const float low_row = half_value(w.scales & 0xffffu) * scale;
        const float high_row = half_value(w.scales >> 16) * scale;
        rows[0] = fmaf(static_cast<float>(c[0] * 256 + c[1]), low_row, rows[0]);
        rows[1] = fmaf(static_cast<float>(c[2] * 256 + c[3]), high_row, rows[1]);
    }
}

// The sums over a warp's columns, from the four lanes of each row pair to out [16].
__device__ __forceinline__ void store_rows(const float (&rows)[2], float *out, int lane) {
    float low = rows[0];
    float high = rows[1];
#pragma unroll
    for (int o = 1; o < 4; o <<= 1) {
        low += __shfl_xor_sync(kAllLanes, low, o);
        high += __shfl_xor_sync(kAllLanes, high, o);
    }
    if (lane % 4 == 0) {
        out[lane / 4] = low;
        out[lane / 4 + 8] = high;
    }
}

// Row `lane` of what the warps have, added in their order.
__device__ __forceinline__ float sum_warps(const float (&of)[kWarps][kRowTile], int lane) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += of[i][lane];
    return sum;
}

// silu(gate) * up
__device__ __forceinline__ float silu_times(float gate, float up) {
    return fast_divide(gate, 1.0f + expf(-gate)) * up;
}

}  // namespace vcuda
