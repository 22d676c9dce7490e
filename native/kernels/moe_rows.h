// Routed experts of many tokens: which, the order in which a grouped product takes their rows, and
// the weighted sum of what comes out.
//
// Every (token, rank) has a slot: the row of the experts' operands that is the token's for the
// expert of that rank. An expert's slots are neighbours in the order of the tokens, from a multiple
// of 8 on. All of it is made on the device; the host knows bounds only.
#pragma once

#include <cstdint>

#include "gemm.h"
#include "launch.h"
#include "layout.h"

namespace vcuda {

// What the host must make room for, with `tokens` tokens at `top` experts each.
int64_t most_slots(int64_t tokens, int32_t top, int32_t experts);  // a multiple of 128
int64_t most_tiles(int64_t tokens, int32_t top, int32_t experts, int32_t width);
uint64_t routing_scratch(int64_t tokens, int32_t experts, int32_t k);  // bytes

// One layer's routing: router_logits, choose_experts and group_slots in this order.
struct Routing {
    const float *w = nullptr;  // [experts][k], k a multiple of 4
    int32_t experts = 0;
    int32_t k = 0;
    const float *x = nullptr;  // [tokens][k], normalised
    int32_t tokens = 0;
    int32_t top = 0;
    bool normalise = false;
    void *scratch = nullptr;  // routing_scratch bytes, 16-byte aligned

    int32_t *chosen = nullptr;  // [tokens][top], best first, the lower index on a tie
    float *weights = nullptr;   // [tokens][top], the softmax of the chosen, as ExpertGateUp has it

    int32_t width = 128;       // rows of a tile, at most; a multiple of 8
    int32_t *slots = nullptr;  // [tokens][top]
    int32_t *list = nullptr;   // [list_rows] the token of a slot, -1 where none; NULL: not asked
    int32_t list_rows = 0;     // most_slots
    RowTile *tiles = nullptr;  // [most_tiles], an expert's even ones together; the largest come
                               // first, so that blocks that take them in turn end together
    int32_t *tile_count = nullptr;
};

// Logits, in scratch: sums of slices of k, which choose_experts adds in order. How k is cut does
// not depend on the number of tokens, so a token's logits do not depend on its neighbours.
void router_logits(Launcher &to, const Routing &p);

// chosen, weights. A logit that is not finite makes the token's weights NaN.
void choose_experts(Launcher &to, const Routing &p);

// slots, list, tiles, tile_count.
void group_slots(Launcher &to, const Routing &p);

// x [t][..] += sum over j = 0 .. top - 1, in this order, of weights [t][j] * y [slots [t][j]]
struct CombineRows {
    const float *y = nullptr;  // [slots][stride]
    int64_t stride = 0;        // a multiple of 4
    const int32_t *slots = nullptr;
    const float *weights = nullptr;
    int32_t tokens = 0;
    int32_t top = 0;
    int32_t k = 0;
    float *x = nullptr;  // [tokens][padded_row(k)]
};
void combine_rows(Launcher &to, const CombineRows &p);

}  // namespace vcuda
