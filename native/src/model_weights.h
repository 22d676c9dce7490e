// The weights that a model's tokens need: their keys in the cache, what they must be, where they
// lie.
#pragma once

#include <cstdint>
#include <vector>

#include "cache.h"
#include "decode_config.h"
#include "device.h"
#include "layout.h"
#include "vcuda.h"

namespace vcuda {

// What one layer reads; indices for ModelWeights::tiles.
struct LayerWeights {
    int qkv, o, gate_up, down;  // dense
    int router, gate, up;       // moe; `down` is its stack
};

class ModelWeights {
  public:
    // PRE: check_config.
    ModelWeights(const Device &device, Cache &cache, const vcuda_decode_config &config,
                 const std::vector<LayerParams> &layers);

    // Looks every weight up, which counts as a use, and compares every shape and kind; true when
    // one lies elsewhere than it did at the last call. Throws Error for the first that is missing
    // or wrong.
    bool resolve();

    // PRE: resolve().
    const Tiles &tiles(int index) const { return tiles_[static_cast<size_t>(index)]; }
    const Tiles &embed() const { return tiles(embed_); }
    const Tiles &head() const { return tiles(head_); }
    const LayerWeights &layer(int32_t i) const { return layers_[static_cast<size_t>(i)]; }

  private:
    struct Need {
        uint64_t key;
        int64_t stack, n, k;
        int32_t projection;
        bool experts;  // of a moe layer
        Entry *entry;
    };
    void check(const Need &need) const;
    [[noreturn]] void missing(size_t first) const;

    const Device &device_;
    Cache &cache_;
    int32_t top_;  // experts of a token
    std::vector<Need> needs_;
    std::vector<Tiles> tiles_;  // of needs_, as they lie now
    std::vector<LayerWeights> layers_;
    int embed_ = -1, head_ = -1;  // of a whole model
    uint64_t generation_ = 0;     // of the cache when tiles_ was made; 0: never
};

}  // namespace vcuda
