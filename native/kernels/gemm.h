// Matrix times the rows of many tokens, on tiled weights.
//
// q8 and q4 weights are multiplied as float16, code times scale rounded once, and meet float16
// activations; bf16 weights meet bfloat16 ones. Activations of two parts are as exact as float32
// would be, to about 2^-21 (float16, not below 2^-25) and 2^-16 (bfloat16). Sums are float32.
//
// Two sets of kernels: the products of whole warp groups of compute capability 9.0 (gemm_wgmma.cu),
// and mma.sync, from 8.0 on (gemm_mma.cu).
#pragma once

#include <cstdint>

#include "launch.h"
#include "layout.h"
#include "operand_rows.h"

namespace vcuda {

// Rows [first, first + count) of the operand, first a multiple of 8, that meet one matrix.
struct RowTile {
    int32_t matrix;  // of the stack
    int32_t first;
    int32_t count;
    int32_t reserved;
};

// Which rows meet which matrix of a stack. `tiles` NULL: all rows meet one.
struct TileMap {
    const RowTile *tiles = nullptr;  // device memory
    const int32_t *count = nullptr;  // device memory: how many tiles there are
    int32_t most = 0;                // what *count cannot exceed
    int32_t width = 128;             // what no tile's count exceeds, at most most_tile_rows
};

// Rows that a tile may have of an operand of so many parts. The more there are, the better: weights
// are read and converted once a tile, and a tile takes no longer than its rows do.
constexpr int32_t most_tile_rows(int32_t parts) {
    return parts == 1 ? 256 : 128;
}

// Of a map of at most so many rows a tile, and one part, tiles have twice the features: better
// where most matrices meet no more rows than that.
constexpr int32_t kFewTileRows = 64;

// One matrix of a stack.
inline Tiles matrix_of(const Tiles &stack, int32_t matrix) {
    Tiles one = stack;
    one.stack = 1;
    one.codes = static_cast<unsigned char *>(stack.codes) + matrix * one.codes_bytes();
    if (stack.scales != nullptr) one.scales = stack.scales + matrix * one.scales_bytes() / 4;
    return one;
}

// y [row][n] (+)= x W^T + bias; row r of x makes row r of y.
struct Gemm {
    Tiles w;
    int32_t matrix = 0;  // of the stack, for all rows; not used with a map
    TileMap map;
    Operand x;
    int32_t tokens = 0;           // rows [0, tokens); not used with a map
    const float *bias = nullptr;  // [n], with a map [stack][n]; or NULL
    float *y = nullptr;
    int64_t stride =
        0;             // floats from one row of y to the next; of 8, and y 32-byte aligned, is best
    bool add = false;  // add to y (the residual stream)
};
void gemm(Launcher &to, const Gemm &p);

// hidden [row][n] = silu(x Wgate^T + gate_bias) * (x Wup^T + up_bias), as an operand.
struct GemmGateUp {
    Tiles gate;  // of one geometry, as `up`
    Tiles up;
    int32_t matrix = 0;  // of both stacks; not used with a map
    TileMap map;
    Operand x;
    int32_t tokens = 0;                // not used with a map
    const float *gate_bias = nullptr;  // as Gemm's, or NULL
    const float *up_bias = nullptr;
    Operand hidden;               // features from n on become 0
    int32_t *overflow = nullptr;  // becomes 1 when hidden is float16 and a value is not, or NaN
};
void gemm_gate_up(Launcher &to, const GemmGateUp &p);

// Once a device, before the first launch: lets the kernels use their shared memory.
void prepare_gemm();

// Whether the current device runs the products of warp groups: compute capability 9.0, and a build
// that has code for it (sm_90a).
bool gemm_can_use_wgmma();

// For tests: which kernels prepare_gemm and the launches after it take. Automatic is the fastest
// that the device runs.
enum class GemmKernels { automatic, mma, wgmma };
void choose_gemm_kernels(GemmKernels which);

}  // namespace vcuda
