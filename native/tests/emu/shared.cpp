// Shared memory: what is in it before a block runs, and whether addresses lie in it.
#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "machine.h"
#include "where.h"

namespace vcuda::emulated {

namespace {

// Static shared memory is that of all kernels together. Which parts of it a kernel writes to is
// learned from its first launches, so that not everything is filled before every block.
constexpr size_t kPart = 1024;
constexpr unsigned kLessons = 4;  // launches

struct Written {
    std::vector<size_t> parts;
    unsigned lessons = 0;
};

// ASan's red zones lie between the objects, so these two go word by word.
#if defined(VCUDA_EMULATED_ASAN)
__attribute__((no_sanitize("address")))
#endif
void fill(uint64_t *from, const uint64_t *end) {
    for (volatile uint64_t *word = from; word < end; ++word) *word = ~uint64_t{0};
}

#if defined(VCUDA_EMULATED_ASAN)
__attribute__((no_sanitize("address")))
#endif
bool is_filled(const uint64_t *from, const uint64_t *end) {
    for (const volatile uint64_t *word = from; word < end; ++word) {
        if (*word != ~uint64_t{0}) return false;
    }
    return true;
}

uint64_t *begin() {
    return reinterpret_cast<uint64_t *>(emulated_shared_begin);
}

uint64_t *end() {
    return reinterpret_cast<uint64_t *>(emulated_shared_end);
}

uint64_t *begin_of(size_t part) {
    return begin() + part * kPart / sizeof(uint64_t);
}

uint64_t *end_of(size_t part) {
    return std::min(begin_of(part + 1), end());
}

Written &written() {
    static auto &all = *new std::map<const void *, Written>;
    return all[machine().grid->kernel];
}

}  // namespace

void fill_shared(bool first_block) {
    const Machine &m = machine();
    if (m.dynamic != nullptr) std::memset(m.dynamic, 0xff, m.grid->shared);
    const Written &w = written();
    if (first_block && w.lessons < kLessons) return fill(begin(), end());
    for (const size_t part : w.parts) fill(begin_of(part), end_of(part));
}

void learn_shared() {
    Written &w = written();
    if (w.lessons >= kLessons) return;
    w.lessons += 1;
    for (size_t part = 0; begin_of(part) < end(); ++part) {
        if (is_filled(begin_of(part), end_of(part))) continue;
        if (std::find(w.parts.begin(), w.parts.end(), part) == w.parts.end()) {
            w.parts.push_back(part);
        }
    }
}

std::string shared_place(const void *p, size_t bytes) {
    const auto *first = static_cast<const unsigned char *>(p);
    const auto inside = [&](const unsigned char *begin, const unsigned char *end) {
        return begin != nullptr && first >= begin && first <= end &&
               bytes <= static_cast<size_t>(end - first);
    };
    const Machine &m = machine();
    if (inside(m.dynamic, m.dynamic + m.grid->shared)) {
        return "byte " + std::to_string(first - m.dynamic) + " of dynamic shared memory";
    }
    if (inside(emulated_shared_begin, emulated_shared_end)) {
        return "byte " + std::to_string(first - emulated_shared_begin) + " of static shared memory";
    }
    return {};
}

void check_shared(const void *p, size_t bytes, size_t alignment, const char *what,
                  const void *site) {
    if (site == nullptr) site = __builtin_return_address(0);
    const Machine &m = machine();
    const auto *first = static_cast<const unsigned char *>(p);
    const bool dynamic = first >= m.dynamic && first + bytes <= m.dynamic + m.grid->shared;
    const bool aligned = reinterpret_cast<uintptr_t>(p) % alignment == 0;
    if (dynamic && aligned) return;
    const std::string place = shared_place(p, bytes);
    if (place.empty()) {
        fail(what + std::string(" needs ") + std::to_string(bytes) +
             " bytes of shared memory, and its address is not there, or not with all of them, in " +
             place_at(site));
    }
    if (!aligned) {
        fail(what + std::string(" needs an address aligned to ") + std::to_string(alignment) +
             " bytes, and gets " + place + " in " + place_at(site));
    }
}

}  // namespace vcuda::emulated
