// The instructions that came with tensor cores of whole warp groups (Hopper), and those around them
// that every architecture from sm_80 on has. Kernels on them are plain CUDA C++ with these
// functions, as those on ptx.cuh are.
//
// A function that the architecture lacks stops the kernel: its callers are compiled for every
// architecture, and launched only where they can run (wgmma_answer.h).
#pragma once

#include "ptx.cuh"

#if defined(VCUDA_EMULATE)
#include "emulate_sm90.h"
#else

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define VCUDA_SM90 1
#endif
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define VCUDA_SM90A 1
#endif

namespace vcuda {

// ------------------------------------------------------------------------- any architecture

// c [16][8] += a [16][16] * b [16][8], float16 with float32 sums; fragments as in mma_bf16.
__device__ __forceinline__ void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t shared_address(const void *shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Four matrices of 8 rows of 16 bytes in shared memory: lane l gives the address of row l % 8 of
// matrix l / 8 and gets, of matrix i in r[i], numbers 2 (l % 4) and the next of row l / 4.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same of the transposed matrices.
__device__ __forceinline__ void load_matrix_x4_trans(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// 16 bytes on their way to shared memory, past the L1; zeros when not `inside`, and then nothing is
// read. They are there once the thread has waited for the group that it committed them with.
__device__ __forceinline__ void copy_async_16(void *shared, const void *global, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(inside ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copy_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until at most N of the thread's groups are still on their way.
template <int N>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// 2^v to two units in the last place, subnormals flushed to 0.
__device__ __forceinline__ float exp2_fast(float v) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
    return result;
}

// Two numbers rounded to nearest (ties to even), `low` in the low half.
__device__ __forceinline__ uint32_t half2_bits(float low, float high) {
    uint32_t bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

__device__ __forceinline__ uint32_t bf16x2_bits(float low, float high) {
    uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

// Two float16 at a time, each rounded to nearest.
__device__ __forceinline__ uint32_t half2_multiply(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

__device__ __forceinline__ uint32_t half2_subtract(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// Adds four numbers to four in memory, of which this thread has the only sum: the memory does it
// (it takes subnormal numbers for 0) and the thread does not wait for it, where it can.
__device__ __forceinline__ void add_to_memory(float4 *p, const float4 &v) {
#if defined(VCUDA_SM90)
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v.x),
                 "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
#else
    const float4 before = *p;
    *p = make_float4(before.x + v.x, before.y + v.y, before.z + v.z, before.w + v.w);
#endif
}

// --------------------------------------------------------------- bulk copies and their barriers

// A barrier in shared memory whose phase ends when `arrivals` threads have arrived and as many
// bytes have come as were expected. One thread makes it; before others use it the block
// synchronises.
__device__ __forceinline__ void barrier_init(uint64_t *b, int arrivals) {
#if defined(VCUDA_SM90)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals)
                 : "memory");
#else
    __trap();
#endif
}

// After the last barrier_init of the thread: the copy engine sees them too.
__device__ __forceinline__ void barrier_init_done() {
#if defined(VCUDA_SM90)
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
    __trap();
#endif
}

// Arrive, and let the phase wait for `bytes` more.
__device__ __forceinline__ void barrier_expect(uint64_t *b, uint32_t bytes) {
#if defined(VCUDA_SM90)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)),
                 "r"(bytes)
                 : "memory");
#else
    __trap();
#endif
}

__device__ __forceinline__ void barrier_arrive(uint64_t *b) {
#if defined(VCUDA_SM90)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
#else
    __trap();
#endif
}

// The same where `really` is true, without a branch, at which the compiler would make products of
// warp groups that are under way end.
__device__ __forceinline__ void barrier_arrive_if(uint64_t *b, bool really) {
#if defined(VCUDA_SM90)
    asm volatile(
        "{\n"
        ".reg .pred really;\n"
        "setp.ne.u32 really, %1, 0;\n"
        "@really mbarrier.arrive.shared::cta.b64 _, [%0];\n"
        "}" ::"r"(shared_address(b)),
        "r"(really ? 1 : 0)
        : "memory");
#else
    __trap();
#endif
}

// Until the phase of this parity has ended: 0 for the first one. A new barrier has parity 1 behind
// it.
__device__ __forceinline__ void barrier_wait(uint64_t *b, int parity) {
#if defined(VCUDA_SM90)
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(b)),
        "r"(parity)
        : "memory");
#else
    __trap();
#endif
}

// A stretch of global memory on its way to shared memory, counted by `b` when it is there. Both
// 16-byte aligned, `bytes` a multiple of 16. The thread's copies end before its block may.
__device__ __forceinline__ void copy_bulk(void *shared, const void *global, uint32_t bytes,
                                          uint64_t *b) {
#if defined(VCUDA_SM90)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(b))
        : "memory");
#else
    __trap();
#endif
}

// What the thread stored in shared memory before is there for the copy engine and for wgmma after.
__device__ __forceinline__ void proxy_fence_shared() {
#if defined(VCUDA_SM90)
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
    __trap();
#endif
}

// ------------------------------------------------------------------ products of a warp group

// Before a product reads registers that anything else wrote.
__device__ __forceinline__ void wgmma_fence() {
#if defined(VCUDA_SM90A)
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
    __trap();
#endif
}

__device__ __forceinline__ void wgmma_commit() {
#if defined(VCUDA_SM90A)
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
    __trap();
#endif
}

// Until at most N committed groups are unfinished: the registers and the shared memory of the
// others may be written again, and their sums read.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
#if defined(VCUDA_SM90A)
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#else
    __trap();
#endif
}

// How wgmma finds its operand in shared memory: rows of 128 bytes that follow each other, eight of
// them 1024 bytes, with the 128-byte swizzle.
__device__ __forceinline__ uint64_t swizzled_rows(const void *b) {
    constexpr uint64_t swizzle_128 = 1ull << 62;
    constexpr uint64_t eight_rows = static_cast<uint64_t>(1024 >> 4) << 32;
    constexpr uint64_t unused = 1ull << 16;  // the stride that this swizzle does not have
    return swizzle_128 | eight_rows | unused | ((shared_address(b) & 0x3ffffu) >> 4);
}

// The same of rows that are positions along k, of 64 columns each: `block_bytes` further on those
// of the next 64 columns.
__device__ __forceinline__ uint64_t swizzled_columns(const void *b, uint32_t block_bytes) {
    constexpr uint64_t swizzle_128 = 1ull << 62;
    constexpr uint64_t eight_rows = static_cast<uint64_t>(1024 >> 4) << 32;
    return swizzle_128 | eight_rows | static_cast<uint64_t>(block_bytes >> 4) << 16 |
           ((shared_address(b) & 0x3ffffu) >> 4);
}

// The accumulators of a product of N columns: registers %0 .. %(N / 2 - 1), and their names.
#define VCUDA_SUMS_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define VCUDA_SUMS_32 \
    VCUDA_SUMS_16     \
    ", %8, %9, %10, %11, %12, %13, %14, %15"
#define VCUDA_SUMS_64                          \
    VCUDA_SUMS_32                              \
    ", %16, %17, %18, %19, %20, %21, %22, %23" \
    ", %24, %25, %26, %27, %28, %29, %30, %31"
#define VCUDA_SUMS_96                          \
    VCUDA_SUMS_64                              \
    ", %32, %33, %34, %35, %36, %37, %38, %39" \
    ", %40, %41, %42, %43, %44, %45, %46, %47"
#define VCUDA_SUMS_112 \
    VCUDA_SUMS_96      \
    ", %48, %49, %50, %51, %52, %53, %54, %55"
#define VCUDA_SUMS_128 \
    VCUDA_SUMS_112     \
    ", %56, %57, %58, %59, %60, %61, %62, %63"
#define VCUDA_SUMS_144 \
    VCUDA_SUMS_128     \
    ", %64, %65, %66, %67, %68, %69, %70, %71"
#define VCUDA_SUMS_160 \
    VCUDA_SUMS_144     \
    ", %72, %73, %74, %75, %76, %77, %78, %79"
#define VCUDA_SUMS_192                         \
    VCUDA_SUMS_160                             \
    ", %80, %81, %82, %83, %84, %85, %86, %87" \
    ", %88, %89, %90, %91, %92, %93, %94, %95"
#define VCUDA_SUMS_224                             \
    VCUDA_SUMS_192                                 \
    ", %96, %97, %98, %99, %100, %101, %102, %103" \
    ", %104, %105, %106, %107, %108, %109, %110, %111"
#define VCUDA_SUMS_256                                 \
    VCUDA_SUMS_224                                     \
    ", %112, %113, %114, %115, %116, %117, %118, %119" \
    ", %120, %121, %122, %123, %124, %125, %126, %127"
#define VCUDA_8_FLOATS(how, c, i)                                                         \
    how(c[i]), how(c[i + 1]), how(c[i + 2]), how(c[i + 3]), how(c[i + 4]), how(c[i + 5]), \
        how(c[i + 6]), how(c[i + 7])
#define VCUDA_FLOATS_16(how, c, i) VCUDA_8_FLOATS(how, c, i)
#define VCUDA_FLOATS_32(how, c, i) VCUDA_8_FLOATS(how, c, i), VCUDA_8_FLOATS(how, c, i + 8)
#define VCUDA_FLOATS_64(how, c, i) VCUDA_FLOATS_32(how, c, i), VCUDA_FLOATS_32(how, c, i + 16)
#define VCUDA_FLOATS_96(how, c, i) VCUDA_FLOATS_64(how, c, i), VCUDA_FLOATS_32(how, c, i + 32)
#define VCUDA_FLOATS_128(how, c, i) VCUDA_FLOATS_64(how, c, i), VCUDA_FLOATS_64(how, c, i + 32)
#define VCUDA_FLOATS_144(how, c, i) VCUDA_FLOATS_128(how, c, i), VCUDA_FLOATS_16(how, c, i + 64)
#define VCUDA_FLOATS_160(how, c, i) VCUDA_FLOATS_128(how, c, i), VCUDA_FLOATS_32(how, c, i + 64)
#define VCUDA_FLOATS_192(how, c, i) VCUDA_FLOATS_128(how, c, i), VCUDA_FLOATS_64(how, c, i + 64)
#define VCUDA_FLOATS_256(how, c, i) VCUDA_FLOATS_128(how, c, i), VCUDA_FLOATS_128(how, c, i + 64)
#define VCUDA_ADDED(x) "+f"(x)
#define VCUDA_MADE(x) "=f"(x)

// a0 .. a3 and the descriptor are the operands behind the sums. add: 1, or 0 when there are no sums
// before. columns: 1 for rows along k.
#define VCUDA_WGMMA(N, type, how, add, columns, a0, a1, a2, a3, b)                                \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type                  \
                 " {" VCUDA_SUMS_##N "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", " add \
                                     ", 1, 1, " columns ";"                                       \
                 : VCUDA_FLOATS_##N(how, c, 0)                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(operand))
#define VCUDA_WGMMA_OF(type)                                                                       \
    static_assert(                                                                                 \
        N == 32 || N == 64 || N == 96 || N == 128 || N == 144 || N == 160 || N == 192 || N == 256, \
        "the columns that have a line here");                                                      \
    const uint64_t operand = swizzled_rows(b_rows);                                                \
    if constexpr (N == 32) VCUDA_WGMMA(32, type, VCUDA_ADDED, "1", "0", 16, 17, 18, 19, 20);       \
    if constexpr (N == 64) VCUDA_WGMMA(64, type, VCUDA_ADDED, "1", "0", 32, 33, 34, 35, 36);       \
    if constexpr (N == 96) VCUDA_WGMMA(96, type, VCUDA_ADDED, "1", "0", 48, 49, 50, 51, 52);       \
    if constexpr (N == 128) VCUDA_WGMMA(128, type, VCUDA_ADDED, "1", "0", 64, 65, 66, 67, 68);     \
    if constexpr (N == 144) VCUDA_WGMMA(144, type, VCUDA_ADDED, "1", "0", 72, 73, 74, 75, 76);     \
    if constexpr (N == 160) VCUDA_WGMMA(160, type, VCUDA_ADDED, "1", "0", 80, 81, 82, 83, 84);     \
    if constexpr (N == 192) VCUDA_WGMMA(192, type, VCUDA_ADDED, "1", "0", 96, 97, 98, 99, 100);    \
    if constexpr (N == 256) VCUDA_WGMMA(256, type, VCUDA_ADDED, "1", "0", 128, 129, 130, 131, 132)

// c [64][N] += a [64][16] * b [16][N], 16-bit numbers with float32 sums, by the four warps of a
// warp group: warp w has rows 16 w .. 16 w + 15 of a and c, in the fragments of mma_f16 (c[4 j ..]
// are columns 8 j ..). b: shared memory, N rows of 128 bytes with the 128-byte swizzle, 16 numbers
// of each from b_rows on, which is row 0 or 32, 64, 96 bytes into it; row 0 is 1024-byte aligned.
// Asynchronous: see wgmma_fence, wgmma_commit and wgmma_wait.
template <int N>
__device__ __forceinline__ void wgmma_f16(float (&c)[N / 2], const uint32_t (&a)[4],
                                          const void *b_rows) {
#if defined(VCUDA_SM90A)
    VCUDA_WGMMA_OF("f16");
#else
    __trap();
#endif
}

// c = a * b: whatever c held before.
template <int N>
__device__ __forceinline__ void wgmma_f16_first(float (&c)[N / 2], const uint32_t (&a)[4],
                                                const void *b_rows) {
#if defined(VCUDA_SM90A)
    static_assert(N == 64 || N == 128, "the columns that have a line here");
    const uint64_t operand = swizzled_rows(b_rows);
    if constexpr (N == 64) VCUDA_WGMMA(64, "f16", VCUDA_MADE, "0", "0", 32, 33, 34, 35, 36);
    if constexpr (N == 128) VCUDA_WGMMA(128, "f16", VCUDA_MADE, "0", "0", 64, 65, 66, 67, 68);
#else
    __trap();
#endif
}

// c += a * b of a b that lies the other way round: 16 rows of 128 bytes from b_rows on, 1024-byte
// aligned, one a place along k, have columns 0 - 63, with the 128-byte swizzle; columns 64 - 127
// lie block_bytes behind them.
template <int N>
__device__ __forceinline__ void wgmma_f16_columns(float (&c)[N / 2], const uint32_t (&a)[4],
                                                  const void *b_rows, uint32_t block_bytes) {
#if defined(VCUDA_SM90A)
    static_assert(N == 64 || N == 128, "the columns that have a line here");
    const uint64_t operand = swizzled_columns(b_rows, block_bytes);
    if constexpr (N == 64) VCUDA_WGMMA(64, "f16", VCUDA_ADDED, "1", "1", 32, 33, 34, 35, 36);
    if constexpr (N == 128) VCUDA_WGMMA(128, "f16", VCUDA_ADDED, "1", "1", 64, 65, 66, 67, 68);
#else
    __trap();
#endif
}

template <int N>
__device__ __forceinline__ void wgmma_bf16(float (&c)[N / 2], const uint32_t (&a)[4],
                                           const void *b_rows) {
#if defined(VCUDA_SM90A)
    VCUDA_WGMMA_OF("bf16");
#else
    __trap();
#endif
}

#undef VCUDA_WGMMA_OF
#undef VCUDA_WGMMA
#undef VCUDA_ADDED
#undef VCUDA_MADE
#undef VCUDA_8_FLOATS
#undef VCUDA_FLOATS_16
#undef VCUDA_SUMS_16
#undef VCUDA_FLOATS_32
#undef VCUDA_SUMS_32
#undef VCUDA_FLOATS_64
#undef VCUDA_SUMS_64
#undef VCUDA_FLOATS_96
#undef VCUDA_SUMS_96
#undef VCUDA_FLOATS_128
#undef VCUDA_SUMS_112
#undef VCUDA_SUMS_128
#undef VCUDA_FLOATS_128
#undef VCUDA_SUMS_144
#undef VCUDA_FLOATS_144
#undef VCUDA_SUMS_160
#undef VCUDA_FLOATS_160
#undef VCUDA_SUMS_192
#undef VCUDA_FLOATS_192
#undef VCUDA_SUMS_224
#undef VCUDA_SUMS_256
#undef VCUDA_FLOATS_256

// Registers a thread may have from here on, for all threads of the warp group: a multiple of 8.
template <int R>
__device__ __forceinline__ void registers_grow() {
#if defined(VCUDA_SM90A)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(R));
#else
    __trap();
#endif
}

template <int R>
__device__ __forceinline__ void registers_shrink() {
#if defined(VCUDA_SM90A)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(R));
#else
    __trap();
#endif
}

}  // namespace vcuda

#endif

namespace vcuda {

#if defined(VCUDA_EMULATE)
inline void barrier_arrive_if(uint64_t *b, bool really) {
    if (really) barrier_arrive(b);
}

inline void add_to_memory(float4 *p, const float4 &v) {
    *p = make_float4(p->x + v.x, p->y + v.y, p->z + v.z, p->w + v.w);
}
#endif

// Keeps what computes these registers on the side of it where it is written. Between a wgmma_wait
// and the wgmma_fence that the products which read them follow: an instruction that drifts in among
// the products makes the compiler run these one by one.
__device__ __forceinline__ void settle(int &a) {
    asm volatile("" : "+r"(a));
}

__device__ __forceinline__ void settle(uint32_t (&a)[4]) {
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

// The same of sums: they are read behind the wgmma_wait that this follows, not before it.
template <int N>
__device__ __forceinline__ void settle(float (&c)[N]) {
#if !defined(VCUDA_EMULATE)
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(c[i])::"memory");
#endif
}

}  // namespace vcuda
