// flash: causal attention of a chunk of tokens, scores never in memory. Which kernels, and those on
// mma.sync; flash_wgmma.cu has those for Hopper.
//
// The rows of a block are (token, head of one KV head's group) pairs, token * ratio + head, so that
// a tile of K and V is read once for all heads that share it, whatever their number. A warp has 16
// or 32 rows and keeps their sums in registers; tiles of K and V come through shared memory, one
// under way while the other is worked on. Blocks with the most positions start first. When there
// are too few blocks for the device, each row tile's positions are cut into parts, whose sums a
// second kernel joins in their order.
#include "flash.h"

#include <atomic>

#include "attention_rows.cuh"
#include "error.h"
#include "flash_kernels.h"
#include "flash_work.cuh"
#include "wgmma_answer.h"

namespace vcuda {

using namespace flash_detail;

namespace {

constexpr int kJoinThreads = 256;

// ---------------------------------------------------------------------------------------- device

// The queries of a block into shared memory; rows and features that are not there are 0.
template <class S>
__device__ __forceinline__ void load_queries(const Flash &p, const Plan &plan, int kv_head,
                                             int first, unsigned char *to) {
    constexpr int kChunks = S::rows * 8;  // of a block of 64 features
    const int64_t part_stride = static_cast<int64_t>(p.tokens) * p.heads * p.head_dim;
    for (int i = static_cast<int>(threadIdx.x); i < kChunks; i += S::threads) {
        const int r = i / 8, c = i % 8;
        const int row = first + r, token = row / plan.ratio;
        const uint16_t *from = p.q + (static_cast<int64_t>(token) * p.heads + kv_head * plan.ratio +
                                      (row - token * plan.ratio)) *
                                         p.head_dim;
        unsigned char *place = to + r * kRowBytes + (c ^ (r % 8)) * 16;
#pragma unroll
        for (int part = 0; part < S::q_parts; ++part) {
#pragma unroll
            for (int block = 0; block < S::blocks; ++block) {
                const int feature = block * kKvBlock + c * 8;
                const bool inside = row < plan.rows && feature < p.head_dim;
                copy_async_16(place + part * S::q_bytes + block * (S::rows * kRowBytes),
                              inside ? from + part * part_stride + feature : p.q, inside);
            }
        }
    }
}

// A tile of K and V into a stage: `at` is this thread's first chunk of 16 bytes in K, and in V.
template <class S>
__device__ __forceinline__ void load_tile(const Flash &p, unsigned at, unsigned char *stage) {
    constexpr int kCopies = S::keys * 8 / S::threads;  // a block of 64 features and thread
    const auto block_chunks = static_cast<unsigned>(p.kv.capacity) * 8u;
    const auto part_chunks =
        static_cast<unsigned>(p.kv_heads * (p.kv.width / kKvBlock)) * block_chunks;
    const auto *k = reinterpret_cast<const uint4 *>(p.kv.k);
    const auto *v = reinterpret_cast<const uint4 *>(p.kv.v);
#pragma unroll
    for (int part = 0; part < S::kv_parts; ++part) {
#pragma unroll
        for (int block = 0; block < S::blocks; ++block) {
            const unsigned from = at + part * part_chunks + block * block_chunks;
            unsigned char *to = stage + part * S::tile_bytes + block * (S::keys * kRowBytes);
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
                copy_async_16(to + i * S::threads * 16, k + from + i * S::threads, true);
                copy_async_16(to + S::kv_parts * S::tile_bytes + i * S::threads * 16,
                              v + from + i * S::threads, true);
            }
        }
    }
}

template <class S>
__device__ __forceinline__ void mask(Scores<S> &score, const Flash &p, int ratio, int first_row,
                                     int key, int lane) {
#pragma unroll
    for (int m = 0; m < S::slices; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = first_row + m * 16 + i * 8 + lane / 4;
            mask_row<S::keys>(p, row / ratio, key, lane % 4,
                              [&](int j, int e) -> float & { return score[m][j][2 * i + e]; });
        }
    }
}

template <class S>
__device__ __forceinline__ void store_rows(const Flash &p, const Plan &plan, const Rows<S> &rows,
                                           int kv_head, int first_row, int lane) {
#pragma unroll
    for (int m = 0; m < S::slices; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            store_result<S::dim>(p, plan, kv_head, static_cast<int>(blockIdx.y),
                                 first_row + m * 16 + i * 8 + lane / 4, lane % 4, rows.base[m][i],
                                 rows.total[m][i],
                                 [&](int j, int e) { return rows.sum[m][j][2 * i + e]; });
        }
    }
}

// --------------------------------------------------------------------------------------- kernels

// See Flash. The block (x, y) has row tile row_tiles - 1 - x / kv_heads of KV head x % kv_heads and
// part y of its positions.
// PRE: grid (kv_heads * row_tiles, parts), S::threads threads, S::shared bytes; kv.width is a whole
//      number of blocks >= S::dim, S::dim >= head_dim; kv.first at most the oldest position seen.
// FLOPS: 4 head_dim a query head and position seen, times parts (1; 3 when K/V has 2 parts; 2).
// BYTES: K and V once a row tile, out of the L2 as row tiles go through them side by side.
template <class S>
__global__ void __launch_bounds__(S::threads, S::resident)
    flash_kernel(const Flash p, const Plan plan) {
    VCUDA_DYNAMIC_SHARED(unsigned char, shared);
    constexpr int kStages = S::q_parts * S::q_bytes;  // where they begin
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = warp_index();
    const int kv_head = static_cast<int>(blockIdx.x) % p.kv_heads;
    const int first = (plan.row_tiles - 1 - static_cast<int>(blockIdx.x) / p.kv_heads) * S::rows;
    const int last = min(first + S::rows, plan.rows) - 1;

    const Span all = span_of(p, plan.ratio, first, last, S::keys);
    const int tiles = all.end - all.begin, part = static_cast<int>(blockIdx.y);
    const int begin_tile = all.begin + tiles * part / plan.parts;
    const int end_tile = all.begin + tiles * (part + 1) / plan.parts;

    const int my_first = first + warp * (S::slices * 16);
    const int my_last = min(my_first + S::slices * 16 - 1, last);
    const int own = p.position - p.kv.first;  // row of K/V of the first token
    const Sight sight{own + my_first / plan.ratio,
                      my_first <= last ? own + my_last / plan.ratio : -1};
    Rows<S> rows;

    pdl_wait();
    pdl_trigger();
    load_queries<S>(p, plan, kv_head, first, shared);
    const int tid = static_cast<int>(threadIdx.x);
    unsigned next = static_cast<unsigned>(kv_head * (p.kv.width / kKvBlock) * p.kv.capacity +
                                          begin_tile * S::keys) *
                        8u +
                    static_cast<unsigned>(tid);
    int stage = 0;  // 0 or S::stage_bytes
    if (begin_tile < end_tile) {
        load_tile<S>(p, next, shared + kStages + tid * 16);
    }
    copy_async_commit();
    for (int tile = begin_tile; tile < end_tile; ++tile, stage ^= S::stage_bytes) {
        copy_async_wait<0>();
        __syncthreads();  // the tile is there, and nobody needs the one before
        next += S::keys * 8;
        if (tile + 1 < end_tile) {
            load_tile<S>(p, next, shared + kStages + (stage ^ S::stage_bytes) + tid * 16);
        }
        copy_async_commit();
        const int key = tile * S::keys, last_key = key + S::keys - 1;
        if (!sight.any(p, key, last_key)) continue;

        Scores<S> score;
        multiply_keys<S>(score, shared, place_by_rows(lane) + warp * (S::slices * 16 * kRowBytes),
                         place_by_chunks(lane) + kStages + stage);
        if (!sight.all(p, key, last_key)) {
            mask<S>(score, p, plan.ratio, my_first, key, lane);
        }
        follow<S>(rows, score);
        multiply_values<S>(rows, score, shared,
                           place_by_rows(lane) + kStages + stage + S::kv_parts * S::tile_bytes);
    }
    copy_async_wait<0>();
    if (my_first <= last) store_rows<S>(p, plan, rows, kv_head, my_first, lane);
}

// out = sum of parts of 2^(base - highest) * sums, over that of the totals.
// PRE: 256 threads; one thread 8 features of a row (token * heads + head), the same heads * tokens
//      rows as the parts have.
// BYTES: 4 (head_dim + 2) a part and row read.
__global__ void __launch_bounds__(kJoinThreads) flash_join_kernel(const Flash p, const Plan plan) {
    const int chunks = p.head_dim / 8;
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kJoinThreads + threadIdx.x;
    const int c = static_cast<int>(i % chunks);
    const int64_t out_row = i / chunks;
    const bool inside = out_row < static_cast<int64_t>(p.tokens) * p.heads;
    const int token = static_cast<int>(out_row / p.heads);
    const int head = static_cast<int>(out_row % p.heads);
    const int kv_head = head / plan.ratio;
    const int64_t row = static_cast<int64_t>(token) * plan.ratio + head % plan.ratio;
    const int64_t stride = static_cast<int64_t>(p.kv_heads) * plan.rows;  // to the next part
    const int64_t place = static_cast<int64_t>(kv_head) * plan.rows + row;
    const Meeting meeting = meeting_of(p, plan);
    pdl_wait();
    pdl_trigger();

    float v[8] = {};
    if (inside) {
        float highest = kLowest, total = 0.0f;
        for (int part = 0; part < plan.parts; ++part) {
            highest = fmaxf(highest, meeting.stats[part * stride + place].x);
        }
        for (int part = 0; part < plan.parts; ++part) {
            const float2 stats = meeting.stats[part * stride + place];
            if (stats.y == 0.0f) continue;  // saw nothing
            const float by = exp2_fast(stats.x - highest);
            const auto *sums = reinterpret_cast<const float4 *>(
                meeting.sums + (part * stride + place) * p.head_dim + c * 8);
            const float4 low = sums[0], high = sums[1];
            const float sum[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            total += by * stats.y;
#pragma unroll
            for (int x = 0; x < 8; ++x) v[x] += by * sum[x];
        }
#pragma unroll
        for (int x = 0; x < 8; ++x) v[x] *= 1.0f / total;
    }
    store_features(p.out, token, head * p.head_dim + c * 8, v, inside, p.overflow);
    if (inside && head == p.heads - 1) {
        store_zeros(p.out, token, p.heads * p.head_dim, c, chunks);
    }
}

// ------------------------------------------------------------------------------------- launchers

template <class S>
void launch_shape(Launcher &to, const Flash &p) {
    static_assert(S::resident * S::rows <= kMostRows, "flash_scratch() has room");
    Plan plan;
    plan.ratio = p.heads / p.kv_heads;
    plan.rows = p.tokens * plan.ratio;
    plan.row_tiles = static_cast<int32_t>(ceil_div(plan.rows, S::rows));
    plan.parts =
        parts_of(p, plan, S::rows, S::keys, static_cast<int64_t>(to.sm_count) * S::resident);
    allow_shared(flash_kernel<S>, S::shared);
    const dim3 grid(static_cast<unsigned>(plan.row_tiles * p.kv_heads),
                    static_cast<unsigned>(plan.parts));
    launch(to, flash_kernel<S>, grid, dim3(S::threads), S::shared, p, plan);
    if (plan.parts > 1) launch_join(to, p, plan);
}

// Features, slices of 16 rows a warp, warps, positions of a tile, parts of Q and of K/V.
using Fast64 = Shape<64, 2, 4, 64, 1, 1>;
using Fast96 = Shape<96, 2, 4, 64, 1, 1>;
using Fast128 = Shape<128, 2, 4, 64, 1, 1>;
using Fast256 = Shape<256, 1, 4, 32, 1, 1>;
template <int KV_PARTS>
using Exact64 = Shape<64, 1, 4, 64, 2, KV_PARTS>;
template <int KV_PARTS>
using Exact128 = Shape<128, 1, 4, 32, 2, KV_PARTS>;
template <int KV_PARTS>
using Exact256 = Shape<256, 1, 2, 16, 2, KV_PARTS>;

template <int KV_PARTS>
void flash_exact(Launcher &to, const Flash &p) {
    if (p.kv.width == 64) {
        launch_shape<Exact64<KV_PARTS>>(to, p);
    } else if (p.kv.width == 128) {
        launch_shape<Exact128<KV_PARTS>>(to, p);
    } else {
        launch_shape<Exact256<KV_PARTS>>(to, p);
    }
}

std::atomic<FlashKernels> chosen{FlashKernels::automatic};

bool takes_wgmma() {
    const FlashKernels which = chosen;
    return which == FlashKernels::automatic ? flash_can_use_wgmma() : which == FlashKernels::wgmma;
}

}  // namespace

void flash_detail::launch_join(Launcher &to, const Flash &p, const Plan &plan) {
    const int64_t threads = static_cast<int64_t>(p.tokens) * p.heads * (p.head_dim / 8);
    launch(to, flash_join_kernel, dim3(static_cast<unsigned>(ceil_div(threads, kJoinThreads))),
           dim3(kJoinThreads), 0, p, plan);
}

void flash(Launcher &to, const Flash &p) {
    if (p.head_dim < 16 || p.head_dim > attention::kMaxHeadDim || p.head_dim % 16 != 0 ||
        p.kv.width != kv_width(p.head_dim)) {
        throw Error("attention with head_dim %d: it must be a multiple of 16 up to %d", p.head_dim,
                    attention::kMaxHeadDim);
    }
    if (p.parts == 2 && p.kv.parts == 2) {
        flash_exact<2>(to, p);
    } else if (p.parts == 2) {
        flash_exact<1>(to, p);
    } else if (p.kv.parts != 1) {
        throw Error("attention of queries in one part over K/V in %d", p.kv.parts);
    } else if (p.kv.width <= 128 && takes_wgmma()) {
        launch_wgmma(to, p);
    } else if (p.kv.width == 64) {
        launch_shape<Fast64>(to, p);
    } else if (p.head_dim <= 96) {
        launch_shape<Fast96>(to, p);
    } else if (p.kv.width == 128) {
        launch_shape<Fast128>(to, p);
    } else {
        launch_shape<Fast256>(to, p);
    }
}

bool flash_can_use_wgmma() {
    static WgmmaAnswer answer;
    return answer(wgmma_has_code);
}

void choose_flash_kernels(FlashKernels which) {
    chosen = which;
}

uint64_t flash_scratch(int32_t head_dim, int32_t sm_count) {
    return static_cast<uint64_t>(2 * kMostRows) * static_cast<uint64_t>(sm_count) *
           static_cast<uint64_t>(head_dim + 2);
}

}  // namespace vcuda
