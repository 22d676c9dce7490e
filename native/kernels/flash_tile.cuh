// What a warp of flash does with a tile of K and V: scores, weights, sums. Everything is in the
// fragments of mma.sync m16n8k16, of lane 4 g + t.
#pragma once

#include <cmath>

#include "flash.h"
#include "ptx_sm90.cuh"

namespace vcuda::flash_detail {

constexpr int kRowBytes = 128;      // of a row of a block of 64 features, in shared memory too
constexpr float kLowest = -1e30f;   // finite, so that it can be subtracted from itself
constexpr float kHeadroom = 7.0f;   // weights are 2^(score - highest + 7): float16 keeps those of
                                    // 2^-21 of the largest whole, and some 2^-32
constexpr float kTolerance = 8.0f;  // that the highest score may rise before sums are made smaller

// D features; a warp has SLICES * 16 rows; a tile has KEYS positions.
template <int D, int SLICES, int WARPS, int KEYS, int Q_PARTS, int KV_PARTS>
struct Shape {
    static constexpr int dim = D, slices = SLICES, warps = WARPS, keys = KEYS;
    static constexpr int q_parts = Q_PARTS, kv_parts = KV_PARTS;
    static constexpr int threads = 32 * WARPS;
    static constexpr int rows = WARPS * SLICES * 16;
    static constexpr int blocks = (D + kKvBlock - 1) / kKvBlock;
    static constexpr int steps = D / 16;                           // of q K^T
    static constexpr int q_bytes = blocks * rows * kRowBytes;      // of a part
    static constexpr int tile_bytes = blocks * KEYS * kRowBytes;   // of a part of K or V
    static constexpr int stage_bytes = 2 * KV_PARTS * tile_bytes;  // K parts, V parts
    static constexpr int shared = Q_PARTS * q_bytes + 2 * stage_bytes;
    static constexpr int resident = WARPS <= 4 && 2 * (shared + 1024) <= 227 * 1024 ? 2 : 1;
    static_assert(D % 32 == 0 && KEYS % 16 == 0 && (KEYS * 8) % threads == 0, "whole copies");
};

// Where this lane's row of an ldmatrix of 16 rows and 2 chunks lies, in rows of 128 bytes whose
// chunk c is at c ^ (row % 8). Order of the four matrices: rows 0-7 and 8-15 of a chunk, then of
// the next (queries, V), or both chunks of rows 0-7, then of rows 8-15 (K).
__device__ __forceinline__ int place_by_rows(int lane) {
    return lane % 16 * kRowBytes + ((lane / 16) ^ (lane % 8)) * 16;
}
__device__ __forceinline__ int place_by_chunks(int lane) {
    return (lane / 16 * 8 + lane % 8) * kRowBytes + ((lane / 8 % 2) ^ (lane % 8)) * 16;
}

// The same of another pair of chunks: two bits are turned. A multiple of 128 may have been added.
__device__ __forceinline__ int of_pair(int place, int pair) {
    return place ^ (pair % 4 * 32);
}

// The state of a warp's rows: of slice m the rows g and g + 8 (i = 0, 1).
template <class S>
struct Rows {
    float sum[S::slices][S::dim / 8][4];  // of weight * V
    float base[S::slices][2];             // a weight is 2^(score - base)
    float total[S::slices][2];            // of the weights of this lane's columns

    __device__ __forceinline__ Rows() {
#pragma unroll
        for (int m = 0; m < S::slices; ++m) {
            base[m][0] = base[m][1] = kLowest;
            total[m][0] = total[m][1] = 0.0f;
#pragma unroll
            for (int j = 0; j < S::dim / 8; ++j) {
                sum[m][j][0] = sum[m][j][1] = sum[m][j][2] = sum[m][j][3] = 0.0f;
            }
        }
    }
};

template <class S>
using Scores = float[S::slices][S::keys / 8][4];

// score = q K^T; small products first. q, k: this lane's places (by rows, by chunks) in `shared`.
template <class S>
__device__ __forceinline__ void multiply_keys(Scores<S> &score, const unsigned char *shared, int q,
                                              int k) {
#pragma unroll
    for (int m = 0; m < S::slices; ++m) {
#pragma unroll
        for (int j = 0; j < S::keys / 8; ++j) {
            score[m][j][0] = score[m][j][1] = score[m][j][2] = score[m][j][3] = 0.0f;
        }
    }
#pragma unroll
    for (int step = 0; step < S::steps; ++step) {
        uint32_t a[S::q_parts][S::slices][4];
#pragma unroll
        for (int part = 0; part < S::q_parts; ++part) {
#pragma unroll
            for (int m = 0; m < S::slices; ++m) {
                load_matrix_x4(a[part][m], shared + of_pair(q, step) + part * S::q_bytes +
                                               step / 4 * (S::rows * kRowBytes) +
                                               m * (16 * kRowBytes));
            }
        }
#pragma unroll
        for (int j = 0; j < S::keys / 8; j += 2) {
            const unsigned char *rows =
                shared + of_pair(k, step) + step / 4 * (S::keys * kRowBytes) + j * (8 * kRowBytes);
            uint32_t b[4];
            if constexpr (S::kv_parts == 2) {
                load_matrix_x4(b, rows + S::tile_bytes);
#pragma unroll
                for (int m = 0; m < S::slices; ++m) {
                    mma_f16(score[m][j], a[0][m], b[0], b[1]);
                    mma_f16(score[m][j + 1], a[0][m], b[2], b[3]);
                }
            }
            load_matrix_x4(b, rows);
#pragma unroll
            for (int part = S::q_parts - 1; part >= 0; --part) {
#pragma unroll
                for (int m = 0; m < S::slices; ++m) {
                    mma_f16(score[m][j], a[part][m], b[0], b[1]);
                    mma_f16(score[m][j + 1], a[part][m], b[2], b[3]);
                }
            }
        }
    }
}

// Let `base` follow the highest scores. Only when one rose by more than the tolerance do the sums
// change: until then the weights, below 2^15, still are float16.
template <class S>
__device__ __forceinline__ void follow(Rows<S> &rows, const Scores<S> &score) {
    float highest[S::slices][2];
    bool rose = false;
#pragma unroll
    for (int m = 0; m < S::slices; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float most = fmaxf(score[m][0][2 * i], score[m][0][2 * i + 1]);
#pragma unroll
            for (int j = 1; j < S::keys / 8; ++j) {
                most = fmaxf(most, fmaxf(score[m][j][2 * i], score[m][j][2 * i + 1]));
            }
            most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
            most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
            highest[m][i] = most;
            rose = rose || most - rows.base[m][i] > kHeadroom + kTolerance;
        }
    }
    if (!__any_sync(kAllLanes, rose)) return;
#pragma unroll
    for (int m = 0; m < S::slices; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float base = fmaxf(rows.base[m][i], highest[m][i] - kHeadroom);
            const float by = exp2_fast(rows.base[m][i] - base);
            rows.base[m][i] = base;
            rows.total[m][i] *= by;
#pragma unroll
            for (int j = 0; j < S::dim / 8; ++j) {
                rows.sum[m][j][2 * i] *= by;
                rows.sum[m][j][2 * i + 1] *= by;
            }
        }
    }
}

// sum += weights V, 16 positions at a time: their weights are computed while the tensor cores work
// on those before. v: this lane's place, by rows.
template <class S>
__device__ __forceinline__ void multiply_values(Rows<S> &rows, Scores<S> &score,
                                                const unsigned char *shared, int v) {
    float total[S::slices][2] = {};
#pragma unroll
    for (int step = 0; step < S::keys / 16; ++step) {
        uint32_t a[S::q_parts][S::slices][4];
#pragma unroll
        for (int m = 0; m < S::slices; ++m) {
#pragma unroll
            for (int x = 0; x < 4; ++x) {  // columns 0-7 of row g, of g + 8; columns 8-15
                float *pair = &score[m][2 * step + x / 2][x % 2 * 2];
                const float low = exp2_fast(pair[0] - rows.base[m][x % 2]);
                const float high = exp2_fast(pair[1] - rows.base[m][x % 2]);
                total[m][x % 2] += low + high;
                a[0][m][x] = half2_bits(low, high);
                if constexpr (S::q_parts == 2) {
                    a[1][m][x] = half2_bits(low - half_value(a[0][m][x] & 0xffffu),
                                            high - half_value(a[0][m][x] >> 16));
                }
            }
        }
#pragma unroll
        for (int j = 0; j < S::dim / 8; j += 2) {
            const unsigned char *from = shared + of_pair(v, j / 2) + j / 8 * (S::keys * kRowBytes) +
                                        step * (16 * kRowBytes);
            uint32_t b[4];
            if constexpr (S::kv_parts == 2) {
                load_matrix_x4_trans(b, from + S::tile_bytes);
#pragma unroll
                for (int m = 0; m < S::slices; ++m) {
                    mma_f16(rows.sum[m][j], a[0][m], b[0], b[1]);
                    mma_f16(rows.sum[m][j + 1], a[0][m], b[2], b[3]);
                }
            }
            load_matrix_x4_trans(b, from);
#pragma unroll
            for (int part = S::q_parts - 1; part >= 0; --part) {
#pragma unroll
                for (int m = 0; m < S::slices; ++m) {
                    mma_f16(rows.sum[m][j], a[part][m], b[0], b[1]);
                    mma_f16(rows.sum[m][j + 1], a[part][m], b[2], b[3]);
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < S::slices; ++m) {
        rows.total[m][0] += total[m][0];
        rows.total[m][1] += total[m][1];
    }
}

// ------------------------------------------------------------------------------------- results

// v [8] = features `feature` .. feature + 7 (a multiple of 8) of a row, into an operand. All lanes
// call it, and lanes 2i and 2i + 1 have the features 16h and 16h + 8 of one row: in the order of q8
// and q4 a chunk has numbers of both. Above the largest float16: *overflow = 1.
__device__ __forceinline__ void store_features(const Operand &to, int64_t row, int feature,
                                               float (&v)[8], bool inside, int32_t *overflow) {
    const bool odd = feature / 8 % 2 != 0;
    uint16_t *at = to.data + feature / kOperandBlock * to.block_stride() + row * kOperandBlock +
                   ((feature / 8 % 8) ^ static_cast<int>(row % 8)) * 8;
    // What bfloat16 holds is no fault; a NaN is one in either.
    const float most = to.bf16 ? 3.4028235e38f : 65504.0f;
    bool too_large = false;
#pragma unroll
    for (int i = 0; i < 8; ++i) too_large |= !(fabsf(v[i]) <= most);
    if (too_large && inside) *overflow = 1;
#pragma unroll 1
    for (int part = 0; part < to.parts; ++part) {
        uint32_t w[4];
        if (to.bf16) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                w[i] = bf16x2_bits(v[2 * i], v[2 * i + 1]);
                v[2 * i] -= bf16_value(w[i] & 0xffffu);
                v[2 * i + 1] -= bf16_value(w[i] >> 16);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                w[i] = half2_bits(v[2 * i], v[2 * i + 1]);
                v[2 * i] -= half_value(w[i] & 0xffffu);
                v[2 * i + 1] -= half_value(w[i] >> 16);
            }
            // pairs 0, 2, 4, 6 of the 16 features go to the first chunk, 1, 3, 5, 7 to the second
            const uint32_t x = __shfl_xor_sync(kAllLanes, odd ? w[0] : w[1], 1);
            const uint32_t y = __shfl_xor_sync(kAllLanes, odd ? w[2] : w[3], 1);
            const uint32_t own[2] = {odd ? w[1] : w[0], odd ? w[3] : w[2]};
            w[0] = odd ? x : own[0];
            w[1] = odd ? y : own[1];
            w[2] = odd ? own[0] : x;
            w[3] = odd ? own[1] : y;
        }
        if (inside) {
            *reinterpret_cast<uint4 *>(at + part * to.part_stride()) =
                make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}

// Zeros from feature q_dim (a multiple of 16) on, by `lanes` lanes of which this is number `lane`.
__device__ __forceinline__ void store_zeros(const Operand &to, int64_t row, int q_dim, int lane,
                                            int lanes) {
#pragma unroll 1
    for (int c = q_dim / 8 + lane; c < to.blocks * 8; c += lanes) {
        uint16_t *at = to.data + c / 8 * to.block_stride() + row * kOperandBlock +
                       ((c % 8) ^ static_cast<int>(row % 8)) * 8;
#pragma unroll 1
        for (int part = 0; part < to.parts; ++part) {
            *reinterpret_cast<uint4 *>(at + part * to.part_stride()) = make_uint4(0, 0, 0, 0);
        }
    }
}

}  // namespace vcuda::flash_detail
