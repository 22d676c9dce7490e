#include "measure.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "bandwidth.h"
#include "gemv.h"
#include "launch.h"
#include "probe.h"
#include "prof.h"
#include "wkey.h"

namespace vcuda {

namespace {

Launcher launcher_of(const Device &device) {
    Launcher to;
    to.stream = device.stream.get();
    to.sm_count = device.sm_count;
    return to;
}

}  // namespace

void selftest(const Device &device, vcuda_prof &prof) {
    constexpr int n = 256;
    uint32_t sent[n];
    for (int i = 0; i < n; ++i) sent[i] = static_cast<uint32_t>(i) * 16777619u;
    uint32_t got[n] = {};

    const cudaStream_t stream = device.stream.get();
    const DeviceMemory memory = device_memory(sizeof sent, "the self-test");
    try {
        {
            const HostTimer timer(prof.h2d);
            CUDA_TRY(
                cudaMemcpyAsync(memory.get(), sent, sizeof sent, cudaMemcpyHostToDevice, stream));
        }
        probe(static_cast<uint32_t *>(memory.get()), n, stream);
        const HostTimer timer(prof.d2h_sync);
        CUDA_TRY(cudaMemcpyAsync(got, memory.get(), sizeof got, cudaMemcpyDeviceToHost, stream));
        CUDA_TRY(cudaStreamSynchronize(stream));
    } catch (...) {
        settle(stream);  // `sent` and `got` go
        throw;
    }
    prof.h2d_copies += 1;
    prof.h2d_bytes += sizeof sent;
    prof.launches += 1;
    prof.d2h_copies += 1;
    prof.d2h_bytes += sizeof got;
    for (int i = 0; i < n; ++i) {
        if (got[i] != probe_value(sent[i])) {
            throw DeviceLost(
                "the self-test kernel made %u of %u, not %u: device %d computes wrongly", got[i],
                sent[i], probe_value(sent[i]), device.index);
        }
    }
}

void product(const Device &device, Cache &cache, uint64_t key, int64_t index, const float *x,
             int32_t m, float *y, vcuda_prof &prof) {
    const Entry &entry = cache.require(key);
    const vcuda_matrix &matrix = entry.matrix;
    if (m < 1) throw Error("m is %d; it must be 1 or more", m);
    if (index < 0 || index >= matrix.stack) {
        throw Error("matrix %lld of the weight %s: it is a stack of %lld, numbered from 0",
                    static_cast<long long>(index), KeyName(key).text,
                    static_cast<long long>(matrix.stack));
    }
    if (matrix.kind == VCUDA_F32) {
        throw Error("the weight %s is float32; products need bf16, q8 or q4", KeyName(key).text);
    }
    const int64_t most = gemv_max_k(matrix.kind, device.shared_per_block);
    if (matrix.k > most) {
        throw Error("the weight %s has k = %lld and device %d multiplies vectors of at most %lld",
                    KeyName(key).text, static_cast<long long>(matrix.k), device.index,
                    static_cast<long long>(most));
    }
    // one vector at a time: rows of x and y need no alignment, and m no memory
    const cudaStream_t stream = device.stream.get();
    const auto x_bytes = static_cast<size_t>(matrix.k) * sizeof(float);
    const auto y_bytes = static_cast<size_t>(matrix.n) * sizeof(float);
    // kernels read four numbers at a time: zeros follow the last
    const auto x_padded = static_cast<size_t>(padded_row(matrix.k)) * sizeof(float);
    const DeviceMemory x_memory = device_memory(x_padded, "the input of a product");
    const DeviceMemory y_memory = device_memory(y_bytes, "the output of a product");
    std::vector<float> result(static_cast<size_t>(m) * static_cast<size_t>(matrix.n));
    Gemv p;
    p.w = entry.tiles;
    p.matrix = static_cast<int32_t>(index);
    p.x = static_cast<const float *>(x_memory.get());
    p.y = static_cast<float *>(y_memory.get());
    Launcher to = launcher_of(device);
    try {
        if (x_padded != x_bytes) CUDA_TRY(cudaMemsetAsync(x_memory.get(), 0, x_padded, stream));
        for (int32_t i = 0; i < m; ++i) {
            {
                const HostTimer timer(prof.h2d);
                CUDA_TRY(cudaMemcpyAsync(x_memory.get(), x + i * matrix.k, x_bytes,
                                         cudaMemcpyHostToDevice, stream));
            }
            gemv(to, p);
            const HostTimer timer(prof.d2h_sync);
            CUDA_TRY(cudaMemcpyAsync(result.data() + i * matrix.n, y_memory.get(), y_bytes,
                                     cudaMemcpyDeviceToHost, stream));
            CUDA_TRY(cudaStreamSynchronize(stream));
        }
    } catch (...) {
        settle(stream);
        throw;
    }
    std::copy(result.begin(), result.end(), y);
    const auto copies = static_cast<uint64_t>(m);
    prof.launches += to.launches;
    prof.h2d_copies += copies;
    prof.h2d_bytes += copies * x_bytes;
    prof.d2h_copies += copies;
    prof.d2h_bytes += copies * y_bytes;
}

double read_bandwidth(const Device &device, uint64_t bytes, int32_t repeats, vcuda_prof &prof) {
    constexpr uint64_t least = 1u << 28;
    constexpr int32_t most_repeats = 10000;
    if (bytes < least) {
        throw Error("bytes is %llu; it must be %llu or more, or the L2 would be measured",
                    static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(least));
    }
    if (repeats < 1 || repeats > most_repeats) {
        throw Error("repeats is %d; it must be 1 to %d", repeats, most_repeats);
    }
    bytes = bytes / 64 * 64;
    const cudaStream_t stream = device.stream.get();
    const DeviceMemory memory = device_memory(bytes, "measuring the bandwidth");
    const DeviceMemory sink = device_memory(sizeof(uint32_t), "measuring the bandwidth");
    const Event start = make_event(cudaEventDefault);
    const Event stop = make_event(cudaEventDefault);
    Launcher to = launcher_of(device);
    std::vector<float> times;
    constexpr int32_t warm_up = 2;
    CUDA_TRY(cudaMemsetAsync(memory.get(), 1, bytes, stream));
    for (int32_t i = 0; i < warm_up + repeats; ++i) {
        CUDA_TRY(cudaEventRecord(start.get(), stream));
        read_memory(to, memory.get(), bytes, device.sm_count, static_cast<uint32_t *>(sink.get()));
        CUDA_TRY(cudaEventRecord(stop.get(), stream));
        CUDA_TRY(cudaEventSynchronize(stop.get()));
        float ms = 0.0f;
        CUDA_TRY(cudaEventElapsedTime(&ms, start.get(), stop.get()));
        if (i >= warm_up) times.push_back(ms);
    }
    prof.launches += to.launches;
    std::sort(times.begin(), times.end());
    const size_t half = times.size() / 2;
    const float median = times.size() % 2 != 0 ? times[half] : (times[half - 1] + times[half]) / 2;
    // a clock that does not tell such a short time apart from none
    const double seconds = std::max(static_cast<double>(median) / 1e3, 1e-9);
    return static_cast<double>(bytes) / seconds;
}

}  // namespace vcuda
