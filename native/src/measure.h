// The self-test, one product on its own, and the rate of reading memory.
#pragma once

#include <cstdint>

#include "cache.h"
#include "device.h"
#include "vcuda.h"

namespace vcuda {

void selftest(const Device &device, vcuda_prof &prof);

// y [m][n] = x [m][k] * W^T with one matrix of the stack of an entry.
void product(const Device &device, Cache &cache, uint64_t key, int64_t index, const float *x,
             int32_t m, float *y, vcuda_prof &prof);

// The median of `repeats` readings of `bytes` of device memory, in bytes a second.
double read_bandwidth(const Device &device, uint64_t bytes, int32_t repeats, vcuda_prof &prof);

}  // namespace vcuda
