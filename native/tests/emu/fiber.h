// Fibers: stacks that are switched between by hand, a few nanoseconds a switch.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define VCUDA_EMULATED_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace vcuda::emulated {

struct Fiber {
#if defined(__x86_64__)
    void *stack_pointer = nullptr;  // of a fiber that is not running
#else
    ucontext_t context{};
#endif
    const void *bottom = nullptr;  // lowest address of the stack, and its size: for ASan
    size_t size = 0;
    void *fake_stack = nullptr;  // ASan's
};

// Give a fiber a stack of its own, with a guard page below it. Switching to it calls entry(), which
// must never return. `colour` spreads the tops of the stacks over the cache's sets.
void make_fiber(Fiber &fiber, void (*entry)(), size_t colour);

// Stop in `from`, go on in `to`.
void switch_fiber(Fiber &from, Fiber &to);

// The first thing entry() must call. `from` is who switched here.
void fiber_entered(Fiber &from);

}  // namespace vcuda::emulated
