// pack_rows, quantize_rows, unpack_rows, fill_random: canonical bytes <-> tiles
#include "pack.h"

#include "ptx.cuh"

namespace vcuda {

namespace {

constexpr int kBlock = 256;

// ------------------------------------------------------------------------------ where things lie

// Where a row of the stack lies: its tile, its lanes (4 g ..), and which row of the pair it is.
struct Place {
    int64_t tile;
    int g;
    int upper;  // 1: row g + 8
};

__device__ __forceinline__ Place place_of(const Tiles &w, int64_t row) {
    const int64_t matrix = row / w.n;
    const int local = static_cast<int>(row % w.n);
    return {matrix * w.row_tiles + local / kRowTile, local % 8, local % kRowTile / 8};
}

// Index among all 32-bit code words of word `word` of block `block` of a row. A block is a group (8
// words of q8, 4 of q4) or 16 columns (8 words of bf16).
__device__ __forceinline__ int64_t code_index(const Tiles &w, const Place &at, int block,
                                              int word) {
    const int step = block / 4;  // 4 blocks a step, all kinds
    const int t = word % 4;
    int vector = block % 4;
    int in_vector = word / 4 * 2 + at.upper;
    if (w.kind == VCUDA_Q4) {
        in_vector = vector % 2 * 2 + at.upper;
        vector /= 2;
    }
    const int64_t first = (at.tile * w.steps + step) * step_vectors(w.kind) + vector;
    return (first * kWarp + 4 * at.g + t) * 4 + in_vector;
}

// Index among all float16 scales of the scale of a group of a row.
__device__ __forceinline__ int64_t scale_index(const Tiles &w, const Place &at, int group) {
    return ((at.tile * w.steps + group / 4) * kWarp + 4 * at.g + group % 4) * 2 + at.upper;
}

// 32-bit words of a block: 8 of q8 (32 codes) and bf16 (16 values), 4 of q4.
__device__ __forceinline__ int block_words(int kind) {
    return kind == VCUDA_Q4 ? 4 : 8;
}

// One word of some rows, as a thread finds it: [rows][4 steps][block_words].
struct RowWord {
    int64_t row;  // of the given ones
    int block, word;

    __device__ __forceinline__ explicit RowWord(const Tiles &w) {
        const int words = block_words(w.kind);
        const int per_row = w.steps * 4 * words;
        const int64_t index = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
        row = index / per_row;
        block = static_cast<int>(index % per_row) / words;
        word = static_cast<int>(index % per_row) % words;
    }
};

// In the tiles a nibble is two's complement, in canonical bytes it is 8 too large.
constexpr uint32_t kNibbleSigns = 0x88888888u;

// Index of a word of canonical q8 or q4 codes (rows, words * G).
__device__ __forceinline__ int64_t canonical_word(const Tiles &w, int64_t row, int block,
                                                  int word) {
    return (row * ceil_div(w.k, kGroup) + block) * block_words(w.kind) + word;
}

// -------------------------------------------------------------------------------------- packing

// rows [row, row + rows) of w from canonical q8 or q4 codes (rows, words * G) and scales (rows, G),
// or bf16 (rows, k); the padding of these rows becomes 0
// PRE: grid * kBlock >= rows * 4 steps * block_words.   BYTES: twice the rows
__global__ void pack_kernel(Tiles w, int64_t row, int64_t rows, const void *codes,
                            const uint16_t *scales) {
    const auto [r, block, word] = RowWord(w);
    if (r >= rows) return;
    const Place at = place_of(w, row + r);
    uint32_t value = 0;
    if (w.kind == VCUDA_BF16) {
        const auto *bits = static_cast<const uint16_t *>(codes) + r * w.k;
        const int column = block * 16 + word * 2;
        if (column < w.k) value = bits[column];
        if (column + 1 < w.k) value |= static_cast<uint32_t>(bits[column + 1]) << 16;
    } else {
        const int groups = static_cast<int>(ceil_div(w.k, kGroup));
        if (block < groups) {
            value = static_cast<const uint32_t *>(codes)[canonical_word(w, r, block, word)];
            if (w.kind == VCUDA_Q4) value ^= kNibbleSigns;
        }
        if (word == 0) {
            reinterpret_cast<uint16_t *>(w.scales)[scale_index(w, at, block)] =
                block < groups ? scales[r * groups + block] : 0;
        }
    }
    static_cast<uint32_t *>(w.codes)[code_index(w, at, block, word)] = value;
}

// The inverse of pack_kernel. PRE and BYTES as there.
__global__ void unpack_kernel(Tiles w, int64_t row, int64_t rows, void *codes, uint16_t *scales) {
    const auto [r, block, word] = RowWord(w);
    if (r >= rows) return;
    const Place at = place_of(w, row + r);
    const uint32_t value = static_cast<const uint32_t *>(w.codes)[code_index(w, at, block, word)];
    if (w.kind == VCUDA_BF16) {
        auto *bits = static_cast<uint16_t *>(codes) + r * w.k;
        const int column = block * 16 + word * 2;
        if (column < w.k) bits[column] = static_cast<uint16_t>(value & 0xffffu);
        if (column + 1 < w.k) bits[column + 1] = static_cast<uint16_t>(value >> 16);
        return;
    }
    const int groups = static_cast<int>(ceil_div(w.k, kGroup));
    if (block >= groups) return;
    static_cast<uint32_t *>(codes)[canonical_word(w, r, block, word)] =
        w.kind == VCUDA_Q4 ? value ^ kNibbleSigns : value;
    if (word == 0) {
        scales[r * groups + block] =
            reinterpret_cast<const uint16_t *>(w.scales)[scale_index(w, at, block)];
    }
}

// ----------------------------------------------------------------------------------- quantising
//
// pykestrel/quant.py, operation by operation: every product, quotient, sum and difference is one
// IEEE float32 operation, so none may become part of a fused multiply-add.

constexpr uint32_t kMinScaleBits = 0x0080u;  // 2^-17 as float16
constexpr float kLargestHalf = 65504.0f;

// The stored scale of a quotient: rounded to float16, at least 2^-17 in size, the sign kept.
__device__ __forceinline__ uint32_t scale_bits(float quotient) {
    const uint32_t h = half_bits(quotient);
    return (h & 0x7fffu) < kMinScaleBits ? (h & 0x8000u) | kMinScaleBits : h;
}

__device__ __forceinline__ float q4_code(float w, float scale) {
    return fminf(fmaxf(rintf(__fdiv_rn(w, scale)), -8.0f), 7.0f);
}

// The error of a scale: squared differences added in a halving tree, the same in every lane.
__device__ __forceinline__ float q4_error(float w, float scale) {
    const float r = __fsub_rn(w, __fmul_rn(q4_code(w, scale), scale));
    float e = __fmul_rn(r, r);
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) e = __fadd_rn(e, __shfl_xor_sync(kAllLanes, e, o));
    return e;
}

// The bytes of four neighbouring lanes as one word, in each of them.
__device__ __forceinline__ uint32_t join_bytes(uint32_t byte, int lane) {
    uint32_t word = (byte & 0xffu) << (8 * (lane % 4));
    word |= __shfl_xor_sync(kAllLanes, word, 1);
    word |= __shfl_xor_sync(kAllLanes, word, 2);
    return word;
}

template <class T>
__device__ __forceinline__ float value_of(T v);
template <>
__device__ __forceinline__ float value_of<float>(float v) {
    return v;
}
template <>
__device__ __forceinline__ float value_of<uint16_t>(uint16_t v) {
    return bf16_value(v);
}

// rows [row, row + rows) of w, quantised, from float32 or bf16 values (rows, k); a warp a group
// PRE: grid * kBlock / 32 >= rows * 4 steps.   BYTES: the values once, the codes once
template <class T>
__global__ void __launch_bounds__(kBlock)
    quantize_kernel(Tiles w, int64_t row, int64_t rows, const T *__restrict__ values,
                    uint32_t *flags) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * (kBlock / kWarp) + threadIdx.x / kWarp;
    const int per_row = w.steps * 4;
    if (index >= rows * per_row) return;  // whole warps only
    const int64_t r = index / per_row;
    const int group = static_cast<int>(index % per_row);
    const int column = group * kGroup + lane;
    const float v = column < w.k ? value_of(values[r * w.k + column]) : 0.0f;
    const Place at = place_of(w, row + r);
    auto *codes = static_cast<uint32_t *>(w.codes);
    auto *scales = reinterpret_cast<uint16_t *>(w.scales);

    const float size = fabsf(v);
    const bool finite = size <= 3.4028235e38f;
    const unsigned broken = __ballot_sync(kAllLanes, !finite);
    const float absmax = warp_max(size);
    const float limit = (w.kind == VCUDA_Q8 ? 127.0f : 7.0f) * kLargestHalf;
    if (lane == 0 && broken != 0) atomicOr(flags, kNotFinite);
    if (lane == 0 && broken == 0 && absmax > limit) atomicOr(flags, kTooLarge);

    uint32_t stored = 0;
    if (w.kind == VCUDA_Q8) {
        stored = scale_bits(__fdiv_rn(absmax, 127.0f));
        const float code = fminf(fmaxf(rintf(__fdiv_rn(v, half_value(stored))), -127.0f), 127.0f);
        const uint32_t word = join_bytes(static_cast<uint32_t>(static_cast<int>(code)), lane);
        if (lane % 4 == 0) codes[code_index(w, at, group, lane / 4)] = word;
    } else {
        // the weight of the largest magnitude, the lowest k on a tie
        const unsigned extremes = __ballot_sync(kAllLanes, size == absmax);
        const int where = extremes != 0 ? __ffs(static_cast<int>(extremes)) - 1 : 0;
        const float extreme = __shfl_sync(kAllLanes, v, where);
        constexpr float divisors[10] = {-8.0f,  7.0f,   8.0f,  -7.25f, -7.5f,
                                        -7.75f, -8.25f, -8.5f, -8.75f, -9.0f};
        float best_error = INFINITY;
#pragma unroll
        for (int i = 0; i < 10; ++i) {
            const uint32_t candidate = scale_bits(__fdiv_rn(extreme, divisors[i]));
            const float error = q4_error(v, half_value(candidate));
            if (error < best_error) {
                best_error = error;
                stored = candidate;
            }
        }
        const int code = static_cast<int>(q4_code(v, half_value(stored)));
        const uint32_t low = static_cast<uint32_t>(code) & 0xfu;
        const uint32_t high = __shfl_xor_sync(kAllLanes, low, 16);  // of k + 16
        const uint32_t word = join_bytes(low | high << 4, lane);
        if (lane % 4 == 0 && lane < 16) codes[code_index(w, at, group, lane / 4)] = word;
    }
    const bool padding = group * kGroup >= w.k;
    if (lane == 0) {
        scales[scale_index(w, at, group)] = static_cast<uint16_t>(padding ? 0 : stored);
    }
}

// rows of a bf16 w from float32 (rows, k), rounded to nearest even
// PRE: grid * kBlock >= rows * 4 steps * 8.   BYTES: 6 a value
__global__ void round_kernel(Tiles w, int64_t row, int64_t rows, const float *values,
                             uint32_t *flags) {
    const auto [r, block, word] = RowWord(w);
    if (r >= rows) return;
    uint32_t value = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int column = block * 16 + word * 2 + i;
        if (column >= w.k) continue;
        const float v = values[r * w.k + column];
        const bool finite = fabsf(v) <= 3.4028235e38f;
        const uint32_t bits = finite ? bf16_bits(v) : 0u;
        if (!finite) atomicOr(flags, kNotFinite);
        if ((bits & 0x7f80u) == 0x7f80u) atomicOr(flags, kTooLarge);  // rounded up to infinity
        value |= bits << (16 * i);
    }
    const Place at = place_of(w, row + r);
    static_cast<uint32_t *>(w.codes)[code_index(w, at, block, word)] = value;
}

// -------------------------------------------------------------------------------------- random

// 32 well-mixed bits of a counter (the finaliser of MurmurHash3, by Austin Appleby)
__device__ __forceinline__ uint32_t mix(uint64_t x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    x ^= x >> 33;
    return static_cast<uint32_t>(x);
}

// A bfloat16 that is uniform in [-size, size).
__device__ __forceinline__ uint32_t random_bf16(uint32_t bits16, float size) {
    return bf16_bits((static_cast<float>(bits16 & 0xffffu) * (1.0f / 32768.0f) - 1.0f) * size);
}

// Every word of the codes and scales, or of the float32 rows
// PRE: a grid-stride loop.   BYTES: the matrix once
__global__ void fill_kernel(Tiles w, uint64_t seed) {
    const int64_t words = w.codes_bytes() / 4;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * kBlock;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
    const float deviation = rsqrtf(static_cast<float>(w.k));
    const float uniform = deviation * 1.7320508f;  // of this largest size a uniform variable has it
    auto *codes = static_cast<uint32_t *>(w.codes);
    for (int64_t i = first; i < words; i += stride) {
        uint32_t v = mix(seed * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(i));
        if (w.kind == VCUDA_F32) {
            v = __float_as_uint((static_cast<float>(v) * (1.0f / 2147483648.0f) - 1.0f) * uniform);
        } else if (w.kind == VCUDA_BF16) {
            v = random_bf16(v, uniform) | random_bf16(v >> 16, uniform) << 16;
        } else if (w.kind == VCUDA_Q8) {
#pragma unroll
            for (int b = 0; b < 32; b += 8) {
                if ((v >> b & 0xffu) == 0x80u) v ^= 1u << b;  // codes end at -127
            }
        }
        codes[i] = v;
    }
    if (w.kind != VCUDA_Q8 && w.kind != VCUDA_Q4) return;
    // root-mean-square of the uniform codes: 127 / sqrt(3), and of -8 .. 7 sqrt(344 / 16)
    const float code_rms = w.kind == VCUDA_Q8 ? 73.3235f : 4.6368f;
    const uint32_t scale = scale_bits(deviation / code_rms);
    const int64_t pairs = w.scales_bytes() / 4;
    const int groups = static_cast<int>(ceil_div(w.k, kGroup));
    for (int64_t i = first; i < pairs; i += stride) {
        const int64_t step = i / kWarp % w.steps;
        const bool padding = step * 4 + i % 4 >= groups;
        w.scales[i] = padding ? 0u : scale | scale << 16;
    }
}

// ------------------------------------------------------------------------------------ launchers

dim3 blocks_for(int64_t threads) {
    return dim3(static_cast<unsigned>(ceil_div(threads, kBlock)));
}

int64_t word_threads(const Tiles &w, int64_t rows) {
    return rows * w.steps * 4 * (w.kind == VCUDA_Q4 ? 4 : 8);
}

}  // namespace

void pack_rows(Launcher &to_stream, const Tiles &to, int64_t row, int64_t rows, const void *codes,
               const void *scales) {
    if (to.kind == VCUDA_F32) {
        const int64_t bytes = static_cast<int64_t>(to.k) * 4;
        CUDA_TRY(cudaMemcpyAsync(static_cast<char *>(to.codes) + row * bytes, codes,
                                 static_cast<size_t>(rows * bytes), cudaMemcpyDeviceToDevice,
                                 to_stream.stream));
        return;
    }
    launch(to_stream, pack_kernel, blocks_for(word_threads(to, rows)), dim3(kBlock), 0, to, row,
           rows, codes, static_cast<const uint16_t *>(scales));
}

void unpack_rows(Launcher &to_stream, const Tiles &from, int64_t row, int64_t rows, void *codes,
                 void *scales) {
    if (from.kind == VCUDA_F32) {
        const int64_t bytes = static_cast<int64_t>(from.k) * 4;
        CUDA_TRY(cudaMemcpyAsync(codes, static_cast<const char *>(from.codes) + row * bytes,
                                 static_cast<size_t>(rows * bytes), cudaMemcpyDeviceToDevice,
                                 to_stream.stream));
        return;
    }
    launch(to_stream, unpack_kernel, blocks_for(word_threads(from, rows)), dim3(kBlock), 0, from,
           row, rows, codes, static_cast<uint16_t *>(scales));
}

void quantize_rows(Launcher &to_stream, const Tiles &to, int64_t row, int64_t rows, int32_t source,
                   const void *values, uint32_t *flags) {
    if (to.kind == VCUDA_BF16) {
        launch(to_stream, round_kernel, blocks_for(word_threads(to, rows)), dim3(kBlock), 0, to,
               row, rows, static_cast<const float *>(values), flags);
        return;
    }
    const dim3 grid = blocks_for(rows * to.steps * 4 * kWarp);
    if (source == VCUDA_BF16) {
        launch(to_stream, quantize_kernel<uint16_t>, grid, dim3(kBlock), 0, to, row, rows,
               static_cast<const uint16_t *>(values), flags);
    } else {
        launch(to_stream, quantize_kernel<float>, grid, dim3(kBlock), 0, to, row, rows,
               static_cast<const float *>(values), flags);
    }
}

void fill_random(Launcher &to_stream, const Tiles &to, uint64_t seed) {
    launch(to_stream, fill_kernel, dim3(static_cast<unsigned>(to_stream.sm_count) * 8),
           dim3(kBlock), 0, to, seed);
}

}  // namespace vcuda
