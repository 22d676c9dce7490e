// Keys and values of one sequence on the device.
#pragma once

#include <cstdint>

#include "cuda_objects.h"
#include "vcuda.h"

namespace vcuda {

// k and v [layers][ctx_size][kv_dim] int8, float16 or float32, the scales of int8
// [layers][ctx_size][kv_heads].
class Kv {
  public:
    // PRE: the config is checked.
    explicit Kv(const vcuda_decode_config &config);
    static uint64_t bytes(const vcuda_decode_config &config);

    int32_t position() const { return position_; }
    void seek(int32_t position);
    void advance(int32_t tokens) { position_ += tokens; }

    // The first row of a layer; the scales are NULL when there are none.
    void *k(int32_t layer) const { return row(k_, layer, 0); }
    void *v(int32_t layer) const { return row(v_, layer, 0); }
    float *k_scales(int32_t layer) const { return scale_row(k_scales_, layer, 0); }
    float *v_scales(int32_t layer) const { return scale_row(v_scales_, layer, 0); }

    void read(cudaStream_t stream, int32_t layer, int32_t lo, int32_t hi, void *k, void *v,
              float *k_scales, float *v_scales, vcuda_prof &prof) const;
    void write(cudaStream_t stream, int32_t layer, int32_t lo, int32_t hi, const void *k,
               const void *v, const float *k_scales, const float *v_scales, vcuda_prof &prof);

  private:
    void check(int32_t layer, int32_t lo, int32_t hi, const void *k, const void *v,
               const float *k_scales, const float *v_scales) const;
    void *row(const DeviceMemory &memory, int32_t layer, int32_t position) const;
    float *scale_row(const DeviceMemory &memory, int32_t layer, int32_t position) const;

    int32_t layers_, ctx_size_;
    bool scaled_;
    uint64_t row_bytes_;    // of k, and of v: one layer and position
    uint64_t scale_bytes_;  // likewise of their scales
    DeviceMemory k_, v_, k_scales_, v_scales_;
    int32_t position_ = 0;
};

}  // namespace vcuda
