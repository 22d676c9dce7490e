// Devices and kernel attributes of the emulated CUDA runtime: it says it is an H200.
#include <cstdio>
#include <cstring>

#include "runtime.h"
#include "stream.h"

using vcuda::emulated::Call;
using vcuda::emulated::Runtime;
using vcuda::emulated::runtime;

namespace {

constexpr int kSharedPerBlock = 48 << 10;
constexpr int kSharedPerBlockOptin = 227 << 10;
constexpr int kSharedPerMultiprocessor = 228 << 10;

// Why there are no devices, or success.
cudaError_t devices_there() {
    const Runtime &r = runtime();
    if (r.driver < CUDART_VERSION) return cudaErrorInsufficientDriver;
    return r.devices > 0 ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t check_device(int device) {
    const cudaError_t error = devices_there();
    if (error != cudaSuccess) return error;
    return device >= 0 && device < runtime().devices ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t check_code() {
    return runtime().without_code == vcuda::emulated::current_device()
               ? cudaErrorNoKernelImageForDevice
               : cudaSuccess;
}

}  // namespace

cudaError_t cudaGetDeviceCount(int *count) {
    Call call(FAKE_OTHER);
    if (call.refused()) return call.answer();
    const cudaError_t error = devices_there();
    if (error == cudaSuccess) *count = runtime().devices;
    return call.answer(error);
}

cudaError_t cudaGetDevice(int *device) {
    Call call(FAKE_OTHER);
    if (call.refused()) return call.answer();
    *device = vcuda::emulated::current_device();
    return call.answer();
}

cudaError_t cudaSetDevice(int device) {
    Call call(FAKE_OTHER, false);
    if (const cudaError_t error = check_device(device); error != cudaSuccess) {
        return call.answer(error);
    }
    // Leaving a lost device for another one works.
    if (call.refused() && runtime().lost.count(vcuda::emulated::current_device()) == 0) {
        return call.answer();
    }
    vcuda::emulated::set_current_device(device);
    const auto lost = runtime().lost.find(device);
    return lost == runtime().lost.end() ? cudaSuccess : call.answer(lost->second);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
    Call call(FAKE_OTHER);
    if (call.refused()) return call.answer();
    if (const cudaError_t error = check_device(device); error != cudaSuccess) {
        return call.answer(error);
    }
    *p = {};
    std::snprintf(p->name, sizeof p->name, "Fake GPU %d", device);
    p->uuid.bytes[15] = static_cast<char>(device);
    p->totalGlobalMem = runtime().memory;
    p->sharedMemPerBlock = kSharedPerBlock;
    p->sharedMemPerBlockOptin = kSharedPerBlockOptin;
    p->sharedMemPerMultiprocessor = kSharedPerMultiprocessor;
    p->major = 9;
    p->minor = 0;
    p->multiProcessorCount = 132;
    p->l2CacheSize = 60 << 20;
    p->pciBusID = device;
    p->memoryBusWidth = 6144;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->warpSize = 32;
    return call.answer();
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    Call call(FAKE_OTHER);
    if (call.refused()) return call.answer();
    if (const cudaError_t error = check_device(device); error != cudaSuccess) {
        return call.answer(error);
    }
    switch (attribute) {
        case cudaDevAttrClockRate:
            *value = 1980000;
            break;
        case cudaDevAttrMultiProcessorCount:
            *value = 132;
            break;
        case cudaDevAttrMemoryClockRate:
            *value = 3201000;
            break;
        case cudaDevAttrGlobalMemoryBusWidth:
            *value = 6144;
            break;
        case cudaDevAttrL2CacheSize:
            *value = 60 << 20;
            break;
        case cudaDevAttrComputeCapabilityMajor:
            *value = 9;
            break;
        case cudaDevAttrComputeCapabilityMinor:
            *value = 0;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = kSharedPerBlockOptin;
            break;
        default:
            return call.answer(cudaErrorInvalidValue);
    }
    return call.answer();
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    Call call(FAKE_OTHER);
    if (call.refused()) return call.answer();
    Runtime &r = runtime();
    const uint64_t used = r.used[vcuda::emulated::current_device()];
    *total_bytes = r.memory;
    *free_bytes = used < r.memory ? r.memory - used : 0;
    return call.answer();
}

cudaError_t cudaDriverGetVersion(int *version) {
    Call call(FAKE_OTHER);
    if (call.refused()) return call.answer();
    *version = runtime().driver;
    return call.answer();
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    Call call(FAKE_OTHER);
    if (call.refused()) return call.answer();
    *version = CUDART_VERSION;
    return call.answer();
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *kernel) {
    Call call(FAKE_FUNCTION);
    if (call.refused()) return call.answer();
    if (const cudaError_t error = check_code(); error != cudaSuccess) return call.answer(error);
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = 90;
    attributes->binaryVersion = 90;
    const auto allowed = runtime().shared_allowed.find(kernel);
    attributes->maxDynamicSharedSizeBytes =
        allowed != runtime().shared_allowed.end() ? allowed->second : kSharedPerBlock;
    return call.answer();
}

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value) {
    Call call(FAKE_FUNCTION);
    if (call.refused()) return call.answer();
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (value < 0 || value > kSharedPerBlockOptin) return call.answer(cudaErrorInvalidValue);
        runtime().shared_allowed[kernel] = value;
    }
    return call.answer();
}

// A launch is refused for what a GPU refuses it for.
cudaError_t vcuda::emulated::launch_grid(cudaStream_t stream, Grid grid) {
    Call call(FAKE_LAUNCH);
    if (call.refused()) return call.answer();
    if (const cudaError_t error = check_code(); error != cudaSuccess) return call.answer(error);
    Runtime &r = runtime();
    const uint64_t threads = uint64_t{grid.block.x} * grid.block.y * grid.block.z;
    if (threads == 0 || threads > 1024 || grid.block.z > 64 || grid.grid.x == 0 ||
        grid.grid.y == 0 || grid.grid.z == 0 || grid.grid.x > 0x7fffffffu || grid.grid.y > 65535 ||
        grid.grid.z > 65535) {
        return call.answer(cudaErrorInvalidConfiguration);
    }
    const auto allowed = r.shared_allowed.find(grid.kernel);
    const auto most =
        static_cast<size_t>(allowed != r.shared_allowed.end() ? allowed->second : kSharedPerBlock);
    if (grid.shared > most) return call.answer(cudaErrorInvalidValue);

    if (!is_capturing(stream) && r.late_fault.left > 0 && --r.late_fault.left == 0) {
        r.late[current_device()] = static_cast<cudaError_t>(r.late_fault.error);
        return call.answer();
    }
    return call.answer(submit(stream, [grid = std::move(grid)] {
        runtime().counters[FAKE_KERNELS] += 1;
        if (runtime().skip) return;
        const DeviceAccess access;
        run_watched(grid);
    }));
}
