// Decoding: the buffers of one model and one sequence, and the run of a few tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "cache.h"
#include "decode_config.h"
#include "device.h"
#include "kv.h"
#include "launch.h"
#include "layout.h"
#include "observe.h"
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
    void last_logits(float *logits, vcuda_prof &prof);
    uint64_t trace_floats() const;
    Kv &kv() { return kv_; }

  private:
    // A weight that every token needs: its key, what it must be, and where it lies.
    struct Need {
        uint64_t key;
        int64_t stack, n, k;
        int32_t projection;
        Entry *entry;
    };
    // What one layer reads; indices into tiles_.
    struct LayerWeights {
        int qkv, o, gate_up, down;  // dense
        int router, gate, up;       // moe; `down` is its stack
    };
    // What a token is submitted with.
    struct Submission {
        Launcher to;
        PhaseTimer *timer = nullptr;
        Trace *trace = nullptr;
        void did(Phase phase);                         // a kernel of this phase was launched
        void made(const float *what, int64_t floats);  // and wrote this
        void did(Phase phase, const float *what, int64_t floats);
    };

    template <class T>
    T *at(Buffer buffer) const {
        return static_cast<T *>(buffers_[static_cast<int>(buffer)].get());
    }
    Output *output() const { return at<Output>(Buffer::kOutput); }
    int need(int32_t layer, int32_t projection, int64_t stack, int64_t n, int64_t k);
    void list_needs();
    void upload_params(const vcuda_decode_config &config, vcuda_prof &prof);

    // decode.cpp: checks
    void check(const vcuda_decode_step &step) const;
    void resolve();
    void check_weight(const Need &need) const;
    [[noreturn]] void missing(size_t first) const;

    // decode_run.cpp: work
    void token(Submission &s, int32_t out) const;
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
    void clear_scratch();

    const Device &device_;
    Cache &cache_;
    vcuda_decode_config config_;  // its pointers are NULL: the caller's memory is not kept
    Kv kv_;
    DeviceMemory buffers_[kBuffers];
    uint64_t sizes_[kBuffers] = {};
    uint64_t bytes_;
    PinnedMemory step_;    // as Buffer::kStep
    PinnedMemory result_;  // as Buffer::kOutput
    std::vector<LayerParams> layers_;
    const float *final_norm_ = nullptr;
    int32_t max_splits_ = 0;

    std::vector<Need> needs_;
    std::vector<Tiles> tiles_;  // of needs_, as they lie now
    std::vector<LayerWeights> weights_;
    int embed_ = 0, head_ = 0;
    uint64_t generation_ = 0;  // of the cache when tiles_ was made; 0: never

    GraphExec graphs_[5];      // by VCUDA_OUT_*; ALL_LOGITS uses that of LOGITS
    int64_t expert_rows_ = 0;  // where the experts' part of Buffer::kHidden begins, in floats
    bool dirty_ = true;        // counters and scratch may not be zero: a run did not end
    bool has_logits_ = false;
};

}  // namespace vcuda
