// What the parts of the emulator know of the block that runs. Not for kernels.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "block.h"
#include "fiber.h"

extern "C" {
extern unsigned char emulated_shared_begin[] __attribute__((weak, visibility("hidden")));
extern unsigned char emulated_shared_end[] __attribute__((weak, visibility("hidden")));
}

namespace vcuda::emulated {

constexpr unsigned kMostThreads = 1024;
constexpr unsigned kLanes = 32;

enum class State { ready, waiting, done };

struct Thread {
    Fiber fiber;
    uint3 index{};
    unsigned id = 0;
    State state = State::done;
    Meet what = Meet::none;      // what it waits for
    uint32_t mask = 0;           // with which lanes
    void *operand = nullptr;     // see block.h
    const void *site = nullptr;  // where in the kernel
    bool pdl_waited = false;
    bool made = false;
};

// Lanes of one warp, as bits.
struct Warp {
    uint32_t there = 0;    // that have not returned
    uint32_t waiting = 0;  // for other lanes of the warp, whatever for
};

struct Machine {
    std::unique_ptr<Thread[]> threads{new Thread[kMostThreads]};
    Warp warps[kMostThreads / kLanes];
    Fiber launcher;  // who runs the grid
    const Grid *grid = nullptr;
    Thread *current = nullptr;
    unsigned count = 0;                 // threads of the block
    unsigned done = 0;                  // that have returned
    unsigned at_block = 0;              // that wait at __syncthreads
    unsigned block_barriers = 0;        // that the block has passed
    bool pdl_waited = false;            // by any of them
    bool grid_waited = false;           // by a thread of any block so far
    std::vector<Thread *> at_pdl_wait;  // see Grid::in_flight
    bool released = false;              // those that waited there
    std::vector<Thread *> ready;        // first in, first out from `head` on
    size_t head = 0;
    unsigned char *dynamic = nullptr;
    uint32_t schedule = 0;
    uint32_t random = 0;
};

Machine &machine();

// Stop the running thread until another one calls resume() with its index. `operand`: what it waits
// for, for messages.
void pause(Meet what, void *operand, const void *site);
void resume(unsigned thread);

// Before a block: bytes of 0xFF everywhere, which are not a number as float32 and -1 as an integer.
// After the first block of a launch: what the kernel wrote is remembered.
void fill_shared(bool first_block);
void learn_shared();

// Where shared memory of the block lies ("byte 64 of dynamic shared memory"), or "" when not all of
// these bytes are shared memory.
std::string shared_place(const void *p, size_t bytes);

// ------------------------------------------------------------------------------------- messages

const char *name_of(Meet what);
std::string text(const char *format, unsigned a, unsigned b = 0, unsigned c = 0);

// End the program with a sentence that names the kernel and the block.
[[noreturn]] void fail(const std::string &what);

// The same, of threads that wait for each other: who waits where.
[[noreturn]] void fail_stuck();

}  // namespace vcuda::emulated
