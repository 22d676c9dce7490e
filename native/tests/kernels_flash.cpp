// qkv_rows(), kv_operand() and flash() against attend() and a plain reference in double precision,
// for many shapes. Ends with 1 when a difference is too large. Runs on the emulated runtime
// (tests/native_build.py) or on a GPU.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "attention.h"
#include "flash.h"
#include "kernels_memory.h"
#include "kernels_numbers.h"
#include "kv_rows.h"
#include "run_test.h"

#if defined(VCUDA_EMULATE)
#include "fake.h"
#endif

namespace {

using vcuda::Flash;
using vcuda::Launcher;
using vcuda::Operand;
using vcuda::QkvRows;
using vcuda::tests::bf16_to_float;
using vcuda::tests::DeviceArray;
using vcuda::tests::half_to_float;

struct Case {
    int kv_heads, ratio, head_dim, kv, tokens, position, window;
    int parts, kv_parts;
    bool bf16;     // of the result, in two parts; else float16 in `parts`
    int sm_count;  // more of them: positions are cut into parts
    bool norm;

    int heads() const { return kv_heads * ratio; }
    int q_dim() const { return heads() * head_dim; }
    int kv_dim() const { return kv_heads * head_dim; }
    int end() const { return position + tokens; }
    int number_bytes() const { return kv == VCUDA_KV_INT8 ? 1 : kv == VCUDA_KV_F16 ? 2 : 4; }
    int oldest() const { return window > 0 ? std::max(0, position - window + 1) : 0; }
};

std::string describe(const Case &c) {
    const char *kinds[] = {"int8", "f16", "f32"};
    char text[300];
    std::snprintf(text, sizeof text,
                  "%s kv_heads %d ratio %d head_dim %d tokens %d position %d window %d parts %d/%d "
                  "%s multiprocessors %d norm %d",
                  kinds[c.kv], c.kv_heads, c.ratio, c.head_dim, c.tokens, c.position, c.window,
                  c.parts, c.kv_parts, c.bf16 ? "bf16" : "f16", c.sm_count, c.norm ? 1 : 0);
    return text;
}

std::mt19937 random_bits(11);

std::vector<float> normal(size_t count, float scale) {
    std::normal_distribution<float> distribution(0.0f, scale);
    std::vector<float> v(count);
    for (float &x : v) x = distribution(random_bits);
    return v;
}

// K or V of a session on the host.
struct Cache {
    std::vector<uint8_t> rows;  // [positions][kv_dim]
    std::vector<float> scales;  // [positions][kv_heads]

    double value(const Case &c, int position, int head, int i) const {
        const size_t row = static_cast<size_t>(position) * c.kv_heads + head;
        const size_t at = (row * c.head_dim + i) * c.number_bytes();
        if (c.kv == VCUDA_KV_INT8) {
            return static_cast<double>(static_cast<int8_t>(rows[at])) * scales[row];
        }
        if (c.kv == VCUDA_KV_F32) {
            float v;
            std::memcpy(&v, &rows[at], 4);
            return v;
        }
        uint16_t bits;
        std::memcpy(&bits, &rows[at], 2);
        return half_to_float(bits);
    }
};

struct Checker {
    int cases = 0, failures = 0;
    double worst[2] = {0.0, 0.0};  // of parts 1 and 2

    bool expect(bool good, const Case &c, const std::string &what) {
        if (good) return true;
        failures += 1;
        if (failures <= 20) std::printf("FAILED %s: %s\n", describe(c).c_str(), what.c_str());
        return false;
    }
};

// What runs a case here.
std::vector<vcuda::FlashKernels> kernels_of(const Case &c) {
    using vcuda::FlashKernels;
#if defined(VCUDA_EMULATE)
    const bool there = true;
#else
    const bool there = vcuda::flash_can_use_wgmma();
#endif
    if (!there || c.parts > 1 || c.head_dim > 128) return {FlashKernels::mma};
    return {FlashKernels::mma, FlashKernels::wgmma};
}

// Everything of a case on the device. What nobody may read is NaN.
struct Chunk {
    const Case c;
    const int positions = c.end() + 3;
    const int first = c.oldest() / vcuda::kKvRows * vcuda::kKvRows;
    const int kv_rows =
        static_cast<int>(vcuda::ceil_div(c.end() - first, vcuda::kKvRows) + 1) * vcuda::kKvRows;
    const int width = vcuda::kv_width(c.head_dim);
    std::vector<float> qkv =
        normal(static_cast<size_t>(c.tokens) * (c.q_dim() + 2 * c.kv_dim()), 1);
    std::vector<float> q_norm = normal(c.head_dim, 1.0f), k_norm = normal(c.head_dim, 1.0f);
    std::vector<float> cos, sin;
    Cache k, v;

    explicit Chunk(const Case &the_case) : c(the_case) {
        for (float angle : normal(static_cast<size_t>(positions) * c.head_dim / 2, 3.0f)) {
            cos.push_back(std::cos(angle));
            sin.push_back(std::sin(angle));
        }
        for (Cache *cache : {&k, &v}) {
            cache->rows.assign(static_cast<size_t>(positions) * c.kv_dim() * c.number_bytes(),
                               0xff);
            cache->scales.assign(static_cast<size_t>(positions) * c.kv_heads, NAN);
            fill(*cache);
        }
    }

  private:
    void fill(Cache &cache) const {
        for (int p = first; p < c.position; ++p) {
            for (int h = 0; h < c.kv_heads; ++h) {
                const size_t row = static_cast<size_t>(p) * c.kv_heads + h;
                cache.scales[row] = std::fabs(normal(1, 0.01f)[0]) + 1e-3f;
                const std::vector<float> numbers = normal(c.head_dim, 1.0f);
                uint8_t *to = &cache.rows[row * c.head_dim * c.number_bytes()];
                for (int i = 0; i < c.head_dim; ++i) {
                    if (c.kv == VCUDA_KV_INT8) {
                        to[i] = static_cast<uint8_t>(
                            static_cast<int8_t>(std::clamp(numbers[i] * 40.0f, -127.0f, 127.0f)));
                    } else if (c.kv == VCUDA_KV_F16) {
                        const uint16_t bits =
                            static_cast<uint16_t>(random_bits() & 0x83ffu) | 0x3800u;  // 0.5 to 1
                        std::memcpy(to + 2 * i, &bits, 2);
                    } else {
                        std::memcpy(to + 4 * i, &numbers[i], 4);
                    }
                }
            }
        }
    }
};

class Device {
  public:
    explicit Device(const Chunk &chunk)
        : c(chunk.c),
          qkv(chunk.qkv),
          q_norm(chunk.q_norm),
          k_norm(chunk.k_norm),
          cos(chunk.cos),
          sin(chunk.sin),
          k_scales(chunk.k.scales),
          v_scales(chunk.v.scales),
          k(chunk.k.rows),
          v(chunk.v.rows),
          q(poison(static_cast<size_t>(c.parts) * c.tokens * c.q_dim())),
          k16(poison(static_cast<size_t>(c.kv_parts) * c.kv_heads * chunk.width * chunk.kv_rows)),
          v16(poison(static_cast<size_t>(c.kv_parts) * c.kv_heads * chunk.width * chunk.kv_rows)),
          overflow(std::vector<int32_t>{0}),
          scratch(std::vector<float>(vcuda::flash_scratch(c.head_dim, c.sm_count), NAN)),
          out16(poison(static_cast<size_t>(operand(c).bytes() / 2))) {
        to.sm_count = c.sm_count;
        to.overlap = true;
        rows.qkv = qkv.data();
        rows.q_norm = c.norm ? q_norm.data() : nullptr;
        rows.k_norm = c.norm ? k_norm.data() : nullptr;
        rows.eps = 1e-6f;
        rows.cos = cos.data();
        rows.sin = sin.data();
        rows.heads = c.heads();
        rows.kv_heads = c.kv_heads;
        rows.head_dim = c.head_dim;
        rows.tokens = c.tokens;
        rows.position = c.position;
        rows.to.kv = c.kv;
        rows.to.k = k.data();
        rows.to.v = v.data();
        rows.to.k_scales = c.kv == VCUDA_KV_INT8 ? k_scales.data() : nullptr;
        rows.to.v_scales = c.kv == VCUDA_KV_INT8 ? v_scales.data() : nullptr;
        rows.q = q.data();
        rows.q_parts = c.parts;
        rows.overflow = overflow.data();
        flash.q = q.data();
        flash.parts = c.parts;
        flash.kv.parts = c.kv_parts;
        flash.kv.width = chunk.width;
        flash.kv.first = chunk.first;
        flash.kv.capacity = chunk.kv_rows;
        flash.kv.k = k16.data();
        flash.kv.v = v16.data();
        flash.heads = c.heads();
        flash.kv_heads = c.kv_heads;
        flash.head_dim = c.head_dim;
        flash.tokens = c.tokens;
        flash.position = c.position;
        flash.window = c.window;
        flash.scratch = scratch.data();
        flash.out = operand(c);
        flash.out.data = out16.data();
        flash.overflow = overflow.data();
    }

    static std::vector<uint16_t> poison(size_t count) {
        return std::vector<uint16_t>(count, 0xffffu);
    }

    static Operand operand(const Case &c) {
        const vcuda::Tiles w = vcuda::tiles_of(c.bf16 ? VCUDA_BF16 : VCUDA_Q8, 1, 64, c.q_dim());
        return vcuda::operand_of(w, c.bf16 ? 2 : c.parts, c.tokens);
    }

    void run(bool in_two = false) {
        vcuda::qkv_rows(to, rows);
        const int from = flash.kv.first;
        if (in_two && c.position > from) {
            vcuda::kv_operand(to, rows.to, c.kv_heads, c.head_dim, from, c.position, flash.kv,
                              overflow.data());
            vcuda::kv_operand(to, rows.to, c.kv_heads, c.head_dim, c.position, c.end(), flash.kv,
                              overflow.data());
        } else {
            vcuda::kv_operand(to, rows.to, c.kv_heads, c.head_dim, from, c.end(), flash.kv,
                              overflow.data());
        }
        vcuda::flash(to, flash);
    }

    const Case c;
    Launcher to;
    DeviceArray<float> qkv, q_norm, k_norm, cos, sin, k_scales, v_scales;
    DeviceArray<uint8_t> k, v;
    DeviceArray<uint16_t> q, k16, v16;
    DeviceArray<int32_t> overflow;
    DeviceArray<float> scratch;
    DeviceArray<uint16_t> out16;
    QkvRows rows;
    Flash flash;
};

// The number of a feature of a row in an operand, all parts of it.
double number(const Operand &o, const std::vector<uint16_t> &data, int row, int feature) {
    double sum = 0.0;
    for (int part = 0; part < o.parts; ++part) {
        const uint16_t bits = data[static_cast<size_t>(o.index(part, row, feature))];
        sum += o.bf16 ? bf16_to_float(bits) : half_to_float(bits);
    }
    return sum;
}

// K and V rows: what attend() stores, token by token.
void compare_rows(Checker &check, const Chunk &chunk, Device &d) {
    const Case &c = chunk.c;
    DeviceArray<uint8_t> k(chunk.k.rows), v(chunk.v.rows);
    DeviceArray<float> k_scales(chunk.k.scales), v_scales(chunk.v.scales);
    DeviceArray<float> partial(
        std::vector<float>(vcuda::attention_scratch(c.heads(), c.head_dim, 1), NAN));
    DeviceArray<float> out(std::vector<float>(c.q_dim(), NAN));
    DeviceArray<uint32_t> arrived(
        std::vector<uint32_t>(vcuda::attention_counters(c.heads(), c.kv_heads), 0));
    DeviceArray<vcuda::Step> step({vcuda::Step{}});
    vcuda::Attention p;
    p.q_norm = d.rows.q_norm;
    p.k_norm = d.rows.k_norm;
    p.eps = d.rows.eps;
    p.cos = d.cos.data();
    p.sin = d.sin.data();
    p.heads = c.heads();
    p.kv_heads = c.kv_heads;
    p.head_dim = c.head_dim;
    p.window = 1;  // the scores are of no interest
    p.kv = c.kv;
    p.k = k.data();
    p.v = v.data();
    p.k_scales = c.kv == VCUDA_KV_INT8 ? k_scales.data() : nullptr;
    p.v_scales = c.kv == VCUDA_KV_INT8 ? v_scales.data() : nullptr;
    p.step = step.data();
    p.partial = partial.data();
    p.arrived = arrived.data();
    p.max_splits = 1;
    p.out = out.data();
    for (int token = 0; token < c.tokens; ++token) {
        vcuda::Step at{};
        at.position = c.position + token;
        step.write({at});
        p.qkv = d.qkv.data() + static_cast<size_t>(token) * (c.q_dim() + 2 * c.kv_dim());
        vcuda::attend(d.to, p);
    }
    check.expect(d.k.read() == k.read() && d.v.read() == v.read(), c, "rows other than attend's");
    const auto same = [](const std::vector<float> &a, const std::vector<float> &b) {
        return std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
    };
    check.expect(
        same(d.k_scales.read(), k_scales.read()) && same(d.v_scales.read(), v_scales.read()), c,
        "scales other than attend's");
}

// Norm and RoPE of one query, in double.
std::vector<double> query(const Chunk &chunk, int token, int head) {
    const Case &c = chunk.c;
    const int dim = c.head_dim, half = dim / 2;
    const float *x = &chunk.qkv[static_cast<size_t>(token) * (c.q_dim() + 2 * c.kv_dim()) +
                                static_cast<size_t>(head) * dim];
    std::vector<double> row(x, x + dim);
    if (c.norm) {
        double square = 0.0;
        for (double v : row) square += v * v;
        for (int i = 0; i < dim; ++i) row[i] *= chunk.q_norm[i] / std::sqrt(square / dim + 1e-6);
    }
    for (int i = 0; i < half; ++i) {
        const size_t at = static_cast<size_t>(c.position + token) * half + i;
        const double a = row[i], b = row[i + half];
        row[i] = a * chunk.cos[at] - b * chunk.sin[at];
        row[i + half] = b * chunk.cos[at] + a * chunk.sin[at];
    }
    return row;
}

// Of every `step`th token.
void compare_attention(Checker &check, const Chunk &chunk, Device &d, int step = 1) {
    const Case &c = chunk.c;
    const int dim = c.head_dim;
    const Cache k{d.k.read(), d.k_scales.read()}, v{d.v.read(), d.v_scales.read()};
    const std::vector<uint16_t> out = d.out16.read();
    const Operand &o = d.flash.out;
    for (int token = c.tokens - 1; token >= 0; token -= step) {
        const int newest = c.position + token;
        const int oldest = c.window > 0 ? std::max(0, newest - c.window + 1) : 0;
        for (int head = 0; head < c.heads(); ++head) {
            const std::vector<double> q = query(chunk, token, head);
            std::vector<double> score, want(dim, 0.0);
            for (int at = oldest; at <= newest; ++at) {
                double dot = 0.0;
                for (int i = 0; i < dim; ++i) dot += q[i] * k.value(c, at, head / c.ratio, i);
                score.push_back(dot / std::sqrt(static_cast<double>(dim)));
            }
            const double most = *std::max_element(score.begin(), score.end());
            double total = 0.0;
            for (size_t j = 0; j < score.size(); ++j) {
                const double e = std::exp(score[j] - most);
                total += e;
                for (int i = 0; i < dim; ++i) {
                    want[i] += e * v.value(c, oldest + static_cast<int>(j), head / c.ratio, i);
                }
            }
            for (int i = 0; i < dim; ++i) {
                const double got = number(o, out, token, head * dim + i);
                const double error = std::fabs(got - want[i] / total);
                const double rounding = std::fabs(want[i] / total) * (c.bf16 ? 0x1p-16 : 0x1p-21);
                const double allowed = c.parts == 1 ? 4e-3 : 4e-6 + rounding;
                if (!check.expect(error <= allowed, c,
                                  "token " + std::to_string(token) + " head " +
                                      std::to_string(head) + " number " + std::to_string(i) + ": " +
                                      std::to_string(got) + ", not " +
                                      std::to_string(want[i] / total))) {
                    return;
                }
                double &worst = check.worst[c.parts - 1];
                if (c.parts == 1 || !c.bf16) worst = std::max(worst, error);
            }
        }
        for (int i = c.q_dim(); i < o.blocks * vcuda::kOperandBlock; ++i) {
            check.expect(number(o, out, token, i) == 0.0, c, "a feature that is none is not 0");
        }
    }
    for (int row = c.tokens; row < o.capacity; ++row) {
        for (int part = 0; part < o.parts; ++part) {
            check.expect(out[static_cast<size_t>(o.index(part, row, 0))] == 0xffffu, c,
                         "a row that is none was written");
        }
    }
}

void run(Checker &check, const Case &c) {
    const Chunk chunk(c);
    bool first = true;
    for (const vcuda::FlashKernels which : kernels_of(c)) {
        vcuda::choose_flash_kernels(which);
        Device d(chunk);
        d.run();
        if (first) compare_rows(check, chunk, d);
        first = false;
        compare_attention(check, chunk, d);
        check.expect(d.overflow.read()[0] == 0, c, "overflow");

        // once more, blocks and threads in another order, K/V brought in two pieces: the same bits
        const std::vector<uint16_t> out = d.out16.read();
#if defined(VCUDA_EMULATE)
        fake_schedule(static_cast<uint32_t>(1 + check.cases % 5));
#endif
        d.out16.write(Device::poison(out.size()));
        d.run(true);
#if defined(VCUDA_EMULATE)
        fake_schedule(0);
#endif
        check.expect(d.out16.read() == out, c, "not the same twice");
        check.cases += 1;
    }
    vcuda::choose_flash_kernels(vcuda::FlashKernels::automatic);
}

// What float16 cannot hold is said, and what is no number is not lost.
void run_broken(Checker &check, Chunk &chunk) {
    const Case &c = chunk.c;
    const size_t stride = static_cast<size_t>(c.q_dim()) + 2 * c.kv_dim();
    const size_t q_at = stride * (c.tokens / 2) + 3, k_at = q_at + c.q_dim();
    const size_t v_at = k_at + c.kv_dim();
    for (const float bad : {1e7f, INFINITY, NAN}) {
        for (const size_t at : {q_at, k_at, v_at}) {
            const float good = chunk.qkv[at];
            chunk.qkv[at] = bad;
            Device d(chunk);
            d.run();
            const std::vector<uint16_t> out = d.out16.read();
            const double number_of_last = number(d.flash.out, out, c.tokens - 1, 3);
            const double number_of_own = number(d.flash.out, out, c.tokens / 2, 3);
            const bool said = d.overflow.read()[0] != 0;
            // a key or value that is large is one that int8 and float32 hold; as a query it is not
            const bool held = bad == 1e7f && c.kv == VCUDA_KV_INT8 && at != q_at && !said;
            check.expect(said || held || std::isnan(number_of_own) || std::isinf(number_of_own) ||
                             std::isnan(number_of_last),
                         c, "a number that float16 does not hold was lost");
            chunk.qkv[at] = good;
        }
    }
}

void run_broken(Checker &check, const Case &c) {
    Chunk chunk(c);
    for (const vcuda::FlashKernels which : kernels_of(c)) {
        vcuda::choose_flash_kernels(which);
        run_broken(check, chunk);
        check.cases += 1;
    }
    vcuda::choose_flash_kernels(vcuda::FlashKernels::automatic);
}
int test() {
    Checker check;
    const int dims[] = {16, 48, 64, 80, 96, 112, 128, 256};
    const int ratios[] = {1, 2, 3, 4, 7, 8};
    const int positions[] = {0, 1, 63, 64, 130};
    const int tokens[] = {1, 17, 40, 66};
    int n = 0;
    for (int kv : {VCUDA_KV_INT8, VCUDA_KV_F16, VCUDA_KV_F32}) {
        const int exact = kv == VCUDA_KV_F16 ? 1 : 2;
        for (int parts : {1, 2}) {
            for (int dim : dims) {
                const int ratio = ratios[n % 6], window = n % 3 == 1 ? 20 + 13 * (n % 7) : 0;
                const int count = dim == 256 ? 17 : tokens[n % 4];
                run(check, {1 + n % 2, ratio, dim, kv, count, positions[n % 5], window, parts,
                            parts == 1 ? 1 : exact, n % 2 == 0, 1, n % 4 < 2});
                ++n;
            }
        }
        // cut into parts, and windows that begin inside one
        run(check, {1, 3, 64, kv, 5, 900, 0, 1, 1, false, 132, true});
        run(check, {1, 2, 128, kv, 3, 700, 0, 2, exact, true, 132, true});
        run(check, {2, 7, 80, kv, 4, 800, 650, 2, exact, false, 132, false});
        // several tiles of rows and of positions, more pieces of work than blocks
        run(check, {2, 4, 128, kv, 70, 400, 0, 1, 1, true, 3, true});
        run(check, {3, 2, 64, kv, 130, 300, 200, 1, 1, false, 2, false});
        run_broken(check, {1, 2, 64, kv, 20, 5, 0, 1, 1, false, 1, false});
        run_broken(check, {1, 2, 64, kv, 20, 5, 0, 2, exact, true, 1, false});
    }
    std::printf("%d cases, %d failures, largest error %.2e (parts 1), %.2e (parts 2)\n",
                check.cases, check.failures, check.worst[0], check.worst[1]);
    return check.failures == 0 ? 0 : 1;
}

}  // namespace

int main() {
    return vcuda::tests::run_test(test);
}
