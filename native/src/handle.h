// What a vcuda_handle holds, and the guard that stands before everything done with one.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>

#if !defined(_WIN32)
#include <unistd.h>
#endif

#include "context.h"
#include "error.h"

namespace vcuda {

// The process a handle belongs to: CUDA's state does not survive fork().
inline int64_t process_id() noexcept {
#if defined(_WIN32)
    return 0;  // Windows has no fork
#else
    return static_cast<int64_t>(getpid());
#endif
}

}  // namespace vcuda

struct vcuda_handle {
    int32_t device = 0;                       // index of the device
    int64_t process = vcuda::process_id();    // that created it
    std::mutex mutex;                         // held during every call on the handle
    bool lost = false;                        // the device is gone; only destroy still works
    char lost_reason[vcuda::kErrorBytes]{};   // the first fault's sentence
    vcuda_prof prof{};                        // counters
    bool timing = false;                      // vcuda_prof_timing
    std::unique_ptr<vcuda::Context> context;  // everything on the device
};

namespace vcuda {

// guard() for a call on a handle: refuses NULL, a handle of another process and a lost one,
// serialises the rest, and remembers the fault that loses the device.
template <class Body>
int guard(vcuda_handle *handle, Body &&body) noexcept {
    return guard([&] {
        if (handle == nullptr) throw Error("the handle is NULL; vcuda_create makes one");
        if (handle->process != process_id()) {  // before the mutex, which may be held for ever here
            throw Error(
                "this handle belongs to process %lld, and CUDA does not survive fork(): create "
                "one in process %lld",
                static_cast<long long>(handle->process), static_cast<long long>(process_id()));
        }
        const std::lock_guard<std::mutex> lock(handle->mutex);
        if (handle->lost) throw DeviceLost("the device was lost earlier: %s", handle->lost_reason);
        try {
            body();
        } catch (const DeviceLost &e) {
            handle->lost = true;
            std::snprintf(handle->lost_reason, sizeof handle->lost_reason, "%s", e.what());
            throw;
        }
    });
}

// guard() for a call that works on the device: body(context, prof) with the device current. What it
// adds to `prof` counts when it has ended well.
template <class Body>
int device_guard(vcuda_handle *handle, Body &&body) noexcept {
    return guard(handle, [&] {
        const DeviceScope scope(handle->device);
        vcuda_prof prof = handle->prof;
        body(*handle->context, prof);
        handle->prof = prof;
    });
}

}  // namespace vcuda
