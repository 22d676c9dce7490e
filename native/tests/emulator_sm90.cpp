// The emulated instructions of kernels/ptx_sm90.cuh, each against its definition.
#include "emulator_case.h"
#include "ptx_sm90.cuh"

namespace vcuda {

namespace {

uint32_t random_word() {
    static uint32_t state = 54321;
    state = state * 1664525u + 1013904223u;
    return state ^ (state >> 15);
}

// An integer of [-64, 64]: products and their sums are exact in any order.
float random_integer() {
    return static_cast<float>(static_cast<int>(random_word() % 129) - 64);
}

// ------------------------------------------------------------------------------------- a warp

// c [16][8] += a [16][16] * b [16][8]; the fragments of a come through load_matrix_x4, that of b
// through load_matrix_x4_trans, which makes columns of the rows.
__global__ void product_f16_kernel(const uint16_t *a, const uint16_t *b, float *c) {
    __shared__ __align__(16) uint16_t sa[16 * 16], sb[16 * 16];
    const int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4;
    for (int i = lane; i < 256; i += 32) {
        sa[i] = a[i];
        sb[i] = i % 16 < 8 ? b[i / 16 * 8 + i % 16] : 0;
    }
    __syncwarp();
    uint32_t fa[4], fb[4];
    load_matrix_x4(fa, sa + (lane % 16) * 16 + lane / 16 * 8);
    load_matrix_x4_trans(fb, sb + (lane % 16) * 16 + lane / 16 * 8);
    float fc[4];
    for (int i = 0; i < 4; ++i) fc[i] = c[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2];
    mma_f16(fc, fa, fb[0], fb[1]);
    for (int i = 0; i < 4; ++i) c[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = fc[i];
    if (fb[2] != 0 || fb[3] != 0) c[0] = -1e9f;
}

void products_f16() {
    std::vector<uint16_t> a(16 * 16), b(16 * 8);
    std::vector<float> c(16 * 8);
    for (auto &v : a) v = static_cast<uint16_t>(half_bits(random_integer()));
    for (auto &v : b) v = static_cast<uint16_t>(half_bits(random_integer() / 32));
    for (auto &v : c) v = random_integer();
    Device<uint16_t> da(a), db(b);
    Device<float> dc(c);
    Launcher to;
    launch(to, product_f16_kernel, 1, 32, 0, da.p, db.p, dc.p);
    const auto seen = dc.read();
    for (size_t r = 0; r < 16; ++r) {
        for (size_t n = 0; n < 8; ++n) {
            float sum = c[r * 8 + n];
            for (size_t k = 0; k < 16; ++k) {
                sum += half_value(a[r * 16 + k]) * half_value(b[k * 8 + n]);
            }
            REQUIRE(seen[r * 8 + n] == sum);
        }
    }
}

__global__ void matrices_kernel(const uint16_t *in, uint32_t *out, uint32_t *out_trans) {
    __shared__ __align__(16) uint16_t rows[32][8];
    const int lane = static_cast<int>(threadIdx.x);
    for (int i = 0; i < 8; ++i) rows[lane][i] = in[lane * 8 + i];
    __syncwarp();
    uint32_t r[4];
    load_matrix_x4(r, rows[lane]);
    for (int i = 0; i < 4; ++i) out[lane * 4 + i] = r[i];
    load_matrix_x4_trans(r, rows[lane ^ 8]);  // matrices 0 and 1 exchanged, 2 and 3 too
    for (int i = 0; i < 4; ++i) out_trans[lane * 4 + i] = r[i];
}

void matrices() {
    std::vector<uint16_t> in(256);
    for (size_t i = 0; i < 256; ++i) in[i] = static_cast<uint16_t>(i);
    Device<uint16_t> given(in);
    Device<uint32_t> out(128), trans(128);
    Launcher to;
    launch(to, matrices_kernel, 1, 32, 0, given.p, out.p, trans.p);
    const auto at = [](uint32_t matrix, uint32_t row, uint32_t column) {
        return matrix * 64 + row * 8 + column;
    };
    const auto seen = out.read(), seen_trans = trans.read();
    for (uint32_t lane = 0; lane < 32; ++lane) {
        const uint32_t g = lane / 4, c = lane % 4 * 2;
        for (uint32_t i = 0; i < 4; ++i) {
            REQUIRE(seen[lane * 4 + i] == (at(i, g, c) | at(i, g, c + 1) << 16));
            const uint32_t other = i ^ 1;
            REQUIRE(seen_trans[lane * 4 + i] == (at(other, c, g) | at(other, c + 1, g) << 16));
        }
    }
}

// ------------------------------------------------------------------------------------- copies

// Three copies a thread in three groups. What has not been waited for is not there; the last one is
// zeros when its index is not inside.
__global__ void copy_async_kernel(const uint4 *in, uint32_t *out, int inside) {
    VCUDA_DYNAMIC_SHARED(uint4, stage);
    const unsigned tid = threadIdx.x, n = blockDim.x;
    for (unsigned i = 0; i < 3; ++i) {
        stage[i * n + tid] = make_uint4(7, 7, 7, 7);
        const bool in_bounds = static_cast<int>(i * n + tid) < inside;
        copy_async_16(&stage[i * n + tid], in + (in_bounds ? i * n + tid : 0), in_bounds);
        copy_async_commit();
    }
    out[tid] = stage[tid].x;
    copy_async_wait<2>();
    out[n + tid] = stage[tid].w;
    out[2 * n + tid] = stage[n + tid].x;
    copy_async_wait<0>();
    out[3 * n + tid] = stage[n + tid].y;
    out[4 * n + tid] = stage[2 * n + tid].z;
    __syncthreads();
    out[5 * n + tid] = stage[2 * n + (tid + 1) % n].z;
}

void copies_async() {
    constexpr uint32_t n = 64;
    std::vector<uint4> in(3 * n);
    for (uint32_t i = 0; i < 3 * n; ++i) in[i] = make_uint4(4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3);
    in.resize(3 * n - 5);
    Device<uint4> given(in);
    Device<uint32_t> out(6 * n);
    Launcher to;
    launch(to, copy_async_kernel, 1, n, 3 * n * 16, given.p, out.p, static_cast<int>(in.size()));
    const auto seen = out.read();
    for (uint32_t i = 0; i < n; ++i) {
        const auto third = [&](uint32_t j) { return j < n - 5 ? 4 * (2 * n + j) + 2 : 0; };
        REQUIRE(seen[i] == 0xffffffffu);
        REQUIRE(seen[n + i] == 4 * i + 3);
        REQUIRE(seen[2 * n + i] == 0xffffffffu);
        REQUIRE(seen[3 * n + i] == 4 * (n + i) + 1);
        REQUIRE(seen[4 * n + i] == third(i));
        REQUIRE(seen[5 * n + i] == third((i + 1) % n));
    }
}

// ------------------------------------------------------------------------------------- barriers

// A producing warp and three that consume, with three stages and the two barriers of each. Every
// consumer adds up what came; the last tile is short.
constexpr unsigned kTile = 256;  // numbers
constexpr int kStages = 3;

__global__ void ring_kernel(const uint32_t *in, unsigned n, uint32_t *sums) {
    VCUDA_DYNAMIC_SHARED(uint32_t, stages);
    __shared__ uint64_t full[kStages], empty[kStages];
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, 3);
        }
        barrier_init_done();
    }
    __syncthreads();
    const unsigned tiles = (n + kTile - 1) / kTile;
    uint32_t sum = 0;
    int stage = 0, parity = 0;
    for (unsigned tile = 0; tile < tiles; ++tile) {
        const unsigned count = n - tile * kTile < kTile ? n - tile * kTile : kTile;
        uint32_t *to = stages + static_cast<unsigned>(stage) * kTile;
        if (warp == 3) {
            barrier_wait(empty + stage, parity ^ 1);
            if (lane == 0) barrier_expect(full + stage, count * 4);
            __syncwarp();
            // each half by another lane
            const unsigned half = count / 2;
            if (lane < 2)
                copy_bulk(to + lane * half, in + tile * kTile + lane * half, half * 4,
                          full + stage);
        } else {
            barrier_wait(full + stage, parity);
            for (unsigned i = lane; i < count; i += 32) sum += to[i] * (warp + 1);
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + stage);
        }
        stage += 1;
        if (stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
    if (warp < 3) sums[threadIdx.x] = sum;
}

void ring() {
    constexpr unsigned n = 10 * kTile + 64;
    std::vector<uint32_t> in(n);
    for (auto &v : in) v = random_word() % 1000;
    std::vector<uint32_t> expected(96, 0);
    for (unsigned i = 0; i < n; ++i) {
        for (unsigned w = 0; w < 3; ++w) expected[w * 32 + i % 32] += in[i] * (w + 1);
    }
    Device<uint32_t> given(in);
    for (uint32_t schedule : {0u, 1u, 77u, 78u}) {
        fake_schedule(schedule);
        Device<uint32_t> sums(96);
        Launcher to;
        launch(to, ring_kernel, 2, 128, kStages * kTile * 4, given.p, n, sums.p);
        REQUIRE(sums.read() == expected);
    }
}

// Threads of two warps hand a number to and fro; barriers alone keep them in step.
__global__ void phases_kernel(int *out) {
    __shared__ uint64_t there, back;
    __shared__ int value;
    if (threadIdx.x == 32) {
        barrier_init(&there, 1);
        barrier_init(&back, 32);
        barrier_init_done();
        value = 0;
    }
    __syncthreads();
    for (int i = 0; i < 9; ++i) {
        if (threadIdx.x == 0) {
            value = value * 3 + 1;
            barrier_arrive(&there);
        }
        if (threadIdx.x < 32) {
            barrier_wait(&back, i % 2);
            __syncwarp();  // else the next phase may end before a lane has seen the end of this one
        } else {
            barrier_wait(&there, i % 2);
            barrier_wait(&there, i % 2);  // that phase is behind us still
            if (threadIdx.x == 40) value += 1;
            barrier_arrive(&back);
        }
    }
    if (threadIdx.x == 0) *out = value;
}

void phases() {
    int expected = 0;
    for (int i = 0; i < 9; ++i) expected = expected * 3 + 2;
    for (uint32_t schedule : {0u, 1u, 5u}) {
        fake_schedule(schedule);
        Device<int> out(1);
        Launcher to;
        launch(to, phases_kernel, 1, 64, 0, out.p);
        REQUIRE(out.read()[0] == expected);
    }
}

// ------------------------------------------------------------------------------------- a warpgroup

// c [128][N] += a [128][64] * b [N][64]^T by two warpgroups. b lies swizzled in global memory, as
// an Operand does, and comes by a bulk copy; or threads put it where it belongs.
template <int N, bool kHalf>
__global__ void group_product_kernel(const uint16_t *a, const uint16_t *b, float *c, int threads,
                                     int *early) {
    VCUDA_DYNAMIC_SHARED(uint16_t, rows);
    __shared__ uint64_t full;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int g = lane / 4, t = lane % 4;
    if (threads != 0) {
        for (int i = static_cast<int>(threadIdx.x); i < N * 64; i += 256) rows[i] = b[i];
        proxy_fence_shared();
    } else if (threadIdx.x == 0) {
        barrier_init(&full, 1);
        barrier_init_done();
        barrier_expect(&full, N * 128);
        copy_bulk(rows, b, N * 128, &full);
        if (rows[0] != 0xffff) *early = 1;  // it is there when somebody has waited
    }
    __syncthreads();
    if (threads == 0) barrier_wait(&full, 0);

    uint32_t fa[4][4];
    for (int i = 0; i < 4; ++i) {
        for (int word = 0; word < 4; ++word) {
            const int row = 16 * warp + g + 8 * (word % 2), k = 16 * i + 2 * t + 8 * (word / 2);
            fa[i][word] = a[row * 64 + k] | static_cast<uint32_t>(a[row * 64 + k + 1]) << 16;
        }
    }
    float sums[N / 2];
    const auto at = [&](int i) {
        return (16 * warp + g + i / 2 % 2 * 8) * N + i / 4 * 8 + 2 * t + i % 2;
    };
    for (int i = 0; i < N / 2; ++i) sums[i] = c[at(i)];
    const auto multiply = [&](int i) {
        if (kHalf) wgmma_f16<N>(sums, fa[i], rows + 16 * i);
        if (!kHalf) wgmma_bf16<N>(sums, fa[i], rows + 16 * i);
    };
    wgmma_fence();
    multiply(0);
    multiply(1);
    wgmma_commit();
    wgmma_fence();
    multiply(2);
    multiply(3);
    for (auto &words : fa) words[0] = words[3] = 0x7fff7fffu;  // they have been taken
    wgmma_commit();
    wgmma_wait<1>();
    if (sums[0] == sums[0]) *early = 1;  // products that add to them are under way
    wgmma_wait<0>();
    for (int i = 0; i < N / 2; ++i) c[at(i)] = sums[i];
}

template <int N, bool kHalf>
void check_group_product(int threads) {
    const auto bits = [](float v) {
        return static_cast<uint16_t>(kHalf ? half_bits(v) : bf16_bits(v));
    };
    std::vector<float> a(128 * 64), b(N * 64), c(128 * N);
    std::vector<uint16_t> a16(a.size()), b16(b.size());
    for (auto &v : a) v = random_integer();
    for (auto &v : b) v = random_integer() / 16;
    for (auto &v : c) v = random_integer();
    for (size_t i = 0; i < a.size(); ++i) a16[i] = bits(a[i]);
    for (size_t n = 0; n < N; ++n) {
        for (size_t k = 0; k < 64; ++k)
            b16[n * 64 + (k / 8 ^ n % 8) * 8 + k % 8] = bits(b[n * 64 + k]);
    }
    Device<uint16_t> da(a16), db(b16);
    Device<float> dc(c);
    Device<int> early(std::vector<int>{0});
    Launcher to;
    launch(to, group_product_kernel<N, kHalf>, 1, 256, N * 128, da.p, db.p, dc.p, threads, early.p);
    const auto seen = dc.read();
    for (size_t r = 0; r < 128; ++r) {
        for (size_t n = 0; n < N; ++n) {
            float sum = c[r * N + n];
            for (size_t k = 0; k < 64; ++k) sum += a[r * 64 + k] * b[n * 64 + k];
            REQUIRE(seen[r * N + n] == sum);
        }
    }
    REQUIRE(early.read()[0] == 0);
}

void group_products() {
    for (uint32_t schedule : {0u, 1u, 9u}) {
        fake_schedule(schedule);
        check_group_product<8, true>(0);
        check_group_product<64, true>(1);
        check_group_product<128, true>(0);
        check_group_product<256, true>(0);
        check_group_product<16, false>(0);
        check_group_product<128, false>(1);
    }
}

// c [64][N] = a [64][0..16] * first [N][0..16]^T + a [64][64] * b [64][N]: `first` in rows of 64
// along k, b in rows of 64 columns.
template <int N>
__global__ void columns_kernel(const uint16_t *a, const uint16_t *first, const uint16_t *b,
                               float *c) {
    VCUDA_DYNAMIC_SHARED(uint16_t, rows);
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int g = lane / 4, t = lane % 4;
    for (int i = static_cast<int>(threadIdx.x); i < N * 64; i += 128) {
        rows[i] = first[i];
        rows[N * 64 + i] = b[i];
    }
    proxy_fence_shared();
    __syncthreads();
    float sums[N / 2];
    for (float &v : sums) v = NAN;
    wgmma_fence();
    for (int i = -1; i < 4; ++i) {
        uint32_t fa[4];
        for (int word = 0; word < 4; ++word) {
            const int row = 16 * warp + g + 8 * (word % 2);
            const int k = 16 * (i < 0 ? 0 : i) + 2 * t + 8 * (word / 2);
            fa[word] = a[row * 64 + k] | static_cast<uint32_t>(a[row * 64 + k + 1]) << 16;
        }
        if (i < 0) {
            wgmma_f16_first<N>(sums, fa, rows);
        } else {
            wgmma_f16_columns<N>(sums, fa, rows + N * 64 + i * 16 * 64, 64 * 128);
        }
    }
    wgmma_commit();
    wgmma_wait<0>();
    for (int i = 0; i < N / 2; ++i) {
        c[(16 * warp + g + i / 2 % 2 * 8) * N + i / 4 * 8 + 2 * t + i % 2] = sums[i];
    }
}

template <int N>
void check_columns() {
    std::vector<float> a(64 * 64), first(N * 64), b(64 * N);
    std::vector<uint16_t> a16(a.size()), first16(first.size()), b16(b.size());
    for (auto *numbers : {&a, &first, &b}) {
        for (auto &v : *numbers) v = random_integer() / 16;
    }
    const auto bits = [](float v) { return static_cast<uint16_t>(half_bits(v)); };
    for (size_t i = 0; i < a.size(); ++i) a16[i] = bits(a[i]);
    for (size_t n = 0; n < N; ++n) {
        for (size_t k = 0; k < 64; ++k) {
            first16[n * 64 + (k / 8 ^ n % 8) * 8 + k % 8] = bits(first[n * 64 + k]);
            b16[n / 64 * 4096 + k * 64 + (n % 64 / 8 ^ k % 8) * 8 + n % 8] = bits(b[k * N + n]);
        }
    }
    Device<uint16_t> da(a16), dfirst(first16), db(b16);
    Device<float> dc(std::vector<float>(64 * N, 0.0f));
    Launcher to;
    launch(to, columns_kernel<N>, 1, 128, N * 256, da.p, dfirst.p, db.p, dc.p);
    const auto seen = dc.read();
    for (size_t r = 0; r < 64; ++r) {
        for (size_t n = 0; n < N; ++n) {
            float sum = 0.0f;
            for (size_t k = 0; k < 16; ++k) sum += a[r * 64 + k] * first[n * 64 + k];
            for (size_t k = 0; k < 64; ++k) sum += a[r * 64 + k] * b[k * N + n];
            REQUIRE(seen[r * N + n] == sum);
        }
    }
}

void column_products() {
    check_columns<64>();
    check_columns<128>();
}

// ------------------------------------------------------------------------------------- numbers

void packed() {
    REQUIRE(half2_bits(1.0f, -2.0f) == 0xc0003c00u);
    REQUIRE(half2_bits(65520.0f, 1e-8f) == 0x00007c00u);
    REQUIRE(bf16x2_bits(1.0f, -2.0f) == 0xc0003f80u);
    REQUIRE(bf16x2_bits(1.00390625f, 1.01171875f) == 0x3f823f80u);  // ties to even
    REQUIRE(bf16x2_bits(__uint_as_float(0x7f800001u), 3.4e38f) == 0x7f807fffu);
    REQUIRE(exp2_fast(-3.0f) == 0.125f && exp2_fast(1e-40f) == 1.0f && exp2_fast(-127.0f) == 0.0f);
    REQUIRE(exp2_fast(128.0f) == INFINITY && exp2_fast(-INFINITY) == 0.0f);
    // 1024 + n less 1024: how codes become numbers
    REQUIRE(half2_subtract(0x64ff6480u, 0x64806480u) == 0x57f00000u);
    REQUIRE(half2_multiply(0x3c01bc01u, 0x3c013c01u) == 0x3c02bc02u);
    // against sums and products in float64, rounded once by NumPy's rule: halves that are exact
    for (int i = 0; i < 100000; ++i) {
        const uint32_t a = random_word() & 0x7bff7bffu, b = random_word() & 0xfbfffbffu;
        const uint32_t difference = half2_subtract(a, b), product = half2_multiply(a, b);
        for (uint32_t shift : {0u, 16u}) {
            const double x = half_value(a >> shift & 0xffffu), y = half_value(b >> shift & 0xffffu);
            const auto nearest = [](double exact, uint32_t bits) {
                if ((bits & 0x7fffu) >= 0x7c00u) return std::fabs(exact) >= 65520.0;
                const double off = std::fabs(half_value(bits) - exact);
                for (uint32_t other : {bits - 1, bits + 1}) {
                    if ((other & 0x7fffu) >= 0x7c00u || ((other ^ bits) & 0x8000u)) continue;
                    const double worse = std::fabs(half_value(other) - exact);
                    if (worse < off || (worse == off && bits % 2 == 1)) return false;
                }
                return true;
            };
            REQUIRE(nearest(x - y, difference >> shift & 0xffffu));
            REQUIRE(nearest(x * y, product >> shift & 0xffffu));
        }
    }
}

}  // namespace

std::vector<Case> sm90_cases() {
    return {
        {"products_f16", products_f16},
        {"matrices", matrices},
        {"copies_async", copies_async},
        {"ring", ring},
        {"phases", phases},
        {"group_products", group_products},
        {"column_products", column_products},
        {"packed", packed},
    };
}

}  // namespace vcuda
