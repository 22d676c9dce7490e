// Routed experts of one token: which, and their weighted sum.
#pragma once

#include <cstdint>

#include "launch.h"
#include "layout.h"

namespace vcuda {

constexpr int kMaxExperts = 1024;
constexpr int kMaxTop = 32;

// logits [experts] = router * rms_norm(x)
struct Router {
    const float *w = nullptr;  // [experts][k]
    int32_t experts = 0;
    int32_t k = 0;
    const float *x = nullptr;     // [k]
    const float *norm = nullptr;  // [k]
    float eps = 0;
    float *logits = nullptr;  // [experts]
};
void route(Launcher &to, const Router &p);

// p = softmax(logits); chosen [top] the largest, best first, the lower index on a tie; weights
// [top] their p, made to add up to 1 with `normalise`. Then hidden [top][n] = silu(gate_e x) *
// (up_e x), e = chosen [j], of the RMS-normalised x. Every block ranks the logits for itself: a
// kernel, or a block that the others wait for, would take longer.
struct ExpertGateUp {
    Tiles gate, up;                 // stacks of experts, [n][k] each
    const float *logits = nullptr;  // [experts]
    int32_t experts = 0;
    int32_t top = 0;
    bool normalise = false;
    const float *x = nullptr;     // [k]
    const float *norm = nullptr;  // [k]
    float eps = 0;
    int32_t *chosen = nullptr;  // [top]
    float *weights = nullptr;   // [top]
    float *hidden = nullptr;    // [top][padded_row(n)], the padding is 0
};
void expert_gate_up(Launcher &to, const ExpertGateUp &p);

// y [n] += sum over j = 0 .. top - 1, in this order, of weights [j] * (down_e hidden [j]).
struct ExpertDown {
    Tiles down;  // stack of experts, [n][k]
    const int32_t *chosen = nullptr;
    const float *weights = nullptr;
    int32_t top = 0;
    const float *hidden = nullptr;  // [top][padded_row(k)], the padding is 0
    float *y = nullptr;             // [n]
};
void expert_down(Launcher &to, const ExpertDown &p);

// Once a device, before the first launch; see prepare_gemv.
void prepare_moe(uint64_t shared_per_block);

// Shared memory for the operands of expert_down, and the longest k that it makes possible: those of
// all chosen experts must fit a block.
uint64_t down_shared(uint64_t shared_per_block);
int64_t expert_down_max_k(int32_t kind, int32_t top, uint64_t shared_per_block);

}  // namespace vcuda
