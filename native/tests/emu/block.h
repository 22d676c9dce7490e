// One block of a kernel on the CPU: its threads are fibers of one operating-system thread, which
// take turns and meet at barriers, shuffles and matrix products.
//
// A kernel that would hang or be undefined on a GPU ends the program with a sentence that names the
// kernel, the block and the threads: a barrier that some threads never reach, a shuffle with a lane
// that has returned, a launch with `overlap` whose blocks never call pdl_wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// Of the thread that is running.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;

namespace vcuda::emulated {

// What threads meet for.
enum class Meet {
    none,
    block,
    warp,
    shuffle,
    vote,
    mma_s8,
    mma_bf16,
    mma_f16,
    load_matrix,
    load_matrix_trans,
    barrier,
    wgmma,
    wgmma_fence,
    wgmma_commit,
    wgmma_wait,
};

// Operands: each lane's lie on its own stack and are read and written by the lane that comes last.
struct Exchange {
    uint32_t value;
    int source;  // lane
    uint32_t result;
};
struct Vote {
    bool yes;
    uint32_t ballot;  // of the lanes in the mask
};
struct ProductS8 {
    uint32_t a[4], b[2];
    int c[4];
};
struct Product16 {  // of bfloat16 or float16
    uint32_t a[4], b[2];
    float c[4];
};
struct Matrices {     // 8 x 8, of 16 bits
    const void *row;  // of one of the four matrices
    uint32_t r[4];
};

// __syncthreads: returns when every thread that has not returned is here.
void meet_block();

// Returns when every lane of `mask` is here for the same thing.
void meet(Meet what, uint32_t mask, void *operand);

int lane_id();                    // of the running thread
unsigned char *dynamic_shared();  // of the running block
void note_pdl_wait();
void note_pdl_trigger();

// End the program unless these bytes are shared memory and aligned. For messages: who wants them,
// and where in the kernel (NULL: where this was called).
void check_shared(const void *p, size_t bytes, size_t alignment, const char *what,
                  const void *site = nullptr);

struct Grid {
    const void *kernel = nullptr;
    dim3 grid, block;
    size_t shared = 0;           // bytes of dynamic shared memory
    bool overlap = false;        // a block must call pdl_wait, and no thread pdl_trigger before it
    std::function<void()> body;  // the kernel with its arguments, called once a thread
    // With overlap, or NULL: called with true before a block starts and with false when each of its
    // threads waits in pdl_wait (or for one that does): what lies between them must not touch what
    // the kernel before writes.
    std::function<void(bool)> in_flight;
};

// Run every block. One at a time in the process: the caller holds a lock.
void run_grid(const Grid &grid);

// In which order blocks and ready threads run: 0 rising, 1 falling, else drawn from this seed. What
// depends on the order is a race.
void set_schedule(uint32_t schedule);

}  // namespace vcuda::emulated
