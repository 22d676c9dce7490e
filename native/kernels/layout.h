// How a matrix lies on the device: tiles that a warp reads with one 16-byte load a lane, and that
// are the A operand of the tensor cores as they are.
//
//   A matrix [n][k] is cut into row tiles of 16 output features and steps along k. A step is 128
//   input features (4 groups) of q8 and q4, 64 of bf16. Rows and k are padded with zeros.
//
//     codes   [stack][row tile][step][vector][lane]   16 bytes each
//     scales  [stack][row tile][step][lane]           2 float16: rows g and g + 8 of group t
//
//   lane = 4 g + t (g = 0..7, t = 0..3), as in the fragments of mma.sync. One vector of a lane:
//
//     q8    1 group    words: (row g, k 4t..4t+3) (row g+8, same) (row g, k 16+4t..) (row g+8, ..)
//     q4    2 groups   words: (row g, group 0) (row g+8, group 0) (row g, group 1) (row g+8, ..)
//                      a word is 4 canonical bytes 4t..4t+3 with every nibble's top bit flipped:
//                      low nibbles = k 4t..4t+3, high nibbles = k 16+4t.., two's complement
//     bf16  16 columns words: (row g, k 2t 2t+1) (row g+8, same) (row g, k 8+2t ..) (row g+8, ..)
//
//   float32 (the router) is plain [stack * n][k] rows.
#pragma once

#include <cstdint>

#include "vcuda.h"

#if defined(__CUDACC__)
#define VCUDA_BOTH __host__ __device__
#else
#define VCUDA_BOTH
#endif

namespace vcuda {

constexpr int kGroup = 32;    // input features that share a scale
constexpr int kRowTile = 16;  // output features of a tile
constexpr int kVectorBytes = 16;
constexpr int kWarp = 32;

// Input features of a step.
VCUDA_BOTH constexpr int step_width(int kind) {
    return kind == VCUDA_BF16 ? 64 : 128;
}

// 16-byte vectors a lane reads in a step.
VCUDA_BOTH constexpr int step_vectors(int kind) {
    return kind == VCUDA_Q4 ? 2 : 4;
}

VCUDA_BOTH constexpr int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// Floats from one row of activations to the next: kernels read four at a time, and what pads a row
// must be 0.
VCUDA_BOTH constexpr int64_t padded_row(int64_t k) {
    return ceil_div(k, 4) * 4;
}

// A matrix, or a stack of them, as the kernels see it.
struct Tiles {
    int32_t kind = VCUDA_F32;
    int32_t n = 0;               // output features of one matrix
    int32_t k = 0;               // input features
    int32_t stack = 1;           // matrices
    int32_t row_tiles = 0;       // of one matrix: ceil(n / 16)
    int32_t steps = 0;           // along k
    void *codes = nullptr;       // float32 rows when kind is VCUDA_F32
    uint32_t *scales = nullptr;  // q8 and q4 only

    // Bytes of codes and of scales; the scales lie behind the codes in one allocation.
    VCUDA_BOTH int64_t codes_bytes() const {
        if (kind == VCUDA_F32) return static_cast<int64_t>(stack) * n * k * 4;
        return static_cast<int64_t>(stack) * row_tiles * steps * step_vectors(kind) * kWarp *
               kVectorBytes;
    }
    VCUDA_BOTH int64_t scales_bytes() const {
        if (kind != VCUDA_Q8 && kind != VCUDA_Q4) return 0;
        return static_cast<int64_t>(stack) * row_tiles * steps * kWarp * 4;
    }
};

// The geometry of a matrix; the pointers are NULL.
inline Tiles tiles_of(int32_t kind, int64_t stack, int64_t n, int64_t k) {
    Tiles tiles;
    tiles.kind = kind;
    tiles.n = static_cast<int32_t>(n);
    tiles.k = static_cast<int32_t>(k);
    tiles.stack = static_cast<int32_t>(stack);
    tiles.row_tiles = static_cast<int32_t>(ceil_div(n, kRowTile));
    tiles.steps = kind == VCUDA_F32 ? 0 : static_cast<int32_t>(ceil_div(k, step_width(kind)));
    return tiles;
}

}  // namespace vcuda
