/* What tests tell the emulated CUDA runtime: which call fails, how much memory there is, what was
 * done so far. Exported by the emulated library beside vcuda_*. State is the process's. */
#pragma once

#include <stdint.h>

#define FAKE_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* Kinds of runtime calls. */
#define FAKE_ANY 0
#define FAKE_MALLOC 1   /* cudaMalloc, cudaMallocHost */
#define FAKE_MEMCPY 2   /* copies and memsets */
#define FAKE_LAUNCH 3   /* kernels and graphs */
#define FAKE_SYNC 4     /* synchronise and query */
#define FAKE_GRAPH 5    /* capture, instantiate, upload */
#define FAKE_FUNCTION 6 /* attributes of kernels */
#define FAKE_OTHER 7    /* devices, streams, events; and everything that gives something back */

/* The "error" that makes a call throw std::bad_alloc: no host memory. Calls that give something
 * back let it pass. */
#define FAKE_BAD_ALLOC (-1)

/* Everything below to its default, counters to 0. What is allocated stays. */
FAKE_API void fake_reset(void);

/* The n-th call from now (1: the next one) does nothing and answers `error`. An error after which
 * CUDA cannot go on (cuda_try.h: is_fatal) loses the device: every later call on it answers the
 * same. Calls that give something back do so and answer the error. n = 0: no longer. */
FAKE_API void fake_fail_at(int64_t n, int error);
FAKE_API void fake_fail_kind(int kind, int64_t n, int error);

/* The n-th launch from now answers success and does nothing; the next call that waits for the
 * device answers `error`. */
FAKE_API void fake_fail_async(int64_t n, int error);

FAKE_API void fake_set_memory(uint64_t bytes); /* of each device; 1 GiB */
FAKE_API void fake_devices(int count);         /* 1 */
FAKE_API void fake_driver(int version);        /* CUDA version of the driver; 0: there is none */
FAKE_API void fake_without_code(
    int device);                          /* the library has no kernels for it; -1: no such one */
FAKE_API void fake_skip_launches(int on); /* kernels are counted and not run */

/* on: what goes into a stream is done as late as CUDA allows (when something waits for it), so that
 * a host buffer that is used again too early shows. off (default): at once. */
FAKE_API void fake_lazy(int on);

/* In which order blocks and threads run: 0 rising, 1 falling, else drawn from this seed. */
FAKE_API void fake_schedule(uint32_t schedule);

FAKE_API int64_t fake_faults_left(void); /* faults that were asked for and have not struck yet */
FAKE_API int64_t fake_calls(void); /* runtime calls so far that could have been told to fail */
FAKE_API int64_t fake_live(void);  /* allocations, streams, events and graphs that exist */
FAKE_API uint64_t fake_memory_used(void); /* bytes of all devices */

/* What was done so far. */
#define FAKE_KERNELS 0 /* run or skipped, those of graphs among them */
#define FAKE_GRAPHS 1  /* graph launches */
#define FAKE_H2D 2
#define FAKE_H2D_BYTES 3
#define FAKE_D2H 4
#define FAKE_D2H_BYTES 5
#define FAKE_D2D 6
#define FAKE_FRESH 7 /* words that came to the host and that nobody had written */
#define FAKE_COUNTERS 8
FAKE_API int64_t fake_count(int what);

#ifdef __cplusplus
}
#endif
