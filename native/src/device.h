// Devices: counting, describing, and taking one into use.
#pragma once

#include <cstdint>
#include <new>

#include "cuda_objects.h"
#include "vcuda.h"

namespace vcuda {

struct DriverVersions {
    int32_t driver;   // 13000 for 13.0; 0: no NVIDIA driver
    int32_t runtime;  // the static runtime in this library
};

DriverVersions driver_versions();

// How many devices can be used; 0 leaves the reason in last_error.
int32_t device_count();

// Describe one device. Throws Error for an index that is not there.
vcuda_device_info describe_device(int32_t index);

// Throws Error unless there is a device `index`.
void require_device(int32_t index);

// The caller's current device comes back when the scope ends.
class DeviceScope {
  public:
    explicit DeviceScope(int device) {
        CUDA_TRY(cudaGetDevice(&before_));
        CUDA_TRY(cudaSetDevice(device));
    }
    // For freeing, which goes on whatever the device answers.
    DeviceScope(int device, std::nothrow_t) noexcept {
        if (cudaGetDevice(&before_) != cudaSuccess) before_ = device;
        if (cudaSetDevice(device) != cudaSuccess) (void)cudaGetLastError();
    }
    ~DeviceScope() { (void)cudaSetDevice(before_); }
    DeviceScope(const DeviceScope &) = delete;
    DeviceScope &operator=(const DeviceScope &) = delete;

  private:
    int before_ = 0;
};

// A device in use.
struct Device {
    int32_t index = 0;
    int32_t sm_count = 0;
    int32_t compute_capability = 0;  // 90 for 9.0
    int32_t code_version = 0;        // what the kernels were compiled for: 90 for compute_90
    uint64_t shared_per_block = 0;   // bytes that a block may opt in to
    Stream stream;                   // everything but uploads runs in it

    // Whether a kernel may start before the one before it has ended (programmatic launch).
    // Code for older devices that the driver translates has no wait in it.
    bool can_overlap() const { return compute_capability >= 90 && code_version >= 90; }
};

// Take a device into use. Throws Error when the library has no code for it. PRE: require_device,
// DeviceScope.
Device open_device(int32_t index);

}  // namespace vcuda
