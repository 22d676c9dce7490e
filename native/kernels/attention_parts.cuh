// What the blocks of attend share out, what the threads of one share, and how sums are joined.
#pragma once

#include "attention.h"
#include "attention_rows.cuh"

namespace vcuda::attention {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kMaxGroup = 8;       // query heads of a block
constexpr int kMaxSplits = 256;    // the weights of the parts must fit where the parts were joined
constexpr int kLeast = 64;         // positions of a part, at least
constexpr int kSplitUnit = 16;     // and a multiple of this: whole tiles of every kernel
constexpr float kLowest = -1e30f;  // running maximum of no scores: finite, so that it can be
                                   // subtracted from itself

// Blocks of a kernel that a multiprocessor holds: what the registers allow.
constexpr int resident_blocks(int group) {
    return group == 8 ? 3 : 4;
}

// Query heads of one KV head, shared out.
struct Grouping {
    int32_t ratio;   // query heads a KV head
    int32_t groups;  // blocks that share them
    int32_t heads;   // of a group; the last may have fewer
    float factor;    // head_dim^-0.5
};

// The query heads of a block.
struct Heads {
    int kv_head;
    int first;
    int count;
    bool writes;  // the new row: one of the groups of a KV head does
};

__device__ __forceinline__ Heads heads_of(const Grouping &g) {
    const int group = static_cast<int>(blockIdx.x) % g.groups;
    const int before = group * g.heads;  // in the groups before this one
    Heads h;
    h.kv_head = static_cast<int>(blockIdx.x) / g.groups;
    h.first = h.kv_head * g.ratio + before;
    h.count = g.ratio - before < g.heads ? g.ratio - before : g.heads;
    h.writes = group == 0;
    return h;
}

// The positions that a token sees, and how they are cut into parts.
struct Cut {
    int first;  // position
    int size;   // positions of a part
    int parts;
};

// Joining a part costs the last block about as much time as some positions cost the others, so the
// number of parts grows with the root of the number of positions; short histories stay whole.
__device__ __forceinline__ Cut cut(int position, int window, int max_parts) {
    Cut c;
    c.first = window > 0 && position >= window ? position - window + 1 : 0;
    const int count = position + 1 - c.first;
    const int root = static_cast<int>(sqrtf(0.3f * static_cast<float>(count)));
    int parts = (count + kLeast - 1) / kLeast;
    parts = root < parts ? root : parts;
    parts = max_parts < parts ? max_parts : parts;
    parts = parts < 1 ? 1 : parts;
    const int even = (count + parts - 1) / parts;
    c.size = (even + kSplitUnit - 1) / kSplitUnit * kSplitUnit;
    c.parts = (count + c.size - 1) / c.size;
    return c;
}

template <int KV, int HB, int LP>
struct Geometry {
    static constexpr int at_once = kWarp / LP;  // positions of a warp
    // what keeps the rows of a tile and the sums of HB heads in registers
    static constexpr int unroll = KV == VCUDA_KV_F32 || (KV == VCUDA_KV_F16 && HB >= 4) ? 2 : 4;
    static constexpr int tile = at_once * unroll;  // positions that a warp has in registers
    static constexpr int parts = kWarps * at_once;
};

template <int KV, int HB, int LP>
struct Shared {
    using G = Geometry<KV, HB, LP>;
    using Chunk = typename Stored<KV>::Chunk;
    float4 sums[G::parts][HB][2 * LP];  // of p * V; numbers 8 l .. 8 l + 3 at l, the rest at LP + l
    float4 query[HB][2 * LP];           // in the same order, zeros from head_dim on
    float4 p[kWarps][G::unroll + 1][G::at_once][(HB + 3) / 4];  // [HB] weights of a position;
                                                                // behind them what sums shrink by
    Chunk k[LP], v[LP];                                         // the new row as it is stored
    float k_scale, v_scale;                                     // its scales
    float largest[G::parts][HB];                                // score
    float total[G::parts][HB];                                  // of exp(score - largest)
    float weight[G::parts][HB];  // exp(largest - the largest of all parts)
    Heads heads;                 // for the joins: here they take no registers while
    int parts;                   // the positions are gone through
    int last;
};

// The sums over LP lanes of HB heads; lane l gets that of its own head, l * HB / LP, and dots [i]
// of a lane belong to the head i ^ own. Half of what is left is given away at each step, so this
// takes HB + log2(LP / HB) - 1 shuffles instead of HB * log2(LP); and with the heads in that order
// the halves are the same registers in all lanes.
template <int HB, int LP>
__device__ __forceinline__ float sum_heads(float (&dots)[HB]) {
    int left = HB;
#pragma unroll
    for (int o = LP / 2; o > 0; o >>= 1) {
        if (left > 1) {
            left /= 2;
#pragma unroll
            for (int i = 0; i < HB / 2; ++i) {
                if (i < left) dots[i] += __shfl_xor_sync(kAllLanes, dots[i + left], o);
            }
        } else {
            dots[0] += __shfl_xor_sync(kAllLanes, dots[0], o);
        }
    }
    return dots[0];
}

template <int HB>
__device__ __forceinline__ void read_heads(const float4 *from, float (&to)[HB]) {
#pragma unroll
    for (int i = 0; i < HB; i += 4) {
        const float4 v = from[i / 4];
        to[i] = v.x;
        if (i + 1 < HB) to[i + 1] = v.y;
        if (i + 2 < HB) to[i + 2] = v.z;
        if (i + 3 < HB) to[i + 3] = v.w;
    }
}

__device__ __forceinline__ void add_scaled(float4 &sum, float weight, const float4 &v) {
    sum.x += weight * v.x;
    sum.y += weight * v.y;
    sum.z += weight * v.z;
    sum.w += weight * v.w;
}

__device__ __forceinline__ float4 divided(const float4 &v, float by) {
    const float f = 1.0f / by;
    return make_float4(v.x * f, v.y * f, v.z * f, v.w * f);
}

// Where the parts of all heads meet, in global memory.
struct Meeting {
    float4 *values;  // [heads][max_splits][head_dim]: sums of p * V
    float2 *stats;   // [heads][max_splits]: largest score, sum of p
};

__device__ __forceinline__ Meeting meeting_of(const Attention &p) {
    Meeting m;
    m.values = reinterpret_cast<float4 *>(p.partial);
    m.stats = reinterpret_cast<float2 *>(p.partial +
                                         static_cast<int64_t>(p.heads) * p.max_splits * p.head_dim);
    return m;
}

// What the lanes left in s, joined in a fixed order: into p.out when there is but one part, else
// into this block's place of the meeting. PRE: a barrier before.
template <int KV, int HB, int LP>
__device__ __forceinline__ void join_lanes(const Attention &p, Shared<KV, HB, LP> &s) {
    const Heads heads = s.heads;
    const int parts = s.parts;
    constexpr int kSources = Geometry<KV, HB, LP>::parts;
    const int tid = static_cast<int>(threadIdx.x);
    if (tid < kSources * HB) {
        const int i = tid / HB, h = tid % HB;
        float most = s.largest[0][h];
        for (int j = 1; j < kSources; ++j) most = fmaxf(most, s.largest[j][h]);
        s.weight[i][h] = expf(s.largest[i][h] - most);
    }
    __syncthreads();
    float4 *out = reinterpret_cast<float4 *>(p.out);
    const Meeting m = meeting_of(p);
    const int quads = p.head_dim / 4;
    for (int i = tid; i < heads.count * quads; i += kThreads) {
        const int h = i / quads, quad = i % quads;
        float4 joined = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float total = 0.0f, most = kLowest;
#pragma unroll
        for (int j = 0; j < kSources; ++j) {
            add_scaled(joined, s.weight[j][h], s.sums[j][h][place_of_quad<LP>(quad)]);
            total += s.weight[j][h] * s.total[j][h];
            most = fmaxf(most, s.largest[j][h]);
        }
        const int64_t head = heads.first + h;
        if (parts == 1) {
            out[head * quads + quad] = divided(joined, total);
        } else {
            const int64_t place = head * p.max_splits + blockIdx.y;
            m.values[place * quads + quad] = joined;
            if (quad == 0) m.stats[place] = make_float2(most, total);
        }
    }
}

// What the parts of a head weigh and add up to, for the last block of a group: weight [HB][parts]
// and total [HB], of stats [heads][max_splits] (largest score, sum).
template <int HB>
__device__ __forceinline__ void weigh_parts(const float2 *stats, int max_splits, int parts,
                                            int heads, float *weight, float *total) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    for (int h = static_cast<int>(threadIdx.x) / kWarp; h < heads; h += kWarps) {
        const float2 *of_head = stats + static_cast<int64_t>(h) * max_splits;
        float largest = kLowest;
        for (int i = lane; i < parts; i += kWarp) largest = fmaxf(largest, of_head[i].x);
        largest = warp_max(largest);
        float sum = 0.0f;
        for (int i = lane; i < parts; i += kWarp) {
            const float2 stat = of_head[i];
            const float w = expf(stat.x - largest);
            weight[h * kMaxSplits + i] = w;
            sum += w * stat.y;
        }
        sum = warp_sum(sum);
        if (lane == 0) total[h] = sum;
    }
}

// In the last block of a group to come here: p.out from the meeting, in the order of the positions.
// In the others: nothing.
template <int KV, int HB, int LP>
__device__ __forceinline__ void join_parts(const Attention &p, Shared<KV, HB, LP> &s) {
    const Heads heads = s.heads;
    const int parts = s.parts;
    const int tid = static_cast<int>(threadIdx.x);
    uint32_t *arrived = p.arrived + blockIdx.x;
    __threadfence();
    __syncthreads();
    if (tid == 0) s.last = atomicAdd(arrived, 1u) == static_cast<unsigned>(parts - 1) ? 1 : 0;
    __syncthreads();
    if (s.last == 0) return;
    __threadfence();
    if (tid == 0) *arrived = 0;

    const Meeting m = meeting_of(p);
    float *weight = reinterpret_cast<float *>(s.sums);  // [HB][kMaxSplits]
    static_assert(sizeof(s.sums) >= HB * kMaxSplits * sizeof(float), "the weights must fit");
    float *total = s.total[0];  // [HB]
    weigh_parts<HB>(m.stats + static_cast<int64_t>(heads.first) * p.max_splits, p.max_splits, parts,
                    heads.count, weight, total);
    __syncthreads();
    const int quads = p.head_dim / 4;
    for (int i = tid; i < heads.count * quads; i += kThreads) {
        const int h = i / quads, quad = i % quads;
        const int64_t head = heads.first + h;
        const float4 *of_head = m.values + head * p.max_splits * quads + quad;
        float4 joined = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
        for (int j = 0; j < parts; ++j) {
            add_scaled(joined, weight[h * kMaxSplits + j],
                       of_head[static_cast<int64_t>(j) * quads]);
        }
        reinterpret_cast<float4 *>(p.out)[head * quads + quad] = divided(joined, total[h]);
    }
}

}  // namespace vcuda::attention
