#include "block.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "async_parts.h"
#include "machine.h"
#include "products.h"
#include "where.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace vcuda::emulated {

namespace {

constexpr size_t kSharedAlign = 1024;  // of dynamic shared memory: the 128-byte swizzle needs it

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
    const unsigned warp = lanes[0].id / kLanes;
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
        case Meet::mma_bf16:
        case Meet::mma_f16:
        case Meet::load_matrix:
        case Meet::load_matrix_trans:
        case Meet::wgmma: {
            void *operands[kLanes];
            for (unsigned lane = 0; lane < kLanes; ++lane) operands[lane] = lanes[lane].operand;
            if (what == Meet::mma_s8) product_s8(operands);
            if (what == Meet::mma_bf16) product_bf16(operands);
            if (what == Meet::mma_f16) product_f16(operands);
            if (what == Meet::load_matrix) load_matrices(operands, false);
            if (what == Meet::load_matrix_trans) load_matrices(operands, true);
            if (what == Meet::wgmma) wgmma_start(warp, operands, lanes[0].site);
            return;
        }
        case Meet::wgmma_fence:
            wgmma_fence(warp);
            return;
        case Meet::wgmma_commit:
            wgmma_commit(warp);
            return;
        case Meet::wgmma_wait:
            wgmma_wait(warp, *static_cast<const size_t *>(lanes[0].operand));
            return;
        case Meet::none:
        case Meet::block:
        case Meet::warp:
        case Meet::barrier:
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
    m.block_barriers += 1;
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
    async_leave(self.id);
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
    m.block_barriers = 0;
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
    if (m.done < m.count) fail_stuck();
    async_end();
    m.grid_waited = m.grid_waited || m.pdl_waited;
}

}  // namespace

// Never destroyed: threads of Python may still run at exit.
Machine &machine() {
    static Machine &one = *new Machine;
    return one;
}

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

void pause(Meet what, void *operand, const void *site) {
    Machine &m = machine();
    Thread &self = *m.current;
    self.state = State::waiting;
    self.what = what;
    self.mask = 0;  // no lane's return or arrival lets it go on
    self.operand = operand;
    self.site = site;
    wait(m);
}

void resume(unsigned thread) {
    Machine &m = machine();
    make_ready(m, m.threads[thread]);
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
    if (grid.shared > 0 && posix_memalign(&dynamic, kSharedAlign, grid.shared) != 0) {
        fail("no host memory for its dynamic shared memory");
    }
    m.dynamic = static_cast<unsigned char *>(dynamic);
    std::vector<unsigned> order;
    if (m.schedule > 1) {
        for (unsigned i = 0; i < blocks; ++i) order.push_back(i);
        for (unsigned i = blocks; i > 1; --i) std::swap(order[i - 1], order[draw(m) % i]);
    }
    for (unsigned i = 0; i < blocks; ++i) {
        fill_shared(i == 0);
        unsigned index = i;
        if (m.schedule == 1) index = blocks - 1 - i;
        if (m.schedule > 1) index = order[i];
        run_block(m, index);
        if (i == 0) learn_shared();
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
