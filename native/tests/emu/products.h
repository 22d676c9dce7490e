// The matrix products of a warp, and the loads of their operands.
#pragma once

#include "block.h"

namespace vcuda::emulated {

// The operand of each lane, ProductS8 or Product16; c is read and written.
void product_s8(void *const (&operands)[32]);
void product_bf16(void *const (&operands)[32]);
void product_f16(void *const (&operands)[32]);

// Matrices: lane l names row l % 8 of matrix l / 8 and gets of each matrix the two elements at row
// l / 4, columns 2 (l % 4) and the next; of the transposed matrix with `transposed`.
void load_matrices(void *const (&operands)[32], bool transposed);

}  // namespace vcuda::emulated
