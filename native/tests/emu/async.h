// What goes on beside the threads of a block: copies into shared memory, the barriers that tell of
// them, the matrix products of a warpgroup. A mistake ends the program as those of block.h do.
//
// A copy fills its destination with 0xFF bytes when it is started and brings the data when a thread
// goes on that waited for it, no sooner. A product sets its accumulators to NaN when it is
// started, and reads its operand from shared memory when its warp waits for it, no sooner. So a
// kernel that reads too early, and one that writes where others still read, come to wrong numbers
// here every time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vcuda::emulated {

// cp.async of 16 bytes, of zeros when not `inside`; done when the thread waits for its group.
void copy_async(void *shared, const void *global, bool inside);
void copy_async_commit();
void copy_async_wait(size_t under_way);  // until no more than so many groups are

// mbarrier. A phase ends when all arrivals, and all bytes that were announced, have come; a thread
// waits while the phase that goes on has the parity it names.
void barrier_init(uint64_t *b, int arrivals);
void barrier_init_done();
void barrier_expect(uint64_t *b, uint32_t bytes);
void barrier_arrive(uint64_t *b);
void barrier_wait(uint64_t *b, int parity);
void copy_bulk(void *shared, const void *global, uint32_t bytes, uint64_t *b);
void proxy_fence();

// wgmma m64nNk16 with A in registers. What a lane gives; all lanes of the warp meet for it.
struct GroupProduct {
    bool f16;       // else bfloat16
    int columns;    // N
    const void *b;  // N rows of 128 bytes
    const uint32_t *a;
    float *c;
    bool first = false;      // c is what this product makes: nothing was there before
    size_t block_bytes = 0;  // not 0: 16 rows along k, of 64 columns; so far on the next 64
};
void wgmma_wait_others(size_t under_way);  // until the group's other warps have started them too

}  // namespace vcuda::emulated
