// What stands before a run: memory, and every check.
#include "decode.h"

#include <algorithm>
#include <cmath>

#include "attention.h"
#include "gemv.h"
#include "moe.h"

namespace vcuda {

namespace {

long long ll(int64_t value) {
    return static_cast<long long>(value);
}

const char *buffer_name(Buffer buffer) {
    switch (buffer) {
        case Buffer::kOutput:
            return "the buffer of logits";
        case Buffer::kPartial:
            return "the scratch of attention";
        case Buffer::kParams:
            return "norms and biases";
        case Buffer::kCos:
        case Buffer::kSin:
            return "a RoPE table";
        default:
            return "a buffer of activations";
    }
}

// The longest k of a product whatever the kind of its matrix.
int64_t longest_k(const Device &device) {
    int64_t most = 0;
    for (const int32_t kind : {VCUDA_BF16, VCUDA_Q8, VCUDA_Q4}) {
        most = std::max(most, gemv_max_k(kind, device.shared_per_block));
    }
    return most;
}

}  // namespace

// ------------------------------------------------------------------------------------- memory

void Decoder::check_device(const Device &device, const vcuda_decode_config &c, uint64_t reclaimed) {
    const int64_t most = longest_k(device);
    const auto fits = [&](const char *name, int64_t k, int64_t limit) {
        if (k > limit) {
            throw Error(
                "%s is %lld and device %d multiplies vectors of at most %lld (%llu bytes of shared "
                "memory a block)",
                name, ll(k), device.index, ll(limit),
                static_cast<unsigned long long>(device.shared_per_block));
        }
    };
    fits("config.hidden", c.hidden, most);
    fits("heads * head_dim", q_dim(c), most);
    for (int32_t i = 0; i < c.layers; ++i) {
        if (layer_of(c, i).moe == 0) {
            fits("config.intermediate", c.intermediate, most);
            continue;
        }
        int64_t experts = 0;
        for (const int32_t kind : {VCUDA_BF16, VCUDA_Q8, VCUDA_Q4}) {
            experts = std::max(
                experts, expert_down_max_k(kind, c.experts_per_token, device.shared_per_block));
        }
        fits("config.moe_intermediate", c.moe_intermediate, experts);
    }
    const uint64_t needed = decode_bytes(c);
    const uint64_t free_bytes = free_memory() + reclaimed;
    if (needed > free_bytes) {
        throw Error(
            "decoding with ctx_size %d needs %s of device memory and %s are free; ask for a "
            "smaller "
            "ctx_size or smaller prefill_rows, or drop weights",
            c.ctx_size, Bytes(needed).text, Bytes(free_bytes).text);
    }
}

Decoder::Decoder(const Device &device, Cache &cache, const vcuda_decode_config &config,
                 vcuda_prof &prof)
    : device_(device), config_(config), kv_(config), bytes_(decode_bytes(config)) {
    for (int i = 0; i < kBuffers; ++i) {
        const auto buffer = static_cast<Buffer>(i);
        sizes_[i] = buffer_bytes(config, buffer);
        if (sizes_[i] == 0) continue;
        buffers_[i] = device_memory(sizes_[i], buffer_name(buffer));
        // what pads a row of activations, and what no kernel wrote of an output that is copied
        CUDA_TRY(cudaMemsetAsync(buffers_[i].get(), 0, sizes_[i], device.stream.get()));
    }
    step_ = pinned_memory(sizes_[static_cast<int>(Buffer::kStep)]);
    if (config.segment != 0) {
        residual_ = reinterpret_cast<float *>(at<Step>(Buffer::kStep) + 1);
    } else {
        result_ = pinned_memory(sizes_[static_cast<int>(Buffer::kOutput)]);
        residual_ = at<float>(Buffer::kResidual);
    }
    const auto splits = [&](int32_t sm_count) {
        return attention_splits(config.heads, config.kv_heads, config.head_dim, config.ctx_size,
                                sm_count);
    };
    max_splits_ = std::min(splits(device.sm_count), splits(kMostMultiprocessors));
    expert_rows_ = dense_hidden(config);
    upload_params(config, prof);
    config_.final_norm = nullptr;
    config_.rope_cos = nullptr;
    config_.rope_sin = nullptr;
    config_.layer_params = nullptr;
    weights_ = std::make_unique<ModelWeights>(device, cache, config_, layers_);
    if (config.prefill_rows > 0) {
        prefill_ = std::make_unique<Prefill>(config, device.stream.get(), residual_);
    }
}

void Decoder::upload_params(const vcuda_decode_config &config, vcuda_prof &prof) {
    const cudaStream_t stream = device_.stream.get();
    const std::vector<float> params =
        gather_params(config, at<float>(Buffer::kParams), layers_, final_norm_);
    const auto send = [&](Buffer to, const float *from) {
        const uint64_t bytes = sizes_[static_cast<int>(to)];
        CUDA_TRY(cudaMemcpyAsync(at<void>(to), from, bytes, cudaMemcpyHostToDevice, stream));
        prof.upload_copies += 1;
        prof.upload_bytes += bytes;
    };
    try {
        send(Buffer::kParams, params.data());
        send(Buffer::kCos, config.rope_cos);
        send(Buffer::kSin, config.rope_sin);
        CUDA_TRY(cudaStreamSynchronize(stream));
    } catch (...) {
        settle(stream);  // `params` and the caller's tables
        throw;
    }
}

// Every weight is there, and is what the model needs. Graphs that were made for other places go.
void Decoder::resolve() {
    if (!weights_->resolve()) return;
    for (GraphExec &graph : graphs_) graph.reset();
}

// ---------------------------------------------------------------------------------------- step

void Decoder::must_be_whole(const char *call) const {
    if (config_.segment == 0) return;
    throw Error(
        "%s needs a whole model and this one is a segment of %d layers (config.segment is 1); call "
        "vcuda_dev_layers_run",
        call, config_.layers);
}

// `of`: what the numbers belong to, for sentences.
void Decoder::check_place(const char *of, int32_t position, int32_t count) const {
    if (count < 1) throw Error("%scount is %d; it must be 1 or more", of, count);
    if (position != kv_.position()) {
        throw Error("%sposition is %d and the handle is at %d; vcuda_kv_seek sets it", of, position,
                    kv_.position());
    }
    if (count > config_.ctx_size - position) {
        throw Error("%d tokens at position %d do not fit the ctx_size of %d positions", count,
                    position, config_.ctx_size);
    }
}

void Decoder::check(const vcuda_decode_step &step) const {
    const vcuda_decode_config &c = config_;
    check_place("step.", step.position, step.count);
    if (step.out < VCUDA_OUT_NONE || step.out > VCUDA_OUT_TOP) {
        throw Error("step.out is %d; it must be VCUDA_OUT_* (0 to 4)", step.out);
    }
    if (step.ids == nullptr) throw Error("step.ids is NULL");
    for (int32_t i = 0; i < step.count; ++i) {
        if (step.ids[i] < 0 || step.ids[i] >= c.vocab) {
            throw Error("step.ids[%d] is %d and the vocabulary has the ids 0 to %d", i, step.ids[i],
                        c.vocab - 1);
        }
    }
    if (step.vocab_limit < 0 || step.vocab_limit > c.vocab) {
        throw Error("step.vocab_limit is %d; it must be 0 to %d, the vocabulary", step.vocab_limit,
                    c.vocab);
    }
    const bool logits = step.out == VCUDA_OUT_LOGITS || step.out == VCUDA_OUT_ALL_LOGITS;
    if (logits && step.logits == nullptr) {
        throw Error("step.logits is NULL and step.out (%d) asks for logits", step.out);
    }
    if (step.out != VCUDA_OUT_TOP) return;
    if (step.top < 1 || step.top > VCUDA_TOP_MAX) {
        throw Error("step.top is %d; it must be 1 to %d", step.top, VCUDA_TOP_MAX);
    }
    if (!(step.temperature > 0.0f) || !std::isfinite(step.temperature)) {
        throw Error("step.temperature is %g; it must be finite and above 0",
                    static_cast<double>(step.temperature));
    }
    if (step.top_ids == nullptr || step.top_logits == nullptr) {
        throw Error("step.%s is NULL and step.out asks for the largest logits",
                    step.top_ids == nullptr ? "top_ids" : "top_logits");
    }
}

uint64_t Decoder::trace_floats() const {
    must_be_whole("vcuda_trace_size");
    const vcuda_decode_config &c = config_;
    int64_t floats = 0;
    for (const LayerParams &layer : layers_) {
        floats += qkv_dim(c) + q_dim(c) + int64_t{2} * c.hidden;
        floats += layer.moe ? c.experts + int64_t{c.experts_per_token} * c.moe_intermediate
                            : int64_t{c.intermediate};
    }
    return static_cast<uint64_t>(floats);
}

}  // namespace vcuda
