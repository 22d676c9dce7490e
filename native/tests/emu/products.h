// The matrix products of a warp.
#pragma once

#include "block.h"

namespace vcuda::emulated {

// The operand of each lane, ProductS8 and ProductBf16; c is read and written.
void product_s8(void *const (&operands)[32]);
void product_bf16(void *const (&operands)[32]);

}  // namespace vcuda::emulated
