// gemm, gemm_gate_up: checks, and which kernels
#include "gemm.h"

#include <algorithm>
#include <atomic>

#include "gemm_kernels.h"
#include "wgmma_answer.h"

namespace vcuda {

namespace {

std::atomic<GemmKernels> chosen{GemmKernels::automatic};

void check(const tiled::Problem &p) {
    const bool bf16 = p.w.kind == VCUDA_BF16;
    const int blocks = p.w.steps * (step_width(p.w.kind) / kOperandBlock);
    if (p.x.bf16 != bf16 || p.x.blocks != blocks) {
        throw Error(
            "a matrix of kind %d and %d columns needs an operand of %d blocks of %s, not %d of %s",
            p.w.kind, p.w.k, blocks, bf16 ? "bfloat16" : "float16", p.x.blocks,
            p.x.bf16 ? "bfloat16" : "float16");
    }
    if (p.map.tiles == nullptr && p.tokens > p.x.capacity) {
        throw Error("%d rows are more than the operand's %d", p.tokens, p.x.capacity);
    }
    const int most = most_tile_rows(p.x.parts);
    if (p.map.tiles != nullptr && (p.map.width <= 0 || p.map.width > most)) {
        throw Error("row tiles have 1 to %d rows, not %d", most, p.map.width);
    }
}

bool takes_wgmma() {
    const GemmKernels which = chosen;
    return which == GemmKernels::automatic ? gemm_can_use_wgmma() : which == GemmKernels::wgmma;
}

template <bool kGateUp>
void run(Launcher &to, const tiled::Problem &p) {
    if (p.map.tiles != nullptr ? p.map.most <= 0 : p.tokens <= 0) return;
    check(p);
    if (takes_wgmma()) {
        tiled::launch_wgmma<kGateUp>(to, p);
    } else {
        tiled::launch_mma<kGateUp>(to, p);
    }
}

}  // namespace

void gemm(Launcher &to, const Gemm &p) {
    tiled::Problem problem;
    problem.w = p.w;
    problem.row_tiles = p.w.row_tiles;
    problem.matrix = p.matrix;
    problem.map = p.map;
    problem.x = p.x;
    problem.tokens = p.tokens;
    problem.bias = p.bias;
    problem.y = p.y;
    problem.stride = p.stride;
    problem.add = p.add ? 1 : 0;
    run<false>(to, problem);
}

void gemm_gate_up(Launcher &to, const GemmGateUp &p) {
    tiled::Problem problem;
    problem.w = p.gate;
    problem.up = p.up;
    problem.row_tiles = std::max(p.gate.row_tiles, p.hidden.blocks * (kOperandBlock / kRowTile));
    problem.matrix = p.matrix;
    problem.map = p.map;
    problem.x = p.x;
    problem.tokens = p.tokens;
    problem.bias = p.gate_bias;
    problem.up_bias = p.up_bias;
    problem.hidden = p.hidden;
    problem.overflow = p.overflow;
    run<true>(to, problem);
}

void prepare_gemm() {
    if (takes_wgmma()) tiled::prepare_wgmma();
    tiled::prepare_mma();
}

bool gemm_can_use_wgmma() {
    static WgmmaAnswer answer;
    return answer(tiled::wgmma_has_code);
}

void choose_gemm_kernels(GemmKernels which) {
    chosen = which;
}

}  // namespace vcuda
