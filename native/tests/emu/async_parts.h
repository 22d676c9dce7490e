// What the parts of async.h tell each other and block.cpp. Not for kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace vcuda::emulated {

// ------------------------------------------------------------------------------------- copies

struct Copy {
    unsigned char *to;
    const unsigned char *from;  // NULL: zeros
    size_t bytes;
    const void *site;  // where in the kernel
    const char *name;
};

void start(const Copy &copy);  // checks it, and makes its destination unreadable
void finish(const Copy &copy);

inline bool overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes) {
    const auto x = reinterpret_cast<uintptr_t>(a), y = reinterpret_cast<uintptr_t>(b);
    return x < y + b_bytes && y < x + a_bytes;
}

// ------------------------------------------------------------------------------------- barriers

// A copy_bulk into some of these bytes that no thread has waited for yet, or NULL.
const Copy *bulk_under_way(const void *p, size_t bytes);

// May the tensor cores read these bytes, whole lines of 128: did copy_bulk write them, or nobody,
// or was there a proxy fence in the block?
bool tensor_cores_see(const void *p, size_t bytes);

// What a barrier still waits for.
std::string barrier_state(const void *b);

// ------------------------------------------------------------------------------------- products

// Where a product that reads some of these bytes was started and is not waited for; or NULL.
const void *product_reads(const void *p, size_t bytes);

// For meet(): the lanes of a warp are here. `operands`: GroupProduct; the groups that may stay.
void wgmma_start(unsigned warp, void *const (&operands)[32], const void *site);
void wgmma_fence(unsigned warp);
void wgmma_commit(unsigned warp);
void wgmma_wait(unsigned warp, size_t under_way);

// ------------------------------------------------------------------------------------- blocks

// A thread returns; all have.
void async_leave(unsigned thread);
void async_end();
void barriers_end();
void products_leave(unsigned thread);
void products_end();

}  // namespace vcuda::emulated
