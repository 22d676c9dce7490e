#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__x86_64__)
// void vcuda_switch_stack(void **save, void *load): push what the callee must preserve, exchange
// the stack pointer, pop the other fiber's. The mode bits of the floating-point units are the same
// in all fibers.
asm(R"(
.text
.globl vcuda_switch_stack
.hidden vcuda_switch_stack
.type vcuda_switch_stack, @function
vcuda_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size vcuda_switch_stack, . - vcuda_switch_stack
)");
extern "C" void vcuda_switch_stack(void **save, void *load);
#endif

namespace vcuda::emulated {

namespace {

#if defined(VCUDA_EMULATED_ASAN)
constexpr size_t kStackBytes = 256 << 10;  // red zones take room
#else
constexpr size_t kStackBytes = 128 << 10;
#endif

}  // namespace

void make_fiber(Fiber &fiber, void (*entry)(), size_t colour) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void *memory = mmap(nullptr, kStackBytes + page, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) {
        std::fprintf(stderr, "emulator: no memory for the stack of a thread\n");
        std::abort();
    }
    char *bottom = static_cast<char *>(memory) + page;
    fiber.bottom = bottom;
    fiber.size = kStackBytes;
#if defined(__x86_64__)
    auto *top = reinterpret_cast<uintptr_t *>(bottom + kStackBytes - colour * 320 % 8192 / 16 * 16);
    *--top = 0;                                   // where entry() would return to
    *--top = reinterpret_cast<uintptr_t>(entry);  // where the first switch returns to
    for (int i = 0; i < 6; ++i) *--top = 0;       // the six registers
    fiber.stack_pointer = top;
#else
    (void)colour;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = bottom;
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
#endif
}

void switch_fiber(Fiber &from, Fiber &to) {
#if defined(VCUDA_EMULATED_ASAN)
    __sanitizer_start_switch_fiber(&from.fake_stack, to.bottom, to.size);
#endif
#if defined(__x86_64__)
    vcuda_switch_stack(&from.stack_pointer, to.stack_pointer);
#else
    swapcontext(&from.context, &to.context);
#endif
#if defined(VCUDA_EMULATED_ASAN)
    // All switches are between a fiber and the launching thread: what is told here is that thread's
    // stack when a fiber goes on, and the fiber's own, which is known, the other way round.
    const void *bottom = nullptr;
    size_t size = 0;
    __sanitizer_finish_switch_fiber(from.fake_stack, &bottom, &size);
    to.bottom = bottom;
    to.size = size;
#endif
}

void fiber_entered(Fiber &from) {
#if defined(VCUDA_EMULATED_ASAN)
    __sanitizer_finish_switch_fiber(nullptr, &from.bottom, &from.size);
#else
    (void)from;
#endif
}

}  // namespace vcuda::emulated
