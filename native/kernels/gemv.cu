// gemv, gate_up: matrix times vector on tiled weights
#include "gemv.h"

#include "tile_product.cuh"

namespace vcuda {

// ------------------------------------------------------------------------------------- kernels

namespace {

struct Product {
    Tiles w;
    int32_t first_tile;  // of the stack
    const float *x;
    const float *norm;
    float eps;
    const float *bias;
    float *y;
    int32_t add;
    int32_t *nonfinite;
};

// y (n,) (+)= W (n, k) x (k,) + bias (n,);  with kMatrices = 2: y = silu(W0 x) * (W1 x). A block
// has neighbouring row tiles, kTiles of them at a time; a warp has every kWarps-th step along k of
// all of them, kDepth steps at a time. PRE: block = kThreads; any grid; dynamic shared memory of
// steps * operand_step_bytes(kKind). BYTES: the codes and scales once; x once a block, from the L2.
template <int kKind, int kMatrices, int kTiles, int kDepth, bool kNorm, int kHeld>
__global__ void __launch_bounds__(kThreads, 1) product_kernel(const Product p) {
    VCUDA_DYNAMIC_SHARED(unsigned char, operand);
    __shared__ float partial[2][kTiles][kMatrices][kWarps][kRowTile];
    __shared__ __align__(16) float scratch[kWarps];
    const int warp = warp_index();
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int steps = p.w.steps;
    const int tiles = p.w.row_tiles;
    const auto edge = [&](unsigned block) {  // the first tile of a block
        return static_cast<int>(static_cast<uint64_t>(block) * static_cast<unsigned>(tiles) /
                                gridDim.x);
    };
    const int end = edge(blockIdx.x + 1);

    using Batch = StepWeights<kKind>[kTiles][kMatrices][kDepth];
    Batch now;
    Batch next;
    // The warp's index is the same in all lanes, so these branches are not divergent.
    const auto load = [&](Batch &to, int first, int step) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            if (first + t >= end) break;
#pragma unroll
            for (int d = 0; d < kDepth; ++d) {
                if (step + d * kWarps >= steps) break;
#pragma unroll
                for (int m = 0; m < kMatrices; ++m) {
                    load_step(to[t][m][d], p.w, p.first_tile + m * tiles + first + t,
                              step + d * kWarps, lane);
                }
            }
        }
    };

    // Weights depend on no kernel: they travel while the last one ends.
    int first = edge(blockIdx.x);
    load(now, first, warp);
    OperandBuilder<kKind, kWarps, kNorm, kHeld> builder(p.norm, p.w.k, warp, lane);
    pdl_wait();
    pdl_trigger();
    builder.load(p.x);
    builder.store(operand, p.x, steps, p.eps, scratch);
    __syncthreads();

    int buffer = 0;
    for (; first < end; first += kTiles) {
        // A warp a tile finishes it. What its sums are added to is loaded now, used at the end.
        const int row = (first + warp) * kRowTile + lane;
        const bool writes = warp < kTiles && first + warp < end && lane < kRowTile && row < p.w.n;
        float bias[kMatrices];
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) {
            bias[m] = writes && p.bias != nullptr ? p.bias[m * p.w.n + row] : 0.0f;
        }
        const float before = writes && p.add != 0 ? p.y[row] : 0.0f;

        float rows[kTiles][kMatrices][2] = {};
        for (int step = warp; step < steps; step += kDepth * kWarps) {
            const bool more = step + kDepth * kWarps < steps;
            const int next_first = more ? first : first + kTiles;
            if (next_first < end) load(next, next_first, more ? step + kDepth * kWarps : warp);
#pragma unroll
            for (int d = 0; d < kDepth; ++d) {
                if (step + d * kWarps >= steps) break;
#pragma unroll
                for (int t = 0; t < kTiles; ++t) {
                    if (first + t >= end) break;
#pragma unroll
                    for (int m = 0; m < kMatrices; ++m) {
                        multiply_step(rows[t][m], now[t][m][d], operand, step + d * kWarps, steps,
                                      lane);
                    }
                }
            }
            if (next_first >= end) break;
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
#pragma unroll
                for (int m = 0; m < kMatrices; ++m) {
#pragma unroll
                    for (int d = 0; d < kDepth; ++d) now[t][m][d] = next[t][m][d];
                }
            }
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
            for (int m = 0; m < kMatrices; ++m) {
                store_rows(rows[t][m], partial[buffer][t][m][warp], lane);
            }
        }
        __syncthreads();
        if (writes) {
            float sum[kMatrices];
#pragma unroll
            for (int m = 0; m < kMatrices; ++m) {
                sum[m] = sum_warps(partial[buffer][warp][m], lane) + bias[m];
            }
            float value = sum[0];
            if constexpr (kMatrices == 2) value = silu_times(sum[0], sum[1]);
            value += before;
            p.y[row] = value;
            if (p.nonfinite != nullptr && !(fabsf(value) <= 3.4028235e38f)) *p.nonfinite = 1;
        }
        buffer ^= 1;  // the next tiles' sums may come before these have been read
    }
}

// ------------------------------------------------------------------------------------ launchers

size_t operand_bytes(const Tiles &w) {
    return static_cast<size_t>(w.steps) * static_cast<size_t>(operand_step_bytes(w.kind));
}

// The kernels of one kind of weights: with one tile a block the slots are steps of it, else tiles;
// a short activation is one span a warp.
template <int kKind, int kMatrices, bool kNorm, int kHeld>
struct Kernels {
    static constexpr int slots = kSlots<kKind> > kMatrices ? kSlots<kKind> / kMatrices : 1;
    static constexpr auto one = product_kernel<kKind, kMatrices, 1, slots, kNorm, kHeld>;
    static constexpr auto many = product_kernel<kKind, kMatrices, slots, 1, kNorm, kHeld>;
};
constexpr int kShort = kWarps * kSpan;

template <int kKind, int kMatrices, bool kNorm>
void launch_product(Launcher &to, const Product &p) {
    const int tiles = p.w.row_tiles;
    const bool many = tiles > to.sm_count;
    using Short = Kernels<kKind, kMatrices, kNorm, 1>;
    using Long = Kernels<kKind, kMatrices, kNorm, kLongHeld>;
    auto *kernel = many ? Short::many : Short::one;
    if (p.w.k > kShort) kernel = many ? Long::many : Long::one;
    launch(to, kernel, dim3(static_cast<unsigned>(many ? to.sm_count : tiles)), dim3(kThreads),
           operand_bytes(p.w), p);
}

template <int kKind, int kMatrices>
void launch_norm(Launcher &to, const Product &p) {
    if (p.norm != nullptr) return launch_product<kKind, kMatrices, true>(to, p);
    launch_product<kKind, kMatrices, false>(to, p);
}

template <int kMatrices>
void launch_kind(Launcher &to, const Product &p) {
    switch (p.w.kind) {
        case VCUDA_Q8:
            return launch_norm<VCUDA_Q8, kMatrices>(to, p);
        case VCUDA_Q4:
            return launch_norm<VCUDA_Q4, kMatrices>(to, p);
        case VCUDA_BF16:
            return launch_norm<VCUDA_BF16, kMatrices>(to, p);
        default:
            throw Error("a product needs a q8, q4 or bf16 matrix, not kind %d", p.w.kind);
    }
}

// Short activations need less than what every kernel may have.
template <int kKind, int kMatrices, bool kNorm>
void allow_kernels(size_t bytes) {
    using K = Kernels<kKind, kMatrices, kNorm, kLongHeld>;
    allow_shared(K::one, bytes);
    allow_shared(K::many, bytes);
}

template <int kKind>
void allow_operand(size_t bytes) {
    allow_kernels<kKind, 1, false>(bytes);
    allow_kernels<kKind, 1, true>(bytes);
    allow_kernels<kKind, 2, false>(bytes);
    allow_kernels<kKind, 2, true>(bytes);
}

}  // namespace

void gemv(Launcher &to, const Gemv &p) {
    launch_kind<1>(to, {p.w, p.matrix * p.w.row_tiles, p.x, p.norm, p.eps, p.bias, p.y,
                        p.add ? 1 : 0, p.nonfinite});
}

void gate_up(Launcher &to, const GateUp &p) {
    launch_kind<2>(to, {p.w, 0, p.x, p.norm, p.eps, p.bias, p.hidden, 0, nullptr});
}

void prepare_gemv(uint64_t shared_per_block) {
    const size_t most = operand_shared(shared_per_block);
    allow_operand<VCUDA_Q8>(most);
    allow_operand<VCUDA_Q4>(most);
    allow_operand<VCUDA_BF16>(most);
}

uint64_t operand_shared(uint64_t shared_per_block) {
    constexpr uint64_t fixed = 16384;  // what lies beside the operand, rounded up
    return shared_per_block - fixed;
}

int64_t gemv_max_k(int32_t kind, uint64_t shared_per_block) {
    return static_cast<int64_t>(operand_shared(shared_per_block)) / operand_step_bytes(kind) *
           step_width(kind);
}

}  // namespace vcuda
