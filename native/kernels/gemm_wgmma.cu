// gemm, gemm_gate_up on Hopper: products of whole warp groups, weights from registers
//
// One block a multiprocessor takes one tile of the output after the other. A warp group of it
// produces: bulk copies bring what 64 features need (activations and codes as they lie) into a ring
// of stages in shared memory. Two warp groups consume: they turn codes into 16-bit fragments in
// registers, a slice of 32 features ahead of the tensor cores.
//
// A tile has 128 features and up to 256 tokens, or 256 and 128 of activations of two parts: either
// way a fragment is multiplied 256 times, so that making it is the smaller work. Where a map has
// few rows a tile, one of 256 features it is too, with one part: a stage then brings more weights.
// A tile's product is as wide as its tokens need.
#include "gemm_kernels.h"
#include "gemm_store.cuh"

namespace vcuda::tiled {

namespace {

constexpr int kAlign = 1024;         // of the activations in shared memory
constexpr int kShared = 227 * 1024;  // of a block of this architecture
constexpr int kMostStages = 6;

// Of a block.
struct Block {
    static constexpr int consumers = 8;  // warps: two warp groups
    static constexpr int producers = 4;  // one group
    static constexpr int threads = (consumers + producers) * kWarp;
};

// What a stage holds, at these places: a block of activations, and the weights that meet it.
// kTiles: row tiles of a consuming warp, 1 or 2; 2 whenever there are two parts.
template <int kKind, int kParts, int kTiles>
struct Stage {
    static constexpr bool few = kTiles > kParts;  // rows
    static constexpr int kind = kKind;
    static constexpr int parts = kParts;
    static constexpr int warp_tiles = kTiles;
    static constexpr int slots = Block::consumers * warp_tiles;
    static constexpr int tokens = few ? kFewTileRows : most_tile_rows(kParts);
    static constexpr int of_step = step_width(kKind) / kOperandBlock;
    static constexpr int block_bytes = tokens * kOperandRowBytes;
    static constexpr int vectors = step_vectors(kKind) / of_step;
    static constexpr int codes_bytes = step_codes_bytes(kKind) / of_step;  // of a row tile
    static constexpr int scales_bytes = kKind == VCUDA_BF16 ? 0 : kStepScalesBytes;  // of its step
    static constexpr int codes = kParts * block_bytes;  // activations first
    static constexpr int scales = codes + slots * codes_bytes;
    static constexpr int bytes = scales + slots * scales_bytes;
    static constexpr int fit = (kShared - 2 * kAlign) / bytes;
    static constexpr int count = fit < kMostStages ? fit : kMostStages;
    static constexpr int shared = count * bytes + kAlign;
    static_assert(bytes % kAlign == 0 && count >= 3, "stages stay aligned; one fills, one is used");
    static_assert(vectors * kWarp * kVectorBytes == codes_bytes, "whole vectors");
};

// Row tiles of a matrix that a tile of the output has. Of gate and up it has as many each.
template <int kTiles, bool kGateUp>
constexpr int kSpan = Block::consumers * kTiles / (kGateUp ? 2 : 1);

// Where a slot's row tile stands among those of its matrix. Gate and up: the upper half of the
// slots of each warp group, or of the block, are of up.
template <bool kGateUp>
struct Slots {
    static constexpr int half = 4;
    __device__ static __forceinline__ bool is_up(int slot) {
        return kGateUp && slot / half % 2 != 0;
    }
    __device__ static __forceinline__ int row_tile(int slot) {
        return kGateUp ? slot / (2 * half) * half + slot % half : slot;
    }
};

// The ring of stages, as the producer and each consumer walk through it.
template <int kStages>
struct Ring {
    unsigned char *stages;
    uint64_t *full;  // [kStages]: all bytes are there
    // [kStages]: no consumer needs it any more. Each thread says so for itself, as each has read
    // weights: a race checker sees no __syncwarp where the warp is whole.
    uint64_t *empty;
    int stage = 0;
    int parity = 0;

    __device__ __forceinline__ void advance() {
        stage += 1;
        if (stage < kStages) return;
        stage = 0;
        parity ^= 1;
    }
};

// ------------------------------------------------------------------------------------ producers

// One of the warps that produce: the codes and scales of some row tiles, and a block of
// activations, a lane each. (The instruction takes uniform registers, so a warp's copies start one
// after the other; a single warp would need half the time that a stage lasts.) Row tiles and rows
// that are not there keep what the stage held before: whatever it is, it only reaches sums that
// nobody stores. A warp without activations need not wait for them: weights are there before the
// kernel begins.
template <class S, bool kGateUp, class TheRing>
__device__ __forceinline__ void produce(const Problem &p, TheRing ring, int producer, int lane) {
    using Slot = Slots<kGateUp>;
    constexpr int each = S::slots / Block::producers;
    static_assert(S::parts <= Block::producers, "a block of activations a warp");
    const int slot = producer * each + lane % each;
    const bool is_codes = lane < each;
    const bool is_scales = S::scales_bytes > 0 && lane / each == 1;
    const bool is_rows = lane == 2 * each && producer < S::parts;
    const int stages = p.w.steps * S::of_step;
    const Tiles &w = Slot::is_up(slot) ? p.up : p.w;
    const uint16_t *rows = p.x.data + producer * p.x.part_stride();
    int to = producer * S::block_bytes;
    if (is_codes) to = S::codes + slot * S::codes_bytes;
    if (is_scales) to = S::scales + slot * S::scales_bytes;

    if (producer < S::parts || p.map.tiles != nullptr) {
        pdl_wait();
        pdl_trigger();
    }
    const Schedule<kSpan<S::warp_tiles, kGateUp>> schedule(p);
    for (int index = static_cast<int>(blockIdx.x); index < schedule.count();
         index += static_cast<int>(gridDim.x)) {
        const Work work = schedule.at(p, index);
        const int tile = work.first_tile + Slot::row_tile(slot);
        const int64_t first = (static_cast<int64_t>(work.matrix) * p.w.row_tiles + tile);
        const unsigned char *from = nullptr;
        int bytes = 0;
        int64_t stride = 0;  // bytes from stage to stage
        if (is_rows) {
            from = reinterpret_cast<const unsigned char *>(rows + static_cast<int64_t>(work.first) *
                                                                      kOperandBlock);
            bytes = (work.count + 7) / 8 * 8 * kOperandRowBytes;
            stride = p.x.block_stride() * 2;
        } else if (tile < p.w.row_tiles && is_codes) {
            bytes = S::codes_bytes;
            stride = bytes;
            from = static_cast<const unsigned char *>(w.codes) + first * stages * bytes;
        } else if (tile < p.w.row_tiles && is_scales) {
            bytes = S::scales_bytes;
            from = reinterpret_cast<const unsigned char *>(w.scales) + first * p.w.steps * bytes;
        }
        int expected = bytes;
#pragma unroll
        for (int o = 16; o > 0; o >>= 1) expected += __shfl_xor_sync(kAllLanes, expected, o);
        for (int stage = 0; stage < stages; ++stage) {
            uint64_t *full = ring.full + ring.stage;
            barrier_wait(ring.empty + ring.stage, ring.parity ^ 1);
            if (lane == 0) barrier_expect(full, static_cast<uint32_t>(expected));
            __syncwarp();
            if (bytes > 0) {
                copy_bulk(ring.stages + ring.stage * S::bytes + to, from,
                          static_cast<uint32_t>(bytes), full);
            }
            from += stride;
            if (is_scales && stage % S::of_step == S::of_step - 1) from += bytes;
            ring.advance();
        }
    }
}

// ------------------------------------------------------------------------------------ consumers

// Whether weights are turned into fragments. If not they must come into the fragments' registers,
// so not before these are free.
template <int kKind>
constexpr bool kConverted = kKind != VCUDA_BF16;

// What a lane takes at a time of the weights of each of its row tiles: of a stage, or of a slice of
// those that are not converted. The scales are of both slices.
template <class S>
struct Taken {
    static constexpr int vectors = S::vectors / (kConverted<S::kind> ? 1 : 2);
    uint4 codes[S::warp_tiles][vectors];
    uint2 scales[S::warp_tiles];
};

// PRE: the stage is full, and of block `block` along k; `slice`, of the stage, unless converted.
template <class S, bool kGateUp>
__device__ __forceinline__ void take(Taken<S> &to, const unsigned char *stage, int block, int slice,
                                     int warp, int lane) {
    constexpr int vectors = Taken<S>::vectors;
    const auto codes_of = [&](int slot, int vector) {
        const int at = (slice * vectors + vector) * kWarp + lane;
        return reinterpret_cast<const uint4 *>(stage + S::codes + slot * S::codes_bytes)[at];
    };
    const auto scales_of = [&](int slot) {
        return *reinterpret_cast<const uint2 *>(stage + S::scales + slot * S::scales_bytes +
                                                lane / 4 * 16 + block % 2 * 8);
    };
    if constexpr (kGateUp && S::warp_tiles == 1) {
        const int gate = warp / 2;
        const int up = gate + Slots<kGateUp>::half;
        const bool half = warp % 2 != 0;
        // row g of a fragment is row g + 8 half of gate, its row g + 8 the same row of up
#pragma unroll
        for (int i = 0; i < vectors; ++i) {
            const uint4 g = codes_of(gate, i);
            const uint4 u = codes_of(up, i);
            to.codes[0][i] =
                make_uint4(half ? g.y : g.x, half ? u.y : u.x, half ? g.w : g.z, half ? u.w : u.z);
        }
        if constexpr (S::scales_bytes > 0) {
            const uint32_t halves = half ? 0x7632u : 0x5410u;
            const uint2 of_gate = scales_of(gate);
            const uint2 of_up = scales_of(up);
            to.scales[0] = make_uint2(__byte_perm(of_gate.x, of_up.x, halves),
                                      __byte_perm(of_gate.y, of_up.y, halves));
        }
    } else {
#pragma unroll
        for (int m = 0; m < S::warp_tiles; ++m) {
            const int slot = warp / 4 * 4 * S::warp_tiles + warp % 4 + 4 * m;
#pragma unroll
            for (int i = 0; i < vectors; ++i) to.codes[m][i] = codes_of(slot, i);
            if constexpr (S::scales_bytes > 0) to.scales[m] = scales_of(slot);
        }
    }
}

// The fragments of a slice, 0 or 1, of a row tile.
template <int kKind, int kVectors>
__device__ __forceinline__ void make_slice(uint32_t (&a)[2][4], const uint4 (&codes)[kVectors],
                                           const uint2 &scales, int slice) {
    using Weights = SliceWeights<kKind>;
    uint4 of_slice[Weights::kVectors];
#pragma unroll
    for (int i = 0; i < Weights::kVectors; ++i) {
        of_slice[i] = codes[(kConverted<kKind> ? slice_vector<kKind>(slice) : 0) + i];
    }
    Weights::make(a, of_slice, slice == 0 ? scales.x : scales.y, slice);
}

template <int kKind, int kColumns>
__device__ __forceinline__ void multiply(float (&sums)[kColumns / 2], const uint32_t (&a)[4],
                                         const unsigned char *x) {
    if constexpr (kKind == VCUDA_BF16) {
        wgmma_bf16<kColumns>(sums, a, x);
    } else {
        wgmma_f16<kColumns>(sums, a, x);
    }
}

// One tile of at most kColumns tokens. A warp has rows 16 (warp % 4) .. of the products
// [64][kColumns] of its group. Fragments are in two buffers: one is made while the product that
// reads the other runs.
template <class S, bool kGateUp, int kColumns, class TheRing>
__device__ __forceinline__ void consume(const Problem &p, const Work &work, TheRing &ring, int warp,
                                        int lane, uint64_t *ahead, int ahead_after) {
    constexpr int kKind = S::kind;
    constexpr int tiles = S::warp_tiles;
    if (kConverted<kKind>) {
        settle(warp);  // or the compiler computes what they are used for once for all numbers of
        settle(lane);  // columns, and has too few registers
    }
    float sums[tiles][kColumns / 2];
#pragma unroll
    for (int m = 0; m < tiles; ++m) {
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) sums[m][i] = 0.0f;
    }
    uint32_t a[2][tiles][2][4];  // [slice][row tile][16 features]
    Taken<S> taken{};
    const auto take_of = [&](int stage, int block, int slice) {
        take<S, kGateUp>(taken, ring.stages + stage * S::bytes, block, slice, warp, lane);
    };
    uint64_t *last_empty = ring.empty;  // of the stage before this one
    if (kConverted<kKind>) {
        barrier_wait(ring.full + ring.stage, ring.parity);
        take_of(ring.stage, 0, 0);
    }
    const int blocks = p.w.steps * S::of_step;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
        const unsigned char *stage = ring.stages + ring.stage * S::bytes;
        TheRing next = ring;
        next.advance();
        if (!kConverted<kKind>) barrier_wait(ring.full + ring.stage, ring.parity);
#pragma unroll
        for (int slice = 0; slice < 2; ++slice) {
            if (!kConverted<kKind>) take_of(ring.stage, block, slice);
#pragma unroll
            for (int m = 0; m < tiles; ++m) {
                make_slice<kKind>(a[slice][m], taken.codes[m], taken.scales[m], slice);
                settle(a[slice][m][0]);
                settle(a[slice][m][1]);
            }
            wgmma_fence();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int part = 0; part < S::parts; ++part) {
                    const unsigned char *x =
                        stage + part * S::block_bytes + (2 * slice + half) * 32;
#pragma unroll
                    for (int m = 0; m < tiles; ++m) {
                        multiply<kKind, kColumns>(sums[m], a[slice][m][half], x);
                    }
                }
            }
            wgmma_commit();
            if (kConverted<kKind> && slice == 1) {
                // behind the last block: this stage again, which nobody looks at
                const bool more = block + 1 < blocks;
                const int at = more ? next.stage : ring.stage;
                barrier_wait(ring.full + at, more ? next.parity : ring.parity);
                take_of(at, block + 1, 0);
            }
            wgmma_wait<1>();
            // all but this slice are done: the last stage has been read
            if (slice == 0) barrier_arrive_if(last_empty, block > 0);
        }
        barrier_arrive_if(ahead, lane == 0 && block == ahead_after);
        last_empty = ring.empty + ring.stage;
        ring = next;
    }
    wgmma_wait<0>();
    barrier_arrive(last_empty);

    if constexpr (kGateUp && tiles == 1) {
        store_mixed<kColumns>(p, work, work.first_tile + warp / 2, warp % 2, sums[0], lane);
    } else if constexpr (kGateUp) {
        store_hidden<kColumns>(p, work, work.first_tile + warp, sums[0], sums[1], lane);
    } else {
#pragma unroll
        for (int m = 0; m < tiles; ++m) {
            const int slot = warp / 4 * 4 * tiles + warp % 4 + 4 * m;
            store_sums<kColumns>(p, work, work.first_tile + slot, sums[m], lane);
        }
    }
}

// The numbers of tokens that there is a product for. A tile takes the next one.
template <int... kColumns>
struct Columns {
    // run(number as a type) with the smallest that is enough.
    template <class Run>
    __device__ static __forceinline__ void with(int tokens, const Run &run) {
        const bool ran = ((tokens <= kColumns && (run(Constant<kColumns>{}), true)) || ...);
        static_cast<void>(ran);
    }
    static constexpr int all[sizeof...(kColumns)] = {kColumns...};
};

// As many as the compiler has registers for: with nine it keeps the products apart.
template <class S>
using ColumnsOf = std::conditional_t<
    S::few, Columns<32, kFewTileRows>,
    std::conditional_t<S::parts == 2, Columns<64, 128>,
                       std::conditional_t<S::kind == VCUDA_BF16, Columns<64, 128, 192, 256>,
                                          Columns<32, 64, 96, 128, 144, 160, 192, 256>>>>;

// y (tokens, n) (+)= x (tokens, k) W^T (k, n) + bias; or hidden = silu(x Wgate^T) * (x Wup^T)
// PRE: block = Block::threads, any grid; dynamic shared memory of Stage::shared.
// BYTES: a tile of 128 features and 256 tokens reads 128 k codes and 512 k bytes of activations,
// from the L2 mostly.   FLOPS: 2 * tokens * n * k * parts
template <int kKind, int kParts, int kTiles, bool kGateUp>
__global__ void __launch_bounds__(Block::threads, 1) wgmma_kernel(const Problem p) {
#if defined(VCUDA_SM90A) || defined(VCUDA_EMULATE)
    // 128 * 40 + 256 * 232 are what a multiprocessor has, less 1024
    constexpr int producer_registers = 40;
    constexpr int consumer_registers = 232;
    using S = Stage<kKind, kParts, kTiles>;
    VCUDA_DYNAMIC_SHARED(unsigned char, dynamic);
    __shared__ uint64_t full[S::count];
    __shared__ uint64_t empty[S::count];
    __shared__ uint64_t ahead;
    const int warp = warp_index();
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    // counted from `dynamic`, so that the compiler still knows that it is shared memory
    unsigned char *stages = dynamic + (-reinterpret_cast<uintptr_t>(dynamic) & (kAlign - 1));
    Ring<S::count> ring{stages, full, empty};
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::count; ++i) {
            barrier_init(full + i, Block::producers);
            barrier_init(empty + i, Block::consumers * kWarp);
        }
        barrier_init(&ahead, 4);
        barrier_init_done();
    }
    __syncthreads();

    if (warp >= Block::consumers) {
        registers_shrink<producer_registers>();
        produce<S, kGateUp>(p, ring, warp - Block::consumers, lane);
    } else {
        registers_grow<consumer_registers>();
        pdl_wait();
        const Schedule<kSpan<kTiles, kGateUp>> schedule(p);
        // The second group starts a little behind the first, so that one has the tensor cores for
        // itself while the other stores its sums. (A stage is held by both: the ring must be
        // longer.)
        constexpr int lead = S::count - 2;
        const bool first_group = warp < 4;
        int ahead_after = first_group ? min(lead, p.w.steps * S::of_step) - 1 : -1;
        const int blocks = static_cast<int>(gridDim.x);
        int index = static_cast<int>(blockIdx.x);
        Work next{};
        if (index < schedule.count()) {
            next = schedule.at(p, index);
            if (!first_group) barrier_wait(&ahead, 0);
        }
        while (index < schedule.count()) {
            const Work work = next;
            index += blocks;
            // read long before it is needed: a map lies in memory
            if (index < schedule.count()) next = schedule.at(p, index);
            ColumnsOf<S>::with(work.count, [&](auto columns) {
                consume<S, kGateUp, decltype(columns)::value>(p, work, ring, warp, lane, &ahead,
                                                              ahead_after);
            });
            ahead_after = -1;
        }
    }
#endif
}

// ------------------------------------------------------------------------------------ launchers

// What a tile takes of so many tokens (of one part), measured on an H200 for q8 and q4 weights of
// 2,048 and 4,096 columns (docs/performance.md); 256 take 1000. Of 32 it is extrapolated.
constexpr int relative_time(int tokens) {
    constexpr int measured[][2] = {{32, 420},  {64, 500},  {96, 560},  {128, 620},
                                   {144, 630}, {160, 685}, {192, 765}, {256, 1000}};
    for (const auto &one : measured) {
        if (tokens <= one[0]) return one[1];
    }
    return 1000;
}

// Tokens of a tile, without a map: those that the multiprocessors are done with soonest. A tile of
// two parts has twice the features and products: it takes as long as two of twice the tokens.
template <class S, bool kGateUp>
int best_width(const Problem &p, int sm_count) {
    int best = 0;
    int64_t least = 0;
    for (const int width : ColumnsOf<S>::all) {
        const int64_t tiles = most_tiles<kSpan<S::warp_tiles, kGateUp>>(p, width);
        const int64_t time = ceil_div(tiles, sm_count) * relative_time(S::parts * width);
        if (best == 0 || time <= least) {
            best = width;
            least = time;
        }
    }
    return best;
}

template <int kKind, int kParts, int kTiles, bool kGateUp>
void launch_kernel(Launcher &to, Problem p) {
    using S = Stage<kKind, kParts, kTiles>;
    if (p.width == 0) p.width = best_width<S, kGateUp>(p, to.sm_count);
    const int64_t tiles = most_tiles<kSpan<kTiles, kGateUp>>(p, p.width);
    const int64_t blocks = tiles < to.sm_count ? tiles : to.sm_count;
    launch(to, wgmma_kernel<kKind, kParts, kTiles, kGateUp>, dim3(static_cast<unsigned>(blocks)),
           dim3(Block::threads), S::shared, p);
}

template <int kParts, int kTiles, int... kKinds>
void allow_kernels() {
    (allow_shared(wgmma_kernel<kKinds, kParts, kTiles, false>,
                  Stage<kKinds, kParts, kTiles>::shared),
     ...);
    (allow_shared(wgmma_kernel<kKinds, kParts, kTiles, true>,
                  Stage<kKinds, kParts, kTiles>::shared),
     ...);
}

}  // namespace

template <bool kGateUp>
void launch_wgmma(Launcher &to, const Problem &p) {
    with_kind_and_parts(p, [&](auto kind, auto parts) {
        constexpr int of_kind = decltype(kind)::value;
        constexpr int of_parts = decltype(parts)::value;
        if (of_parts == 2 || (p.map.tiles != nullptr && p.map.width <= kFewTileRows)) {
            launch_kernel<of_kind, of_parts, 2, kGateUp>(to, p);
        } else {
            launch_kernel<of_kind, of_parts, of_parts, kGateUp>(to, p);
        }
    });
}
template void launch_wgmma<false>(Launcher &, const Problem &);
template void launch_wgmma<true>(Launcher &, const Problem &);

void prepare_wgmma() {
    allow_kernels<1, 1, VCUDA_Q8, VCUDA_Q4, VCUDA_BF16>();
    allow_kernels<1, 2, VCUDA_Q8, VCUDA_Q4, VCUDA_BF16>();
    allow_kernels<2, 2, VCUDA_Q8, VCUDA_Q4, VCUDA_BF16>();
}

// Only where the kernel has a body it has barriers in shared memory.
bool wgmma_has_code() {
    cudaFuncAttributes attributes{};
    CUDA_TRY(cudaFuncGetAttributes(&attributes, wgmma_kernel<VCUDA_Q8, 1, 1, false>));
    return attributes.sharedSizeBytes > 0;
}

}  // namespace vcuda::tiled
