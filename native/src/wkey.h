// Keys of weights, and their names for sentences.
#pragma once

#include <cstdint>
#include <cstdio>

#include "vcuda.h"

namespace vcuda {

inline uint64_t wkey(int32_t layer, int32_t projection) {
    return static_cast<uint64_t>(static_cast<uint32_t>(layer)) << 32 |
           static_cast<uint32_t>(projection);
}

// "FUSED_QKV of layer 17", "EXPERT_GU 5 of layer 2", "EMBED"; a key that vcuda_wkey does not make
// is shown as a number.
struct KeyName {
    explicit KeyName(uint64_t key) {
        static constexpr const char *kNames[] = {"Q",        "K",      "V",     "O",
                                                 "GATE",     "UP",     "DOWN",  "FUSED_QKV",
                                                 "FUSED_GU", "ROUTER", "EMBED", "HEAD"};
        constexpr uint32_t count = sizeof kNames / sizeof kNames[0];
        constexpr uint32_t kExperts = VCUDA_PROJ_EXPERT_DOWN - VCUDA_PROJ_EXPERT_GU;
        const auto layer = static_cast<uint32_t>(key >> 32);
        const auto projection = static_cast<uint32_t>(key);
        if (projection >= VCUDA_PROJ_EXPERT_GU && projection < VCUDA_PROJ_EXPERT_DOWN + kExperts) {
            const bool down = projection >= VCUDA_PROJ_EXPERT_DOWN;
            std::snprintf(text, sizeof text, "%s %u of layer %u",
                          down ? "EXPERT_DOWN" : "EXPERT_GU", projection % kExperts, layer);
        } else if (projection >= count) {
            std::snprintf(text, sizeof text, "0x%016llx", static_cast<unsigned long long>(key));
        } else if (layer == VCUDA_HEAD_LAYER) {
            std::snprintf(text, sizeof text, "%s", kNames[projection]);
        } else {
            std::snprintf(text, sizeof text, "%s of layer %u", kNames[projection], layer);
        }
    }
    char text[48];
};

}  // namespace vcuda
