// A stand-in for src/device.cu: with src/api.cpp and src/error.cpp it makes a libvcuda that needs
// neither CUDA nor a GPU, so that the C interface's own rules are tested on any machine.
//
//   device 0  works
//   device 1  works once, then the device is lost
//   device 2  has no code in this library
//   device 3  describing it runs out of memory
#include <cstdio>
#include <new>

#include "device.h"
#include "error.h"

namespace vcuda {

DriverVersions driver_versions() {
    return {13010, 13000};
}

int32_t device_count() {
    return 4;
}

vcuda_device_info describe_device(int32_t index) {
    if (index < 0 || index >= device_count()) throw Error("there is no device %d", index);
    if (index == 3) throw std::bad_alloc();
    vcuda_device_info info{};
    info.struct_size = sizeof info;
    info.index = index;
    std::snprintf(info.name, sizeof info.name, "Fake GPU %d", index);
    std::snprintf(info.uuid, sizeof info.uuid, "GPU-00000000-0000-0000-0000-%012d", index);
    std::snprintf(info.pci, sizeof info.pci, "0000:%02x:00.0", static_cast<unsigned>(index) & 0xff);
    info.cc_major = 9;
    info.sm_count = 132;
    info.memory_clock_khz = 3201000;
    info.memory_bus_bits = 6144;
    info.driver_version = driver_versions().driver;
    info.runtime_version = driver_versions().runtime;
    info.kernel_arch = index == 2 ? 0 : 90;
    info.memory_total = 150ull << 30;
    info.memory_free = 149ull << 30;
    info.l2_bytes = 60ull << 20;
    info.peak_bytes_per_second = 4916736000000ull;
    return info;
}

namespace {

class FakeStream final : public Stream {
  public:
    explicit FakeStream(int32_t device) : device_(device) {}
    void selftest(vcuda_prof &prof) override {
        if (device_ == 1 && ++calls_ > 1) {
            throw DeviceLost("cudaErrorIllegalAddress: made up (error %d)", 700);
        }
        prof.launches += 1;
        prof.h2d_copies += 1;
        prof.d2h_copies += 1;
        prof.h2d_bytes += 1024;
        prof.d2h_bytes += 1024;
    }

  private:
    int32_t device_;
    int calls_ = 0;
};

}  // namespace

Stream *open_stream(int32_t device) {
    const vcuda_device_info info = describe_device(device);
    if (info.kernel_arch == 0) throw Error("this library has no code for device %d", device);
    return new FakeStream(device);
}

}  // namespace vcuda
