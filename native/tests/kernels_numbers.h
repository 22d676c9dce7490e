// The values of 16-bit numbers, for the references on the host.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace vcuda::tests {

inline float half_to_float(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float v = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                            : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
    if (exponent == 31) v = fraction == 0 ? INFINITY : NAN;
    return (bits & 0x8000) != 0 ? -v : v;
}

inline float bf16_to_float(uint16_t bits) {
    const uint32_t u = static_cast<uint32_t>(bits) << 16;
    float v;
    std::memcpy(&v, &u, 4);
    return v;
}

}  // namespace vcuda::tests
