// Memory and copies of the emulated CUDA runtime.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fiber.h"
#include "runtime.h"
#include "stream.h"

using vcuda::emulated::Allocation;
using vcuda::emulated::allocation_of;
using vcuda::emulated::Call;
using vcuda::emulated::DeviceAccess;
using vcuda::emulated::Runtime;
using vcuda::emulated::runtime;

namespace vcuda::emulated {

namespace {

constexpr size_t kAlignment = 256;  // of cudaMalloc
#if defined(VCUDA_EMULATED_ASAN)
constexpr size_t kFence = 0;  // ASan has red zones
#else
constexpr size_t kFence = 64;  // bytes behind an allocation that nobody may write
#endif
constexpr unsigned char kFenceByte = 0xa5;

// Let the host touch device memory, or no longer.
void open_memory([[maybe_unused]] bool open) {
#if defined(VCUDA_EMULATED_ASAN)
    for (const auto &[first, a] : runtime().allocations) {
        if (a.host) continue;
        if (open) {
            __asan_unpoison_memory_region(first, a.bytes);
        } else {
            __asan_poison_memory_region(first, a.bytes);
        }
    }
#endif
}

cudaError_t take(void **pointer, size_t bytes, bool host) {
    Runtime &r = runtime();
    if (pointer == nullptr) return cudaErrorInvalidValue;
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    const int device = current_device();
    if (!host && bytes > r.memory - std::min<uint64_t>(r.memory, r.used[device])) {
        return cudaErrorMemoryAllocation;
    }
    void *memory = nullptr;
    if (bytes + kFence < bytes || posix_memalign(&memory, kAlignment, bytes + kFence) != 0) {
        return cudaErrorMemoryAllocation;
    }
    std::memset(memory, 0xff, bytes);
    std::memset(static_cast<char *>(memory) + bytes, kFenceByte, kFence);
    r.allocations[static_cast<const char *>(memory)] = {bytes, device, host};
    if (!host) r.used[device] += bytes;
#if defined(VCUDA_EMULATED_ASAN)
    if (!host && r.open == 0) __asan_poison_memory_region(memory, bytes);
#endif
    *pointer = memory;
    return cudaSuccess;
}

cudaError_t give(void *pointer, bool host) {
    Runtime &r = runtime();
    if (pointer == nullptr) return cudaSuccess;
    const auto found = r.allocations.find(static_cast<const char *>(pointer));
    if (found == r.allocations.end() || found->second.host != host) return cudaErrorInvalidValue;
    const Allocation a = found->second;
    for (size_t i = 0; i < kFence; ++i) {
        if (static_cast<const unsigned char *>(pointer)[a.bytes + i] != kFenceByte) {
            std::fprintf(stderr,
                         "emulator: byte %zu behind an allocation of %zu bytes was written; build "
                         "with AddressSanitizer to see by whom\n",
                         i, a.bytes);
            std::abort();
        }
    }
#if defined(VCUDA_EMULATED_ASAN)
    __asan_unpoison_memory_region(pointer, a.bytes);
#endif
    if (!host) r.used[a.device] -= a.bytes;
    r.allocations.erase(found);
    std::free(pointer);
    return cudaSuccess;
}

bool is_device(const void *p) {
    const Allocation *a = allocation_of(p, 0);
    return a != nullptr && !a->host;
}

// May `bytes` bytes at p be on this side of a copy?
bool fits(const void *p, size_t bytes, bool device) {
    if (bytes == 0) return true;
    if (!device) return p != nullptr && !is_device(p);
    const Allocation *a = allocation_of(p, bytes);
    return a != nullptr && !a->host;
}

struct Copy {
    void *to;
    size_t to_pitch;
    const void *from;
    size_t from_pitch;
    size_t width, height;
    cudaMemcpyKind kind;
};

cudaError_t resolve(Copy &c) {
    if (c.kind < cudaMemcpyHostToHost || c.kind > cudaMemcpyDefault) {
        return cudaErrorInvalidMemcpyDirection;
    }
    if (c.kind == cudaMemcpyDefault) {
        c.kind =
            static_cast<cudaMemcpyKind>((is_device(c.to) ? 1 : 0) + (is_device(c.from) ? 2 : 0));
    }
    if (c.width == 0 || c.height == 0) return cudaSuccess;
    if (c.height > 1 && (c.width > c.to_pitch || c.width > c.from_pitch)) {
        return cudaErrorInvalidPitchValue;
    }
    const size_t to_bytes = c.to_pitch * (c.height - 1) + c.width;
    const size_t from_bytes = c.from_pitch * (c.height - 1) + c.width;
    const bool to_device = c.kind == cudaMemcpyHostToDevice || c.kind == cudaMemcpyDeviceToDevice;
    const bool from_device = c.kind == cudaMemcpyDeviceToHost || c.kind == cudaMemcpyDeviceToDevice;
    if (!fits(c.to, to_bytes, to_device) || !fits(c.from, from_bytes, from_device)) {
        return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}

// Words of a row that are as a fresh allocation is (compute-sanitizer's initcheck knows better: to
// it, what was written is written, whatever it is).
int64_t fresh_words(const char *row, size_t bytes) {
    int64_t found = 0;
    for (size_t at = 0; at + sizeof(uint32_t) <= bytes; at += sizeof(uint32_t)) {
        uint32_t word;
        std::memcpy(&word, row + at, sizeof word);
        found += word == UINT32_MAX ? 1 : 0;
    }
    return found;
}

void perform(const Copy &c) {
    Runtime &r = runtime();
    const auto bytes = static_cast<int64_t>(c.width * c.height);
    if (c.kind == cudaMemcpyHostToDevice) {
        r.counters[FAKE_H2D] += 1;
        r.counters[FAKE_H2D_BYTES] += bytes;
    } else if (c.kind == cudaMemcpyDeviceToHost) {
        r.counters[FAKE_D2H] += 1;
        r.counters[FAKE_D2H_BYTES] += bytes;
    } else if (c.kind == cudaMemcpyDeviceToDevice) {
        r.counters[FAKE_D2D] += 1;
    }
    const DeviceAccess access;
    for (size_t row = 0; row < c.height && c.width > 0; ++row) {
        const char *from = static_cast<const char *>(c.from) + row * c.from_pitch;
        if (c.kind == cudaMemcpyDeviceToHost) {
            r.counters[FAKE_FRESH] += fresh_words(from, c.width);
        }
        std::memcpy(static_cast<char *>(c.to) + row * c.to_pitch, from, c.width);
    }
}

// The caller's own memory, neither device memory nor pinned: the runtime copies it at once.
bool is_pageable(const void *p) {
    return allocation_of(p, 0) == nullptr;
}

cudaError_t copy_in_stream(Call &call, Copy c, cudaStream_t stream) {
    if (call.refused()) return call.answer();
    if (const cudaError_t error = resolve(c); error != cudaSuccess) return call.answer(error);
    const bool waits = c.kind == cudaMemcpyDeviceToHost && is_pageable(c.to);
    const bool now = waits || (c.kind == cudaMemcpyHostToDevice && is_pageable(c.from));
    if (waits) call.waits();
    if (call.refused()) return call.answer();
    const cudaError_t error = submit(stream, [c] { perform(c); });
    if (now && stream != nullptr && !is_capturing(stream)) stream->queue->run_all();
    if (now && stream == nullptr) drain(false);
    return call.answer(error);
}

cudaError_t copy_now(Call &call, Copy c) {
    call.waits();
    if (call.refused()) return call.answer();
    cudaError_t error = forbid_while_capturing();
    if (error == cudaSuccess) error = resolve(c);
    if (error != cudaSuccess) return call.answer(error);
    drain(false);
    perform(c);
    return call.answer();
}

cudaError_t set_in_stream(Call &call, void *to, int value, size_t bytes, cudaStream_t stream) {
    if (call.refused()) return call.answer();
    if (!fits(to, bytes, true)) return call.answer(cudaErrorInvalidValue);
    if (bytes == 0) return call.answer();
    return call.answer(submit(stream, [to, value, bytes] {
        const DeviceAccess access;
        std::memset(to, value, bytes);
    }));
}

}  // namespace

#if defined(VCUDA_EMULATED_ASAN)

namespace {

constexpr size_t kWatched = 4 << 20;

__attribute__((no_sanitize("address", "undefined"))) uint64_t hash_of(const char *p, size_t n) {
    uint64_t hash = n;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t word;
        __builtin_memcpy(&word, p + i, 8);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    }
    for (; i < n; ++i) hash = (hash ^ static_cast<unsigned char>(p[i])) * 0x9e3779b97f4a7c15u;
    return hash;
}

template <class Body>
void for_watched(Body body) {
    for (auto &[first, a] : runtime().allocations) {
        if (!a.host && a.bytes <= kWatched) body(first, a);
    }
}

}  // namespace

void run_watched(Grid grid) {
    for_watched([&](const char *first, Allocation &a) {
        a.in_flight = a.in_flight && grid.overlap;
        a.hash = hash_of(first, a.bytes);
    });
    if (grid.overlap) {
        grid.in_flight = [](bool on) {
            for_watched([&](const char *first, const Allocation &a) {
                if (!a.in_flight) return;
                if (on) __asan_poison_memory_region(first, a.bytes);
                if (!on) __asan_unpoison_memory_region(first, a.bytes);
            });
        };
    }
    run_grid(grid);
    for_watched([](const char *first, Allocation &a) {
        // only the kernel before may still run: each lets the next one start after its own wait
        a.in_flight = hash_of(first, a.bytes) != a.hash;
    });
}

#else

void run_watched(Grid grid) {
    run_grid(grid);
}

#endif

DeviceAccess::DeviceAccess() {
    if (runtime().open++ == 0) open_memory(true);
}

DeviceAccess::~DeviceAccess() {
    if (--runtime().open == 0) open_memory(false);
}

}  // namespace vcuda::emulated

namespace emulated = vcuda::emulated;

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    Call call(FAKE_MALLOC);
    if (call.refused()) return call.answer();
    const cudaError_t error = emulated::forbid_while_capturing();
    return call.answer(error != cudaSuccess ? error : emulated::take(pointer, bytes, false));
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned) {
    Call call(FAKE_MALLOC);
    if (call.refused()) return call.answer();
    const cudaError_t error = emulated::forbid_while_capturing();
    return call.answer(error != cudaSuccess ? error : emulated::take(pointer, bytes, true));
}

cudaError_t cudaMallocHost(void **pointer, size_t bytes) {
    return cudaHostAlloc(pointer, bytes, cudaHostAllocDefault);
}

cudaError_t cudaFree(void *pointer) {
    Call call(FAKE_OTHER, false);
    call.waits();
    emulated::drain(true);
    return call.answer(emulated::give(pointer, false));
}

cudaError_t cudaFreeHost(void *pointer) {
    Call call(FAKE_OTHER, false);
    call.waits();
    emulated::drain(true);
    return call.answer(emulated::give(pointer, true));
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    Call call(FAKE_MEMCPY);
    return emulated::copy_now(call, {to, bytes, from, bytes, bytes, 1, kind});
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    Call call(FAKE_MEMCPY);
    return emulated::copy_in_stream(call, {to, bytes, from, bytes, bytes, 1, kind}, stream);
}

cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                         size_t width, size_t height, cudaMemcpyKind kind) {
    Call call(FAKE_MEMCPY);
    return emulated::copy_now(call, {to, to_pitch, from, from_pitch, width, height, kind});
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
    Call call(FAKE_MEMCPY);
    return emulated::copy_in_stream(call, {to, to_pitch, from, from_pitch, width, height, kind},
                                    stream);
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    Call call(FAKE_MEMCPY);
    return emulated::set_in_stream(call, to, value, bytes, nullptr);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    Call call(FAKE_MEMCPY);
    return emulated::set_in_stream(call, to, value, bytes, stream);
}
