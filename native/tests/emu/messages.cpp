// What the emulator says when it ends the program.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "async_parts.h"
#include "machine.h"
#include "where.h"

namespace vcuda::emulated {

const char *name_of(Meet what) {
    switch (what) {
        case Meet::block:
            return "__syncthreads";
        case Meet::warp:
            return "__syncwarp";
        case Meet::shuffle:
            return "a shuffle";
        case Meet::vote:
            return "a vote";
        case Meet::mma_s8:
            return "mma_s8";
        case Meet::mma_bf16:
            return "mma_bf16";
        case Meet::mma_f16:
            return "mma_f16";
        case Meet::load_matrix:
            return "load_matrix_x4";
        case Meet::load_matrix_trans:
            return "load_matrix_x4_trans";
        case Meet::barrier:
            return "barrier_wait";
        case Meet::wgmma:
            return "wgmma";
        case Meet::wgmma_fence:
            return "wgmma_fence";
        case Meet::wgmma_commit:
            return "wgmma_commit";
        case Meet::wgmma_wait:
            return "wgmma_wait";
        case Meet::none:
            break;
    }
    return "nothing";
}

std::string text(const char *format, unsigned a, unsigned b, unsigned c) {
    char buffer[200];
    std::snprintf(buffer, sizeof buffer, format, a, b, c);
    return buffer;
}

[[noreturn]] void fail(const std::string &what) {
    const Machine &m = machine();
    std::fflush(stdout);
    std::fprintf(stderr, "emulator: kernel %s, block (%u, %u, %u) of %u threads: %s\n",
                 name_at(m.grid->kernel).c_str(), blockIdx.x, blockIdx.y, blockIdx.z, m.count,
                 what.c_str());
    std::abort();
}

[[noreturn]] void fail_stuck() {
    const Machine &m = machine();
    std::string who = "the threads wait for each other for ever:";
    std::vector<bool> told(m.count, false);
    for (unsigned i = 0; i < m.count; ++i) {
        const Thread &first = m.threads[i];
        if (told[i] || first.state != State::waiting) continue;
        unsigned same = 0;
        for (unsigned j = i; j < m.count; ++j) {
            const Thread &t = m.threads[j];
            const bool one_group = t.what == Meet::block ||
                                   (t.what == Meet::barrier && t.operand == first.operand) ||
                                   t.id / kLanes == first.id / kLanes;
            if (t.state == State::waiting && t.what == first.what && t.mask == first.mask &&
                t.site == first.site && one_group) {
                told[j] = true;
                same += 1;
            }
        }
        who += text(" %u (the first is thread %u)", same, i) + " at " + name_of(first.what);
        if (first.mask != 0 && first.what != Meet::block) {
            who += text(" with mask 0x%08x", first.mask);
        }
        who += " in " + place_at(first.site);
        if (first.what == Meet::barrier) who += " for " + barrier_state(first.operand);
        if (first.what == Meet::wgmma_wait && first.mask == 0) {
            who += " for the other warps of their warpgroup to start the same products";
        }
        who += ";";
    }
    fail(who + text(" %u have returned", m.done));
}

}  // namespace vcuda::emulated
