// Between canonical bytes (pykestrel/quant.py) and tiles (layout.h): packing, unpacking,
// quantising.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "launch.h"
#include "layout.h"

namespace vcuda {

// What a quantiser found wrong, OR-ed into *flags.
constexpr uint32_t kNotFinite = 1;
constexpr uint32_t kTooLarge = 2;

// Rows [row, row + rows) of the stack * n rows of `to`, from canonical bytes in device memory: q8,
// q4 codes with scales; bf16 bits; float32. Padding columns of these rows are written too; padding
// rows are not: zero the memory first.
void pack_rows(Launcher &to_stream, const Tiles &to, int64_t row, int64_t rows, const void *codes,
               const void *scales);

// The same from float32 or bf16 [rows][k] (`source`): quantised to q8 or q4 with the same bytes as
// pykestrel/quant.py, or float32 rounded to bf16.
void quantize_rows(Launcher &to_stream, const Tiles &to, int64_t row, int64_t rows, int32_t source,
                   const void *values, uint32_t *flags);

// The inverse of pack_rows.
void unpack_rows(Launcher &to_stream, const Tiles &from, int64_t row, int64_t rows, void *codes,
                 void *scales);

// Random codes and scales, so that every row has root-mean-square 1 / sqrt(k).
void fill_random(Launcher &to_stream, const Tiles &to, uint64_t seed);

}  // namespace vcuda
