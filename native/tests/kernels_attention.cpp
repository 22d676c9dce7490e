// attend() against a plain reference in double precision, for many shapes. Ends with 1 when a
// difference is too large. Runs on the emulated runtime (tests/native_build.py) or on a GPU.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "attention.h"
#include "kernels_memory.h"
#include "run_test.h"

#if defined(VCUDA_EMULATE)
#include "fake.h"
#endif

namespace {

using vcuda::Attention;
using vcuda::Launcher;
using vcuda::Step;
using vcuda::tests::DeviceArray;

struct Case {
    int kv_heads, ratio, head_dim, kv, position, window, max_splits;
    bool norm;
    float sharp;  // what the queries are multiplied by: above 1 a few positions matter
};

const char *kind_name(int kv) {
    return kv == VCUDA_KV_INT8 ? "int8" : kv == VCUDA_KV_F16 ? "f16" : "f32";
}

size_t number_bytes(int kv) {
    return kv == VCUDA_KV_INT8 ? 1 : kv == VCUDA_KV_F16 ? 2 : 4;
}

std::string describe(const Case &c) {
    char text[200];
    std::snprintf(text, sizeof text,
                  "%s kv_heads %d ratio %d head_dim %d position %d window %d splits %d norm %d",
                  kind_name(c.kv), c.kv_heads, c.ratio, c.head_dim, c.position, c.window,
                  c.max_splits, c.norm ? 1 : 0);
    return text;
}

std::mt19937 random_bits(7);

std::vector<float> normal(size_t count, float scale) {
    std::normal_distribution<float> distribution(0.0f, scale);
    std::vector<float> v(count);
    for (float &x : v) x = distribution(random_bits);
    return v;
}

float half_to_float(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float v = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                            : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
    if (exponent == 31) v = fraction == 0 ? INFINITY : NAN;
    return (bits & 0x8000) != 0 ? -v : v;
}

// Nearest, ties to even, for values whose float16 is normal or 0.
uint16_t float_to_half(float v) {
    uint32_t u;
    std::memcpy(&u, &v, 4);
    const uint32_t sign = u >> 16 & 0x8000u;
    if (std::fabs(v) < 0x1p-14f) {
        return static_cast<uint16_t>(
            sign | static_cast<uint32_t>(std::nearbyint(std::ldexp(std::fabs(v), 24))));
    }
    const uint32_t a = u & 0x7fffffffu;
    return static_cast<uint16_t>(sign | ((a + 0xfffu + (a >> 13 & 1u) - 0x38000000u) >> 13));
}

// ------------------------------------------------------------------------------- the reference

// K or V of one layer on the host, in either form.
struct Cache {
    std::vector<uint8_t> rows;  // [positions][kv_heads][head_dim] int8, float16 or float32
    std::vector<float> scales;  // [positions][kv_heads]
};

double stored(const Cache &cache, const Case &c, int position, int head, int i) {
    const size_t row = static_cast<size_t>(position) * c.kv_heads + head;
    const size_t at = row * c.head_dim + i;
    if (c.kv == VCUDA_KV_INT8) {
        return static_cast<double>(static_cast<int8_t>(cache.rows[at])) * cache.scales[row];
    }
    if (c.kv == VCUDA_KV_F32) {
        float value;
        std::memcpy(&value, &cache.rows[4 * at], 4);
        return value;
    }
    uint16_t bits;
    std::memcpy(&bits, &cache.rows[2 * at], 2);
    return half_to_float(bits);
}

// A row as CpuEngine stores it, in float32.
void store(Cache &cache, const Case &c, int position, int head, const std::vector<float> &values) {
    const size_t row = static_cast<size_t>(position) * c.kv_heads + head;
    if (c.kv == VCUDA_KV_INT8) {
        float largest = 0.0f;
        for (float v : values) largest = std::max(largest, std::fabs(v));
        const float scale = std::max(largest * static_cast<float>(1.0 / 127.0), 1e-30f);
        cache.scales[row] = scale;
        for (int i = 0; i < c.head_dim; ++i) {
            const float code = std::nearbyint(values[i] / scale);
            cache.rows[row * c.head_dim + i] =
                static_cast<uint8_t>(static_cast<int8_t>(static_cast<int>(code)));
        }
    } else if (c.kv == VCUDA_KV_F32) {
        std::memcpy(&cache.rows[4 * row * c.head_dim], values.data(), 4 * values.size());
    } else {
        for (int i = 0; i < c.head_dim; ++i) {
            const uint16_t bits = float_to_half(values[i]);
            std::memcpy(&cache.rows[2 * (row * c.head_dim + i)], &bits, 2);
        }
    }
}

// Norm and RoPE of one row, in float32 as CpuEngine has it.
std::vector<float> prepared(const float *x, const float *norm, float eps, const float *cos,
                            const float *sin, int dim) {
    std::vector<float> row(x, x + dim);
    if (norm != nullptr) {
        double square = 0.0;
        for (float v : row) square += static_cast<double>(v) * v;
        const float root = std::sqrt(static_cast<float>(square / dim) + eps);
        for (int i = 0; i < dim; ++i) row[i] = row[i] / root * norm[i];
    }
    for (int i = 0; i < dim / 2; ++i) {
        const float a = row[i], b = row[i + dim / 2];
        row[i] = a * cos[i] - b * sin[i];
        row[i + dim / 2] = b * cos[i] + a * sin[i];
    }
    return row;
}

struct Checker {
    int cases = 0, failures = 0, other_codes = 0;
    double worst = 0.0;

    void expect(bool good, const Case &c, const std::string &what) {
        if (good) return;
        failures += 1;
        if (failures <= 20) std::printf("FAILED %s: %s\n", describe(c).c_str(), what.c_str());
    }
};

// The difference of two rows as stored: equal, or by one code here and there (with a norm, whose
// sum is added in another order).
void compare_row(Checker &check, const Case &c, const Cache &got, const Cache &want,
                 const char *name, bool exact) {
    for (int head = 0; head < c.kv_heads; ++head) {
        const size_t row = static_cast<size_t>(c.position) * c.kv_heads + head;
        if (c.kv == VCUDA_KV_INT8) {
            const float a = got.scales[row], b = want.scales[row];
            check.expect(
                exact ? a == b : std::fabs(a - b) <= 1e-6f * b, c,
                std::string(name) + " scale " + std::to_string(a) + ", not " + std::to_string(b));
        }
        for (int i = 0; i < c.head_dim; ++i) {
            const double a = stored(got, c, c.position, head, i);
            const double b = stored(want, c, c.position, head, i);
            if (c.kv == VCUDA_KV_INT8) {
                const int codes = std::abs(static_cast<int8_t>(got.rows[row * c.head_dim + i]) -
                                           static_cast<int8_t>(want.rows[row * c.head_dim + i]));
                check.other_codes += codes;
                check.expect(codes <= (exact ? 0 : 1), c, std::string(name) + " code");
            } else {
                check.expect(std::fabs(a - b) <= (exact ? 0.0 : 1e-3 * std::fabs(b) + 1e-6), c,
                             std::string(name) + " value");
            }
        }
    }
}

void run(Checker &check, const Case &c) {
    const int dim = c.head_dim, heads = c.kv_heads * c.ratio, half = dim / 2;
    const int positions = c.position + 3;  // two rows behind the newest must stay untouched
    const size_t kv_dim = static_cast<size_t>(c.kv_heads) * dim;
    const float eps = 1e-6f;

    std::vector<float> qkv = normal(static_cast<size_t>(heads) * dim + 2 * kv_dim, 1.0f);
    for (int i = 0; i < heads * dim; ++i) qkv[i] *= c.sharp;
    std::vector<float> q_norm = normal(dim, 1.0f), k_norm = normal(dim, 1.0f);
    std::vector<float> cos(static_cast<size_t>(positions) * half), sin(cos.size());
    const std::vector<float> angles = normal(cos.size(), 3.0f);
    for (size_t i = 0; i < cos.size(); ++i) {
        cos[i] = std::cos(angles[i]);
        sin[i] = std::sin(angles[i]);
    }

    // history; what must not be read is NaN
    const int first = c.window > 0 ? std::max(0, c.position - c.window + 1) : 0;
    Cache k, v;
    for (Cache *cache : {&k, &v}) {
        cache->rows.assign(positions * kv_dim * number_bytes(c.kv), 0xff);
        cache->scales.assign(static_cast<size_t>(positions) * c.kv_heads, NAN);
        for (int p = first; p < c.position; ++p) {
            for (int h = 0; h < c.kv_heads; ++h) store(*cache, c, p, h, normal(dim, 1.0f));
        }
    }

    Step step{};
    step.position = c.position;
    const size_t counters = vcuda::attention_counters(heads, c.kv_heads);
    const size_t scratch = vcuda::attention_scratch(heads, dim, c.max_splits);
    DeviceArray<float> d_qkv(qkv), d_q_norm(q_norm), d_k_norm(k_norm), d_cos(cos), d_sin(sin);
    DeviceArray<uint8_t> d_k(k.rows), d_v(v.rows);
    DeviceArray<float> d_k_scales(k.scales), d_v_scales(v.scales);
    DeviceArray<float> d_partial(std::vector<float>(scratch, NAN));
    DeviceArray<float> d_out(std::vector<float>(static_cast<size_t>(heads) * dim, NAN));
    DeviceArray<uint32_t> d_arrived(std::vector<uint32_t>(counters, 0));
    DeviceArray<Step> d_step({step});
    Attention p;
    p.qkv = d_qkv.data();
    p.q_norm = c.norm ? d_q_norm.data() : nullptr;
    p.k_norm = c.norm ? d_k_norm.data() : nullptr;
    p.eps = eps;
    p.cos = d_cos.data();
    p.sin = d_sin.data();
    p.heads = heads;
    p.kv_heads = c.kv_heads;
    p.head_dim = dim;
    p.window = c.window;
    p.kv = c.kv;
    p.k = d_k.data();
    p.v = d_v.data();
    p.k_scales = c.kv == VCUDA_KV_INT8 ? d_k_scales.data() : nullptr;
    p.v_scales = c.kv == VCUDA_KV_INT8 ? d_v_scales.data() : nullptr;
    p.step = d_step.data();
    p.partial = d_partial.data();
    p.arrived = d_arrived.data();
    p.max_splits = c.max_splits;
    p.out = d_out.data();

    Launcher to;
    vcuda::attend(to, p);
    const std::vector<float> out = d_out.read();
    Cache k_after{d_k.read(), d_k_scales.read()}, v_after{d_v.read(), d_v_scales.read()};

    // once more, blocks and threads in another order: the same bits, the row written over
#if defined(VCUDA_EMULATE)
    fake_schedule(static_cast<uint32_t>(1 + check.cases % 5));
#endif
    d_out.write(std::vector<float>(out.size(), NAN));
    vcuda::attend(to, p);
    const std::vector<float> again = d_out.read();
#if defined(VCUDA_EMULATE)
    fake_schedule(0);
#endif
    check.expect(std::memcmp(out.data(), again.data(), out.size() * 4) == 0, c,
                 "not the same twice");
    for (uint32_t a : d_arrived.read()) check.expect(a == 0, c, "a counter is left");

    // the new row, and nothing else, was written
    const size_t row_at = static_cast<size_t>(c.position) * half;
    for (int h = 0; h < c.kv_heads; ++h) {
        const float *key = &qkv[static_cast<size_t>(heads + h) * dim];
        const float *value = key + kv_dim;
        store(
            k, c, c.position, h,
            prepared(key, c.norm ? k_norm.data() : nullptr, eps, &cos[row_at], &sin[row_at], dim));
        store(v, c, c.position, h, std::vector<float>(value, value + dim));
    }
    compare_row(check, c, k_after, k, "key", !c.norm);
    compare_row(check, c, v_after, v, "value", true);
    const size_t row_bytes = kv_dim * number_bytes(c.kv);
    for (int other = 0; other < positions; ++other) {
        if (other == c.position) continue;
        const size_t at = other * row_bytes;
        check.expect(std::memcmp(&k.rows[at], &k_after.rows[at], row_bytes) == 0 &&
                         std::memcmp(&v.rows[at], &v_after.rows[at], row_bytes) == 0,
                     c, "another row was written");
        for (int h = 0; h < c.kv_heads; ++h) {
            const size_t row = static_cast<size_t>(other) * c.kv_heads + h;
            check.expect(std::memcmp(&k.scales[row], &k_after.scales[row], 4) == 0 &&
                             std::memcmp(&v.scales[row], &v_after.scales[row], 4) == 0,
                         c, "another scale was written");
        }
    }

    // a NaN in a key or a value is not lost among the codes
    std::vector<float> broken = qkv;
    broken[static_cast<size_t>(heads) * dim + (check.cases % 2 == 0 ? 0 : kv_dim) + 3] = NAN;
    d_qkv.write(broken);
    vcuda::attend(to, p);
    const std::vector<float> lost = d_out.read();
    check.expect(std::any_of(lost.begin(), lost.begin() + static_cast<size_t>(c.ratio) * dim,
                             [](float x) { return std::isnan(x); }),
                 c, "a NaN was lost");

    // attention itself, on the row as it was stored
    for (int head = 0; head < heads; ++head) {
        const std::vector<float> q =
            prepared(&qkv[static_cast<size_t>(head) * dim], c.norm ? q_norm.data() : nullptr, eps,
                     &cos[row_at], &sin[row_at], dim);
        const int kv_head = head / c.ratio;
        std::vector<double> score;
        for (int at = first; at <= c.position; ++at) {
            double dot = 0.0;
            for (int i = 0; i < dim; ++i) dot += q[i] * stored(k_after, c, at, kv_head, i);
            score.push_back(dot / std::sqrt(static_cast<double>(dim)));
        }
        const double most = *std::max_element(score.begin(), score.end());
        std::vector<double> want(dim, 0.0);
        double total = 0.0;
        for (size_t j = 0; j < score.size(); ++j) {
            const double e = std::exp(score[j] - most);
            total += e;
            for (int i = 0; i < dim; ++i) {
                want[i] += e * stored(v_after, c, first + static_cast<int>(j), kv_head, i);
            }
        }
        for (int i = 0; i < dim; ++i) {
            const double got = out[static_cast<size_t>(head) * dim + i];
            const double error = std::fabs(got - want[i] / total);
            if (!(error <= 2e-5)) {
                check.expect(false, c,
                             "head " + std::to_string(head) + " number " + std::to_string(i) +
                                 ": " + std::to_string(got) + ", not " +
                                 std::to_string(want[i] / total));
                return;
            }
            check.worst = std::max(check.worst, error);
        }
    }
    check.cases += 1;
}

int test() {
    Checker check;
    const int ratios[] = {1, 2, 3, 4, 7, 8, 12, 16};
    const int dims[] = {16, 48, 64, 80, 128, 256};
    const int positions[] = {0, 1, 63, 64, 65, 150, 300};
    int n = 0;
    for (int kv : {VCUDA_KV_INT8, VCUDA_KV_F16, VCUDA_KV_F32}) {
        for (int ratio : ratios) {
            for (int dim : dims) {
                // every kernel meets every position in turn, with norm and windows now and then
                for (int i = 0; i < 4; ++i, ++n) {
                    const int position = positions[(n + n / 7) % 7];
                    const int window = n % 3 == 1 ? 40 + 13 * (n % 11) : 0;
                    run(check, {1 + n % 3, ratio, dim, kv, position, window, 1 + n % 5, n % 2 == 0,
                                n % 4 == 3 ? 6.0f : 1.0f});
                }
            }
        }
        // deep: many parts, and windows that begin inside one
        run(check, {2, 8, 128, kv, 1000, 0, 20, true, 1.0f});
        run(check, {1, 4, 64, kv, 1000, 0, 7, false, 6.0f});
        run(check, {1, 16, 128, kv, 1000, 513, 20, true, 1.0f});
        run(check, {1, 1, 256, kv, 1000, 64, 20, false, 1.0f});
        run(check, {1, 2, 80, kv, 1000, 1, 20, false, 1.0f});
        run(check, {1, 3, 128, kv, 1000, 1001, 3, true, 1.0f});
    }
    std::printf("%d cases, %d failures, largest error %.2e, %d codes other by 1\n", check.cases,
                check.failures, check.worst, check.other_codes);
    return check.failures == 0 ? 0 : 1;
}

}  // namespace

int main() {
    return vcuda::tests::run_test(test);
}
