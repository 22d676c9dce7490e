// gemm, gemm_gate_up with mma.sync: every architecture from sm_80 on
//
// A block of 8 warps takes 16 row tiles and 64 tokens. The activations of a step along k come
// through shared memory, two steps in flight; the weights of a row tile are of one warp only, which
// loads them into registers as they lie, a step ahead.
#include "gemm_kernels.h"
#include "gemm_store.cuh"

namespace vcuda::tiled {

namespace {

constexpr int kProductWarps = 8;
constexpr int kBlockThreads = kProductWarps * kWarp;
constexpr int kTokens = 64;  // that a block multiplies at once

// Row tiles of a matrix that a block has: two a warp, of one matrix or of gate and up.
template <bool kGateUp>
constexpr int kSpan = kGateUp ? kProductWarps : 2 * kProductWarps;

// Activations of a step: blocks of [kTokens] rows of 128 bytes, part after part.
template <int kKind, int kParts>
struct Activations {
    static constexpr int blocks = step_width(kKind) / kOperandBlock;
    static constexpr int block_bytes = kTokens * kOperandRowBytes;
    static constexpr int bytes = kParts * blocks * block_bytes;
    static constexpr int shared = 2 * bytes;
};

// What a lane holds of a step of a row tile: the same words as shared memory would.
template <int kKind>
struct Held {
    uint4 codes[step_vectors(kKind)];
    uint32_t scales;  // of the group lane % 4
};

template <int kKind>
__device__ __forceinline__ void load_held(Held<kKind> &to, const Tiles &w, int64_t tile, int step,
                                          int lane) {
    constexpr int vectors = step_vectors(kKind);
    const int64_t at = tile * w.steps + step;
    const auto *codes = static_cast<const uint4 *>(w.codes) + at * (vectors * kWarp) + lane;
#pragma unroll
    for (int i = 0; i < vectors; ++i) to.codes[i] = load_weights(codes + i * kWarp);
    to.scales = 0;
    if constexpr (kKind != VCUDA_BF16) {
        to.scales = load_weights(static_cast<const uint32_t *>(w.scales) + at * kWarp + lane);
    }
}

// The activations of a step on their way into shared memory, 16 bytes a copy, where they stand.
template <int kKind, int kParts>
__device__ __forceinline__ void copy_step(unsigned char *to, const Operand &x, const Work &work,
                                          int step) {
    using A = Activations<kKind, kParts>;
    constexpr int chunks = kOperandRowBytes / 16;  // of a row
    constexpr int rows = kBlockThreads / chunks;   // that the block copies at once
    const int thread = static_cast<int>(threadIdx.x);
    const uint16_t *from = x.data + static_cast<int64_t>(step) * A::blocks * x.block_stride() +
                           static_cast<int64_t>(work.first) * kOperandBlock + thread % chunks * 8;
    to += thread * 16;
#pragma unroll 1
    for (int block = 0; block < kParts * A::blocks; ++block) {
        const uint16_t *of_block =
            from + block / A::blocks * x.part_stride() + block % A::blocks * x.block_stride();
#pragma unroll
        for (int row = thread / chunks; row < kTokens; row += rows) {
            const bool inside = row < work.count;
            copy_async_16(to, of_block + (inside ? row : 0) * kOperandBlock, inside);
            to += kBlockThreads * 16;
        }
    }
}

// sums [16][64 tokens] of each of the warp's two row tiles += their step times the activations.
template <int kKind, int kParts>
__device__ __forceinline__ void multiply_held(float (&sums)[2][kTokens / 2],
                                              const Held<kKind> (&w)[2], const unsigned char *x,
                                              int lane) {
    using A = Activations<kKind, kParts>;
    using Weights = SliceWeights<kKind>;
    // ldmatrix: matrices 0, 1 are both halves of 16 features of rows 0 .. 7, 2 and 3 of rows 8 ..
    // 15
    const int row = lane % 8 + lane / 16 * 8;
    const int half = lane / 8 % 2;
#pragma unroll
    for (int slice = 0; slice < step_width(kKind) / kSliceWidth; ++slice) {
        uint32_t a[2][2][4];  // [row tile][16 features]
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            uint4 codes[Weights::kVectors];
#pragma unroll
            for (int i = 0; i < Weights::kVectors; ++i) {
                codes[i] = w[m].codes[slice_vector<kKind>(slice) + i];
            }
            const uint32_t scales = __shfl_sync(kAllLanes, w[m].scales, lane / 4 * 4 + slice % 4);
            Weights::make(a[m], codes, scales, slice);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = 2 * slice + i;  // of 16 features
            const int chunk = (at % 4 * 2 + half) ^ (row % 8);
#pragma unroll 1
            for (int part = 0; part < kParts; ++part) {
                const unsigned char *block = x + (part * A::blocks + at / 4) * A::block_bytes +
                                             row * kOperandRowBytes + chunk * 16;
#pragma unroll
                for (int j = 0; j < kTokens / 8; j += 2) {
                    uint32_t b[4];
                    load_matrix_x4(b, block + j * 8 * kOperandRowBytes);
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
#pragma unroll
                        for (int n = 0; n < 2; ++n) {
                            auto &c = reinterpret_cast<float (&)[4]>(sums[m][4 * (j + n)]);
                            if constexpr (kKind == VCUDA_BF16) {
                                mma_bf16(c, a[m][i], b[2 * n], b[2 * n + 1]);
                            } else {
                                mma_f16(c, a[m][i], b[2 * n], b[2 * n + 1]);
                            }
                        }
                    }
                }
            }
        }
    }
}

// At most kTokens tokens of a tile of the output.
template <int kKind, int kParts, bool kGateUp>
__device__ __forceinline__ void product_tile(const Problem &p, const Work &work,
                                             unsigned char *shared, int warp, int lane) {
    using A = Activations<kKind, kParts>;
    const int steps = p.w.steps;
    // The warp's row tiles: of gate and of up, or two of the one matrix. One that is not there is
    // the last one again, and nobody stores it.
    int tile[2];
    int64_t at[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        tile[m] = work.first_tile + warp + (kGateUp ? 0 : m * kProductWarps);
        at[m] = static_cast<int64_t>(work.matrix) * p.w.row_tiles + min(tile[m], p.w.row_tiles - 1);
    }
    float sums[2][kTokens / 2] = {};
    Held<kKind> now[2], next[2];
    const auto load = [&](Held<kKind>(&to)[2], int step) {
        load_held(to[0], p.w, at[0], step, lane);
        load_held(to[1], kGateUp ? p.up : p.w, at[1], step, lane);
    };
    copy_step<kKind, kParts>(shared, p.x, work, 0);
    copy_async_commit();
    load(now, 0);
    for (int step = 0; step < steps; ++step) {
        const bool more = step + 1 < steps;
        if (more) {
            copy_step<kKind, kParts>(shared + (step + 1) % 2 * A::bytes, p.x, work, step + 1);
            load(next, step + 1);
        }
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        multiply_held<kKind, kParts>(sums, now, shared + step % 2 * A::bytes, lane);
        __syncthreads();
        if (more) {
            now[0] = next[0];
            now[1] = next[1];
        }
    }
    if constexpr (kGateUp) {
        store_hidden<kTokens>(p, work, tile[0], sums[0], sums[1], lane);
    } else {
        store_sums<kTokens>(p, work, tile[0], sums[0], lane);
        store_sums<kTokens>(p, work, tile[1], sums[1], lane);
    }
}

// y (tokens, n) (+)= x (tokens, k) W^T (k, n) + bias; or hidden = silu(x Wgate^T) * (x Wup^T)
// PRE: block = kBlockThreads, any grid; dynamic shared memory of Activations::shared.
// BYTES: a tile of 256 features and 64 tokens reads 256 k codes and 128 k parts of activations,
// from the L2 mostly.   FLOPS: 2 * tokens * n * k * parts
template <int kKind, int kParts, bool kGateUp>
__global__ void __launch_bounds__(kBlockThreads, 1) mma_kernel(const Problem p) {
    VCUDA_DYNAMIC_SHARED(unsigned char, shared);
    const int warp = warp_index();
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    pdl_wait();
    pdl_trigger();
    const Schedule<kSpan<kGateUp>> schedule(p);
    for (int index = static_cast<int>(blockIdx.x); index < schedule.count();
         index += static_cast<int>(gridDim.x)) {
        Work work = schedule.at(p, index);
        for (int rows = work.count; rows > 0; rows -= kTokens) {
            work.count = min(rows, kTokens);
            product_tile<kKind, kParts, kGateUp>(p, work, shared, warp, lane);
            work.first += kTokens;
        }
    }
}

// ------------------------------------------------------------------------------------ launchers

template <int kKind, int kParts, bool kGateUp>
void launch_kernel(Launcher &to, Problem p) {
    p.width = kTokens;
    const int64_t tiles = most_tiles<kSpan<kGateUp>>(p, p.width);
    const int64_t most = 2 * static_cast<int64_t>(to.sm_count);
    launch(to, mma_kernel<kKind, kParts, kGateUp>,
           dim3(static_cast<unsigned>(tiles < most ? tiles : most)), dim3(kBlockThreads),
           Activations<kKind, kParts>::shared, p);
}

template <int kKind, int kParts>
void allow_kernels() {
    allow_shared(mma_kernel<kKind, kParts, false>, Activations<kKind, kParts>::shared);
    allow_shared(mma_kernel<kKind, kParts, true>, Activations<kKind, kParts>::shared);
}

}  // namespace

template <bool kGateUp>
void launch_mma(Launcher &to, const Problem &p) {
    with_kind_and_parts(p, [&](auto kind, auto parts) {
        launch_kernel<decltype(kind)::value, decltype(parts)::value, kGateUp>(to, p);
    });
}
template void launch_mma<false>(Launcher &, const Problem &);
template void launch_mma<true>(Launcher &, const Problem &);

void prepare_mma() {
    allow_kernels<VCUDA_Q8, 1>();
    allow_kernels<VCUDA_Q8, 2>();
    allow_kernels<VCUDA_Q4, 1>();
    allow_kernels<VCUDA_Q4, 2>();
    allow_kernels<VCUDA_BF16, 1>();
    allow_kernels<VCUDA_BF16, 2>();
}

}  // namespace vcuda::tiled
