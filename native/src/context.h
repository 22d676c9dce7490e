// What a handle has on its device.
#pragma once

#include <memory>

#include "cache.h"
#include "decode.h"
#include "device.h"
#include "products.h"
#include "upload.h"

namespace vcuda {

// The parts refer to one another, so it stays where it was made. PRE: a DeviceScope.
struct Context {
    explicit Context(int32_t index)
        : device(open_device(index)),
          uploader(device.sm_count),
          cache(uploader),
          products(device, cache) {}
    Context(const Context &) = delete;
    Context &operator=(const Context &) = delete;

    // The decoder, or an Error that there is none.
    Decoder &decoding() const {
        if (!decoder) {
            throw Error("decoding has not been set up; call vcuda_dev_decode_init first");
        }
        return *decoder;
    }

    Device device;
    Uploader uploader;
    Cache cache;
    Products products;
    std::unique_ptr<Decoder> decoder;
};

}  // namespace vcuda
