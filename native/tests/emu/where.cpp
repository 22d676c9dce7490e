#include "where.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

namespace vcuda::emulated {

namespace {

// What addr2line says of an address: the function, then file:line. Kernels are hidden symbols,
// which dladdr does not know.
void look_up(const void *address, std::string &function, std::string &line) {
    Dl_info info{};
    if (address == nullptr || dladdr(address, &info) == 0) return;
    char text[600];
    std::snprintf(
        text, sizeof text, "%s+0x%zx", info.dli_fname,
        reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(info.dli_fbase));
    function = text;
    std::snprintf(
        text, sizeof text, "addr2line -Cife '%s' 0x%zx 2>/dev/null", info.dli_fname,
        reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(info.dli_fbase));
    FILE *pipe = popen(text, "r");
    if (pipe == nullptr) return;
    // Two lines a level: the innermost function first, then what it was inlined into.
    while (std::fgets(text, sizeof text, pipe) != nullptr && std::strncmp(text, "??", 2) != 0) {
        text[std::strcspn(text, "\n")] = '\0';
        function = text;
        if (std::fgets(text, sizeof text, pipe) == nullptr) break;
        text[std::strcspn(text, " \n")] = '\0';
        const char *slash = std::strrchr(text, '/');
        line = slash != nullptr ? slash + 1 : text;
        const bool emulators = std::strstr(text, "/emu/") != nullptr;
        if (!emulators) break;
    }
    pclose(pipe);
}

}  // namespace

std::string name_at(const void *function) {
    std::string name = "(unknown)", line;
    look_up(function, name, line);
    return name;
}

std::string place_at(const void *site) {
    std::string name = "an unknown place", line;
    if (site == nullptr) return name;
    look_up(static_cast<const char *>(site) - 1, name, line);
    return line.empty() ? name : name + " (" + line + ")";
}

}  // namespace vcuda::emulated
