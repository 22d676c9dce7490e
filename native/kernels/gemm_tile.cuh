// What both sets of GEMM kernels share: the problem as a kernel gets it, its tiles of the output,
// and weights as the A fragments of a product of 16 features.
#pragma once

#include <cstdint>

#include "gemm.h"
#include "ptx_sm90.cuh"

namespace vcuda::tiled {

// One launch.
struct Problem {
    Tiles w;                // or gate
    Tiles up;               // when there are two matrices
    int32_t row_tiles = 0;  // that the output has: of a hidden activation whole blocks
    int32_t matrix = 0;
    TileMap map;
    Operand x;
    int32_t tokens = 0;
    int32_t width = 0;  // tokens of a tile, without a map; of the host: 0 for what is best
    const float *bias = nullptr;
    const float *up_bias = nullptr;
    float *y = nullptr;
    int64_t stride = 0;
    int32_t add = 0;
    Operand hidden;
    int32_t *overflow = nullptr;
};

// Of the host: tiles of the output of kSpan row tiles (of each matrix) and at most `width` tokens;
// with a map as many as there can be.
template <int kSpan>
int64_t most_tiles(const Problem &p, int width) {
    const int64_t groups = p.map.tiles != nullptr ? p.map.most : ceil_div(p.tokens, width);
    return groups * ceil_div(p.row_tiles, kSpan);
}

// A tile of the output.
struct Work {
    int32_t matrix;
    int32_t first;       // row of the operand
    int32_t count;       // rows
    int32_t first_tile;  // row tile of the matrix
};

// The tiles in the order in which blocks take them. Without a map tokens run fastest: the blocks
// that run at a time read a few of the weights and all activations, which stay in the L2. With a
// map weights run fastest, because each matrix meets few rows.
template <int kSpan>
struct Schedule {
    int32_t groups;  // of rows
    int32_t spans;   // of row tiles

    // PRE: after pdl_wait, which the map is behind.
    __device__ __forceinline__ explicit Schedule(const Problem &p)
        : spans(static_cast<int32_t>(ceil_div(p.row_tiles, kSpan))) {
        if (p.map.tiles == nullptr) {
            groups = static_cast<int32_t>(ceil_div(p.tokens, p.width));
        } else {
            groups = min(load_fresh(p.map.count), p.map.most);
        }
    }

    __device__ __forceinline__ int32_t count() const { return groups * spans; }

    __device__ __forceinline__ Work at(const Problem &p, int32_t index) const {
        if (p.map.tiles == nullptr) {
            const int32_t first = index % groups * p.width;
            return {p.matrix, first, min(p.tokens - first, p.width), index / groups * kSpan};
        }
        const auto *tile = reinterpret_cast<const int32_t *>(p.map.tiles + index / spans);
        return {load_fresh(tile), load_fresh(tile + 1), load_fresh(tile + 2),
                index % spans * kSpan};
    }
};

// ------------------------------------------------------------------------------------- fragments

// Weights are multiplied a slice of 32 features at a time: a group of q8 and q4.
constexpr int kSliceWidth = 32;

// Bytes of a row tile's step.
VCUDA_BOTH constexpr int step_codes_bytes(int kind) {
    return step_vectors(kind) * kWarp * kVectorBytes;
}
constexpr int kStepScalesBytes = kWarp * 4;

// Two codes of a word that holds four, unsigned (`zero` too large), as float16 times `scale`,
// rounded once: an unsigned code in the mantissa of 1024 is 1024 + code, and the difference is
// exact.
template <int kUpper>
__device__ __forceinline__ uint32_t half_weights(uint32_t codes, uint32_t zero, uint32_t scale) {
    const uint32_t raised = __byte_perm(codes, 0x64646464u, kUpper != 0 ? 0x4342u : 0x4140u);
    return half2_multiply(half2_subtract(raised, zero), scale);
}

// Of one row: codes of features 4t .. 4t+3 as the words of 2t, 2t+1 and of 8+2t, 8+2t+1, where the
// operand has them (operand_rows.h).
__device__ __forceinline__ void half_row(uint32_t &low, uint32_t &high, uint32_t codes,
                                         uint32_t zero, uint32_t scale) {
    low = half_weights<0>(codes, zero, scale);
    high = half_weights<1>(codes, zero, scale);
}

// The A fragments of a slice of a row tile, of its features 0 .. 15 and 16 .. 31, from the lane's
// vectors (slice_vector says which) and the scales of the rows g and g + 8.
template <int kKind>
struct SliceWeights;

template <>
struct SliceWeights<VCUDA_Q8> {
    static constexpr int kVectors = 1;

    __device__ static __forceinline__ void make(uint32_t (&a)[2][4], const uint4 (&codes)[1],
                                                uint32_t scales, int /*slice*/) {
        constexpr uint32_t zero = 0x64806480u;   // 1024 + 128
        constexpr uint32_t signs = 0x80808080u;  // two's complement -> 128 too large
        const uint32_t low = __byte_perm(scales, 0, 0x1010u);
        const uint32_t high = __byte_perm(scales, 0, 0x3232u);
        half_row(a[0][0], a[0][2], codes[0].x ^ signs, zero, low);
        half_row(a[0][1], a[0][3], codes[0].y ^ signs, zero, high);
        half_row(a[1][0], a[1][2], codes[0].z ^ signs, zero, low);
        half_row(a[1][1], a[1][3], codes[0].w ^ signs, zero, high);
    }
};

template <>
struct SliceWeights<VCUDA_Q4> {
    static constexpr int kVectors = 1;

    __device__ static __forceinline__ void make(uint32_t (&a)[2][4], const uint4 (&codes)[1],
                                                uint32_t scales, int slice) {
        constexpr uint32_t zero = 0x64086408u;  // 1024 + 8
        constexpr uint32_t nibbles = 0x0f0f0f0fu;
        constexpr uint32_t signs = 0x08080808u;
        const uint32_t low = __byte_perm(scales, 0, 0x1010u);
        const uint32_t high = __byte_perm(scales, 0, 0x3232u);
        const uint32_t even = slice % 2 == 0 ? codes[0].x : codes[0].z;
        const uint32_t odd = slice % 2 == 0 ? codes[0].y : codes[0].w;
        half_row(a[0][0], a[0][2], (even & nibbles) ^ signs, zero, low);
        half_row(a[0][1], a[0][3], (odd & nibbles) ^ signs, zero, high);
        half_row(a[1][0], a[1][2], (even >> 4 & nibbles) ^ signs, zero, low);
        half_row(a[1][1], a[1][3], (odd >> 4 & nibbles) ^ signs, zero, high);
    }
};

template <>
struct SliceWeights<VCUDA_BF16> {
    static constexpr int kVectors = 2;

    __device__ static __forceinline__ void make(uint32_t (&a)[2][4], const uint4 (&codes)[2],
                                                uint32_t /*scales*/, int /*slice*/) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            a[i][0] = codes[i].x;
            a[i][1] = codes[i].y;
            a[i][2] = codes[i].z;
            a[i][3] = codes[i].w;
        }
    }
};

// Index among the vectors of a lane's step of the first one of a slice.
template <int kKind>
VCUDA_BOTH constexpr int slice_vector(int slice) {
    return kKind == VCUDA_Q4 ? slice / 2 : slice * SliceWeights<kKind>::kVectors;
}

}  // namespace vcuda::tiled
