// attend: out = softmax(q K^T / sqrt(head_dim)) V of one token, over K/V split among blocks
//
// A block has some positions of one KV head and up to 8 of its query heads, so that a row of K or V
// is read and converted once for all of them. Lanes: LP of them share a position, 8 numbers each,
// and a warp has 32 / LP positions at once. The order of the work is
//
//     K of tile 0, V of tile 0 -> registers          (in flight while the queries are prepared)
//     repeat: scores of K   | next K -> registers    (in flight during the values)
//             sums of p * V | next V -> registers    (in flight during the next scores)
//
// After the scores each lane keeps those of one head, so softmax is computed once a score.
#include "attention.h"

#include <cmath>

#include "attention_parts.cuh"
#include "attention_rows.cuh"
#include "error.h"

namespace vcuda {

using namespace attention;

namespace {

Grouping grouping_of(int32_t heads, int32_t kv_heads, int32_t head_dim) {
    Grouping g;
    g.ratio = heads / kv_heads;
    g.groups = static_cast<int32_t>(ceil_div(g.ratio, kMaxGroup));
    g.heads = static_cast<int32_t>(ceil_div(g.ratio, g.groups));
    g.factor = static_cast<float>(1.0 / sqrt(static_cast<double>(head_dim)));
    return g;
}

// ---------------------------------------------------------------------------------------- device

// What the rows of a token are made with besides the token: known before its products are.
template <int LP>
struct Tables {
    float cos[kPairs<LP>], sin[kPairs<LP>];
    Pairs<LP> q_norm, k_norm;

    __device__ __forceinline__ Tables(const Attention &p, int position, int lane) {
        const int half = p.head_dim / 2;
        load_half<LP>(p.cos + static_cast<int64_t>(position) * half, half, lane, cos);
        load_half<LP>(p.sin + static_cast<int64_t>(position) * half, half, lane, sin);
        q_norm = load_pairs<LP>(p.q_norm, half, lane);
        k_norm = load_pairs<LP>(p.k_norm, half, lane);
    }
};

// The queries of a block into s.query and, in the block that owns the newest position, the new K
// and V row into s.k and s.v; `newest` says so. Ends without a barrier.
template <int KV, int HB, int LP>
__device__ __forceinline__ void prepare(const Attention &p, const Heads &heads, float factor,
                                        const Tables<LP> &tables, bool newest,
                                        Shared<KV, HB, LP> &s) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = warp_index();
    const int half = p.head_dim / 2;
    const float *queries = p.qkv + static_cast<int64_t>(heads.first) * p.head_dim;
    const float *key = p.qkv + static_cast<int64_t>(p.heads + heads.kv_head) * p.head_dim;
    const float *value = key + static_cast<int64_t>(p.kv_heads) * p.head_dim;

    // rows 0 .. HB - 1 are queries, HB is the key, HB + 1 the value; all are loaded before the
    // first is worked on, as each load takes longer than the work
    constexpr int kRows = (HB + 2 + kWarps - 1) / kWarps;
    Pairs<LP> rows[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
        const int r = warp + kWarps * j;
        const float *x = nullptr;
        if (r < heads.count) x = queries + r * p.head_dim;
        if (r == HB && newest) x = key;
        if (r == HB + 1 && newest) x = value;
        rows[j] = load_pairs<LP>(x, half, lane);
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
        const int r = warp + kWarps * j;
        Pairs<LP> &row = rows[j];
        const bool is_query = kWarps * (j + 1) <= HB || r < HB;  // known while compiling, mostly
        if (!is_query && (r > HB + 1 || !newest)) continue;
        if (is_query && p.q_norm != nullptr) normalise(row, tables.q_norm, p.eps, half);
        if (r == HB && p.k_norm != nullptr) normalise(row, tables.k_norm, p.eps, half);
        if (r <= HB) turn(row, tables.cos, tables.sin);
        if (is_query) {
            store_query<LP>(row, factor, half, lane, s.query[r]);
        } else {
            store_row<KV>(row, half, lane, r == HB ? s.k : s.v, r == HB ? &s.k_scale : &s.v_scale);
        }
    }
}

// --------------------------------------------------------------------------------------- kernels

// out [heads][head_dim] = softmax(q K^T / sqrt(head_dim)) V; see Attention.
// PRE: grid (kv_heads * groups, max_splits), 128 threads; LP = 8, 16 or 32 and head_dim <= 8 LP;
//      HB >= g.heads; arrived [kv_heads * groups] is 0.
// BYTES: K and V of the visible positions once a group (int8: 2 head_dim + 8 a position), and
//        4 (head_dim + 2) for each part and head, written and read.
template <int KV, int HB, int LP>
__global__ void __launch_bounds__(kThreads, resident_blocks(HB))
    attend_kernel(const Attention p, const Grouping g) {
    using G = Geometry<KV, HB, LP>;
    using Chunk = typename Stored<KV>::Chunk;
    __shared__ Shared<KV, HB, LP> s;

    // Up to pdl_wait: what the kernel before this one has no part in.
    const int position = load_fresh(&p.step->position);
    const Cut c = cut(position, p.window, p.max_splits);
    const int part = static_cast<int>(blockIdx.y);
    if (part >= c.parts) return;
    const int begin = c.first + part * c.size;
    const int end = part + 1 < c.parts ? begin + c.size : position + 1;
    const bool newest = end > position;
    const Heads heads = heads_of(g);
    const int kv_head = heads.kv_head;

    const int tid = static_cast<int>(threadIdx.x);
    const int lane = tid % kWarp, warp = warp_index();
    const int l = lane % LP, sub = lane / LP;  // which 8 numbers of which position

    // Tile 0 of this warp. Places are 32-bit numbers of chunks (2^32 of them would be 32 GB a
    // layer): the addresses then take one register and one instruction. What is not in memory (the
    // newest row, and what is behind it) leaves the old numbers in the registers, which are finite;
    // they have no part in the scores.
    const int chunks = p.head_dim / kChunk;
    const int my_chunk = l < chunks ? l : chunks - 1;  // idle lanes: their query is 0
    const int count = end - begin;                     // positions of the part
    const int in_memory = newest ? count - 1 : count;
    const unsigned row_chunks = static_cast<unsigned>(p.kv_heads * chunks);
    const unsigned first_row = static_cast<unsigned>(begin * p.kv_heads + kv_head);
    const unsigned first_chunk = first_row * static_cast<unsigned>(chunks) + my_chunk;
    Chunk k[G::unroll]{}, v[G::unroll]{};
    float k_scale = 1.0f, v_scale = 1.0f;  // of row l % unroll; the others come by shuffle
    const auto load = [&](const void *rows, const float *scales, int at, Chunk(&chunk)[G::unroll],
                          float &scale) {
#pragma unroll
        for (int u = 0; u < G::unroll; ++u) {
            const int i = at + u * G::at_once;
            if (i >= in_memory) continue;
            chunk[u] = static_cast<const Chunk *>(rows)[first_chunk + i * row_chunks];
        }
        const int i = at + l % G::unroll * G::at_once;
        if (KV == VCUDA_KV_INT8 && i < in_memory) scale = scales[first_row + i * p.kv_heads];
    };
    const auto scale_of = [&](float scale, int u) {
        return KV == VCUDA_KV_INT8 ? __shfl_sync(kAllLanes, scale, sub * LP + u) : 1.0f;
    };
    int at = warp * G::tile + sub;  // row 0 of this lane, counted from `begin`
    load(p.k, p.k_scales, at, k, k_scale);
    load(p.v, p.v_scales, at, v, v_scale);
    const Tables<LP> tables(p, position, lane);
    if (tid == 0) {
        s.heads = heads;
        s.parts = c.parts;
    }
    pdl_wait();
    pdl_trigger();
    prepare(p, heads, g.factor, tables, newest, s);
    __syncthreads();
    if (newest && heads.writes && tid < chunks) {  // one group writes; each uses its own copy
        const int64_t row = static_cast<int64_t>(position) * p.kv_heads + kv_head;
        static_cast<Chunk *>(p.k)[row * chunks + tid] = s.k[tid];
        static_cast<Chunk *>(p.v)[row * chunks + tid] = s.v[tid];
        if (KV == VCUDA_KV_INT8 && tid == 0) {
            p.k_scales[row] = s.k_scale;
            p.v_scales[row] = s.v_scale;
        }
    }

    float sum[HB][kChunk];
#pragma unroll
    for (int h = 0; h < HB; ++h) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) sum[h][i] = 0.0f;
    }

    constexpr int kLanesOfHead = LP / HB;
    const bool keeps = l % kLanesOfHead == 0;  // of the lanes with the same score the one that
    const int own = l / kLanesOfHead;          // shares it; its head
    const int query_at = own * 2 * LP + l;     // in s.query
    float largest = kLowest, total = 0.0f;     // of that head
    for (int tile = warp * G::tile; tile < count; tile += kWarps * G::tile) {
        // scores; the newest row, the last of its part, comes from shared memory (other parts are
        // whole tiles and never come here)
        if (tile + G::tile > in_memory) {
#pragma unroll
            for (int u = 0; u < G::unroll; ++u) {
                if (at + u * G::at_once != in_memory) continue;
                k[u] = s.k[my_chunk];
                v[u] = s.v[my_chunk];
            }
            if (at + l % G::unroll * G::at_once == in_memory) {
                k_scale = s.k_scale;
                v_scale = s.v_scale;
            }
        }
        float score[G::unroll];
#pragma unroll
        for (int u = 0; u < G::unroll; u += 2) {
            // The queries stay in shared memory and are read once for two rows: in registers they
            // would leave room for two blocks instead of three. The barrier keeps the compiler
            // from holding on to what it read for the two rows before.
            __syncwarp();
            float x0[kChunk], x1[kChunk], dot0[HB], dot1[HB];
            Stored<KV>::unpack(k[u], x0);
            Stored<KV>::unpack(k[u + 1], x1);
#pragma unroll
            for (int i = 0; i < HB; ++i) {
                const float4 *of_head = s.query[0] + (query_at ^ (i * 2 * LP));  // head i ^ own
                const float4 low = of_head[0], high = of_head[LP];
                const float q[kChunk] = {low.x,  low.y,  low.z,  low.w,
                                         high.x, high.y, high.z, high.w};
                dot0[i] = dot1[i] = 0.0f;
#pragma unroll
                for (int j = 0; j < kChunk; ++j) {
                    dot0[i] += q[j] * x0[j];
                    dot1[i] += q[j] * x1[j];
                }
            }
            score[u] = sum_heads<HB, LP>(dot0) * scale_of(k_scale, u);
            score[u + 1] = sum_heads<HB, LP>(dot1) * scale_of(k_scale, u + 1);
            if (at + u * G::at_once >= count) score[u] = -INFINITY;
            if (at + (u + 1) * G::at_once >= count) score[u + 1] = -INFINITY;
        }
        load(p.k, p.k_scales, at + kWarps * G::tile, k, k_scale);

        // softmax with a running maximum
        float highest = largest;
#pragma unroll
        for (int u = 0; u < G::unroll; ++u) highest = fmaxf(highest, score[u]);
        const bool shrink = __any_sync(kAllLanes, highest > largest);
        const float by = expf(largest - highest);
        largest = highest;
        total *= by;
#pragma unroll
        for (int u = 0; u < G::unroll; ++u) {
            const float e = expf(score[u] - highest);
            total += e;
            const float weight = e * scale_of(v_scale, u);
            if (keeps) reinterpret_cast<float *>(s.p[warp][u][sub])[own] = weight;
        }
        if (keeps) reinterpret_cast<float *>(s.p[warp][G::unroll][sub])[own] = by;
        __syncwarp();

        // sum = sum * by + p V
        if (shrink) {
            float w[HB];
            read_heads<HB>(s.p[warp][G::unroll][sub], w);
#pragma unroll
            for (int h = 0; h < HB; ++h) {
#pragma unroll
                for (int i = 0; i < kChunk; ++i) sum[h][i] *= w[h];
            }
        }
#pragma unroll
        for (int u = 0; u < G::unroll; ++u) {
            float x[kChunk], w[HB];
            Stored<KV>::unpack(v[u], x);
            read_heads<HB>(s.p[warp][u][sub], w);
#pragma unroll
            for (int h = 0; h < HB; ++h) {
#pragma unroll
                for (int i = 0; i < kChunk; ++i) sum[h][i] += w[h] * x[i];
            }
        }
        at += kWarps * G::tile;
        load(p.v, p.v_scales, at, v, v_scale);
        __syncwarp();
    }

    // what this lane has, for the join
    const int mine = warp * G::at_once + sub;
#pragma unroll
    for (int h = 0; h < HB; ++h) {
        s.sums[mine][h][l] = make_float4(sum[h][0], sum[h][1], sum[h][2], sum[h][3]);
        s.sums[mine][h][LP + l] = make_float4(sum[h][4], sum[h][5], sum[h][6], sum[h][7]);
    }
    if (keeps) {
        s.largest[mine][own] = largest;
        s.total[mine][own] = total;
    }
    __syncthreads();
    join_lanes(p, s);
    if (s.parts > 1) join_parts(p, s);
}

// ------------------------------------------------------------------------------------- launchers

template <int KV, int HB>
void attend_group(Launcher &to, const Attention &p, const Grouping &g) {
    const dim3 grid(static_cast<unsigned>(p.kv_heads * g.groups),
                    static_cast<unsigned>(p.max_splits));
    if (p.head_dim <= 8 * kChunk) {
        launch(to, attend_kernel<KV, HB, 8>, grid, dim3(kThreads), 0, p, g);
    } else if (p.head_dim <= 16 * kChunk) {
        launch(to, attend_kernel<KV, HB, 16>, grid, dim3(kThreads), 0, p, g);
    } else {
        launch(to, attend_kernel<KV, HB, 32>, grid, dim3(kThreads), 0, p, g);
    }
}

template <int KV>
void attend_stored(Launcher &to, const Attention &p) {
    const Grouping g = grouping_of(p.heads, p.kv_heads, p.head_dim);
    if (g.heads == 1) {
        attend_group<KV, 1>(to, p, g);
    } else if (g.heads == 2) {
        attend_group<KV, 2>(to, p, g);
    } else if (g.heads <= 4) {
        attend_group<KV, 4>(to, p, g);
    } else {
        attend_group<KV, 8>(to, p, g);
    }
}

}  // namespace

void attend(Launcher &to, const Attention &p) {
    if (p.head_dim < 16 || p.head_dim > kMaxHeadDim || p.head_dim % 16 != 0) {
        throw Error("attention with head_dim %d: it must be a multiple of 16 up to %d", p.head_dim,
                    kMaxHeadDim);
    }
    if (p.kv == VCUDA_KV_F16) {
        attend_stored<VCUDA_KV_F16>(to, p);
    } else if (p.kv == VCUDA_KV_F32) {
        attend_stored<VCUDA_KV_F32>(to, p);
    } else {
        attend_stored<VCUDA_KV_INT8>(to, p);
    }
}

int32_t attention_splits(int32_t heads, int32_t kv_heads, int32_t head_dim, int32_t ctx_size,
                         int32_t sm_count) {
    const Grouping g = grouping_of(heads, kv_heads, head_dim);
    const int64_t resident = static_cast<int64_t>(sm_count) * resident_blocks(g.heads > 4 ? 8 : 1);
    int64_t splits = resident / (static_cast<int64_t>(kv_heads) * g.groups);
    const int64_t most = ceil_div(ctx_size, kLeast);
    if (splits > most) splits = most;
    if (splits > kMaxSplits) splits = kMaxSplits;
    return splits < 1 ? 1 : static_cast<int32_t>(splits);
}

uint64_t attention_scratch(int32_t heads, int32_t head_dim, int32_t max_splits) {
    return static_cast<uint64_t>(heads) * static_cast<uint64_t>(max_splits) *
           static_cast<uint64_t>(head_dim + 2);
}

uint64_t attention_counters(int32_t heads, int32_t kv_heads) {
    const int64_t groups = ceil_div(heads / kv_heads, kMaxGroup);
    return static_cast<uint64_t>(kv_heads) * static_cast<uint64_t>(groups);
}

}  // namespace vcuda
