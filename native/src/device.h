// Devices: counting, describing, and the stream a handle works in. No CUDA type in this header.
#pragma once

#include <cstdint>

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

// Everything a handle has on its device. Destruction never throws; on a lost device it leaks.
class Stream {
  public:
    virtual ~Stream() = default;
    virtual void selftest(vcuda_prof &prof) = 0;
};

// Takes the device into use. Throws Error when the library has no code for it.
Stream *open_stream(int32_t device);

}  // namespace vcuda
