// What the kernels of one token share: which token, where, and what is to come out.
#pragma once

#include <cstdint>

#include "vcuda.h"

namespace vcuda {

// In device memory, followed by int32 ids[count]; the host writes all of it with one copy a run.
// The embedding kernel, which is one block, takes ids[next] and sets position = base + next++; all
// other kernels read `position` only. A segment of layers has no embedding kernel: its host writes
// the position itself, and behind the step rows of the residual stream, which are copied back too.
struct Step {
    int32_t base;      // position of ids[0]
    int32_t next;      // index of the next token: 0 when the host writes it
    int32_t position;  // of the token that is being computed
    int32_t vocab_limit;
    int32_t top;  // candidates that are wanted
    float temperature;
    int32_t overflow;  // of a segment, as that of Header
    int32_t reserved;
};

// What a token gives, in device memory: TOP copies everything before `logits`, GREEDY the header
// alone, LOGITS the header and the logits behind it; each is one copy.
struct Header {
    int32_t id;         // of the largest logit below vocab_limit
    int32_t nonfinite;  // 1: a logit is NaN or infinite; cleared by the embedding kernel
    int32_t top_count;  // candidates written; 0: more than VCUDA_TOP_MAX would have to be
    float max_logit;
    float sum_exp;
    int32_t overflow;  // 1: prefill met a number that float16 cannot hold
    int32_t reserved[2];
};

struct Output {
    int32_t top_ids[VCUDA_TOP_MAX];
    float top_logits[VCUDA_TOP_MAX];
    Header header;
    // float logits[vocab] follows
};
static_assert(sizeof(Step) == 32 && sizeof(Header) == 32,
              "copied to and from the host as they are");
static_assert(sizeof(Output) % 16 == 0, "the logits behind it are read as float4");

inline
#if defined(__CUDACC__)
    __host__ __device__
#endif
    float *logits_of(Output *output) {
    return reinterpret_cast<float *>(output + 1);
}

}  // namespace vcuda
