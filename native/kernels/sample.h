// From logits to what the host's sampler needs, so that a whole vocabulary need not travel.
#pragma once

#include <cstdint>

#include "launch.h"
#include "step.h"

namespace vcuda {

// Scratch of both, in 32-bit words, zero before the first use and zeroed again by what used it.
uint64_t sample_scratch(int32_t vocab);

// header->id and max_logit: the largest of logits [min(vocab_limit, vocab)], the lowest id on a
// tie. header->nonfinite is left as the product of the head set it.
void sample_greedy(Launcher &to, const Step *step, int32_t vocab, Output *output,
                   uint32_t *scratch);

// The same, and the step->top largest logits with their ids (by falling logit, equal ones by rising
// id) in output->top_ids and top_logits, header->top_count, header->sum_exp. All ties of the last
// one need not be there: the list is cut at `top`. When more than VCUDA_TOP_MAX logits would have
// to be looked at to tell the order, top_count is 0.
void sample_top(Launcher &to, const Step *step, int32_t vocab, Output *output, uint32_t *scratch);

}  // namespace vcuda
