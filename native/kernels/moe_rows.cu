// router_logits, choose_experts, group_slots, combine_rows: routed experts of many tokens
#include "moe_rows.h"

#include <algorithm>

#include "expert_choice.cuh"
#include "moe.h"
#include "operand.cuh"

namespace vcuda {

namespace {

// -------------------------------------------------------------------------------------- logits

// A block multiplies 128 tokens with 64 experts over a slice of k, a thread 8 with 8 of them. Both
// matrices lie with k innermost and are read from shared memory so too, four features at a time.
constexpr int kLogitThreads = 128;
constexpr int kTileTokens = 128;
constexpr int kTileExperts = 64;
constexpr int kSlice = 256;     // features of a block
constexpr int kDepthQuads = 4;  // quads of features in shared memory at once, twice
constexpr int kPerThread = 8;   // tokens, and experts
constexpr int kExpertLanes = kTileExperts / kPerThread;
constexpr int kTokenLanes = kTileTokens / kPerThread;
static_assert(kExpertLanes * kTokenLanes == kLogitThreads, "a thread has 8 x 8");

VCUDA_BOTH constexpr int slices_of(int k) {
    return static_cast<int>(ceil_div(k, kSlice));
}

// kRows rows of kDepthQuads quads, on their way from memory through registers to shared memory.
template <int kRows>
struct Panel {
    static constexpr int held = kRows * kDepthQuads / kLogitThreads;
    // A row's quads and one more: eight neighbouring rows then lie in different banks.
    using Shared = float4[kRows][kDepthQuads + 1];

    float4 quads[held];

    // PRE: `from` is the first row, of which `rows` are there; the rows are `stride` apart.
    template <class Load>
    __device__ __forceinline__ void load(const float *from, int64_t stride, int rows, int feature,
                                         int end, int thread, const Load &load_quad_at) {
#pragma unroll
        for (int i = 0; i < held; ++i) {
            const int at = thread + i * kLogitThreads;
            const int row = at / kDepthQuads;
            quads[i] = load_quad_at(from + row * stride, feature + at % kDepthQuads * 4,
                                    row < rows ? end : 0);
        }
    }

    __device__ __forceinline__ void store(Shared &to, int thread) const {
#pragma unroll
        for (int i = 0; i < held; ++i) {
            const int at = thread + i * kLogitThreads;
            to[at / kDepthQuads][at % kDepthQuads] = quads[i];
        }
    }
};

// partial (slices, tokens, experts) = x (tokens, k) w (experts, k)^T over each slice; counts = 0
// PRE: grid = (token tiles, expert tiles, slices), block = kLogitThreads.
// FLOPS: 2 tokens * experts * k   BYTES: 4 k (tokens * expert tiles + experts * token tiles)
__global__ void __launch_bounds__(kLogitThreads, 2)
    router_kernel(const Routing p, float *partial, int32_t *counts) {
    using Tokens = Panel<kTileTokens>;
    using Experts = Panel<kTileExperts>;
    __shared__ __align__(16) Tokens::Shared x[2];
    __shared__ __align__(16) Experts::Shared w[2];
    const int thread = static_cast<int>(threadIdx.x);
    const int expert_lane = thread % kExpertLanes;
    const int token_lane = thread / kExpertLanes;
    const int token = static_cast<int>(blockIdx.x) * kTileTokens;
    const int expert = static_cast<int>(blockIdx.y) * kTileExperts;
    const int begin = static_cast<int>(blockIdx.z) * kSlice;
    const int end = begin + kSlice < p.k ? begin + kSlice : p.k;
    const float *x_rows = p.x + token * static_cast<int64_t>(p.k);
    const float *w_rows = p.w + expert * static_cast<int64_t>(p.k);

    Tokens tokens;
    Experts experts;
    const auto load_x = [&](int feature) {
        tokens.load(x_rows, p.k, p.tokens - token, feature, end, thread,
                    [](const float *row, int i, int k) { return load_activation(row, i, k); });
    };
    const auto load_w = [&](int feature) {
        experts.load(w_rows, p.k, p.experts - expert, feature, end, thread,
                     [](const float *row, int i, int k) { return load_quad(row, i, k); });
    };
    load_w(begin);
    pdl_wait();
    pdl_trigger();
    load_x(begin);
    if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) {
        for (int e = thread; e < p.experts; e += kLogitThreads) counts[e] = 0;
    }
    tokens.store(x[0], thread);
    experts.store(w[0], thread);
    __syncthreads();

    float sums[kPerThread][kPerThread] = {};  // [token][expert]
    int buffer = 0;
    for (int feature = begin; feature < end; feature += kDepthQuads * 4) {
        const bool more = feature + kDepthQuads * 4 < end;
        if (more) {
            load_x(feature + kDepthQuads * 4);
            load_w(feature + kDepthQuads * 4);
        }
#pragma unroll
        for (int quad = 0; quad < kDepthQuads; ++quad) {
            float4 b[kPerThread];
#pragma unroll
            for (int j = 0; j < kPerThread; ++j) {
                b[j] = w[buffer][expert_lane + j * kExpertLanes][quad];
            }
#pragma unroll
            for (int i = 0; i < kPerThread; ++i) {
                const float4 a = x[buffer][token_lane + i * kTokenLanes][quad];
#pragma unroll
                for (int j = 0; j < kPerThread; ++j) sums[i][j] = fmaf(a.x, b[j].x, sums[i][j]);
#pragma unroll
                for (int j = 0; j < kPerThread; ++j) sums[i][j] = fmaf(a.y, b[j].y, sums[i][j]);
#pragma unroll
                for (int j = 0; j < kPerThread; ++j) sums[i][j] = fmaf(a.z, b[j].z, sums[i][j]);
#pragma unroll
                for (int j = 0; j < kPerThread; ++j) sums[i][j] = fmaf(a.w, b[j].w, sums[i][j]);
            }
        }
        if (!more) break;
        buffer ^= 1;  // whose last readers have passed the barrier below
        tokens.store(x[buffer], thread);
        experts.store(w[buffer], thread);
        __syncthreads();
    }

    float *to = partial + static_cast<int64_t>(blockIdx.z) * p.tokens * p.experts;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
        const int t = token + token_lane + i * kTokenLanes;
        if (t >= p.tokens) break;
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) {
            const int e = expert + expert_lane + j * kExpertLanes;
            if (e < p.experts) to[static_cast<int64_t>(t) * p.experts + e] = sums[i][j];
        }
    }
}

// -------------------------------------------------------------------------------------- choice

constexpr int kChoiceWarps = 4;
constexpr int kChoiceThreads = kChoiceWarps * kWarp;

// chosen, weights (tokens, top) of the sums of the slices; counts [e] += tokens that chose e
// PRE: grid = tokens, block = kChoiceThreads; counts are 0.   BYTES: 4 slices * tokens * experts
__global__ void __launch_bounds__(kChoiceThreads)
    choose_kernel(const Routing p, const float *partial, int32_t *counts) {
    __shared__ __align__(16) float scratch[kChoiceWarps];
    __shared__ __align__(16) float logits[kMaxExperts];
    __shared__ float best[kMaxTop];
    __shared__ int expert_of[kMaxTop];
    const int thread = static_cast<int>(threadIdx.x);
    const int token = static_cast<int>(blockIdx.x);
    const int slices = slices_of(p.k);
    const int64_t slice = static_cast<int64_t>(p.tokens) * p.experts;
    if (thread < kMaxTop) expert_of[thread] = 0;
    pdl_wait();
    pdl_trigger();
    for (int e = thread; e < (p.experts + 15) / 16 * 16; e += kChoiceThreads) {
        float sum = -INFINITY;
        if (e < p.experts) {
            const float *from = partial + static_cast<int64_t>(token) * p.experts + e;
            sum = 0.0f;
#pragma unroll 8
            for (int s = 0; s < slices; ++s) sum += from[s * slice];
            sum = finite_or_nan(sum);
        }
        logits[e] = sum;
    }
    __syncthreads();
    rank_experts<kChoiceWarps>(logits, p.experts, p.top,
                               [&](int rank, int e) { expert_of[rank] = e; });
    __syncthreads();
    const int64_t at = static_cast<int64_t>(token) * p.top;
    write_choice<kChoiceWarps>(logits, p.experts, p.top, p.normalise, expert_of, scratch, best,
                               p.chosen + at, p.weights + at);
    if (thread < p.top) atomicAdd(counts + expert_of[thread], 1);  // in any order: integers
}

// ------------------------------------------------------------------------------------ grouping

constexpr int kGroupWarps = 16;
constexpr int kGroupThreads = kGroupWarps * kWarp;
constexpr int kBatch = 8;                    // loads that a thread waits for together
constexpr int kWarpEntries = kWarp * kWarp;  // a lane keeps one ballot of 32
constexpr int kAlign = 8;                    // rows: an expert's first is a multiple

__device__ __forceinline__ int sum_lanes(int v) {
#pragma unroll
    for (int o = kWarp / 2; o > 0; o >>= 1) v += __shfl_xor_sync(kAllLanes, v, o);
    return v;
}

// v of the lanes below this one.
__device__ __forceinline__ int sum_below(int v, int lane) {
    int sum = v;
#pragma unroll
    for (int o = 1; o < kWarp; o <<= 1) {
        const int other = __shfl_up_sync(kAllLanes, sum, static_cast<unsigned>(o));
        if (lane >= o) sum += other;
    }
    return sum - v;
}

// Rows of the largest of an expert's tiles, which divide its rows evenly, and how many there are.
struct Division {
    int rows, tiles;
};
__device__ __forceinline__ Division divided(int count, int width) {
    const int tiles = (count + width - 1) / width;
    if (tiles == 0) return {0, 0};
    return {((count + tiles - 1) / tiles + kAlign - 1) / kAlign * kAlign, tiles};
}

// slots, list, tiles and tile_count. A block has one expert: it adds up the rows of those before it
// and the tiles of those whose tiles are larger, then goes through all choices in their order and
// gives its own the next rows.
// PRE: grid = experts, block = kGroupThreads.   BYTES: 4 experts * tokens * top, from the L2
__global__ void __launch_bounds__(kGroupThreads)
    group_kernel(const Routing p, const int32_t *counts) {
    __shared__ int rows_of[kGroupWarps];
    __shared__ int tiles_of[kGroupWarps];
    __shared__ int all_tiles_of[kGroupWarps];
    __shared__ int found[2][kGroupWarps];
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = warp_index();
    const int lane = thread % kWarp;
    const int expert = static_cast<int>(blockIdx.x);
    const int entries = p.tokens * p.top;
    pdl_wait();
    pdl_trigger();
    const int count = load_fresh(counts + expert);
    const Division own = divided(count, p.width);
    int rows = 0;
    int tiles = 0;
    int all_tiles = 0;
    for (int e = thread; e < p.experts; e += kGroupThreads) {
        const int other = load_fresh(counts + e);
        const Division of_other = divided(other, p.width);
        if (e < expert) rows += (other + kAlign - 1) / kAlign * kAlign;
        const bool before = of_other.rows > own.rows || (of_other.rows == own.rows && e < expert);
        if (before) tiles += of_other.tiles;
        all_tiles += of_other.tiles;
    }
    rows = sum_lanes(rows);
    tiles = sum_lanes(tiles);
    all_tiles = sum_lanes(all_tiles);
    if (lane == 0) {
        rows_of[warp] = rows;
        tiles_of[warp] = tiles;
        all_tiles_of[warp] = all_tiles;
    }
    __syncthreads();
    int first = 0;
    int first_tile = 0;
    int count_of_tiles = 0;
#pragma unroll
    for (int i = 0; i < kGroupWarps; ++i) {
        first += rows_of[i];
        first_tile += tiles_of[i];
        count_of_tiles += all_tiles_of[i];
    }
    for (int i = thread; i < own.tiles; i += kGroupThreads) {
        const int at = i * own.rows;
        p.tiles[first_tile + i] = {expert, first + at, min(own.rows, count - at), 0};
    }
    const bool last = expert == p.experts - 1;
    if (last && thread == 0) *p.tile_count = count_of_tiles;
    if (p.list != nullptr) {  // rows that are nobody's: up to a multiple of 8, or to the end
        const int padded = first + (count + kAlign - 1) / kAlign * kAlign;
        const int end = last ? p.list_rows : padded;
        for (int i = first + count + thread; i < end; i += kGroupThreads) p.list[i] = -1;
    }
    if (count == 0) return;

    int next = first;
    int buffer = 0;
    for (int panel = 0; panel < entries; panel += kGroupWarps * kWarpEntries) {
        const int from = panel + warp * kWarpEntries;
        uint32_t mine = 0;  // which of entries 32 lane .. 32 lane + 31 of the warp's chose it
        for (int base = 0; base < kWarp && from + base * kWarp < entries; base += kBatch) {
            int32_t chosen[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int at = from + (base + i) * kWarp + lane;
                chosen[i] = at < entries ? load_fresh(p.chosen + at) : -1;
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const uint32_t ballot = __ballot_sync(kAllLanes, chosen[i] == expert ? 1 : 0);
                if (lane == base + i) mine = ballot;
            }
        }
        const int here = __popc(mine);
        const int below = sum_below(here, lane);
        if (lane == kWarp - 1) found[buffer][warp] = below + here;
        __syncthreads();
        int row = next + below;
#pragma unroll
        for (int i = 0; i < kGroupWarps; ++i) {
            const int of_warp = found[buffer][i];
            if (i < warp) row += of_warp;
            next += of_warp;
        }
        for (; mine != 0; mine &= mine - 1) {
            const int at = from + lane * kWarp + __ffs(static_cast<int>(mine)) - 1;
            p.slots[at] = row;
            if (p.list != nullptr) p.list[row] = at / p.top;
            row += 1;
        }
        buffer ^= 1;  // the next panel's numbers may come before these have been read
    }
}

// ------------------------------------------------------------------------------------- combine

constexpr int kCombineThreads = 256;

// x (tokens, k) += sum over j of weights (tokens, top) * y [slots (tokens, top)]
// PRE: grid = (tokens, stretches of 4 kCombineThreads features), block = kCombineThreads.
// BYTES: 4 tokens * k * (top + 2)
__global__ void __launch_bounds__(kCombineThreads) combine_rows_kernel(const CombineRows p) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int64_t token = blockIdx.x;
    const int at = static_cast<int>(blockIdx.y * kCombineThreads + threadIdx.x) * 4;
    const bool inside = at < p.k;
    const int column = inside ? at : 0;  // the others read along, for the shuffles' sake
    pdl_wait();
    pdl_trigger();
    int slot = 0;  // of rank `lane`
    float weight = 0.0f;
    if (lane < p.top) {
        slot = load_fresh(p.slots + token * p.top + lane);
        weight = p.weights[token * p.top + lane];
    }
    auto *to = reinterpret_cast<float4 *>(p.x + token * padded_row(p.k) + column);
    const float4 before = load_fresh(to);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const auto load = [&](int j) {
        const int64_t row = __shfl_sync(kAllLanes, slot, j);
        return load_fresh(reinterpret_cast<const float4 *>(p.y + row * p.stride + column));
    };
    const auto add = [&](const float4 &y, int j) {
        const float w = __shfl_sync(kAllLanes, weight, j);
        // as in expert_down: products rounded before they are added
        sum.x = __fadd_rn(sum.x, __fmul_rn(y.x, w));
        sum.y = __fadd_rn(sum.y, __fmul_rn(y.y, w));
        sum.z = __fadd_rn(sum.z, __fmul_rn(y.z, w));
        sum.w = __fadd_rn(sum.w, __fmul_rn(y.w, w));
    };
    int j = 0;
    for (; j + kBatch <= p.top; j += kBatch) {
        float4 y[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) y[i] = load(j + i);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) add(y[i], j + i);
    }
    for (; j < p.top; ++j) add(load(j), j);
    if (!inside) return;
    // what pads a row of y may be anything; what pads x stays 0
    const auto added = [&](float x, float s, int i) { return at + i < p.k ? x + s : x; };
    *to = make_float4(before.x + sum.x, added(before.y, sum.y, 1), added(before.z, sum.z, 2),
                      added(before.w, sum.w, 3));
}

// ------------------------------------------------------------------------------------ launchers

// The scratch of a routing: counts [experts], then the slices' sums.
struct Scratch {
    int32_t *counts;
    float *partial;
};

uint64_t counts_bytes(int32_t experts) {
    return static_cast<uint64_t>(ceil_div(experts, 64)) * 256;
}

Scratch scratch_of(const Routing &p) {
    auto *bytes = static_cast<unsigned char *>(p.scratch);
    return {reinterpret_cast<int32_t *>(bytes),
            reinterpret_cast<float *>(bytes + counts_bytes(p.experts))};
}

unsigned blocks(int64_t n, int64_t each) {
    return static_cast<unsigned>(ceil_div(n, each));
}

}  // namespace

int64_t most_slots(int64_t tokens, int32_t top, int32_t experts) {
    // 128 more than there can be: a tile is read whole, from whatever row it begins at
    return (ceil_div(tokens * top + (kAlign - 1) * experts, 128) + 1) * 128;
}

int64_t most_tiles(int64_t tokens, int32_t top, int32_t experts, int32_t width) {
    const int64_t entries = tokens * top;
    return (entries + std::min<int64_t>(entries, experts) * (width - 1)) / width;
}

uint64_t routing_scratch(int64_t tokens, int32_t experts, int32_t k) {
    return counts_bytes(experts) + static_cast<uint64_t>(slices_of(k)) *
                                       static_cast<uint64_t>(tokens) *
                                       static_cast<uint64_t>(experts) * sizeof(float);
}

void router_logits(Launcher &to, const Routing &p) {
    const Scratch scratch = scratch_of(p);
    const dim3 grid(blocks(p.tokens, kTileTokens), blocks(p.experts, kTileExperts),
                    static_cast<unsigned>(slices_of(p.k)));
    launch(to, router_kernel, grid, dim3(kLogitThreads), 0, p, scratch.partial, scratch.counts);
}

void choose_experts(Launcher &to, const Routing &p) {
    const Scratch scratch = scratch_of(p);
    launch(to, choose_kernel, dim3(static_cast<unsigned>(p.tokens)), dim3(kChoiceThreads), 0, p,
           scratch.partial, scratch.counts);
}

void group_slots(Launcher &to, const Routing &p) {
    launch(to, group_kernel, dim3(static_cast<unsigned>(p.experts)), dim3(kGroupThreads), 0, p,
           scratch_of(p).counts);
}

void combine_rows(Launcher &to, const CombineRows &p) {
    const dim3 grid(static_cast<unsigned>(p.tokens), blocks(p.k, 4 * kCombineThreads));
    launch(to, combine_rows_kernel, grid, dim3(kCombineThreads), 0, p);
}

}  // namespace vcuda
