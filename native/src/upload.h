// Weights on their way: the caller's memory -> pinned buffer -> device staging -> tiles.
#pragma once

#include <cstdint>

#include "copy_pool.h"
#include "cuda_objects.h"
#include "launch.h"
#include "layout.h"
#include "vcuda.h"

namespace vcuda {

// Canonical bytes of one row's codes and of its scales (see vcuda.h).
int64_t row_bytes(int32_t kind, int64_t k);
int64_t row_scale_bytes(int32_t kind, int64_t k);

// A ring of buffers in which the three steps of a piece overlap: host threads copy piece i + 1 into
// pinned memory while the bus carries piece i and the device packs piece i - 1.
class Uploader {
  public:
    explicit Uploader(int32_t sm_count);

    // Fill device memory with zeros, in order with the packing that follows.
    void zero(void *memory, uint64_t bytes);

    // Rows [row, row + rows) of `to` from the caller's memory, which is free again on return; what
    // a quantiser finds wrong goes to *flags (device memory). PRE: everything is checked.
    void rows(const Tiles &to, uint32_t *flags, int64_t row, int64_t rows, int32_t source,
              const void *codes, const void *scales, vcuda_prof &prof);

    void fill(const Tiles &to, uint64_t seed, vcuda_prof &prof);

    // Wait for everything that was begun, and give back *flags.
    uint32_t finish(const uint32_t *flags, vcuda_prof &prof);

    // The inverse of rows; waits.
    void read(const Tiles &from, int64_t row, int64_t rows, void *codes, void *scales,
              vcuda_prof &prof);

    // Wait for everything, whatever it answers: before memory is freed that may be written to.
    void settle();

  private:
    static constexpr int kSlots = 4;
    static constexpr int64_t kSlotBytes = 16 << 20;

    // One piece's buffers; taken when first needed, so that a small model takes few.
    struct Slot {
        PinnedMemory host;
        DeviceMemory device;
        Event copied;       // the bus is done with `host`
        Event packed;       // the device is done with `device`
        bool busy = false;  // submitted and not waited for
    };
    Slot &next_slot();

    // How rows of a kind are cut into pieces that fit a slot: codes first, scales behind them.
    struct Pieces {
        Pieces(int32_t kind, int64_t k);
        int64_t code_bytes, scale_bytes;     // of a row
        int64_t rows;                        // of a piece, at most
        int64_t scales_at(int64_t n) const;  // where the scales of a piece of n rows begin
    };

    Launcher to_;         // of pack_stream_
    Stream copy_stream_;  // the bus
    Stream pack_stream_;  // packing and quantising
    PinnedMemory word_;   // *flags on the host
    CopyPool pool_;
    Slot slots_[kSlots];
    int next_ = 0;
};

}  // namespace vcuda
