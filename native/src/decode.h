// Decoding: the buffers of one model and one sequence, and the run of a few tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cache.h"
#include "decode_config.h"
#include "device.h"
#include "kv.h"
#include "launch.h"
#include "model_weights.h"
#include "observe.h"
#include "prefill.h"
#include "step.h"
#include "vcuda.h"

namespace vcuda {

class Decoder {
  public:
    // Takes all memory. PRE: check_config and check_device.
    Decoder(const Device &device, Cache &cache, const vcuda_decode_config &config,
            vcuda_prof &prof);

    // Throws Error when the config needs more than a block of this device can hold, or more memory
    // than is free, `reclaimed` bytes included. PRE: check_config.
    static void check_device(const Device &device, const vcuda_decode_config &config,
                             uint64_t reclaimed);
    // Device memory that goes back with this decoder.
    uint64_t bytes() const { return bytes_; }

    void run(vcuda_decode_step &step, bool timing, vcuda_prof &prof);
    // The same with many positions at a time.
    void prefill(vcuda_decode_step &step, bool timing, vcuda_prof &prof);
    // The same for a segment of layers, hidden states in and out.
    void run_layers(int32_t position, int32_t count, float *hidden, bool timing, vcuda_prof &prof);
    void last_logits(float *logits, vcuda_prof &prof);
    uint64_t trace_floats() const;
    Kv &kv() { return kv_; }

  private:
    template <class T>
    T *at(Buffer buffer) const {
        return static_cast<T *>(buffers_[static_cast<int>(buffer)].get());
    }
    Output *output() const { return at<Output>(Buffer::kOutput); }
    void upload_params(const vcuda_decode_config &config, vcuda_prof &prof);

    // decode.cpp: checks
    void check(const vcuda_decode_step &step) const;
    void check_place(const char *of, int32_t position, int32_t count) const;
    void must_be_whole(const char *call) const;
    void resolve();

    // decode_layers.cpp: a segment of layers
    struct Passage;
    bool pass(Submission &s, Passage &rows, bool chunks, bool plain, vcuda_prof &prof);
    bool pass_all(Submission &s, Passage &rows, bool chunks, bool plain, vcuda_prof &prof);
    void send_rows(int32_t position, const float *from, int32_t tokens, vcuda_prof &prof);
    void fetch_rows(int32_t tokens, vcuda_prof &prof);
    void take_rows(int32_t tokens, float *to) const;
    bool fetched_well(int32_t tokens) const;

    // decode_prefill.cpp: many positions at a time
    PrefillModel prefill_model() const;
    bool submit_chunks(Submission &s, const vcuda_decode_step &step, std::vector<float> &all_logits,
                       vcuda_prof &prof);
    void fetch_logits(Submission &s, const PrefillModel &model, int32_t tokens,
                      std::vector<float> &to, vcuda_prof &prof);

    // decode_run.cpp: work
    void token(Submission &s, int32_t out) const;
    void projection_part(Submission &s, int32_t layer) const;
    void attention_part(Submission &s, int32_t layer) const;
    void mlp_part(Submission &s, int32_t layer) const;
    void head_part(Submission &s, int32_t out) const;
    GraphExec capture(int32_t out) const;
    void capture_for(int32_t out, bool with_none);
    void submit(Submission &s, bool plain, int32_t out, vcuda_prof &prof);
    bool submit_all(Submission &s, const vcuda_decode_step &step, bool plain, uint64_t &at,
                    std::vector<float> &all_logits, vcuda_prof &prof);
    void send_step(const vcuda_decode_step &step, vcuda_prof &prof);
    void fetch(int32_t out, vcuda_prof &prof);
    void answer(vcuda_decode_step &step, const std::vector<float> &all_logits) const;
    void finish(vcuda_decode_step &step, const std::vector<float> &all_logits, int32_t finite,
                vcuda_prof &prof);
    void clear_scratch();

    const Device &device_;
    vcuda_decode_config config_;  // its pointers are NULL: the caller's memory is not kept
    Kv kv_;
    DeviceMemory buffers_[kBuffers];
    uint64_t sizes_[kBuffers] = {};
    uint64_t bytes_;
    PinnedMemory step_;          // as Buffer::kStep
    PinnedMemory result_;        // as Buffer::kOutput
    float *residual_ = nullptr;  // x of a token
    std::vector<LayerParams> layers_;
    const float *final_norm_ = nullptr;
    int32_t max_splits_ = 0;

    std::unique_ptr<ModelWeights> weights_;
    std::unique_ptr<Prefill> prefill_;  // NULL: config.prefill_rows is 0

    GraphExec graphs_[5];      // by VCUDA_OUT_*; ALL_LOGITS uses that of LOGITS
    int64_t expert_rows_ = 0;  // where the experts' part of Buffer::kHidden begins, in floats
    bool dirty_ = true;        // counters and scratch may not be zero: a run did not end
    bool has_logits_ = false;
};

}  // namespace vcuda
