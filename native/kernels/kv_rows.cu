// The rows of many tokens on their way into attention: see kv_rows.h
#include "kv_rows.h"

#include <cmath>

#include "attention_rows.cuh"
#include "error.h"
#include "ptx_sm90.cuh"

namespace vcuda {

using namespace attention;

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kRowsOfWarp = 4;    // of qkv_rows
constexpr int kRowsOfThread = 4;  // of kv_operand
constexpr float kMostHalf = 65504.0f;

// Warps of qkv_rows that a token takes: of its queries, and of its keys as of its values.
struct TokenWarps {
    int32_t queries = 0, keys = 0;

    VCUDA_BOTH int32_t all() const { return queries + 2 * keys; }
};

// ---------------------------------------------------------------------------------------- device

// Part `part` of a number as float16: the nearest, or the nearest to what that one lost.
__device__ __forceinline__ uint32_t half_part(float v, int part) {
    const uint32_t bits = half_bits(v);
    return part == 0 ? bits : half_bits(v - half_value(bits));
}

// The 4 x 4 words of 4 neighbouring lanes the other way round: word i of lane t becomes word t of
// lane i. Two halvings: words that change places within a pair of lanes, then pairs of lanes.
__device__ __forceinline__ void transpose_4(uint32_t (&w)[4], int lane) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        const bool upper = (lane & step) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((i & step) != 0) continue;
            const uint32_t got =
                __shfl_xor_sync(kAllLanes, upper ? w[i] : w[i + step], static_cast<int>(step));
            if (upper) {
                w[i] = got;
            } else {
                w[i + step] = got;
            }
        }
    }
}

// v of each row, joined over the warp in the order of warp_sum: lane l gets that of row l / 8. The
// rows are halved among the lanes as the lanes are joined.
template <class T, class Join>
__device__ __forceinline__ T of_rows(const T (&v)[kRowsOfWarp], int lane, const Join &join) {
    static_assert(kRowsOfWarp == 4, "two halvings");
    const bool upper = (lane & 16) != 0, odd = (lane & 8) != 0;
    const T a = join(upper ? v[2] : v[0], __shfl_xor_sync(kAllLanes, upper ? v[0] : v[2], 16));
    const T b = join(upper ? v[3] : v[1], __shfl_xor_sync(kAllLanes, upper ? v[1] : v[3], 16));
    T own = join(odd ? b : a, __shfl_xor_sync(kAllLanes, odd ? a : b, 8));
#pragma unroll
    for (int o = 4; o > 0; o >>= 1) own = join(own, __shfl_xor_sync(kAllLanes, own, o));
    return own;
}

// What of_rows() gave, for one row.
__device__ __forceinline__ float of_row(float own, int row) {
    return __shfl_sync(kAllLanes, own, row * (kWarp / kRowsOfWarp));
}

// Up to 4 queries, heads `first` .. of a token, as float16 parts.
template <int LP>
__device__ __forceinline__ void store_queries(const QkvRows &p,
                                              const Pairs<LP> (&rows)[kRowsOfWarp], int token,
                                              int first, int count, int half, int lane,
                                              float factor) {
    const int64_t part_stride = static_cast<int64_t>(p.tokens) * p.heads * (2 * half);
    uint16_t *q = p.q + (static_cast<int64_t>(token) * p.heads + first) * (2 * half) + lane;
    bool too_large = false;  // or NaN, which must not reach rows that do not see it
#pragma unroll
    for (int r = 0; r < kRowsOfWarp; ++r) {
        if (r >= count) continue;
#pragma unroll
        for (int j = 0; j < kPairs<LP>; ++j) {
            const int i = kWarp * j;  // behind the lane's first
            if (lane + i >= half) continue;
            const float a = rows[r].a[j] * factor, b = rows[r].b[j] * factor;
            too_large |= !(fabsf(a) <= kMostHalf && fabsf(b) <= kMostHalf);
            q[i] = static_cast<uint16_t>(half_part(a, 0));
            q[i + half] = static_cast<uint16_t>(half_part(b, 0));
            if (p.q_parts == 2) {
                q[part_stride + i] = static_cast<uint16_t>(half_part(a, 1));
                q[part_stride + i + half] = static_cast<uint16_t>(half_part(b, 1));
            }
        }
        q += 2 * half;
    }
    if (too_large) *p.overflow = 1;
}

// Up to 4 rows of K or V, `at` .. (position * kv_heads + head), as a session keeps them.
template <int KV, int LP>
__device__ __forceinline__ void store_stored(const QkvRows &p, const Pairs<LP> (&rows)[kRowsOfWarp],
                                             bool is_value, int64_t at, int count, int half,
                                             int lane) {
    using Chunk = typename Stored<KV>::Chunk;
    auto *to = static_cast<Chunk *>(is_value ? p.to.v : p.to.k) + at * (2 * half / kChunk);
    float own = 1.0f;
    if constexpr (KV == VCUDA_KV_INT8) {
        constexpr int lanes = kWarp / kRowsOfWarp;  // that have the scale of a row
        unsigned largest[kRowsOfWarp];
#pragma unroll
        for (int r = 0; r < kRowsOfWarp; ++r) largest[r] = largest_of_lane(rows[r]);
        own = scale_of_largest(
            of_rows(largest, lane, [](unsigned a, unsigned b) { return a > b ? a : b; }));
        float *scales = is_value ? p.to.v_scales : p.to.k_scales;
        if (lane % lanes == 0 && lane / lanes < count) scales[at + lane / lanes] = own;
    }
#pragma unroll
    for (int r = 0; r < kRowsOfWarp; ++r) {
        const float scale = KV == VCUDA_KV_INT8 ? of_row(own, r) : 1.0f;
        if (r < count) {
            store_numbers<KV>(rows[r], scale, half, lane, to + r * (2 * half / kChunk));
        }
    }
}

// --------------------------------------------------------------------------------------- kernels

// Rows of qkv -> queries as float16 parts, keys and values as they are stored; see QkvRows.
// PRE: grid ceil(tokens * warps_of_token / 8), 256 threads: a warp has up to 4 rows of a token, all
//      queries, keys or values. LP = 8, 16 or 32 and head_dim <= 8 LP; FULL: head_dim = 8 LP.
// BYTES: 4 (q_dim + 2 kv_dim) a token read, 2 q_parts q_dim + the stored K/V rows written.
template <int KV, int LP, bool FULL>
__global__ void __launch_bounds__(kThreads)
    qkv_rows_kernel(const QkvRows p, const TokenWarps warps, float factor) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int unit = static_cast<int>(blockIdx.x) * kWarps + warp_index();
    const int token = unit / warps.all(), of_token = unit % warps.all();
    const int half = FULL ? LP * kChunk / 2 : p.head_dim / 2;
    const bool is_query = of_token < warps.queries;
    const bool is_value = of_token >= warps.queries + warps.keys;
    const int first =  // head
        kRowsOfWarp * (of_token - (is_query   ? 0
                                   : is_value ? warps.queries + warps.keys
                                              : warps.queries));
    const int count = min(kRowsOfWarp, (is_query ? p.heads : p.kv_heads) - first);
    const int64_t position = p.position + token;
    const bool inside = token < p.tokens;

    Pairs<LP> weight = {};
    float cos[kPairs<LP>] = {}, sin[kPairs<LP>] = {};
    const float *norm = is_query ? p.q_norm : p.k_norm;
    if (inside && !is_value) {
        load_half<LP>(p.cos + position * half, half, lane, cos);
        load_half<LP>(p.sin + position * half, half, lane, sin);
        weight = load_pairs<LP>(norm, half, lane);
    }
    pdl_wait();
    pdl_trigger();
    if (!inside) return;

    const int r = first + (is_query ? 0 : is_value ? p.heads + p.kv_heads : p.heads);
    const float *from =
        p.qkv + (static_cast<int64_t>(token) * (p.heads + 2 * p.kv_heads) + r) * (2 * half);
    Pairs<LP> rows[kRowsOfWarp];
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {  // all of them are under way at a time
        const float *row = from + (i < count ? i * 2 * half : 0);
        load_half<LP>(row, half, lane, rows[i].a);
        load_half<LP>(row + half, half, lane, rows[i].b);
    }
    if (!is_value) {
        if (norm != nullptr) {
            float squares[kRowsOfWarp];
#pragma unroll
            for (int i = 0; i < kRowsOfWarp; ++i) squares[i] = square_of_lane(rows[i]);
            const float own = norm_factor(
                of_rows(squares, lane, [](float a, float b) { return a + b; }), p.eps, half);
#pragma unroll
            for (int i = 0; i < kRowsOfWarp; ++i) multiply(rows[i], of_row(own, i), weight);
        }
#pragma unroll
        for (int i = 0; i < kRowsOfWarp; ++i) turn(rows[i], cos, sin);
    }
    if (is_query) {
        store_queries(p, rows, token, first, count, half, lane, factor);
    } else {
        store_stored<KV>(p, rows, is_value, position * p.kv_heads + first, count, half, lane);
    }
}

// Stored K (blockIdx.z 0) and V (1) of rows of positions -> float16 parts; see KvOperand.
// PRE: 256 threads, to.width = WIDTH; blockIdx.y is the KV head, a thread has 8 features of 4 rows;
//      `rows` of them in all, from the position `from` on. Those from `end` on are 0.
// BYTES: of each number its stored bytes and 2 parts.
template <int KV, int WIDTH>
__global__ void __launch_bounds__(kThreads)
    kv_operand_kernel(const KvStored stored, const KvOperand to, int kv_heads, int head_dim,
                      int from, int end, int rows, int32_t *overflow) {
    using Chunk = typename Stored<KV>::Chunk;
    constexpr int row_chunks = WIDTH / kChunk, stride = kThreads / row_chunks;
    const bool is_value = blockIdx.z == 1;
    const int head = static_cast<int>(blockIdx.y);
    const int c = static_cast<int>(threadIdx.x) % row_chunks;
    const int first = static_cast<int>(blockIdx.x) * (stride * kRowsOfThread) +
                      static_cast<int>(threadIdx.x) / row_chunks;
    const auto *chunks = static_cast<const Chunk *>(is_value ? stored.v : stored.k);
    const float *scales = is_value ? stored.v_scales : stored.k_scales;
    pdl_wait();
    pdl_trigger();

    Chunk chunk[kRowsOfThread] = {};
    float scale[kRowsOfThread] = {};
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {  // all of them are under way at a time
        const int position = from + first + i * stride;
        if (position >= end || c * kChunk >= head_dim) continue;
        const int64_t at = static_cast<int64_t>(position) * kv_heads + head;
        chunk[i] = chunks[at * (head_dim / kChunk) + c];
        if (KV == VCUDA_KV_INT8) scale[i] = scales[at];
    }

    uint16_t *block =
        (is_value ? to.v : to.k) +
        (static_cast<int64_t>(head) * (WIDTH / kKvBlock) + c / 8) * to.capacity * kKvBlock;
    bool too_large = false;
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
        float v[kChunk];
        Stored<KV>::unpack(chunk[i], v);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
            if (KV == VCUDA_KV_INT8) v[j] *= scale[i];
            too_large |= !(fabsf(v[j]) <= kMostHalf);
        }
        const int row = first + i * stride, r = from - to.first + row;
        uint16_t *out = block + static_cast<int64_t>(r) * kKvBlock + ((c % 8) ^ (r % 8)) * kChunk;
        for (int part = 0; part < to.parts; ++part) {
            uint32_t w[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                w[j] = half2_bits(v[2 * j], v[2 * j + 1]);
                v[2 * j] -= half_value(w[j] & 0xffffu);
                v[2 * j + 1] -= half_value(w[j] >> 16);
            }
            if (is_value) transpose_4(w, c);
            if (row < rows) {
                *reinterpret_cast<uint4 *>(out + part * to.part_stride(kv_heads)) =
                    make_uint4(w[0], w[1], w[2], w[3]);
            }
        }
    }
    if (too_large) *overflow = 1;
}

// ------------------------------------------------------------------------------------- launchers

template <int KV>
void qkv_rows_stored(Launcher &to, const QkvRows &p) {
    TokenWarps warps;
    warps.queries = static_cast<int32_t>(ceil_div(p.heads, kRowsOfWarp));
    warps.keys = static_cast<int32_t>(ceil_div(p.kv_heads, kRowsOfWarp));
    const int64_t units = int64_t{1} * p.tokens * warps.all();
    const dim3 grid(static_cast<unsigned>(ceil_div(units, kWarps)));
    const auto factor = static_cast<float>(1.4426950408889634 / sqrt(double{1} * p.head_dim));
    const auto kernel = p.head_dim == 64    ? qkv_rows_kernel<KV, 8, true>
                        : p.head_dim == 128 ? qkv_rows_kernel<KV, 16, true>
                        : p.head_dim < 64   ? qkv_rows_kernel<KV, 8, false>
                        : p.head_dim < 128  ? qkv_rows_kernel<KV, 16, false>
                                            : qkv_rows_kernel<KV, 32, false>;
    launch(to, kernel, grid, dim3(kThreads), 0, p, warps, factor);
}

template <int KV>
auto kv_operand_of(int32_t width) {
    return width == 64    ? kv_operand_kernel<KV, 64>
           : width == 128 ? kv_operand_kernel<KV, 128>
                          : kv_operand_kernel<KV, 256>;
}

}  // namespace

void qkv_rows(Launcher &to, const QkvRows &p) {
    if (p.head_dim < 16 || p.head_dim > kMaxHeadDim || p.head_dim % 16 != 0) {
        throw Error("attention with head_dim %d: it must be a multiple of 16 up to %d", p.head_dim,
                    kMaxHeadDim);
    }
    if (p.to.kv == VCUDA_KV_F16) {
        qkv_rows_stored<VCUDA_KV_F16>(to, p);
    } else if (p.to.kv == VCUDA_KV_F32) {
        qkv_rows_stored<VCUDA_KV_F32>(to, p);
    } else {
        qkv_rows_stored<VCUDA_KV_INT8>(to, p);
    }
}

void kv_operand(Launcher &to, const KvStored &stored, int32_t kv_heads, int32_t head_dim,
                int32_t from, int32_t end, const KvOperand &operand, int32_t *overflow) {
    if (end <= from) return;
    const auto rows = static_cast<int32_t>(ceil_div(end - operand.first, kKvRows) * kKvRows -
                                           (from - operand.first));
    const int64_t rows_of_block = kThreads / (operand.width / kChunk) * kRowsOfThread;
    const dim3 grid(static_cast<unsigned>(ceil_div(rows, rows_of_block)),
                    static_cast<unsigned>(kv_heads), 2);
    const auto kernel = stored.kv == VCUDA_KV_F16   ? kv_operand_of<VCUDA_KV_F16>(operand.width)
                        : stored.kv == VCUDA_KV_F32 ? kv_operand_of<VCUDA_KV_F32>(operand.width)
                                                    : kv_operand_of<VCUDA_KV_INT8>(operand.width);
    launch(to, kernel, grid, dim3(kThreads), 0, stored, operand, kv_heads, head_dim, from, end,
           rows, overflow);
}

}  // namespace vcuda
