// Whether a device runs kernels made of the products of whole warp groups.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "cuda_try.h"

namespace vcuda {

// Asked at every launch, so each device's answer is kept.
class WgmmaAnswer {
  public:
    // Of the current device: compute capability 9.0, and `has_code()`, whether this build has the
    // kernels for it (sm_90a).
    bool operator()(bool (*has_code)()) {
        int device = 0;
        CUDA_TRY(cudaGetDevice(&device));
        if (device < kRemembered && known_[device] != 0) return known_[device] == 2;
        int major = 0, minor = 0;
        CUDA_TRY(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
        CUDA_TRY(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
        const bool can = major == 9 && minor == 0 && has_code();
        if (device < kRemembered) known_[device] = can ? 2 : 1;
        return can;
    }

  private:
    static constexpr int kRemembered = 64;
    std::atomic<int8_t> known_[kRemembered] = {};  // 0 not yet, 1 no, 2 yes
};

}  // namespace vcuda
