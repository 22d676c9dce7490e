// The end of every program that tests kernels.
#pragma once

#include <cstdio>

#include "error.h"

namespace vcuda::tests {

// What main() answers: that of `test`, or 1 with the sentence of an error.
inline int run_test(int (*test)()) {
    try {
        return test();
    } catch (const Error &e) {
        std::printf("FAILED %s\n", e.what());
        return 1;
    }
}

}  // namespace vcuda::tests
