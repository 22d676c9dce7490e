/* vcuda.h - run a language model on one NVIDIA GPU, from any program.
 *
 * This header is the whole interface of libvcuda: plain C99, fixed-width types, opaque handles, no
 * callbacks. It compiles as C and as C++ and needs no CUDA header. The library knows shapes, bytes
 * and pointers; it has never heard of a file, a tokenizer or a model's name. It prints nothing,
 * never ends the process, and keeps no state outside its handles. Nothing touches CUDA when the
 * library is loaded: the first call that takes or asks for a device does.
 *
 * In ten lines:
 *
 *     if (vcuda_abi_version() != VCUDA_ABI_VERSION) return 1;
 *     int32_t n = 0;
 *     vcuda_dev_count(&n);
 *     if (n == 0) { puts(vcuda_last_error()); return 1; }
 *     vcuda_handle *h = NULL;
 *     if (vcuda_create(0, &h) != VCUDA_OK) { puts(vcuda_last_error()); return 1; }
 *     if (vcuda_dev_selftest(h) != VCUDA_OK) puts(vcuda_last_error());
 *     vcuda_prof prof = {.struct_size = sizeof prof};
 *     vcuda_prof_read(h, &prof);
 *     vcuda_destroy(h);
 *
 * Answers. Every function that can fail returns int:
 *      0  VCUDA_OK        done.
 *     -1  VCUDA_NOT_DONE  not done, and nothing changed: no state, no memory of the caller's, no
 *                         counter of positions. The caller may go on without the library.
 *   < -1  VCUDA_LOST      the device is lost (an illegal address, a hung kernel, a memory error).
 *                         CUDA cannot recover inside the process: the handle answers VCUDA_LOST to
 *                         everything but vcuda_destroy.
 * vcuda_last_error() then holds the reason in one sentence, with the numbers in it.
 *
 * Structs. Each begins with struct_size. The caller sets it to sizeof the struct it was compiled
 * with; fields are only ever appended, so an older caller gets the fields it knows, and a caller
 * newer than the library is told so (-1). No struct has hidden padding.
 *
 * Threads. A handle may be used from any thread; calls on one handle are serialised inside.
 * Different handles are independent. After fork() the child must not use the parent's handles:
 * they answer -1 there, and vcuda_destroy only frees host memory.
 *
 * The rules by which this interface may change are in docs/abi.md.
 */
#ifndef VCUDA_H
#define VCUDA_H

#include <stdint.h>

#if defined(_WIN32)
#if defined(VCUDA_BUILDING)
#define VCUDA_API __declspec(dllexport)
#else
#define VCUDA_API __declspec(dllimport)
#endif
#elif defined(__GNUC__)
#define VCUDA_API __attribute__((visibility("default")))
#else
#define VCUDA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* One integer; it grows with every incompatible change. A caller compares it with what
 * vcuda_abi_version() answers before it calls anything else. */
#define VCUDA_ABI_VERSION 1

#define VCUDA_OK 0
#define VCUDA_NOT_DONE (-1)
#define VCUDA_LOST (-2)

/* ---- the library itself ------------------------------------------------------------------- */

/* The ABI version that the library was built with. Never fails, touches no device. */
VCUDA_API int vcuda_abi_version(void);

/* How the library was built: one JSON object (ASCII, static storage) with the keys version, abi,
 * cuda_toolkit, archs, host_compiler, build_type. */
VCUDA_API const char *vcuda_build_info(void);

/* Why the calling thread's last unsuccessful call did not do its work: one sentence in UTF-8, ""
 * before the first. The text belongs to the library and stays until this thread's next
 * unsuccessful call; a successful one does not clear it (vcuda_dev_count alone explains a 0). */
VCUDA_API const char *vcuda_last_error(void);

/* ---- devices ------------------------------------------------------------------------------ */

/* What one device is, and how much of its memory is free now. */
typedef struct vcuda_device_info {
    uint32_t struct_size; /* set by the caller: sizeof(vcuda_device_info) */
    int32_t index;        /* as CUDA_VISIBLE_DEVICES leaves them numbered */
    char name[256];       /* "NVIDIA H200", zero-terminated */
    char uuid[48];        /* "GPU-8-4-4-4-12" in hexadecimal, zero-terminated */
    char pci[16];         /* "0000:65:00.0", zero-terminated */
    int32_t cc_major;     /* compute capability: 9 and 0 for 9.0 */
    int32_t cc_minor;
    int32_t sm_count;               /* streaming multiprocessors */
    int32_t sm_clock_khz;           /* peak; 0 where the driver does not tell */
    int32_t memory_clock_khz;       /* peak; 0 where the driver does not tell */
    int32_t memory_bus_bits;        /* width of the memory bus */
    int32_t driver_version;         /* CUDA version that the driver supports: 13000 is 13.0 */
    int32_t runtime_version;        /* CUDA runtime inside this library: 13000 is 13.0 */
    int32_t kernel_arch;            /* compute capability of the machine code that would run here,
                                       90 for 9.0; 0: this library has no code for the device */
    int32_t integrated;             /* 1: shares memory with the processor */
    uint64_t memory_total;          /* bytes */
    uint64_t memory_free;           /* bytes, now */
    uint64_t l2_bytes;              /* L2 cache */
    uint64_t shared_per_block;      /* bytes of shared memory a block may opt in to */
    uint64_t peak_bytes_per_second; /* 2 * memory clock * bus width; 0 where one is not told */
} vcuda_device_info;

/* How many devices there are. Without a driver, with one that is too old, or without a device the
 * answer is 0 (and VCUDA_OK), and vcuda_last_error() says which of the three it is. */
VCUDA_API int vcuda_dev_count(int32_t *count);

/* The CUDA version the driver supports and the one this library carries, 13000 for 13.0. Driver 0:
 * there is no NVIDIA driver. Creates no context. */
VCUDA_API int vcuda_driver_version(int32_t *driver, int32_t *runtime);

/* Fill *info for the device `index`. Reading the free memory creates the device's CUDA context
 * (some hundred MB of it), as any later use would. */
VCUDA_API int vcuda_dev_query(int32_t index, vcuda_device_info *info);

/* ---- handles ------------------------------------------------------------------------------ */

/* Everything one model needs on one device. */
typedef struct vcuda_handle vcuda_handle;

/* Take the device `device` into use; *out is the handle, or NULL when the answer is not 0. */
VCUDA_API int vcuda_create(int32_t device, vcuda_handle **out);

/* Give everything back; NULL is done at once. Also right for a handle whose device is lost. No
 * other call on the handle may be going on, and none may follow. */
VCUDA_API int vcuda_destroy(vcuda_handle *handle);

/* Send 256 integers to the device, let one small kernel transform them, read them back and compare:
 * shows in a millisecond that copies and launches work. PROF counts 1 launch, 1 copy each way. */
VCUDA_API int vcuda_dev_selftest(vcuda_handle *handle);

/* ---- PROF: what was done, and how long it took --------------------------------------------- */

/* One phase of the work. Host phases are timed by the host's clock, device phases (gemm, reduce,
 * attention, norm, moe) by device events; the second kind is 0 unless timing was asked for. */
typedef struct vcuda_phase {
    uint64_t count; /* how often */
    uint64_t ns;    /* nanoseconds, added up */
} vcuda_phase;

/* Counters since the handle was created or vcuda_prof_reset. All zero at first. */
typedef struct vcuda_prof {
    uint32_t struct_size;    /* set by the caller: sizeof(vcuda_prof) */
    uint32_t reserved;       /* 0 */
    vcuda_phase cache_probe; /* looking a weight up in the device's weight cache */
    vcuda_phase upload;      /* putting a weight there (conversion, staging, copy) */
    vcuda_phase h2d;         /* copies to the device other than uploads: embedding row, token id */
    vcuda_phase gemm;        /* matrix products */
    vcuda_phase reduce;      /* joining the parts of a split product */
    vcuda_phase attention;   /* K/V append and attention */
    vcuda_phase norm;        /* RMSNorm, residual additions, RoPE */
    vcuda_phase moe;         /* routing and experts */
    vcuda_phase d2h_sync;    /* waiting for the device and copying the logits or the id back */
    uint64_t tokens;         /* tokens decoded or prefilled */
    uint64_t launches;       /* kernels launched; a graph launch counts 1 */
    uint64_t h2d_copies;     /* host-to-device copies, uploads not among them */
    uint64_t h2d_bytes;
    uint64_t d2h_copies; /* device-to-host copies */
    uint64_t d2h_bytes;
    uint64_t upload_copies; /* host-to-device copies of weights */
    uint64_t upload_bytes;
} vcuda_prof;

/* Copy the counters of this handle into *prof. */
VCUDA_API int vcuda_prof_read(vcuda_handle *handle, vcuda_prof *prof);

/* Set all counters of this handle to zero. */
VCUDA_API int vcuda_prof_reset(vcuda_handle *handle);

#ifdef __cplusplus
}
#endif

#endif /* VCUDA_H */
