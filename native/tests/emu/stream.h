// Streams, and what can be put into them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "block.h"

namespace vcuda::emulated {

using Work = std::function<void()>;

// What a stream still has to do. Shared with the events that were recorded in it.
struct Queue {
    std::deque<Work> work;
    uint64_t submitted = 0;
    uint64_t executed = 0;
    void run_until(uint64_t n);
    void run_all() { run_until(submitted); }
};

// A capture that is going on, and the graph it makes.
struct Capture {
    std::vector<Work> work;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    bool invalid = false;
};

// Put work into a stream: into its capture, its queue, or done at once. Under the runtime's lock.
cudaError_t submit(cudaStream_t stream, Work work);

// Do everything that blocking streams, and `all` streams, still have to do.
void drain(bool all);

// An answer other than success: a stream is being captured in a mode that forbids what the caller
// wants to do, and the capture is now invalid.
cudaError_t forbid_while_capturing();
bool is_capturing(cudaStream_t stream);

// The counterpart of cudaLaunchKernelEx.
cudaError_t launch_grid(cudaStream_t stream, Grid grid);

}  // namespace vcuda::emulated

struct CUstream_st {
    int device = 0;
    bool blocking = true;  // waits for, and is waited for by, the default stream
    std::shared_ptr<vcuda::emulated::Queue> queue = std::make_shared<vcuda::emulated::Queue>();
    std::shared_ptr<vcuda::emulated::Capture> capture;
    bool began_capture = false;
};
