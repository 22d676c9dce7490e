// gemv_fused: several matrices times a vector each
//
// gemv's blocks and its sums (tile_product.cuh), over the row tiles of all members one after
// another: a row is added up in the same order wherever its tile stands, so a member's result does
// not depend on its company. A block makes a new operand where the vector changes.
#include "gemv_fused.h"

#include "gemv.h"
#include "tile_product.cuh"

namespace vcuda {

// ------------------------------------------------------------------------------------- kernels

namespace {

// Neighbouring row tiles of one member, which a block multiplies at once.
struct Group {
    int member;
    int first;  // among the tiles of all members
    int count;
};

__device__ __forceinline__ int first_tile_of(const GemvTable &p, int member) {
    return member > 0 ? p.members[member - 1].end : 0;
}

// The group that begins at tile `first`, of a block whose tiles end at `end`. `member`: that of an
// earlier tile.
template <int kTiles>
__device__ __forceinline__ Group group_at(const GemvTable &p, int member, int first, int end) {
    while (first >= p.members[member].end) member += 1;
    return {member, first, min(kTiles, min(end, p.members[member].end) - first)};
}

// y (n,) = W (n, k) x (k,) of every member. A block has neighbouring row tiles, kTiles of them at a
// time; a warp has every kWarps-th step along k of all of them, kDepth steps at a time.
// PRE: block = kThreads; at most as many blocks as row tiles; dynamic shared memory of
// steps * operand_step_bytes(kKind). BYTES: the codes and scales once; x once a block, from the L2.
template <int kKind, int kTiles, int kDepth, int kHeld>
__global__ void __launch_bounds__(kThreads, 1)
    gemv_fused_kernel(const __grid_constant__ GemvTable p) {
    VCUDA_DYNAMIC_SHARED(unsigned char, operand);
    __shared__ float partial[2][kTiles][kWarps][kRowTile];
    const int warp = warp_index();
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int steps = p.steps;
    const int tiles = p.members[p.count - 1].end;
    const auto edge = [&](unsigned block) {  // the first tile of a block
        return static_cast<int>(static_cast<uint64_t>(block) * static_cast<unsigned>(tiles) /
                                gridDim.x);
    };
    const int end = edge(blockIdx.x + 1);

    using Batch = StepWeights<kKind>[kTiles][kDepth];
    Batch now;
    Batch next;
    const auto load = [&](Batch &to, const Group &group, int step) {
        const GemvMember &member = p.members[group.member];
        Tiles w;
        w.steps = steps;
        w.codes = member.codes;
        w.scales = member.scales;
        const int tile = group.first - first_tile_of(p, group.member);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            if (t >= group.count) break;
#pragma unroll
            for (int d = 0; d < kDepth; ++d) {
                if (step + d * kWarps >= steps) break;
                load_step(to[t][d], w, tile + t, step + d * kWarps, lane);
            }
        }
    };

    Group group = group_at<kTiles>(p, 0, edge(blockIdx.x), end);
    load(now, group, warp);
    pdl_wait();
    pdl_trigger();
    const float *made = nullptr;  // the vector whose operand is there
    int buffer = 0;
    while (true) {
        const GemvMember &member = p.members[group.member];
        if (member.x != made) {
            // every warp is past the barrier behind its last product
            OperandBuilder<kKind, kWarps, false, kHeld> builder(nullptr, p.k, warp, lane);
            builder.load(member.x);
            builder.store(operand, member.x, steps, 0.0f, nullptr);
            made = member.x;
            __syncthreads();
        }
        const int after = group.first + group.count;
        const bool last = after >= end;
        Group then = group;
        if (!last) then = group_at<kTiles>(p, group.member, after, end);

        float rows[kTiles][2] = {};
        for (int step = warp; step < steps; step += kDepth * kWarps) {
            const bool more = step + kDepth * kWarps < steps;
            const bool loads = more || !last;
            Group from = group;
            if (!more) from = then;
            if (loads) load(next, from, more ? step + kDepth * kWarps : warp);
#pragma unroll
            for (int d = 0; d < kDepth; ++d) {
                if (step + d * kWarps >= steps) break;
#pragma unroll
                for (int t = 0; t < kTiles; ++t) {
                    if (t >= group.count) break;
                    multiply_step(rows[t], now[t][d], operand, step + d * kWarps, steps, lane);
                }
            }
            if (!loads) break;
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
#pragma unroll
                for (int d = 0; d < kDepth; ++d) now[t][d] = next[t][d];
            }
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) store_rows(rows[t], partial[buffer][t][warp], lane);
        __syncthreads();
        // a warp a tile finishes it
        const int tile = group.first - first_tile_of(p, group.member) + warp;
        const int row = tile * kRowTile + lane;
        if (warp < group.count && lane < kRowTile && row < member.n) {
            member.y[row] = sum_warps(partial[buffer][warp], lane);
        }
        if (last) break;
        group = then;
        buffer ^= 1;  // the next tiles' sums may come before these have been read
    }
}

// ------------------------------------------------------------------------------------ launchers

// As gemv's: with one tile a block the slots are steps of it, else tiles.
template <int kKind, int kHeld>
struct Kernels {
    static constexpr auto one = gemv_fused_kernel<kKind, 1, kSlots<kKind>, kHeld>;
    static constexpr auto many = gemv_fused_kernel<kKind, kSlots<kKind>, 1, kHeld>;
};
constexpr int kShort = kWarps * kSpan;

template <int kKind>
void launch_kind(Launcher &to, const GemvTable &p) {
    const int32_t tiles = p.tiles();
    const bool many = tiles > to.sm_count;
    using Short = Kernels<kKind, 1>;
    using Long = Kernels<kKind, kLongHeld>;
    auto *kernel = many ? Short::many : Short::one;
    if (p.k > kShort) kernel = many ? Long::many : Long::one;
    launch(to, kernel, dim3(static_cast<unsigned>(many ? to.sm_count : tiles)), dim3(kThreads),
           static_cast<size_t>(p.steps) * static_cast<size_t>(operand_step_bytes(kKind)), p);
}

template <int kKind>
void allow_kind(size_t bytes) {
    allow_shared(Kernels<kKind, kLongHeld>::one, bytes);
    allow_shared(Kernels<kKind, kLongHeld>::many, bytes);
}

}  // namespace

void gemv_fused(Launcher &to, const GemvTable &table) {
    if (table.count == 0) return;
    switch (table.kind) {
        case VCUDA_Q8:
            return launch_kind<VCUDA_Q8>(to, table);
        case VCUDA_Q4:
            return launch_kind<VCUDA_Q4>(to, table);
        case VCUDA_BF16:
            return launch_kind<VCUDA_BF16>(to, table);
        default:
            throw Error("a product needs a q8, q4 or bf16 matrix, not kind %d", table.kind);
    }
}

void prepare_gemv_fused(uint64_t shared_per_block) {
    const size_t most = operand_shared(shared_per_block);
    allow_kind<VCUDA_Q8>(most);
    allow_kind<VCUDA_Q4>(most);
    allow_kind<VCUDA_BF16>(most);
}

}  // namespace vcuda
