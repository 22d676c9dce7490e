// Matrix times vector on tiled weights: the products of one token.
//
// The activation is float32 in memory. Each block makes its own operand of it in shared memory: for
// q8 and q4 weights int16 with one float32 scale a group of 32 (split into a high and a low int8
// plane, two columns of one int8 tensor-core product), for bf16 weights three bfloat16 parts that
// add up to the float32 (three columns). So a product is as exact as float32 arithmetic would be,
// to about 2^-16 of a group's largest activation.
#pragma once

#include <cstdint>

#include "launch.h"
#include "layout.h"

namespace vcuda {

// y [n] (+)= W x + bias
struct Gemv {
    Tiles w;
    int32_t matrix = 0;            // of the stack
    const float *x = nullptr;      // [padded_row(k)], the padding is 0; norms likewise
    const float *norm = nullptr;   // [k]: x is RMS-normalised and multiplied by it first; or NULL
    float eps = 0;                 // of the norm
    const float *bias = nullptr;   // [n] or NULL
    float *y = nullptr;            // [n]
    bool add = false;              // add to y (the residual stream)
    int32_t *nonfinite = nullptr;  // set to 1 when an element of y is not finite; or NULL
};
void gemv(Launcher &to, const Gemv &p);

// hidden [n] = silu(gate) * up, gate and up the two matrices of the stack, of the normalised x.
struct GateUp {
    Tiles w;                      // stack of 2
    const float *x = nullptr;     // [k]
    const float *norm = nullptr;  // [k]
    float eps = 0;
    const float *bias = nullptr;  // [2 n] or NULL
    float *hidden = nullptr;      // [n]
};
void gate_up(Launcher &to, const GateUp &p);

// Once a device, before the first launch: lets the kernels use as much shared memory as a block of
// this device may have (vcuda_device_info.shared_per_block).
void prepare_gemv(uint64_t shared_per_block);

// Shared memory that a product's operand may take, and the longest k that this makes possible.
uint64_t operand_shared(uint64_t shared_per_block);
int64_t gemv_max_k(int32_t kind, uint64_t shared_per_block);

}  // namespace vcuda
