// Devices and the driver.
#include "device.h"

#include <cstdio>

#include "gemm.h"
#include "gemv.h"
#include "gemv_fused.h"
#include "moe.h"
#include "probe.h"

namespace vcuda {

namespace {

int32_t attribute(cudaDeviceAttr what, int32_t device) {
    int value = 0;
    if (cudaDeviceGetAttribute(&value, what, device) != cudaSuccess) {
        (void)cudaGetLastError();  // an attribute this driver does not tell: 0
        return 0;
    }
    return value;
}

// What the library's code for the current device is; binaryVersion 0: it has none.
cudaFuncAttributes kernel_code() {
    cudaFuncAttributes attributes{};
    const cudaError_t error = probe_attributes(&attributes);
    switch (error) {
        case cudaSuccess:
            return attributes;
        case cudaErrorNoKernelImageForDevice:
        case cudaErrorInvalidDeviceFunction:
        case cudaErrorUnsupportedPtxVersion:
        case cudaErrorInvalidPtx:
        case cudaErrorJitCompilerNotFound:
        case cudaErrorJitCompilationDisabled:
            (void)cudaGetLastError();
            return cudaFuncAttributes{};
        default:
            throw_cuda(error, "cudaFuncGetAttributes", __FILE__, __LINE__);
    }
}

void format_uuid(const cudaUUID_t &uuid, char *out, size_t size) {
    const auto *b = reinterpret_cast<const unsigned char *>(uuid.bytes);
    std::snprintf(out, size,
                  "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
                  b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13],
                  b[14], b[15]);
}

}  // namespace

DriverVersions driver_versions() {
    int driver = 0;
    int runtime = 0;
    CUDA_TRY(cudaDriverGetVersion(&driver));  // success and 0 without a driver
    CUDA_TRY(cudaRuntimeGetVersion(&runtime));
    return {driver, runtime};
}

int32_t device_count() {
    int count = 0;  // left unwritten by a call that fails
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count > 0) return count;
    (void)cudaGetLastError();

    const DriverVersions v = driver_versions();
    char text[kErrorBytes];
    // Error 35 ("insufficient driver") is also what a machine without any driver answers.
    if (v.driver == 0) {
        std::snprintf(text, sizeof text,
                      "no NVIDIA driver was found; install one that supports CUDA %d.%d",
                      v.runtime / 1000, v.runtime % 1000 / 10);
    } else if (error == cudaErrorInsufficientDriver) {
        std::snprintf(text, sizeof text,
                      "the NVIDIA driver supports CUDA %d.%d and this library needs %d.%d; update "
                      "the driver",
                      v.driver / 1000, v.driver % 1000 / 10, v.runtime / 1000,
                      v.runtime % 1000 / 10);
    } else if (error == cudaSuccess || error == cudaErrorNoDevice) {
        std::snprintf(text, sizeof text,
                      "the NVIDIA driver (CUDA %d.%d) shows no GPU; CUDA_VISIBLE_DEVICES may hide "
                      "it",
                      v.driver / 1000, v.driver % 1000 / 10);
    } else {
        std::snprintf(text, sizeof text, "the NVIDIA driver (CUDA %d.%d) answered %s: %s",
                      v.driver / 1000, v.driver % 1000 / 10, cudaGetErrorName(error),
                      cudaGetErrorString(error));
    }
    set_last_error(text);
    return 0;
}

void require_device(int32_t index) {
    const int32_t count = device_count();
    if (count == 0) throw Error("%s", last_error());
    if (index < 0 || index >= count) {
        throw Error("there is no device %d: this machine shows %d, numbered from 0", index, count);
    }
}

vcuda_device_info describe_device(int32_t index) {
    require_device(index);
    const DeviceScope scope(index);
    cudaDeviceProp properties{};
    CUDA_TRY(cudaGetDeviceProperties(&properties, index));
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    CUDA_TRY(cudaMemGetInfo(&free_bytes, &total_bytes));
    const DriverVersions versions = driver_versions();

    vcuda_device_info info{};
    info.struct_size = sizeof info;
    info.index = index;
    std::snprintf(info.name, sizeof info.name, "%s", properties.name);
    format_uuid(properties.uuid, info.uuid, sizeof info.uuid);
    std::snprintf(info.pci, sizeof info.pci, "%04x:%02x:%02x.0",
                  static_cast<unsigned>(properties.pciDomainID) & 0xffffu,
                  static_cast<unsigned>(properties.pciBusID) & 0xffu,
                  static_cast<unsigned>(properties.pciDeviceID) & 0xffu);
    info.cc_major = properties.major;
    info.cc_minor = properties.minor;
    info.sm_count = properties.multiProcessorCount;
    info.sm_clock_khz = attribute(cudaDevAttrClockRate, index);
    info.memory_clock_khz = attribute(cudaDevAttrMemoryClockRate, index);
    info.memory_bus_bits = attribute(cudaDevAttrGlobalMemoryBusWidth, index);
    info.driver_version = versions.driver;
    info.runtime_version = versions.runtime;
    info.kernel_arch = kernel_code().binaryVersion;
    info.integrated = properties.integrated;
    info.memory_total = total_bytes;
    info.memory_free = free_bytes;
    info.l2_bytes = static_cast<uint64_t>(properties.l2CacheSize);
    info.shared_per_block = properties.sharedMemPerBlockOptin;
    // two transfers a clock (DDR)
    info.peak_bytes_per_second = 2ull * static_cast<uint64_t>(info.memory_clock_khz) * 1000ull *
                                 static_cast<uint64_t>(info.memory_bus_bits) / 8ull;
    return info;
}

Device open_device(int32_t index) {
    const int32_t major = attribute(cudaDevAttrComputeCapabilityMajor, index);
    const int32_t minor = attribute(cudaDevAttrComputeCapabilityMinor, index);
    const cudaFuncAttributes code = kernel_code();
    if (code.binaryVersion == 0) {
        throw Error(
            "this library has no code for device %d (compute capability %d.%d); build it "
            "with CUDAARCHS=%d%d",
            index, major, minor, major, minor);
    }
    Device device;
    device.index = index;
    device.sm_count = attribute(cudaDevAttrMultiProcessorCount, index);
    device.compute_capability = 10 * major + minor;
    device.code_version = code.ptxVersion;
    device.shared_per_block =
        static_cast<uint64_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index));
    device.stream = make_stream();
    prepare_gemv(device.shared_per_block);
    prepare_gemv_fused(device.shared_per_block);
    prepare_gemm();
    prepare_moe(device.shared_per_block);
    return device;
}

}  // namespace vcuda
