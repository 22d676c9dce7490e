#include "kv.h"

#include <cstring>
#include <vector>

#include "prof.h"

namespace vcuda {

namespace {

uint64_t row_bytes_of(const vcuda_decode_config &c) {
    const auto kv_dim = static_cast<uint64_t>(c.kv_heads) * static_cast<uint64_t>(c.head_dim);
    switch (c.kv) {
        case VCUDA_KV_INT8:
            return kv_dim;
        case VCUDA_KV_F16:
            return 2 * kv_dim;
        default:
            return 4 * kv_dim;
    }
}

uint64_t scale_bytes_of(const vcuda_decode_config &c) {
    return c.kv == VCUDA_KV_INT8 ? static_cast<uint64_t>(c.kv_heads) * sizeof(float) : 0;
}

uint64_t rows_of(const vcuda_decode_config &c) {
    return static_cast<uint64_t>(c.layers) * static_cast<uint64_t>(c.ctx_size);
}

}  // namespace

Kv::Kv(const vcuda_decode_config &c)
    : layers_(c.layers),
      ctx_size_(c.ctx_size),
      scaled_(c.kv == VCUDA_KV_INT8),
      row_bytes_(row_bytes_of(c)),
      scale_bytes_(scale_bytes_of(c)) {
    k_ = device_memory(rows_of(c) * row_bytes_, "the K/V (keys)");
    v_ = device_memory(rows_of(c) * row_bytes_, "the K/V (values)");
    if (scaled_) {
        k_scales_ = device_memory(rows_of(c) * scale_bytes_, "the K/V (scales of the keys)");
        v_scales_ = device_memory(rows_of(c) * scale_bytes_, "the K/V (scales of the values)");
    }
}

uint64_t Kv::bytes(const vcuda_decode_config &c) {
    return 2 * (padded(rows_of(c) * row_bytes_of(c)) + padded(rows_of(c) * scale_bytes_of(c)));
}

void Kv::seek(int32_t position) {
    if (position < 0 || position > ctx_size_) {
        throw Error("position %d: the K/V holds positions 0 to %d", position, ctx_size_);
    }
    position_ = position;
}

void *Kv::row(const DeviceMemory &memory, int32_t layer, int32_t position) const {
    const uint64_t at = static_cast<uint64_t>(layer) * static_cast<uint64_t>(ctx_size_) +
                        static_cast<uint64_t>(position);
    return static_cast<char *>(memory.get()) + at * row_bytes_;
}

float *Kv::scale_row(const DeviceMemory &memory, int32_t layer, int32_t position) const {
    if (!scaled_) return nullptr;
    const uint64_t at = static_cast<uint64_t>(layer) * static_cast<uint64_t>(ctx_size_) +
                        static_cast<uint64_t>(position);
    return reinterpret_cast<float *>(static_cast<char *>(memory.get()) + at * scale_bytes_);
}

void Kv::check(int32_t layer, int32_t lo, int32_t hi, const void *k, const void *v,
               const float *k_scales, const float *v_scales) const {
    if (layer < 0 || layer >= layers_) {
        throw Error("there is no K/V of layer %d: the model has %d layers, numbered from 0", layer,
                    layers_);
    }
    if (lo < 0 || hi < lo || hi > ctx_size_) {
        throw Error("positions [%d, %d) of the K/V: it has the positions [0, %d)", lo, hi,
                    ctx_size_);
    }
    if (k == nullptr || v == nullptr) {
        throw Error("the argument '%s' is NULL", k == nullptr ? "k" : "v");
    }
    if (scaled_ != (k_scales != nullptr) || scaled_ != (v_scales != nullptr)) {
        throw Error("the K/V is %s: 'k_scales' and 'v_scales' must %sbe NULL",
                    scaled_ ? "int8" : "not int8", scaled_ ? "not " : "");
    }
}

// Through memory of our own, so that a copy that fails has not touched the caller's.
void Kv::read(cudaStream_t stream, int32_t layer, int32_t lo, int32_t hi, void *k, void *v,
              float *k_scales, float *v_scales, vcuda_prof &prof) const {
    check(layer, lo, hi, k, v, k_scales, v_scales);
    if (lo == hi) return;
    const auto rows = static_cast<size_t>(hi - lo);
    const size_t row_part = rows * row_bytes_;
    const size_t scale_part = rows * scale_bytes_;
    std::vector<char> host(2 * (row_part + scale_part));
    struct Part {
        const void *from;
        void *to;
        size_t bytes;
    };
    const Part parts[] = {{row(k_, layer, lo), k, row_part},
                          {row(v_, layer, lo), v, row_part},
                          {scale_row(k_scales_, layer, lo), k_scales, scale_part},
                          {scale_row(v_scales_, layer, lo), v_scales, scale_part}};
    {
        const HostTimer timer(prof.d2h_sync);
        char *at = host.data();
        try {
            for (const Part &part : parts) {
                if (part.bytes == 0) continue;
                CUDA_TRY(
                    cudaMemcpyAsync(at, part.from, part.bytes, cudaMemcpyDeviceToHost, stream));
                at += part.bytes;
                prof.d2h_copies += 1;
                prof.d2h_bytes += part.bytes;
            }
            CUDA_TRY(cudaStreamSynchronize(stream));
        } catch (...) {
            settle(stream);  // `host` goes
            throw;
        }
    }
    const char *at = host.data();
    for (const Part &part : parts) {
        if (part.bytes == 0) continue;
        std::memcpy(part.to, at, part.bytes);
        at += part.bytes;
    }
}

void Kv::write(cudaStream_t stream, int32_t layer, int32_t lo, int32_t hi, const void *k,
               const void *v, const float *k_scales, const float *v_scales, vcuda_prof &prof) {
    check(layer, lo, hi, k, v, k_scales, v_scales);
    // a copy that fails in the middle must not have changed a row that counts
    if (lo < position_) {
        throw Error(
            "positions [%d, %d) of the K/V cannot be written: it holds %d; forget them first with "
            "vcuda_kv_seek(handle, %d)",
            lo, hi, position_, lo);
    }
    if (lo == hi) return;
    const auto rows = static_cast<size_t>(hi - lo);
    const HostTimer timer(prof.h2d);
    const auto send = [&](void *to, const void *from, size_t bytes) {
        if (bytes == 0) return;
        CUDA_TRY(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream));
        prof.h2d_copies += 1;
        prof.h2d_bytes += bytes;
    };
    try {
        send(row(k_, layer, lo), k, rows * row_bytes_);
        send(row(v_, layer, lo), v, rows * row_bytes_);
        send(scale_row(k_scales_, layer, lo), k_scales, rows * scale_bytes_);
        send(scale_row(v_scales_, layer, lo), v_scales, rows * scale_bytes_);
        CUDA_TRY(cudaStreamSynchronize(stream));
    } catch (...) {
        settle(stream);  // the caller's memory is his own again
        throw;
    }
}

}  // namespace vcuda
