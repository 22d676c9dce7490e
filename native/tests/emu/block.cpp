#include "block.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "fiber.h"
#include "products.h"
#include "where.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

extern "C" {
extern unsigned char emulated_shared_begin[] __attribute__((weak, visibility("hidden")));
extern unsigned char emulated_shared_end[] __attribute__((weak, visibility("hidden")));
}

namespace vcuda::emulated {

namespace {

constexpr unsigned kMostThreads = 1024;
constexpr unsigned kLanes = 32;
constexpr size_t kFillBytes = 8 << 20;  // of static shared memory filled a launch, at most

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
        case Meet::none:
            break;
    }
    return "nothing";
}

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

// Never destroyed: threads of Python may still run at exit.
Machine &machine() {
    static Machine &one = *new Machine;
    return one;
}

[[noreturn]] void fail(const std::string &what) {
    const Machine &m = machine();
    std::fflush(stdout);
    std::fprintf(stderr, "emulator: kernel %s, block (%u, %u, %u) of %u threads: %s\n",
                 name_at(m.grid->kernel).c_str(), blockIdx.x, blockIdx.y, blockIdx.z, m.count,
                 what.c_str());
    std::abort();
}

std::string text(const char *format, unsigned a, unsigned b = 0, unsigned c = 0) {
    char buffer[200];
    std::snprintf(buffer, sizeof buffer, format, a, b, c);
    return buffer;
}

uint32_t draw(Machine &m) {
    m.random ^= m.random << 13;
    m.random ^= m.random >> 17;
    m.random ^= m.random << 5;
    return m.random;
}

void make_ready(Machine &m, Thread &t) {
    t.state = State::ready;
    t.what = Meet::none;
    m.ready.push_back(&t);
}

void wait(Machine &m) {
    Thread &self = *m.current;
    switch_fiber(self.fiber, m.launcher);
}

// What the lanes of `mask` came together for.
void perform(Meet what, uint32_t mask, Thread *lanes) {
    switch (what) {
        case Meet::shuffle:
            for (unsigned lane = 0; lane < kLanes; ++lane) {
                if ((mask >> lane & 1u) == 0) continue;
                auto &e = *static_cast<Exchange *>(lanes[lane].operand);
                if ((mask >> e.source & 1u) == 0) {
                    fail(text("lane %u shuffles with lane %u, which its mask 0x%08x does not name",
                              lane, static_cast<unsigned>(e.source), mask));
                }
                e.result = static_cast<Exchange *>(lanes[e.source].operand)->value;
            }
            return;
        case Meet::vote: {
            uint32_t ballot = 0;
            for (unsigned lane = 0; lane < kLanes; ++lane) {
                if ((mask >> lane & 1u) == 0) continue;
                if (static_cast<Vote *>(lanes[lane].operand)->yes) ballot |= 1u << lane;
            }
            for (unsigned lane = 0; lane < kLanes; ++lane) {
                if (mask >> lane & 1u) static_cast<Vote *>(lanes[lane].operand)->ballot = ballot;
            }
            return;
        }
        case Meet::mma_s8:
        case Meet::mma_bf16: {
            void *operands[kLanes];
            for (unsigned lane = 0; lane < kLanes; ++lane) operands[lane] = lanes[lane].operand;
            if (what == Meet::mma_s8) product_s8(operands);
            if (what == Meet::mma_bf16) product_bf16(operands);
            return;
        }
        case Meet::none:
        case Meet::block:
        case Meet::warp:
            return;
    }
}

// ------------------------------------------------------------------------------------- meeting

// Let the lanes of `mask` go on if all that have not returned wait for `what`; `self` never waits.
bool complete(Machine &m, unsigned warp, Meet what, uint32_t mask, const void *site,
              const Thread *self) {
    Warp &w = m.warps[warp];
    const uint32_t missing = mask & ~w.there;
    if (missing != 0 && what != Meet::warp) {
        const auto lane = static_cast<unsigned>(__builtin_ctz(missing));
        fail(text("lane %u of warp %u has returned or is not there, ", lane, warp) +
             "and others want it for " + name_of(what) + " in " + place_at(site));
    }
    const uint32_t members = mask & w.there;
    if ((members & ~w.waiting) != 0) return false;
    Thread *lanes = &m.threads[warp * kLanes];
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        if ((members >> lane & 1u) == 0) continue;
        if (lanes[lane].what != what || lanes[lane].mask != mask) return false;
    }
    perform(what, mask, lanes);
    w.waiting &= ~members;
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        if ((members >> lane & 1u) == 0) continue;
        Thread &t = lanes[lane];
        if (&t == self) {
            t.state = State::ready;
            t.what = Meet::none;
        } else {
            make_ready(m, t);
        }
    }
    return true;
}

bool complete_block(Machine &m, const Thread *self) {
    if (m.at_block == 0 || m.at_block + m.done < m.count) return false;
    m.at_block = 0;
    for (unsigned i = 0; i < m.count; ++i) {
        Thread &t = m.threads[i];
        if (t.state != State::waiting || t.what != Meet::block) continue;
        if (&t == self) {
            t.state = State::ready;
            t.what = Meet::none;
        } else {
            make_ready(m, t);
        }
    }
    return true;
}

// A thread has returned: others may have waited for nobody else.
void leave(Machine &m, Thread &self) {
    self.state = State::done;
    m.done += 1;
    complete_block(m, nullptr);
    const unsigned warp = self.id / kLanes;
    m.warps[warp].there &= ~(1u << self.id % kLanes);
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        const unsigned id = warp * kLanes + lane;
        if (id >= m.count) break;
        const Thread &t = m.threads[id];
        if (t.state != State::waiting || t.what == Meet::block) continue;
        if (t.mask >> (self.id % kLanes) & 1u) complete(m, warp, t.what, t.mask, t.site, nullptr);
    }
}

// The fiber's whole life: one thread of one block after another.
void thread_main() {
    Machine &m = machine();
    fiber_entered(m.launcher);
    for (;;) {
        Thread &self = *m.current;
        m.grid->body();
        leave(m, self);
        wait(m);
    }
}

// ------------------------------------------------------------------------------------- blocks

// Who waits where, when nobody can go on.
[[noreturn]] void fail_stuck(const Machine &m) {
    std::string who = "the threads wait for each other for ever:";
    std::vector<bool> told(m.count, false);
    for (unsigned i = 0; i < m.count; ++i) {
        const Thread &first = m.threads[i];
        if (told[i] || first.state != State::waiting) continue;
        unsigned same = 0;
        for (unsigned j = i; j < m.count; ++j) {
            const Thread &t = m.threads[j];
            if (t.state == State::waiting && t.what == first.what && t.mask == first.mask &&
                t.site == first.site && (t.what == Meet::block || t.id / 32 == first.id / 32)) {
                told[j] = true;
                same += 1;
            }
        }
        who += text(" %u (the first is thread %u)", same, i) + " at " + name_of(first.what);
        if (first.what != Meet::block) who += text(" with mask 0x%08x", first.mask);
        who += " in " + place_at(first.site) + ";";
    }
    fail(who + text(" %u have returned", m.done));
}

// Until nobody can go on.
void run_ready(Machine &m) {
    while (m.head < m.ready.size()) {
        if (m.schedule > 1) {
            const size_t other = m.head + draw(m) % (m.ready.size() - m.head);
            std::swap(m.ready[m.head], m.ready[other]);
        }
        m.current = m.ready[m.head++];
        if (m.head >= 4096) {  // keep the queue short
            m.ready.erase(m.ready.begin(), m.ready.begin() + static_cast<ptrdiff_t>(m.head));
            m.head = 0;
        }
        threadIdx = m.current->index;
        switch_fiber(m.launcher, m.current->fiber);
    }
}

void run_block(Machine &m, unsigned index) {
    const Grid &g = *m.grid;
    blockIdx = {index % g.grid.x, index / g.grid.x % g.grid.y, index / (g.grid.x * g.grid.y)};
    m.done = 0;
    m.at_block = 0;
    m.pdl_waited = false;
    m.released = false;
    m.head = 0;
    m.ready.clear();
    for (Warp &warp : m.warps) warp = {};
    for (unsigned i = 0; i < m.count; ++i) {
        Thread &t = m.threads[i];
        t.index = {i % g.block.x, i / g.block.x % g.block.y, i / (g.block.x * g.block.y)};
        t.id = i;
        t.pdl_waited = false;
        if (!t.made) make_fiber(t.fiber, thread_main, i);
        t.made = true;
        m.warps[i / kLanes].there |= 1u << i % kLanes;
        make_ready(m, t);
    }
    if (m.schedule == 1) std::reverse(m.ready.begin(), m.ready.end());
    if (g.in_flight) g.in_flight(true);
    run_ready(m);
    if (g.in_flight) {
        g.in_flight(false);
        m.released = true;
        for (Thread *t : m.at_pdl_wait) make_ready(m, *t);
        m.at_pdl_wait.clear();
        run_ready(m);
    }
    if (m.done < m.count) fail_stuck(m);
    m.grid_waited = m.grid_waited || m.pdl_waited;
}

// Bytes of 0xFF: not a number as float32, -1 as an integer. Written byte by byte because ASan's red
// zones lie between the objects.
#if defined(VCUDA_EMULATED_ASAN)
__attribute__((no_sanitize_address))
#endif
void fill_shared() {
    volatile unsigned char *p = emulated_shared_begin;
    while (p < emulated_shared_end) *p++ = 0xff;
}

}  // namespace

void meet_block() {
    Machine &m = machine();
    Thread &self = *m.current;
    self.state = State::waiting;
    self.what = Meet::block;
    self.site = __builtin_return_address(0);
    m.at_block += 1;
    if (!complete_block(m, &self)) wait(m);
}

void meet(Meet what, uint32_t mask, void *operand) {
    Machine &m = machine();
    Thread &self = *m.current;
    const unsigned lane = self.id % kLanes;
    self.site = __builtin_return_address(0);
    if ((mask >> lane & 1u) == 0) {
        fail(text("lane %u calls with mask 0x%08x, which does not name it: ", lane, mask) +
             name_of(what) + " in " + place_at(self.site));
    }
    self.state = State::waiting;
    self.what = what;
    self.mask = mask;
    self.operand = operand;
    m.warps[self.id / kLanes].waiting |= 1u << lane;
    if (!complete(m, self.id / kLanes, what, mask, self.site, &self)) wait(m);
}

int lane_id() {
    return static_cast<int>(machine().current->id % kLanes);
}

unsigned char *dynamic_shared() {
    return machine().dynamic;
}

void note_pdl_wait() {
    Machine &m = machine();
    Thread &self = *m.current;
    m.pdl_waited = true;
    if (!m.grid->in_flight || self.pdl_waited) return;
    self.pdl_waited = true;
    if (m.released) return;
    m.at_pdl_wait.push_back(&self);
    wait(m);
}

void note_pdl_trigger() {
    const Machine &m = machine();
    if (m.grid->overlap && !m.pdl_waited) {
        fail(
            "a thread called pdl_trigger before pdl_wait, so the next kernel may start while the "
            "kernel before this one still writes what it reads");
    }
}

void set_schedule(uint32_t schedule) {
    machine().schedule = schedule;
}

void run_grid(const Grid &grid) {
    Machine &m = machine();
    m.grid = &grid;
    m.count = grid.block.x * grid.block.y * grid.block.z;
    m.random = m.schedule;
    m.grid_waited = false;
    gridDim = grid.grid;
    blockDim = grid.block;
    const unsigned blocks = grid.grid.x * grid.grid.y * grid.grid.z;

    // Memory of its own for every launch: ASan sees what lies behind its last byte.
    void *dynamic = nullptr;
    if (grid.shared > 0 && posix_memalign(&dynamic, 16, grid.shared) != 0) {
        fail("no host memory for its dynamic shared memory");
    }
    m.dynamic = static_cast<unsigned char *>(dynamic);
    const auto fixed = static_cast<size_t>(emulated_shared_end - emulated_shared_begin);
    const size_t stride = std::max<size_t>(1, fixed * blocks / kFillBytes);

    std::vector<unsigned> order;
    if (m.schedule > 1) {
        for (unsigned i = 0; i < blocks; ++i) order.push_back(i);
        for (unsigned i = blocks; i > 1; --i) std::swap(order[i - 1], order[draw(m) % i]);
    }
    for (unsigned i = 0; i < blocks; ++i) {
        if (grid.shared > 0) std::memset(dynamic, 0xff, grid.shared);
        if (i % stride == 0 || i + 1 == blocks) fill_shared();
        unsigned index = i;
        if (m.schedule == 1) index = blocks - 1 - i;
        if (m.schedule > 1) index = order[i];
        run_block(m, index);
    }
    if (grid.overlap && !m.grid_waited) {
        fail(
            "it was launched with `overlap` and no thread called pdl_wait, so it, and what is "
            "launched after it, may run before the kernel before it has finished");
    }
    m.dynamic = nullptr;
    std::free(dynamic);
}

}  // namespace vcuda::emulated
