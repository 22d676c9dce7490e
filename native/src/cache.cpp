#include "cache.h"

#include <algorithm>

#include "pack.h"
#include "prof.h"
#include "wkey.h"

namespace vcuda {

namespace {

constexpr uint64_t kPad = 512;  // what a CUDA allocation is rounded up to at least

const char *kind_name(int32_t kind) {
    static constexpr const char *kNames[] = {"F32", "BF16", "Q8", "Q4"};
    return kind >= VCUDA_F32 && kind <= VCUDA_Q4 ? kNames[kind] : "unknown";
}

long long ll(int64_t value) {
    return static_cast<long long>(value);
}

unsigned long long ull(uint64_t value) {
    return static_cast<unsigned long long>(value);
}

// Where the flags lie: behind codes and scales.
uint64_t flags_offset(const Tiles &tiles) {
    return static_cast<uint64_t>(tiles.codes_bytes() + tiles.scales_bytes());
}

void check_rows(uint64_t key, const Entry &entry, int64_t row, int64_t rows) {
    if (row < 0 || rows < 1 || rows > entry.rows() || row > entry.rows() - rows) {
        // the end of the rows is not named: it may be more than an integer holds
        throw Error("%lld rows from row %lld of the weight %s: it has the rows [0, %lld)", ll(rows),
                    ll(row), KeyName(key).text, ll(entry.rows()));
    }
}

// Whether a weight of `kind` can be given as `source`.
bool can_convert(int32_t source, int32_t kind) {
    if (source == kind) return true;
    if (kind == VCUDA_BF16) return source == VCUDA_F32;
    return (kind == VCUDA_Q8 || kind == VCUDA_Q4) && (source == VCUDA_BF16 || source == VCUDA_F32);
}

// Codes are required, scales exactly where the kind has them.
void check_pointers(uint64_t key, int32_t kind, const void *codes, const void *scales) {
    const bool scaled = kind == VCUDA_Q8 || kind == VCUDA_Q4;
    if (codes == nullptr) throw Error("the argument 'codes' is NULL");
    if (scaled && scales == nullptr) {
        throw Error("the weight %s: %s rows have scales, and the argument 'scales' is NULL",
                    KeyName(key).text, kind_name(kind));
    }
    if (!scaled && scales != nullptr) {
        throw Error("the weight %s: %s rows have no scales, so the argument 'scales' must be NULL",
                    KeyName(key).text, kind_name(kind));
    }
}

}  // namespace

void check_matrix(const vcuda_matrix &m) {
    constexpr int64_t most_n = int64_t{1} << 30;
    constexpr int64_t most_k = int64_t{1} << 20;
    constexpr int64_t most_stack = int64_t{1} << 16;
    if (m.kind < VCUDA_F32 || m.kind > VCUDA_Q4) {
        throw Error("matrix.kind is %d; it must be VCUDA_F32, _BF16, _Q8 or _Q4 (0 to 3)", m.kind);
    }
    const auto within = [](const char *name, int64_t value, int64_t most) {
        if (value < 1 || value > most) {
            throw Error("matrix.%s is %lld; it must be 1 to %lld", name, ll(value), ll(most));
        }
    };
    within("stack", m.stack, most_stack);
    within("n", m.n, most_n);
    within("k", m.k, most_k);
    constexpr int64_t most_elements = int64_t{1} << 42;
    if (m.n * m.k > most_elements / m.stack) {
        throw Error("a matrix of %lld x [%lld, %lld] is more than any device holds", ll(m.stack),
                    ll(m.n), ll(m.k));
    }
    // tiles are numbered by 32 bits
    if (ceil_div(m.n, kRowTile) * m.stack > INT32_MAX) {
        throw Error("a matrix of %lld x [%lld, %lld] has more than %d row tiles", ll(m.stack),
                    ll(m.n), ll(m.k), INT32_MAX);
    }
}

uint64_t entry_bytes(const vcuda_matrix &m) {
    const uint64_t bytes = flags_offset(tiles_of(m.kind, m.stack, m.n, m.k)) + sizeof(uint32_t);
    return (bytes + kPad - 1) / kPad * kPad;
}

// ---------------------------------------------------------------------------------------- rows

void RowSet::add(int64_t lo, int64_t hi) {
    auto next = ranges_.upper_bound(lo);
    if (next != ranges_.begin() && std::prev(next)->second >= lo) next = std::prev(next);
    int64_t begin = lo;
    int64_t end = hi;
    int64_t known = 0;  // rows of [lo, hi) that were there before
    while (next != ranges_.end() && next->first <= hi) {
        const int64_t from = std::max(lo, next->first);
        const int64_t to = std::min(hi, next->second);
        if (from < to) {
            known += to - from;
            if (twice_ < 0) twice_ = from;
        }
        begin = std::min(begin, next->first);
        end = std::max(end, next->second);
        next = ranges_.erase(next);
    }
    ranges_.emplace(begin, end);
    count_ += hi - lo - known;
}

int64_t RowSet::first_missing() const {
    return ranges_.empty() || ranges_.begin()->first > 0 ? 0 : ranges_.begin()->second;
}

// --------------------------------------------------------------------------------------- budget

uint64_t Cache::evictable(std::optional<uint64_t> except) const {
    uint64_t sum = 0;
    for (const auto &[key, entry] : complete_) {
        if (!entry->pinned && key != except) sum += entry->bytes;
    }
    return sum;
}

Cache::Entries::iterator Cache::erase(Entries::iterator at) {
    bytes_of_complete_ -= at->second->bytes;
    generation_ += 1;
    return complete_.erase(at);
}

// Drop the least recently used entry that is neither pinned nor of the key `except`.
bool Cache::evict_one(std::optional<uint64_t> except) {
    auto oldest = complete_.end();
    for (auto at = complete_.begin(); at != complete_.end(); ++at) {
        if (at->second->pinned || at->first == except) continue;
        if (oldest == complete_.end() || at->second->last_use < oldest->second->last_use) {
            oldest = at;
        }
    }
    if (oldest == complete_.end()) return false;
    erase(oldest);
    evictions_ += 1;
    return true;
}

void Cache::shrink_to_budget(std::optional<uint64_t> except) {
    while (budget_ != 0 && bytes() > budget_ && evict_one(except)) {
    }
}

void Cache::set_budget(uint64_t bytes_allowed) {
    const uint64_t fixed = bytes() - evictable(std::nullopt);
    if (bytes_allowed != 0 && fixed > bytes_allowed) {
        throw Error(
            "a budget of %llu bytes: entries that are pinned or being filled take %llu; unpin or "
            "drop some first",
            ull(bytes_allowed), ull(fixed));
    }
    budget_ = bytes_allowed;
    shrink_to_budget(std::nullopt);
}

vcuda_cache_info Cache::info() const {
    vcuda_cache_info info{};
    info.struct_size = sizeof info;
    info.budget = budget_;
    info.bytes = bytes();
    info.entries = complete_.size() + begun_.size();
    for (const Entries *entries : {&complete_, &begun_}) {
        for (const auto &[key, entry] : *entries) {
            if (entry->pinned) info.pinned_bytes += entry->bytes;
        }
    }
    info.hits = hits_;
    info.misses = misses_;
    info.uploads = uploads_;
    info.evictions = evictions_;
    return info;
}

// ------------------------------------------------------------------------------------- entries

// Memory for an entry, filled with zeros. Nothing is evicted before it is clear that there will be
// room; evicting for the budget is left to the caller, once nothing can fail any more.
std::unique_ptr<Entry> Cache::take(uint64_t key, const vcuda_matrix &matrix, bool pinned) {
    if (begun_.count(key) != 0) {
        throw Error(
            "the weight %s has been begun and not ended; call vcuda_cache_end or vcuda_cache_drop "
            "first",
            KeyName(key).text);
    }
    auto entry = std::make_unique<Entry>();
    entry->matrix = matrix;
    entry->matrix.struct_size = sizeof entry->matrix;
    entry->tiles = tiles_of(matrix.kind, matrix.stack, matrix.n, matrix.k);
    entry->bytes = entry_bytes(matrix);
    entry->pinned = pinned;

    const uint64_t droppable = evictable(key);
    const uint64_t fixed = bytes() - droppable;
    if (budget_ != 0 && (fixed > budget_ || entry->bytes > budget_ - fixed)) {
        throw Error(
            "the weight %s needs %llu bytes, and of the cache's budget of %llu bytes %llu are "
            "taken by entries that stay; raise it with vcuda_cache_budget, or drop some",
            KeyName(key).text, ull(entry->bytes), ull(budget_), ull(fixed));
    }
    entry->memory = try_device_memory(entry->bytes);
    if (!entry->memory) {
        const uint64_t free_bytes = free_memory();
        if (free_bytes + droppable < entry->bytes) {
            throw Error(
                "the weight %s needs %s of device memory, and %s are free and %s can be evicted; "
                "drop entries, or use a smaller kind",
                KeyName(key).text, Bytes(entry->bytes).text, Bytes(free_bytes).text,
                Bytes(droppable).text);
        }
        while (!entry->memory && evict_one(key)) entry->memory = try_device_memory(entry->bytes);
        if (!entry->memory) {
            throw Error(
                "the weight %s needs %s of device memory in one piece; %s are free, in smaller "
                "pieces",
                KeyName(key).text, Bytes(entry->bytes).text, Bytes(free_memory()).text);
        }
    }
    auto *base = static_cast<char *>(entry->memory.get());
    entry->tiles.codes = base;
    if (entry->tiles.scales_bytes() != 0) {
        entry->tiles.scales = reinterpret_cast<uint32_t *>(base + entry->tiles.codes_bytes());
    }
    entry->flags = reinterpret_cast<uint32_t *>(base + flags_offset(entry->tiles));
    uploader_.zero(base, entry->bytes);
    return entry;
}

void Cache::commit(uint64_t key, std::unique_ptr<Entry> entry) {
    const uint64_t size = entry->bytes;
    entry->last_use = ++clock_;
    entry->given = RowSet();
    std::unique_ptr<Entry> &place = complete_[key];
    if (place) bytes_of_complete_ -= place->bytes;
    place = std::move(entry);
    bytes_of_complete_ += size;
    generation_ += 1;
    uploads_ += 1;
}

Entry &Cache::begun(uint64_t key) {
    const auto at = begun_.find(key);
    if (at == begun_.end()) {
        throw Error("the weight %s has not been begun; call vcuda_cache_begin first",
                    KeyName(key).text);
    }
    return *at->second;
}

void Cache::begin(uint64_t key, const vcuda_matrix &matrix, bool pinned) {
    std::unique_ptr<Entry> entry = take(key, matrix, pinned);
    bytes_of_begun_ += begun_.emplace(key, std::move(entry)).first->second->bytes;
    shrink_to_budget(key);
}

void Cache::rows(uint64_t key, int64_t row, int64_t rows, int32_t source, const void *codes,
                 const void *scales, vcuda_prof &prof) {
    Entry &entry = begun(key);
    check_rows(key, entry, row, rows);
    if (!can_convert(source, entry.matrix.kind)) {
        throw Error(
            "the weight %s is %s and its rows are given as %s (%d); give its own kind, or a wider "
            "float",
            KeyName(key).text, kind_name(entry.matrix.kind), kind_name(source), source);
    }
    check_pointers(key, source, codes, scales);
    uploader_.rows(entry.tiles, entry.flags, row, rows, source, codes, scales, prof);
    entry.given.add(row, row + rows);
}

void Cache::end(uint64_t key, vcuda_prof &prof) {
    Entry &entry = begun(key);
    const uint32_t flags = uploader_.finish(entry.flags, prof);
    bytes_of_begun_ -= entry.bytes;
    std::unique_ptr<Entry> ended = std::move(begun_.extract(key).mapped());
    const RowSet &given = ended->given;
    const KeyName name(key);
    if (given.twice() >= 0) {
        throw Error("row %lld of the weight %s was given twice; the entry is dropped",
                    ll(given.twice()), name.text);
    }
    if (given.count() != entry.rows()) {
        throw Error(
            "%lld of the %lld rows of the weight %s are missing, the first is row %lld; the entry "
            "is dropped",
            ll(entry.rows() - given.count()), ll(entry.rows()), name.text,
            ll(given.first_missing()));
    }
    if ((flags & kNotFinite) != 0) {
        throw Error("the weight %s has a number that is NaN or infinite; the entry is dropped",
                    name.text);
    }
    if ((flags & kTooLarge) != 0) {
        throw Error("the weight %s has a number too large for %s; the entry is dropped", name.text,
                    kind_name(entry.matrix.kind));
    }
    commit(key, std::move(ended));
}

void Cache::fill(uint64_t key, const vcuda_matrix &matrix, bool pinned, uint64_t seed,
                 vcuda_prof &prof) {
    std::unique_ptr<Entry> entry = take(key, matrix, pinned);
    try {
        uploader_.fill(entry->tiles, seed, prof);
        uploader_.finish(entry->flags, prof);
    } catch (...) {
        uploader_.settle();
        throw;
    }
    commit(key, std::move(entry));
    shrink_to_budget(key);
}

void Cache::read(uint64_t key, int64_t row, int64_t rows, void *codes, void *scales,
                 vcuda_prof &prof) {
    Entry &entry = require(key);
    check_rows(key, entry, row, rows);
    check_pointers(key, entry.matrix.kind, codes, scales);
    uploader_.read(entry.tiles, row, rows, codes, scales, prof);
}

void Cache::use(Entry &entry) {
    hits_ += 1;
    entry.last_use = ++clock_;
}

Entry *Cache::find(uint64_t key) {
    const auto at = complete_.find(key);
    if (at == complete_.end()) {
        misses_ += 1;
        return nullptr;
    }
    use(*at->second);
    return at->second.get();
}

Entry &Cache::require(uint64_t key) {
    Entry *entry = find(key);
    if (entry == nullptr) {
        throw Error("the weight %s is not in the cache; upload it with vcuda_cache_begin%s",
                    KeyName(key).text,
                    begun_.count(key) != 0 ? " (it has been begun and not ended)" : "");
    }
    return *entry;
}

void Cache::pin(uint64_t key, bool pinned) {
    const auto complete = complete_.find(key);
    const auto begun = begun_.find(key);
    if (complete == complete_.end() && begun == begun_.end()) {
        throw Error("the weight %s is not in the cache, so it cannot be pinned", KeyName(key).text);
    }
    if (complete != complete_.end()) complete->second->pinned = pinned;
    if (begun != begun_.end()) begun->second->pinned = pinned;
}

void Cache::drop(uint64_t key) {
    const auto complete = complete_.find(key);
    const auto begun = begun_.find(key);
    if (complete == complete_.end() && begun == begun_.end()) {
        throw Error("the weight %s is not in the cache, so it cannot be dropped",
                    KeyName(key).text);
    }
    if (begun != begun_.end()) {
        uploader_.settle();  // its rows may still be on their way
        bytes_of_begun_ -= begun->second->bytes;
        begun_.erase(begun);
    }
    if (complete != complete_.end()) erase(complete);
}

}  // namespace vcuda
