// The fault plan, and the bookkeeping that every runtime call shares.
#include "fake.h"

#include <algorithm>
#include <new>

#include "cuda_try.h"
#include "fiber.h"
#include "runtime.h"
#include "stream.h"

namespace vcuda::emulated {

namespace {

thread_local int t_device = 0;
thread_local cudaError_t t_last_error = cudaSuccess;

// Does `fault` strike at this call?
bool strikes(Fault &fault, int kind) {
    if (fault.left == 0 || (fault.kind != FAKE_ANY && fault.kind != kind)) return false;
    fault.left -= 1;
    return fault.left == 0;
}

}  // namespace

// Never destroyed: handles may be given back while the process ends.
Runtime &runtime() {
    static Runtime &one = *new Runtime;
    return one;
}

int current_device() {
    return t_device;
}

void set_current_device(int device) {
    t_device = device;
}

Call::Call(int kind, bool throws) : lock_(runtime().mutex) {
    Runtime &r = runtime();
    r.calls += 1;
    int error = 0;
    for (Fault &fault : r.faults) {
        if (strikes(fault, kind) && error == 0) error = fault.error;
    }
    if (error == FAKE_BAD_ALLOC) {
        if (throws) throw std::bad_alloc();
        error = 0;
    }
    const auto lost = r.lost.find(t_device);
    if (lost != r.lost.end()) {
        error_ = lost->second;
    } else if (error != 0) {
        error_ = static_cast<cudaError_t>(error);
        if (is_fatal(error_)) r.lost[t_device] = error_;
    }
}

void Call::waits() {
    Runtime &r = runtime();
    const auto late = r.late.find(t_device);
    if (refused() || late == r.late.end()) return;
    error_ = late->second;
    r.late.erase(late);
    if (is_fatal(error_)) r.lost[t_device] = error_;
}

cudaError_t Call::answer(cudaError_t done) const {
    const cudaError_t error = refused() ? error_ : done;
    if (error != cudaSuccess && error != cudaErrorNotReady) t_last_error = error;
    return error;
}

const Allocation *allocation_of(const void *p, size_t bytes) {
    const Runtime &r = runtime();
    const auto *first = static_cast<const char *>(p);
    auto after = r.allocations.upper_bound(first);
    if (after == r.allocations.begin()) return nullptr;
    --after;
    const size_t offset = static_cast<size_t>(first - after->first);
    if (offset > after->second.bytes || bytes > after->second.bytes - offset) return nullptr;
    return &after->second;
}

}  // namespace vcuda::emulated

using vcuda::emulated::Runtime;
using vcuda::emulated::runtime;
using Lock = std::lock_guard<std::recursive_mutex>;

// ------------------------------------------------------------------------------------- last error

cudaError_t cudaPeekAtLastError() {
    Runtime &r = runtime();
    const Lock lock(r.mutex);
    const auto lost = r.lost.find(vcuda::emulated::t_device);
    return lost != r.lost.end() ? lost->second : vcuda::emulated::t_last_error;
}

cudaError_t cudaGetLastError() {
    const cudaError_t error = cudaPeekAtLastError();
    vcuda::emulated::t_last_error = cudaSuccess;  // the loss of a device stays
    return error;
}

const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
#define VCUDA_EMULATED_NAME(name, value, text) \
    case name:                                 \
        return #name;
        VCUDA_EMULATED_ERRORS(VCUDA_EMULATED_NAME)
#undef VCUDA_EMULATED_NAME
    }
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
#define VCUDA_EMULATED_TEXT(name, value, text) \
    case name:                                 \
        return text;
        VCUDA_EMULATED_ERRORS(VCUDA_EMULATED_TEXT)
#undef VCUDA_EMULATED_TEXT
    }
    return "unrecognized error code";
}

// ------------------------------------------------------------------------------------- fake.h

void fake_reset(void) {
    Runtime &r = runtime();
    const Lock lock(r.mutex);
    vcuda::emulated::drain(true);
    r.faults.clear();
    r.late_fault = {};
    r.late.clear();
    r.lost.clear();
    r.calls = 0;
    for (int64_t &counter : r.counters) counter = 0;
    r.memory = 1ull << 30;
    r.devices = 1;
    r.driver = 13010;
    r.without_code = -1;
    r.skip = false;
    r.lazy = false;
    vcuda::emulated::set_schedule(0);
    vcuda::emulated::t_last_error = cudaSuccess;
}

void fake_fail_at(int64_t n, int error) {
    fake_fail_kind(FAKE_ANY, n, error);
}

void fake_fail_kind(int kind, int64_t n, int error) {
    Runtime &r = runtime();
    const Lock lock(r.mutex);
    auto &faults = r.faults;
    faults.erase(std::remove_if(faults.begin(), faults.end(),
                                [kind](const auto &f) { return f.kind == kind || f.left == 0; }),
                 faults.end());
    if (n > 0) r.faults.push_back({kind, n, error});
}

void fake_fail_async(int64_t n, int error) {
    Runtime &r = runtime();
    const Lock lock(r.mutex);
    r.late_fault = {FAKE_LAUNCH, n, error};
}

int64_t fake_faults_left(void) {
    Runtime &r = runtime();
    const Lock lock(r.mutex);
    int64_t left = r.late_fault.left > 0 ? 1 : 0;
    for (const vcuda::emulated::Fault &fault : r.faults) left += fault.left > 0 ? 1 : 0;
    return left;
}

void fake_set_memory(uint64_t bytes) {
    const Lock lock(runtime().mutex);
    runtime().memory = bytes;
}

void fake_devices(int count) {
    const Lock lock(runtime().mutex);
    runtime().devices = count;
}

void fake_driver(int version) {
    const Lock lock(runtime().mutex);
    runtime().driver = version;
}

void fake_without_code(int device) {
    const Lock lock(runtime().mutex);
    runtime().without_code = device;
}

void fake_skip_launches(int on) {
    const Lock lock(runtime().mutex);
    runtime().skip = on != 0;
}

void fake_lazy(int on) {
    const Lock lock(runtime().mutex);
    vcuda::emulated::drain(true);
    runtime().lazy = on != 0;
}

void fake_schedule(uint32_t schedule) {
    const Lock lock(runtime().mutex);
    vcuda::emulated::set_schedule(schedule);
}

int64_t fake_calls(void) {
    const Lock lock(runtime().mutex);
    return runtime().calls;
}

int64_t fake_live(void) {
    Runtime &r = runtime();
    const Lock lock(r.mutex);
    return static_cast<int64_t>(r.allocations.size()) + r.objects;
}

uint64_t fake_memory_used(void) {
    Runtime &r = runtime();
    const Lock lock(r.mutex);
    uint64_t bytes = 0;
    for (const auto &[device, used] : r.used) bytes += used;
    return bytes;
}

int64_t fake_count(int what) {
    const Lock lock(runtime().mutex);
    return what >= 0 && what < FAKE_COUNTERS ? runtime().counters[what] : -1;
}
