// The instructions that C++ has no name for. Every other kernel file is plain CUDA C++ with these
// functions, which is what lets the tests run them on a CPU (VCUDA_EMULATE, native/tests/emu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#if defined(VCUDA_EMULATE)
#include "emulate.h"
#else

namespace vcuda {

// Dynamic shared memory of the block, 16-byte aligned.
#define VCUDA_DYNAMIC_SHARED(type, name)                            \
    extern __shared__ __align__(16) unsigned char vcuda_dynamic_[]; \
    type *name = reinterpret_cast<type *>(vcuda_dynamic_)

// Wait until everything that the kernels before this one wrote can be read. Before it a kernel may
// read weights and what was written two kernels earlier or before that: every kernel calls
// pdl_trigger after its own pdl_wait, so this one has not begun before the kernel before the last
// has ended. No effect without programmatic dependent launch.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Let the next kernel's blocks start as soon as there is room for them. Not before pdl_wait.
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// 16 bytes of weights: read once a token, so they need no place in the L1.
__device__ __forceinline__ uint4 load_weights(const uint4 *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

__device__ __forceinline__ uint32_t load_weights(const uint32_t *p) {
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// What an earlier kernel wrote, past the L1: before pdl_wait nothing promises that a line of it
// that the L1 still holds is the newest.
__device__ __forceinline__ float4 load_fresh(const float4 *p) {
    return __ldcg(p);
}

__device__ __forceinline__ int32_t load_fresh(const int32_t *p) {
    return __ldcg(p);
}

// c [16][8] += a [16][32] * b [32][8], int8 with int32 sums. Of lane 4 g + t: a = (row g, k 4t..),
// (row g+8, k 4t..), (row g, k 16+4t..), (row g+8, k 16+4t..); b = column g: (k 4t..), (k 16+4t..);
// c = (row g, columns 2t, 2t+1), (row g+8, columns 2t, 2t+1).
__device__ __forceinline__ void mma_s8(int (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                       uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c [16][8] += a [16][16] * b [16][8], bfloat16 with float32 sums. Of lane 4 g + t: a = (row g, k
// 2t 2t+1), (row g+8, same), (row g, k 8+2t ..), (row g+8, ..); b = column g: (k 2t 2t+1), (k 8+2t
// ..); c as in mma_s8.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// a / b within two units in the last place, without the branches of an IEEE division. 0 when the
// size of b is above 2^126.
__device__ __forceinline__ float fast_divide(float a, float b) {
    return __fdividef(a, b);
}

// The float32 value of a float16 (exact), and the float16 nearest to a float32 (ties to even).
__device__ __forceinline__ float half_value(uint32_t bits16) {
    float v;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(v) : "r"(bits16));
    return v;
}

__device__ __forceinline__ uint32_t half_bits(float v) {
    uint32_t bits;
    asm("{.reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.u32.u16 %0, h;}" : "=r"(bits) : "f"(v));
    return bits;
}

}  // namespace vcuda

#endif

namespace vcuda {

constexpr unsigned kAllLanes = 0xffffffffu;

// The float32 value of a bfloat16, and the bfloat16 nearest to a finite float32 (ties to even).
__device__ __forceinline__ float bf16_value(uint32_t bits16) {
    return __uint_as_float(bits16 << 16);
}

__device__ __forceinline__ uint32_t bf16_bits(float v) {
    const uint32_t u = __float_as_uint(v);
    return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}

// v, or NaN in the place of an infinity. A mean square that overflowed would make zeros of its row,
// and an infinite router logit would only choose or leave out its expert: both must show instead.
__device__ __forceinline__ float finite_or_nan(float v) {
    return fabsf(v) <= 3.4028235e38f ? v : __uint_as_float(0x7fc00000u);
}

// The warp's index in its block, in a form that the compiler knows to be the same in all lanes:
// what is computed from it then takes one register a warp, and its branches cannot diverge.
__device__ __forceinline__ int warp_index() {
    return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(kAllLanes, v, o);
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, o));
    return v;
}

// The sum over the block, for every thread; `scratch` holds one float a warp. Ends with a barrier.
__device__ __forceinline__ float block_sum(float v, float *scratch) {
    v = warp_sum(v);
    const int warps = static_cast<int>(blockDim.x) / 32;
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0.0f;
    for (int w = 0; w < warps; ++w) v += scratch[w];
    __syncthreads();
    return v;
}

// The sum over the block of kWarps warps, for every thread; `scratch` holds kWarps floats, a
// multiple of 4, and is the caller's for nothing else. One barrier.
template <int kWarps>
__device__ __forceinline__ float block_sum(float v, float *scratch) {
    static_assert(kWarps % 4 == 0, "read as float4");
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
    __syncthreads();
    const auto *quads = reinterpret_cast<const float4 *>(scratch);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps / 4; ++i) {
        const float4 q = quads[i];
        sum += q.x + q.y + (q.z + q.w);
    }
    return sum;
}

}  // namespace vcuda
