// How the memory of a chunk is laid out.
#include <algorithm>

#include "flash.h"
#include "moe_rows.h"
#include "operand_rows.h"
#include "prefill.h"

namespace vcuda {

namespace {

constexpr int64_t kAlign = 1024;  // of an operand; the rest needs less

// Hands out places one behind another.
class Places {
  public:
    explicit Places(int64_t from) : at_(from) {}
    int64_t take(int64_t bytes) {
        const int64_t place = at_;
        at_ += ceil_div(bytes, kAlign) * kAlign;
        return place;
    }
    int64_t end() const { return at_; }

  private:
    int64_t at_;
};

// The kind of a weight is not known yet: q8 and q4 pad further than bf16.
int64_t operand_bytes(int64_t k, int64_t rows, int32_t parts) {
    return operand_of(tiles_of(VCUDA_Q8, 1, 1, k), parts, rows).bytes();
}

}  // namespace

int32_t prefill_parts(const vcuda_decode_config &c) {
    return c.prefill_exact != 0 ? 2 : 1;
}

int32_t kv_parts(const vcuda_decode_config &c) {
    return c.prefill_exact != 0 && c.kv != VCUDA_KV_F16 ? 2 : 1;
}

int32_t kv_capacity(const vcuda_decode_config &c) {
    return static_cast<int32_t>(ceil_div(c.ctx_size, kKvRows) * kKvRows);
}

Prefill::Plan::Plan(const vcuda_decode_config &c) {
    const int32_t parts = prefill_parts(c);
    rows = std::min(c.prefill_rows, c.ctx_size);
    const int64_t padded = ceil_div(rows, kOperandRows) * kOperandRows;
    const int64_t width = padded_row(c.hidden);
    const auto floats = [](int64_t n) { return n * static_cast<int64_t>(sizeof(float)); };

    Places all(0);
    residual = all.take(c.segment != 0 ? 0 : floats(rows * width));
    operand = all.take(operand_bytes(c.hidden, padded, parts));

    Places attention(all.end());
    const int64_t kv_bytes =
        int64_t{2} * kv_parts(c) * c.kv_heads * kv_width(c.head_dim) * kv_capacity(c);
    qkv = attention.take(floats(int64_t{rows} * qkv_dim(c)));
    queries = attention.take(int64_t{2} * parts * rows * q_dim(c));
    keys = attention.take(kv_bytes);
    values = attention.take(kv_bytes);
    attended = attention.take(operand_bytes(q_dim(c), padded, parts));
    scratch = attention.take(
        floats(static_cast<int64_t>(flash_scratch(c.head_dim, kMostMultiprocessors))));

    Places dense(all.end());
    hidden = dense.take(dense_hidden(c) > 0 ? operand_bytes(c.intermediate, padded, parts) : 0);

    Places experts(all.end());
    const bool moe = any_layer(c, 1);
    const int64_t slots_most = moe ? most_slots(rows, c.experts_per_token, c.experts) : 0;
    const int64_t tiles_most =  // of the smallest that a chunk may have
        moe ? most_tiles(rows, c.experts_per_token, c.experts, kFewTileRows) : 0;
    const int64_t chosen_most = moe ? int64_t{rows} * c.experts_per_token : 0;
    normed = experts.take(floats(moe ? rows * width : 0));
    routing =
        experts.take(moe ? static_cast<int64_t>(routing_scratch(rows, c.experts, c.hidden)) : 0);
    chosen = experts.take(floats(chosen_most));
    weights = experts.take(floats(chosen_most));
    slots = experts.take(floats(chosen_most));
    tiles = experts.take(tiles_most * static_cast<int64_t>(sizeof(RowTile)));
    tile_count = experts.take(sizeof(int32_t));
    gathered = experts.take(moe ? operand_bytes(c.hidden, slots_most, parts) : 0);
    expert_hidden = experts.take(moe ? operand_bytes(c.moe_intermediate, slots_most, parts) : 0);
    expert_out = experts.take(floats(slots_most * row_stride(c.hidden)));

    const int64_t shared = std::max({attention.end(), dense.end(), experts.end()});
    logits = all.end();
    logit_rows = 0;
    bytes = shared;
    if (c.segment != 0) return;
    // As many rows of logits as fit where the layers worked, and a few where nothing much did.
    const int64_t row = floats(row_stride(c.vocab));
    constexpr int64_t few = 8;
    logit_rows =
        static_cast<int32_t>(std::min<int64_t>(rows, std::max(few, (shared - all.end()) / row)));
    Places head(all.end());
    logits = head.take(logit_rows * row);
    bytes = std::max(shared, head.end());
}

uint64_t Prefill::bytes(const vcuda_decode_config &config) {
    return static_cast<uint64_t>(Plan(config).bytes);
}

}  // namespace vcuda
