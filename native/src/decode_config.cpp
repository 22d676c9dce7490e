#include "decode_config.h"

#include <algorithm>
#include <cmath>

#include "attention.h"
#include "kv.h"
#include "moe.h"
#include "prefill.h"
#include "sample.h"
#include "step.h"

namespace vcuda {

namespace {

constexpr size_t kLayerV1 = 80;
static_assert(sizeof(vcuda_layer) >= kLayerV1, "fields are only appended");

void within(const char *name, int64_t value, int64_t least, int64_t most) {
    if (value < least || value > most) {
        throw Error("config.%s is %lld; it must be %lld to %lld", name,
                    static_cast<long long>(value), static_cast<long long>(least),
                    static_cast<long long>(most));
    }
}

void needed(const void *pointer, const char *name) {
    if (pointer == nullptr) throw Error("config.%s is NULL", name);
}

void check_layer(const vcuda_decode_config &c, int32_t i) {
    const vcuda_layer &layer = layer_of(c, i);
    const uint32_t size = c.layer_params->struct_size;
    if (layer.struct_size != size) {
        throw Error("layer_params[%d].struct_size is %u and that of layer_params[0] is %u", i,
                    layer.struct_size, size);
    }
    if (layer.moe != 0 && layer.moe != 1) {
        throw Error("layer_params[%d].moe is %d; it must be 0 or 1", i, layer.moe);
    }
    if (layer.window < 0) throw Error("layer_params[%d].window is %d, below 0", i, layer.window);
    if (layer.reserved != 0) {
        throw Error("layer_params[%d].reserved is %d; it must be 0", i, layer.reserved);
    }
    if (layer.input_norm == nullptr || layer.post_norm == nullptr) {
        throw Error("layer_params[%d].%s is NULL", i,
                    layer.input_norm == nullptr ? "input_norm" : "post_norm");
    }
    if (layer.moe == 1 && (layer.gate_up_bias != nullptr || layer.down_bias != nullptr)) {
        throw Error("layer_params[%d] has experts and a %s; only dense layers may have one", i,
                    layer.gate_up_bias != nullptr ? "gate_up_bias" : "down_bias");
    }
}

// The small weights of a layer and their lengths, in the order of LayerParams.
struct Part {
    const float *from;
    const float *LayerParams::*to;
    int64_t length;
};
constexpr int kParts = 8;

void parts_of(const vcuda_decode_config &c, const vcuda_layer &layer, Part (&parts)[kParts]) {
    const Part all[kParts] = {
        {layer.input_norm, &LayerParams::input_norm, c.hidden},
        {layer.post_norm, &LayerParams::post_norm, c.hidden},
        {layer.q_norm, &LayerParams::q_norm, c.head_dim},
        {layer.k_norm, &LayerParams::k_norm, c.head_dim},
        {layer.qkv_bias, &LayerParams::qkv_bias, qkv_dim(c)},
        {layer.o_bias, &LayerParams::o_bias, c.hidden},
        {layer.gate_up_bias, &LayerParams::gate_up_bias, int64_t{2} * c.intermediate},
        {layer.down_bias, &LayerParams::down_bias, c.hidden},
    };
    std::copy(std::begin(all), std::end(all), std::begin(parts));
}

// Every part begins at a multiple of 16 bytes.
int64_t aligned_floats(int64_t n) {
    return (n + 3) / 4 * 4;
}

uint64_t params_floats(const vcuda_decode_config &c) {
    int64_t floats = c.segment != 0 ? 0 : aligned_floats(c.hidden);  // final_norm
    for (int32_t i = 0; i < c.layers; ++i) {
        Part parts[kParts];
        parts_of(c, layer_of(c, i), parts);
        for (const Part &part : parts) {
            if (part.from != nullptr) floats += aligned_floats(part.length);
        }
    }
    return static_cast<uint64_t>(floats);
}

}  // namespace

bool any_layer(const vcuda_decode_config &c, int32_t moe) {
    for (int32_t i = 0; i < c.layers; ++i) {
        if (layer_of(c, i).moe == moe) return true;
    }
    return false;
}

const vcuda_layer &layer_of(const vcuda_decode_config &c, int32_t i) {
    const auto *bytes = reinterpret_cast<const char *>(c.layer_params);
    return *reinterpret_cast<const vcuda_layer *>(bytes + static_cast<size_t>(i) *
                                                              c.layer_params->struct_size);
}

void check_config(const vcuda_decode_config &c) {
    // The upper limits keep every product of extents far from overflow.
    within("layers", c.layers, 1, 4096);
    within("hidden", c.hidden, 1, 1 << 20);
    within("heads", c.heads, 1, 4096);
    within("kv_heads", c.kv_heads, 1, 4096);
    if (c.heads % c.kv_heads != 0) {
        throw Error("config.heads is %d, which is no multiple of kv_heads, %d", c.heads,
                    c.kv_heads);
    }
    if (c.head_dim < 16 || c.head_dim > 256 || c.head_dim % 16 != 0) {
        throw Error("config.head_dim is %d; it must be a multiple of 16 from 16 to 256",
                    c.head_dim);
    }
    within("segment", c.segment, 0, 1);
    within("first_layer", c.first_layer, 0, c.segment != 0 ? 1 << 20 : 0);
    if (c.segment == 0) within("vocab", c.vocab, 1, 1 << 24);
    within("ctx_size", c.ctx_size, 1, 1 << 26);
    // attention numbers the eights of a layer's keys with 32 bits
    const int64_t eights = int64_t{c.ctx_size} * c.kv_heads * (c.head_dim / 8);
    if (eights > UINT32_MAX) {
        throw Error(
            "config.ctx_size is %d, which makes %lld numbers of a layer's keys; with kv_heads %d "
            "and head_dim %d at most %lld positions are possible",
            c.ctx_size, static_cast<long long>(eights) * 8, c.kv_heads, c.head_dim,
            static_cast<long long>(int64_t{UINT32_MAX} / c.kv_heads / (c.head_dim / 8)));
    }
    // and prefill those of its 16-bit parts, wider and maybe two
    const int64_t parts = int64_t{kv_parts(c)} * c.kv_heads * (kv_width(c.head_dim) / 8);
    if (c.prefill_rows > 0 && parts * kv_capacity(c) > UINT32_MAX) {
        throw Error(
            "config.ctx_size is %d; prefill with kv_heads %d and head_dim %d can have at most %lld "
            "positions (prefill_exact 0 may allow twice as many)",
            c.ctx_size, c.kv_heads, c.head_dim,
            static_cast<long long>(int64_t{UINT32_MAX} / parts));
    }
    within("experts", c.experts, 0, kMaxExperts);
    within("norm_topk_prob", c.norm_topk_prob, 0, 1);
    within("kv", c.kv, VCUDA_KV_INT8, VCUDA_KV_F32);
    if (c.segment == 0) within("tied_head", c.tied_head, 0, 1);
    within("graph", c.graph, 0, 1);
    within("prefill_rows", c.prefill_rows, 0, 1 << 16);
    within("prefill_exact", c.prefill_exact, 0, 1);
    if (!(c.rms_norm_eps >= 0.0f) || !std::isfinite(c.rms_norm_eps)) {
        throw Error("config.rms_norm_eps is %g; it must be finite and not below 0",
                    static_cast<double>(c.rms_norm_eps));
    }
    if (c.segment == 0) needed(c.final_norm, "final_norm");
    needed(c.rope_cos, "rope_cos");
    needed(c.rope_sin, "rope_sin");
    needed(c.layer_params, "layer_params");
    const uint32_t size = c.layer_params->struct_size;
    if (size < kLayerV1 || size > sizeof(vcuda_layer)) {
        throw Error(
            "layer_params[0].struct_size is %u and this library knows %zu to %zu bytes; use the "
            "vcuda.h of this library",
            size, kLayerV1, sizeof(vcuda_layer));
    }
    for (int32_t i = 0; i < c.layers; ++i) check_layer(c, i);

    if (c.hidden % 4 != 0) {  // a router's rows are read four numbers at a time
        throw Error("config.hidden is %d; it must be a multiple of 4", c.hidden);
    }
    if (any_layer(c, 0)) within("intermediate", c.intermediate, 1, 1 << 24);
    if (any_layer(c, 1)) {
        within("experts", c.experts, 1, kMaxExperts);
        within("experts_per_token", c.experts_per_token, 1, std::min(kMaxTop, c.experts));
        within("moe_intermediate", c.moe_intermediate, 1, 1 << 20);
    }
    if (c.group_size != kGroup) {
        throw Error("config.group_size is %d; q8 and q4 weights have groups of %d", c.group_size,
                    kGroup);
    }
}

int64_t segment_rows(const vcuda_decode_config &c) {
    return std::max(1, std::min(c.prefill_rows, c.ctx_size));
}

int64_t dense_hidden(const vcuda_decode_config &c) {
    return any_layer(c, 0) ? padded_row(c.intermediate) : 0;
}

uint64_t buffer_bytes(const vcuda_decode_config &c, Buffer buffer) {
    const bool moe = any_layer(c, 1);
    const bool segment = c.segment != 0;
    const auto floats = [](int64_t n) { return static_cast<uint64_t>(n) * sizeof(float); };
    switch (buffer) {
        case Buffer::kStep:
            return sizeof(Step) +
                   floats(segment ? segment_rows(c) * padded_row(c.hidden) : c.ctx_size);
        case Buffer::kOutput:
            return segment ? 0 : sizeof(Output) + floats(c.vocab);
        case Buffer::kResidual:
            return segment ? 0 : floats(c.hidden);
        case Buffer::kQkv:
            return floats(qkv_dim(c));
        case Buffer::kAttended:
            return floats(q_dim(c));
        case Buffer::kHidden:
            return floats(dense_hidden(c) +
                          (moe ? c.experts_per_token * padded_row(c.moe_intermediate) : 0));
        case Buffer::kRouterLogits:
            return moe ? floats(c.experts) : 0;
        case Buffer::kChosen:
        case Buffer::kWeights:
            return moe ? floats(c.experts_per_token) : 0;
        case Buffer::kPartial: {
            const int32_t splits =
                attention_splits(c.heads, c.kv_heads, c.head_dim, c.ctx_size, kMostMultiprocessors);
            return sizeof(float) * attention_scratch(c.heads, c.head_dim, splits);
        }
        case Buffer::kCounters:
            return sizeof(uint32_t) * attention_counters(c.heads, c.kv_heads);
        case Buffer::kSample:
            return segment ? 0 : sizeof(uint32_t) * sample_scratch(c.vocab);
        case Buffer::kParams:
            return sizeof(float) * params_floats(c);
        case Buffer::kCos:
        case Buffer::kSin:
            return floats(int64_t{c.ctx_size} * (c.head_dim / 2));
        case Buffer::kCount:
            break;
    }
    return 0;
}

uint64_t decode_bytes(const vcuda_decode_config &c) {
    uint64_t bytes = Kv::bytes(c);
    if (c.prefill_rows > 0) bytes += padded(Prefill::bytes(c));
    for (int i = 0; i < kBuffers; ++i) bytes += padded(buffer_bytes(c, static_cast<Buffer>(i)));
    // The graphs are instantiated at the first decode_run; a node takes some hundred bytes.
    const uint64_t graphs = c.segment != 0 ? 1 : 4;
    constexpr uint64_t node_bytes = 1024;
    const uint64_t nodes = 6 * static_cast<uint64_t>(c.layers) + 8;
    return bytes + (c.graph != 0 ? padded(graphs * nodes * node_bytes) : 0);
}

std::vector<float> gather_params(const vcuda_decode_config &c, const float *base,
                                 std::vector<LayerParams> &layers, const float *&final_norm) {
    std::vector<float> all(params_floats(c), 0.0f);
    int64_t at = 0;
    const auto put = [&](const float *from, int64_t length) {
        std::copy(from, from + length, all.begin() + at);
        const float *place = base + at;
        at += aligned_floats(length);
        return place;
    };
    final_norm = c.segment != 0 ? nullptr : put(c.final_norm, c.hidden);
    layers.assign(static_cast<size_t>(c.layers), LayerParams{});
    for (int32_t i = 0; i < c.layers; ++i) {
        const vcuda_layer &from = layer_of(c, i);
        LayerParams &to = layers[static_cast<size_t>(i)];
        to.moe = from.moe == 1;
        to.window = from.window;
        Part parts[kParts];
        parts_of(c, from, parts);
        for (const Part &part : parts) {
            if (part.from != nullptr) to.*part.to = put(part.from, part.length);
        }
    }
    return all;
}

}  // namespace vcuda
