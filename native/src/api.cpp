// The bodies of include/vcuda.h: check the arguments, do the work in a guard, nothing else.
#include <cstddef>
#include <cstring>
#include <memory>

#include "decode_config.h"
#include "device.h"
#include "error.h"
#include "handle.h"
#include "measure.h"
#include "prof.h"
#include "vcuda.h"
#include "wkey.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define PAIR(key, value) "\"" key "\": \"" value "\""

using vcuda::Context;
using vcuda::device_guard;
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

// The caller's struct with the fields that he does not know at 0.
template <class T>
T copy_in(const T *from, size_t oldest, const char *name) {
    check_size(from, oldest, name);
    T to{};
    std::memcpy(&to, from, from->struct_size);
    return to;
}

// Sizes of the first version of each struct.
constexpr size_t kDeviceInfoV1 = 408;
constexpr size_t kProfV1 = 216;
constexpr size_t kMatrixV1 = 32;
constexpr size_t kCacheInfoV1 = 72;
constexpr size_t kDecodeConfigV1 = 104;
constexpr size_t kDecodeStepV1 = 88;
static_assert(sizeof(vcuda_device_info) >= kDeviceInfoV1, "fields are only appended");
static_assert(sizeof(vcuda_prof) >= kProfV1, "fields are only appended");
static_assert(sizeof(vcuda_matrix) >= kMatrixV1, "fields are only appended");
static_assert(sizeof(vcuda_cache_info) >= kCacheInfoV1, "fields are only appended");
static_assert(sizeof(vcuda_decode_config) >= kDecodeConfigV1, "fields are only appended");
static_assert(sizeof(vcuda_decode_step) >= kDecodeStepV1, "fields are only appended");

vcuda_matrix matrix_of(const vcuda_matrix *matrix) {
    const vcuda_matrix m = copy_in(matrix, kMatrixV1, "matrix");
    vcuda::check_matrix(m);
    return m;
}

vcuda_decode_config config_of(const vcuda_decode_config *config) {
    const vcuda_decode_config c = copy_in(config, kDecodeConfigV1, "config");
    vcuda::check_config(c);
    return c;
}

using Run = void (vcuda::Decoder::*)(vcuda_decode_step &, bool, vcuda_prof &);

int run_step(vcuda_handle *handle, vcuda_decode_step *step, Run run) {
    return device_guard(handle, [&](Context &on, vcuda_prof &prof) {
        vcuda_decode_step s = copy_in(step, kDecodeStepV1, "step");
        try {
            (on.decoding().*run)(s, handle->timing, prof);
        } catch (...) {
            step->nonfinite = s.nonfinite;  // why, for a caller that does not read sentences
            throw;
        }
        copy_out(s, step);
    });
}

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
        vcuda::require_device(device);
        const vcuda::DeviceScope scope(device);
        handle->context = std::make_unique<Context>(device);
        *out = handle.release();
    });
}

int vcuda_destroy(vcuda_handle *handle) {
    return guard([&] {
        const std::unique_ptr<vcuda_handle> owned(handle);
        if (!owned) return;
        if (owned->process != vcuda::process_id()) {
            (void)owned->context.release();  // the parent's; CUDA must not be called here
            return;
        }
        const vcuda::DeviceScope scope(owned->device, std::nothrow);
        owned->context.reset();
    });
}

int vcuda_dev_selftest(vcuda_handle *handle) {
    return device_guard(handle,
                        [&](Context &on, vcuda_prof &prof) { vcuda::selftest(on.device, prof); });
}

// ------------------------------------------------------------------------------------------ PROF

int vcuda_prof_read(vcuda_handle *handle, vcuda_prof *prof) {
    return guard(handle, [&] {
        check_size(prof, kProfV1, "prof");
        copy_out(handle->prof, prof);
    });
}

int vcuda_prof_reset(vcuda_handle *handle) {
    return guard(handle, [&] { handle->prof = vcuda_prof{}; });
}

int vcuda_prof_timing(vcuda_handle *handle, int32_t on) {
    return guard(handle, [&] { handle->timing = on != 0; });
}

// --------------------------------------------------------------------------------------- weights

uint64_t vcuda_wkey(int32_t layer, int32_t projection) {
    return vcuda::wkey(layer, projection);
}

int vcuda_cache_size(const vcuda_matrix *matrix, uint64_t *bytes) {
    return guard([&] { *required(bytes, "bytes") = vcuda::entry_bytes(matrix_of(matrix)); });
}

int vcuda_cache_budget(vcuda_handle *handle, uint64_t bytes) {
    return device_guard(handle, [&](Context &on, vcuda_prof &) { on.cache.set_budget(bytes); });
}

int vcuda_cache_stats(vcuda_handle *handle, vcuda_cache_info *info) {
    return guard(handle, [&] {
        check_size(info, kCacheInfoV1, "info");
        copy_out(handle->context->cache.info(), info);
    });
}

int vcuda_cache_begin(vcuda_handle *handle, uint64_t wkey, const vcuda_matrix *matrix,
                      int32_t pinned) {
    return device_guard(handle, [&](Context &on, vcuda_prof &) {
        on.cache.begin(wkey, matrix_of(matrix), pinned != 0);
    });
}

int vcuda_cache_rows(vcuda_handle *handle, uint64_t wkey, int64_t row, int64_t rows, int32_t source,
                     const void *codes, const void *scales) {
    return device_guard(handle, [&](Context &on, vcuda_prof &prof) {
        on.cache.rows(wkey, row, rows, source, codes, scales, prof);
    });
}

int vcuda_cache_end(vcuda_handle *handle, uint64_t wkey) {
    return device_guard(handle, [&](Context &on, vcuda_prof &prof) { on.cache.end(wkey, prof); });
}

int vcuda_cache_fill(vcuda_handle *handle, uint64_t wkey, const vcuda_matrix *matrix,
                     int32_t pinned, uint64_t seed) {
    return device_guard(handle, [&](Context &on, vcuda_prof &prof) {
        on.cache.fill(wkey, matrix_of(matrix), pinned != 0, seed, prof);
    });
}

int vcuda_cache_read(vcuda_handle *handle, uint64_t wkey, int64_t row, int64_t rows, void *codes,
                     void *scales) {
    return device_guard(handle, [&](Context &on, vcuda_prof &prof) {
        on.cache.read(wkey, row, rows, codes, scales, prof);
    });
}

int vcuda_cache_find(vcuda_handle *handle, uint64_t wkey, vcuda_matrix *matrix) {
    return guard(handle, [&] {
        check_size(matrix, kMatrixV1, "matrix");
        vcuda_prof prof = handle->prof;
        vcuda_matrix found{};
        {
            const vcuda::HostTimer timer(prof.cache_probe);
            found = handle->context->cache.require(wkey).matrix;
        }
        copy_out(found, matrix);
        handle->prof = prof;
    });
}

int vcuda_cache_pin(vcuda_handle *handle, uint64_t wkey, int32_t pinned) {
    return guard(handle, [&] { handle->context->cache.pin(wkey, pinned != 0); });
}

int vcuda_cache_drop(vcuda_handle *handle, uint64_t wkey) {
    return device_guard(handle, [&](Context &on, vcuda_prof &) { on.cache.drop(wkey); });
}

int vcuda_dev_gemm(vcuda_handle *handle, uint64_t wkey, int64_t index, const float *x, int32_t m,
                   float *y) {
    return device_guard(handle, [&](Context &on, vcuda_prof &prof) {
        required(x, "x");
        required(y, "y");
        on.products.one(wkey, index, x, m, y, handle->timing, prof);
    });
}

int vcuda_dev_gemm_fused(vcuda_handle *handle, const vcuda_product *products, int32_t count,
                         const float *x, int64_t x_rows, int64_t k, float *y, int64_t y_floats) {
    return device_guard(handle, [&](Context &on, vcuda_prof &prof) {
        const vcuda::ProductCall call{required(products, "products"),
                                      count,
                                      required(x, "x"),
                                      x_rows,
                                      k,
                                      required(y, "y"),
                                      y_floats};
        on.products.run(call, handle->timing, prof);
    });
}

// -------------------------------------------------------------------------------------- decoding

int vcuda_decode_size(const vcuda_decode_config *config, uint64_t *bytes) {
    return guard([&] { *required(bytes, "bytes") = vcuda::decode_bytes(config_of(config)); });
}

int vcuda_dev_decode_init(vcuda_handle *handle, const vcuda_decode_config *config) {
    return device_guard(handle, [&](Context &on, vcuda_prof &prof) {
        const vcuda_decode_config c = config_of(config);
        const uint64_t reclaimed = on.decoder ? on.decoder->bytes() : 0;
        vcuda::Decoder::check_device(on.device, c, reclaimed);
        on.decoder.reset();
        on.decoder = std::make_unique<vcuda::Decoder>(on.device, on.cache, c, prof);
    });
}

int vcuda_dev_decode_free(vcuda_handle *handle) {
    return device_guard(handle, [&](Context &on, vcuda_prof &) { on.decoder.reset(); });
}

int vcuda_dev_decode_run(vcuda_handle *handle, vcuda_decode_step *step) {
    return run_step(handle, step, &vcuda::Decoder::run);
}

int vcuda_dev_prefill(vcuda_handle *handle, vcuda_decode_step *step) {
    return run_step(handle, step, &vcuda::Decoder::prefill);
}

int vcuda_dev_decode_logits(vcuda_handle *handle, float *logits) {
    return device_guard(handle, [&](Context &on, vcuda_prof &prof) {
        on.decoding().last_logits(required(logits, "logits"), prof);
    });
}

int vcuda_dev_layers_run(vcuda_handle *handle, int32_t position, int32_t count, float *hidden) {
    return device_guard(handle, [&](Context &on, vcuda_prof &prof) {
        on.decoding().run_layers(position, count, required(hidden, "hidden"), handle->timing, prof);
    });
}

int vcuda_trace_size(vcuda_handle *handle, uint64_t *floats) {
    return guard(handle,
                 [&] { *required(floats, "floats") = handle->context->decoding().trace_floats(); });
}

// ------------------------------------------------------------------------------------------- K/V

int vcuda_kv_position(vcuda_handle *handle, int32_t *position) {
    return guard(handle, [&] {
        *required(position, "position") = handle->context->decoding().kv().position();
    });
}

int vcuda_kv_seek(vcuda_handle *handle, int32_t position) {
    return guard(handle, [&] { handle->context->decoding().kv().seek(position); });
}

int vcuda_kv_read(vcuda_handle *handle, int32_t layer, int32_t lo, int32_t hi, void *k, void *v,
                  float *k_scales, float *v_scales) {
    return device_guard(handle, [&](Context &on, vcuda_prof &prof) {
        on.decoding().kv().read(on.device.stream.get(), layer, lo, hi, k, v, k_scales, v_scales,
                                prof);
    });
}

int vcuda_kv_write(vcuda_handle *handle, int32_t layer, int32_t lo, int32_t hi, const void *k,
                   const void *v, const float *k_scales, const float *v_scales) {
    return device_guard(handle, [&](Context &on, vcuda_prof &prof) {
        on.decoding().kv().write(on.device.stream.get(), layer, lo, hi, k, v, k_scales, v_scales,
                                 prof);
    });
}

// ------------------------------------------------------------------------------------- measuring

int vcuda_dev_bandwidth(vcuda_handle *handle, uint64_t bytes, int32_t repeats,
                        double *bytes_per_second) {
    return device_guard(handle, [&](Context &on, vcuda_prof &prof) {
        required(bytes_per_second, "bytes_per_second");
        *bytes_per_second = vcuda::read_bandwidth(on.device, bytes, repeats, prof);
    });
}

}  // extern "C"
