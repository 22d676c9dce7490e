// The bodies of include/vcuda.h: check the arguments, do the work in a guard, nothing else.
#include <cstddef>
#include <cstring>
#include <memory>

#include "device.h"
#include "error.h"
#include "handle.h"
#include "vcuda.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define PAIR(key, value) "\"" key "\": \"" value "\""

using vcuda::Error;
using vcuda::guard;

namespace {

constexpr char kBuildInfo[] =
    "{" PAIR("version", VCUDA_VERSION) ", \"abi\": " TEXT(VCUDA_ABI_VERSION)
    ", " PAIR("cuda_toolkit", VCUDA_TOOLKIT) ", " PAIR("archs", VCUDA_ARCHS)
    ", " PAIR("host_compiler", VCUDA_HOST_COMPILER) ", " PAIR("build_type", VCUDA_BUILD_TYPE) "}";

template <class T>
T *required(T *pointer, const char *name) {
    if (pointer == nullptr) throw Error("the argument '%s' is NULL", name);
    return pointer;
}

// Refuse a struct whose size the library does not know: an older caller has fewer fields, a newer
// one has fields that nobody would fill. `oldest` is the size of the struct's first version.
template <class T>
void check_size(const T *to, size_t oldest, const char *name) {
    const uint32_t size = required(to, name)->struct_size;
    if (size < oldest || size > sizeof(T)) {
        throw Error(
            "%s.struct_size is %u and this library knows %zu to %zu bytes; set it to the "
            "struct's sizeof, and use the vcuda.h of this library",
            name, size, oldest, sizeof(T));
    }
}

// Copy out as many bytes as the caller's struct has. PRE: check_size.
template <class T>
void copy_out(const T &from, T *to) {
    const uint32_t size = to->struct_size;
    std::memcpy(to, &from, size);
    to->struct_size = size;
}

// Sizes of the first version of each struct.
constexpr size_t kDeviceInfoV1 = 408;
constexpr size_t kProfV1 = 216;
static_assert(sizeof(vcuda_device_info) >= kDeviceInfoV1, "fields are only appended");
static_assert(sizeof(vcuda_prof) >= kProfV1, "fields are only appended");

}  // namespace

extern "C" {

int vcuda_abi_version(void) {
    return VCUDA_ABI_VERSION;
}

const char *vcuda_build_info(void) {
    return kBuildInfo;
}

const char *vcuda_last_error(void) {
    return vcuda::last_error();
}

int vcuda_dev_count(int32_t *count) {
    return guard([&] { *required(count, "count") = vcuda::device_count(); });
}

int vcuda_driver_version(int32_t *driver, int32_t *runtime) {
    return guard([&] {
        required(driver, "driver");
        required(runtime, "runtime");
        const vcuda::DriverVersions versions = vcuda::driver_versions();
        *driver = versions.driver;
        *runtime = versions.runtime;
    });
}

int vcuda_dev_query(int32_t index, vcuda_device_info *info) {
    return guard([&] {
        check_size(info, kDeviceInfoV1, "info");
        copy_out(vcuda::describe_device(index), info);
    });
}

int vcuda_create(int32_t device, vcuda_handle **out) {
    return guard([&] {
        *required(out, "out") = nullptr;
        auto handle = std::make_unique<vcuda_handle>();
        handle->device = device;
        handle->stream.reset(vcuda::open_stream(device));
        *out = handle.release();
    });
}

int vcuda_destroy(vcuda_handle *handle) {
    return guard([&] {
        if (handle == nullptr) return;
        if (handle->process != vcuda::process_id()) {
            (void)handle->stream.release();  // the parent's; CUDA must not be called here
        }
        delete handle;
    });
}

int vcuda_dev_selftest(vcuda_handle *handle) {
    return guard(handle, [&] { handle->stream->selftest(handle->prof); });
}

int vcuda_prof_read(vcuda_handle *handle, vcuda_prof *prof) {
    return guard(handle, [&] {
        check_size(prof, kProfV1, "prof");
        copy_out(handle->prof, prof);
    });
}

int vcuda_prof_reset(vcuda_handle *handle) {
    return guard(handle, [&] { handle->prof = vcuda_prof{}; });
}

}  // extern "C"
