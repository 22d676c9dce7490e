// Owners of what the CUDA runtime hands out: each gives its object back when it goes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <utility>

#include "cuda_try.h"

namespace vcuda {

// One CUDA object and the call that frees it. Freeing never throws: on a lost device it fails, and
// the driver takes everything back when the process ends.
template <class T, cudaError_t (*Free)(T)>
class Owned {
  public:
    Owned() = default;
    explicit Owned(T value) : value_(value) {}
    ~Owned() { reset(); }
    Owned(Owned &&other) noexcept : value_(std::exchange(other.value_, nullptr)) {}
    Owned &operator=(Owned &&other) noexcept {
        if (this != &other) {
            reset();
            value_ = std::exchange(other.value_, nullptr);
        }
        return *this;
    }

    T get() const { return value_; }
    explicit operator bool() const { return value_ != nullptr; }
    void reset() noexcept {
        if (value_ == nullptr) return;
        if (Free(value_) != cudaSuccess) (void)cudaGetLastError();
        value_ = nullptr;
    }

  private:
    T value_ = nullptr;
};

using DeviceMemory = Owned<void *, cudaFree>;
using PinnedMemory = Owned<void *, cudaFreeHost>;
using Stream = Owned<cudaStream_t, cudaStreamDestroy>;
using Event = Owned<cudaEvent_t, cudaEventDestroy>;
using Graph = Owned<cudaGraph_t, cudaGraphDestroy>;
using GraphExec = Owned<cudaGraphExec_t, cudaGraphExecDestroy>;

// A number of bytes for a sentence: "1.25 GB", or exactly below 10 MB.
struct Bytes {
    explicit Bytes(uint64_t bytes) {
        if (bytes < 10'000'000) {
            std::snprintf(text, sizeof text, "%llu bytes", static_cast<unsigned long long>(bytes));
        } else {
            std::snprintf(text, sizeof text, "%.3f GB", static_cast<double>(bytes) / 1e9);
        }
    }
    char text[32];
};

// What an allocation takes of the device's memory, about: CUDA hands out whole pages of 2 MB, and
// shares one among small allocations.
constexpr uint64_t padded(uint64_t bytes) {
    const uint64_t unit = bytes < (1u << 20) ? 512 : 2u << 20;
    return (bytes + unit - 1) / unit * unit;
}

// Bytes of device memory that are free now.
inline uint64_t free_memory() {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    CUDA_TRY(cudaMemGetInfo(&free_bytes, &total_bytes));
    return free_bytes;
}

// An empty owner when the device has no room for it.
inline DeviceMemory try_device_memory(uint64_t bytes) {
    void *memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, bytes);
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        return DeviceMemory();
    }
    if (error != cudaSuccess) throw_cuda(error, "cudaMalloc", __FILE__, __LINE__);
    return DeviceMemory(memory);
}

// `what` begins the sentence when the device has no room: "the K/V".
inline DeviceMemory device_memory(uint64_t bytes, const char *what) {
    DeviceMemory memory = try_device_memory(bytes);
    if (!memory) {
        throw Error("%s needs %s of device memory and %s are free; drop weights, or ask for less",
                    what, Bytes(bytes).text, Bytes(free_memory()).text);
    }
    return memory;
}

// An empty owner when the host has no room for it.
inline PinnedMemory try_pinned_memory(uint64_t bytes) {
    void *memory = nullptr;
    const cudaError_t error = cudaMallocHost(&memory, bytes);
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        return PinnedMemory();
    }
    if (error != cudaSuccess) throw_cuda(error, "cudaMallocHost", __FILE__, __LINE__);
    return PinnedMemory(memory);
}

inline PinnedMemory pinned_memory(uint64_t bytes) {
    void *memory = nullptr;
    CUDA_TRY(cudaMallocHost(&memory, bytes));
    return PinnedMemory(memory);
}

inline Stream make_stream() {
    cudaStream_t stream = nullptr;
    CUDA_TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return Stream(stream);
}

inline Event make_event(unsigned flags) {
    cudaEvent_t event = nullptr;
    CUDA_TRY(cudaEventCreateWithFlags(&event, flags));
    return Event(event);
}

// After a call in the middle of some work failed: wait for what was submitted before it, so that
// its buffers are free again. Throws only when the device turns out to be lost.
inline void settle(cudaStream_t stream) {
    const cudaError_t error = cudaStreamSynchronize(stream);
    if (error == cudaSuccess) return;
    if (is_fatal(error)) throw_cuda(error, "cudaStreamSynchronize", __FILE__, __LINE__);
    (void)cudaGetLastError();
}

}  // namespace vcuda
