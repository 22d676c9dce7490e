// The emulated device against kernels made by hand. `emulator_cases NAME` runs one case and ends
// with 0 when it holds; those whose names begin with bad_ must be stopped by the emulator.
// tests/contract/test_emulator.py runs them all.
#include "emulator_case.h"

#include <cstring>

namespace vcuda {

namespace {

uint32_t random_word() {
    static uint32_t state = 12345;
    state = state * 1664525u + 1013904223u;
    return state ^ (state >> 15);
}

// ------------------------------------------------------------------------------------- barriers

// out[block] = sum over the block's threads of (thread + 1), by a tree in shared memory.
__global__ void tree_sum_kernel(int *out) {
    __shared__ int parts[256];
    const int tid = static_cast<int>(threadIdx.x);
    parts[tid] = tid + 1;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (tid < half) parts[tid] += parts[tid + half];
        __syncthreads();
    }
    if (tid == 0) out[blockIdx.x] = parts[0];
}

void barriers() {
    for (uint32_t schedule : {0u, 1u, 77u}) {
        fake_schedule(schedule);
        Device<int> out(5);
        Launcher to;
        launch(to, tree_sum_kernel, 5, 256, 0, out.p);
        for (int sum : out.read()) REQUIRE(sum == 256 * 257 / 2);
        REQUIRE(to.launches == 1);
    }
}

// A thread may return before a barrier that the others meet at.
__global__ void early_return_kernel(int *out) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    if (threadIdx.x % 2 == 1) return;
    atomicAdd(&count, 1);
    __syncthreads();
    if (threadIdx.x == 0) *out = count;
}

void early_return() {
    Device<int> out(1);
    Launcher to;
    launch(to, early_return_kernel, 1, 96, 0, out.p);
    REQUIRE(out.read()[0] == 48);
}

__global__ void index_kernel(unsigned *out) {
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] =
        blockIdx.x + 10 * blockIdx.y + 100 * blockIdx.z + 1000 * threadIdx.x + 10000 * threadIdx.y +
        100000 * threadIdx.z;
}

void indices() {
    Device<unsigned> out(2 * 3 * 4 * 5 * 6 * 7);
    Launcher to;
    launch(to, index_kernel, dim3(2, 3, 4), dim3(5, 6, 7), 0, out.p);
    const auto seen = out.read();
    size_t i = 0;
    for (unsigned bz = 0; bz < 4; ++bz)
        for (unsigned by = 0; by < 3; ++by)
            for (unsigned bx = 0; bx < 2; ++bx)
                for (unsigned tz = 0; tz < 7; ++tz)
                    for (unsigned ty = 0; ty < 6; ++ty)
                        for (unsigned tx = 0; tx < 5; ++tx)
                            REQUIRE(seen[i++] ==
                                    bx + 10 * by + 100 * bz + 1000 * tx + 10000 * ty + 100000 * tz);
}

// ------------------------------------------------------------------------------------- warps

__global__ void shuffle_kernel(int *out) {
    const int lane = static_cast<int>(threadIdx.x);
    int *mine = out + lane * 8;
    mine[0] = __shfl_sync(kAllLanes, lane * 3, 5);
    mine[1] = __shfl_sync(kAllLanes, lane * 3, lane + 1);  // wraps around
    mine[2] = __shfl_xor_sync(kAllLanes, lane, 9);
    mine[3] = __shfl_down_sync(kAllLanes, lane, 3);
    mine[4] = __shfl_up_sync(kAllLanes, lane, 3);
    mine[5] = __shfl_xor_sync(kAllLanes, lane, 4, 8);
    mine[6] = __shfl_sync(kAllLanes, lane, 2, 8);
    const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;  // the halves on their own
    mine[7] = lane < 16 ? __shfl_xor_sync(half, lane, 1) : __shfl_xor_sync(half, lane, 2);
}

void shuffles() {
    Device<int> out(32 * 8);
    Launcher to;
    launch(to, shuffle_kernel, 1, 32, 0, out.p);
    const auto seen = out.read();
    for (int lane = 0; lane < 32; ++lane) {
        const int *mine = &seen[static_cast<size_t>(lane) * 8];
        REQUIRE(mine[0] == 15);
        REQUIRE(mine[1] == (lane + 1) % 32 * 3);
        REQUIRE(mine[2] == (lane ^ 9));
        REQUIRE(mine[3] == (lane < 29 ? lane + 3 : lane));
        REQUIRE(mine[4] == (lane >= 3 ? lane - 3 : lane));
        REQUIRE(mine[5] == (lane ^ 4));
        REQUIRE(mine[6] == lane / 8 * 8 + 2);
        REQUIRE(mine[7] == (lane ^ (lane < 16 ? 1 : 2)));
    }
}

__global__ void vote_kernel(unsigned *out, float *sums) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    unsigned *mine = out + threadIdx.x * 3;
    mine[0] = __ballot_sync(kAllLanes, lane % 3 == 0);
    mine[1] = static_cast<unsigned>(__any_sync(kAllLanes, lane == 7)) +
              2u * static_cast<unsigned>(__any_sync(kAllLanes, 0));
    mine[2] = static_cast<unsigned>(__all_sync(kAllLanes, 1)) +
              2u * static_cast<unsigned>(__all_sync(kAllLanes, lane != 7));
    __shared__ float scratch[4];
    sums[threadIdx.x * 3] = warp_sum(static_cast<float>(lane));
    sums[threadIdx.x * 3 + 1] = warp_max(static_cast<float>((lane * 7) % 32));
    sums[threadIdx.x * 3 + 2] = block_sum(1.5f, scratch);
}

void votes() {
    Device<unsigned> out(128 * 3);
    Device<float> sums(128 * 3);
    Launcher to;
    launch(to, vote_kernel, 1, 128, 0, out.p, sums.p);
    for (size_t i = 0; i < 128; ++i) {
        REQUIRE(out.read()[i * 3] == 0x49249249u);
        REQUIRE(out.read()[i * 3 + 1] == 1);
        REQUIRE(out.read()[i * 3 + 2] == 1);
        REQUIRE(sums.read()[i * 3] == 496.0f);
        REQUIRE(sums.read()[i * 3 + 1] == 31.0f);
        REQUIRE(sums.read()[i * 3 + 2] == 192.0f);
    }
}

// ------------------------------------------------------------------------------------- products

// c [16][8] = a [16][32] * b [32][8] + c, each lane taking its fragments from plain matrices.
__global__ void product_s8_kernel(const int8_t *a, const int8_t *b, int *c) {
    const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
    uint32_t fa[4], fb[2];
    for (int word = 0; word < 4; ++word) {
        const int row = g + 8 * (word % 2), k = 4 * t + 16 * (word / 2);
        std::memcpy(&fa[word], a + row * 32 + k, 4);
    }
    for (int word = 0; word < 2; ++word) {
        fb[word] = 0;
        for (int i = 0; i < 4; ++i) {
            const auto byte = static_cast<uint8_t>(b[(16 * word + 4 * t + i) * 8 + g]);
            fb[word] |= static_cast<uint32_t>(byte) << (8 * i);
        }
    }
    int fc[4];
    for (int i = 0; i < 4; ++i) fc[i] = c[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2];
    mma_s8(fc, fa, fb[0], fb[1]);
    for (int i = 0; i < 4; ++i) c[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = fc[i];
}

__global__ void product_bf16_kernel(const uint16_t *a, const uint16_t *b, float *c) {
    const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
    uint32_t fa[4], fb[2];
    for (int word = 0; word < 4; ++word) {
        const int row = g + 8 * (word % 2), k = 2 * t + 8 * (word / 2);
        fa[word] = a[row * 16 + k] | static_cast<uint32_t>(a[row * 16 + k + 1]) << 16;
    }
    for (int word = 0; word < 2; ++word) {
        const int k = 2 * t + 8 * word;
        fb[word] = b[k * 8 + g] | static_cast<uint32_t>(b[(k + 1) * 8 + g]) << 16;
    }
    float fc[4];
    for (int i = 0; i < 4; ++i) fc[i] = c[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2];
    mma_bf16(fc, fa, fb[0], fb[1]);
    for (int i = 0; i < 4; ++i) c[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = fc[i];
}

void products() {
    std::vector<int8_t> a8(16 * 32), b8(32 * 8);
    std::vector<int> c8(16 * 8);
    for (auto &v : a8) v = static_cast<int8_t>(random_word());
    for (auto &v : b8) v = static_cast<int8_t>(random_word());
    for (auto &v : c8) v = static_cast<int>(random_word() % 2001) - 1000;
    Launcher to;
    Device<int8_t> da(a8), db(b8);
    Device<int> dc(c8);
    launch(to, product_s8_kernel, 1, 32, 0, da.p, db.p, dc.p);
    const auto seen8 = dc.read();
    for (size_t r = 0; r < 16; ++r) {
        for (size_t n = 0; n < 8; ++n) {
            int sum = c8[r * 8 + n];
            for (size_t k = 0; k < 32; ++k) sum += a8[r * 32 + k] * b8[k * 8 + n];
            REQUIRE(seen8[r * 8 + n] == sum);
        }
    }

    std::vector<uint16_t> a16(16 * 16), b16(16 * 8);
    std::vector<float> c16(16 * 8);
    const auto small = [] {
        return static_cast<float>(static_cast<int>(random_word() % 255) - 127);
    };
    for (auto &v : a16) v = static_cast<uint16_t>(bf16_bits(small()));
    for (auto &v : b16) v = static_cast<uint16_t>(bf16_bits(small() / 64));
    for (auto &v : c16) v = small();
    Device<uint16_t> ea(a16), eb(b16);
    Device<float> ec(c16);
    launch(to, product_bf16_kernel, 1, 32, 0, ea.p, eb.p, ec.p);
    const auto seen16 = ec.read();
    for (size_t r = 0; r < 16; ++r) {
        for (size_t n = 0; n < 8; ++n) {
            float sum = c16[r * 8 + n];  // small integers over 64: exact in any order
            for (size_t k = 0; k < 16; ++k) {
                sum += bf16_value(a16[r * 16 + k]) * bf16_value(b16[k * 8 + n]);
            }
            REQUIRE(seen16[r * 8 + n] == sum);
        }
    }
}

void intrinsics() {
    REQUIRE(__dp4a(0x7f80ff01, 0x02030405, 7) == 7 + 127 * 2 - 128 * 3 - 4 + 5);
    REQUIRE(__dp4a(0xff000001u, 0x02000003u, 1u) == 1 + 510 + 3);
    REQUIRE(__byte_perm(0x33221100u, 0x77665544u, 0x7250u) == 0x77225500u);
    REQUIRE(__byte_perm(0x80000000u, 0x0000007fu, 0xc3bbu) == 0x0080ffffu);
    REQUIRE(__float2int_rn(2.5f) == 2 && __float2int_rn(-3.5f) == -4 && __float2int_rn(3e9f) > 0);
    REQUIRE(__clz(0) == 32 && __clz(1) == 31 && __ffs(0) == 0 && __ffs(8) == 4 && __popc(7) == 3);
    REQUIRE(rsqrtf(4.0f) == 0.5f && __fdiv_rn(1.0f, 4.0f) == 0.25f && __frcp_rn(8.0f) == 0.125f);
    int i = 5;
    unsigned u = 5;
    REQUIRE(atomicAdd(&i, -7) == 5 && i == -2 && atomicMax(&i, 3) == -2 && i == 3);
    REQUIRE(atomicOr(&u, 8u) == 5 && u == 13 && atomicExch(&u, 1u) == 13 && u == 1);
}

// All float16 as float32, then float32 values from stdin as float16: checked against NumPy.
void half() {
    std::vector<float> values(65536);
    for (uint32_t bits = 0; bits < 65536; ++bits) values[bits] = half_value(bits);
    std::fwrite(values.data(), sizeof(float), values.size(), stdout);
    float v = 0;
    while (std::fread(&v, sizeof v, 1, stdin) == 1) {
        const auto bits = static_cast<uint16_t>(half_bits(v));
        std::fwrite(&bits, sizeof bits, 1, stdout);
    }
}

// ------------------------------------------------------------------------------------- memory

template <int kWords>
__global__ void read_shared_kernel(uint32_t *out) {
    __shared__ uint32_t fixed[kWords];
    VCUDA_DYNAMIC_SHARED(uint32_t, dynamic);
    out[blockIdx.x * 2] = fixed[3];
    out[blockIdx.x * 2 + 1] = dynamic[7];
    fixed[3] = dynamic[7] = 0;
}

void fresh_memory_is_poisoned() {
    Device<uint32_t> fresh(3);
    for (uint32_t word : fresh.read()) REQUIRE(word == 0xffffffffu);
    Launcher to;
    for (int i = 0; i < 6; ++i) {
        Device<uint32_t> out(std::vector<uint32_t>(8, 0));
        launch(to, i == 4 ? read_shared_kernel<2000> : read_shared_kernel<4>, 4, 1, 32, out.p);
        for (uint32_t word : out.read()) REQUIRE(word == 0xffffffffu);
    }
}

void limits() {
    Launcher to;
    Device<uint32_t> out(2);
    const auto refused = [&](dim3 grid, dim3 block, size_t shared, const char *name) {
        try {
            launch(to, read_shared_kernel<4>, grid, block, shared, out.p);
        } catch (const Error &e) {
            return std::strstr(e.what(), name) != nullptr;
        }
        return false;
    };
    REQUIRE(refused(1, 1025, 32, "cudaErrorInvalidConfiguration"));
    REQUIRE(refused(0, 1, 32, "cudaErrorInvalidConfiguration"));
    REQUIRE(refused(dim3(1, 65536), 1, 32, "cudaErrorInvalidConfiguration"));
    REQUIRE(refused(1, 1, 48 * 1024 + 1, "cudaErrorInvalidValue"));
    allow_shared(read_shared_kernel<4>, 100 * 1024);
    launch(to, read_shared_kernel<4>, 1, 1, 100 * 1024, out.p);
    REQUIRE(to.launches == 1);
    REQUIRE(refused(1, 1, 100 * 1024 + 1, "cudaErrorInvalidValue"));

    fake_set_memory(1000);
    void *p = nullptr;
    REQUIRE(cudaMalloc(&p, 993) == cudaErrorMemoryAllocation);  // `out` takes 8
    REQUIRE(cudaGetLastError() == cudaErrorMemoryAllocation && cudaGetLastError() == cudaSuccess);
    REQUIRE(cudaMalloc(&p, 992) == cudaSuccess);
    REQUIRE(fake_live() == 2 && fake_memory_used() == 1000);
    char host[993] = {};
    REQUIRE(cudaMemcpy(host, p, 993, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
    REQUIRE(cudaMemcpy(host, p, 992, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
    REQUIRE(cudaFree(p) == cudaSuccess && cudaFree(p) == cudaErrorInvalidValue);
}

// ------------------------------------------------------------------------------------- streams

__global__ void add_kernel(int *value, int addend) {
    pdl_wait();
    atomicAdd(value, addend);
}

// Late work sees what the host has written meanwhile; synchronising makes it happen.
void lazy() {
    fake_lazy(1);
    cudaStream_t stream = nullptr, other = nullptr;
    CUDA_TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA_TRY(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    cudaEvent_t event = nullptr;
    CUDA_TRY(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    int *pinned = nullptr;
    CUDA_TRY(cudaMallocHost(&pinned, 8));
    Device<int> value(1);
    Launcher to;
    to.stream = stream;
    pinned[0] = 1;
    CUDA_TRY(cudaMemcpyAsync(value.p, pinned, 4, cudaMemcpyHostToDevice, stream));
    launch(to, add_kernel, 1, 1, 0, value.p, 10);
    CUDA_TRY(cudaEventRecord(event, stream));
    launch(to, add_kernel, 1, 1, 0, value.p, 100);
    pinned[0] = 2;
    REQUIRE(fake_count(FAKE_KERNELS) == 0);
    REQUIRE(cudaEventQuery(event) == cudaErrorNotReady && cudaEventQuery(event) == cudaSuccess);
    REQUIRE(fake_count(FAKE_KERNELS) == 1);
    CUDA_TRY(cudaStreamWaitEvent(other, event));
    CUDA_TRY(cudaMemcpyAsync(pinned + 1, value.p, 4, cudaMemcpyDeviceToHost, other));
    CUDA_TRY(cudaStreamSynchronize(other));
    REQUIRE(pinned[1] == 12);
    CUDA_TRY(cudaStreamSynchronize(stream));
    REQUIRE(value.read()[0] == 112);
    CUDA_TRY(cudaFreeHost(pinned));
    CUDA_TRY(cudaEventDestroy(event));
    CUDA_TRY(cudaStreamDestroy(stream));
    CUDA_TRY(cudaStreamDestroy(other));
    REQUIRE(fake_live() == 1);
}

void graphs() {
    cudaStream_t stream = nullptr;
    CUDA_TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    Device<int> value(std::vector<int>{0});
    Launcher to;
    to.stream = stream;
    to.overlap = true;
    CUDA_TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 1; i <= 3; ++i) launch(to, add_kernel, 2, 1, 0, value.p, i);
    cudaGraph_t graph = nullptr;
    CUDA_TRY(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t exec = nullptr;
    CUDA_TRY(cudaGraphInstantiate(&exec, graph, 0));
    CUDA_TRY(cudaGraphDestroy(graph));
    REQUIRE(value.read()[0] == 0 && to.launches == 3);
    for (int i = 1; i <= 4; ++i) {
        CUDA_TRY(cudaGraphLaunch(exec, stream));
        CUDA_TRY(cudaStreamSynchronize(stream));
        REQUIRE(value.read()[0] == 12 * i);
    }
    REQUIRE(fake_count(FAKE_KERNELS) == 12 && fake_count(FAKE_GRAPHS) == 4);
    CUDA_TRY(cudaGraphExecDestroy(exec));

    CUDA_TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    void *p = nullptr;
    REQUIRE(cudaMalloc(&p, 4) == cudaErrorStreamCaptureUnsupported);
    REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated);
    CUDA_TRY(cudaMalloc(&p, 4));
    CUDA_TRY(cudaFree(p));
    CUDA_TRY(cudaStreamDestroy(stream));
}

void faults() {
    void *p = nullptr;
    fake_fail_at(2, cudaErrorInvalidValue);
    REQUIRE(cudaMalloc(&p, 4) == cudaSuccess);
    REQUIRE(cudaFree(p) == cudaErrorInvalidValue && fake_live() == 0);  // given back all the same
    fake_fail_kind(FAKE_MALLOC, 2, cudaErrorMemoryAllocation);
    REQUIRE(cudaMalloc(&p, 4) == cudaSuccess && cudaMemset(p, 0, 4) == cudaSuccess);
    void *q = nullptr;
    REQUIRE(cudaMalloc(&q, 4) == cudaErrorMemoryAllocation && cudaMalloc(&q, 4) == cudaSuccess);
    REQUIRE(cudaFree(p) == cudaSuccess && cudaFree(q) == cudaSuccess);
    REQUIRE(fake_calls() == 8);

    Device<int> value(std::vector<int>{0});
    Launcher to;
    fake_fail_async(2, cudaErrorIllegalAddress);
    launch(to, add_kernel, 1, 1, 0, value.p, 1);
    launch(to, add_kernel, 1, 1, 0, value.p, 1);
    REQUIRE(cudaStreamSynchronize(nullptr) == cudaErrorIllegalAddress);
    REQUIRE(cudaMalloc(&p, 4) == cudaErrorIllegalAddress);
    REQUIRE(cudaGetLastError() == cudaErrorIllegalAddress);
    REQUIRE(cudaGetLastError() == cudaErrorIllegalAddress);  // stays
    fake_reset();
    REQUIRE(cudaGetLastError() == cudaSuccess && value.read()[0] == 1);
}

const Case kCases[] = {
    {"barriers", barriers},
    {"early_return", early_return},
    {"indices", indices},
    {"shuffles", shuffles},
    {"votes", votes},
    {"products", products},
    {"intrinsics", intrinsics},
    {"half", half},
    {"fresh_memory_is_poisoned", fresh_memory_is_poisoned},
    {"limits", limits},
    {"lazy", lazy},
    {"graphs", graphs},
    {"faults", faults},
};

}  // namespace

}  // namespace vcuda

int main(int count, char **arguments) {
    std::vector<vcuda::Case> cases(std::begin(vcuda::kCases), std::end(vcuda::kCases));
    for (const auto &more : {vcuda::mistakes(), vcuda::sm90_cases(), vcuda::sm90_mistakes()}) {
        cases.insert(cases.end(), more.begin(), more.end());
    }
    for (const vcuda::Case &one : cases) {
        if (count == 2 && std::strcmp(arguments[1], one.name) == 0) {
            one.run();
            return 0;
        }
        if (count == 1) std::puts(one.name);
    }
    return count == 1 ? 0 : 2;
}
