#include "model_weights.h"

#include <algorithm>

#include "gemv.h"
#include "moe.h"
#include "wkey.h"

namespace vcuda {

namespace {

long long ll(int64_t value) {
    return static_cast<long long>(value);
}

}  // namespace

ModelWeights::ModelWeights(const Device &device, Cache &cache, const vcuda_decode_config &c,
                           const std::vector<LayerParams> &layers)
    : device_(device), cache_(cache), top_(c.experts_per_token) {
    bool experts = false;
    const auto need = [&](int32_t layer, int32_t projection, int64_t stack, int64_t n, int64_t k) {
        needs_.push_back({wkey(layer, projection), stack, n, k, projection, experts, nullptr});
        return static_cast<int>(needs_.size()) - 1;
    };
    const bool whole = c.segment == 0;
    if (whole) embed_ = need(VCUDA_HEAD_LAYER, VCUDA_PROJ_EMBED, 1, c.vocab, c.hidden);
    for (int32_t i = 0; i < c.layers; ++i) {
        const int32_t layer = c.first_layer + i;
        LayerWeights w{};
        experts = layers[static_cast<size_t>(i)].moe;
        w.qkv = need(layer, VCUDA_PROJ_FUSED_QKV, 1, qkv_dim(c), c.hidden);
        w.o = need(layer, VCUDA_PROJ_O, 1, c.hidden, q_dim(c));
        if (experts) {
            w.router = need(layer, VCUDA_PROJ_ROUTER, 1, c.experts, c.hidden);
            w.gate = need(layer, VCUDA_PROJ_GATE, c.experts, c.moe_intermediate, c.hidden);
            w.up = need(layer, VCUDA_PROJ_UP, c.experts, c.moe_intermediate, c.hidden);
            w.down = need(layer, VCUDA_PROJ_DOWN, c.experts, c.hidden, c.moe_intermediate);
        } else {
            w.gate_up = need(layer, VCUDA_PROJ_FUSED_GU, 2, c.intermediate, c.hidden);
            w.down = need(layer, VCUDA_PROJ_DOWN, 1, c.hidden, c.intermediate);
        }
        layers_.push_back(w);
    }
    experts = false;
    head_ = embed_;
    if (whole && c.tied_head == 0) {
        head_ = need(VCUDA_HEAD_LAYER, VCUDA_PROJ_HEAD, 1, c.vocab, c.hidden);
    }
    tiles_.resize(needs_.size());
}

void ModelWeights::missing(size_t first) const {
    size_t count = 0;
    for (const Need &need : needs_) count += need.entry == nullptr ? 1 : 0;
    throw Error(
        "the weight %s is not in the cache (%zu of %zu weights are missing); upload it with "
        "vcuda_cache_begin, or go on without the library",
        KeyName(needs_[first].key).text, count, needs_.size());
}

void ModelWeights::check(const Need &need) const {
    const vcuda_matrix &m = need.entry->matrix;
    const KeyName name(need.key);
    if (m.stack != need.stack || m.n != need.n || m.k != need.k) {
        throw Error("the weight %s is %lld x [%lld, %lld] and the model needs %lld x [%lld, %lld]",
                    name.text, ll(m.stack), ll(m.n), ll(m.k), ll(need.stack), ll(need.n),
                    ll(need.k));
    }
    const bool router = need.projection == VCUDA_PROJ_ROUTER;
    if (router != (m.kind == VCUDA_F32)) {
        throw Error("the weight %s is of kind %d; it must be %s", name.text, m.kind,
                    router ? "VCUDA_F32 (0)" : "VCUDA_BF16, _Q8 or _Q4 (1 to 3)");
    }
    if (router) return;
    const int64_t most = need.experts && need.projection == VCUDA_PROJ_DOWN
                             ? expert_down_max_k(m.kind, top_, device_.shared_per_block)
                             : gemv_max_k(m.kind, device_.shared_per_block);
    if (m.k > most) {
        throw Error(
            "the weight %s has k = %lld and device %d multiplies vectors of at most %lld with "
            "kind %d",
            name.text, ll(m.k), device_.index, ll(most), m.kind);
    }
}

bool ModelWeights::resolve() {
    if (generation_ == cache_.generation()) {
        for (const Need &need : needs_) cache_.use(*need.entry);
        return false;
    }
    generation_ = 0;
    size_t first = needs_.size();
    for (size_t i = 0; i < needs_.size(); ++i) {
        needs_[i].entry = cache_.find(needs_[i].key);
        if (needs_[i].entry == nullptr) first = std::min(first, i);
    }
    if (first < needs_.size()) missing(first);
    for (const Need &need : needs_) check(need);
    for (const LayerWeights &w : layers_) {
        const Need &gate = needs_[static_cast<size_t>(w.gate)];
        const Need &up = needs_[static_cast<size_t>(w.up)];
        if (gate.entry->matrix.kind != up.entry->matrix.kind) {
            throw Error("the weight %s is of kind %d and %s of kind %d; they must be of one",
                        KeyName(gate.key).text, gate.entry->matrix.kind, KeyName(up.key).text,
                        up.entry->matrix.kind);
        }
    }
    bool moved = false;
    for (size_t i = 0; i < needs_.size(); ++i) {
        const Tiles &now = needs_[i].entry->tiles;
        moved |= now.codes != tiles_[i].codes || now.kind != tiles_[i].kind;
        tiles_[i] = now;
    }
    generation_ = cache_.generation();
    return moved;
}

}  // namespace vcuda
