#include "copy_pool.h"

#include <algorithm>
#include <cstring>
#include <exception>

namespace vcuda {

CopyPool::~CopyPool() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (std::thread &worker : workers_) worker.join();
}

void CopyPool::start() {
    started_ = true;
    const size_t threads =
        std::min<size_t>(kThreads, std::max(1u, std::thread::hardware_concurrency()));
    try {
        workers_.reserve(threads - 1);
        while (workers_.size() + 1 < threads) {
            const size_t worker = workers_.size() + 1;
            workers_.emplace_back([this, worker] { serve(worker); });
        }
    } catch (const std::exception &) {
        // a process that may start no more threads, or has no memory for them, copies with those it
        // has: a copy never fails half-way
    }
}

void CopyPool::copy(void *to, const void *from, size_t bytes) {
    if (bytes == 0) return;
    if (bytes >= 2 * kPartBytes && !started_) start();
    const size_t threads = std::min(workers_.size() + 1, std::max<size_t>(1, bytes / kPartBytes));
    if (threads == 1) {
        std::memcpy(to, from, bytes);
        return;
    }
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        to_ = static_cast<char *>(to);
        from_ = static_cast<const char *>(from);
        bytes_ = bytes;
        part_ = (bytes + threads - 1) / threads;
        pending_ = workers_.size();
        job_ += 1;
    }
    wake_.notify_all();
    std::memcpy(to, from, std::min(part_, bytes));
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return pending_ == 0; });
}

void CopyPool::serve(size_t worker) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        wake_.wait(lock, [&] { return stop_ || job_ != seen; });
        if (stop_) return;
        seen = job_;
        const size_t begin = std::min(bytes_, worker * part_);
        const size_t end = std::min(bytes_, begin + part_);
        lock.unlock();
        if (end > begin) std::memcpy(to_ + begin, from_ + begin, end - begin);
        lock.lock();
        pending_ -= 1;
        if (pending_ == 0) done_.notify_one();
    }
}

}  // namespace vcuda
