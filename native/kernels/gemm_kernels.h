// The two sets of GEMM kernels, as gemm.cu chooses between them.
#pragma once

#include <type_traits>

#include "error.h"
#include "gemm_tile.cuh"

namespace vcuda::tiled {

template <bool kGateUp>
void launch_mma(Launcher &to, const Problem &p);
void prepare_mma();

template <bool kGateUp>
void launch_wgmma(Launcher &to, const Problem &p);
void prepare_wgmma();

// Whether the library has code of these kernels for the current device.
bool wgmma_has_code();

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// run(kind, parts), both as types, for the weights and the operand of a problem.
template <class Run>
void with_kind_and_parts(const Problem &p, const Run &run) {
    const auto with_parts = [&](auto kind) {
        if (p.x.parts == 1) return run(kind, Constant<1>{});
        if (p.x.parts == 2) return run(kind, Constant<2>{});
        throw Error("an operand has 1 or 2 parts, not %d", p.x.parts);
    };
    switch (p.w.kind) {
        case VCUDA_Q8:
            return with_parts(Constant<VCUDA_Q8>{});
        case VCUDA_Q4:
            return with_parts(Constant<VCUDA_Q4>{});
        case VCUDA_BF16:
            return with_parts(Constant<VCUDA_BF16>{});
        default:
            throw Error("a product needs a q8, q4 or bf16 matrix, not kind %d", p.w.kind);
    }
}

}  // namespace vcuda::tiled
