#include "error.h"

#include <cstdio>
#include <cstring>

namespace vcuda {

namespace {
thread_local char t_last_error[kErrorBytes] = "";
}

Error::Error(const char *format, ...) {
    va_list args;
    va_start(args, format);
    std::vsnprintf(text_, sizeof text_, format, args);
    va_end(args);
}

DeviceLost::DeviceLost(const char *format, ...) {
    va_list args;
    va_start(args, format);
    std::vsnprintf(text_, sizeof text_, format, args);
    va_end(args);
}

const char *last_error() noexcept {
    return t_last_error;
}

void set_last_error(const char *text) noexcept {
    std::snprintf(t_last_error, sizeof t_last_error, "%s", text);
}

}  // namespace vcuda
