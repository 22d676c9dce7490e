#include "measure.h"

#include <algorithm>
#include <vector>

#include "bandwidth.h"
#include "launch.h"
#include "probe.h"
#include "prof.h"

namespace vcuda {

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
    Launcher to;
    to.stream = stream;
    to.sm_count = device.sm_count;
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
