// norm_rows() and embed_rows() against plain C++, for many shapes, orders and ways to spread rows.
// Ends with 1 at a difference. Runs on the emulated runtime (tests/native_build.py) or on a GPU.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels_memory.h"
#include "operand_rows.h"
#include "run_test.h"

#if defined(VCUDA_EMULATE)
#include "fake.h"
#endif

namespace {

using vcuda::Launcher;
using vcuda::NormRows;
using vcuda::Operand;
using vcuda::Tiles;
using vcuda::tests::DeviceArray;

std::mt19937 random_bits(5);

int below(int n) {
    return static_cast<int>(random_bits() % static_cast<unsigned>(n));
}

std::vector<float> normal(size_t count, float scale) {
    std::normal_distribution<float> distribution(0.0f, scale);
    std::vector<float> v(count);
    for (float &x : v) x = distribution(random_bits);
    return v;
}

uint32_t bits_of(float v) {
    uint32_t u;
    std::memcpy(&u, &v, 4);
    return u;
}

float float_of(uint32_t u) {
    float v;
    std::memcpy(&v, &u, 4);
    return v;
}

// ----------------------------------------------------------------------------- 16-bit numbers

float half_value(uint32_t bits) {
    const int exponent = static_cast<int>(bits >> 10 & 31),
              fraction = static_cast<int>(bits & 1023);
    float v = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                            : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
    if (exponent == 31) v = fraction == 0 ? INFINITY : NAN;
    return (bits & 0x8000) != 0 ? -v : v;
}

// Nearest, ties to even, of a finite number.
uint32_t half_of(float v) {
    const float size = std::fabs(v);
    const uint32_t sign = bits_of(v) >> 16 & 0x8000u;
    if (size >= 65520.0f) return sign | 0x7c00u;
    if (size == 0.0f) return sign;
    int exponent = 0;
    std::frexp(size, &exponent);
    const int unit = std::max(exponent - 11, -24);  // of the last place
    const auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, -unit)));
    // a carry into the next exponent is just what the bits do
    return sign | (steps + (static_cast<uint32_t>(unit + 24) << 10));
}

uint32_t bf16_of(float v) {
    const uint32_t u = bits_of(v);
    return (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
}

uint32_t rounded(bool bf16, float v) {
    return bf16 ? bf16_of(v) : half_of(v);
}

float value_of(bool bf16, uint32_t bits) {
    return bf16 ? float_of(bits << 16) : half_value(bits);
}

// ------------------------------------------------------------------------------------- norm

enum class Spread { none, list, places };

struct Case {
    int kind, parts, k, tokens;
    bool norm;
    Spread spread;
};

int cases = 0, failures = 0;

void fail(const std::string &where, const std::string &what) {
    failures += 1;
    if (failures <= 20) std::printf("FAILED %s: %s\n", where.c_str(), what.c_str());
}

std::string describe(const Case &c) {
    char text[200];
    std::snprintf(text, sizeof text, "kind %d parts %d k %d tokens %d norm %d spread %d", c.kind,
                  c.parts, c.k, c.tokens, c.norm ? 1 : 0, static_cast<int>(c.spread));
    return text;
}

// Index of a number in the operand, from the description of its layout.
size_t index_of(const Operand &o, int part, int row, int feature) {
    int place = feature % 64;
    if (!o.bf16) {
        const int h = place / 16, t = place % 16 / 4, j = place % 4;
        place = 16 * h + (j < 2 ? 2 * t + j : 8 + 2 * t + j - 2);
    }
    const size_t line = (static_cast<size_t>(part) * o.blocks + feature / 64) * o.capacity +
                        static_cast<size_t>(row);
    return line * 64 + static_cast<size_t>((place / 8 ^ row % 8) * 8 + place % 8);
}

constexpr float kPoison = 12345.0f;
constexpr uint16_t kPoison16 = 0x4d4d;

void run(const Case &c) {
    cases += 1;
    const std::string where = describe(c);
    const auto stride = static_cast<size_t>(vcuda::padded_row(c.k));
    const float eps = 1e-6f;
    std::vector<float> x(static_cast<size_t>(c.tokens) * stride, 0.0f);
    for (int t = 0; t < c.tokens; ++t) {
        const std::vector<float> row = normal(static_cast<size_t>(c.k), t % 3 == 1 ? 30.0f : 0.02f);
        std::copy(row.begin(), row.end(), x.begin() + static_cast<ptrdiff_t>(t * stride));
    }
    std::vector<float> norm = normal(static_cast<size_t>(c.k), 1.0f);
    norm.resize(stride, 0.0f);

    // which token each row of the operand, and of y, is; -1: nobody's
    const int copies = c.spread == Spread::places ? 1 + below(8) : 1;
    const int rows = c.spread == Spread::list ? c.tokens * 2 + 3 : c.tokens;
    Operand o = vcuda::operand_of(vcuda::tiles_of(c.kind, 1, 16, c.k), c.parts, rows * copies + 9);
    std::vector<int> token_of(static_cast<size_t>(o.capacity), -1);
    std::vector<int32_t> list(static_cast<size_t>(rows)), places;
    if (c.spread == Spread::places) {
        std::vector<int> free(static_cast<size_t>(o.capacity));
        for (int i = 0; i < o.capacity; ++i) free[i] = i;
        std::shuffle(free.begin(), free.end(), random_bits);
        places.assign(free.begin(), free.begin() + c.tokens * copies);
        for (size_t i = 0; i < places.size(); ++i)
            token_of[places[i]] = static_cast<int>(i) / copies;
    } else {
        for (int r = 0; r < rows; ++r) {
            list[r] = c.spread == Spread::list ? below(c.tokens + 1) - 1 : r;
            token_of[r] = list[r];
        }
    }

    const size_t numbers = static_cast<size_t>(o.bytes() / 2);
    DeviceArray<float> d_x(x), d_norm(norm);
    DeviceArray<float> d_y(std::vector<float>(static_cast<size_t>(rows) * stride, kPoison));
    DeviceArray<uint16_t> d_out(std::vector<uint16_t>(numbers, kPoison16));
    DeviceArray<int32_t> d_list(list), d_overflow({0});
    DeviceArray<int32_t> d_places(places.empty() ? std::vector<int32_t>{0} : places);
    NormRows p;
    p.x = d_x.data();
    p.k = c.k;
    p.rows = rows;
    if (c.spread == Spread::list) p.list = d_list.data();
    if (c.spread == Spread::places) p.places = d_places.data();
    p.copies = copies;
    if (c.norm) p.norm = d_norm.data();
    p.eps = eps;
    p.out = o;
    p.out.data = d_out.data();
    p.y = d_y.data();
    p.overflow = d_overflow.data();
    Launcher to;
    to.overlap = cases % 2 == 0;
    vcuda::norm_rows(to, p);
    const std::vector<float> y = d_y.read();
    const std::vector<uint16_t> out = d_out.read();
    if (d_overflow.read()[0] != 0) fail(where, "an overflow that is none");

    // rows of float32
    std::vector<float> wanted(x.size());  // of each token, as the kernel has it
    for (int r = 0; r < rows; ++r) {
        const int t = c.spread == Spread::list ? list[r] : r;
        if (t < 0) {
            for (size_t i = 0; i < stride; ++i) {
                if (y[r * stride + i] != kPoison) return fail(where, "y of no token was written");
            }
            continue;
        }
        double square = 0.0;
        for (int i = 0; i < c.k; ++i)
            square += static_cast<double>(x[t * stride + i]) * x[t * stride + i];
        const double root = std::sqrt(square / c.k + eps);
        for (size_t i = 0; i < stride; ++i) {
            const float v = x[t * stride + i];
            const double want = c.norm ? v / root * norm[i] : v;
            const float got = y[r * stride + i];
            if (!(std::fabs(got - want) <= (c.norm ? 2e-6 * std::fabs(want) : 0.0))) {
                return fail(where, "row " + std::to_string(r) + " number " + std::to_string(i) +
                                       ": " + std::to_string(got) + ", not " +
                                       std::to_string(want));
            }
            wanted[t * stride + i] = got;
        }
    }
    // the operand is just these numbers, rounded
    for (int r = 0; r < o.capacity; ++r) {
        const int t = token_of[r];
        for (int i = 0; i < o.blocks * 64; ++i) {
            float rest = t >= 0 && i < c.k ? wanted[t * stride + i] : 0.0f;
            for (int part = 0; part < o.parts; ++part) {
                const uint16_t got = out[index_of(o, part, r, i)];
                const uint32_t want = t < 0 ? kPoison16 : rounded(o.bf16, rest);
                if (got != want && !(t >= 0 && rest == 0.0f && (got & 0x7fff) == 0)) {
                    return fail(where, "operand row " + std::to_string(r) + " feature " +
                                           std::to_string(i) + " part " + std::to_string(part));
                }
                rest -= value_of(o.bf16, want);
            }
        }
    }

    // without y the same operand, without an operand the same y; in another order of threads
#if defined(VCUDA_EMULATE)
    fake_schedule(static_cast<uint32_t>(1 + cases % 5));
#endif
    d_out.write(std::vector<uint16_t>(numbers, kPoison16));
    NormRows alone = p;
    alone.y = nullptr;
    alone.overflow = nullptr;
    vcuda::norm_rows(to, alone);
    if (d_out.read() != out) fail(where, "another operand without y");
    d_y.write(std::vector<float>(y.size(), kPoison));
    alone.y = d_y.data();
    alone.out.data = nullptr;
    vcuda::norm_rows(to, alone);
    if (d_y.read() != y) fail(where, "another y without an operand");
#if defined(VCUDA_EMULATE)
    fake_schedule(0);
#endif

    // what a float16 cannot hold is told, and nothing that is not finite gets lost
    const float bad[] = {NAN, INFINITY, -INFINITY, 3e30f, 70000.0f};
    for (float value : bad) {
        std::vector<float> broken = x;
        const int feature = below(c.k);
        broken[static_cast<size_t>(feature)] = value;  // of token 0
        d_x.write(broken);
        d_overflow.write({0});
        vcuda::norm_rows(to, p);
        const bool told = d_overflow.read()[0] != 0;
        const std::vector<uint16_t> after = d_out.read();
        bool shows = told;
        bool there = false;
        for (int r = 0; r < o.capacity; ++r) {
            if (token_of[r] != 0) continue;
            there = true;
            if (!std::isfinite(value_of(o.bf16, after[index_of(o, 0, r, feature)]))) shows = true;
        }
        if (!there) continue;
        const bool lost = !std::isfinite(value) || (c.norm && value == 3e30f);
        if (lost && !shows) fail(where, "a number that is not finite was lost");
        if (o.bf16 && told) fail(where, "a bfloat16 overflow was told");
        if (!o.bf16 && !c.norm && !told) fail(where, "an overflow was not told");
    }
}

// ------------------------------------------------------------------------------------- embed

// A row-major matrix as tiles, element by element after layout.h; and its values.
struct Table {
    Tiles tiles;
    std::vector<uint8_t> codes;
    std::vector<uint16_t> scales;
    std::vector<float> values;  // [n][k]
};

Table make_table(int kind, int n, int k) {
    Table table;
    Tiles &w = table.tiles;
    w = vcuda::tiles_of(kind, 1, n, k);
    table.codes.assign(static_cast<size_t>(w.codes_bytes()), 0);
    table.scales.assign(static_cast<size_t>(w.scales_bytes() / 2), 0);
    table.values.assign(static_cast<size_t>(n) * k, 0.0f);
    const int width = vcuda::step_width(kind), vectors = vcuda::step_vectors(kind);
    for (int row = 0; row < n; ++row) {
        const int g = row % 8, upper = row % 16 / 8;
        for (int i = 0; i < k; ++i) {
            const size_t step = static_cast<size_t>(row / 16) * w.steps + i / width;
            float &value = table.values[static_cast<size_t>(row) * k + i];
            if (kind == VCUDA_BF16) {
                const uint32_t bits = bf16_of(normal(1, 1.0f)[0]);
                const int lane = 4 * g + i % 8 / 2;
                const size_t vector = step * vectors + i % 64 / 16;
                const size_t word = (vector * 32 + lane) * 4 + (i % 16 / 8) * 2 + upper;
                std::memcpy(&table.codes[word * 4 + i % 2 * 2], &bits, 2);
                value = float_of(bits << 16);
                continue;
            }
            const int group = i / 32 % 4, half = i % 32 / 16, lane = 4 * g + i % 16 / 4;
            uint16_t &scale = table.scales[(step * 32 + 4 * g + group) * 2 + upper];
            if (scale == 0) scale = static_cast<uint16_t>(half_of(0.01f + 0.001f * below(100)));
            const int code = kind == VCUDA_Q8 ? below(256) - 128 : below(16) - 8;
            if (kind == VCUDA_Q8) {
                const size_t vector = step * vectors + group;
                const size_t word = (vector * 32 + lane) * 4 + half * 2 + upper;
                table.codes[word * 4 + i % 4] = static_cast<uint8_t>(code);
            } else {
                const size_t vector = step * vectors + group / 2;
                const size_t word = (vector * 32 + lane) * 4 + group % 2 * 2 + upper;
                table.codes[word * 4 + i % 4] |= static_cast<uint8_t>((code & 15) << (4 * half));
            }
            value = static_cast<float>(code) * half_value(scale);
        }
    }
    return table;
}

void run_embed(int kind, int n, int k, int tokens) {
    cases += 1;
    const std::string where = "embed kind " + std::to_string(kind) + " k " + std::to_string(k);
    const Table table = make_table(kind, n, k);
    std::vector<int32_t> ids(static_cast<size_t>(tokens));
    for (int32_t &id : ids) id = below(n);
    ids[0] = n - 1;
    const auto stride = static_cast<size_t>(vcuda::padded_row(k));
    DeviceArray<uint8_t> codes(table.codes);
    DeviceArray<uint16_t> scales(table.scales.empty() ? std::vector<uint16_t>{0} : table.scales);
    DeviceArray<int32_t> d_ids(ids);
    DeviceArray<float> x(std::vector<float>(static_cast<size_t>(tokens) * stride, kPoison));
    vcuda::EmbedRows p;
    p.table = table.tiles;
    p.table.codes = codes.data();
    p.table.scales = reinterpret_cast<uint32_t *>(scales.data());
    p.ids = d_ids.data();
    p.tokens = tokens;
    p.x = x.data();
    Launcher to;
    vcuda::embed_rows(to, p);
    const std::vector<float> got = x.read();
    for (int t = 0; t < tokens; ++t) {
        for (size_t i = 0; i < stride; ++i) {
            const bool padding = i >= static_cast<size_t>(k);
            const float want = padding ? 0.0f : table.values[static_cast<size_t>(ids[t]) * k + i];
            if (got[t * stride + i] != want) {
                return fail(where, "token " + std::to_string(t) + " number " + std::to_string(i));
            }
        }
    }
}

int test() {
    const int ks[] = {1, 5, 48, 64, 100, 129, 384, 2047, 2500, 5000, 9000, 16400, 17001};
    const int tokens[] = {1, 7, 33};
    int n = 0;
    for (int kind : {VCUDA_Q8, VCUDA_BF16}) {
        for (int parts : {1, 2}) {
            for (int k : ks) {
                for (Spread spread : {Spread::none, Spread::list, Spread::places}) {
                    ++n;
                    if (k > 2500 && n % 3 != 0) continue;
                    run({kind, parts, k, k > 2500 ? 3 : tokens[n % 3], n % 4 != 0, spread});
                }
            }
        }
    }
    run({VCUDA_Q4, 1, 40, 2048, true, Spread::none});
    run({VCUDA_BF16, 2, 20, 300, true, Spread::places});
    for (int kind : {VCUDA_Q8, VCUDA_Q4, VCUDA_BF16}) {
        for (int k : {3, 64, 100, 130, 513, 1200}) run_embed(kind, 37, k, 9);
    }
    std::printf("%d cases, %d failures\n", cases, failures);
    return failures == 0 ? 0 : 1;
}

}  // namespace

int main() {
    return vcuda::tests::run_test(test);
}
