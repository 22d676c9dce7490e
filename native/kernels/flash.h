// Causal attention of many tokens.
#pragma once

#include <cstdint>

#include "kv_rows.h"
#include "launch.h"
#include "operand_rows.h"

namespace vcuda {

// out row i = softmax(q_i K^T / sqrt(head_dim)) V of the token at position + i, over the positions
// up to its own. The rows of `out` that do not belong to tokens stay as they are.
struct Flash {
    const uint16_t *q = nullptr;  // of qkv_rows(): [parts][tokens][heads][head_dim]
    int32_t parts = 1;            // of the queries and of the weights of the sum: 2 is exact to
                                  // 2^-21, as long as kv.parts holds K/V exactly too
    KvOperand kv;                 // of kv_operand(): kv.parts <= parts
    int32_t heads = 0, kv_heads = 0, head_dim = 0;
    int32_t tokens = 0, position = 0;
    int32_t window = 0;           // positions seen, the own one included; 0: all
    float *scratch = nullptr;     // [flash_scratch floats], 16-byte aligned
    Operand out;                  // of Wo: features from heads * head_dim on are written as 0
    int32_t *overflow = nullptr;  // set to 1 when a result is above the largest float16
};
void flash(Launcher &to, const Flash &p);

// The floats that flash needs on a device of sm_count multiprocessors, whatever else it is given.
uint64_t flash_scratch(int32_t head_dim, int32_t sm_count);

// Whether the current device runs the products of warp groups (flash_wgmma.cu): compute capability
// 9.0, and a build that has code for it (sm_90a).
bool flash_can_use_wgmma();

// For tests: which kernels flash takes when there is a choice, with one part and head_dim up to
// 128. Automatic: those of warp groups where the device runs them. Everything else, two parts or a
// larger head_dim, takes mma.sync on every device.
enum class FlashKernels { automatic, mma, wgmma };
void choose_flash_kernels(FlashKernels which);

}  // namespace vcuda
