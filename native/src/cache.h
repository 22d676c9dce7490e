// The device's weight cache: what lies there, within which budget, and what goes first.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>

#include "cuda_objects.h"
#include "layout.h"
#include "upload.h"
#include "vcuda.h"

namespace vcuda {

// Throws Error when a matrix is of no kind, or its extents are not positive or too large.
void check_matrix(const vcuda_matrix &matrix);

// Device bytes of an entry: codes, scales, one word of flags, padding.
uint64_t entry_bytes(const vcuda_matrix &matrix);

// Which rows of an entry have been given.
class RowSet {
  public:
    void add(int64_t lo, int64_t hi);
    int64_t count() const { return count_; }
    int64_t first_missing() const;
    int64_t twice() const { return twice_; }  // a row that was given twice; -1: none

  private:
    std::map<int64_t, int64_t> ranges_;  // begin -> end; they do not touch
    int64_t count_ = 0;
    int64_t twice_ = -1;
};

struct Entry {
    vcuda_matrix matrix{};
    Tiles tiles;
    DeviceMemory memory;
    uint32_t *flags = nullptr;  // device memory, behind the scales
    uint64_t bytes = 0;
    bool pinned = false;
    uint64_t last_use = 0;  // of Cache::clock_
    RowSet given;

    int64_t rows() const { return matrix.stack * matrix.n; }
};

class Cache {
  public:
    explicit Cache(Uploader &uploader) : uploader_(uploader) {}

    void set_budget(uint64_t bytes);
    vcuda_cache_info info() const;

    void begin(uint64_t key, const vcuda_matrix &matrix, bool pinned);
    void rows(uint64_t key, int64_t row, int64_t rows, int32_t source, const void *codes,
              const void *scales, vcuda_prof &prof);
    void end(uint64_t key, vcuda_prof &prof);
    void fill(uint64_t key, const vcuda_matrix &matrix, bool pinned, uint64_t seed,
              vcuda_prof &prof);
    void read(uint64_t key, int64_t row, int64_t rows, void *codes, void *scales, vcuda_prof &prof);
    void pin(uint64_t key, bool pinned);
    void drop(uint64_t key);

    // NULL when there is no complete entry of this key. Counts a hit or a miss, and a use.
    Entry *find(uint64_t key);
    // The same, or an Error that says so.
    Entry &require(uint64_t key);
    // A hit and a use of an entry that an earlier find gave. PRE: same generation().
    void use(Entry &entry);

    // Grows with every change of the complete entries: as long as it stays, so do their pointers.
    uint64_t generation() const { return generation_; }

  private:
    using Entries = std::unordered_map<uint64_t, std::unique_ptr<Entry>>;

    std::unique_ptr<Entry> take(uint64_t key, const vcuda_matrix &matrix, bool pinned);
    void commit(uint64_t key, std::unique_ptr<Entry> entry);
    uint64_t bytes() const { return bytes_of_complete_ + bytes_of_begun_; }
    uint64_t evictable(std::optional<uint64_t> except) const;
    bool evict_one(std::optional<uint64_t> except);
    void shrink_to_budget(std::optional<uint64_t> except);
    Entries::iterator erase(Entries::iterator at);  // of complete_
    Entry &begun(uint64_t key);

    Uploader &uploader_;
    Entries complete_, begun_;
    uint64_t bytes_of_complete_ = 0;
    uint64_t bytes_of_begun_ = 0;
    uint64_t budget_ = 0;
    uint64_t clock_ = 0;
    uint64_t generation_ = 1;
    uint64_t hits_ = 0, misses_ = 0, uploads_ = 0, evictions_ = 0;
};

}  // namespace vcuda
