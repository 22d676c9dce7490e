// Submitting, and watching, kernel by kernel: times of the phases, and the trace.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda_objects.h"
#include "launch.h"
#include "vcuda.h"

namespace vcuda {

// A member of vcuda_prof.
using Phase = vcuda_phase vcuda_prof::*;

// An event between any two kernels.
class PhaseTimer {
  public:
    explicit PhaseTimer(cudaStream_t stream) : stream_(stream) {}

    void start();             // before the first kernel of a token
    void ended(Phase phase);  // after each
    // Add up what was measured since the last time. PRE: the stream was waited for.
    void collect(vcuda_prof &prof);

  private:
    void record();

    cudaStream_t stream_;
    std::vector<Event> events_;  // used again for every token
    size_t used_ = 0;
    std::vector<Phase> phases_;  // of the interval that ends at event i; null where none does
};

// Copies of the activations, gathered on the device.
class Trace {
  public:
    Trace(cudaStream_t stream, uint64_t floats)
        : stream_(stream),
          floats_(floats),
          memory_(device_memory(floats * sizeof(float), "the trace")) {}

    void add(const float *from, uint64_t floats);
    // PRE: the stream was waited for.
    const float *device() const { return static_cast<const float *>(memory_.get()); }
    uint64_t floats() const { return floats_; }

  private:
    cudaStream_t stream_;
    uint64_t floats_;
    DeviceMemory memory_;
    uint64_t used_ = 0;
};

// What kernels are submitted with, and who watches them. After each kernel the caller says which
// phase it was, and what it made.
struct Submission {
    Launcher to;
    PhaseTimer *timer = nullptr;
    Trace *trace = nullptr;

    void did(Phase phase) const {
        if (timer != nullptr) timer->ended(phase);
    }
    void made(const float *what, int64_t floats) const {
        if (trace != nullptr) trace->add(what, static_cast<uint64_t>(floats));
    }
    void did(Phase phase, const float *what, int64_t floats) const {
        did(phase);
        made(what, floats);
    }
};

}  // namespace vcuda
