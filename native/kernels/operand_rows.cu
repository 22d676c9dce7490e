// norm_rows, embed_rows: the rows of many tokens, from the embedding to the operand of a product
#include "operand_rows.h"

#include <algorithm>

#include "operand.cuh"
#include "tile_element.cuh"

namespace vcuda {

namespace {

// --------------------------------------------------------------------------------------- numbers

constexpr float kHalfMax = 65504.0f;

// The 16 bits nearest to a float32; a NaN stays one.
template <bool kBf16>
__device__ __forceinline__ uint32_t rounded(float v) {
    if constexpr (kBf16) {
        // rounding would carry some NaNs over to 0
        return fabsf(v) <= 3.0e38f ? bf16_bits(v) : 0x7fc0u;
    } else {
        return half_bits(v);
    }
}

template <bool kBf16>
__device__ __forceinline__ float value_of(uint32_t bits) {
    return kBf16 ? bf16_value(bits) : half_value(bits);
}

// Two neighbours as a word; what rounding them lost is left in them.
template <bool kBf16>
__device__ __forceinline__ uint32_t take_part(float &a, float &b) {
    const uint32_t low = rounded<kBf16>(a);
    const uint32_t high = rounded<kBf16>(b);
    a -= value_of<kBf16>(low);
    b -= value_of<kBf16>(high);
    return low | high << 16;
}

// ---------------------------------------------------------------------------------------- norm

// Float quads of a row that a thread has in registers.
constexpr int kHeldQuads = 4;

template <int kBlockWarps>
constexpr int kLongestRow = kBlockWarps * kWarp * kHeldQuads * 4;  // read once

// Features 4 lane .. of a warp's 128 from `span` on, as eight bytes a part of every row
// rows [0 .. copies - 1]. In the order of q8 and q4 a quad's first two features and its last two
// stand in two chunks: neighbouring lanes exchange halves, so that each has eight bytes of one.
// PRE: all lanes
template <bool kBf16>
__device__ __forceinline__ void store_operand(const Operand &out, float4 v, int span, int lane,
                                              const int32_t *rows, int copies) {
    const int feature = span + lane * 4;
    const int quad = lane % 16;  // of the 16 of a block
    const int odd = lane % 2;
    const int chunk = kBf16 ? quad / 2 : quad / 4 * 2 + odd;
    const int half = kBf16 ? odd : quad % 4 / 2;  // of the chunk
    const bool inside = feature < out.blocks * kOperandBlock;
    uint16_t *block = out.data + feature / kOperandBlock * out.block_stride() + half * 4;
    for (int part = 0; part < out.parts; ++part) {
        const uint32_t first = take_part<kBf16>(v.x, v.y);
        const uint32_t last = take_part<kBf16>(v.z, v.w);
        uint2 words = make_uint2(first, last);
        if constexpr (!kBf16) {
            const uint32_t other = __shfl_xor_sync(kAllLanes, odd != 0 ? first : last, 1);
            words = odd != 0 ? make_uint2(other, last) : make_uint2(first, other);
        }
        if (inside) {
#pragma unroll 2
            for (int i = 0; i < copies; ++i) {
                const int row = rows[i];
                uint16_t *to = block + static_cast<int64_t>(row) * kOperandBlock;
                *reinterpret_cast<uint2 *>(to + (chunk ^ row % 8) * 8) = words;
            }
        }
        block += out.part_stride();
    }
}

// See NormRows. A block has a row, of which a thread holds kHeldQuads quads; a longer row is read
// twice with a norm.
// PRE: grid = rows, block = kBlockWarps warps. BYTES: rows * k * (4 + 2 parts copies, + 4 with y)
template <int kBlockWarps, bool kBf16>
__global__ void __launch_bounds__(kBlockWarps *kWarp) norm_rows_kernel(const NormRows p) {
    __shared__ __align__(16) float scratch[kBlockWarps];
    __shared__ int32_t rows[kMaxCopies];
    constexpr int stride = kBlockWarps * kWarp * 4;  // features of all threads' quads
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = warp_index();
    const int lane = thread % kWarp;
    const auto span = [&](int i) { return warp * kWarp * 4 + i * stride; };
    const auto element = [&](int i) { return span(i) + lane * 4; };
    float4 weight[kHeldQuads];
    if (p.norm != nullptr) {
#pragma unroll
        for (int i = 0; i < kHeldQuads; ++i) weight[i] = load_quad(p.norm, element(i), p.k);
    }
    pdl_wait();
    pdl_trigger();
    const int row = static_cast<int>(blockIdx.x);
    const int source = p.list != nullptr ? load_fresh(p.list + row) : row;
    if (source < 0) return;
    const float *x = p.x + source * padded_row(p.k);
    float4 value[kHeldQuads];
#pragma unroll
    for (int i = 0; i < kHeldQuads; ++i) value[i] = load_activation(x, element(i), p.k);
    const int copies = p.places != nullptr ? p.copies : 1;
    if (thread < copies) {
        rows[thread] = p.places != nullptr ? load_fresh(p.places + row * copies + thread) : row;
    }

    float factor = 1.0f;
    if (p.norm != nullptr) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kHeldQuads; ++i) sum += square_sum(value[i]);
#pragma unroll 1
        for (int i = kHeldQuads; span(i) < p.k; ++i) {
            sum += square_sum(load_activation(x, element(i), p.k));
        }
        const float mean = block_sum<kBlockWarps>(sum, scratch) / static_cast<float>(p.k);
        factor = rsqrtf(finite_or_nan(mean) + p.eps);
    } else {
        __syncthreads();  // for `rows`
    }

    const int padded = static_cast<int>(padded_row(p.k));
    const int features = p.out.data != nullptr ? p.out.blocks * kOperandBlock : 0;
    const int end = padded > features ? padded : features;
    bool fits = true;
    int first = 0;
    do {
#pragma unroll
        for (int i = 0; i < kHeldQuads; ++i) {
            if (span(first + i) >= end) break;
            const int at = element(first + i);
            float4 v = value[i];
            if (p.norm != nullptr && at < p.k) {  // behind it: zeros, not zero times NaN
                v.x = v.x * factor * weight[i].x;
                v.y = v.y * factor * weight[i].y;
                v.z = v.z * factor * weight[i].z;
                v.w = v.w * factor * weight[i].w;
            }
            if (p.y != nullptr && at < padded) {
                *reinterpret_cast<float4 *>(p.y + static_cast<int64_t>(row) * padded + at) = v;
            }
            if (p.out.data == nullptr) continue;
            fits = fits && fabsf(v.x) <= kHalfMax && fabsf(v.y) <= kHalfMax &&
                   fabsf(v.z) <= kHalfMax && fabsf(v.w) <= kHalfMax;
            store_operand<kBf16>(p.out, v, span(first + i), lane, rows, copies);
        }
        first += kHeldQuads;
        if (span(first) >= end) break;
#pragma unroll
        for (int i = 0; i < kHeldQuads; ++i) {
            value[i] = load_activation(x, element(first + i), p.k);
            if (p.norm != nullptr) weight[i] = load_quad(p.norm, element(first + i), p.k);
        }
    } while (true);
    if (!kBf16 && !fits && p.overflow != nullptr) *p.overflow = 1;
}

// --------------------------------------------------------------------------------------- embed

constexpr int kEmbedThreads = 256;

// x (tokens, k) = table (n, k) [ids]
// PRE: grid = tokens, block = kEmbedThreads.   BYTES: tokens rows, of the table and of x
__global__ void __launch_bounds__(kEmbedThreads) embed_rows_kernel(const EmbedRows p) {
    pdl_wait();
    pdl_trigger();
    const int row = load_fresh(p.ids + blockIdx.x);
    float *x = p.x + blockIdx.x * padded_row(p.table.k);
    for (int k = static_cast<int>(threadIdx.x) * 4; k < p.table.k; k += kEmbedThreads * 4) {
        *reinterpret_cast<float4 *>(x + k) = tile_quad(p.table, row, k);
    }
}

// ------------------------------------------------------------------------------------ launchers

template <bool kBf16>
void launch_norm(Launcher &to, const NormRows &p) {
    const int64_t features =
        std::max<int64_t>(p.k, p.out.data != nullptr ? p.out.blocks * kOperandBlock : 0);
    const dim3 grid(static_cast<unsigned>(p.rows));
    if (features <= kLongestRow<4>) {
        launch(to, norm_rows_kernel<4, kBf16>, grid, dim3(4 * kWarp), 0, p);
    } else if (features <= kLongestRow<8>) {
        launch(to, norm_rows_kernel<8, kBf16>, grid, dim3(8 * kWarp), 0, p);
    } else if (features <= kLongestRow<16>) {
        launch(to, norm_rows_kernel<16, kBf16>, grid, dim3(16 * kWarp), 0, p);
    } else {
        launch(to, norm_rows_kernel<32, kBf16>, grid, dim3(32 * kWarp), 0, p);
    }
}

}  // namespace

void norm_rows(Launcher &to, const NormRows &p) {
    if (p.rows == 0) return;
    if (p.out.bf16) return launch_norm<true>(to, p);
    launch_norm<false>(to, p);
}

void embed_rows(Launcher &to, const EmbedRows &p) {
    if (p.tokens == 0) return;
    if (p.table.kind == VCUDA_F32) throw Error("embeddings are q8, q4 or bf16, not float32");
    launch(to, embed_rows_kernel, dim3(static_cast<unsigned>(p.tokens)), dim3(kEmbedThreads), 0, p);
}

}  // namespace vcuda
