// Products on their own: rows of the caller's memory times weights of the cache, for a model that
// is computed elsewhere and has some of its weights here.
#pragma once

#include <cstdint>
#include <vector>

#include "cache.h"
#include "copy_pool.h"
#include "cuda_objects.h"
#include "device.h"
#include "gemv_fused.h"
#include "observe.h"
#include "operand_rows.h"
#include "vcuda.h"

namespace vcuda {

// Rows of a product up to which each is multiplied as decoding does it; more go to the tensor cores
// together.
constexpr int32_t kFewRows = 4;

// Rows of an operand at a time.
constexpr int32_t kChunkRows = 2048;

// What the caller gives.
struct ProductCall {
    const vcuda_product *products;  // [count], as many bytes apart as their struct_size says
    int32_t count;
    const float *x;  // [x_rows][k]
    int64_t x_rows;
    int64_t k;
    float *y;  // [y_floats]
    int64_t y_floats;
};

// The buffers, which grow and stay, and the work of a call. Everything is checked, and all memory
// taken, before anything is sent.
class Products {
  public:
    Products(const Device &device, Cache &cache) : device_(device), cache_(cache) {}

    // vcuda_dev_gemm_fused.
    void run(const ProductCall &call, bool timing, vcuda_prof &prof);

    // y [m][n] = x [m][k] * W^T with one matrix of the stack of an entry.
    void one(uint64_t key, int64_t index, const float *x, int32_t m, float *y, bool timing,
             vcuda_prof &prof);

  private:
    // One product, checked. Its matrices are [0, matrices) of `tiles`, whose results lie side by
    // side.
    struct Member {
        Tiles tiles;
        int32_t matrices;
        int32_t rows;
        int32_t group;  // of groups_; -1: few rows
        int64_t first;  // row of x
        int64_t columns;
        int64_t y, stride;           // in the caller's memory
        int64_t result, row_floats;  // where it lies among the results, and its rows' distance
    };
    // Members of many rows that share an operand.
    struct Group {
        Tiles tiles;  // of one of them
        int32_t rows;
        int32_t flag;  // the first of its flags, one a chunk
        int64_t first;
    };
    // Where things lie in the arena and in the staging, in floats. One copy brings [0, results),
    // one fetches [flags, end).
    struct Layout {
        int64_t flags, results, end;
    };
    template <class Memory>
    struct Buffer {
        Memory memory;
        uint64_t bytes = 0;
    };

    void check(const ProductCall &call);
    Member checked(const ProductCall &call, int32_t i);
    void check_overlap();
    int32_t group_of(const Member &member);
    void lay_out(const ProductCall &call);
    void reserve();

    void send(const ProductCall &call, vcuda_prof &prof);
    void submit(Submission &s, int64_t k);
    void submit_few(Submission &s, int64_t k);
    void submit_group(Submission &s, size_t group, int64_t k);
    bool submit_overflowed(Submission &s, int64_t k);
    void add_rows(Submission &s, GemvTable &table, const Member &member, int64_t row, int64_t rows,
                  int64_t k);
    void launch_table(Submission &s, GemvTable &table);
    void fetch(vcuda_prof &prof);
    void deliver(const ProductCall &call);

    template <class T>
    T *arena(int64_t floats) const {
        return reinterpret_cast<T *>(static_cast<float *>(arena_.memory.get()) + floats);
    }
    template <class T>
    T *staging(int64_t floats) const {
        return reinterpret_cast<T *>(static_cast<float *>(staging_.memory.get()) + floats);
    }

    const Device &device_;
    Cache &cache_;
    Buffer<DeviceMemory> arena_;    // x, flags, results
    Buffer<PinnedMemory> staging_;  // the same on the host
    Buffer<DeviceMemory> operand_;  // of one chunk of one group
    CopyPool pool_;

    // Of the call that is going on; kept for their memory.
    std::vector<Member> members_;
    std::vector<Group> groups_;
    std::vector<std::pair<int64_t, int64_t>> ranges_;
    Layout layout_{};
};

}  // namespace vcuda
