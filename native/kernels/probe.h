// The self-test kernel: proves that copies and launches work, and that there is code for a device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace vcuda {

// What the kernel makes of x; the host computes the same.
__host__ __device__ inline uint32_t probe_value(uint32_t x) {
    return x * 2654435761u + 40503u;
}

// values [n] -> probe_value(values [n]), in place.
void probe(uint32_t *values, int n, cudaStream_t stream);

// The kernel's attributes on the current device; cudaErrorNoKernelImageForDevice or
// cudaErrorUnsupportedPtxVersion: the library has no code for it.
cudaError_t probe_attributes(cudaFuncAttributes *attributes);

}  // namespace vcuda
