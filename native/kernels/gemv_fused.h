// Products of several matrices with a vector each, in one launch: what a layer multiplies on a
// device that has only some of its weights. The arithmetic of a row is gemv's.
#pragma once

#include <cstdint>

#include "launch.h"
#include "layout.h"

namespace vcuda {

constexpr int kMaxGemvMembers = 32;  // 40 bytes each, among the kernel's parameters

// y [n] = W x
struct GemvMember {
    void *codes = nullptr;       // of one matrix, as Tiles has them
    uint32_t *scales = nullptr;  // q8 and q4 only
    const float *x = nullptr;    // [padded_row(k)], the padding is 0
    float *y = nullptr;          // [n]
    int32_t n = 0;
    int32_t end = 0;  // row tiles of this member and of those before it
};

// The members of a launch: all of one kind and one k. Neighbours that share x share its operand.
struct GemvTable {
    int32_t kind = 0;
    int32_t k = 0;
    int32_t steps = 0;
    int32_t count = 0;
    GemvMember members[kMaxGemvMembers];

    int32_t tiles() const { return count > 0 ? members[count - 1].end : 0; }
    // Whether there is room for one more.
    bool takes(const Tiles &matrix) const {
        return count < kMaxGemvMembers && matrix.row_tiles <= INT32_MAX - tiles();
    }
    // PRE: takes(matrix), which has the kind and the k of the others.
    void add(const Tiles &matrix, const float *x, float *y) {
        kind = matrix.kind;
        k = matrix.k;
        steps = matrix.steps;
        const int32_t end = tiles() + matrix.row_tiles;
        members[count++] = {matrix.codes, matrix.scales, x, y, matrix.n, end};
    }
};

// PRE: prepare_gemv_fused; k is at most gemv_max_k(kind, ..).
void gemv_fused(Launcher &to, const GemvTable &table);

// Once a device, before the first launch: as prepare_gemv.
void prepare_gemv_fused(uint64_t shared_per_block);

}  // namespace vcuda
