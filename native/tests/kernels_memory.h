// Arrays in device memory for the programs that test single kernels. The same source runs on the
// emulated runtime (each array then ends where the sanitizer watches) and on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <vector>

#include "cuda_try.h"

namespace vcuda::tests {

template <class T>
class DeviceArray {
  public:
    explicit DeviceArray(const std::vector<T> &values) : count_(values.size()) {
        CUDA_TRY(cudaMalloc(reinterpret_cast<void **>(&data_), bytes()));
        write(values);
    }
    DeviceArray(const DeviceArray &) = delete;
    DeviceArray &operator=(const DeviceArray &) = delete;
    ~DeviceArray() { cudaFree(data_); }

    T *data() const { return data_; }

    void write(const std::vector<T> &values) {
        CUDA_TRY(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice));
    }

    // What is there after everything launched so far.
    std::vector<T> read() const {
        std::vector<T> values(count_);
        CUDA_TRY(cudaDeviceSynchronize());
        CUDA_TRY(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost));
        return values;
    }

  private:
    size_t bytes() const { return count_ * sizeof(T); }

    T *data_ = nullptr;
    size_t count_;
};

}  // namespace vcuda::tests
