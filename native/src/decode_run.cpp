// A run of decode: the kernels of a token in the order of the maths, and what goes before and
// after.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>

#include "attention.h"
#include "decode.h"
#include "embed.h"
#include "gemv.h"
#include "moe.h"
#include "prof.h"
#include "sample.h"

namespace vcuda {

// ------------------------------------------------------------------------------------ the model

void Decoder::projection_part(Submission &s, int32_t layer) const {
    const LayerParams &params = layers_[static_cast<size_t>(layer)];
    Gemv project;
    project.w = weights_->tiles(weights_->layer(layer).qkv);
    project.x = residual_;
    project.norm = params.input_norm;
    project.eps = config_.rms_norm_eps;
    project.bias = params.qkv_bias;
    project.y = at<float>(Buffer::kQkv);
    gemv(s.to, project);
    s.did(&vcuda_prof::gemm, project.y, qkv_dim(config_));
}

void Decoder::attention_part(Submission &s, int32_t layer) const {
    const vcuda_decode_config &c = config_;
    const LayerParams &params = layers_[static_cast<size_t>(layer)];
    auto *attended = at<float>(Buffer::kAttended);

    Attention attention;
    attention.qkv = at<float>(Buffer::kQkv);
    attention.q_norm = params.q_norm;
    attention.k_norm = params.k_norm;
    attention.eps = c.rms_norm_eps;
    attention.cos = at<float>(Buffer::kCos);
    attention.sin = at<float>(Buffer::kSin);
    attention.heads = c.heads;
    attention.kv_heads = c.kv_heads;
    attention.head_dim = c.head_dim;
    attention.window = params.window;
    attention.kv = c.kv;
    attention.k = kv_.k(layer);
    attention.v = kv_.v(layer);
    attention.k_scales = kv_.k_scales(layer);
    attention.v_scales = kv_.v_scales(layer);
    attention.step = at<Step>(Buffer::kStep);
    attention.partial = at<float>(Buffer::kPartial);
    attention.arrived = at<uint32_t>(Buffer::kCounters);
    attention.max_splits = max_splits_;
    attention.out = attended;
    attend(s.to, attention);
    s.did(&vcuda_prof::attention, attended, q_dim(c));

    Gemv join;
    join.w = weights_->tiles(weights_->layer(layer).o);
    join.x = attended;
    join.bias = params.o_bias;
    join.y = residual_;
    join.add = true;
    gemv(s.to, join);
    s.did(&vcuda_prof::gemm, residual_, c.hidden);
}

void Decoder::mlp_part(Submission &s, int32_t layer) const {
    const vcuda_decode_config &c = config_;
    const LayerParams &params = layers_[static_cast<size_t>(layer)];
    const LayerWeights &weights = weights_->layer(layer);
    float *x = residual_;
    auto *hidden = at<float>(Buffer::kHidden) + (params.moe ? expert_rows_ : 0);
    const auto tiles = [&](int index) { return weights_->tiles(index); };

    if (!params.moe) {
        GateUp widen;
        widen.w = tiles(weights.gate_up);
        widen.x = x;
        widen.norm = params.post_norm;
        widen.eps = c.rms_norm_eps;
        widen.bias = params.gate_up_bias;
        widen.hidden = hidden;
        gate_up(s.to, widen);
        s.did(&vcuda_prof::gemm, hidden, c.intermediate);

        Gemv narrow;
        narrow.w = tiles(weights.down);
        narrow.x = hidden;
        narrow.bias = params.down_bias;
        narrow.y = x;
        narrow.add = true;
        gemv(s.to, narrow);
        s.did(&vcuda_prof::gemm, x, c.hidden);
        return;
    }

    Router router;
    router.w = static_cast<const float *>(tiles(weights.router).codes);
    router.experts = c.experts;
    router.k = c.hidden;
    router.x = x;
    router.norm = params.post_norm;
    router.eps = c.rms_norm_eps;
    router.logits = at<float>(Buffer::kRouterLogits);
    route(s.to, router);
    s.did(&vcuda_prof::moe, router.logits, c.experts);

    ExpertGateUp widen;
    widen.gate = tiles(weights.gate);
    widen.up = tiles(weights.up);
    widen.logits = router.logits;
    widen.experts = c.experts;
    widen.top = c.experts_per_token;
    widen.normalise = c.norm_topk_prob != 0;
    widen.chosen = at<int32_t>(Buffer::kChosen);
    widen.weights = at<float>(Buffer::kWeights);
    widen.x = x;
    widen.norm = params.post_norm;
    widen.eps = c.rms_norm_eps;
    widen.hidden = hidden;
    expert_gate_up(s.to, widen);
    s.did(&vcuda_prof::moe);
    for (int32_t j = 0; j < c.experts_per_token; ++j) {  // the rows without what pads them
        s.made(hidden + j * padded_row(c.moe_intermediate), c.moe_intermediate);
    }

    ExpertDown narrow;
    narrow.down = tiles(weights.down);
    narrow.chosen = widen.chosen;
    narrow.weights = widen.weights;
    narrow.top = c.experts_per_token;
    narrow.hidden = hidden;
    narrow.y = x;
    expert_down(s.to, narrow);
    s.did(&vcuda_prof::moe, x, c.hidden);
}

void Decoder::head_part(Submission &s, int32_t out) const {
    Gemv head;
    head.w = weights_->head();
    head.x = residual_;
    head.norm = final_norm_;
    head.eps = config_.rms_norm_eps;
    head.y = logits_of(output());
    head.nonfinite = &output()->header.nonfinite;
    gemv(s.to, head);
    s.did(&vcuda_prof::gemm);
    if (out == VCUDA_OUT_LOGITS) return;
    const auto *step = at<Step>(Buffer::kStep);
    auto *scratch = at<uint32_t>(Buffer::kSample);
    if (out == VCUDA_OUT_GREEDY) {
        sample_greedy(s.to, step, config_.vocab, output(), scratch);
    } else {
        sample_top(s.to, step, config_.vocab, output(), scratch);
    }
    s.did(&vcuda_prof::reduce);
}

void Decoder::token(Submission &s, int32_t out) const {
    // Events and copies between the kernels leave nothing to overlap.
    const bool overlap = device_.can_overlap() && s.timer == nullptr && s.trace == nullptr;
    // The first kernel takes its id and moves the position on, which the token before it reads
    // until its end: so it waits for that token, and everything behind it may overlap. In a segment
    // the host has written the position and x, and the first layer's product is the first kernel.
    s.to.overlap = false;
    if (s.timer != nullptr) s.timer->start();
    if (config_.segment == 0) {
        embed(s.to, weights_->embed(), at<Step>(Buffer::kStep), residual_, &output()->header);
        s.did(&vcuda_prof::norm);
        s.to.overlap = overlap;
    }
    for (int32_t layer = 0; layer < config_.layers; ++layer) {
        projection_part(s, layer);
        s.to.overlap = overlap;
        attention_part(s, layer);
        mlp_part(s, layer);
    }
    if (out != VCUDA_OUT_NONE) head_part(s, out);
}

// ------------------------------------------------------------------------------------ submitting

// The graph of one kind of output; an empty owner when it is there already.
GraphExec Decoder::capture(int32_t out) const {
    if (graphs_[out]) return GraphExec();
    const cudaStream_t stream = device_.stream.get();
    Submission s;
    s.to.stream = stream;
    s.to.sm_count = device_.sm_count;
    cudaGraph_t raw = nullptr;
    CUDA_TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    try {
        token(s, out);
    } catch (...) {
        (void)cudaStreamEndCapture(stream, &raw);
        (void)cudaGetLastError();
        const Graph abandoned(raw);
        throw;
    }
    CUDA_TRY(cudaStreamEndCapture(stream, &raw));
    const Graph graph(raw);
    cudaGraphExec_t executable = nullptr;
    CUDA_TRY(cudaGraphInstantiate(&executable, graph.get(), 0));
    GraphExec owned(executable);
    CUDA_TRY(cudaGraphUpload(owned.get(), stream));
    return owned;
}

// The graphs that a run needs: both or, when one cannot be had, none.
void Decoder::capture_for(int32_t out, bool with_none) {
    GraphExec none = with_none ? capture(VCUDA_OUT_NONE) : GraphExec();
    GraphExec wanted = out == VCUDA_OUT_NONE && none ? GraphExec() : capture(out);
    if (none) graphs_[VCUDA_OUT_NONE] = std::move(none);
    if (wanted) graphs_[out] = std::move(wanted);
}

void Decoder::submit(Submission &s, bool plain, int32_t out, vcuda_prof &prof) {
    if (plain) {
        const uint64_t before = s.to.launches;
        token(s, out);
        prof.launches += s.to.launches - before;
        return;
    }
    CUDA_TRY(cudaGraphLaunch(graphs_[out].get(), device_.stream.get()));
    prof.launches += 1;
}

void Decoder::clear_scratch() {
    for (const Buffer buffer : {Buffer::kCounters, Buffer::kSample}) {
        const uint64_t bytes = sizes_[static_cast<int>(buffer)];
        if (bytes == 0) continue;
        CUDA_TRY(cudaMemsetAsync(at<void>(buffer), 0, bytes, device_.stream.get()));
    }
}

void Decoder::send_step(const vcuda_decode_step &step, vcuda_prof &prof) {
    const HostTimer timer(prof.h2d);
    auto *host = static_cast<Step *>(step_.get());
    *host = Step{};
    host->base = step.position;
    host->position = step.position;
    host->vocab_limit = step.vocab_limit == 0 ? config_.vocab : step.vocab_limit;
    host->top = step.out == VCUDA_OUT_TOP ? step.top : 1;
    host->temperature = step.out == VCUDA_OUT_TOP ? step.temperature : 1.0f;
    const size_t ids_bytes = static_cast<size_t>(step.count) * sizeof(int32_t);
    std::memcpy(host + 1, step.ids, ids_bytes);
    CUDA_TRY(cudaMemcpyAsync(at<void>(Buffer::kStep), host, sizeof(Step) + ids_bytes,
                             cudaMemcpyHostToDevice, device_.stream.get()));
    prof.h2d_copies += 1;
    prof.h2d_bytes += sizeof(Step) + ids_bytes;
}

// The one copy back: TOP needs what lies before the logits, LOGITS the header and what follows it.
void Decoder::fetch(int32_t out, vcuda_prof &prof) {
    const HostTimer timer(prof.d2h_sync);
    const cudaStream_t stream = device_.stream.get();
    const size_t logits_bytes = static_cast<size_t>(config_.vocab) * sizeof(float);
    const size_t from = out == VCUDA_OUT_TOP ? 0 : offsetof(Output, header);
    const size_t to = sizeof(Output) + (out == VCUDA_OUT_LOGITS ? logits_bytes : 0);
    CUDA_TRY(cudaMemcpyAsync(static_cast<char *>(result_.get()) + from,
                             reinterpret_cast<const char *>(output()) + from, to - from,
                             cudaMemcpyDeviceToHost, stream));
    CUDA_TRY(cudaStreamSynchronize(stream));
    prof.d2h_copies += 1;
    prof.d2h_bytes += to - from;
}

void Decoder::answer(vcuda_decode_step &step, const std::vector<float> &all_logits) const {
    const auto *result = static_cast<const Output *>(result_.get());
    const auto *logits = reinterpret_cast<const float *>(result + 1);
    const auto vocab = static_cast<size_t>(config_.vocab);
    switch (step.out) {
        case VCUDA_OUT_LOGITS:
            std::copy(logits, logits + vocab, step.logits);
            break;
        case VCUDA_OUT_ALL_LOGITS:
            std::copy(all_logits.begin(), all_logits.end(), step.logits);
            break;
        case VCUDA_OUT_TOP: {
            step.top_count = std::min(result->header.top_count, step.top);
            std::copy(result->top_ids, result->top_ids + step.top_count, step.top_ids);
            std::copy(result->top_logits, result->top_logits + step.top_count, step.top_logits);
            step.sum_exp = result->header.sum_exp;
            step.id = result->header.id;
            step.max_logit = result->header.max_logit;
            break;
        }
        case VCUDA_OUT_GREEDY:
            step.id = result->header.id;
            step.max_logit = result->header.max_logit;
            break;
        default:
            break;
    }
}

// The tokens of a step, one after another; false when a logit is not finite, at token `at`.
bool Decoder::submit_all(Submission &s, const vcuda_decode_step &step, bool plain, uint64_t &at,
                         std::vector<float> &all_logits, vcuda_prof &prof) {
    const bool all = step.out == VCUDA_OUT_ALL_LOGITS;
    const int32_t out = all ? VCUDA_OUT_LOGITS : step.out;
    const auto count = static_cast<uint64_t>(step.count);
    const auto *result = static_cast<const Output *>(result_.get());
    const auto *logits = reinterpret_cast<const float *>(result + 1);
    send_step(step, prof);
    for (at = 0; at < count; ++at) {
        const bool wanted = all || at + 1 == count;
        submit(s, plain, wanted ? out : VCUDA_OUT_NONE, prof);
        if (wanted) {
            fetch(out, prof);
        } else if (s.timer != nullptr) {
            CUDA_TRY(cudaStreamSynchronize(device_.stream.get()));
        }
        if (s.timer != nullptr) s.timer->collect(prof);
        if (wanted && result->header.nonfinite != 0) return false;
        if (all) all_logits.insert(all_logits.end(), logits, logits + config_.vocab);
    }
    return true;
}

void Decoder::run(vcuda_decode_step &step, bool timing, vcuda_prof &prof) {
    step.nonfinite = 0;
    must_be_whole("vcuda_dev_decode_run");
    check(step);
    {
        const HostTimer timer(prof.cache_probe);
        resolve();
    }
    const cudaStream_t stream = device_.stream.get();
    const bool all = step.out == VCUDA_OUT_ALL_LOGITS;
    const auto count = static_cast<uint64_t>(step.count);
    const bool plain = timing || step.trace != nullptr || config_.graph == 0;

    // Everything that takes memory comes before the first launch.
    Submission s;
    s.to.stream = stream;
    s.to.sm_count = device_.sm_count;
    PhaseTimer timer(stream);
    if (timing) s.timer = &timer;
    std::unique_ptr<Trace> trace;
    std::vector<float> traced;
    if (step.trace != nullptr) {
        trace = std::make_unique<Trace>(stream, count * trace_floats());
        traced.resize(trace->floats());
        s.trace = trace.get();
    }
    std::vector<float> all_logits;
    if (all) all_logits.reserve(count * static_cast<uint64_t>(config_.vocab));
    if (!plain) capture_for(all ? VCUDA_OUT_LOGITS : step.out, count > 1 && !all);

    has_logits_ = false;
    uint64_t at = 0;
    bool finite = false;
    try {
        if (dirty_) clear_scratch();
        dirty_ = true;
        finite = submit_all(s, step, plain, at, all_logits, prof);
        if (trace && finite) {
            CUDA_TRY(cudaMemcpyAsync(traced.data(), trace->device(), traced.size() * sizeof(float),
                                     cudaMemcpyDeviceToHost, stream));
            CUDA_TRY(cudaStreamSynchronize(stream));
        }
    } catch (...) {
        settle(stream);
        throw;
    }
    dirty_ = false;
    finish(step, all_logits, finite ? step.count : static_cast<int32_t>(at), prof);
    std::copy(traced.begin(), traced.end(), step.trace);
}

// The end of a run whose first `finite` tokens gave finite logits: the answer, or an Error.
void Decoder::finish(vcuda_decode_step &step, const std::vector<float> &all_logits, int32_t finite,
                     vcuda_prof &prof) {
    if (finite < step.count) {
        step.nonfinite = 1;
        throw Error(
            "a logit of the token at position %d is NaN or infinite; a weight may be damaged, or "
            "too large for its kind",
            step.position + finite);
    }
    answer(step, all_logits);
    has_logits_ = step.out != VCUDA_OUT_NONE;
    kv_.advance(step.count);
    prof.tokens += static_cast<uint64_t>(step.count);
}

void Decoder::last_logits(float *logits, vcuda_prof &prof) {
    must_be_whole("vcuda_dev_decode_logits");
    if (!has_logits_) {
        throw Error(
            "there are no logits: the last vcuda_dev_decode_run or vcuda_dev_prefill did not end "
            "well, "
            "or asked for VCUDA_OUT_NONE");
    }
    fetch(VCUDA_OUT_LOGITS, prof);
    const auto *result = static_cast<const Output *>(result_.get());
    std::memcpy(logits, result + 1, static_cast<size_t>(config_.vocab) * sizeof(float));
}

}  // namespace vcuda
