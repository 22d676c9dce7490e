// Routing of many tokens and the sum of what their experts give, against plain C++. Ends with 1 at
// a difference. Runs on the emulated runtime (tests/native_build.py) or on a GPU.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels_memory.h"
#include "moe_rows.h"
#include "run_test.h"

#if defined(VCUDA_EMULATE)
#include "fake.h"
#endif

namespace {

using vcuda::CombineRows;
using vcuda::Launcher;
using vcuda::Routing;
using vcuda::RowTile;
using vcuda::tests::DeviceArray;

std::mt19937 random_bits(3);

int below(int n) {
    return static_cast<int>(random_bits() % static_cast<unsigned>(n));
}

float normal() {
    return std::normal_distribution<float>()(random_bits);
}

// What the logits are like.
enum class Kind {
    numbers,  // any
    ties,     // small integers times 1/8: exact, and many the same
    one,      // the last expert is everybody's first
    same,     // all logits are the same: experts 0 .. top - 1
};

struct Case {
    int tokens, experts, top, k, width;
    bool normalise;
    Kind kind;
};

int cases = 0, failures = 0;

void fail(const Case &c, const std::string &what) {
    failures += 1;
    if (failures > 20) return;
    std::printf("FAILED tokens %d experts %d top %d k %d width %d normalise %d kind %d: %s\n",
                c.tokens, c.experts, c.top, c.k, c.width, c.normalise ? 1 : 0,
                static_cast<int>(c.kind), what.c_str());
}

constexpr int32_t kPoison = 0x5a5a5a5a;

bool same_tile(const RowTile &a, const RowTile &b) {
    return a.matrix == b.matrix && a.first == b.first && a.count == b.count;
}

// Everything that routing writes, in device memory and as it was read.
struct Results {
    std::vector<int32_t> chosen, slots, list, count;
    std::vector<uint32_t> weights;  // bits
    std::vector<RowTile> tiles;
};

class Device {
  public:
    Device(const Case &c, const std::vector<float> &x, const std::vector<float> &w)
        : entries_(static_cast<size_t>(c.tokens) * c.top),
          rows_(static_cast<size_t>(vcuda::most_slots(c.tokens, c.top, c.experts))),
          most_(static_cast<size_t>(vcuda::most_tiles(c.tokens, c.top, c.experts, c.width))),
          x_(x),
          w_(w),
          scratch_(std::vector<uint8_t>(vcuda::routing_scratch(c.tokens, c.experts, c.k), 0xff)),
          chosen_(std::vector<int32_t>(entries_)),
          slots_(std::vector<int32_t>(entries_)),
          weights_(std::vector<uint32_t>(entries_)),
          list_(std::vector<int32_t>(rows_)),
          tiles_(std::vector<RowTile>(most_)),
          count_({kPoison}) {
        p_.w = w_.data();
        p_.experts = c.experts;
        p_.k = c.k;
        p_.x = x_.data();
        p_.tokens = c.tokens;
        p_.top = c.top;
        p_.normalise = c.normalise;
        p_.scratch = scratch_.data();
        p_.chosen = chosen_.data();
        p_.weights = reinterpret_cast<float *>(weights_.data());
        p_.width = c.width;
        p_.slots = slots_.data();
        p_.list = list_.data();
        p_.list_rows = static_cast<int32_t>(rows_);
        p_.tiles = tiles_.data();
        p_.tile_count = count_.data();
    }

    Results run(const std::vector<float> &x, bool overlap) {
        x_.write(x);
        chosen_.write(std::vector<int32_t>(entries_, kPoison));
        slots_.write(std::vector<int32_t>(entries_, kPoison));
        weights_.write(std::vector<uint32_t>(entries_, kPoison));
        list_.write(std::vector<int32_t>(rows_, kPoison));
        tiles_.write(std::vector<RowTile>(most_, RowTile{kPoison, kPoison, kPoison, kPoison}));
        Launcher to;
        to.overlap = overlap;
        vcuda::router_logits(to, p_);
        vcuda::choose_experts(to, p_);
        vcuda::group_slots(to, p_);
        return {chosen_.read(), slots_.read(),   list_.read(),
                count_.read(),  weights_.read(), tiles_.read()};
    }

  private:
    size_t entries_, rows_, most_;
    DeviceArray<float> x_, w_;
    DeviceArray<uint8_t> scratch_;
    DeviceArray<int32_t> chosen_, slots_;
    DeviceArray<uint32_t> weights_;
    DeviceArray<int32_t> list_;
    DeviceArray<RowTile> tiles_;
    DeviceArray<int32_t> count_;
    Routing p_;
};

float weight_of(const Results &r, size_t entry) {
    float v;
    std::memcpy(&v, &r.weights[entry], 4);
    return v;
}

// chosen and weights of one token whose logits are finite.
void check_choice(const Case &c, const Results &r, int token, const std::vector<double> &logits) {
    const bool exact = c.kind != Kind::numbers;
    std::vector<int> order(logits.size());
    for (size_t e = 0; e < order.size(); ++e) order[e] = static_cast<int>(e);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return logits[a] > logits[b]; });
    double total = 0.0, chosen_total = 0.0;
    for (double v : logits) total += std::exp(v - logits[order[0]]);
    const auto at = static_cast<size_t>(token) * c.top;
    for (int j = 0; j < c.top; ++j) {
        const int e = r.chosen[at + j];
        if (e < 0 || e >= c.experts) return fail(c, "an expert that is none");
        // in another order only where two logits are the same to float32
        const double off = std::fabs(logits[e] - logits[order[j]]);
        if (exact ? e != order[j] : off > 1e-5) {
            return fail(c, "token " + std::to_string(token) + " rank " + std::to_string(j) + ": " +
                               std::to_string(e) + ", not " + std::to_string(order[j]));
        }
        for (int other = 0; other < j; ++other) {
            if (r.chosen[at + other] == e) return fail(c, "an expert twice");
        }
        chosen_total += std::exp(logits[e] - logits[order[0]]) / total;
    }
    for (int j = 0; j < c.top; ++j) {
        double want = std::exp(logits[r.chosen[at + j]] - logits[order[0]]) / total;
        if (c.normalise) want /= chosen_total;
        const float got = weight_of(r, at + j);
        if (!(std::fabs(got - want) <= 2e-5 * want + 1e-12)) {
            return fail(c, "weight " + std::to_string(got) + ", not " + std::to_string(want));
        }
    }
}

// slots, list and tiles of what was chosen.
void check_groups(const Case &c, const Results &r) {
    std::vector<int32_t> list(r.list.size(), -1);
    std::vector<RowTile> tiles;
    std::vector<std::array<int, 3>> order;  // the larger tiles of an expert come first
    int row = 0;
    for (int e = 0; e < c.experts; ++e) {
        const int first = row;
        for (size_t i = 0; i < r.chosen.size(); ++i) {
            if (r.chosen[i] != e) continue;
            if (r.slots[i] != row) return fail(c, "slot of entry " + std::to_string(i));
            list[row] = static_cast<int32_t>(i) / c.top;
            row += 1;
        }
        const int count = row - first;
        const int parts = (count + c.width - 1) / c.width;  // even ones
        const int rows = parts > 0 ? (count + parts * 8 - 1) / (parts * 8) * 8 : 0;
        for (int at = first; at < row; at += rows) {
            tiles.push_back({e, at, std::min(rows, row - at), 0});
            order.push_back({-rows, e, at});
        }
        row = (row + 7) / 8 * 8;
    }
    std::vector<RowTile> by_size;
    std::sort(order.begin(), order.end());
    for (const auto &place : order) {
        by_size.push_back(*std::find_if(tiles.begin(), tiles.end(), [&](const RowTile &tile) {
            return tile.first == place[2];
        }));
    }
    tiles = by_size;
    if (r.list != list) fail(c, "the list of rows");
    if (r.count[0] != static_cast<int32_t>(tiles.size())) return fail(c, "number of tiles");
    if (!std::equal(tiles.begin(), tiles.end(), r.tiles.begin(), same_tile)) fail(c, "tiles");
    for (size_t i = tiles.size(); i < r.tiles.size(); ++i) {
        if (r.tiles[i].matrix != kPoison) return fail(c, "more tiles than there are");
    }
    for (const RowTile &tile : tiles) {
        if (tile.first + tile.count > static_cast<int>(r.list.size()))
            fail(c, "a tile beyond the end");
    }
}

bool same(const Results &a, const Results &b) {
    return a.chosen == b.chosen && a.weights == b.weights && a.slots == b.slots &&
           a.list == b.list && a.count == b.count &&
           std::equal(a.tiles.begin(), a.tiles.begin() + a.count[0], b.tiles.begin(), same_tile);
}

void run(const Case &c) {
    cases += 1;
    std::vector<float> x(static_cast<size_t>(c.tokens) * c.k);
    std::vector<float> w(static_cast<size_t>(c.experts) * c.k);
    const bool integers = c.kind != Kind::numbers;
    const float scale = integers ? 0.125f : 2.0f / std::sqrt(static_cast<float>(c.k));
    for (float &v : x) v = integers ? static_cast<float>(below(5) - 2) : normal();
    for (float &v : w) v = scale * (integers ? static_cast<float>(below(5) - 2) : normal());
    if (c.kind == Kind::one) {  // its logit: 4 k / 8, or more than any other can have
        for (float &v : x) v = std::fabs(v);
        for (int i = 0; i < c.k; ++i) w[w.size() - 1 - i] = 0.5f;
    }
    if (c.kind == Kind::same) std::fill(w.begin(), w.end(), 0.25f);

    Device device(c, x, w);
    const Results r = device.run(x, false);
    for (int t = 0; t < c.tokens; ++t) {
        std::vector<double> logits(static_cast<size_t>(c.experts), 0.0);
        for (int e = 0; e < c.experts; ++e) {
            for (int i = 0; i < c.k; ++i) {
                logits[e] += static_cast<double>(x[static_cast<size_t>(t) * c.k + i]) *
                             w[static_cast<size_t>(e) * c.k + i];
            }
        }
        check_choice(c, r, t, logits);
    }
    check_groups(c, r);

    // in another order of blocks and threads the same bits
#if defined(VCUDA_EMULATE)
    fake_schedule(static_cast<uint32_t>(1 + cases % 5));
#endif
    if (!same(r, device.run(x, true))) fail(c, "not the same twice");
#if defined(VCUDA_EMULATE)
    fake_schedule(0);
#endif

    // a number that is not finite makes NaN of its token's weights and of no other's
    std::vector<float> broken = x;
    const int token = below(c.tokens);
    const float bad[] = {NAN, INFINITY, -INFINITY};
    broken[static_cast<size_t>(token) * c.k + below(c.k)] = bad[cases % 3];
    const Results after = device.run(broken, false);
    for (size_t i = 0; i < after.weights.size(); ++i) {
        const bool its = static_cast<int>(i) / c.top == token;
        if (its ? !std::isnan(weight_of(after, i)) : after.weights[i] != r.weights[i]) {
            fail(c, its ? "a NaN was lost" : "a NaN reached another token");
            break;
        }
    }
    check_groups(c, after);
}

// ------------------------------------------------------------------------------------- combine

void run_combine(int tokens, int top, int k, int64_t stride) {
    cases += 1;
    const Case c{tokens, 0, top, k, static_cast<int>(stride), false, Kind::numbers};
    const auto row = static_cast<size_t>(vcuda::padded_row(k));
    const int rows = tokens * top + 8;
    std::vector<int> free(static_cast<size_t>(rows));
    for (int i = 0; i < rows; ++i) free[i] = i;
    std::shuffle(free.begin(), free.end(), random_bits);
    const std::vector<int32_t> slots(free.begin(), free.begin() + tokens * top);
    // what no slot names, and what pads a row, is NaN
    std::vector<float> y(static_cast<size_t>(rows) * stride, NAN);
    for (int32_t slot : slots) {
        for (int i = 0; i < k; ++i) y[static_cast<size_t>(slot) * stride + i] = normal();
    }
    std::vector<float> weights(slots.size()), x(static_cast<size_t>(tokens) * row, 0.0f);
    for (float &v : weights) v = std::fabs(normal());
    for (int t = 0; t < tokens; ++t) {
        for (int i = 0; i < k; ++i) x[t * row + i] = normal();
    }
    DeviceArray<float> d_y(y), d_weights(weights), d_x(x);
    DeviceArray<int32_t> d_slots(slots);
    CombineRows p;
    p.y = d_y.data();
    p.stride = stride;
    p.slots = d_slots.data();
    p.weights = d_weights.data();
    p.tokens = tokens;
    p.top = top;
    p.k = k;
    p.x = d_x.data();
    Launcher to;
    vcuda::combine_rows(to, p);
    for (int t = 0; t < tokens; ++t) {
        for (int i = 0; i < k; ++i) {
            volatile float sum = 0.0f;  // each step rounded
            for (int j = 0; j < top; ++j) {
                const size_t entry = static_cast<size_t>(t) * top + j;
                volatile float product =
                    y[static_cast<size_t>(slots[entry]) * stride + i] * weights[entry];
                sum = sum + product;
            }
            x[t * row + i] = x[t * row + i] + sum;
        }
    }
    if (d_x.read() != x) fail(c, "the sum of the experts");
}

int test() {
    const int tokens[] = {1, 7, 130};
    const int experts[] = {1, 2, 15, 60, 128, 129};
    const int tops[] = {1, 2, 8, 32};
    const int ks[] = {4, 12, 20, 36, 8, 64};
    int n = 0;
    for (int t : tokens) {
        for (int e : experts) {
            for (int top : tops) {
                ++n;
                if (top > e) continue;
                run({t, e, top, ks[n % 6], n % 2 == 0 ? 128 : 64, n % 3 == 0,
                     static_cast<Kind>(n % 4)});
            }
        }
    }
    run({7, 1024, 32, 20, 128, true, Kind::ties});
    run({5, 300, 10, 260, 64, true, Kind::numbers});  // slices of k
    run({130, 70, 6, 600, 64, false, Kind::numbers});
    run({2048, 32, 8, 4, 128, true, Kind::ties});
    run({2048, 16, 2, 8, 64, false, Kind::one});
    run({1025, 16, 16, 8, 128, true, Kind::numbers});  // more choices than one panel
    run({2100, 9, 8, 4, 64, true, Kind::same});
    for (int top : {1, 2, 7, 8, 9, 16, 31, 32}) {
        run_combine(1, top, 8, 8);
        run_combine(7, top, 1030, 1040);
        run_combine(33, top, 61, 64);
    }
    run_combine(2048, 8, 12, 12);
    std::printf("%d cases, %d failures\n", cases, failures);
    return failures == 0 ? 0 : 1;
}

}  // namespace

int main() {
    return vcuda::tests::run_test(test);
}
