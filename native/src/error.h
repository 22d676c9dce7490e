// Errors inside the library, and the one place where they turn into the C interface's answers.
#pragma once

#include <cstdarg>
#include <exception>
#include <new>

#include "vcuda.h"

namespace vcuda {

// A sentence of at most this many bytes; longer ones are cut. Fixed storage, because the text must
// also be there when the error is that no memory is left.
constexpr int kErrorBytes = 1024;

#if defined(__GNUC__)
#define VCUDA_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define VCUDA_PRINTF(fmt, args)
#endif

// Not done, nothing changed: becomes VCUDA_NOT_DONE. The message is one sentence with the numbers.
class Error : public std::exception {
  public:
    explicit Error(const char *format, ...) VCUDA_PRINTF(2, 3);
    const char *what() const noexcept override { return text_; }

  protected:
    Error() noexcept { text_[0] = '\0'; }
    char text_[kErrorBytes];
};

// The device is lost: becomes VCUDA_LOST, and the handle answers so from then on.
class DeviceLost : public Error {
  public:
    explicit DeviceLost(const char *format, ...) VCUDA_PRINTF(2, 3);
};

// The calling thread's sentence.
const char *last_error() noexcept;
void set_last_error(const char *text) noexcept;

// Run `body`; no exception leaves. Every extern "C" function that can fail is one guard.
template <class Body>
int guard(Body &&body) noexcept {
    try {
        body();
        return VCUDA_OK;
    } catch (const DeviceLost &e) {
        set_last_error(e.what());
        return VCUDA_LOST;
    } catch (const Error &e) {
        set_last_error(e.what());
    } catch (const std::bad_alloc &) {
        set_last_error("out of host memory");
    } catch (const std::exception &e) {
        set_last_error(e.what());
    } catch (...) {
        set_last_error(
            "an unknown C++ exception reached the C interface (a defect of the library)");
    }
    return VCUDA_NOT_DONE;
}

}  // namespace vcuda
