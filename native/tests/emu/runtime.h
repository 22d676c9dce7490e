// The state of the emulated CUDA runtime, and what every runtime function does first.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "fake.h"

namespace vcuda::emulated {

struct Allocation {
    size_t bytes = 0;
    int device = 0;
    bool host = false;       // pinned host memory
    uint64_t hash = 0;       // of the contents, before the kernel that runs now
    bool in_flight = false;  // written by a kernel that a kernel with overlap may run beside
};

struct Fault {
    int kind = FAKE_ANY;
    int64_t left = 0;  // calls until it strikes
    int error = 0;
};

struct Runtime {
    std::recursive_mutex mutex;  // held by every runtime call, so kernels run one at a time
    std::map<const char *, Allocation> allocations;  // by first byte
    int64_t objects = 0;                             // streams, events, graphs
    std::map<int, uint64_t> used;                    // bytes of a device
    std::map<int, cudaError_t> lost;                 // devices that are gone, and why
    std::map<int, cudaError_t> late;                 // what the next call that waits answers
    std::map<const void *, int> shared_allowed;      // dynamic shared memory of a kernel
    std::vector<Fault> faults;
    Fault late_fault;
    int64_t calls = 0;
    int64_t counters[FAKE_COUNTERS] = {};
    uint64_t memory = 1ull << 30;
    int devices = 1;
    int driver = 13010;
    int without_code = -1;  // a device that the library has no kernels for
    bool skip = false;
    bool lazy = false;
    int open = 0;  // > 0: device memory may be touched (ASan)
};

Runtime &runtime();
int current_device();
void set_current_device(int device);

// One runtime call: takes the lock, counts, and learns whether the call is to fail.
class Call {
  public:
    // `throws`: FAKE_BAD_ALLOC may strike; not a call that destructors make.
    explicit Call(int kind, bool throws = true);
    // For a call that waits for the device: also what an earlier launch left.
    void waits();
    bool refused() const { return error_ != cudaSuccess; }
    // The answer: `done`, or why the call was refused; noted for cudaGetLastError.
    cudaError_t answer(cudaError_t done = cudaSuccess) const;

  private:
    std::lock_guard<std::recursive_mutex> lock_;
    cudaError_t error_ = cudaSuccess;
};

// While one exists device memory may be touched; outside ASan reports it, as a GPU would not let
// the host do it.
class DeviceAccess {
  public:
    DeviceAccess();
    ~DeviceAccess();
    DeviceAccess(const DeviceAccess &) = delete;
    DeviceAccess &operator=(const DeviceAccess &) = delete;
};

// AddressSanitizer only: run a kernel so that it is found out when it reads, before its pdl_wait,
// what a kernel since the last one without overlap has written. Memory of more than 4 MB an
// allocation is not watched.
void run_watched(Grid grid);

// The allocation that [p, p + bytes) lies in, or NULL.
const Allocation *allocation_of(const void *p, size_t bytes);

}  // namespace vcuda::emulated
