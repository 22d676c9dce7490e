// What the kernels of flash share: how the work is cut, what a row sees, where its result goes.
#pragma once

#include <cmath>

#include "flash.h"
#include "flash_tile.cuh"

namespace vcuda::flash_detail {

constexpr int kMaxParts = 64;
constexpr int kMostRows = 256;  // of all blocks at a time on a multiprocessor

// How the work is cut.
struct Plan {
    int32_t ratio = 1;      // query heads of a KV head
    int32_t rows = 0;       // tokens * ratio
    int32_t row_tiles = 0;  // of a KV head
    int32_t parts = 1;      // of the positions of each
};

// Sums of parts: [part][kv head][row][head_dim], and behind them [part][kv head][row] of
// (base, total).
struct Meeting {
    float *sums;
    float2 *stats;
};

VCUDA_BOTH inline Meeting meeting_of(const Flash &p, const Plan &plan) {
    const int64_t rows = static_cast<int64_t>(plan.parts) * p.kv_heads * plan.rows;
    Meeting m;
    m.sums = p.scratch;
    m.stats = reinterpret_cast<float2 *>(p.scratch + rows * p.head_dim);
    return m;
}

// Tiles of positions [begin, end) that some of the rows [first, last] see, counted from kv.first.
struct Span {
    int begin, end;
};

VCUDA_BOTH inline Span span_of(const Flash &p, int ratio, int first, int last, int keys) {
    const int seen = p.window > 0 ? p.position + first / ratio - p.window + 1 : 0;
    const int behind = p.position + last / ratio + 1 - p.kv.first;
    Span s;
    s.begin = (seen > p.kv.first ? seen - p.kv.first : 0) / keys;
    s.end = (behind + keys - 1) / keys;
    return s;
}

// Into how many parts the positions of each row tile are cut: what makes the whole end first.
// `slots` blocks run at a time. Times are in tiles of positions.
inline int32_t parts_of(const Flash &p, const Plan &plan, int rows, int keys, int64_t slots) {
    const int64_t blocks = static_cast<int64_t>(plan.row_tiles) * p.kv_heads;
    double sum = 0.0, longest = 0.0;
    for (int tile = 0; tile < plan.row_tiles; ++tile) {
        const int first = tile * rows;
        const Span s = span_of(p, plan.ratio, first,
                               (first + rows < plan.rows ? first + rows : plan.rows) - 1, keys);
        sum += s.end - s.begin;
        if (s.end - s.begin > longest) longest = s.end - s.begin;
    }
    const double mean = sum / plan.row_tiles;
    int32_t best = 1;
    double least = 0.0;
    for (int32_t parts = 1; parts <= kMaxParts; ++parts) {
        if (parts > 1 && blocks * parts > 2 * slots) break;  // flash_scratch() has no room for more
        const auto waves = static_cast<double>(ceil_div(blocks * parts, slots));
        double time = waves * mean / parts;
        if (longest / parts > time) time = longest / parts;
        // a second kernel, and sums that go through memory
        if (parts > 1) time += 2.0 + 0.02 * static_cast<double>(blocks * parts);
        if (parts == 1 || time < least) {
            least = time;
            best = parts;
        }
    }
    return best;
}

// ---------------------------------------------------------------------------------------- device

// The own positions of the first and the last of some rows, as rows of K/V: what all its rows see
// and what any of them sees.
struct Sight {
    int first, last;

    __device__ __forceinline__ bool all(const Flash &p, int key, int last_key) const {
        return last_key <= first && (p.window <= 0 || key > last - p.window);
    }
    __device__ __forceinline__ bool any(const Flash &p, int key, int last_key) const {
        return key <= last && (p.window <= 0 || last_key > first - p.window);
    }
};

// Scores of a row of KEYS positions, as a lane has them: at(j, e) is that of number 8 j + 2 t + e.
// Those that the row does not see get no weight. `key` is the first one.
template <int KEYS, class At>
__device__ __forceinline__ void mask_row(const Flash &p, int token, int key, int t, const At &at) {
    const int newest = p.position + token - p.kv.first - key - 2 * t;
    const int oldest = p.window > 0 && newest >= p.window ? newest - p.window + 1 : -0x7fffffff;
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int number = 8 * j + e;
            if (number > newest || number < oldest) at(j, e) = -INFINITY;
        }
    }
}

// The result of a row, of which each of four lanes has sum(j, e), that of column 8 j + 2 t + e, and
// the total of its weights: into the operand when there is one part, else into the meeting. All
// lanes of the warp call it.
template <int D, class Sum>
__device__ __forceinline__ void store_result(const Flash &p, const Plan &plan, int kv_head,
                                             int part, int row, int t, float base, float total,
                                             const Sum &sum) {
    total += __shfl_xor_sync(kAllLanes, total, 1);
    total += __shfl_xor_sync(kAllLanes, total, 2);
    const bool inside = row < plan.rows;
    if (plan.parts > 1) {
        const Meeting meeting = meeting_of(p, plan);
        const int64_t place = (static_cast<int64_t>(part) * p.kv_heads + kv_head) * plan.rows + row;
        auto *sums = reinterpret_cast<float4 *>(meeting.sums + place * p.head_dim);
        if (!inside) return;
        if (t == 0) meeting.stats[place] = make_float2(base, total);
#pragma unroll
        for (int j = 0; j < D / 8; j += 4) {
            if (8 * j + 8 * t >= p.head_dim) continue;
            sums[2 * j + 2 * t] = make_float4(sum(j, 0), sum(j, 1), sum(j + 1, 0), sum(j + 1, 1));
            sums[2 * j + 2 * t + 1] =
                make_float4(sum(j + 2, 0), sum(j + 2, 1), sum(j + 3, 0), sum(j + 3, 1));
        }
        return;
    }
    const int token = row / plan.ratio, in_group = row - token * plan.ratio;
    const int head = kv_head * plan.ratio + in_group;
    const float by = 1.0f / total;
#pragma unroll
    for (int j = 0; j < D / 8; j += 4) {
        float v[8];
#pragma unroll
        for (int x = 0; x < 8; ++x) v[x] = sum(j + x / 2, x % 2) * by;
        const int in_head = 8 * j + 8 * t;
        store_features(p.out, token, head * p.head_dim + in_head, v, inside && in_head < p.head_dim,
                       p.overflow);
    }
    if (inside && head == p.heads - 1) {
        store_zeros(p.out, token, p.heads * p.head_dim, t, 4);
    }
}

}  // namespace vcuda::flash_detail
