// Launching: one way for every kernel, plain, inside a graph, and emulated on the CPU by the tests.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda_try.h"

namespace vcuda {

// Where kernels go, and how many went.
struct Launcher {
    cudaStream_t stream = nullptr;
    int32_t sm_count = 1;   // multiprocessors of the device: how many blocks are worth having
    bool overlap = false;   // programmatic dependent launch: a kernel's blocks may start, and load
                            // weights, while the one before it still runs; each waits (pdl_wait)
                            // before it touches what that one wrote
    uint64_t launches = 0;  // counted here, for PROF
};

#if defined(VCUDA_EMULATE)

}  // namespace vcuda
#include "emulate_launch.h"  // tests: runs the kernel on the CPU, thread by thread
namespace vcuda {

#else

// Launch kernel(args...) on grid x block with `shared` bytes of dynamic shared memory.
template <class... Params, class... Args>
void launch(Launcher &to, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared,
            Args... args) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = to.stream;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = to.overlap ? 1 : 0;
    CUDA_TRY(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
    to.launches += 1;
}

#endif

// A kernel that uses more than 48 KB of dynamic shared memory must be told so, once a device.
template <class... Params>
void allow_shared(void (*kernel)(Params...), size_t bytes) {
    CUDA_TRY(cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)));
}

}  // namespace vcuda
