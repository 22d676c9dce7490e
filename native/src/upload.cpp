#include "upload.h"

#include <algorithm>

#include "pack.h"
#include "prof.h"

namespace vcuda {

namespace {

// The scales of a piece lie behind its codes, at a multiple of this.
constexpr int64_t kAlign = 256;

int64_t aligned(int64_t bytes) {
    return ceil_div(bytes, kAlign) * kAlign;
}

}  // namespace

int64_t row_bytes(int32_t kind, int64_t k) {
    switch (kind) {
        case VCUDA_F32:
            return 4 * k;
        case VCUDA_BF16:
            return 2 * k;
        case VCUDA_Q8:
            return kGroup * ceil_div(k, kGroup);
        default:
            return kGroup / 2 * ceil_div(k, kGroup);
    }
}

int64_t row_scale_bytes(int32_t kind, int64_t k) {
    return kind == VCUDA_Q8 || kind == VCUDA_Q4 ? 2 * ceil_div(k, kGroup) : 0;
}

Uploader::Uploader(int32_t sm_count)
    : copy_stream_(make_stream()),
      pack_stream_(make_stream()),
      word_(pinned_memory(sizeof(uint32_t))) {
    to_.stream = pack_stream_.get();
    to_.sm_count = sm_count;
}

Uploader::Pieces::Pieces(int32_t kind, int64_t k)
    : code_bytes(row_bytes(kind, k)), scale_bytes(row_scale_bytes(kind, k)) {
    constexpr int64_t most = 65536;
    rows = std::clamp<int64_t>((kSlotBytes - kAlign) / (code_bytes + scale_bytes), 1, most);
}

int64_t Uploader::Pieces::scales_at(int64_t n) const {
    return aligned(n * code_bytes);
}

Uploader::Slot &Uploader::next_slot() {
    Slot &slot = slots_[next_];
    if (!slot.host) {
        PinnedMemory host = pinned_memory(kSlotBytes);
        slot.device = device_memory(kSlotBytes, "a staging buffer for weights");
        slot.copied = make_event(cudaEventDisableTiming);
        slot.packed = make_event(cudaEventDisableTiming);
        slot.host = std::move(host);
    }
    if (slot.busy) CUDA_TRY(cudaEventSynchronize(slot.packed.get()));
    slot.busy = false;
    next_ = (next_ + 1) % kSlots;
    return slot;
}

void Uploader::zero(void *memory, uint64_t bytes) {
    CUDA_TRY(cudaMemsetAsync(memory, 0, bytes, pack_stream_.get()));
}

void Uploader::rows(const Tiles &to, uint32_t *flags, int64_t row, int64_t rows, int32_t source,
                    const void *codes, const void *scales, vcuda_prof &prof) {
    const HostTimer timer(prof.upload);
    const Pieces pieces(source, to.k);
    const uint64_t before = to_.launches;
    try {
        for (int64_t at = 0; at < rows; at += pieces.rows) {
            const int64_t n = std::min(pieces.rows, rows - at);
            const int64_t scales_at = pieces.scales_at(n);
            const auto bytes =
                static_cast<size_t>(pieces.scale_bytes == 0 ? n * pieces.code_bytes
                                                            : scales_at + n * pieces.scale_bytes);
            Slot &slot = next_slot();
            auto *host = static_cast<char *>(slot.host.get());
            auto *device = static_cast<char *>(slot.device.get());
            pool_.copy(host, static_cast<const char *>(codes) + at * pieces.code_bytes,
                       static_cast<size_t>(n * pieces.code_bytes));
            if (pieces.scale_bytes != 0) {
                pool_.copy(host + scales_at,
                           static_cast<const char *>(scales) + at * pieces.scale_bytes,
                           static_cast<size_t>(n * pieces.scale_bytes));
            }
            CUDA_TRY(
                cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, copy_stream_.get()));
            CUDA_TRY(cudaEventRecord(slot.copied.get(), copy_stream_.get()));
            CUDA_TRY(cudaStreamWaitEvent(pack_stream_.get(), slot.copied.get(), 0));
            if (source == to.kind) {
                pack_rows(to_, to, row + at, n, device,
                          pieces.scale_bytes == 0 ? nullptr : device + scales_at);
            } else {
                quantize_rows(to_, to, row + at, n, source, device, flags);
            }
            CUDA_TRY(cudaEventRecord(slot.packed.get(), pack_stream_.get()));
            slot.busy = true;
            prof.upload_copies += 1;
            prof.upload_bytes += bytes;
        }
    } catch (...) {
        settle();  // a slot may be in use that no event tells of
        throw;
    }
    prof.launches += to_.launches - before;
}

void Uploader::fill(const Tiles &to, uint64_t seed, vcuda_prof &prof) {
    const HostTimer timer(prof.upload);
    const uint64_t before = to_.launches;
    fill_random(to_, to, seed);
    prof.launches += to_.launches - before;
}

uint32_t Uploader::finish(const uint32_t *flags, vcuda_prof &prof) {
    const HostTimer timer(prof.upload);
    try {
        CUDA_TRY(cudaMemcpyAsync(word_.get(), flags, sizeof *flags, cudaMemcpyDeviceToHost,
                                 pack_stream_.get()));
        CUDA_TRY(cudaStreamSynchronize(pack_stream_.get()));
    } catch (...) {
        settle();
        throw;
    }
    for (Slot &slot : slots_) slot.busy = false;
    return *static_cast<const uint32_t *>(word_.get());
}

void Uploader::read(const Tiles &from, int64_t row, int64_t rows, void *codes, void *scales,
                    vcuda_prof &prof) {
    const Pieces pieces(from.kind, from.k);
    const uint64_t before = to_.launches;
    try {
        for (int64_t at = 0; at < rows; at += pieces.rows) {
            const int64_t n = std::min(pieces.rows, rows - at);
            const int64_t scales_at = pieces.scales_at(n);
            Slot &slot = next_slot();
            auto *host = static_cast<char *>(slot.host.get());
            auto *device = static_cast<char *>(slot.device.get());
            unpack_rows(to_, from, row + at, n, device,
                        pieces.scale_bytes == 0 ? nullptr : device + scales_at);
            {
                const HostTimer timer(prof.d2h_sync);
                const auto fetch = [&](int64_t first, int64_t bytes) {
                    CUDA_TRY(cudaMemcpyAsync(host + first, device + first,
                                             static_cast<size_t>(bytes), cudaMemcpyDeviceToHost,
                                             pack_stream_.get()));
                    prof.d2h_copies += 1;
                    prof.d2h_bytes += static_cast<uint64_t>(bytes);
                };
                fetch(0, n * pieces.code_bytes);
                if (pieces.scale_bytes != 0) fetch(scales_at, n * pieces.scale_bytes);
                CUDA_TRY(cudaStreamSynchronize(pack_stream_.get()));
            }
            pool_.copy(static_cast<char *>(codes) + at * pieces.code_bytes, host,
                       static_cast<size_t>(n * pieces.code_bytes));
            if (pieces.scale_bytes != 0) {
                pool_.copy(static_cast<char *>(scales) + at * pieces.scale_bytes, host + scales_at,
                           static_cast<size_t>(n * pieces.scale_bytes));
            }
        }
    } catch (...) {
        settle();
        throw;
    }
    prof.launches += to_.launches - before;
}

void Uploader::settle() {
    vcuda::settle(copy_stream_.get());
    vcuda::settle(pack_stream_.get());
    for (Slot &slot : slots_) slot.busy = false;
}

}  // namespace vcuda
