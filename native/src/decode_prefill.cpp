// A run of prefill: the chunks of a step, and what goes before and after.
#include <algorithm>
#include <cmath>

#include "decode.h"
#include "prof.h"

namespace vcuda {

// The rows of logits of one chunk to the end of `to`.
void Decoder::fetch_logits(Submission &s, const PrefillModel &model, int32_t tokens,
                           std::vector<float> &to, vcuda_prof &prof) {
    const cudaStream_t stream = device_.stream.get();
    const auto vocab = static_cast<size_t>(config_.vocab);
    const size_t pitch = static_cast<size_t>(row_stride(config_.vocab)) * sizeof(float);
    for (int32_t first = 0; first < tokens; first += prefill_->logit_rows()) {
        const int32_t n = std::min(prefill_->logit_rows(), tokens - first);
        const float *logits = prefill_->logits(s, model, first, n, &output()->header.overflow);
        const size_t before = to.size();
        to.resize(before + static_cast<size_t>(n) * vocab);
        const HostTimer timer(prof.d2h_sync);
        CUDA_TRY(cudaMemcpy2DAsync(to.data() + before, vocab * sizeof(float), logits, pitch,
                                   vocab * sizeof(float), static_cast<size_t>(n),
                                   cudaMemcpyDeviceToHost, stream));
        CUDA_TRY(cudaStreamSynchronize(stream));
        prof.d2h_copies += 1;
        prof.d2h_bytes += static_cast<uint64_t>(n) * vocab * sizeof(float);
    }
}

PrefillModel Decoder::prefill_model() const {
    return {config_,
            layers_,
            *weights_,
            kv_,
            final_norm_,
            at<float>(Buffer::kCos),
            at<float>(Buffer::kSin)};
}

// Everything of a step; false when a value did not fit float16.
bool Decoder::submit_chunks(Submission &s, const vcuda_decode_step &step,
                            std::vector<float> &all_logits, vcuda_prof &prof) {
    const cudaStream_t stream = device_.stream.get();
    const PrefillModel model = prefill_model();
    const bool all = step.out == VCUDA_OUT_ALL_LOGITS;
    Header *header = &output()->header;
    send_step(step, prof);
    CUDA_TRY(cudaMemsetAsync(header, 0, sizeof *header, stream));
    const auto *ids = reinterpret_cast<const int32_t *>(at<Step>(Buffer::kStep) + 1);
    int32_t last = 0;  // tokens of the last chunk
    for (int32_t at = 0; at < step.count; at += last) {
        last = std::min(prefill_->rows(), step.count - at);
        prefill_->chunk(s, model, ids + at, step.position + at, last, &header->overflow);
        if (all) fetch_logits(s, model, last, all_logits, prof);
        if (s.timer != nullptr) {
            CUDA_TRY(cudaStreamSynchronize(stream));
            s.timer->collect(prof);
        }
    }
    if (step.out != VCUDA_OUT_NONE) {
        CUDA_TRY(cudaMemcpyAsync(residual_, prefill_->residual(last - 1),
                                 static_cast<size_t>(config_.hidden) * sizeof(float),
                                 cudaMemcpyDeviceToDevice, stream));
        if (s.timer != nullptr) s.timer->start();
        head_part(s, all ? VCUDA_OUT_LOGITS : step.out);
    }
    fetch(all ? VCUDA_OUT_NONE : step.out, prof);
    if (s.timer != nullptr) s.timer->collect(prof);
    return static_cast<const Output *>(result_.get())->header.overflow == 0;
}

void Decoder::prefill(vcuda_decode_step &step, bool timing, vcuda_prof &prof) {
    step.nonfinite = 0;
    must_be_whole("vcuda_dev_prefill");
    check(step);
    if (!prefill_) {
        throw Error(
            "there are no buffers for prefill: config.prefill_rows was 0 at vcuda_dev_decode_init; "
            "set it, or use vcuda_dev_decode_run");
    }
    if (step.trace != nullptr) {
        throw Error("step.trace must be NULL: vcuda_dev_decode_run gives traces");
    }
    {
        const HostTimer timer(prof.cache_probe);
        resolve();
    }
    const cudaStream_t stream = device_.stream.get();
    const auto count = static_cast<uint64_t>(step.count);

    // Everything that takes memory comes before the first launch.
    Submission s;
    s.to.stream = stream;
    s.to.sm_count = device_.sm_count;
    PhaseTimer timer(stream);
    if (timing) s.timer = &timer;
    s.to.overlap = device_.can_overlap() && !timing;
    std::vector<float> all_logits;
    if (step.out == VCUDA_OUT_ALL_LOGITS) {
        all_logits.reserve(count * static_cast<uint64_t>(config_.vocab));
    }

    has_logits_ = false;
    bool fits = false;
    try {
        if (dirty_) clear_scratch();
        dirty_ = true;
        fits = submit_chunks(s, step, all_logits, prof);
    } catch (...) {
        settle(stream);
        throw;
    }
    dirty_ = false;
    prof.launches += s.to.launches;
    // What float16 could not hold, and what came out broken, float32 decides: token by token.
    const auto *result = static_cast<const Output *>(result_.get());
    if (!fits || result->header.nonfinite != 0 ||
        !std::all_of(all_logits.begin(), all_logits.end(),
                     [](float logit) { return std::isfinite(logit); })) {
        std::vector<float>().swap(all_logits);
        return run(step, timing, prof);
    }
    finish(step, all_logits, step.count, prof);
}

}  // namespace vcuda
