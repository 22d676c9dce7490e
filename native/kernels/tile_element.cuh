// Numbers of a tiled matrix, read one row at a time: the lookup of embeddings.
#pragma once

#include <cstdint>

#include "layout.h"
#include "ptx.cuh"

namespace vcuda {

// Elements k .. k + 3 of row `row` of a q8, q4 or bf16 matrix. PRE: k % 4 == 0, k < w.k; what lies
// behind w.k is 0, as in every tile.
__device__ __forceinline__ float4 tile_quad(const Tiles &w, int row, int k) {
    const int64_t tile = row / kRowTile;
    const int g = row % 8;
    const int upper = row % kRowTile / 8;
    const int vectors = step_vectors(w.kind);
    const auto *words = static_cast<const uint32_t *>(w.codes);
    if (w.kind == VCUDA_BF16) {
        const int64_t vector = (tile * w.steps + k / 64) * vectors + k / 16 % 4;
        const int lane = 4 * g + k % 8 / 2;  // and the next one
        const int word = k % 16 / 8 * 2 + upper;
        const uint32_t low = words[(vector * kWarp + lane) * 4 + word];
        const uint32_t high = words[(vector * kWarp + lane + 1) * 4 + word];
        return make_float4(bf16_value(low & 0xffffu), bf16_value(low >> 16),
                           bf16_value(high & 0xffffu), bf16_value(high >> 16));
    }
    const int group = k / kGroup % 4;
    const int64_t step = tile * w.steps + k / 128;
    const auto *scales = reinterpret_cast<const uint16_t *>(w.scales);
    const float scale = half_value(scales[(step * kWarp + 4 * g + group) * 2 + upper]);
    const int lane = 4 * g + k % 16 / 4;
    const int half = k % kGroup / 16;
    const bool q8 = w.kind == VCUDA_Q8;
    const int64_t vector = step * vectors + (q8 ? group : group / 2);
    const int word = (q8 ? half : group % 2) * 2 + upper;
    // q8: bytes. q4: the nibbles of one half, moved to the top of their bytes: 16 times too large.
    uint32_t codes = words[(vector * kWarp + lane) * 4 + word];
    if (!q8) codes = (half == 0 ? codes << 4 : codes) & 0xf0f0f0f0u;
    const int shift = q8 ? 0 : 4;
    const auto value = [&](int i) {
        const int code = static_cast<signed char>(codes >> (8 * i) & 0xffu);
        return static_cast<float>(code >> shift) * scale;
    };
    return make_float4(value(0), value(1), value(2), value(3));
}

}  // namespace vcuda
