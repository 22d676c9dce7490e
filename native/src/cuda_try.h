// CUDA_TRY: a CUDA call, or an exception that names it.
#pragma once

#include <cuda_runtime.h>

#include "error.h"

namespace vcuda {

// Faults after which every later call in this process fails too: the device is lost.
inline bool is_fatal(cudaError_t error) {
    switch (error) {
        case cudaErrorECCUncorrectable:
        case cudaErrorNvlinkUncorrectable:
        case cudaErrorIllegalAddress:
        case cudaErrorLaunchTimeout:
        case cudaErrorContextIsDestroyed:
        case cudaErrorAssert:
        case cudaErrorHardwareStackError:
        case cudaErrorIllegalInstruction:
        case cudaErrorMisalignedAddress:
        case cudaErrorInvalidAddressSpace:
        case cudaErrorInvalidPc:
        case cudaErrorLaunchFailure:
        case cudaErrorExternalDevice:
        case cudaErrorUnknown:
            return true;
        default:
            return false;
    }
}

[[noreturn]] inline void throw_cuda(cudaError_t error, const char *call, const char *file,
                                    int line) {
    (void)cudaGetLastError();  // a plain error must not show up in the next launch's check
    const char *base = file;
    for (const char *p = file; *p != '\0'; ++p) {
        if (*p == '/' || *p == '\\') base = p + 1;
    }
    constexpr const char *format = "%s: %s (error %d) in %s at %s:%d";
    if (is_fatal(error)) {
        throw DeviceLost(format, cudaGetErrorName(error), cudaGetErrorString(error),
                         static_cast<int>(error), call, base, line);
    }
    throw Error(format, cudaGetErrorName(error), cudaGetErrorString(error), static_cast<int>(error),
                call, base, line);
}

}  // namespace vcuda

#define CUDA_TRY(call)                                                      \
    do {                                                                    \
        const cudaError_t cuda_try_error = (call);                          \
        if (cuda_try_error != cudaSuccess) {                                \
            ::vcuda::throw_cuda(cuda_try_error, #call, __FILE__, __LINE__); \
        }                                                                   \
    } while (0)
