// Fragments to plain matrices, their product, and back: kernels/ptx.cuh has the places.
#include "products.h"

#include <cstring>

#include "emulate.h"

namespace vcuda::emulated {

namespace {

constexpr unsigned kLanes = 32;

int8_t byte_of(uint32_t word, unsigned i) {
    return static_cast<int8_t>(word >> (8 * i));
}

float bf16_of(uint32_t word, unsigned i) {
    const uint32_t bits = (i == 0 ? word << 16 : word & 0xffff0000u);
    float v;
    std::memcpy(&v, &bits, 4);
    return v;
}

float f16_of(uint32_t word, unsigned i) {
    return half_value(i == 0 ? word & 0xffffu : word >> 16);
}

template <float (*value_of)(uint32_t, unsigned)>
void product_16(void *const (&operands)[32]) {
    float a[16][16], b[16][8];
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        const auto &p = *static_cast<const Product16 *>(operands[lane]);
        const unsigned g = lane / 4, t = lane % 4;
        for (unsigned i = 0; i < 2; ++i) {
            a[g][2 * t + i] = value_of(p.a[0], i);
            a[g + 8][2 * t + i] = value_of(p.a[1], i);
            a[g][8 + 2 * t + i] = value_of(p.a[2], i);
            a[g + 8][8 + 2 * t + i] = value_of(p.a[3], i);
            b[2 * t + i][g] = value_of(p.b[0], i);
            b[8 + 2 * t + i][g] = value_of(p.b[1], i);
        }
    }
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        auto &p = *static_cast<Product16 *>(operands[lane]);
        const unsigned g = lane / 4, t = lane % 4;
        for (unsigned i = 0; i < 4; ++i) {
            const unsigned row = g + 8 * (i / 2), column = 2 * t + i % 2;
            float sum = p.c[i];
            for (unsigned k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
            p.c[i] = sum;
        }
    }
}

}  // namespace

void product_s8(void *const (&operands)[32]) {
    int a[16][32], b[32][8];
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        const auto &p = *static_cast<const ProductS8 *>(operands[lane]);
        const unsigned g = lane / 4, t = lane % 4;
        for (unsigned i = 0; i < 4; ++i) {
            a[g][4 * t + i] = byte_of(p.a[0], i);
            a[g + 8][4 * t + i] = byte_of(p.a[1], i);
            a[g][16 + 4 * t + i] = byte_of(p.a[2], i);
            a[g + 8][16 + 4 * t + i] = byte_of(p.a[3], i);
            b[4 * t + i][g] = byte_of(p.b[0], i);
            b[16 + 4 * t + i][g] = byte_of(p.b[1], i);
        }
    }
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        auto &p = *static_cast<ProductS8 *>(operands[lane]);
        const unsigned g = lane / 4, t = lane % 4;
        for (unsigned i = 0; i < 4; ++i) {
            const unsigned row = g + 8 * (i / 2), column = 2 * t + i % 2;
            uint32_t sum = static_cast<uint32_t>(p.c[i]);  // wraps around, as on the GPU
            for (unsigned k = 0; k < 32; ++k)
                sum += static_cast<uint32_t>(a[row][k] * b[k][column]);
            p.c[i] = static_cast<int>(sum);
        }
    }
}

void product_bf16(void *const (&operands)[32]) {
    product_16<bf16_of>(operands);
}

void product_f16(void *const (&operands)[32]) {
    product_16<f16_of>(operands);
}

void load_matrices(void *const (&operands)[32], bool transposed) {
    uint16_t matrices[4][8][8];
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        const void *row = static_cast<const Matrices *>(operands[lane])->row;
        std::memcpy(matrices[lane / 8][lane % 8], row, 16);
    }
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        auto &p = *static_cast<Matrices *>(operands[lane]);
        const unsigned row = lane / 4, column = lane % 4 * 2;
        for (unsigned i = 0; i < 4; ++i) {
            const uint16_t (&m)[8][8] = matrices[i];
            const uint32_t low = transposed ? m[column][row] : m[row][column];
            const uint32_t high = transposed ? m[column + 1][row] : m[row][column + 1];
            p.r[i] = low | high << 16;
        }
    }
}

}  // namespace vcuda::emulated
