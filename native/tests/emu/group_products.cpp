// The matrix products of a warpgroup.
#include <algorithm>
#include <cstring>
#include <deque>
#include <list>
#include <string>
#include <vector>

#include "async.h"
#include "async_parts.h"
#include "emulate.h"
#include "machine.h"
#include "where.h"

namespace vcuda::emulated {

namespace {

constexpr unsigned kWarpsOfGroup = 4;
constexpr unsigned kWarps = kMostThreads / kLanes;
constexpr size_t kRow = 128;            // bytes of a row of b
constexpr size_t kSwizzled = 8 * kRow;  // the pattern repeats after so many bytes
constexpr unsigned kK = 16;
constexpr unsigned kColumnsOfBlock = 64;  // of a b whose rows are along k

// The registers of a warp that products add to. While some are under way their sums are here and
// the registers are NaN.
struct Sums {
    float *c[kLanes];
    size_t each;  // floats of a lane
    size_t under_way;
    std::vector<float> values;  // [lane][each]
};

// One warp's part, 16 rows, of a product that was started.
struct Product {
    bool f16;
    unsigned columns;
    const unsigned char *b;  // as the kernel gave it
    bool first;              // see GroupProduct
    size_t block_bytes;
    const void *site;
    size_t number;  // of the warp's products in this block
    uint32_t a[kLanes][4];
    Sums *sums;
};

struct WarpProducts {
    std::deque<Product> under_way;
    std::deque<size_t> groups;  // products of each committed group, the oldest first
    size_t open = 0;            // products that are in no group yet
    size_t started = 0;         // in this block
    bool fenced = false;        // since the last commit
    std::list<Sums> sums;
};

// What the four warps must agree on.
struct Shape {
    bool f16;
    unsigned columns;
    const unsigned char *b;
    bool first;
    size_t block_bytes;

    bool operator!=(const Shape &o) const {
        return f16 != o.f16 || columns != o.columns || b != o.b || first != o.first ||
               block_bytes != o.block_bytes;
    }
};

struct Group {
    std::vector<Shape> shapes;  // of every product so far
    std::vector<unsigned> waiting;
};

struct Products {
    WarpProducts warps[kWarps];
    Group groups[kWarps / kWarpsOfGroup];
    bool used = false;
};

Products &products() {
    static Products &one = *new Products;
    return one;
}

const unsigned char *base_of(const unsigned char *b) {
    return b - reinterpret_cast<uintptr_t>(b) % kSwizzled;
}

// A stretch of shared memory that a product reads.
struct Stretch {
    const unsigned char *from;
    size_t bytes;
};

std::vector<Stretch> stretches(const Product &p) {
    if (p.block_bytes == 0) return {{base_of(p.b), p.columns * kRow}};
    std::vector<Stretch> all;
    for (unsigned block = 0; block < p.columns / kColumnsOfBlock; ++block) {
        all.push_back({p.b + block * p.block_bytes, kK * kRow});
    }
    return all;
}

Sums &sums_of(WarpProducts &w, void *const (&operands)[32], size_t each) {
    const auto c_of = [&](unsigned lane) {
        return static_cast<const GroupProduct *>(operands[lane])->c;
    };
    for (Sums &s : w.sums) {
        if (s.c[0] == c_of(0) && s.each == each) return s;
    }
    w.sums.push_back({});
    Sums &s = w.sums.back();
    s.each = each;
    s.under_way = 0;
    s.values.resize(kLanes * each);
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        s.c[lane] = c_of(lane);
        std::memcpy(&s.values[lane * each], s.c[lane], each * sizeof(float));
        std::memset(s.c[lane], 0xff, each * sizeof(float));
    }
    return s;
}

void give_back(WarpProducts &w, const Product &p) {
    const Sums &s = *p.sums;
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        const auto *bytes = reinterpret_cast<const unsigned char *>(s.c[lane]);
        const size_t n = s.each * sizeof(float);
        if (std::any_of(bytes, bytes + n, [](unsigned char byte) { return byte != 0xff; })) {
            fail(text("lane %u wrote to the accumulators of the wgmma in ", lane) +
                 place_at(p.site) + " before it waited for it");
        }
        std::memcpy(s.c[lane], &s.values[lane * s.each], n);
    }
    w.sums.remove_if([&](const Sums &other) { return &other == &s; });
}

float value_of(bool f16, uint32_t bits) {
    return f16 ? half_value(bits) : __uint_as_float(bits << 16);
}

// Columns 8 block .. of b.
void load_columns(const Product &p, unsigned block, float (&b)[kK][8]) {
    uint16_t chunk[8];
    if (p.block_bytes != 0) {
        constexpr unsigned chunks = kColumnsOfBlock / 8;
        const unsigned char *rows = p.b + block / chunks * p.block_bytes;
        for (unsigned k = 0; k < kK; ++k) {
            std::memcpy(chunk, rows + k * kRow + ((block % chunks) ^ (k % 8)) * 16, 16);
            for (unsigned n = 0; n < 8; ++n) b[k][n] = value_of(p.f16, chunk[n]);
        }
        return;
    }
    const unsigned char *base = base_of(p.b);
    const auto first = static_cast<size_t>(p.b - base) / 16;  // chunk of row 0
    for (unsigned n = 0; n < 8; ++n) {
        const unsigned char *row = base + (8 * block + n) * kRow;
        for (unsigned half = 0; half < 2; ++half) {
            std::memcpy(chunk, row + ((first + half) ^ n) * 16, 16);
            for (unsigned i = 0; i < 8; ++i) b[8 * half + i][n] = value_of(p.f16, chunk[i]);
        }
    }
}

// sums [16][columns] += a [16][16] * b [16][columns]. Products and their sums in float64, rounded
// to float32 once: the tensor cores keep less, in an order that nobody has written down.
void multiply(const Product &p) {
    float a[16][kK];
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        const unsigned g = lane / 4, t = lane % 4;
        for (unsigned word = 0; word < 4; ++word) {
            float *to = &a[g + 8 * (word % 2)][2 * t + 8 * (word / 2)];
            to[0] = value_of(p.f16, p.a[lane][word] & 0xffffu);
            to[1] = value_of(p.f16, p.a[lane][word] >> 16);
        }
    }
    if (p.first) std::fill(p.sums->values.begin(), p.sums->values.end(), 0.0f);
    for (unsigned block = 0; block < p.columns / 8; ++block) {
        float b[kK][8];
        load_columns(p, block, b);
        for (unsigned r = 0; r < 16; ++r) {
            double sum[8] = {};
            for (unsigned k = 0; k < kK; ++k) {
                const double left = a[r][k];
                for (unsigned n = 0; n < 8; ++n) sum[n] += left * b[k][n];
            }
            for (unsigned n = 0; n < 8; ++n) {
                const unsigned lane = r % 8 * 4 + n / 2;
                float &to = p.sums->values[lane * p.sums->each + 4 * block + r / 8 * 2 + n % 2];
                to = static_cast<float>(to + sum[n]);
            }
        }
    }
}

Shape shape_of(const GroupProduct &p) {
    return {p.f16, static_cast<unsigned>(p.columns), static_cast<const unsigned char *>(p.b),
            p.first, p.block_bytes};
}

void check_start(unsigned warp, const Product &p, void *const (&operands)[32]) {
    Products &all = products();
    const unsigned group = warp / kWarpsOfGroup;
    if ((group + 1) * kWarpsOfGroup * kLanes > machine().count) {
        fail(text("warp %u starts wgmma, and its warpgroup has not all four warps, in ", warp) +
             place_at(p.site));
    }
    const auto &lane0 = *static_cast<const GroupProduct *>(operands[0]);
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        const auto &other = *static_cast<const GroupProduct *>(operands[lane]);
        if (shape_of(other) != shape_of(lane0)) {
            fail(text("lanes 0 and %u of warp %u start different products with wgmma in ", lane,
                      warp) +
                 place_at(p.site));
        }
    }
    const auto offset = static_cast<size_t>(p.b - base_of(p.b));
    if (offset % 32 != 0 || offset >= kRow || (p.block_bytes != 0 && offset != 0)) {
        fail("wgmma needs rows at an address aligned to 1024 bytes" +
             std::string(p.block_bytes != 0 ? "" : ", or 32, 64 or 96 bytes behind one") +
             ", and gets " + shared_place(p.b, 1) + " in " + place_at(p.site));
    }
    for (const Stretch &s : stretches(p)) {
        check_shared(s.from, s.bytes, kSwizzled, "wgmma", p.site);
        if (const Copy *copy = bulk_under_way(s.from, s.bytes)) {
            fail("wgmma in " + place_at(p.site) + " reads " + shared_place(s.from, s.bytes) +
                 ", and nobody has waited for the copy_bulk in " + place_at(copy->site) + " to it");
        }
        if (!tensor_cores_see(s.from, s.bytes)) {
            fail("wgmma in " + place_at(p.site) + " reads " + shared_place(s.from, s.bytes) +
                 ", which threads wrote, and none called proxy_fence_shared");
        }
    }
    if (!all.warps[warp].fenced) {
        fail(text("warp %u starts wgmma without a wgmma_fence since its last wgmma_commit, in ",
                  warp) +
             place_at(p.site));
    }
    std::vector<Shape> &shapes = all.groups[group].shapes;
    if (p.number == shapes.size()) shapes.push_back(shape_of(lane0));
    if (shapes[p.number] != shape_of(lane0)) {
        fail(text("warp %u starts another product than the warps of its warpgroup before it, with "
                  "wgmma in ",
                  warp) +
             place_at(p.site));
    }
}

}  // namespace

void wgmma_start(unsigned warp, void *const (&operands)[32], const void *site) {
    Products &all = products();
    all.used = true;
    WarpProducts &w = all.warps[warp];
    const auto &lane0 = *static_cast<const GroupProduct *>(operands[0]);
    Product p{};
    p.f16 = lane0.f16;
    p.columns = static_cast<unsigned>(lane0.columns);
    p.b = static_cast<const unsigned char *>(lane0.b);
    p.first = lane0.first;
    p.block_bytes = lane0.block_bytes;
    p.site = site;
    p.number = w.started;
    check_start(warp, p, operands);
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        std::memcpy(p.a[lane], static_cast<const GroupProduct *>(operands[lane])->a, 16);
    }
    p.sums = &sums_of(w, operands, p.columns / 2);
    p.sums->under_way += 1;
    w.under_way.push_back(p);
    w.open += 1;
    w.started += 1;
    Group &group = all.groups[warp / kWarpsOfGroup];
    for (const unsigned thread : group.waiting) resume(thread);
    group.waiting.clear();
}

void wgmma_fence(unsigned warp) {
    products().warps[warp].fenced = true;
}

void wgmma_commit(unsigned warp) {
    WarpProducts &w = products().warps[warp];
    w.groups.push_back(w.open);
    w.open = 0;
    w.fenced = false;
}

void wgmma_wait_others(size_t under_way) {
    Products &all = products();
    const unsigned warp = machine().current->id / kLanes;
    const WarpProducts &w = all.warps[warp];
    Group &group = all.groups[warp / kWarpsOfGroup];
    size_t done = w.started - w.under_way.size();  // and those of the groups that are waited for
    for (size_t i = 0; i + under_way < w.groups.size(); ++i) done += w.groups[i];
    const WarpProducts *first = &all.warps[warp / kWarpsOfGroup * kWarpsOfGroup];
    while (std::any_of(first, first + kWarpsOfGroup,
                       [&](const WarpProducts &other) { return other.started < done; })) {
        group.waiting.push_back(machine().current->id);
        pause(Meet::wgmma_wait, nullptr, __builtin_return_address(0));
    }
}

void wgmma_wait(unsigned warp, size_t under_way) {
    WarpProducts &w = products().warps[warp];
    while (w.groups.size() > under_way) {
        for (size_t n = w.groups.front(); n > 0; --n) {
            const Product &p = w.under_way.front();
            multiply(p);
            if (--p.sums->under_way == 0) give_back(w, p);
            w.under_way.pop_front();
        }
        w.groups.pop_front();
    }
}

const void *product_reads(const void *p, size_t bytes) {
    if (!products().used) return nullptr;
    for (const WarpProducts &w : products().warps) {
        for (const Product &one : w.under_way) {
            for (const Stretch &s : stretches(one)) {
                if (overlap(s.from, s.bytes, p, bytes)) return one.site;
            }
        }
    }
    return nullptr;
}

void products_leave(unsigned thread) {
    if (!products().used) return;
    const WarpProducts &w = products().warps[thread / kLanes];
    if (w.under_way.empty()) return;
    fail(text("thread %u returns with %u products under way", thread,
              static_cast<unsigned>(w.under_way.size())) +
         (w.open > 0 ? " that it did not commit" : " that it did not wait for") + ", of wgmma in " +
         place_at(w.under_way.back().site));
}

void products_end() {
    Products &all = products();
    if (!all.used) return;
    for (unsigned warp = 0; warp < kWarps; ++warp) {
        const size_t others = all.groups[warp / kWarpsOfGroup].shapes.size();
        if (all.warps[warp].started != others) {
            fail(
                text("warp %u started %u products with wgmma, and another warp of its warpgroup "
                     "%u",
                     warp, static_cast<unsigned>(all.warps[warp].started),
                     static_cast<unsigned>(others)));
        }
    }
    for (WarpProducts &w : all.warps) w = {};
    for (Group &g : all.groups) g = {};
    all.used = false;
}

}  // namespace vcuda::emulated
