// Kernels that do what no GPU can do: the emulator, or a sanitizer, must stop each of them.
#include "emulator_case.h"

namespace vcuda {

namespace {

__global__ void missed_barrier_kernel() {
    if (threadIdx.x < 40) {
        __syncthreads();
    } else {
        __syncwarp();
        __syncthreads();
    }
    if (threadIdx.x == 63) __syncwarp();
}

__global__ void returned_lane_kernel(int *out) {
    if (threadIdx.x == 3) return;
    *out = __shfl_sync(kAllLanes, 1, 0);
}

__global__ void unnamed_lane_kernel(int *out) {
    *out = __shfl_sync(threadIdx.x < 16 ? 0xffffu : 0xffffu << 16, 1, 20);
}

__global__ void no_wait_kernel(int *out) {
    *out = 1;
}

__global__ void early_trigger_kernel(int *out) {
    pdl_trigger();
    pdl_wait();
    *out = 1;
}

__global__ void add_kernel(int *value, int addend) {
    pdl_wait();
    atomicAdd(value, addend);
}

// Two values: one that an earlier kernel writes, and one that nobody does.
__global__ void late_wait_kernel(const int *constant, const int *written, int *out, int early) {
    int sum = constant[threadIdx.x];
    if (early != 0) sum += written[threadIdx.x];
    __syncthreads();
    pdl_wait();
    if (early == 0) sum += written[threadIdx.x];
    out[threadIdx.x] = sum;
}

void overlap_chain(int early) {
    Device<int> constant(std::vector<int>(8, 1)), written(std::vector<int>(8, 2)), out(8);
    Launcher to;
    launch(to, add_kernel, 1, 1, 0, written.p, 40);
    to.overlap = true;
    launch(to, late_wait_kernel, 3, 8, 0, constant.p, written.p, out.p, early);
    launch(to, add_kernel, 1, 1, 0, out.p, 100);
    REQUIRE(out.read()[0] == 143 && out.read()[1] == 3);
}

__global__ void overrun_kernel(int *out) {
    out[threadIdx.x] = 1;
}

__global__ void shared_overrun_kernel(int *out) {
    VCUDA_DYNAMIC_SHARED(int, values);
    values[threadIdx.x] = 1;
    *out = values[0];
}

__global__ void fixed_overrun_kernel(int *out) {
    __shared__ int values[8];
    values[threadIdx.x] = 1;
    *out = values[0];
}

template <class... Params, class... Args>
void run_bad(void (*kernel)(Params...), unsigned threads, size_t shared, Args... args) {
    Launcher to;
    launch(to, kernel, 1, threads, shared, args...);
}

void int_case(void (*kernel)(int *), unsigned threads, size_t shared, bool overlap = false) {
    Device<int> out(8);
    Launcher to;
    to.overlap = overlap;
    launch(to, kernel, 1, threads, shared, out.p);
}

}  // namespace

std::vector<Case> mistakes() {
    return {
        {"overlap", [] { overlap_chain(0); }},
        {"bad_missed_barrier", [] { run_bad(missed_barrier_kernel, 64, 0); }},
        {"bad_returned_lane", [] { int_case(returned_lane_kernel, 32, 0); }},
        {"bad_partial_warp", [] { int_case(returned_lane_kernel, 3, 0); }},
        {"bad_unnamed_lane", [] { int_case(unnamed_lane_kernel, 32, 0); }},
        {"bad_no_pdl_wait", [] { int_case(no_wait_kernel, 32, 0, true); }},
        {"bad_early_trigger", [] { int_case(early_trigger_kernel, 32, 0, true); }},
        {"bad_early_read", [] { overlap_chain(1); }},
        {"bad_overrun", [] { int_case(overrun_kernel, 9, 0); }},
        {"bad_shared_overrun", [] { int_case(shared_overrun_kernel, 5, 16); }},
        {"bad_fixed_overrun", [] { int_case(fixed_overrun_kernel, 9, 0); }},
        {"bad_host_access",
         [] {
             Device<int> out(8);
             out.p[0] = 1;
         }},
    };
}

}  // namespace vcuda
