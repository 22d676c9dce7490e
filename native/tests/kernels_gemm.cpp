// gemm() and gemm_gate_up() against plain sums in double precision, with both sets of kernels. Ends
// with 1 when a difference is too large. Runs on the emulated runtime (tests/native_build.py).
#include <cstdio>

#include "gemm_cases.h"
#include "run_test.h"

namespace {

int test() {
    vcuda::tests::Checker check;
    vcuda::Launcher to;
    to.sm_count = 3;  // blocks take several tiles
    CUDA_TRY(cudaStreamCreate(&to.stream));
    for (const auto which : {vcuda::GemmKernels::mma, vcuda::GemmKernels::wgmma}) {
        vcuda::choose_gemm_kernels(which);
        vcuda::prepare_gemm();
        for (const auto &c : vcuda::tests::gemm_cases(false)) run_gemm_case(check, to, c);
    }
    CUDA_TRY(cudaStreamDestroy(to.stream));
    std::printf("%d cases, %d failures, largest error %.2e\n", check.cases, check.failures,
                check.worst);
    return check.failures == 0 ? 0 : 1;
}

}  // namespace

int main() {
    return vcuda::tests::run_test(test);
}
