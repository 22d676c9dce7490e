// The self-test, and the rate of reading memory.
#pragma once

#include <cstdint>

#include "device.h"
#include "vcuda.h"

namespace vcuda {

void selftest(const Device &device, vcuda_prof &prof);

// The median of `repeats` readings of `bytes` of device memory, in bytes a second.
double read_bandwidth(const Device &device, uint64_t bytes, int32_t repeats, vcuda_prof &prof);

}  // namespace vcuda
