// embed: the row of the embedding that a token's id names
#include "embed.h"

#include "ptx.cuh"

namespace vcuda {

namespace {

constexpr int kBlock = 256;

// Element k of row `row` of a tiled matrix.
__device__ __forceinline__ float element(const Tiles &w, int row, int k) {
    const int64_t tile = row / kRowTile;
    const int g = row % 8;
    const int upper = row % kRowTile / 8;
    const int vectors = step_vectors(w.kind);
    const auto *codes = static_cast<const unsigned char *>(w.codes);
    if (w.kind == VCUDA_BF16) {
        const int64_t vector = (tile * w.steps + k / 64) * vectors + k / 16 % 4;
        const int lane = 4 * g + k % 8 / 2;
        const int word = k % 16 / 8 * 2 + upper;
        const auto *bits = reinterpret_cast<const uint16_t *>(codes);
        return bf16_value(bits[((vector * kWarp + lane) * 4 + word) * 2 + k % 2]);
    }
    const int group = k / kGroup % 4;
    const int64_t step = tile * w.steps + k / 128;
    const auto *scales = reinterpret_cast<const uint16_t *>(w.scales);
    const float scale = half_value(scales[(step * kWarp + 4 * g + group) * 2 + upper]);
    const int lane = 4 * g + k % 16 / 4;
    const int half = k % kGroup / 16;
    int code = 0;
    if (w.kind == VCUDA_Q8) {
        const int64_t vector = step * vectors + group;
        const int word = half * 2 + upper;
        code = static_cast<signed char>(codes[((vector * kWarp + lane) * 4 + word) * 4 + k % 4]);
    } else {
        const int64_t vector = step * vectors + group / 2;
        const int word = group % 2 * 2 + upper;
        const int byte = codes[((vector * kWarp + lane) * 4 + word) * 4 + k % 4];
        const int nibble = half == 0 ? byte & 0xf : byte >> 4;
        code = (nibble ^ 8) - 8;  // two's complement of 4 bits
    }
    return static_cast<float>(code) * scale;
}

// x (k,) = table (n, k) [ids[next]];  position = base + next++
// PRE: one block of kBlock, and no other kernel in flight.   BYTES: a row
__global__ void __launch_bounds__(kBlock)
    embed_kernel(Tiles table, Step *step, float *x, Header *header) {
    __shared__ int row;
    if (threadIdx.x == 0) {
        const auto *ids = reinterpret_cast<const int32_t *>(step + 1);
        row = ids[step->next];
        step->position = step->base + step->next;
        step->next += 1;
        header->nonfinite = 0;
    }
    pdl_trigger();
    __syncthreads();
    for (int k = static_cast<int>(threadIdx.x); k < table.k; k += kBlock) {
        x[k] = element(table, row, k);
    }
}

}  // namespace

void embed(Launcher &to, const Tiles &table, Step *step, float *x, Header *header) {
    launch(to, embed_kernel, dim3(1), dim3(kBlock), 0, table, step, x, header);
}

}  // namespace vcuda
