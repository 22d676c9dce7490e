// The functions of kernels/ptx.cuh on the CPU.
#pragma once

#include <cuda_runtime.h>

namespace vcuda {

#define VCUDA_DYNAMIC_SHARED(type, name) \
    type *name = reinterpret_cast<type *>(::vcuda::emulated::dynamic_shared())

inline void pdl_wait() {
    emulated::note_pdl_wait();
}

inline void pdl_trigger() {
    emulated::note_pdl_trigger();
}

inline float4 load_fresh(const float4 *p) {
    return *p;
}

inline int32_t load_fresh(const int32_t *p) {
    return *p;
}

inline uint4 load_weights(const uint4 *p) {
    return *p;
}

inline uint32_t load_weights(const uint32_t *p) {
    return *p;
}

__forceinline__ void mma_s8(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulated::ProductS8 p{{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
    emulated::meet(emulated::Meet::mma_s8, 0xffffffffu, &p);
    for (int i = 0; i < 4; ++i) c[i] = p.c[i];
}

__forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulated::Product16 p{{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
    emulated::meet(emulated::Meet::mma_bf16, 0xffffffffu, &p);
    for (int i = 0; i < 4; ++i) c[i] = p.c[i];
}

// As __fdividef: a divisor above 2^126 leaves nothing.
inline float fast_divide(float a, float b) {
    return fabsf(b) > 0x1p126f && fabsf(b) <= 3.4028235e38f ? a * 0.0f : a / b;
}

// float16 -> float32, exact.
inline float half_value(uint32_t bits16) {
    const uint32_t sign = (bits16 & 0x8000u) << 16;
    const uint32_t exponent = (bits16 >> 10) & 0x1fu;
    const uint32_t fraction = bits16 & 0x3ffu;
    if (exponent == 0) {  // zero and subnormals: fraction * 2^-24
        const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
        return __uint_as_float(sign | __float_as_uint(magnitude));
    }
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | (fraction << 13));
    return __uint_as_float(sign | ((exponent + 112) << 23) | (fraction << 13));
}

// float32 -> float16, nearest, ties to even; too large is infinite; NaN is 0x7fff as on the GPU.
inline uint32_t half_bits(float v) {
    const uint32_t u = __float_as_uint(v);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return 0x7fffu;
    if (a >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above
    if (a >= 0x38800000u) {                       // 2^-14 and above: normal
        return sign | ((a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u) >> 13);
    }
    const uint32_t exponent = a >> 23;
    if (exponent < 102) return sign;  // below 2^-25
    const uint32_t fraction = (a & 0x7fffffu) | 0x800000u;
    const uint32_t shift = 126 - exponent;  // in units of 2^-24
    const uint32_t whole = fraction >> shift;
    const uint32_t rest = fraction & ((1u << shift) - 1u);
    const uint32_t half = 1u << (shift - 1);
    return sign | (whole + ((rest > half || (rest == half && (whole & 1u))) ? 1u : 0u));
}

}  // namespace vcuda
