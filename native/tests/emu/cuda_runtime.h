// The part of the CUDA runtime that native/ uses, on the CPU: names, types and values are CUDA's,
// so that the library and its kernels compile with any C++17 compiler and run on any machine.
//
// Found before the real header with -I native/tests/emu. What differs from a GPU: "device" memory
// is host memory (each allocation on its own, filled with 0xFF bytes), a kernel's blocks run one
// after another and its threads take turns (block.h), and calls can be told to fail (fake.h).
#pragma once

#include <cstddef>
#include <cstdint>

#if !defined(VCUDA_EMULATE)
#error "compile with -DVCUDA_EMULATE: this cuda_runtime.h is the emulator's"
#endif

#define CUDART_VERSION 13000

// ------------------------------------------------------------------------------------- errors

#define VCUDA_EMULATED_ERRORS(X)                                                     \
    X(cudaSuccess, 0, "no error")                                                    \
    X(cudaErrorInvalidValue, 1, "invalid argument")                                  \
    X(cudaErrorMemoryAllocation, 2, "out of memory")                                 \
    X(cudaErrorInitializationError, 3, "initialization error")                       \
    X(cudaErrorCudartUnloading, 4, "driver shutting down")                           \
    X(cudaErrorInvalidConfiguration, 9, "invalid configuration argument")            \
    X(cudaErrorInvalidPitchValue, 12, "invalid pitch argument")                      \
    X(cudaErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy")      \
    X(cudaErrorInsufficientDriver, 35, "CUDA driver version is insufficient")        \
    X(cudaErrorDevicesUnavailable, 46, "CUDA-capable device(s) is/are busy")         \
    X(cudaErrorInvalidDeviceFunction, 98, "invalid device function")                 \
    X(cudaErrorNoDevice, 100, "no CUDA-capable device is detected")                  \
    X(cudaErrorInvalidDevice, 101, "invalid device ordinal")                         \
    X(cudaErrorInvalidKernelImage, 200, "device kernel image is invalid")            \
    X(cudaErrorNoKernelImageForDevice, 209, "no kernel image is available")          \
    X(cudaErrorECCUncorrectable, 214, "uncorrectable ECC error encountered")         \
    X(cudaErrorInvalidPtx, 218, "a PTX JIT compilation failed")                      \
    X(cudaErrorNvlinkUncorrectable, 220, "uncorrectable NVLink error detected")      \
    X(cudaErrorJitCompilerNotFound, 221, "PTX JIT compiler library not found")       \
    X(cudaErrorUnsupportedPtxVersion, 222, "unsupported PTX toolchain")              \
    X(cudaErrorJitCompilationDisabled, 223, "PTX JIT compilation was disabled")      \
    X(cudaErrorInvalidResourceHandle, 400, "invalid resource handle")                \
    X(cudaErrorNotReady, 600, "device not ready")                                    \
    X(cudaErrorIllegalAddress, 700, "an illegal memory access was encountered")      \
    X(cudaErrorLaunchOutOfResources, 701, "too many resources requested")            \
    X(cudaErrorLaunchTimeout, 702, "the launch timed out and was terminated")        \
    X(cudaErrorContextIsDestroyed, 709, "context is destroyed")                      \
    X(cudaErrorAssert, 710, "device-side assert triggered")                          \
    X(cudaErrorHardwareStackError, 714, "hardware stack error")                      \
    X(cudaErrorIllegalInstruction, 715, "an illegal instruction was encountered")    \
    X(cudaErrorMisalignedAddress, 716, "misaligned address")                         \
    X(cudaErrorInvalidAddressSpace, 717, "operation not supported on address")       \
    X(cudaErrorInvalidPc, 718, "invalid program counter")                            \
    X(cudaErrorLaunchFailure, 719, "unspecified launch failure")                     \
    X(cudaErrorExternalDevice, 726, "an async error has occurred in another GPU")    \
    X(cudaErrorNotPermitted, 800, "operation not permitted")                         \
    X(cudaErrorNotSupported, 801, "operation not supported")                         \
    X(cudaErrorSystemNotReady, 802, "system not yet initialized")                    \
    X(cudaErrorStreamCaptureUnsupported, 900, "not permitted while capturing")       \
    X(cudaErrorStreamCaptureInvalidated, 901, "capture was invalidated earlier")     \
    X(cudaErrorStreamCaptureUnjoined, 904, "capture has unjoined work")              \
    X(cudaErrorIllegalState, 401, "the operation cannot be performed in this state") \
    X(cudaErrorGraphExecUpdateFailure, 910, "the graph update was not performed")    \
    X(cudaErrorUnknown, 999, "unknown error")

enum cudaError {
#define VCUDA_EMULATED_ENUM(name, value, text) name = value,
    VCUDA_EMULATED_ERRORS(VCUDA_EMULATED_ENUM)
#undef VCUDA_EMULATED_ENUM
};
using cudaError_t = cudaError;

cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char *cudaGetErrorName(cudaError_t error);
const char *cudaGetErrorString(cudaError_t error);

// ------------------------------------------------------------------------------------- devices

struct CUuuid_st {
    char bytes[16];
};
using cudaUUID_t = CUuuid_st;

struct cudaDeviceProp {
    char name[256];
    cudaUUID_t uuid;
    size_t totalGlobalMem;
    size_t sharedMemPerBlock;
    size_t sharedMemPerBlockOptin;
    size_t sharedMemPerMultiprocessor;
    int major, minor;
    int multiProcessorCount;
    int integrated;
    int l2CacheSize;
    int pciDomainID, pciBusID, pciDeviceID;
    int memoryBusWidth;
    int maxThreadsPerBlock;
    int maxThreadsPerMultiProcessor;
    int warpSize;
};

enum cudaDeviceAttr {
    cudaDevAttrClockRate = 13,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrMemoryClockRate = 36,
    cudaDevAttrGlobalMemoryBusWidth = 37,
    cudaDevAttrL2CacheSize = 38,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaDeviceSynchronize();

// ------------------------------------------------------------------------------------- streams

using cudaStream_t = struct CUstream_st *;
using cudaEvent_t = struct CUevent_st *;
using cudaGraph_t = struct CUgraph_st *;
using cudaGraphExec_t = struct CUgraphExec_st *;
using cudaGraphNode_t = struct CUgraphNode_st *;

constexpr unsigned cudaStreamDefault = 0;
constexpr unsigned cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventDefault = 0;
constexpr unsigned cudaEventBlockingSync = 1;
constexpr unsigned cudaEventDisableTiming = 2;

cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);

cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end);

enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal = 0,
    cudaStreamCaptureModeThreadLocal = 1,
    cudaStreamCaptureModeRelaxed = 2,
};
enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone = 0,
    cudaStreamCaptureStatusActive = 1,
    cudaStreamCaptureStatusInvalidated = 2,
};

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                 unsigned long long flags = 0);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count);
cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);

// ------------------------------------------------------------------------------------- memory

enum cudaMemcpyKind {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4,
};
constexpr unsigned cudaHostAllocDefault = 0;
constexpr unsigned cudaHostAllocPortable = 1;
constexpr unsigned cudaHostAllocMapped = 2;
constexpr unsigned cudaHostAllocWriteCombined = 4;

cudaError_t cudaMalloc(void **pointer, size_t bytes);
cudaError_t cudaFree(void *pointer);
cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags);
cudaError_t cudaMallocHost(void **pointer, size_t bytes);
cudaError_t cudaFreeHost(void *pointer);
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                         size_t width, size_t height, cudaMemcpyKind kind);
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream = nullptr);
cudaError_t cudaMemset(void *to, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream = nullptr);

template <class T>
cudaError_t cudaMalloc(T **pointer, size_t bytes) {
    return cudaMalloc(reinterpret_cast<void **>(pointer), bytes);
}
template <class T>
cudaError_t cudaMallocHost(T **pointer, size_t bytes, unsigned flags = 0) {
    return cudaHostAlloc(reinterpret_cast<void **>(pointer), bytes, flags);
}
template <class T>
cudaError_t cudaHostAlloc(T **pointer, size_t bytes, unsigned flags) {
    return cudaHostAlloc(reinterpret_cast<void **>(pointer), bytes, flags);
}

// ------------------------------------------------------------------------------------- kernels

struct cudaFuncAttributes {
    size_t sharedSizeBytes;
    size_t constSizeBytes;
    size_t localSizeBytes;
    int maxThreadsPerBlock;
    int numRegs;
    int ptxVersion;
    int binaryVersion;
    int maxDynamicSharedSizeBytes;
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9,
};

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *kernel);
cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value);

template <class... Params>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, void (*kernel)(Params...)) {
    return cudaFuncGetAttributes(attributes, reinterpret_cast<const void *>(kernel));
}
template <class... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute attribute,
                                 int value) {
    return cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), attribute, value);
}

#include "device_code.h"
