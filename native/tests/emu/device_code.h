// What CUDA C++ has and C++ has not: qualifiers, vector types, threadIdx and its like, and the
// intrinsics that the kernels may use. One that is missing here may not be used in a kernel.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "block.h"

// ------------------------------------------------------------------------------------- qualifiers

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

// Blocks run one after another, so a static object serves every block. All of them come to lie in
// one stretch of memory (shared.ld), which is filled with 0xFF before a block. `noinit` names their
// sections: a section attribute would be lost on objects of templates.
#if !__has_attribute(noinit)
#error "the emulator needs GCC 11 or later"
#endif
#define __shared__ static __attribute__((noinit))

// ------------------------------------------------------------------------------------- vectors

#define VCUDA_VECTOR2(type, name, align)            \
    struct alignas(align) name##2 {                 \
        type x, y;                                  \
    };                                              \
    inline name##2 make_##name##2(type x, type y) { \
        return {x, y};                              \
    }
#define VCUDA_VECTOR4(type, name, align)                            \
    struct alignas(align) name##4 {                                 \
        type x, y, z, w;                                            \
    };                                                              \
    inline name##4 make_##name##4(type x, type y, type z, type w) { \
        return {x, y, z, w};                                        \
    }

VCUDA_VECTOR2(signed char, char, 2)
VCUDA_VECTOR4(signed char, char, 4)
VCUDA_VECTOR2(unsigned char, uchar, 2)
VCUDA_VECTOR4(unsigned char, uchar, 4)
VCUDA_VECTOR2(short, short, 4)
VCUDA_VECTOR4(short, short, 8)
VCUDA_VECTOR2(unsigned short, ushort, 4)
VCUDA_VECTOR4(unsigned short, ushort, 8)
VCUDA_VECTOR2(int, int, 8)
VCUDA_VECTOR4(int, int, 16)
VCUDA_VECTOR2(unsigned, uint, 8)
VCUDA_VECTOR4(unsigned, uint, 16)
VCUDA_VECTOR2(float, float, 8)
VCUDA_VECTOR4(float, float, 16)
#undef VCUDA_VECTOR2
#undef VCUDA_VECTOR4

constexpr int warpSize = 32;

// ------------------------------------------------------------------------------------- threads

__forceinline__ void __syncthreads() {
    vcuda::emulated::meet_block();
}

__forceinline__ void __syncwarp(unsigned mask = 0xffffffffu) {
    vcuda::emulated::meet(vcuda::emulated::Meet::warp, mask, nullptr);
}

inline void __threadfence() {}
inline void __threadfence_block() {}

namespace vcuda::emulated {

// The value of lane `source` of the segment of `width` lanes; the own one where there is none.
template <class T>
__forceinline__ T shuffle(unsigned mask, T value, int source, int width, bool inside) {
    static_assert(sizeof(T) == 4, "the kernels shuffle 32-bit values");
    Exchange exchange{};
    std::memcpy(&exchange.value, &value, 4);
    const int lane = lane_id();
    exchange.source = inside ? (lane & ~(width - 1)) + (source & (width - 1)) : lane;
    meet(Meet::shuffle, mask, &exchange);
    std::memcpy(&value, &exchange.result, 4);
    return value;
}

__forceinline__ uint32_t vote(unsigned mask, bool yes) {
    Vote v{yes, 0};
    meet(Meet::vote, mask, &v);
    return v.ballot;
}

}  // namespace vcuda::emulated

template <class T>
__forceinline__ T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    return vcuda::emulated::shuffle(mask, value, source, width, true);
}

template <class T>
__forceinline__ T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    const int in_segment = vcuda::emulated::lane_id() & (width - 1);
    const int source = in_segment ^ bits;
    return vcuda::emulated::shuffle(mask, value, source, width, source < width);
}

template <class T>
__forceinline__ T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int source = (vcuda::emulated::lane_id() & (width - 1)) + static_cast<int>(delta);
    return vcuda::emulated::shuffle(mask, value, source, width, source < width);
}

template <class T>
__forceinline__ T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int source = (vcuda::emulated::lane_id() & (width - 1)) - static_cast<int>(delta);
    return vcuda::emulated::shuffle(mask, value, source, width, source >= 0);
}

__forceinline__ unsigned __ballot_sync(unsigned mask, int predicate) {
    return vcuda::emulated::vote(mask, predicate != 0);
}

__forceinline__ int __any_sync(unsigned mask, int predicate) {
    return vcuda::emulated::vote(mask, predicate != 0) != 0;
}

__forceinline__ int __all_sync(unsigned mask, int predicate) {
    return vcuda::emulated::vote(mask, predicate == 0) == 0;
}

// ------------------------------------------------------------------------------------- atomics

#define VCUDA_ATOMIC(name, type, expression) \
    inline type name(type *p, type v) {      \
        const type old = *p;                 \
        *p = (expression);                   \
        return old;                          \
    }
VCUDA_ATOMIC(atomicAdd, int,
             static_cast<int>(static_cast<unsigned>(old) + static_cast<unsigned>(v)))
VCUDA_ATOMIC(atomicAdd, unsigned, old + v)
VCUDA_ATOMIC(atomicOr, int, old | v)
VCUDA_ATOMIC(atomicOr, unsigned, old | v)
VCUDA_ATOMIC(atomicMax, int, old > v ? old : v)
VCUDA_ATOMIC(atomicMax, unsigned, old > v ? old : v)
VCUDA_ATOMIC(atomicMin, int, old < v ? old : v)
VCUDA_ATOMIC(atomicMin, unsigned, old < v ? old : v)
VCUDA_ATOMIC(atomicExch, int, v)
VCUDA_ATOMIC(atomicExch, unsigned, v)
#undef VCUDA_ATOMIC

// ------------------------------------------------------------------------------------- numbers

inline uint32_t __float_as_uint(float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    return bits;
}

inline float __uint_as_float(uint32_t bits) {
    float v;
    std::memcpy(&v, &bits, 4);
    return v;
}

inline int __float_as_int(float v) {
    return static_cast<int>(__float_as_uint(v));
}

inline float __int_as_float(int bits) {
    return __uint_as_float(static_cast<uint32_t>(bits));
}

// Nearest, ties to even; saturated; 0 for NaN.
inline int __float2int_rn(float v) {
    if (v != v) return 0;
    if (v >= 2147483648.0f) return 0x7fffffff;
    if (v <= -2147483648.0f) return -0x7fffffff - 1;
    return static_cast<int>(lrintf(v));
}

inline float __fdiv_rn(float a, float b) {
    return a / b;
}
inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline float __fadd_rn(float a, float b) {
    return a + b;
}
inline float __fsub_rn(float a, float b) {
    return a - b;
}
inline float __frcp_rn(float v) {
    return 1.0f / v;
}
inline float __fmaf_rn(float a, float b, float c) {
    return fmaf(a, b, c);
}

namespace vcuda::emulated {
inline float reciprocal_root(float v) {
    return static_cast<float>(1.0 / std::sqrt(static_cast<double>(v)));
}
}  // namespace vcuda::emulated

// macros: the C library has functions of these names on some systems
#define rsqrtf(v) (::vcuda::emulated::reciprocal_root(v))
#define __expf(v) (expf(v))

inline int __popc(uint32_t v) {
    return __builtin_popcount(v);
}
inline int __clz(int v) {
    return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v));
}
inline int __ffs(int v) {
    return __builtin_ffs(v);
}

// c + the sum of four products of bytes.
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) {
        c += static_cast<int8_t>(static_cast<uint32_t>(a) >> (8 * i)) *
             static_cast<int8_t>(static_cast<uint32_t>(b) >> (8 * i));
    }
    return c;
}

inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 4; ++i) c += ((a >> (8 * i)) & 0xffu) * ((b >> (8 * i)) & 0xffu);
    return c;
}

// Byte i of the result: byte (selector nibble i & 7) of y:x; with the nibble's top bit, its sign.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t both = (static_cast<uint64_t>(y) << 32) | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned nibble = (selector >> (4 * i)) & 0xfu;
        unsigned byte = static_cast<unsigned>(both >> (8 * (nibble & 7u))) & 0xffu;
        if (nibble & 8u) byte = (byte & 0x80u) != 0 ? 0xffu : 0u;
        result |= byte << (8 * i);
    }
    return result;
}

// CUDA has these in the global namespace.
#define VCUDA_MINMAX(type)            \
    inline type min(type a, type b) { \
        return b < a ? b : a;         \
    }                                 \
    inline type max(type a, type b) { \
        return a < b ? b : a;         \
    }
VCUDA_MINMAX(int)
VCUDA_MINMAX(unsigned)
VCUDA_MINMAX(long)
VCUDA_MINMAX(unsigned long)
VCUDA_MINMAX(long long)
VCUDA_MINMAX(unsigned long long)
#undef VCUDA_MINMAX
