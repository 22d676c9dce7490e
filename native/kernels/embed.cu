// embed: the row of the embedding that a token's id names
#include "embed.h"

#include "ptx.cuh"
#include "tile_element.cuh"

namespace vcuda {

namespace {

constexpr int kBlock = 256;

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
    for (int k = static_cast<int>(threadIdx.x) * 4; k < table.k; k += kBlock * 4) {
        const float4 v = tile_quad(table, row, k);
        const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (k + i < table.k) x[k + i] = values[i];
        }
    }
}

}  // namespace

void embed(Launcher &to, const Tiles &table, Step *step, float *x, Header *header) {
    launch(to, embed_kernel, dim3(1), dim3(kBlock), 0, table, step, x, header);
}

}  // namespace vcuda
