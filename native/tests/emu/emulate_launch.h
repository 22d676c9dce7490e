// launch() of kernels/launch.h on the CPU. The host code that calls it is the same.
#pragma once

#include <tuple>

#include "cuda_try.h"
#include "stream.h"

namespace vcuda {

template <class... Params, class... Args>
void launch(Launcher &to, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared,
            Args... args) {
    emulated::Grid work;
    work.kernel = reinterpret_cast<const void *>(kernel);
    work.grid = grid;
    work.block = block;
    work.shared = shared;
    work.overlap = to.overlap;
    work.body = [kernel, values = std::tuple<Params...>(static_cast<Params>(args)...)] {
        std::apply(kernel, values);
    };
    CUDA_TRY(emulated::launch_grid(to.stream, std::move(work)));
    to.launches += 1;
}

}  // namespace vcuda
