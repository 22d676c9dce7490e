// The activations of many tokens as the tensor cores take them: 16-bit numbers, in the order in
// which a matrix product (gemm.h) reads them from shared memory.
//
//   [part][block][row][64 features]: a row of a block is 128 bytes, 8 chunks of 16 bytes; chunk c
//   lies at c ^ (row % 8), the 128-byte swizzle of wgmma. So N rows of one block from a multiple of
//   8 on are one contiguous stretch of N * 128 bytes, which a plain bulk copy brings into shared
//   memory as wgmma wants it.
//
//   Features within a block: for bf16 weights in their order. For q8 and q4 weights in the order in
//   which a lane holds them (layout.h: k 4t..4t+3 of each half h of a group): of the 16 features
//   from 16 h on, feature 4t + j stands where a product of 16 features takes
//
//     j = 0, 1   place 2t + j          j = 2, 3   place 8 + 2t + j - 2
#pragma once

#include <cstdint>

#include "launch.h"
#include "layout.h"

namespace vcuda {

constexpr int kOperandBlock = 64;      // features of a block
constexpr int kOperandRowBytes = 128;  // of a row of a block
constexpr int kOperandRows = 128;      // the capacity is a multiple of this

struct Operand {
    int32_t parts = 1;         // 1 or 2: value = part 0 (+ part 1, what rounding part 0 lost)
    bool bf16 = false;         // parts are bfloat16 (for bf16 weights) or float16 (for q8 and q4)
    int32_t blocks = 0;        // along k; features from k on are 0
    int32_t capacity = 0;      // rows, a multiple of 128; those that do not count hold anything
    uint16_t *data = nullptr;  // 1024-byte aligned

    // Numbers from one block to the next, and from one part to the next.
    VCUDA_BOTH int64_t block_stride() const {
        return static_cast<int64_t>(capacity) * kOperandBlock;
    }
    VCUDA_BOTH int64_t part_stride() const { return blocks * block_stride(); }

    VCUDA_BOTH int64_t bytes() const { return parts * part_stride() * 2; }

    // Where among the 64 numbers of its row of a block a feature stands, without the swizzle.
    VCUDA_BOTH int32_t place(int32_t feature) const {
        const int32_t in_block = feature % kOperandBlock;
        if (bf16) return in_block;
        const int32_t t = in_block / 4 % 4, j = in_block % 4;
        return in_block / 16 * 16 + (j < 2 ? 2 * t + j : 8 + 2 * t + j - 2);
    }

    // Index in `data` of the number of a feature of a row.
    VCUDA_BOTH int64_t index(int32_t part, int64_t row, int32_t feature) const {
        const int32_t at = place(feature);
        const int32_t chunk = at / 8 ^ static_cast<int32_t>(row % 8);
        return part * part_stride() + feature / kOperandBlock * block_stride() +
               row * kOperandBlock + chunk * 8 + at % 8;
    }
};

// The operand of `rows` rows that weights `w` meet; `data` is NULL.
inline Operand operand_of(const Tiles &w, int32_t parts, int64_t rows) {
    Operand operand;
    operand.parts = parts;
    operand.bf16 = w.kind == VCUDA_BF16;
    operand.blocks = w.steps * (step_width(w.kind) / kOperandBlock);
    operand.capacity = static_cast<int32_t>(ceil_div(rows, kOperandRows) * kOperandRows);
    return operand;
}

// ------------------------------------------------------------------------------------- making one

constexpr int kMaxCopies = 32;

// Rows of float32, RMS-normalised or as they are, as an operand and as float32 rows.
//
//   x [source] = list == NULL ? x [r] : x [list [r]]      r = 0 .. rows - 1
//   v = norm == NULL ? x : x / sqrt(mean(x^2) + eps) * norm
//   out: row r = v; with places: rows places [r][0 .. copies - 1] = v      (out.data NULL: none)
//   y [r] = v                                                              (NULL: none)
//
// A row whose list entry is -1, and a row of the operand that no place names, stay as they are.
// Places spread the rows of a chunk over the experts and read every row once; a list gathers them
// and reads a row once for each expert.
struct NormRows {
    const float *x = nullptr;  // [..][padded_row(k)], the padding is 0
    int32_t k = 0;
    int32_t rows = 0;
    const int32_t *list = nullptr;    // [rows]
    const int32_t *places = nullptr;  // [rows][copies], each names a row of its own
    int32_t copies = 1;               // at most kMaxCopies; used with places only
    const float *norm = nullptr;      // [k], padded with 0 to a multiple of 4
    float eps = 0;
    Operand out;
    float *y = nullptr;           // [rows][padded_row(k)], the padding becomes 0
    int32_t *overflow = nullptr;  // becomes 1 when a float16 part cannot hold a number (or is NaN);
                                  // NULL: not asked
};
void norm_rows(Launcher &to, const NormRows &p);

// x [t] = row ids [t] of the q8, q4 or bf16 matrix `table`, t = 0 .. tokens - 1; its padding is 0.
struct EmbedRows {
    Tiles table;
    const int32_t *ids = nullptr;  // [tokens], in device memory
    int32_t tokens = 0;
    float *x = nullptr;  // [tokens][padded_row(k)]
};
void embed_rows(Launcher &to, const EmbedRows &p);

}  // namespace vcuda
