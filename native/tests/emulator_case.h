// What the cases of the emulator share.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "emu/fake.h"
#include "launch.h"
#include "ptx.cuh"

namespace vcuda {

inline void require(bool holds, const char *what, int line) {
    if (holds) return;
    std::fprintf(stderr, "line %d: %s does not hold\n", line, what);
    std::exit(1);
}
#define REQUIRE(condition) require((condition), #condition, __LINE__)

// n elements of device memory.
template <class T>
struct Device {
    explicit Device(const std::vector<T> &values) : n(values.size()) {
        CUDA_TRY(cudaMalloc(&p, n * sizeof(T)));
        CUDA_TRY(cudaMemcpy(p, values.data(), n * sizeof(T), cudaMemcpyHostToDevice));
    }
    explicit Device(size_t count) : n(count) { CUDA_TRY(cudaMalloc(&p, n * sizeof(T))); }
    ~Device() { (void)cudaFree(p); }
    Device(const Device &) = delete;
    Device &operator=(const Device &) = delete;
    std::vector<T> read() const {
        std::vector<T> values(n);
        CUDA_TRY(cudaMemcpy(values.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return values;
    }
    size_t n;
    T *p = nullptr;
};

struct Case {
    const char *name;
    void (*run)();
};

// What no GPU can do, and what comes close to it (emulator_mistakes.cpp).
std::vector<Case> mistakes();

// The instructions of kernels/ptx_sm90.cuh (emulator_sm90*.cpp).
std::vector<Case> sm90_cases();
std::vector<Case> sm90_mistakes();

}  // namespace vcuda
