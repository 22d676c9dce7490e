// The functions of kernels/ptx_sm90.cuh on the CPU.
#pragma once

#include "async.h"
#include "emulate.h"

namespace vcuda {

// ------------------------------------------------------------------------------------- a warp

__forceinline__ void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulated::Product16 p{{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
    emulated::meet(emulated::Meet::mma_f16, 0xffffffffu, &p);
    for (int i = 0; i < 4; ++i) c[i] = p.c[i];
}

namespace emulated {

__forceinline__ void load_matrix(Meet what, const char *name, uint32_t (&r)[4], const void *row) {
    check_shared(row, 16, 16, name);
    Matrices m{row, {}};
    meet(what, 0xffffffffu, &m);
    for (int i = 0; i < 4; ++i) r[i] = m.r[i];
}

}  // namespace emulated

__forceinline__ void load_matrix_x4(uint32_t (&r)[4], const void *row) {
    emulated::load_matrix(emulated::Meet::load_matrix, "load_matrix_x4", r, row);
}

__forceinline__ void load_matrix_x4_trans(uint32_t (&r)[4], const void *row) {
    emulated::load_matrix(emulated::Meet::load_matrix_trans, "load_matrix_x4_trans", r, row);
}

// ------------------------------------------------------------------------------------- copies

__forceinline__ void copy_async_16(void *shared, const void *global, bool inside) {
    emulated::copy_async(shared, global, inside);
}

__forceinline__ void copy_async_commit() {
    emulated::copy_async_commit();
}

template <int N>
__forceinline__ void copy_async_wait() {
    static_assert(N >= 0, "groups that may still be under way");
    emulated::copy_async_wait(N);
}

// ------------------------------------------------------------------------------------- barriers

__forceinline__ void barrier_init(uint64_t *b, int arrivals) {
    emulated::barrier_init(b, arrivals);
}

__forceinline__ void barrier_init_done() {
    emulated::barrier_init_done();
}

__forceinline__ void barrier_expect(uint64_t *b, uint32_t bytes) {
    emulated::barrier_expect(b, bytes);
}

__forceinline__ void barrier_arrive(uint64_t *b) {
    emulated::barrier_arrive(b);
}

__forceinline__ void barrier_wait(uint64_t *b, int parity) {
    emulated::barrier_wait(b, parity);
}

__forceinline__ void copy_bulk(void *shared, const void *global, uint32_t bytes, uint64_t *b) {
    emulated::copy_bulk(shared, global, bytes, b);
}

__forceinline__ void proxy_fence_shared() {
    emulated::proxy_fence();
}

// ------------------------------------------------------------------------------------- a warpgroup

__forceinline__ void wgmma_fence() {
    emulated::meet(emulated::Meet::wgmma_fence, 0xffffffffu, nullptr);
}

__forceinline__ void wgmma_commit() {
    emulated::meet(emulated::Meet::wgmma_commit, 0xffffffffu, nullptr);
}

template <int N>
__forceinline__ void wgmma_wait() {
    static_assert(N >= 0 && N < 8, "groups that may still be under way");
    size_t under_way = N;
    emulated::wgmma_wait_others(under_way);
    emulated::meet(emulated::Meet::wgmma_wait, 0xffffffffu, &under_way);
}

namespace emulated {

template <int N>
__forceinline__ void wgmma(bool f16, float (&c)[N / 2], const uint32_t (&a)[4], const void *b,
                           bool first = false, size_t block_bytes = 0) {
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "columns that wgmma has");
    GroupProduct p{f16, N, b, a, c, first, block_bytes};
    meet(Meet::wgmma, 0xffffffffu, &p);
}

}  // namespace emulated

template <int N>
__forceinline__ void wgmma_f16(float (&c)[N / 2], const uint32_t (&a)[4], const void *b) {
    emulated::wgmma<N>(true, c, a, b);
}

template <int N>
__forceinline__ void wgmma_f16_first(float (&c)[N / 2], const uint32_t (&a)[4], const void *b) {
    emulated::wgmma<N>(true, c, a, b, true);
}

template <int N>
__forceinline__ void wgmma_f16_columns(float (&c)[N / 2], const uint32_t (&a)[4], const void *b,
                                       uint32_t block_bytes) {
    static_assert(N % 64 == 0, "whole blocks of columns");
    emulated::wgmma<N>(true, c, a, b, false, block_bytes);
}

template <int N>
__forceinline__ void wgmma_bf16(float (&c)[N / 2], const uint32_t (&a)[4], const void *b) {
    emulated::wgmma<N>(false, c, a, b);
}

template <int R>
__forceinline__ void registers_grow() {
    static_assert(R % 8 == 0 && R >= 24 && R <= 256, "registers that setmaxnreg has");
}

template <int R>
__forceinline__ void registers_shrink() {
    static_assert(R % 8 == 0 && R >= 24 && R <= 256, "registers that setmaxnreg has");
}

// ------------------------------------------------------------------------------------- numbers

// Subnormal arguments and results are flushed to zero.
inline float exp2_fast(float v) {
    const float power = fabsf(v) < 0x1p-126f ? 1.0f : exp2f(v);
    return power < 0x1p-126f ? 0.0f : power;
}

inline uint32_t half2_bits(float low, float high) {
    return half_bits(low) | half_bits(high) << 16;
}

inline uint32_t bf16x2_bits(float low, float high) {
    const auto bits = [](float v) {
        const uint32_t u = __float_as_uint(v);
        return v != v ? 0x7fffu : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;  // NaN as on the GPU
    };
    return bits(low) | bits(high) << 16;
}

// Once rounded to float32 and once to float16 is as good as once: 24 bits are 2 * 11 + 2.
inline uint32_t half2_multiply(uint32_t a, uint32_t b) {
    return half2_bits(half_value(a & 0xffffu) * half_value(b & 0xffffu),
                      half_value(a >> 16) * half_value(b >> 16));
}

inline uint32_t half2_subtract(uint32_t a, uint32_t b) {
    return half2_bits(half_value(a & 0xffffu) - half_value(b & 0xffffu),
                      half_value(a >> 16) - half_value(b >> 16));
}

}  // namespace vcuda
