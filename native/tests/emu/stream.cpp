// Streams, events and graphs of the emulated CUDA runtime.
#include "stream.h"

#include <algorithm>
#include <chrono>
#include <set>

#include "runtime.h"

using vcuda::emulated::Call;
using vcuda::emulated::Capture;
using vcuda::emulated::Queue;
using vcuda::emulated::runtime;
using vcuda::emulated::Work;

struct CUevent_st {
    bool timing = true;
    std::shared_ptr<Queue> queue;  // where it was last recorded, and behind how much work
    uint64_t position = 0;
    std::shared_ptr<Capture> capture;                            // recorded in a capture
    std::shared_ptr<int64_t> ns = std::make_shared<int64_t>(0);  // when it happened
    bool recorded = false;
};

struct CUgraph_st {
    std::vector<Work> work;
};

struct CUgraphExec_st {
    std::vector<Work> work;
};

namespace vcuda::emulated {

namespace {

// Every stream that exists; guarded by the runtime's lock. Never destroyed.
std::set<cudaStream_t> &streams() {
    static std::set<cudaStream_t> &all = *new std::set<cudaStream_t>;
    return all;
}

CUstream_st &default_stream() {
    static CUstream_st &one = *new CUstream_st;
    return one;
}

CUstream_st &stream_of(cudaStream_t stream) {
    return stream != nullptr ? *stream : default_stream();
}

bool exists(cudaStream_t stream) {
    return stream == nullptr || streams().count(stream) > 0;
}

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

}  // namespace

void Queue::run_until(uint64_t n) {
    while (executed < n && !work.empty()) {
        const Work next = std::move(work.front());
        work.pop_front();
        executed += 1;
        next();
    }
}

bool is_capturing(cudaStream_t stream) {
    return stream_of(stream).capture != nullptr;
}

cudaError_t submit(cudaStream_t stream, Work work) {
    if (!exists(stream)) return cudaErrorInvalidResourceHandle;
    CUstream_st &s = stream_of(stream);
    if (s.capture != nullptr) {
        if (s.capture->invalid) return cudaErrorStreamCaptureInvalidated;
        s.capture->work.push_back(std::move(work));
        return cudaSuccess;
    }
    if (stream == nullptr) drain(false);  // the default stream waits for the blocking ones
    s.queue->work.push_back(std::move(work));
    s.queue->submitted += 1;
    if (!runtime().lazy) s.queue->run_all();
    return cudaSuccess;
}

void drain(bool all) {
    default_stream().queue->run_all();
    for (const cudaStream_t stream : streams()) {
        if (all || stream->blocking) stream->queue->run_all();
    }
}

cudaError_t forbid_while_capturing() {
    bool forbidden = false;
    for (const cudaStream_t stream : streams()) {
        if (stream->capture == nullptr || stream->capture->mode == cudaStreamCaptureModeRelaxed) {
            continue;
        }
        stream->capture->invalid = true;
        forbidden = true;
    }
    return forbidden ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

}  // namespace vcuda::emulated

namespace emulated = vcuda::emulated;

// ------------------------------------------------------------------------------------- streams

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    Call call(FAKE_OTHER);
    if (call.refused()) return call.answer();
    *stream = new CUstream_st;
    (*stream)->device = emulated::current_device();
    (*stream)->blocking = (flags & cudaStreamNonBlocking) == 0;
    emulated::streams().insert(*stream);
    runtime().objects += 1;
    return call.answer();
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    Call call(FAKE_OTHER, false);
    if (emulated::streams().erase(stream) == 0) return call.answer(cudaErrorInvalidResourceHandle);
    stream->queue->run_all();
    delete stream;
    runtime().objects -= 1;
    return call.answer();
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    Call call(FAKE_SYNC);
    if (!emulated::exists(stream)) return call.answer(cudaErrorInvalidResourceHandle);
    if (emulated::is_capturing(stream)) {
        emulated::stream_of(stream).capture->invalid = true;
        return call.answer(cudaErrorStreamCaptureUnsupported);
    }
    if (!call.refused()) emulated::stream_of(stream).queue->run_all();
    if (!call.refused() && stream == nullptr) emulated::drain(false);
    call.waits();
    return call.answer();
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    Call call(FAKE_SYNC);
    call.waits();
    if (call.refused()) return call.answer();
    if (!emulated::exists(stream)) return call.answer(cudaErrorInvalidResourceHandle);
    Queue &queue = *emulated::stream_of(stream).queue;
    if (queue.work.empty()) return call.answer();
    queue.run_all();  // so that who asks again gets on
    return call.answer(cudaErrorNotReady);
}

cudaError_t cudaDeviceSynchronize() {
    Call call(FAKE_SYNC);
    if (call.refused()) return call.answer();
    if (const cudaError_t error = emulated::forbid_while_capturing(); error != cudaSuccess) {
        return call.answer(error);
    }
    emulated::drain(true);
    call.waits();
    return call.answer();
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    Call call(FAKE_OTHER);
    if (call.refused()) return call.answer();
    if (event == nullptr || !emulated::exists(stream)) {
        return call.answer(cudaErrorInvalidResourceHandle);
    }
    if (!event->recorded) return call.answer();
    if (event->capture != nullptr) {  // joins the capture that the event belongs to
        emulated::stream_of(stream).capture = event->capture;
        return call.answer();
    }
    return call.answer(emulated::submit(
        stream, [queue = event->queue, n = event->position] { queue->run_until(n); }));
}

// ------------------------------------------------------------------------------------- events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    Call call(FAKE_OTHER);
    if (call.refused()) return call.answer();
    *event = new CUevent_st;
    (*event)->timing = (flags & cudaEventDisableTiming) == 0;
    runtime().objects += 1;
    return call.answer();
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    Call call(FAKE_OTHER, false);
    if (event == nullptr) return call.answer(cudaErrorInvalidResourceHandle);
    delete event;
    runtime().objects -= 1;
    return call.answer();
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    Call call(FAKE_OTHER);
    if (call.refused()) return call.answer();
    if (event == nullptr || !emulated::exists(stream)) {
        return call.answer(cudaErrorInvalidResourceHandle);
    }
    CUstream_st &s = emulated::stream_of(stream);
    event->recorded = true;
    event->capture = s.capture;
    event->ns = std::make_shared<int64_t>(0);
    const cudaError_t error =
        emulated::submit(stream, [ns = event->ns] { *ns = emulated::now_ns(); });
    event->queue = s.queue;
    event->position = s.queue->submitted;
    return call.answer(error);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    Call call(FAKE_SYNC);
    if (call.refused()) return call.answer();
    if (event == nullptr) return call.answer(cudaErrorInvalidResourceHandle);
    if (event->capture != nullptr) return call.answer(cudaErrorStreamCaptureUnsupported);
    if (event->recorded) event->queue->run_until(event->position);
    call.waits();
    return call.answer();
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    Call call(FAKE_SYNC);
    call.waits();
    if (call.refused()) return call.answer();
    if (event == nullptr) return call.answer(cudaErrorInvalidResourceHandle);
    if (!event->recorded || event->queue->executed >= event->position) return call.answer();
    event->queue->run_until(event->position);  // so that who asks again gets on
    return call.answer(cudaErrorNotReady);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    Call call(FAKE_OTHER);
    if (call.refused()) return call.answer();
    if (start == nullptr || end == nullptr || !start->recorded || !end->recorded ||
        !start->timing || !end->timing) {
        return call.answer(cudaErrorInvalidResourceHandle);
    }
    if (*start->ns == 0 || *end->ns == 0) return call.answer(cudaErrorNotReady);
    *ms = std::max(0.0005f, static_cast<float>(*end->ns - *start->ns) * 1e-6f);
    return call.answer();
}

// ------------------------------------------------------------------------------------- graphs

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    Call call(FAKE_GRAPH);
    if (call.refused()) return call.answer();
    if (stream == nullptr) return call.answer(cudaErrorStreamCaptureUnsupported);
    if (!emulated::exists(stream)) return call.answer(cudaErrorInvalidResourceHandle);
    if (stream->capture != nullptr) return call.answer(cudaErrorIllegalState);
    stream->capture = std::make_shared<Capture>();
    stream->capture->mode = mode;
    stream->began_capture = true;
    return call.answer();
}

// Ends the capture whatever the answer is.
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    Call call(FAKE_GRAPH);
    if (graph == nullptr || stream == nullptr || !emulated::exists(stream) ||
        !stream->began_capture) {
        return call.answer(cudaErrorIllegalState);
    }
    const std::shared_ptr<Capture> capture = stream->capture;
    for (const cudaStream_t other : emulated::streams()) {
        if (other->capture == capture) other->capture = nullptr;
    }
    stream->began_capture = false;
    *graph = nullptr;
    if (call.refused()) return call.answer();
    if (capture->invalid) return call.answer(cudaErrorStreamCaptureInvalidated);
    *graph = new CUgraph_st{capture->work};
    runtime().objects += 1;
    return call.answer();
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    Call call(FAKE_GRAPH);
    if (call.refused()) return call.answer();
    const std::shared_ptr<Capture> &capture = emulated::stream_of(stream).capture;
    *status = capture == nullptr ? cudaStreamCaptureStatusNone
              : capture->invalid ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
    return call.answer();
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long) {
    Call call(FAKE_GRAPH);
    if (call.refused()) return call.answer();
    if (graph == nullptr) return call.answer(cudaErrorInvalidValue);
    *exec = new CUgraphExec_st{graph->work};
    runtime().objects += 1;
    return call.answer();
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    Call call(FAKE_GRAPH);
    if (call.refused()) return call.answer();
    if (nodes != nullptr) return call.answer(cudaErrorNotSupported);  // their number only
    *count = graph->work.size();
    return call.answer();
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream) {
    Call call(FAKE_GRAPH);
    if (call.refused()) return call.answer();
    if (exec == nullptr || !emulated::exists(stream)) return call.answer(cudaErrorInvalidValue);
    return call.answer();
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    Call call(FAKE_LAUNCH);
    if (call.refused()) return call.answer();
    emulated::Runtime &r = runtime();
    if (exec == nullptr) return call.answer(cudaErrorInvalidValue);
    if (r.late_fault.left > 0 && --r.late_fault.left == 0) {
        r.late[emulated::current_device()] = static_cast<cudaError_t>(r.late_fault.error);
        return call.answer();
    }
    return call.answer(emulated::submit(stream, [work = exec->work] {
        runtime().counters[FAKE_GRAPHS] += 1;
        for (const Work &one : work) one();
    }));
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    Call call(FAKE_OTHER, false);
    if (graph == nullptr) return call.answer(cudaErrorInvalidValue);
    delete graph;
    runtime().objects -= 1;
    return call.answer();
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    Call call(FAKE_OTHER, false);
    if (exec == nullptr) return call.answer(cudaErrorInvalidValue);
    emulated::drain(true);  // it may still be running
    delete exec;
    runtime().objects -= 1;
    return call.answer();
}
