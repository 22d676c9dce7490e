// Copies into shared memory, and those of copy_async.
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "async.h"
#include "async_parts.h"
#include "machine.h"
#include "runtime.h"
#include "where.h"

namespace vcuda::emulated {

namespace {

constexpr unsigned char kUnreadable = 0xff;

// What one thread has started with copy_async and not waited for.
struct Started {
    std::deque<Copy> copies;
    std::deque<size_t> groups;  // copies of each committed group, the oldest first
    size_t open = 0;            // copies that are in no group yet
};

// Of every thread of the running block.
std::vector<Started> &started() {
    static std::vector<Started> &all = *new std::vector<Started>(kMostThreads);
    return all;
}

Started &mine() {
    return started()[machine().current->id];
}

void check_source(const Copy &c) {
    if (c.from == nullptr || c.bytes == 0) return;
    if (reinterpret_cast<uintptr_t>(c.from) % 16 != 0) {
        fail(c.name + std::string(" reads from an address that is not aligned to 16 bytes in ") +
             place_at(c.site));
    }
#if defined(VCUDA_EMULATED_ASAN)  // told here, where the copy is started
    if (const void *bad = __asan_region_is_poisoned(const_cast<unsigned char *>(c.from), c.bytes)) {
        (void)*static_cast<const volatile char *>(bad);
    }
#endif
    if (allocation_of(c.from, c.bytes) == nullptr) {
        fail(c.name + std::string(" reads ") + std::to_string(c.bytes) +
             " bytes that are not all of one allocation of device memory, in " + place_at(c.site));
    }
}

}  // namespace

void start(const Copy &c) {
    check_shared(c.to, c.bytes, 16, c.name, c.site);
    check_source(c);
    if (const void *site = product_reads(c.to, c.bytes)) {
        fail(c.name + std::string(" in ") + place_at(c.site) + " writes to " +
             shared_place(c.to, c.bytes) + ", which wgmma in " + place_at(site) +
             " reads: it was not waited for by all warps");
    }
    if (const Copy *other = bulk_under_way(c.to, c.bytes)) {
        fail(c.name + std::string(" in ") + place_at(c.site) + " writes to " +
             shared_place(c.to, c.bytes) + ", where the copy_bulk in " + place_at(other->site) +
             " is still under way");
    }
    std::memset(c.to, kUnreadable, c.bytes);
}

void finish(const Copy &c) {
    for (size_t i = 0; i < c.bytes; ++i) {
        if (c.to[i] == kUnreadable) continue;
        fail(shared_place(c.to + i, 1) + " was written to while the " + c.name + " in " +
             place_at(c.site) + " was under way to it");
    }
    if (c.from != nullptr) {
        std::memcpy(c.to, c.from, c.bytes);
    } else {
        std::memset(c.to, 0, c.bytes);
    }
}

void copy_async(void *shared, const void *global, bool inside) {
    const Copy c{static_cast<unsigned char *>(shared),
                 inside ? static_cast<const unsigned char *>(global) : nullptr, 16,
                 __builtin_return_address(0), "copy_async_16"};
    start(c);
    mine().copies.push_back(c);
    mine().open += 1;
}

void copy_async_commit() {
    mine().groups.push_back(mine().open);
    mine().open = 0;
}

void copy_async_wait(size_t under_way) {
    Started &s = mine();
    while (s.groups.size() > under_way) {
        for (size_t n = s.groups.front(); n > 0; --n) {
            finish(s.copies.front());
            s.copies.pop_front();
        }
        s.groups.pop_front();
    }
}

void async_leave(unsigned thread) {
    Started &s = started()[thread];
    if (!s.copies.empty()) {
        fail(text("thread %u returns with %u copies under way", thread,
                  static_cast<unsigned>(s.copies.size())) +
             " that it never waited for, the first of them of copy_async_16 in " +
             place_at(s.copies.front().site));
    }
    if (!s.groups.empty()) s.groups.clear();  // they are empty
    products_leave(thread);
}

void async_end() {
    products_end();
    barriers_end();
}

}  // namespace vcuda::emulated
