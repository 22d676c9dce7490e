// flash on Hopper: products of whole warp groups
//
// One block a multiprocessor takes one piece of work after the other: 128 rows ((token, head of one
// KV head's group) pairs) over a stretch of positions. A warp of it produces: bulk copies bring
// tiles of 128 positions of K and V, as they lie, into a ring in shared memory. Two warp groups
// consume, 64 rows each, with queries, weights and sums in registers. While the tensor cores
// multiply the weights of a tile with V, the scores of the next one, made just before, become
// weights; and while one group stores results or waits, the other has the tensor cores.
#include "error.h"
#include "flash_kernels.h"
#include "flash_work.cuh"

namespace vcuda::flash_detail {

namespace {

constexpr int kAlign = 1024;  // of tiles in shared memory
constexpr int kKeys = 128;    // positions of a tile
constexpr int kRowsOfGroup = 64;

// Of a block.
struct Block {
    static constexpr int groups = 2;
    static constexpr int consumers = groups * 4;  // warps
    static constexpr int threads = (consumers + 4) * kWarp;
    static constexpr int rows = groups * kRowsOfGroup;
};

// The ring: each slot holds a tile of K or of V, of D features. Their order is that of their use:
// K 0, K 1, V 0, K 2, V 1, ..., the last V.
template <int D>
struct Slots {
    static constexpr int blocks = D / kKvBlock;
    static constexpr int block_bytes = kKeys * kRowBytes;
    static constexpr int bytes = blocks * block_bytes;
    static constexpr int count = 6;
    static constexpr int shared = count * bytes + kAlign;
};

// The ring, as the producer and each consumer walk through it.
template <int D>
struct Ring {
    unsigned char *slots;
    uint64_t *full;   // [count]: all bytes are there
    uint64_t *empty;  // [count]: no consumer needs it any more
    int slot = 0;
    int parity = 0;

    __device__ __forceinline__ unsigned char *here() const {
        return slots + slot * Slots<D>::bytes;
    }
    __device__ __forceinline__ void await() const { barrier_wait(full + slot, parity); }
    __device__ __forceinline__ void release(int lane) const {
        barrier_arrive_if(empty + slot, lane == 0);
    }
    __device__ __forceinline__ void advance() {
        const bool end = slot + 1 == Slots<D>::count;
        slot = end ? 0 : slot + 1;
        parity ^= end ? 1 : 0;
    }
};

// A piece of work: 128 rows from `first` on and the tiles of positions [begin, end).
struct Work {
    int kv_head, part, first, begin, end;
};

// Pieces by falling length, dealt to the blocks forth and back, so that each gets about as much as
// the others.
template <int kRows>  // of a piece
struct Deal {
    int count;

    __device__ __forceinline__ Deal(const Flash &p, const Plan &plan)
        : count(plan.row_tiles * p.kv_heads * plan.parts) {}

    // Of this block's `round`th piece; `count` or more: there is none.
    __device__ __forceinline__ int index(int round) const {
        const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
        return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
    }

    __device__ __forceinline__ Work at(const Flash &p, const Plan &plan, int index) const {
        Work w;
        const int of_head = index / p.kv_heads, tile = of_head / plan.parts;
        w.kv_head = index - of_head * p.kv_heads;
        w.part = of_head - tile * plan.parts;
        w.first = (plan.row_tiles - 1 - tile) * kRows;
        const int last = min(w.first + kRows, plan.rows) - 1;
        const Span all = span_of(p, plan.ratio, w.first, last, kKeys);
        const int tiles = all.end - all.begin;
        w.begin = all.begin + tiles * w.part / plan.parts;
        w.end = all.begin + tiles * (w.part + 1) / plan.parts;
        return w;
    }
};

// ---------------------------------------------------------------------------------- the producer

template <int D>
__device__ __forceinline__ void produce_tile(const Flash &p, const uint16_t *rows, Ring<D> &ring) {
    using S = Slots<D>;
    uint64_t *full = ring.full + ring.slot;
    barrier_wait(ring.empty + ring.slot, ring.parity ^ 1);
    barrier_expect(full, S::bytes);
#pragma unroll
    for (int block = 0; block < S::blocks; ++block) {
        copy_bulk(ring.here() + block * S::block_bytes,
                  rows + static_cast<int64_t>(block) * p.kv.capacity * kKvBlock, S::block_bytes,
                  full);
    }
    ring.advance();
}

// One thread.
template <int D>
__device__ __forceinline__ void produce(const Flash &p, const Plan &plan,
                                        const Deal<Block::rows> &deal, Ring<D> ring) {
    constexpr int tile = kKeys * kKvBlock;  // numbers of a block of 64 features
    for (int round = 0; deal.index(round) < deal.count; ++round) {
        const Work w = deal.at(p, plan, deal.index(round));
        const int64_t head = static_cast<int64_t>(w.kv_head) * p.kv.width * p.kv.capacity;
        const uint16_t *k = p.kv.k + head + static_cast<int64_t>(w.begin) * tile;
        const uint16_t *v = p.kv.v + head + static_cast<int64_t>(w.begin) * tile;
        for (int i = w.begin; i < w.end; ++i) {
            produce_tile<D>(p, k, ring);
            k += tile;
            if (i == w.begin) continue;
            produce_tile<D>(p, v, ring);
            v += tile;
        }
        if (w.begin < w.end) produce_tile<D>(p, v, ring);
    }
}

// ------------------------------------------------------------------------------------- consumers

// What a lane has of its warp's 16 rows, g and g + 8, in the fragments of a product.
template <int D>
struct State {
    uint32_t q[D / 16][4];
    uint32_t weights[kKeys / 16][4];
    float sum[D / 2];  // of weight * V
    float score[kKeys / 2];
    float base[2];   // a weight is 2^(score - base)
    float total[2];  // of the weights of this lane's columns

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < D / 2; ++i) sum[i] = 0.0f;
        base[0] = base[1] = kLowest;
        total[0] = total[1] = 0.0f;
    }
};

// Queries of the rows first_row + g and + 8; those that are not there are 0.
template <int D>
__device__ __forceinline__ void load_queries(State<D> &s, const Flash &p, const Plan &plan,
                                             int kv_head, int first_row, int lane) {
    const int t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = first_row + i * 8 + lane / 4, token = row / plan.ratio;
        const int head = kv_head * plan.ratio + row - token * plan.ratio;
        const auto *from = reinterpret_cast<const uint32_t *>(
                               p.q + (static_cast<int64_t>(token) * p.heads + head) * p.head_dim) +
                           t;
        const bool inside = row < plan.rows;
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
            const bool there = inside && step * 16 < p.head_dim;
            s.q[step][i] = there ? from[step * 8] : 0;
            s.q[step][2 + i] = there ? from[step * 8 + 4] : 0;
        }
    }
}

template <int D>
__device__ __forceinline__ void multiply_keys(State<D> &s, const unsigned char *k) {
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
        const unsigned char *rows = k + step / 4 * Slots<D>::block_bytes + step % 4 * 32;
        if (step == 0) {
            wgmma_f16_first<kKeys>(s.score, s.q[step], rows);
        } else {
            wgmma_f16<kKeys>(s.score, s.q[step], rows);
        }
    }
}

template <int D>
__device__ __forceinline__ void multiply_values(State<D> &s, const unsigned char *v) {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
        wgmma_f16_columns<D>(s.sum, s.weights[step], v + step * 16 * kRowBytes,
                             Slots<D>::block_bytes);
    }
}

template <int D>
__device__ __forceinline__ void mask(State<D> &s, const Flash &p, const Plan &plan, int first_row,
                                     int key, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int token = (first_row + i * 8 + lane / 4) / plan.ratio;
        mask_row<kKeys>(p, token, key, lane % 4,
                        [&](int j, int e) -> float & { return s.score[4 * j + 2 * i + e]; });
    }
}

// Scores become weights, and `base` follows the highest of them as follow() in flash_tile.cuh has
// it. No branch, and nothing of the sums, which products may be adding to: they have to be
// multiplied by `by` later when the result is true.
template <int D>
__device__ __forceinline__ bool weigh(State<D> &s, float (&by)[2]) {
    float highest[2];
    bool rose = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float most = fmaxf(s.score[2 * i], s.score[2 * i + 1]);
#pragma unroll
        for (int j = 1; j < kKeys / 8; ++j) {
            most = fmaxf(most, fmaxf(s.score[4 * j + 2 * i], s.score[4 * j + 2 * i + 1]));
        }
        most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
        most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
        highest[i] = most;
        rose = rose || most - s.base[i] > kHeadroom + kTolerance;
    }
    rose = __any_sync(kAllLanes, rose) != 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float base = rose ? fmaxf(s.base[i], highest[i] - kHeadroom) : s.base[i];
        by[i] = exp2_fast(s.base[i] - base);
        s.base[i] = base;
        float total = 0.0f;
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float &score = s.score[4 * j + 2 * i + e];
                score = exp2_fast(score - base);
                total += score;
            }
        }
        s.total[i] = s.total[i] * by[i] + total;
    }
    return rose;
}

// The weights as an operand: that the tensor cores do not read any more.
template <int D>
__device__ __forceinline__ void pack(State<D> &s) {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            s.weights[step][x] =
                half2_bits(s.score[8 * step + 2 * x], s.score[8 * step + 2 * x + 1]);
        }
        settle(s.weights[step]);
    }
}

// A tile of K, which the caller has waited for, and V of the tile before it. The next in the ring
// is there at the end.
template <int D, bool MASKED>
__device__ __forceinline__ void next_tile(State<D> &s, const Flash &p, const Plan &plan,
                                          Ring<D> &ring, int first_row, int key, int lane) {
    const Ring<D> of_key = ring;
    ring.advance();
    ring.await();
    const Ring<D> of_value = ring;
    ring.advance();

    wgmma_fence();
    multiply_keys(s, of_key.here());
    wgmma_commit();
    wgmma_fence();
    multiply_values(s, of_value.here());
    wgmma_commit();
    wgmma_wait<1>();
    settle(s.score);
    of_key.release(lane);
    if (MASKED) mask(s, p, plan, first_row, key, lane);
    float by[2];
    const bool rose = weigh(s, by);
    settle(s.score);
    // It is there since long. But what is above this wait the compiler leaves above the other one
    // too, where the tensor cores are still at work.
    ring.await();
    wgmma_wait<0>();
    settle(s.sum);
    of_value.release(lane);
    if (rose) {
#pragma unroll
        for (int i = 0; i < D / 2; ++i) s.sum[i] *= by[i / 2 % 2];
    }
    pack(s);
}

// All pieces of this block, by one warp of a group.
template <int D>
__device__ __forceinline__ void consume(const Flash &p, const Plan &plan,
                                        const Deal<Block::rows> &deal, Ring<D> ring, int warp,
                                        int lane) {
    const int own = p.position - p.kv.first;  // row of K/V of the first token
    const int of_group = warp / 4 * kRowsOfGroup, of_warp = of_group + warp % 4 * 16;
    State<D> s;
    int round = 0;
    if (deal.index(0) >= deal.count) return;
    Work next = deal.at(p, plan, deal.index(0));
    load_queries(s, p, plan, next.kv_head, next.first + of_warp, lane);
    for (bool more = true; more;) {
        const Work w = next;
        const int group_first = w.first + of_group, first_row = w.first + of_warp;
        const int group_last = max(min(group_first + kRowsOfGroup, plan.rows) - 1, group_first);
        const Sight sight{own + group_first / plan.ratio, own + group_last / plan.ratio};
        s.clear();
#pragma unroll
        for (int step = 0; step < D / 16; ++step) settle(s.q[step]);

        if (w.begin < w.end) {
            const int key = w.begin * kKeys;
            ring.await();
            wgmma_fence();
            multiply_keys(s, ring.here());
            wgmma_commit();
            wgmma_wait<0>();
            settle(s.score);
            ring.release(lane);
            ring.advance();
            if (!sight.all(p, key, key + kKeys - 1)) mask(s, p, plan, first_row, key, lane);
            float by[2];
            weigh(s, by);  // there are no sums yet
            pack(s);
            ring.await();
        }
        for (int tile = w.begin + 1; tile < w.end; ++tile) {
            const int key = tile * kKeys;
            if (sight.all(p, key, key + kKeys - 1)) {
                next_tile<D, false>(s, p, plan, ring, first_row, key, lane);
            } else {
                next_tile<D, true>(s, p, plan, ring, first_row, key, lane);
            }
        }
        round += 1;
        more = deal.index(round) < deal.count;
        if (more) {  // these queries are not needed any more
            next = deal.at(p, plan, deal.index(round));
            load_queries(s, p, plan, next.kv_head, next.first + of_warp, lane);
        }
        if (w.begin < w.end) {
            wgmma_fence();
            multiply_values(s, ring.here());
            wgmma_commit();
            wgmma_wait<0>();
            settle(s.sum);
            ring.release(lane);
            ring.advance();
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            store_result<D>(p, plan, w.kv_head, w.part, first_row + i * 8 + lane / 4, lane % 4,
                            s.base[i], s.total[i],
                            [&](int j, int e) { return s.sum[4 * j + 2 * i + e]; });
        }
    }
}

// See Flash.
// PRE: block = Block::threads, any grid; dynamic shared memory of Slots<D>::shared; one part;
//      kv.width = D >= head_dim; kv.first and kv.capacity multiples of 128, kv.first at most the
//      oldest position seen.
// FLOPS: 4 head_dim a query head and position seen, those of whole tiles.
// BYTES: 512 D a tile of positions and 128 rows, out of the L2 as blocks go through them side by
//        side.
template <int D>
__global__ void __launch_bounds__(Block::threads, 1)
    flash_wgmma_kernel(const Flash p, const Plan plan) {
#if defined(VCUDA_SM90A) || defined(VCUDA_EMULATE)
    // 128 * 24 + 256 * 240 are what a multiprocessor has, less 1024
    constexpr int producer_registers = 24;
    constexpr int consumer_registers = 240;
    using S = Slots<D>;
    VCUDA_DYNAMIC_SHARED(unsigned char, dynamic);
    __shared__ uint64_t full[S::count];
    __shared__ uint64_t empty[S::count];
    const int warp = warp_index();
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    // counted from `dynamic`, so that the compiler still knows that it is shared memory
    unsigned char *slots = dynamic + (-reinterpret_cast<uintptr_t>(dynamic) & (kAlign - 1));
    const Ring<D> ring{slots, full, empty};
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::count; ++i) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, Block::consumers);
        }
        barrier_init_done();
    }
    __syncthreads();
    pdl_wait();
    pdl_trigger();
    const Deal<Block::rows> deal(p, plan);

    if (warp >= Block::consumers) {
        registers_shrink<producer_registers>();
        if (warp == Block::consumers && lane == 0) produce<D>(p, plan, deal, ring);
    } else {
        registers_grow<consumer_registers>();
        consume<D>(p, plan, deal, ring, warp, lane);
    }
#endif
}

// ------------------------------------------------------------------------------------ launchers

template <int D>
void launch_kernel(Launcher &to, const Flash &p) {
    static_assert(Block::rows <= kMostRows && kKvRows % kKeys == 0,
                  "flash_scratch() has room; whole tiles");
    Plan plan;
    plan.ratio = p.heads / p.kv_heads;
    plan.rows = p.tokens * plan.ratio;
    plan.row_tiles = static_cast<int32_t>(ceil_div(plan.rows, Block::rows));
    plan.parts = parts_of(p, plan, Block::rows, kKeys, to.sm_count);
    allow_shared(flash_wgmma_kernel<D>, Slots<D>::shared);
    const int64_t pieces = int64_t{1} * plan.row_tiles * p.kv_heads * plan.parts;
    const int64_t blocks = pieces < to.sm_count ? pieces : to.sm_count;
    launch(to, flash_wgmma_kernel<D>, dim3(static_cast<unsigned>(blocks)), dim3(Block::threads),
           Slots<D>::shared, p, plan);
    if (plan.parts > 1) launch_join(to, p, plan);
}

}  // namespace

void launch_wgmma(Launcher &to, const Flash &p) {
    if (p.kv.width == 64) {
        launch_kernel<64>(to, p);
    } else {
        launch_kernel<128>(to, p);
    }
}

// Only where the kernel has a body it has barriers in shared memory.
bool wgmma_has_code() {
    cudaFuncAttributes attributes{};
    CUDA_TRY(cudaFuncGetAttributes(&attributes, flash_wgmma_kernel<128>));
    return attributes.sharedSizeBytes > 0;
}

}  // namespace vcuda::flash_detail
