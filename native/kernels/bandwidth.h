// Reading memory as fast as the device can: what decoding is measured against.
#pragma once

#include <cstdint>

#include "launch.h"

namespace vcuda {

// Read `bytes` (a multiple of 64) of `memory` once. `sink` (one word) keeps the compiler honest.
void read_memory(Launcher &to, const void *memory, uint64_t bytes, int32_t sm_count,
                 uint32_t *sink);

}  // namespace vcuda
