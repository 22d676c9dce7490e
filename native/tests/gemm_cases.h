// Products of many rows on random weights and activations, and the same in double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "gemm.h"
#include "kernels_memory.h"
#include "pack.h"

namespace vcuda::tests {

struct GemmCase {
    int kind, parts, n, k, tokens;
    bool gate_up;
    bool mapped;  // rows of a stack, in tiles of `width`
    int width;
    bool bias, add;
    int hidden_parts;
    float size = 1.0f;  // of the activations
};

inline std::string describe(const GemmCase &c) {
    char text[200];
    const char *kind = c.kind == VCUDA_Q8 ? "q8" : c.kind == VCUDA_Q4 ? "q4" : "bf16";
    std::snprintf(text, sizeof text, "%s parts %d n %d k %d tokens %d%s%s%s%s", kind, c.parts, c.n,
                  c.k, c.tokens, c.gate_up ? " gate_up" : "", c.mapped ? " mapped" : "",
                  c.bias ? " bias" : "", c.add ? " add" : "");
    return text;
}

// ------------------------------------------------------------------------------------- numbers

inline float float_of_half(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float v = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                            : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
    if (exponent == 31) v = fraction == 0 ? INFINITY : NAN;
    return (bits & 0x8000) != 0 ? -v : v;
}

// Nearest, ties to even, of a finite value.
inline uint16_t half_of_float(float v) {
    const uint16_t sign = std::signbit(v) ? 0x8000 : 0;
    const float a = std::fabs(v);
    if (a == 0.0f) return sign;
    if (a >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);
    int exponent = 0;
    std::frexp(a, &exponent);
    const int unit = std::max(exponent - 11, -24);  // of the last place
    const auto whole = static_cast<int>(std::nearbyint(std::ldexp(a, -unit)));
    return static_cast<uint16_t>(sign | (whole + ((unit + 24) << 10)));
}

inline float float_of_bf16(uint16_t bits) {
    const uint32_t u = static_cast<uint32_t>(bits) << 16;
    float v;
    std::memcpy(&v, &u, 4);
    return v;
}

inline uint16_t bf16_of_float(float v) {
    uint32_t u;
    std::memcpy(&u, &v, 4);
    return static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

inline float number_of(bool bf16, uint16_t bits) {
    return bf16 ? float_of_bf16(bits) : float_of_half(bits);
}

inline uint16_t bits_of(bool bf16, float v) {
    return bf16 ? bf16_of_float(v) : half_of_float(v);
}

// ------------------------------------------------------------------------------------- the data

inline std::mt19937 &random_bits() {
    static std::mt19937 bits(11);
    return bits;
}

inline std::vector<float> normal(size_t count, float scale) {
    std::normal_distribution<float> distribution(0.0f, scale);
    std::vector<float> v(count);
    for (float &x : v) x = distribution(random_bits());
    return v;
}

// A stack of matrices: their tiles in device memory, and what the products multiply by.
struct Weights {
    Weights(Launcher &to, int kind, int stack, int n, int k)
        : tiles(tiles_of(kind, stack, n, k)),
          values(static_cast<size_t>(stack) * n * k),
          memory_(std::vector<unsigned char>(
              static_cast<size_t>(tiles.codes_bytes() + tiles.scales_bytes()), 0)) {
        tiles.codes = memory_.data();
        if (tiles.scales_bytes() > 0) {
            tiles.scales = reinterpret_cast<uint32_t *>(memory_.data() + tiles.codes_bytes());
        }
        const size_t rows = static_cast<size_t>(stack) * n;
        const float deviation = 1.0f / std::sqrt(static_cast<float>(k));
        if (kind == VCUDA_BF16) {
            const std::vector<float> v = normal(rows * k, deviation);
            std::vector<uint16_t> bits(v.size());
            for (size_t i = 0; i < v.size(); ++i) {
                bits[i] = bf16_of_float(v[i]);
                values[i] = float_of_bf16(bits[i]);
            }
            const DeviceArray<uint16_t> codes(bits);
            pack_rows(to, tiles, 0, static_cast<int64_t>(rows), codes.data(), nullptr);
            CUDA_TRY(cudaStreamSynchronize(to.stream));
            return;
        }
        const size_t groups = static_cast<size_t>(ceil_div(k, kGroup));
        const size_t group_bytes = kind == VCUDA_Q8 ? 32 : 16;
        std::vector<uint8_t> codes(rows * groups * group_bytes, kind == VCUDA_Q8 ? 0 : 0x88);
        std::vector<uint16_t> scales(rows * groups);
        std::uniform_real_distribution<float> sizes(0.3f, 1.7f);
        for (uint16_t &s : scales) {
            s = half_of_float(deviation * sizes(random_bits()) / (kind == VCUDA_Q8 ? 73.0f : 4.6f));
        }
        for (size_t row = 0; row < rows; ++row) {
            for (size_t column = 0; column < static_cast<size_t>(k); ++column) {
                const size_t group = row * groups + column / 32, in = column % 32;
                const auto draw = random_bits()();
                int code;
                if (kind == VCUDA_Q8) {
                    code = static_cast<int>(draw % 255) - 127;
                    codes[group * 32 + in] = static_cast<uint8_t>(code);
                } else {
                    code = static_cast<int>(draw % 16) - 8;
                    uint8_t &byte = codes[group * 16 + in % 16];
                    const int shift = in < 16 ? 0 : 4;
                    byte = static_cast<uint8_t>((byte & ~(15 << shift)) | (code + 8) << shift);
                }
                values[row * k + column] = float_of_half(
                    half_of_float(static_cast<float>(code) * float_of_half(scales[group])));
            }
        }
        const DeviceArray<uint8_t> device_codes(codes);
        const DeviceArray<uint16_t> device_scales(scales);
        pack_rows(to, tiles, 0, static_cast<int64_t>(rows), device_codes.data(),
                  device_scales.data());
        CUDA_TRY(cudaStreamSynchronize(to.stream));
    }

    Tiles tiles;
    std::vector<float> values;  // [stack][n][k]

  private:
    DeviceArray<unsigned char> memory_;
};

// An operand on the host; what nobody wrote is NaN.
struct HostOperand {
    HostOperand(const Tiles &w, int parts, int64_t rows)
        : shape(operand_of(w, parts, rows)),
          bits(static_cast<size_t>(shape.bytes() / 2), static_cast<uint16_t>(0x7fc1)) {}

    void set(int64_t row, int feature, float v) {
        for (int part = 0; part < shape.parts; ++part) {
            const uint16_t b = bits_of(shape.bf16, v);
            bits[static_cast<size_t>(shape.index(part, row, feature))] = b;
            v -= number_of(shape.bf16, b);
        }
    }

    double get(int64_t row, int feature) const {
        double v = 0;
        for (int part = 0; part < shape.parts; ++part) {
            v += number_of(shape.bf16, bits[static_cast<size_t>(shape.index(part, row, feature))]);
        }
        return v;
    }

    Operand shape;
    std::vector<uint16_t> bits;
};

// ---------------------------------------------------------------------------------- the comparison

struct Checker {
    int cases = 0, failures = 0;
    double worst = 0;         // error of a sum, of the sum of the sizes of its products
    double tolerance = 4e-6;  // the same; the GPU's own sums are less exact than float32 ones

    bool expect(bool good, const GemmCase &c, const std::string &what) {
        if (good) return true;
        failures += 1;
        if (failures <= 20) std::printf("FAILED %s: %s\n", describe(c).c_str(), what.c_str());
        return false;
    }
};

// Which matrix a row meets; -1: none.
struct Rows {
    std::vector<RowTile> tiles;  // with room for one that does not count
    std::vector<int> matrix;     // [capacity]
    int stack = 1;
};

inline Rows rows_of(const GemmCase &c, int64_t capacity) {
    Rows rows;
    rows.matrix.assign(static_cast<size_t>(capacity), -1);
    if (!c.mapped) {
        rows.stack = 2;
        for (int i = 0; i < c.tokens; ++i) rows.matrix[i] = 1;
        return rows;
    }
    rows.stack = 3;
    for (int first = 0, i = 0; first < c.tokens; ++i) {
        const int sizes[] = {c.width, 5, c.width - 9, 1, c.width / 2 + 3, 150, 60, 80, 190, 99};
        const int count = std::min({sizes[i % 10], c.width, c.tokens - first});
        rows.tiles.push_back({(i * 2 + 1) % 3, first, count, -1});
        for (int r = 0; r < count; ++r) rows.matrix[first + r] = (i * 2 + 1) % 3;
        first += (count + 7) / 8 * 8;
    }
    return rows;
}

inline void run_gemm_case(Checker &check, Launcher &to, const GemmCase &c) {
    constexpr float untouched = -12345.5f;
    const int64_t capacity = ceil_div(c.tokens + 1, 128) * 128;
    const Rows rows = rows_of(c, capacity);
    const Weights w(to, c.kind, rows.stack, c.n, c.k);
    const Weights up(to, c.kind, c.gate_up ? rows.stack : 1, c.gate_up ? c.n : 1, c.k);
    HostOperand x(w.tiles, c.parts, capacity);
    const std::vector<float> numbers = normal(static_cast<size_t>(c.tokens) * c.k, c.size);
    for (int row = 0; row < c.tokens; ++row) {
        if (rows.matrix[row] < 0) continue;
        for (int f = 0; f < x.shape.blocks * kOperandBlock; ++f) {
            x.set(row, f, f < c.k ? numbers[static_cast<size_t>(row) * c.k + f] : 0.0f);
        }
    }
    std::vector<double> exact(static_cast<size_t>(c.tokens) * c.k);  // what the operand holds
    for (size_t i = 0; i < exact.size(); ++i) {
        exact[i] = x.get(static_cast<int64_t>(i) / c.k, static_cast<int>(i % c.k));
    }
    const DeviceArray<uint16_t> x_bits(x.bits);
    std::vector<RowTile> tiles = rows.tiles;
    tiles.push_back({99, 1 << 20, 77, -1});  // behind *count: nobody may take it
    const DeviceArray<RowTile> device_tiles(tiles);
    const DeviceArray<int32_t> tile_count(
        std::vector<int32_t>{static_cast<int32_t>(rows.tiles.size())});
    const int biases = c.mapped ? rows.stack : 1;
    const std::vector<float> bias = normal(static_cast<size_t>(biases) * c.n, 1.0f);
    const std::vector<float> up_bias = normal(static_cast<size_t>(biases) * c.n, 1.0f);
    const DeviceArray<float> device_bias(bias), device_up_bias(up_bias);
    Operand operand = x.shape;
    operand.data = x_bits.data();
    TileMap map;
    if (c.mapped) {
        map = {device_tiles.data(), tile_count.data(), static_cast<int32_t>(tiles.size()), c.width};
    }

    // sum and what its error is measured by
    const auto product = [&](const Weights &of, const std::vector<float> &b, int row, int feature,
                             double &size) {
        const int matrix = rows.matrix[row];
        double sum = c.bias ? b[static_cast<size_t>(c.mapped ? matrix : 0) * c.n + feature] : 0.0;
        size = std::fabs(sum);
        const float *v = &of.values[(static_cast<size_t>(matrix) * c.n + feature) * c.k];
        for (int f = 0; f < c.k; ++f) {
            const double term = exact[static_cast<size_t>(row) * c.k + f] * v[f];
            sum += term;
            size += std::fabs(term);
        }
        return sum;
    };
    const auto place = [](int row, int feature, double got, double want) {
        return "row " + std::to_string(row) + " feature " + std::to_string(feature) + ": " +
               std::to_string(got) + ", not " + std::to_string(want);
    };
    check.cases += 1;

    if (!c.gate_up) {
        const int64_t stride = ceil_div(c.n, 8) * 8 + 8;
        std::vector<float> before(static_cast<size_t>(capacity * stride), untouched);
        if (c.add) before = normal(before.size(), 3.0f);
        const DeviceArray<float> y(before);
        Gemm p;
        p.w = w.tiles;
        p.matrix = 1;
        p.map = map;
        p.x = operand;
        p.tokens = c.tokens;
        p.bias = c.bias ? device_bias.data() : nullptr;
        p.y = y.data();
        p.stride = stride;
        p.add = c.add;
        gemm(to, p);
        const std::vector<float> got = y.read();
        for (int row = 0; row < capacity; ++row) {
            for (int f = 0; f < stride; ++f) {
                const size_t at = static_cast<size_t>(row * stride + f);
                if (rows.matrix[row] < 0 || f >= c.n) {
                    if (!check.expect(got[at] == before[at], c,
                                      "written " + place(row, f, got[at], before[at]))) {
                        return;
                    }
                    continue;
                }
                double size = 0;
                double want = product(w, bias, row, f, size);
                if (c.add) {
                    want += before[at];
                    size += std::fabs(before[at]);
                }
                const double error = std::fabs(got[at] - want) / size;
                if (!check.expect(error <= check.tolerance, c, place(row, f, got[at], want)))
                    return;
                check.worst = std::max(check.worst, error);
            }
        }
        return;
    }

    HostOperand hidden(tiles_of(c.kind, 1, 16, c.n), c.hidden_parts, capacity);
    const DeviceArray<uint16_t> hidden_bits(hidden.bits);
    const DeviceArray<int32_t> overflow(std::vector<int32_t>{0});
    GemmGateUp p;
    p.gate = w.tiles;
    p.up = up.tiles;
    p.matrix = 1;
    p.map = map;
    p.x = operand;
    p.tokens = c.tokens;
    p.gate_bias = c.bias ? device_bias.data() : nullptr;
    p.up_bias = c.bias ? device_up_bias.data() : nullptr;
    p.hidden = hidden.shape;
    p.hidden.data = hidden_bits.data();
    p.overflow = overflow.data();
    gemm_gate_up(to, p);
    HostOperand got = hidden;
    got.bits = hidden_bits.read();
    const double rounding =
        std::ldexp(1.0, (hidden.shape.bf16 ? -8 : -11) * c.hidden_parts - (c.hidden_parts - 1));
    bool large = false;
    for (int row = 0; row < capacity; ++row) {
        for (int f = 0; f < hidden.shape.blocks * kOperandBlock; ++f) {
            if (rows.matrix[row] < 0) {
                for (int part = 0; part < c.hidden_parts; ++part) {
                    const auto at = static_cast<size_t>(hidden.shape.index(part, row, f));
                    if (!check.expect(got.bits[at] == hidden.bits[at], c, place(row, f, 0, 0)))
                        return;
                }
                continue;
            }
            const double value = got.get(row, f);
            if (f >= c.n) {
                if (!check.expect(value == 0.0, c, "padding " + place(row, f, value, 0))) return;
                continue;
            }
            double gate_size = 0, up_size = 0;
            const double gate = product(w, bias, row, f, gate_size);
            const double u = product(up, up_bias, row, f, up_size);
            const double silu = gate / (1.0 + std::exp(-gate));
            const double want = silu * u;
            if (!hidden.shape.bf16 && std::fabs(want) > 65504.0) {
                large = true;
                continue;
            }
            const double allowed =
                std::fabs(want) * (rounding + 2e-6) + 1e-7 +
                1.1 * check.tolerance * (gate_size * std::fabs(u) + up_size * std::fabs(silu));
            if (!check.expect(std::fabs(value - want) <= allowed, c, place(row, f, value, want)))
                return;
        }
    }
    check.expect(overflow.read()[0] == (large ? 1 : 0), c, "overflow " + std::to_string(large));
}

// Every kind, with edges in n, k, tokens and tiles. `scale` 1: what the emulator does in seconds.
inline std::vector<GemmCase> gemm_cases(bool all) {
    std::vector<GemmCase> cases;
    const int tokens[] = {1, 7, 129, 70, 64};
    const int columns[] = {96, 130, 64, 256, 33};
    const int features[] = {40, 17, 16, 132, 300};
    int i = 0;
    for (int kind : {VCUDA_Q8, VCUDA_Q4, VCUDA_BF16}) {
        for (int parts : {1, 2}) {
            for (bool gate_up : {false, true}) {
                for (bool mapped : {false, true}) {
                    for (int repeat = 0; repeat < (all ? 5 : 1); ++repeat, ++i) {
                        const int many = all && repeat == 4 ? 300 : tokens[(i + i / 5) % 5];
                        cases.push_back({kind, parts, features[i % 5], columns[(i + i / 3) % 5],
                                         mapped ? 150 + many : many, gate_up, mapped,
                                         i % 2 == 0 ? 128 : 64, i % 3 == 0, i % 2 == 0,
                                         1 + (i + parts) % 2});
                    }
                }
            }
        }
    }
    // every number of columns that a product of one part has
    for (int kind : {VCUDA_Q8, VCUDA_Q4, VCUDA_BF16}) {
        for (bool gate_up : {false, true}) {
            cases.push_back({kind, 1, 72, 64, 1130, gate_up, true, 256, true, false, 1});
            cases.push_back({kind, 1, 40, 64, 300, gate_up, false, 128, true, true, 1});
        }
    }
    // maps of few rows a tile, more features than a block has, stages used again
    for (int kind : {VCUDA_Q8, VCUDA_Q4, VCUDA_BF16}) {
        for (bool gate_up : {false, true}) {
            cases.push_back({kind, 1, 280, 600, 200, gate_up, true, kFewTileRows, true, true, 1});
            cases.push_back({kind, 1, 136, 130, 90, gate_up, true, 32, false, false, 2});
        }
    }
    // a hidden activation that float16 does not hold
    cases.push_back({VCUDA_Q8, 1, 20, 64, 9, true, false, 128, false, false, 1, 3000.0f});
    cases.push_back({VCUDA_BF16, 2, 20, 64, 9, true, false, 128, false, false, 2, 3000.0f});
    return cases;
}

}  // namespace vcuda::tests
