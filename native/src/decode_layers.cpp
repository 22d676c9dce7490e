// A run of a segment's layers: hidden states in, hidden states out, by one copy each way.
#include <algorithm>
#include <cstring>

#include "decode.h"
#include "prof.h"

namespace vcuda {

namespace {

// Without a branch a number: a chunk's rows are millions of them, and compilers make vectors of it.
bool all_finite(const float *values, int64_t count) {
    constexpr uint32_t exponent = 0x7f800000u;
    uint32_t broken = 0;
    for (int64_t i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, values + i, sizeof bits);
        broken |= static_cast<uint32_t>((bits & exponent) == exponent);
    }
    return broken == 0;
}

}  // namespace

// What one call is given. The rows of the last part that ran are in the pinned buffer, and those
// of the parts before it here: the caller's memory is written when nothing can fail any more.
struct Decoder::Passage {
    int32_t position, count;
    const float *hidden;  // [count][config.hidden]
    std::vector<float> earlier;
};

// The rows of the pinned buffer, one behind another.
void Decoder::take_rows(int32_t tokens, float *to) const {
    const auto *rows = reinterpret_cast<const float *>(static_cast<const Step *>(step_.get()) + 1);
    const auto width = static_cast<size_t>(config_.hidden);
    for (int32_t i = 0; i < tokens; ++i) {
        std::memcpy(to + static_cast<size_t>(i) * width, rows + i * padded_row(config_.hidden),
                    width * sizeof(float));
    }
}

// Whether float16 could hold everything of the chunk in the pinned buffer, and it is finite.
bool Decoder::fetched_well(int32_t tokens) const {
    const auto *step = static_cast<const Step *>(step_.get());
    return step->overflow == 0 && all_finite(reinterpret_cast<const float *>(step + 1),
                                             tokens * padded_row(config_.hidden));
}

// The one copy to the device: where it is, and the rows, with zeros behind each.
void Decoder::send_rows(int32_t position, const float *from, int32_t tokens, vcuda_prof &prof) {
    const HostTimer timer(prof.h2d);
    auto *host = static_cast<Step *>(step_.get());
    *host = Step{};
    host->base = position;
    host->position = position;
    auto *rows = reinterpret_cast<float *>(host + 1);
    const int64_t width = config_.hidden;
    const int64_t stride = padded_row(width);
    for (int32_t i = 0; i < tokens; ++i) {
        float *row = rows + i * stride;
        std::copy(from + i * width, from + (i + 1) * width, row);
        std::fill(row + width, row + stride, 0.0f);
    }
    const size_t bytes = sizeof(Step) + static_cast<size_t>(tokens * stride) * sizeof(float);
    CUDA_TRY(cudaMemcpyAsync(at<void>(Buffer::kStep), host, bytes, cudaMemcpyHostToDevice,
                             device_.stream.get()));
    prof.h2d_copies += 1;
    prof.h2d_bytes += bytes;
}

// The one copy back, of the same.
void Decoder::fetch_rows(int32_t tokens, vcuda_prof &prof) {
    const HostTimer timer(prof.d2h_sync);
    const cudaStream_t stream = device_.stream.get();
    const size_t bytes =
        sizeof(Step) + static_cast<size_t>(tokens * padded_row(config_.hidden)) * sizeof(float);
    CUDA_TRY(cudaMemcpyAsync(step_.get(), at<void>(Buffer::kStep), bytes, cudaMemcpyDeviceToHost,
                             stream));
    CUDA_TRY(cudaStreamSynchronize(stream));
    prof.d2h_copies += 1;
    prof.d2h_bytes += bytes;
}

// All rows, a chunk or a token at a time; false when a chunk must be computed token by token.
bool Decoder::pass(Submission &s, Passage &rows, bool chunks, bool plain, vcuda_prof &prof) {
    const auto width = static_cast<size_t>(config_.hidden);
    const int32_t most = chunks ? prefill_->rows() : 1;
    int32_t *overflow = &at<Step>(Buffer::kStep)->overflow;
    int32_t n = 0;
    for (int32_t at = 0; at < rows.count; at += n) {
        n = std::min(most, rows.count - at);
        const int32_t position = rows.position + at;
        send_rows(position, rows.hidden + static_cast<size_t>(at) * width, n, prof);
        if (chunks) {
            const uint64_t before = s.to.launches;
            prefill_->chunk(s, prefill_model(), nullptr, position, n, overflow);
            prof.launches += s.to.launches - before;
        } else {
            submit(s, plain, VCUDA_OUT_NONE, prof);
        }
        fetch_rows(n, prof);
        if (s.timer != nullptr) s.timer->collect(prof);
        if (chunks && !fetched_well(n)) return false;
        if (at + n == rows.count) break;
        const size_t kept = rows.earlier.size();
        rows.earlier.resize(kept + static_cast<size_t>(n) * width);
        take_rows(n, rows.earlier.data() + kept);
    }
    return true;
}

// The same with what must be done before and after it; whatever takes memory comes first.
bool Decoder::pass_all(Submission &s, Passage &rows, bool chunks, bool plain, vcuda_prof &prof) {
    s.to.overlap = device_.can_overlap() && s.timer == nullptr;
    rows.earlier.clear();
    rows.earlier.reserve(static_cast<size_t>(rows.count) * static_cast<size_t>(config_.hidden));
    if (!chunks && !plain) capture_for(VCUDA_OUT_NONE, false);
    try {
        if (dirty_) clear_scratch();
        dirty_ = true;
        const bool good = pass(s, rows, chunks, plain, prof);
        dirty_ = false;
        return good;
    } catch (...) {
        settle(device_.stream.get());
        throw;
    }
}

void Decoder::run_layers(int32_t position, int32_t count, float *hidden, bool timing,
                         vcuda_prof &prof) {
    if (config_.segment == 0) {
        throw Error(
            "vcuda_dev_layers_run needs a segment and this is a whole model (config.segment is 0); "
            "call vcuda_dev_decode_run or vcuda_dev_prefill");
    }
    check_place("", position, count);
    {
        const HostTimer timer(prof.cache_probe);
        resolve();
    }
    Submission s;
    s.to.stream = device_.stream.get();
    s.to.sm_count = device_.sm_count;
    PhaseTimer timer(s.to.stream);
    if (timing) s.timer = &timer;
    const bool plain = timing || config_.graph == 0;
    Passage rows{position, count, hidden, {}};
    const bool chunks = prefill_ != nullptr && count > 1;
    // what float16 could not hold, and what came out broken, float32 decides: token by token
    if (!chunks || !pass_all(s, rows, true, plain, prof)) pass_all(s, rows, false, plain, prof);

    std::copy(rows.earlier.begin(), rows.earlier.end(), hidden);
    const size_t earlier = rows.earlier.size();
    take_rows(count - static_cast<int32_t>(earlier / static_cast<size_t>(config_.hidden)),
              hidden + earlier);
    kv_.advance(count);
    prof.tokens += static_cast<uint64_t>(count);
}

}  // namespace vcuda
