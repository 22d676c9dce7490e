// The kernels of flash, as flash.cu chooses between them.
#pragma once

#include "flash.h"

namespace vcuda::flash_detail {

struct Plan;

// PRE: one part, head_dim <= 128.
void launch_wgmma(Launcher &to, const Flash &p);

// Whether the library has code of these kernels for the current device.
bool wgmma_has_code();

// The parts of each row together: for plan.parts > 1.
void launch_join(Launcher &to, const Flash &p, const Plan &plan);

}  // namespace vcuda::flash_detail
