// Names for addresses in messages.
#pragma once

#include <string>

namespace vcuda::emulated {

std::string name_at(const void *function);  // of a kernel
std::string place_at(const void *site);     // function and line of a return address

}  // namespace vcuda::emulated
