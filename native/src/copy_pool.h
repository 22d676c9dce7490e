// Copying host memory on several threads: one thread moves about 8 GB/s, the bus to the device 55.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace vcuda {

// memcpy by up to kThreads threads, which are started when a copy is first worth it.
class CopyPool {
  public:
    CopyPool() = default;
    ~CopyPool();
    CopyPool(const CopyPool &) = delete;
    CopyPool &operator=(const CopyPool &) = delete;

    void copy(void *to, const void *from, size_t bytes);

  private:
    static constexpr size_t kThreads = 8;          // the caller's among them
    static constexpr size_t kPartBytes = 1 << 20;  // less is not worth waking a thread for

    void start();
    void serve(size_t worker);

    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> workers_;
    bool started_ = false;
    bool stop_ = false;
    uint64_t job_ = 0;    // number of the copy that is going on
    size_t pending_ = 0;  // workers that still copy
    char *to_ = nullptr;  // the copy: part i is [i * part, (i + 1) * part)
    const char *from_ = nullptr;
    size_t bytes_ = 0;
    size_t part_ = 0;
};

}  // namespace vcuda
