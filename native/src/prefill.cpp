#include "prefill.h"

#include "flash.h"
#include "gemm.h"
#include "kv_rows.h"
#include "moe_rows.h"
#include "operand_rows.h"

namespace vcuda {

namespace {

// Rows that an expert meets, on average, up to which tiles of few rows are faster: measured with 32
// (a quarter less time) and with 128 (up to 8 % more; docs/performance.md).
constexpr int64_t kFewExpertRows = 48;

int32_t expert_tile_rows(int32_t parts, int64_t tokens, int32_t top, int64_t experts) {
    const bool few = parts == 1 && tokens * top <= kFewExpertRows * experts;
    return few ? kFewTileRows : most_tile_rows(parts);
}

}  // namespace

Prefill::Prefill(const vcuda_decode_config &config, cudaStream_t stream, float *passing)
    : config_(config),
      plan_(config),
      rows_(plan_.rows),
      logit_rows_(plan_.logit_rows),
      parts_(prefill_parts(config)),
      memory_(device_memory(static_cast<uint64_t>(plan_.bytes), "the buffers of prefill")),
      residual_(config.segment != 0 ? passing : at<float>(plan_.residual)) {
    // rows that no token has are read, and what comes of them is not
    CUDA_TRY(cudaMemsetAsync(memory_.get(), 0, static_cast<size_t>(plan_.bytes), stream));
}

const float *Prefill::residual(int32_t token) const {
    return residual_ + token * padded_row(config_.hidden);
}

// The operand at `offset` of rows that meet `w`.
Operand Prefill::operand(const Tiles &w, int64_t offset, int64_t rows) const {
    Operand made = operand_of(w, parts_, rows);
    made.data = at<uint16_t>(offset);
    return made;
}

// rms_norm(x), for `w`
Operand Prefill::normed(const Chunk &c, const float *x, int32_t tokens, const float *norm,
                        const Tiles &w) const {
    NormRows p;
    p.x = x;
    p.k = config_.hidden;
    p.rows = tokens;
    p.norm = norm;
    p.eps = config_.rms_norm_eps;
    p.out = operand(w, plan_.operand, tokens);
    p.overflow = c.overflow;
    norm_rows(c.s.to, p);
    c.s.did(&vcuda_prof::norm);
    return p.out;
}

// The residual stream += x W^T + bias.
void Prefill::add_product(const Chunk &c, const Tiles &w, const Operand &x,
                          const float *bias) const {
    Gemm p;
    p.w = w;
    p.x = x;
    p.tokens = c.tokens;
    p.bias = bias;
    p.y = residual_;
    p.stride = padded_row(config_.hidden);
    p.add = true;
    gemm(c.s.to, p);
    c.s.did(&vcuda_prof::gemm);
}

void Prefill::attention_part(const Chunk &c, int32_t layer) const {
    const PrefillModel &m = c.model;
    const LayerParams &params = m.layers[static_cast<size_t>(layer)];
    const LayerWeights &weights = m.weights.layer(layer);
    float *x = residual_;
    auto *qkv = at<float>(plan_.qkv);

    Gemm project;
    project.w = m.weights.tiles(weights.qkv);
    project.x = normed(c, x, c.tokens, params.input_norm, project.w);
    project.tokens = c.tokens;
    project.bias = params.qkv_bias;
    project.y = qkv;
    project.stride = qkv_dim(config_);
    gemm(c.s.to, project);
    c.s.did(&vcuda_prof::gemm);

    QkvRows split;
    split.qkv = qkv;
    split.q_norm = params.q_norm;
    split.k_norm = params.k_norm;
    split.eps = config_.rms_norm_eps;
    split.cos = m.cos;
    split.sin = m.sin;
    split.heads = config_.heads;
    split.kv_heads = config_.kv_heads;
    split.head_dim = config_.head_dim;
    split.tokens = c.tokens;
    split.position = c.position;
    split.to = {config_.kv, m.kv.k(layer), m.kv.v(layer), m.kv.k_scales(layer),
                m.kv.v_scales(layer)};
    split.q = at<uint16_t>(plan_.queries);
    split.q_parts = parts_;
    split.overflow = c.overflow;
    qkv_rows(c.s.to, split);

    Flash attend;
    const int32_t seen = params.window > 0 ? c.position - params.window + 1 : 0;
    attend.kv.first = seen > 0 ? seen / kKvRows * kKvRows : 0;
    attend.kv.parts = kv_parts(config_);
    attend.kv.width = kv_width(config_.head_dim);
    attend.kv.capacity = kv_capacity(config_);
    attend.kv.k = at<uint16_t>(plan_.keys);
    attend.kv.v = at<uint16_t>(plan_.values);
    kv_operand(c.s.to, split.to, config_.kv_heads, config_.head_dim, attend.kv.first,
               c.position + c.tokens, attend.kv, c.overflow);

    const Tiles &join = m.weights.tiles(weights.o);
    attend.q = split.q;
    attend.parts = parts_;
    attend.heads = config_.heads;
    attend.kv_heads = config_.kv_heads;
    attend.head_dim = config_.head_dim;
    attend.tokens = c.tokens;
    attend.position = c.position;
    attend.window = params.window;
    attend.scratch = at<float>(plan_.scratch);
    attend.out = operand(join, plan_.attended, c.tokens);
    attend.overflow = c.overflow;
    flash(c.s.to, attend);
    c.s.did(&vcuda_prof::attention);
    add_product(c, join, attend.out, params.o_bias);
}

void Prefill::dense_part(const Chunk &c, int32_t layer) const {
    const PrefillModel &m = c.model;
    const LayerParams &params = m.layers[static_cast<size_t>(layer)];
    const LayerWeights &weights = m.weights.layer(layer);
    const Tiles &both = m.weights.tiles(weights.gate_up);
    float *x = residual_;

    const Tiles &narrow = m.weights.tiles(weights.down);

    GemmGateUp widen;
    widen.gate = matrix_of(both, 0);
    widen.up = matrix_of(both, 1);
    widen.x = normed(c, x, c.tokens, params.post_norm, both);
    widen.tokens = c.tokens;
    if (params.gate_up_bias != nullptr) {
        widen.gate_bias = params.gate_up_bias;
        widen.up_bias = params.gate_up_bias + config_.intermediate;
    }
    widen.hidden = operand(narrow, plan_.hidden, c.tokens);
    widen.overflow = c.overflow;
    gemm_gate_up(c.s.to, widen);
    c.s.did(&vcuda_prof::gemm);
    add_product(c, narrow, widen.hidden, params.down_bias);
}

void Prefill::expert_part(const Chunk &c, int32_t layer) const {
    const PrefillModel &m = c.model;
    const LayerParams &params = m.layers[static_cast<size_t>(layer)];
    const LayerWeights &weights = m.weights.layer(layer);
    float *x = residual_;
    const int32_t top = config_.experts_per_token;
    const auto slots = static_cast<int32_t>(most_slots(c.tokens, top, config_.experts));

    NormRows norm;
    norm.x = x;
    norm.k = config_.hidden;
    norm.rows = c.tokens;
    norm.norm = params.post_norm;
    norm.eps = config_.rms_norm_eps;
    norm.y = at<float>(plan_.normed);
    norm_rows(c.s.to, norm);

    Routing routing;
    routing.w = static_cast<const float *>(m.weights.tiles(weights.router).codes);
    routing.experts = config_.experts;
    routing.k = config_.hidden;
    routing.x = norm.y;
    routing.tokens = c.tokens;
    routing.top = top;
    routing.normalise = config_.norm_topk_prob != 0;
    routing.scratch = at<void>(plan_.routing);
    routing.chosen = at<int32_t>(plan_.chosen);
    routing.weights = at<float>(plan_.weights);
    routing.width = expert_tile_rows(parts_, c.tokens, top, config_.experts);
    routing.slots = at<int32_t>(plan_.slots);
    routing.tiles = at<RowTile>(plan_.tiles);
    routing.tile_count = at<int32_t>(plan_.tile_count);
    router_logits(c.s.to, routing);
    choose_experts(c.s.to, routing);
    group_slots(c.s.to, routing);

    Gemm narrow;
    narrow.w = m.weights.tiles(weights.down);
    narrow.map.tiles = routing.tiles;
    narrow.map.count = routing.tile_count;
    narrow.map.most =
        static_cast<int32_t>(most_tiles(c.tokens, top, config_.experts, routing.width));
    narrow.map.width = routing.width;
    narrow.x = operand(narrow.w, plan_.expert_hidden, slots);

    GemmGateUp widen;
    widen.gate = m.weights.tiles(weights.gate);
    widen.up = m.weights.tiles(weights.up);
    widen.map = narrow.map;
    widen.x = operand(widen.gate, plan_.gathered, slots);
    widen.hidden = narrow.x;
    widen.overflow = c.overflow;

    NormRows spread;  // every token's row to the experts that it chose
    spread.x = norm.y;
    spread.k = config_.hidden;
    spread.rows = c.tokens;
    spread.places = routing.slots;
    spread.copies = top;
    spread.out = widen.x;
    spread.overflow = c.overflow;
    norm_rows(c.s.to, spread);

    gemm_gate_up(c.s.to, widen);
    narrow.y = at<float>(plan_.expert_out);
    narrow.stride = row_stride(config_.hidden);
    gemm(c.s.to, narrow);

    CombineRows combine;
    combine.y = narrow.y;
    combine.stride = narrow.stride;
    combine.slots = routing.slots;
    combine.weights = routing.weights;
    combine.tokens = c.tokens;
    combine.top = top;
    combine.k = config_.hidden;
    combine.x = x;
    combine_rows(c.s.to, combine);
    c.s.did(&vcuda_prof::moe);
}

void Prefill::chunk(Submission &s, const PrefillModel &model, const int32_t *ids, int32_t position,
                    int32_t tokens, int32_t *overflow) const {
    const Chunk c{s, model, position, tokens, overflow};
    if (s.timer != nullptr) s.timer->start();
    if (ids != nullptr) {
        EmbedRows begin;
        begin.table = model.weights.embed();
        begin.ids = ids;
        begin.tokens = tokens;
        begin.x = residual_;
        embed_rows(s.to, begin);
        s.did(&vcuda_prof::norm);
    }
    for (int32_t layer = 0; layer < config_.layers; ++layer) {
        attention_part(c, layer);
        if (model.layers[static_cast<size_t>(layer)].moe) {
            expert_part(c, layer);
        } else {
            dense_part(c, layer);
        }
    }
}

const float *Prefill::logits(Submission &s, const PrefillModel &model, int32_t first,
                             int32_t tokens, int32_t *overflow) const {
    const Chunk c{s, model, 0, tokens, overflow};
    if (s.timer != nullptr) s.timer->start();  // the host has waited since the last kernel
    Gemm head;
    head.w = model.weights.head();
    head.x = normed(c, residual(first), tokens, model.final_norm, head.w);
    head.tokens = tokens;
    head.y = at<float>(plan_.logits);
    head.stride = row_stride(config_.vocab);
    gemm(s.to, head);
    s.did(&vcuda_prof::gemm);
    return head.y;
}

}  // namespace vcuda
