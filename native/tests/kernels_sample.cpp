// sample_greedy() and sample_top() against a full sort, for many vocabularies and distributions.
// Ends with 1 at a difference. Runs on the emulated runtime (tests/native_build.py) or on a GPU.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels_memory.h"
#include "run_test.h"
#include "sample.h"

#if defined(VCUDA_EMULATE)
#include "fake.h"
#endif

namespace {

using vcuda::Launcher;
using vcuda::Output;
using vcuda::Step;
using vcuda::tests::DeviceArray;

std::mt19937 random_bits(11);

float uniform() {
    return std::uniform_real_distribution<float>(0.0f, 1.0f)(random_bits);
}

float normal() {
    return std::normal_distribution<float>()(random_bits);
}

struct Kind {
    const char *name;
    std::function<float(int id, int vocab)> logit;
};

const Kind kKinds[] = {
    {"normal", [](int, int) { return 3.0f * normal(); }},
    {"flat", [](int, int) { return 1.0f + 1e-3f * uniform(); }},     // one bin of the first pass
    {"flatter", [](int, int) { return 8.0f + 2e-4f * uniform(); }},  // and of the second
    {"quarters", [](int, int) { return std::round(4.0f * normal()) / 4.0f; }},
    {"constant", [](int, int) { return -2.5f; }},
    {"masked", [](int, int) { return uniform() < 0.9f ? -INFINITY : normal(); }},
    {"one left", [](int id, int vocab) { return id == vocab / 2 ? -3.0f : -INFINITY; }},
    {"all masked", [](int, int) { return -INFINITY; }},
    {"zeros", [](int id, int) { return id % 3 == 0   ? 0.0f
                                       : id % 3 == 1 ? -0.0f
                                                     : -1.0f; }},
    {"wide", [](int, int) { return normal() * std::exp(20.0f * normal()); }},
    {"rising", [](int id, int) { return 1e-3f * static_cast<float>(id); }},
    {"falling", [](int id, int) { return -1e-3f * static_cast<float>(id); }},
    {"peak at the end", [](int id, int vocab) { return id == vocab - 1 ? 40.0f : normal(); }},
};

struct Case {
    const Kind *kind;
    int vocab, limit, top;
    float temperature;
};

int cases = 0, failures = 0;

void expect(bool good, const Case &c, const std::string &what) {
    if (good) return;
    failures += 1;
    if (failures > 20) return;
    std::printf("FAILED %s vocab %d limit %d top %d temperature %g: %s\n", c.kind->name, c.vocab,
                c.limit, c.top, static_cast<double>(c.temperature), what.c_str());
}

// The output structure and the logits behind it, as bytes, exactly as long as they are.
struct Answer {
    std::vector<uint8_t> bytes;

    Output output() const {
        Output o;
        std::memcpy(&o, bytes.data(), sizeof o);
        return o;
    }
};

constexpr int kUntouched = 77;

void run(const Case &c) {
    cases += 1;
    std::vector<float> logits(static_cast<size_t>(c.vocab));
    for (int i = 0; i < c.vocab; ++i) logits[i] = c.kind->logit(i, c.vocab);

    const int limit = c.limit > 0 ? std::min(c.limit, c.vocab) : c.vocab;
    std::vector<int> order(static_cast<size_t>(limit));
    for (int i = 0; i < limit; ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return logits[a] > logits[b]; });
    const float largest = logits[order[0]];
    const int wanted = std::min(c.top, limit);
    const float last = logits[order[wanted - 1]];
    const auto reach =
        std::count_if(logits.begin(), logits.begin() + limit, [&](float v) { return v >= last; });
    double sum = 0.0;
    for (int i = 0; i < limit; ++i) {
        const double below = logits[i] == largest ? 0.0 : static_cast<double>(logits[i]) - largest;
        sum += std::exp(below / c.temperature);
    }

    // what lies at and behind the limit must not matter
    for (int i = limit; i < c.vocab; ++i) logits[i] = 1e30f;
    Output untouched;
    std::memset(&untouched, kUntouched, sizeof untouched);
    Answer start;
    start.bytes.resize(sizeof untouched + logits.size() * sizeof(float));
    std::memcpy(start.bytes.data(), &untouched, sizeof untouched);
    std::memcpy(start.bytes.data() + sizeof untouched, logits.data(),
                logits.size() * sizeof(float));

    Step step{};
    step.vocab_limit = c.limit;
    step.top = c.top;
    step.temperature = c.temperature;
    DeviceArray<Step> d_step({step});
    DeviceArray<uint8_t> d_output(start.bytes);
    DeviceArray<uint32_t> scratch(std::vector<uint32_t>(vcuda::sample_scratch(c.vocab), 0));
    Output *output = reinterpret_cast<Output *>(d_output.data());
    Launcher to;

    vcuda::sample_greedy(to, d_step.data(), c.vocab, output, scratch.data());
    const Output greedy = Answer{d_output.read()}.output();
    expect(greedy.header.id == order[0], c,
           "greedy id " + std::to_string(greedy.header.id) + ", not " + std::to_string(order[0]));
    expect(greedy.header.max_logit == largest, c, "greedy max_logit");
    expect(greedy.header.nonfinite == untouched.header.nonfinite, c, "nonfinite was written");
    expect(greedy.header.top_count == untouched.header.top_count, c, "greedy wrote top_count");

    Answer first;
    for (int round = 0; round < 2; ++round) {  // the second in another order of blocks and threads
        d_output.write(start.bytes);
        vcuda::sample_top(to, d_step.data(), c.vocab, output, scratch.data());
        Answer answer{d_output.read()};
        if (round == 0) first = answer;
        expect(first.bytes == answer.bytes, c, "not the same twice");
#if defined(VCUDA_EMULATE)
        fake_schedule(static_cast<uint32_t>(round == 0 ? 1 + cases % 5 : 0));
#endif
    }
    expect(std::equal(first.bytes.begin() + sizeof(Output), first.bytes.end(),
                      start.bytes.begin() + sizeof(Output)),
           c, "the logits were written");
    const Output got = first.output();
    expect(got.header.id == order[0] && got.header.max_logit == largest, c, "id or max_logit");
    expect(got.header.nonfinite == untouched.header.nonfinite, c, "nonfinite was written");
    expect(std::fabs(got.header.sum_exp - sum) <= 1e-5 * sum, c,
           "sum_exp " + std::to_string(got.header.sum_exp) + ", not " + std::to_string(sum));
    const int count = reach > VCUDA_TOP_MAX ? 0 : wanted;
    expect(got.header.top_count == count, c,
           "top_count " + std::to_string(got.header.top_count) + ", not " + std::to_string(count));
    for (int i = 0; i < count; ++i) {
        const bool good = got.top_ids[i] == order[i] && got.top_logits[i] == logits[order[i]];
        expect(good, c, "candidate " + std::to_string(i));
        if (!good) break;
    }
    if (count < VCUDA_TOP_MAX) {
        expect(got.top_ids[count] == untouched.top_ids[0], c, "more candidates were written");
    }
}

int test() {
    const int vocabs[] = {1, 5, 31, 257, 1000, 1024, 2048, 2049, 6151};
    const int tops[] = {1, 2, 20, 40, 513, 1000, 1024};
    int n = 0;
    for (const Kind &kind : kKinds) {
        for (int vocab : vocabs) {
            for (int top : tops) {
                ++n;
                const int limit = n % 4 == 0 ? 0 : n % 4 == 1 ? vocab - vocab / 7 : vocab;
                run({&kind, vocab, limit, top, n % 3 == 0 ? 1.0f : 0.6f});
            }
        }
        run({&kind, 151936, 151669, 20, 0.7f});
    }
    run({&kKinds[0], 49152, 0, 1024, 1.0f});
    run({&kKinds[0], 1100007, 0, 40, 1.0f});  // more segments than blocks
    run({&kKinds[0], 5000, 9999, 40, 1e-4f});
    std::printf("%d cases, %d failures\n", cases, failures);
    return failures == 0 ? 0 : 1;
}

}  // namespace

int main() {
    return vcuda::tests::run_test(test);
}
