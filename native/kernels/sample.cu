// sample_greedy, sample_top: the largest logits of a token
//
// A logit's key is its bits, turned so that keys order as unsigned integers do. The `top` largest
// are found by radix selection: three passes count keys by their highest 11, next 11 and last 10
// bits, each inside the one bin of the pass before that holds the last wanted key. As soon as no
// more than VCUDA_TOP_MAX keys lie in or above that bin they are collected, sorted and cut. Whole
// numbers are counted and sums are added in a fixed order, so the answer is the same every time.
#include "sample.h"

#include "layout.h"
#include "ptx.cuh"

namespace vcuda {

namespace {

constexpr int kThreads = 256;
constexpr int kSortThreads = VCUDA_TOP_MAX / 2;  // one pair of the sort each
constexpr int kInFlight = 8;                     // loads of a thread
constexpr int kSegment = kThreads * kInFlight;   // logits of a block, at least
constexpr int kMaxBlocks = 512;
constexpr int kBins = 2048;

// The scratch. Only the first two and the bins must be zero before and after.
struct Scratch {
    uint32_t arrived;    // blocks
    uint32_t collected;  // candidates
    uint32_t edge;       // the lowest key of the bin with the last wanted key
    uint32_t above;      // how many keys are above that bin
    uint32_t inside;     // and in it
    uint32_t reserved[3];
    uint32_t bins[kBins];
    uint32_t best_key[kMaxBlocks], best_id[kMaxBlocks];  // of a block
    float sums[kMaxBlocks];                              // of a block's exp((logit - max) / t)
    uint32_t keys[VCUDA_TOP_MAX], ids[VCUDA_TOP_MAX];    // the candidates, in any order
};

// What the blocks of a launch share out, in equal segments.
struct Cut {
    int blocks;
    int segment;
};

Cut cut(int32_t vocab) {
    const int wanted = (vocab + kSegment - 1) / kSegment;
    Cut c;
    c.blocks = wanted < 1 ? 1 : wanted < kMaxBlocks ? wanted : kMaxBlocks;
    c.segment = (vocab + c.blocks - 1) / c.blocks;
    return c;
}

// ---------------------------------------------------------------------------------------- device

// Adding 0 makes 0 of -0, which is equal to it and must not be below it.
__device__ __forceinline__ uint32_t key_of(float logit) {
    const uint32_t u = __float_as_uint(logit + 0.0f);
    return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}

__device__ __forceinline__ int limit_of(const Step *step, int vocab) {
    const int limit = step->vocab_limit;
    return limit > 0 && limit < vocab ? limit : vocab;
}

__device__ __forceinline__ int wanted_of(const Step *step, int limit) {
    int top = step->top < VCUDA_TOP_MAX ? step->top : VCUDA_TOP_MAX;
    top = top < 1 ? 1 : top;
    return top < limit ? top : limit;
}

// f(id, logit) for this block's segment of logits [limit], by rising id in a thread.
template <class F>
__device__ __forceinline__ void visit(const float *logits, int segment, int limit, F f) {
    const int threads = static_cast<int>(blockDim.x);
    const int first = static_cast<int>(blockIdx.x) * segment;
    const int end = limit - first < segment ? limit : first + segment;
    for (int base = first + static_cast<int>(threadIdx.x); base < end;
         base += kInFlight * threads) {
        float v[kInFlight];
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
            const int i = base + j * threads;
            v[j] = i < end ? logits[i] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
            const int i = base + j * threads;
            if (i < end) f(i, v[j]);
        }
    }
}

// The larger key, and of equal ones the lower id.
struct Best {
    uint32_t key = 0;
    uint32_t id = 0xffffffffu;

    __device__ __forceinline__ void take(uint32_t other_key, uint32_t other_id) {
        if (other_key > key || (other_key == key && other_id < id)) {
            key = other_key;
            id = other_id;
        }
    }
};

// The best of the block, in thread 0. Ends with a barrier.
__device__ __forceinline__ Best block_best(Best best) {
    __shared__ uint32_t keys[kThreads / kWarp], ids[kThreads / kWarp];
#pragma unroll
    for (int o = kWarp / 2; o > 0; o >>= 1) {
        const uint32_t key = __shfl_xor_sync(kAllLanes, best.key, o);
        const uint32_t id = __shfl_xor_sync(kAllLanes, best.id, o);
        best.take(key, id);
    }
    if (threadIdx.x % kWarp == 0) {
        keys[threadIdx.x / kWarp] = best.key;
        ids[threadIdx.x / kWarp] = best.id;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < kThreads / kWarp; ++w) best.take(keys[w], ids[w]);
    }
    __syncthreads();
    return best;
}

// Whether this is the last block of the launch to come here; it then sees what the others wrote.
__device__ __forceinline__ bool is_last_block(uint32_t *arrived) {
    __shared__ int last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(arrived, 1u) == gridDim.x - 1 ? 1 : 0;
        if (last != 0) *arrived = 0;
    }
    __syncthreads();
    __threadfence();
    return last != 0;
}

// In the last block: header->id and max_logit from what every block found.
__device__ __forceinline__ void write_best(const Scratch *scratch, Output *output) {
    Best best;
    for (unsigned i = threadIdx.x; i < gridDim.x; i += blockDim.x) {
        best.take(scratch->best_key[i], scratch->best_id[i]);
    }
    best = block_best(best);
    if (threadIdx.x == 0) {
        output->header.id = static_cast<int32_t>(best.id);
        output->header.max_logit = logits_of(output)[best.id];
    }
}

// In the last block: the bin that holds the key of rank `rank` (1 is the largest) becomes the new
// edge, and all bins become 0.
__device__ __forceinline__ void choose_bin(Scratch *scratch, int bins, int shift, uint32_t edge,
                                           uint32_t above, uint32_t rank) {
    __shared__ uint32_t warp_counts[kThreads / kWarp];
    const int tid = static_cast<int>(threadIdx.x), lane = tid % kWarp;
    const int each = bins / kThreads;
    const int highest = bins - 1 - tid * each;  // a thread's bins, from the highest down
    uint32_t count = 0;
    for (int j = 0; j < each; ++j) count += scratch->bins[highest - j];
    uint32_t before = count;  // inclusive at first
#pragma unroll
    for (int o = 1; o < kWarp; o *= 2) {
        const uint32_t other = __shfl_sync(kAllLanes, before, lane < o ? lane : lane - o);
        if (lane >= o) before += other;
    }
    if (lane == kWarp - 1) warp_counts[tid / kWarp] = before;
    __syncthreads();
    before -= count;
    for (int w = 0; w < tid / kWarp; ++w) before += warp_counts[w];
    if (before < rank && rank <= before + count) {
        int bin = highest;
        while (before + scratch->bins[bin] < rank) before += scratch->bins[bin--];
        scratch->edge = edge | static_cast<uint32_t>(bin) << shift;
        scratch->above = above + before;
        scratch->inside = scratch->bins[bin];
    }
    for (int j = 0; j < each; ++j) scratch->bins[highest - j] = 0;
}

// --------------------------------------------------------------------------------------- kernels

// header->id and max_logit of logits [limit].
// PRE: 256 threads; blocks * segment >= vocab.   BYTES: 4 limit
__global__ void __launch_bounds__(kThreads)
    greedy_kernel(const Step *step, int vocab, int segment, Output *output, Scratch *scratch) {
    pdl_wait();
    pdl_trigger();
    Best best;
    visit(logits_of(output), segment, limit_of(step, vocab),
          [&best](int id, float logit) { best.take(key_of(logit), static_cast<uint32_t>(id)); });
    best = block_best(best);
    if (threadIdx.x == 0) {
        scratch->best_key[blockIdx.x] = best.key;
        scratch->best_id[blockIdx.x] = best.id;
    }
    if (is_last_block(&scratch->arrived)) write_best(scratch, output);
}

// One pass of the selection. The first also finds the largest logit, the second also adds up
// header->sum_exp, which needs it.
// PRE: as greedy_kernel; the passes run in their order.   BYTES: 4 limit
template <int PASS>
__global__ void __launch_bounds__(kThreads)
    count_kernel(const Step *step, int vocab, int segment, Output *output, Scratch *scratch) {
    constexpr int shift = PASS == 0 ? 21 : PASS == 1 ? 10 : 0;
    constexpr int bins = PASS == 2 ? kBins / 2 : kBins;
    __shared__ uint32_t counts[bins];
    __shared__ float warp_sums[kThreads / kWarp];
    pdl_wait();
    pdl_trigger();
    const int tid = static_cast<int>(threadIdx.x);
    const uint32_t edge = PASS == 0 ? 0 : scratch->edge;
    const uint32_t above = PASS == 0 ? 0 : scratch->above;
    const bool narrow = PASS == 0 || above + scratch->inside > VCUDA_TOP_MAX;
    if (PASS == 2 && !narrow) return;

    for (int i = tid; i < bins; i += kThreads) counts[i] = 0;
    __syncthreads();
    const int limit = limit_of(step, vocab);
    const float max_logit = output->header.max_logit, temperature = step->temperature;
    Best best;
    float sum = 0.0f;
    visit(logits_of(output), segment, limit, [&](int id, float logit) {
        const uint32_t key = key_of(logit);
        if (PASS == 0) best.take(key, static_cast<uint32_t>(id));
        if (PASS == 1) {  // infinity - infinity would not be 0
            sum += logit == max_logit ? 1.0f : expf((logit - max_logit) / temperature);
        }
        // the keys of the edge's bin differ from it in the bits of this pass and below only
        if (narrow && (PASS == 0 || ((key ^ edge) >> shift) < bins)) {
            atomicAdd(&counts[(key >> shift) & (bins - 1)], 1u);
        }
    });
    if (PASS == 0) {
        best = block_best(best);
        if (tid == 0) {
            scratch->best_key[blockIdx.x] = best.key;
            scratch->best_id[blockIdx.x] = best.id;
        }
    } else if (PASS == 1) {
        sum = block_sum(sum, warp_sums);
        if (tid == 0) scratch->sums[blockIdx.x] = sum;
    }
    __syncthreads();
    for (int i = tid; i < bins; i += kThreads) {
        if (counts[i] != 0) atomicAdd(&scratch->bins[i], counts[i]);
    }
    if (!is_last_block(&scratch->arrived)) return;

    if (PASS == 0) write_best(scratch, output);
    if (PASS == 1) {
        sum = 0.0f;
        for (unsigned i = threadIdx.x; i < gridDim.x; i += kThreads) sum += scratch->sums[i];
        sum = block_sum(sum, warp_sums);
        if (tid == 0) output->header.sum_exp = sum;
    }
    if (narrow) {
        const uint32_t rank = static_cast<uint32_t>(wanted_of(step, limit)) - above;
        choose_bin(scratch, bins, shift, edge, above, rank);
    }
}

// top_ids, top_logits, top_count: every key from the edge on, sorted and cut.
// PRE: as greedy_kernel with 512 threads, after the passes.   BYTES: 4 limit
__global__ void __launch_bounds__(kSortThreads)
    collect_kernel(const Step *step, int vocab, int segment, Output *output, Scratch *scratch) {
    __shared__ uint64_t order[VCUDA_TOP_MAX];  // key, then the complement of the id
    pdl_wait();
    pdl_trigger();
    const int tid = static_cast<int>(threadIdx.x);
    const int count = static_cast<int>(scratch->above + scratch->inside);
    if (count > VCUDA_TOP_MAX) {  // ties: the same in all blocks
        if (blockIdx.x == 0 && tid == 0) output->header.top_count = 0;
        return;
    }
    const int limit = limit_of(step, vocab);
    const uint32_t edge = scratch->edge;
    visit(logits_of(output), segment, limit, [&](int id, float logit) {
        const uint32_t key = key_of(logit);
        if (key < edge) return;
        const uint32_t place = atomicAdd(&scratch->collected, 1u);
        scratch->keys[place] = key;
        scratch->ids[place] = static_cast<uint32_t>(id);
    });
    if (!is_last_block(&scratch->arrived)) return;

    // a bitonic sort, largest first, of the next power of two; zeros are below every key
    int size = 2;
    while (size < count) size *= 2;
    for (int i = tid; i < size; i += kSortThreads) {
        const uint64_t key = i < count ? scratch->keys[i] : 0;
        const uint64_t id = i < count ? ~scratch->ids[i] : 0;
        order[i] = key << 32 | id;
    }
    if (tid == 0) scratch->collected = 0;
    __syncthreads();
    for (int run = 2; run <= size; run *= 2) {
        for (int apart = run / 2; apart > 0; apart /= 2) {
            const int i = 2 * tid - (tid & (apart - 1));
            if (i + apart < size) {
                const uint64_t a = order[i], b = order[i + apart];
                const bool falling = (i & run) == 0;
                if (falling ? a < b : a > b) {
                    order[i] = b;
                    order[i + apart] = a;
                }
            }
            __syncthreads();
        }
    }
    const int wanted = wanted_of(step, limit);
    for (int i = tid; i < wanted; i += kSortThreads) {
        const uint32_t id = ~static_cast<uint32_t>(order[i]);
        output->top_ids[i] = static_cast<int32_t>(id);
        output->top_logits[i] = logits_of(output)[id];
    }
    if (tid == 0) output->header.top_count = wanted;
}

}  // namespace

// ------------------------------------------------------------------------------------- launchers

uint64_t sample_scratch(int32_t) {
    return sizeof(Scratch) / sizeof(uint32_t);
}

void sample_greedy(Launcher &to, const Step *step, int32_t vocab, Output *output,
                   uint32_t *scratch) {
    const Cut c = cut(vocab);
    launch(to, greedy_kernel, dim3(static_cast<unsigned>(c.blocks)), dim3(kThreads), 0, step, vocab,
           c.segment, output, reinterpret_cast<Scratch *>(scratch));
}

void sample_top(Launcher &to, const Step *step, int32_t vocab, Output *output, uint32_t *scratch) {
    const Cut c = cut(vocab);
    const dim3 grid(static_cast<unsigned>(c.blocks));
    Scratch *s = reinterpret_cast<Scratch *>(scratch);
    launch(to, count_kernel<0>, grid, dim3(kThreads), 0, step, vocab, c.segment, output, s);
    launch(to, count_kernel<1>, grid, dim3(kThreads), 0, step, vocab, c.segment, output, s);
    launch(to, count_kernel<2>, grid, dim3(kThreads), 0, step, vocab, c.segment, output, s);
    launch(to, collect_kernel, grid, dim3(kSortThreads), 0, step, vocab, c.segment, output, s);
}

}  // namespace vcuda
