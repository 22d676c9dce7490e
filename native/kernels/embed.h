// The first kernel of a token: takes its id, sets its position, and looks its embedding up.
#pragma once

#include <cstdint>

#include "launch.h"
#include "layout.h"
#include "step.h"

namespace vcuda {

// x [k] = row ids[step->next] of `table`; see Step for what else it does. Clears
// header->nonfinite.
void embed(Launcher &to, const Tiles &table, Step *step, float *x, Header *header);

}  // namespace vcuda
