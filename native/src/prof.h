// Counting and timing for the PROF struct.
#pragma once

#include <chrono>

#include "vcuda.h"

namespace vcuda {

// Adds one to a phase, and the time from here to the end of the scope by the host's clock.
class HostTimer {
  public:
    explicit HostTimer(vcuda_phase &phase)
        : phase_(phase), start_(std::chrono::steady_clock::now()) {}
    ~HostTimer() {
        const auto spent = std::chrono::steady_clock::now() - start_;
        phase_.count += 1;
        phase_.ns += static_cast<uint64_t>(
            std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count());
    }
    HostTimer(const HostTimer &) = delete;
    HostTimer &operator=(const HostTimer &) = delete;

  private:
    vcuda_phase &phase_;
    std::chrono::steady_clock::time_point start_;
};

}  // namespace vcuda
