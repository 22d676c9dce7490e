#include "observe.h"

namespace vcuda {

void PhaseTimer::record() {
    if (used_ == events_.size()) events_.push_back(make_event(cudaEventDefault));
    CUDA_TRY(cudaEventRecord(events_[used_].get(), stream_));
    used_ += 1;
}

void PhaseTimer::start() {
    record();
    phases_.push_back(nullptr);
}

void PhaseTimer::ended(Phase phase) {
    record();
    phases_.push_back(phase);
}

void PhaseTimer::collect(vcuda_prof &prof) {
    for (size_t i = 0; i < used_; ++i) {
        if (phases_[i] == nullptr) continue;
        float ms = 0.0f;
        CUDA_TRY(cudaEventElapsedTime(&ms, events_[i - 1].get(), events_[i].get()));
        vcuda_phase &phase = prof.*phases_[i];
        phase.count += 1;
        phase.ns += static_cast<uint64_t>(static_cast<double>(ms) * 1e6);
    }
    used_ = 0;
    phases_.clear();
}

void Trace::add(const float *from, uint64_t floats) {
    if (used_ + floats > floats_) throw Error("a trace longer than vcuda_trace_size (a defect)");
    CUDA_TRY(cudaMemcpyAsync(static_cast<float *>(memory_.get()) + used_, from,
                             floats * sizeof(float), cudaMemcpyDeviceToDevice, stream_));
    used_ += floats;
}

}  // namespace vcuda
