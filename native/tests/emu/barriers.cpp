// mbarrier, and the bulk copies that it counts.
#include <algorithm>
#include <map>
#include <string>
#include <unordered_set>
#include <vector>

#include "async.h"
#include "async_parts.h"
#include "machine.h"
#include "where.h"

namespace vcuda::emulated {

namespace {

constexpr uint64_t kMost = (1u << 20) - 1;  // arrivals, and bytes under way, of one phase
constexpr size_t kLine = 128;

struct Barrier {
    uint64_t arrivals = 0;          // of each phase
    uint64_t missing = 0;           // of them, in this phase
    uint64_t phase = 0;             // that goes on
    uint64_t expected = 0;          // bytes announced in this phase
    uint64_t started = 0;           // bytes of its copies
    std::vector<Copy> copies;       // of this phase
    std::vector<Copy> ended;        // of the phase before, whose end no thread has seen yet
    std::vector<unsigned> waiting;  // threads
    unsigned maker = 0;             // thread
    unsigned made = 0;              // after so many __syncthreads
    bool announced = false;         // barrier_init_done
};

struct Barriers {
    std::map<uint64_t *, Barrier> all;      // of the running block
    std::unordered_set<uintptr_t> by_bulk;  // lines of shared memory that copy_bulk wrote
    bool fenced = false;                    // a thread called proxy_fence_shared
};

Barriers &barriers() {
    static Barriers &one = *new Barriers;
    return one;
}

// What lies in the memory of a barrier: kernels have no business there.
uint64_t mark_of(const uint64_t *at, const Barrier &b) {
    return 0x6d62617272696572u ^ reinterpret_cast<uintptr_t>(at) ^ b.phase << 48;
}

std::string at(const uint64_t *b) {
    return "the barrier at " + shared_place(b, 8);
}

[[noreturn]] void fail_at(const char *name, const uint64_t *b, const std::string &what,
                          const void *site) {
    fail(name + std::string(" in ") + place_at(site) + ": " + at(b) + " " + what);
}

// A barrier that the running thread may use. `copies`: for the unit that copies.
Barrier &known(uint64_t *p, const char *name, const void *site, bool copies = false) {
    check_shared(p, 8, 8, name, site);
    auto &all = barriers().all;
    const auto found = all.find(p);
    if (found == all.end()) fail_at(name, p, "was not made with barrier_init", site);
    Barrier &b = found->second;
    if (*p != mark_of(p, b)) fail_at(name, p, "was written to", site);
    const Machine &m = machine();
    const unsigned self = m.current->id;
    if (!b.announced && (copies || self != b.maker)) {
        fail_at(name, p, "is used without barrier_init_done after its barrier_init", site);
    }
    if (self / kLanes != b.maker / kLanes && b.made == m.block_barriers) {
        fail_at(name, p, "is used with no __syncthreads since its barrier_init in another warp",
                site);
    }
    return b;
}

// A thread sees that the phase before has ended, and so what it copied.
void land(Barrier &b) {
    for (const Copy &c : b.ended) {
        finish(c);
        const auto first = reinterpret_cast<uintptr_t>(c.to) / kLine;
        const auto end = (reinterpret_cast<uintptr_t>(c.to) + c.bytes + kLine - 1) / kLine;
        for (auto line = first; line < end; ++line) barriers().by_bulk.insert(line);
    }
    b.ended.clear();
}

// Begin the next phase if everything has come.
void end_phase(uint64_t *p, Barrier &b, const char *name, const void *site) {
    if (b.missing > 0) return;
    if (b.started > b.expected) {
        fail_at(name, p,
                "has all arrivals of a phase and " + std::to_string(b.expected) +
                    " bytes announced, and copies of " + std::to_string(b.started) +
                    " bytes were started",
                site);
    }
    if (b.started < b.expected) return;
    land(b);
    b.ended.swap(b.copies);
    b.phase += 1;
    b.missing = b.arrivals;
    b.expected = b.started = 0;
    *p = mark_of(p, b);
    for (const unsigned thread : b.waiting) resume(thread);
    b.waiting.clear();
}

void arrive(uint64_t *p, Barrier &b, uint64_t bytes, const char *name, const void *site) {
    if (b.missing == 0) {
        fail_at(name, p,
                "has all its " + std::to_string(b.arrivals) +
                    " arrivals of this phase and waits for bytes",
                site);
    }
    b.expected += bytes;
    if (b.expected > kMost) fail_at(name, p, "cannot count so many bytes in a phase", site);
    b.missing -= 1;
    end_phase(p, b, name, site);
}

}  // namespace

void barrier_init(uint64_t *p, int arrivals) {
    const void *site = __builtin_return_address(0);
    check_shared(p, 8, 8, "barrier_init", site);
    if (arrivals < 1 || static_cast<uint64_t>(arrivals) > kMost) {
        fail_at("barrier_init", p, "cannot have " + std::to_string(arrivals) + " arrivals", site);
    }
    if (barriers().all.count(p) != 0) fail_at("barrier_init", p, "was made already", site);
    Barrier &b = barriers().all[p];
    b.arrivals = b.missing = static_cast<uint64_t>(arrivals);
    b.maker = machine().current->id;
    b.made = machine().block_barriers;
    *p = mark_of(p, b);
}

void barrier_init_done() {
    for (auto &[p, b] : barriers().all) {
        b.announced = b.announced || b.maker == machine().current->id;
    }
}

void barrier_expect(uint64_t *p, uint32_t bytes) {
    const void *site = __builtin_return_address(0);
    arrive(p, known(p, "barrier_expect", site), bytes, "barrier_expect", site);
}

void barrier_arrive(uint64_t *p) {
    const void *site = __builtin_return_address(0);
    arrive(p, known(p, "barrier_arrive", site), 0, "barrier_arrive", site);
}

void barrier_wait(uint64_t *p, int parity) {
    const void *site = __builtin_return_address(0);
    if (parity != 0 && parity != 1) {
        fail("barrier_wait gets the parity " + std::to_string(parity) + " in " + place_at(site));
    }
    Barrier &b = known(p, "barrier_wait", site);
    const uint64_t phase = b.phase;
    if (phase % 2 == static_cast<uint64_t>(parity)) {
        b.waiting.push_back(machine().current->id);
        pause(Meet::barrier, p, site);
        if (b.phase != phase + 1) {
            fail_at("barrier_wait", p,
                    "went on to a later phase before this thread saw the end of phase " +
                        std::to_string(phase),
                    site);
        }
    }
    land(b);
}

void copy_bulk(void *shared, const void *global, uint32_t bytes, uint64_t *p) {
    const void *site = __builtin_return_address(0);
    Barrier &b = known(p, "copy_bulk", site, true);
    if (bytes % 16 != 0) {
        fail("copy_bulk of " + std::to_string(bytes) + " bytes, not a multiple of 16, in " +
             place_at(site));
    }
    const Copy c{static_cast<unsigned char *>(shared), static_cast<const unsigned char *>(global),
                 bytes, site, "copy_bulk"};
    if (global == nullptr) fail("copy_bulk from NULL in " + place_at(site));
    start(c);
    b.copies.push_back(c);
    b.started += bytes;
    end_phase(p, b, "copy_bulk", site);
}

void proxy_fence() {
    barriers().fenced = true;
}

const Copy *bulk_under_way(const void *p, size_t bytes) {
    for (const auto &one : barriers().all) {
        for (const auto *copies : {&one.second.copies, &one.second.ended}) {
            for (const Copy &c : *copies) {
                if (overlap(c.to, c.bytes, p, bytes)) return &c;
            }
        }
    }
    return nullptr;
}

bool tensor_cores_see(const void *p, size_t bytes) {
    const Barriers &all = barriers();
    if (all.fenced) return true;
    const auto *line = static_cast<const unsigned char *>(p);
    for (size_t i = 0; i < bytes / kLine; ++i, line += kLine) {
        if (all.by_bulk.count(reinterpret_cast<uintptr_t>(line) / kLine) != 0) continue;
        const auto written = [](unsigned char byte) { return byte != 0xff; };
        if (std::any_of(line, line + kLine, written)) return false;
    }
    return true;
}

std::string barrier_state(const void *p) {
    auto *key = static_cast<uint64_t *>(const_cast<void *>(p));
    const Barrier &b = barriers().all[key];
    return at(key) + " in phase " + std::to_string(b.phase) + ", where " +
           std::to_string(b.missing) + " of " + std::to_string(b.arrivals) + " arrivals and " +
           std::to_string(std::max(b.expected, b.started) - b.started) + " of " +
           std::to_string(b.expected) + " bytes are missing";
}

void barriers_end() {
    Barriers &all = barriers();
    for (const auto &one : all.all) {
        const Barrier &b = one.second;
        if (b.copies.empty() && b.ended.empty()) continue;
        const Copy &c = b.copies.empty() ? b.ended.front() : b.copies.front();
        fail("the block ends while the copy_bulk in " + place_at(c.site) + " to " +
             shared_place(c.to, c.bytes) + " is under way: nobody waited for it");
    }
    all.all.clear();
    all.by_bulk.clear();
    all.fenced = false;
}

}  // namespace vcuda::emulated
