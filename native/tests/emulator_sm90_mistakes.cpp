// Misuse of the instructions of kernels/ptx_sm90.cuh: the emulator must stop each of these kernels.
#include "emulator_case.h"
#include "ptx_sm90.cuh"

namespace vcuda {

namespace {

__global__ void misaligned_row_kernel(int *out) {
    __shared__ __align__(16) uint16_t rows[32 * 8 + 8];
    uint32_t r[4];
    load_matrix_x4(r, rows + threadIdx.x * 8 + (threadIdx.x == 9 ? 2 : 0));
    *out = static_cast<int>(r[0]);
}

__global__ void row_outside_kernel(int *out) {
    VCUDA_DYNAMIC_SHARED(uint16_t, rows);
    uint32_t r[4];
    load_matrix_x4_trans(r, rows + threadIdx.x * 8);
    *out = static_cast<int>(r[0]);
}

__global__ void misaligned_copy_kernel(int *out) {
    VCUDA_DYNAMIC_SHARED(unsigned char, stage);
    copy_async_16(stage + 8, out, true);
    copy_async_commit();
    copy_async_wait<0>();
}

__global__ void copy_overrun_kernel(int *out) {
    VCUDA_DYNAMIC_SHARED(unsigned char, stage);
    copy_async_16(stage, out + 8, true);
    copy_async_commit();
    copy_async_wait<0>();
}

__global__ void unwaited_copy_kernel(int *out) {
    VCUDA_DYNAMIC_SHARED(unsigned char, stage);
    copy_async_16(stage, out, true);
    copy_async_wait<0>();  // no commit before it: waits for nothing
}

// ------------------------------------------------------------------------------------- barriers

// Each of these kernels does one thing wrong and the rest as one should.
enum class Wrong {
    nothing,
    not_made,
    made_twice,
    not_announced,
    not_met,
    overwritten,
    no_arrivals,
    one_arrival_more,
    too_few_bytes,
    too_many_bytes,
    odd_bytes,
    odd_address,
    outside,
    overrun,
    not_waited,
    other_parity,
    missed_phase,
    written_under_way,
    copied_twice,
};

template <Wrong kWrong>
__global__ void barrier_kernel(int *in) {
    VCUDA_DYNAMIC_SHARED(unsigned char, stage);
    __shared__ uint64_t full;
    const auto wrong = [](Wrong w) { return w == kWrong; };
    const bool first = threadIdx.x == 0;
    if (first && !wrong(Wrong::not_made)) {
        barrier_init(&full, wrong(Wrong::no_arrivals) ? 0 : 1);
        if (wrong(Wrong::made_twice)) barrier_init(&full, 1);
        if (!wrong(Wrong::not_announced)) barrier_init_done();
    }
    if (!wrong(Wrong::not_met)) __syncthreads();
    if (first) {
        if (wrong(Wrong::overwritten)) full = 0;
        const uint32_t bytes = wrong(Wrong::odd_bytes) ? 24 : wrong(Wrong::overrun) ? 48 : 32;
        barrier_expect(&full, wrong(Wrong::too_few_bytes)    ? 16
                              : wrong(Wrong::too_many_bytes) ? 48
                                                             : bytes);
        if (wrong(Wrong::one_arrival_more)) barrier_arrive(&full);
        copy_bulk(stage + (wrong(Wrong::odd_address) ? 4
                           : wrong(Wrong::outside)   ? 48
                                                     : 0),
                  in, bytes, &full);
        if (wrong(Wrong::written_under_way)) stage[20] = 1;
        if (wrong(Wrong::copied_twice)) copy_async_16(stage + 16, in, true);
    }
    if (wrong(Wrong::not_waited)) return;
    barrier_wait(&full, wrong(Wrong::other_parity) ? 1 : 0);
    if (wrong(Wrong::missed_phase) && first) {
        barrier_arrive(&full);
        barrier_arrive(&full);
    }
    if (wrong(Wrong::missed_phase) && threadIdx.x == 1) barrier_wait(&full, 1);
    if (wrong(Wrong::other_parity)) {
        __syncthreads();
        barrier_wait(&full, 0);
        barrier_wait(&full, 1);
    }
}

// ------------------------------------------------------------------------------------- a warpgroup

enum class Group {
    nothing,
    not_fenced,
    not_committed,
    not_waited,
    other_rows,
    other_warp,
    fewer_products,
    absent_warp,
    odd_rows,
    rows_outside,
    no_proxy_fence,
    copy_not_waited,
    copied_over,
    sums_written,
};

template <Group kWrong>
__global__ void group_kernel(int *in) {
    VCUDA_DYNAMIC_SHARED(unsigned char, rows);  // two operands of 8 rows
    __shared__ uint64_t full;
    const auto wrong = [](Group w) { return w == kWrong; };
    const unsigned tid = threadIdx.x;
    if (tid == 0) {
        barrier_init(&full, 1);
        barrier_init_done();
        barrier_expect(&full, 1024);
        copy_bulk(rows, in, 1024, &full);
    }
    rows[1024 + tid * 8] = 1;
    if (!wrong(Group::no_proxy_fence)) proxy_fence_shared();
    __syncthreads();
    if (!wrong(Group::copy_not_waited)) barrier_wait(&full, 0);

    if (wrong(Group::absent_warp) && tid >= 96) return;
    const uint32_t a[4] = {};
    float sums[4] = {};
    if (!wrong(Group::not_fenced)) wgmma_fence();
    const unsigned char *b = rows;
    if (wrong(Group::other_rows) && tid == 5) b += 32;
    if (wrong(Group::other_warp) && tid / 32 == 2) b += 32;
    if (wrong(Group::odd_rows)) b += 16;
    if (wrong(Group::rows_outside)) b += 2048;
    if (wrong(Group::no_proxy_fence)) b += 1024;
    wgmma_f16<8>(sums, a, b);
    if (!(wrong(Group::fewer_products) && tid / 32 == 1)) wgmma_f16<8>(sums, a, rows + 64);
    if (!wrong(Group::not_committed)) wgmma_commit();
    if (wrong(Group::fewer_products) && tid / 32 != 1) {
        wgmma_fence();
        wgmma_commit();
    }
    if (wrong(Group::copied_over) && tid == 127) {
        barrier_expect(&full, 16);
        copy_bulk(rows + 512, in, 16, &full);
    }
    if (wrong(Group::sums_written) && tid == 9) sums[2] = 0.0f;
    if (!wrong(Group::not_waited)) wgmma_wait<0>();
    if (wrong(Group::copied_over)) barrier_wait(&full, 1);
    if (sums[0] == 1e9f) *in = 1;
}

void bad(void (*kernel)(int *), unsigned threads, size_t shared) {
    Device<int> out(8);
    Launcher to;
    launch(to, kernel, 1, threads, shared, out.p);
}

template <Wrong kWrong>
void barrier_case() {
    bad(barrier_kernel<kWrong>, 64, 64);
}

template <Group kWrong>
void group_case() {
    Device<int> in(256);
    Launcher to;
    launch(to, group_kernel<kWrong>, 1, 128, 2048, in.p);
}

}  // namespace

std::vector<Case> sm90_mistakes() {
    return {
        {"bad_misaligned_row", [] { bad(misaligned_row_kernel, 32, 0); }},
        {"bad_row_outside", [] { bad(row_outside_kernel, 32, 31 * 16); }},
        {"bad_misaligned_copy", [] { bad(misaligned_copy_kernel, 1, 64); }},
        {"bad_copy_overrun", [] { bad(copy_overrun_kernel, 1, 64); }},
        {"bad_unwaited_copy", [] { bad(unwaited_copy_kernel, 1, 64); }},
        {"barrier_used_well", barrier_case<Wrong::nothing>},
        {"group_used_well", group_case<Group::nothing>},
        {"bad_barrier_not_made", barrier_case<Wrong::not_made>},
        {"bad_barrier_made_twice", barrier_case<Wrong::made_twice>},
        {"bad_barrier_not_announced", barrier_case<Wrong::not_announced>},
        {"bad_barrier_not_met", barrier_case<Wrong::not_met>},
        {"bad_barrier_overwritten", barrier_case<Wrong::overwritten>},
        {"bad_barrier_no_arrivals", barrier_case<Wrong::no_arrivals>},
        {"bad_barrier_one_arrival_more", barrier_case<Wrong::one_arrival_more>},
        {"bad_barrier_too_few_bytes", barrier_case<Wrong::too_few_bytes>},
        {"bad_barrier_too_many_bytes", barrier_case<Wrong::too_many_bytes>},
        {"bad_barrier_odd_bytes", barrier_case<Wrong::odd_bytes>},
        {"bad_barrier_odd_address", barrier_case<Wrong::odd_address>},
        {"bad_barrier_outside", barrier_case<Wrong::outside>},
        {"bad_barrier_overrun", barrier_case<Wrong::overrun>},
        {"bad_barrier_not_waited", barrier_case<Wrong::not_waited>},
        {"bad_barrier_other_parity", barrier_case<Wrong::other_parity>},
        {"bad_barrier_missed_phase", barrier_case<Wrong::missed_phase>},
        {"bad_barrier_written_under_way", barrier_case<Wrong::written_under_way>},
        {"bad_barrier_copied_twice", barrier_case<Wrong::copied_twice>},
        {"bad_group_not_fenced", group_case<Group::not_fenced>},
        {"bad_group_not_committed", group_case<Group::not_committed>},
        {"bad_group_not_waited", group_case<Group::not_waited>},
        {"bad_group_other_rows", group_case<Group::other_rows>},
        {"bad_group_other_warp", group_case<Group::other_warp>},
        {"bad_group_fewer_products", group_case<Group::fewer_products>},
        {"bad_group_absent_warp", group_case<Group::absent_warp>},
        {"bad_group_odd_rows", group_case<Group::odd_rows>},
        {"bad_group_rows_outside", group_case<Group::rows_outside>},
        {"bad_group_no_proxy_fence", group_case<Group::no_proxy_fence>},
        {"bad_group_copy_not_waited", group_case<Group::copy_not_waited>},
        {"bad_group_copied_over", group_case<Group::copied_over>},
        {"bad_group_sums_written", group_case<Group::sums_written>},
    };
}

}  // namespace vcuda
