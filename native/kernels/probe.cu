// probe: values[i] = probe_value(values[i])
#include "probe.h"

#include "cuda_try.h"
#include "launch.h"
#include "layout.h"

namespace vcuda {

// ------------------------------------------------------------------------------------- kernels

// values (n,) -> values (n,)
// PRE: grid * block >= n.   BYTES: 8 n
__global__ void probe_kernel(uint32_t *__restrict__ values, int n) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) values[i] = probe_value(values[i]);
}

// ------------------------------------------------------------------------------------ launchers

void probe(uint32_t *values, int n, cudaStream_t stream) {
    constexpr int block = 128;
    Launcher to;
    to.stream = stream;
    launch(to, probe_kernel, static_cast<unsigned>(ceil_div(n, block)), block, 0, values, n);
}

cudaError_t probe_attributes(cudaFuncAttributes *attributes) {
    return cudaFuncGetAttributes(attributes, probe_kernel);
}

}  // namespace vcuda
