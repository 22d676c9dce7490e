// route, expert_gate_up, expert_down: a layer of routed experts for one token
#include "moe.h"

#include "expert_choice.cuh"
#include "gemv.h"
#include "tile_product.cuh"

namespace vcuda {

namespace {

// --------------------------------------------------------------------------------------- routing

constexpr int kRouteWarps = 8;
constexpr int kRouteThreads = kRouteWarps * kWarp;

// logits (experts,) = w (experts, k) (x / rms(x) * norm)
// PRE: grid = experts, block = kRouteThreads.   BYTES: 4 experts * k
__global__ void __launch_bounds__(kRouteThreads) route_kernel(const Router p) {
    __shared__ __align__(16) float square_sums[kRouteWarps];
    __shared__ __align__(16) float products[kRouteWarps];
    constexpr int held = 4;  // quads of a thread that are loaded before it waits
    const int thread = static_cast<int>(threadIdx.x);
    const float *w = p.w + static_cast<int64_t>(blockIdx.x) * p.k;
    const auto element = [&](int i) { return (thread + i * kRouteThreads) * 4; };
    float4 scaled[held];  // w * norm: both are weights
#pragma unroll
    for (int i = 0; i < held; ++i) scaled[i] = load_quad(w, element(i), p.k);
#pragma unroll
    for (int i = 0; i < held; ++i) {
        const float4 norm = load_quad(p.norm, element(i), p.k);
        scaled[i] = make_float4(scaled[i].x * norm.x, scaled[i].y * norm.y, scaled[i].z * norm.z,
                                scaled[i].w * norm.w);
    }
    pdl_wait();
    pdl_trigger();
    float square = 0.0f;
    float product = 0.0f;
    const auto add = [&](const float4 &weight, const float4 &x) {
        square += square_sum(x);
        product += fmaf(weight.x, x.x, fmaf(weight.y, x.y, fmaf(weight.z, x.z, weight.w * x.w)));
    };
#pragma unroll
    for (int i = 0; i < held; ++i) add(scaled[i], load_activation(p.x, element(i), p.k));
    for (int i = held; element(i) < p.k; ++i) {
        const float4 weight = load_quad(w, element(i), p.k);
        const float4 norm = load_quad(p.norm, element(i), p.k);
        add(make_float4(weight.x * norm.x, weight.y * norm.y, weight.z * norm.z, weight.w * norm.w),
            load_activation(p.x, element(i), p.k));
    }
    const float mean = block_sum<kRouteWarps>(square, square_sums) / static_cast<float>(p.k);
    const float sum = block_sum<kRouteWarps>(product, products);
    if (thread == 0) p.logits[blockIdx.x] = finite_or_nan(sum / sqrtf(mean + p.eps));
}

// --------------------------------------------------------------------------------------- experts

// hidden (top, n): row j = silu(gate_e x) * (up_e x), e = chosen[j], x = x / rms(x) * norm. The row
// tiles of all chosen experts are one list, of which a block has kPairs neighbours.
// PRE: one block more than kPairs make of top * row tiles; block = kThreads; dynamic shared memory
// of the operand. BYTES: top * 2 matrices
template <int kKind, int kPairs, int kHeld>
__global__ void __launch_bounds__(kThreads, 1) expert_gate_up_kernel(const ExpertGateUp p) {
    VCUDA_DYNAMIC_SHARED(unsigned char, operand);
    __shared__ float partial[kPairs][2][kWarps][kRowTile];
    __shared__ __align__(16) float scratch[kWarps];
    __shared__ __align__(16) float logits[kMaxExperts];
    __shared__ float best[kMaxTop];
    __shared__ int expert_of[kMaxTop];
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = warp_index();
    const int lane = thread % kWarp;
    const int steps = p.gate.steps;
    const int row_tiles = p.gate.row_tiles;
    const int first = static_cast<int>(blockIdx.x) * kPairs;
    const int end = p.top * row_tiles;
    // x is older than the kernel before this one, which made the logits: the operand is made while
    // that one runs.
    OperandBuilder<kKind, kWarps, true, kHeld> builder(p.norm, p.gate.k, warp, lane);
    builder.load(p.x);
    if (thread < kMaxTop) expert_of[thread] = 0;
    builder.store(operand, p.x, steps, p.eps, scratch);
    pdl_wait();
    pdl_trigger();
    for (int e = thread; e < (p.experts + 15) / 16 * 16; e += kThreads) {
        logits[e] = e < p.experts ? p.logits[e] : -INFINITY;
    }
    __syncthreads();
    rank_experts<kWarps>(logits, p.experts, p.top, [&](int rank, int e) { expert_of[rank] = e; });
    __syncthreads();
    if (first >= end) {  // the block that is there for this only
        write_choice<kWarps>(logits, p.experts, p.top, p.normalise, expert_of, scratch, best,
                             p.chosen, p.weights);
        return;
    }

    int64_t at[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        const int pair = first + i < end ? first + i : end - 1;  // twice, where there are fewer
        at[i] = static_cast<int64_t>(expert_of[pair / row_tiles]) * row_tiles + pair % row_tiles;
    }
    StepWeights<kKind> now[kPairs][2];
    const auto load = [&](int step) {
        if (step >= steps) return;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            load_step(now[i][0], p.gate, at[i], step, lane);
            load_step(now[i][1], p.up, at[i], step, lane);
        }
    };
    load(warp);
    float rows[kPairs][2][2] = {};
    for (int step = warp; step < steps; step += kWarps) {
        if (step != warp) load(step);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            multiply_step(rows[i][0], now[i][0], operand, step, steps, lane);
            multiply_step(rows[i][1], now[i][1], operand, step, steps, lane);
        }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        store_rows(rows[i][0], partial[i][0][warp], lane);
        store_rows(rows[i][1], partial[i][1][warp], lane);
    }
    __syncthreads();
    if (warp < kPairs && first + warp < end && lane < kRowTile) {
        const int pair = first + warp;
        const int row = pair % row_tiles * kRowTile + lane;
        if (row < p.gate.n) {
            p.hidden[pair / row_tiles * padded_row(p.gate.n) + row] =
                silu_times(sum_warps(partial[warp][0], lane), sum_warps(partial[warp][1], lane));
        }
    }
}

// Steps in flight: of q4 all of an expert of 768 columns.
template <int kKind>
constexpr int kDownDepth = kKind == VCUDA_Q4 ? 3 : 2;

// y (n,) += sum over j of weights[j] * (down_e hidden[j]), e = chosen[j]
// PRE: grid = row tiles, block = kThreads; dynamic shared memory of `top` operands.
// BYTES: top matrices
template <int kKind>
__global__ void __launch_bounds__(kThreads, 1) expert_down_kernel(const ExpertDown p) {
    VCUDA_DYNAMIC_SHARED(unsigned char, operands);
    __shared__ float partial[kMaxTop][kWarps][kRowTile];
    __shared__ float weights[kMaxTop];
    const int warp = warp_index();
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int tile = static_cast<int>(blockIdx.x);
    const int steps = p.down.steps;
    constexpr int depth = kDownDepth<kKind>;
    const size_t stride = static_cast<size_t>(steps) * operand_step_bytes(kKind);
    // Warps are shared out among the experts: `parts` of them split an expert's columns.
    const int parts = p.top >= kWarps ? 1 : kWarps / p.top;
    const int slots = kWarps / parts;
    const int part = warp % parts;
    const int slot = warp / parts;
    const int row = tile * kRowTile + lane;
    const bool writes = warp == 0 && lane < kRowTile && row < p.down.n;
    pdl_wait();
    pdl_trigger();
    const bool busy = slot < p.top && slot < slots;
    int64_t at = 0;
    StepWeights<kKind> now[depth];
    StepWeights<kKind> next[depth];
    const auto load = [&](StepWeights<kKind>(&to)[depth], int step) {
#pragma unroll
        for (int i = 0; i < depth; ++i) {
            if (step + i * parts < steps) load_step(to[i], p.down, at, step + i * parts, lane);
        }
    };
    if (busy) {
        at = static_cast<int64_t>(p.chosen[slot]) * p.down.row_tiles + tile;
        load(now, part);
    }
    const float before = writes ? p.y[row] : 0.0f;
    if (warp == 0 && lane < p.top) weights[lane] = p.weights[lane];

    // The operands, each expert's by the warps that multiply it.
    constexpr int held = 3;
    for (int j = slot; busy && j < p.top; j += slots) {
        const float *x = p.hidden + j * padded_row(p.down.k);
        for (int first = part; first * kSpan < p.down.k; first += held * parts) {
            float4 value[held];
#pragma unroll
            for (int i = 0; i < held; ++i) {
                value[i] = load_activation(x, (first + i * parts) * kSpan + lane * 4, p.down.k);
            }
#pragma unroll
            for (int i = 0; i < held; ++i) {
                const int span = first + i * parts;
                if (span * kSpan >= p.down.k) break;
                store_span<kKind>(operands + j * stride, value[i], span, steps, lane);
            }
        }
    }
    __syncthreads();
    for (int j = slot; busy && j < p.top; j += slots) {
        if (j != slot) {
            at = static_cast<int64_t>(p.chosen[j]) * p.down.row_tiles + tile;
            load(now, part);
        }
        const unsigned char *operand = operands + j * stride;
        float rows[2] = {0.0f, 0.0f};
        for (int step = part; step < steps; step += depth * parts) {
            load(next, step + depth * parts);
#pragma unroll
            for (int i = 0; i < depth; ++i) {
                if (step + i * parts >= steps) break;
                multiply_step(rows, now[i], operand, step + i * parts, steps, lane);
            }
            if (step + depth * parts >= steps) break;
#pragma unroll
            for (int i = 0; i < depth; ++i) now[i] = next[i];
        }
        store_rows(rows, partial[j][part], lane);
    }
    __syncthreads();
    if (writes) {
        float y = 0.0f;
        for (int j = 0; j < p.top; ++j) {
            float sum = 0.0f;
            for (int i = 0; i < parts; ++i) sum += partial[j][i][lane];
            // as the CPU engine: products rounded before they are added
            y = __fadd_rn(y, __fmul_rn(sum, weights[j]));
        }
        p.y[row] = before + y;
    }
}

}  // namespace

// ------------------------------------------------------------------------------------ launchers

void route(Launcher &to, const Router &p) {
    launch(to, route_kernel, dim3(static_cast<unsigned>(p.experts)), dim3(kRouteThreads), 0, p);
}

namespace {

// Pairs of row tiles a block has: the fewest that need no second round of blocks, as far as the
// registers go.
template <int kKind, int kHeld>
void launch_gate_up(Launcher &to, const ExpertGateUp &p) {
    const int pairs = p.top * p.gate.row_tiles;
    const size_t shared = static_cast<size_t>(p.gate.steps) * operand_step_bytes(kKind);
    const auto run = [&](auto *kernel, int each) {
        launch(to, kernel, dim3(static_cast<unsigned>(ceil_div(pairs, each) + 1)), dim3(kThreads),
               shared, p);
    };
    if constexpr (kKind == VCUDA_Q4) {
        if (pairs > 2 * to.sm_count) return run(expert_gate_up_kernel<kKind, 3, kHeld>, 3);
    }
    run(expert_gate_up_kernel<kKind, 1, kHeld>, 1);
}

template <int kKind>
void launch_gate_up(Launcher &to, const ExpertGateUp &p) {
    if (p.gate.k <= kWarps * kSpan) return launch_gate_up<kKind, 1>(to, p);
    launch_gate_up<kKind, kLongHeld>(to, p);
}

template <int kKind>
void allow_gate_up(size_t bytes) {
    if constexpr (kKind == VCUDA_Q4)
        allow_shared(expert_gate_up_kernel<kKind, 3, kLongHeld>, bytes);
    allow_shared(expert_gate_up_kernel<kKind, 1, kLongHeld>, bytes);
}

}  // namespace

void expert_gate_up(Launcher &to, const ExpertGateUp &p) {
    switch (p.gate.kind) {
        case VCUDA_Q8:
            return launch_gate_up<VCUDA_Q8>(to, p);
        case VCUDA_Q4:
            return launch_gate_up<VCUDA_Q4>(to, p);
        case VCUDA_BF16:
            return launch_gate_up<VCUDA_BF16>(to, p);
        default:
            throw Error("experts need q8, q4 or bf16 matrices, not kind %d", p.gate.kind);
    }
}

void expert_down(Launcher &to, const ExpertDown &p) {
    const dim3 grid(static_cast<unsigned>(p.down.row_tiles));
    const dim3 block(kWarps * kWarp);
    const size_t shared = static_cast<size_t>(p.down.steps) * operand_step_bytes(p.down.kind) *
                          static_cast<size_t>(p.top);
    switch (p.down.kind) {
        case VCUDA_Q8:
            return launch(to, expert_down_kernel<VCUDA_Q8>, grid, block, shared, p);
        case VCUDA_Q4:
            return launch(to, expert_down_kernel<VCUDA_Q4>, grid, block, shared, p);
        case VCUDA_BF16:
            return launch(to, expert_down_kernel<VCUDA_BF16>, grid, block, shared, p);
        default:
            throw Error("experts need q8, q4 or bf16 matrices, not kind %d", p.down.kind);
    }
}

void prepare_moe(uint64_t shared_per_block) {
    const size_t most = operand_shared(shared_per_block);
    allow_gate_up<VCUDA_Q8>(most);
    allow_gate_up<VCUDA_Q4>(most);
    allow_gate_up<VCUDA_BF16>(most);
    const size_t down = down_shared(shared_per_block);
    allow_shared(expert_down_kernel<VCUDA_Q8>, down);
    allow_shared(expert_down_kernel<VCUDA_Q4>, down);
    allow_shared(expert_down_kernel<VCUDA_BF16>, down);
}

uint64_t down_shared(uint64_t shared_per_block) {
    constexpr uint64_t fixed = sizeof(float) * kMaxTop * kWarps * kRowTile + 1024;
    return shared_per_block - fixed;
}

int64_t expert_down_max_k(int32_t kind, int32_t top, uint64_t shared_per_block) {
    return static_cast<int64_t>(down_shared(shared_per_block)) /
           (static_cast<int64_t>(operand_step_bytes(kind)) * top) * step_width(kind);
}

}  // namespace vcuda
