#include "products.h"

#include <algorithm>
#include <cstring>

#include "gemm.h"
#include "gemv.h"
#include "prof.h"
#include "wkey.h"

namespace vcuda {

namespace {

constexpr size_t kProductV1 = 48;
static_assert(sizeof(vcuda_product) >= kProductV1, "fields are only appended");

constexpr int64_t kMostFloats = int64_t{1} << 48;  // no sum of extents below it overflows
constexpr int64_t kAlignFloats = 64;               // of flags and results
constexpr int64_t kRowFloats = 8;                  // rows of results begin at whole 32-byte sectors
constexpr uint64_t kLeastBytes = 1 << 20;          // of a buffer
constexpr int32_t kParts = 2;                      // of operands: as exact as float32

long long ll(int64_t value) {
    return static_cast<long long>(value);
}

constexpr int64_t round_up(int64_t n, int64_t to) {
    return ceil_div(n, to) * to;
}

constexpr uint64_t bytes_of(int64_t floats) {
    return static_cast<uint64_t>(floats) * sizeof(float);
}

// The caller's i-th product with the fields that he does not know at 0.
vcuda_product product_at(const ProductCall &call, int32_t i) {
    const uint32_t size = call.products->struct_size;
    const auto *from = reinterpret_cast<const char *>(call.products) + size_t{size} * i;
    vcuda_product product{};
    std::memcpy(&product, from, size);
    if (product.struct_size != size) {
        throw Error("products[%d].struct_size is %u and that of products[0] is %u", i,
                    product.struct_size, size);
    }
    return product;
}

// Matrices [first, first + count) of a stack.
Tiles matrices_of(const Tiles &stack, int64_t first, int64_t count) {
    Tiles some = matrix_of(stack, static_cast<int32_t>(first));
    some.stack = static_cast<int32_t>(count);
    return some;
}

// A stack without padding between its matrices is one matrix.
void join(Tiles &tiles) {
    const int64_t n = int64_t{tiles.stack} * tiles.n;
    if (tiles.n % kRowTile != 0 || n > INT32_MAX) return;
    tiles.n = static_cast<int32_t>(n);
    tiles.row_tiles *= tiles.stack;
    tiles.stack = 1;
}

// The caller's call as far as it can be judged without a weight.
void check_call(const ProductCall &call) {
    const auto within = [](const char *name, int64_t value, int64_t most) {
        if (value < 1 || value > most) {
            throw Error("%s is %lld; it must be 1 to %lld", name, ll(value), ll(most));
        }
    };
    within("count", call.count, INT32_MAX);
    within("x_rows", call.x_rows, INT32_MAX);
    within("k", call.k, int64_t{1} << 20);
    within("y_floats", call.y_floats, kMostFloats);
    const uint32_t size = call.products->struct_size;
    if (size < kProductV1 || size > sizeof(vcuda_product)) {
        throw Error(
            "products[0].struct_size is %u and this library knows %zu to %zu bytes; use the "
            "vcuda.h of this library",
            size, kProductV1, sizeof(vcuda_product));
    }
}

// What a product says of its weight.
void check_matrix_of(const vcuda_product &p, int32_t i, const Entry &entry, int64_t k,
                     const Device &device) {
    const vcuda_matrix &matrix = entry.matrix;
    const KeyName name(p.wkey);
    if (matrix.kind == VCUDA_F32) {
        throw Error("the weight %s is float32; products need bf16, q8 or q4", name.text);
    }
    if (matrix.k != k) {
        throw Error("products[%d]: the weight %s has k = %lld, and rows of x have %lld numbers", i,
                    name.text, ll(matrix.k), ll(k));
    }
    const int64_t most = gemv_max_k(matrix.kind, device.shared_per_block);
    if (k > most) {
        throw Error("the weight %s has k = %lld and device %d multiplies vectors of at most %lld",
                    name.text, ll(k), device.index, ll(most));
    }
    if (p.index < -1 || p.index >= matrix.stack) {
        throw Error(
            "products[%d]: matrix %lld of the weight %s: it is a stack of %lld, numbered from 0, "
            "and -1 is all of them",
            i, ll(p.index), name.text, ll(matrix.stack));
    }
}

// What a product says of x and y.
void check_places(const vcuda_product &p, int32_t i, int64_t columns, const ProductCall &call) {
    if (p.rows < 1) throw Error("products[%d].rows is %d; it must be 1 or more", i, p.rows);
    if (p.first < 0 || p.first > call.x_rows - p.rows) {
        throw Error("products[%d] takes %d rows from row %lld of x, which has %lld", i, p.rows,
                    ll(p.first), ll(call.x_rows));
    }
    if (p.stride < columns) {
        throw Error("products[%d].stride is %lld, and its result has %lld columns", i, ll(p.stride),
                    ll(columns));
    }
    const int64_t left = call.y_floats - columns;  // where the last row may begin
    if (p.y < 0 || p.y > left || (p.rows > 1 && p.stride > (left - p.y) / (p.rows - 1))) {
        throw Error(
            "products[%d] writes %d rows of %lld columns, %lld apart, from y + %lld on, and y has "
            "%lld floats",
            i, p.rows, ll(columns), ll(p.stride), ll(p.y), ll(call.y_floats));
    }
}

// At least `bytes` of memory, and twice what there was where that goes. `take(n)` gives none when
// there is none; the old memory goes only when there is new.
template <class Buffer, class Take>
bool grow(Buffer &buffer, uint64_t bytes, const Take &take) {
    if (bytes <= buffer.bytes) return false;
    for (const uint64_t size : {std::max({bytes, 2 * buffer.bytes, kLeastBytes}), bytes}) {
        auto memory = take(size);
        if (!memory) continue;
        buffer.memory = std::move(memory);
        buffer.bytes = size;
        return true;
    }
    return false;
}

}  // namespace

// ---------------------------------------------------------------------------------------- checks

Products::Member Products::checked(const ProductCall &call, int32_t i) {
    const vcuda_product p = product_at(call, i);
    const Entry &entry = cache_.require(p.wkey);
    check_matrix_of(p, i, entry, call.k, device_);
    const bool all = p.index == -1;
    Member member{};
    member.tiles =
        matrices_of(entry.tiles, all ? 0 : p.index, all ? entry.matrix.stack : int64_t{1});
    member.columns = int64_t{member.tiles.stack} * member.tiles.n;
    check_places(p, i, member.columns, call);
    join(member.tiles);
    member.matrices = member.tiles.stack;
    member.rows = p.rows;
    member.first = p.first;
    member.y = p.y;
    member.stride = p.stride;
    member.group = p.rows > kFewRows ? group_of(member) : -1;
    return member;
}

// The group that has the operand which a member needs, or a new one.
int32_t Products::group_of(const Member &member) {
    const auto bf16 = [](const Tiles &tiles) { return tiles.kind == VCUDA_BF16; };
    for (size_t i = 0; i < groups_.size(); ++i) {
        const Group &group = groups_[i];
        if (group.first == member.first && group.rows == member.rows &&
            bf16(group.tiles) == bf16(member.tiles)) {
            return static_cast<int32_t>(i);
        }
    }
    groups_.push_back({member.tiles, member.rows, 0, member.first});
    return static_cast<int32_t>(groups_.size()) - 1;
}

// No two results share a float. Usually one ends before the next begins; else row by row.
void Products::check_overlap() {
    const auto overlap = [&] {
        std::sort(ranges_.begin(), ranges_.end());
        for (size_t i = 1; i < ranges_.size(); ++i) {
            if (ranges_[i].first < ranges_[i - 1].second) return ranges_[i].first;
        }
        return int64_t{-1};
    };
    ranges_.clear();
    for (const Member &m : members_) {
        ranges_.emplace_back(m.y, m.y + (m.rows - 1) * m.stride + m.columns);
    }
    if (overlap() < 0) return;
    ranges_.clear();
    for (const Member &m : members_) {
        for (int64_t row = 0; row < m.rows; ++row) {
            ranges_.emplace_back(m.y + row * m.stride, m.y + row * m.stride + m.columns);
        }
    }
    const int64_t at = overlap();
    if (at < 0) return;
    throw Error("two of the %zu products write to y + %lld; give each a place of its own",
                members_.size(), ll(at));
}

void Products::check(const ProductCall &call) {
    check_call(call);
    members_.clear();
    groups_.clear();
    for (int32_t i = 0; i < call.count; ++i) members_.push_back(checked(call, i));
    check_overlap();
}

// ---------------------------------------------------------------------------------------- memory

void Products::lay_out(const ProductCall &call) {
    layout_.flags = round_up(call.x_rows * padded_row(call.k), kAlignFloats);
    int64_t flags = 0;
    for (Group &group : groups_) {
        group.flag = static_cast<int32_t>(flags);
        flags += ceil_div(group.rows, kChunkRows);
    }
    layout_.results = round_up(layout_.flags + flags, kAlignFloats);
    layout_.end = layout_.results;
    for (Member &member : members_) {
        member.result = layout_.end;
        member.row_floats = round_up(member.columns, kRowFloats);
        layout_.end += member.rows * member.row_floats;
    }
}

void Products::reserve() {
    const uint64_t bytes = bytes_of(layout_.end);
    const cudaStream_t stream = device_.stream.get();
    constexpr const char *what = "the buffer for rows and results of products";
    const bool more = grow(arena_, bytes, [&](uint64_t n) {
        return n > bytes ? try_device_memory(n) : device_memory(n, what);
    });
    // what is between two rows of results comes back with them, and nobody writes it
    if (more) CUDA_TRY(cudaMemsetAsync(arena_.memory.get(), 0, arena_.bytes, stream));
    grow(staging_, bytes, [&](uint64_t n) {
        PinnedMemory memory = try_pinned_memory(n);
        if (!memory && n == bytes) {
            throw Error("%s needs %s of pinned host memory, which there is not; ask for fewer rows",
                        what, Bytes(n).text);
        }
        return memory;
    });
    uint64_t most = 0;
    for (const Group &group : groups_) {
        const int32_t rows = std::min(group.rows, kChunkRows);
        const Operand operand = operand_of(group.tiles, kParts, rows);
        most = std::max(most, static_cast<uint64_t>(operand.bytes()));
    }
    const bool grown = grow(operand_, most, [&](uint64_t n) {
        return n > most ? try_device_memory(n) : device_memory(n, "the operand of a product");
    });
    // rows that no product has are read, and what comes of them is not
    if (grown) {
        CUDA_TRY(cudaMemsetAsync(operand_.memory.get(), 0, operand_.bytes, stream));
    }
}

// --------------------------------------------------------------------------------------- kernels

void Products::launch_table(Submission &s, GemvTable &table) {
    if (table.count == 0) return;
    gemv_fused(s.to, table);
    s.did(&vcuda_prof::gemm);
    table.count = 0;
}

// Rows [row, row + rows) of a member, as decoding multiplies them.
void Products::add_rows(Submission &s, GemvTable &table, const Member &member, int64_t row,
                        int64_t rows, int64_t k) {
    for (int64_t i = row; i < row + rows; ++i) {
        const float *x = arena<float>((member.first + i) * padded_row(k));
        float *y = arena<float>(member.result + i * member.row_floats);
        for (int32_t m = 0; m < member.matrices; ++m) {
            const Tiles one = matrix_of(member.tiles, m);
            if (!table.takes(one)) launch_table(s, table);
            table.add(one, x, y + int64_t{m} * one.n);
        }
    }
}

void Products::submit_few(Submission &s, int64_t k) {
    for (const int32_t kind : {VCUDA_BF16, VCUDA_Q8, VCUDA_Q4}) {
        GemvTable table;
        for (const Member &member : members_) {
            if (member.group >= 0 || member.tiles.kind != kind) continue;
            add_rows(s, table, member, 0, member.rows, k);
        }
        launch_table(s, table);
    }
}

void Products::submit_group(Submission &s, size_t index, int64_t k) {
    const Group &group = groups_[index];
    for (int32_t at = 0; at < group.rows; at += kChunkRows) {
        const int32_t rows = std::min(group.rows - at, kChunkRows);
        NormRows make;
        make.x = arena<float>((group.first + at) * padded_row(k));
        make.k = static_cast<int32_t>(k);
        make.rows = rows;
        make.out = operand_of(group.tiles, kParts, rows);
        make.out.data = static_cast<uint16_t *>(operand_.memory.get());
        make.overflow = arena<int32_t>(layout_.flags) + group.flag + at / kChunkRows;
        norm_rows(s.to, make);
        s.did(&vcuda_prof::gemm);
        for (const Member &member : members_) {
            if (member.group != static_cast<int32_t>(index)) continue;
            for (int32_t m = 0; m < member.matrices; ++m) {
                Gemm product;
                product.w = matrix_of(member.tiles, m);
                product.x = make.out;
                product.tokens = rows;
                product.y =
                    arena<float>(member.result + at * member.row_floats) + int64_t{m} * product.w.n;
                product.stride = member.row_floats;
                gemm(s.to, product);
                s.did(&vcuda_prof::gemm);
            }
        }
    }
}

void Products::submit(Submission &s, int64_t k) {
    if (s.timer != nullptr) s.timer->start();
    submit_few(s, k);
    for (size_t i = 0; i < groups_.size(); ++i) submit_group(s, i, k);
}

// Chunks that float16 could not hold, once more, row by row; false when there is none.
bool Products::submit_overflowed(Submission &s, int64_t k) {
    const auto *flags = staging<int32_t>(layout_.flags);
    bool any = false;
    for (const Member &member : members_) {
        if (member.group < 0) continue;
        GemvTable table;
        for (int32_t at = 0; at < member.rows; at += kChunkRows) {
            const Group &group = groups_[static_cast<size_t>(member.group)];
            if (flags[group.flag + at / kChunkRows] == 0) continue;
            if (!any && s.timer != nullptr) s.timer->start();
            any = true;
            add_rows(s, table, member, at, std::min(member.rows - at, kChunkRows), k);
        }
        launch_table(s, table);
    }
    return any;
}

// ---------------------------------------------------------------------------------------- copies

void Products::send(const ProductCall &call, vcuda_prof &prof) {
    const HostTimer timer(prof.h2d);
    const int64_t padded = padded_row(call.k);
    auto *to = staging<float>(0);
    if (padded == call.k) {
        pool_.copy(to, call.x, bytes_of(call.x_rows * call.k));
    } else {  // kernels read four numbers at a time: zeros follow the last
        for (int64_t row = 0; row < call.x_rows; ++row, to += padded) {
            std::memcpy(to, call.x + row * call.k, bytes_of(call.k));
            std::fill(to + call.k, to + padded, 0.0f);
        }
    }
    std::memset(staging<float>(layout_.flags), 0, bytes_of(layout_.results - layout_.flags));
    const uint64_t bytes = bytes_of(layout_.results);
    CUDA_TRY(cudaMemcpyAsync(arena_.memory.get(), staging_.memory.get(), bytes,
                             cudaMemcpyHostToDevice, device_.stream.get()));
    prof.h2d_copies += 1;
    prof.h2d_bytes += bytes;
}

// Flags and results to the staging.
void Products::fetch(vcuda_prof &prof) {
    const cudaStream_t stream = device_.stream.get();
    const uint64_t bytes = bytes_of(layout_.end - layout_.flags);
    CUDA_TRY(cudaMemcpyAsync(staging<void>(layout_.flags), arena<void>(layout_.flags), bytes,
                             cudaMemcpyDeviceToHost, stream));
    CUDA_TRY(cudaStreamSynchronize(stream));
    prof.d2h_copies += 1;
    prof.d2h_bytes += bytes;
}

// The results to where the caller wants them.
void Products::deliver(const ProductCall &call) {
    for (const Member &member : members_) {
        float *to = call.y + member.y;
        const auto *from = staging<float>(member.result);
        if (member.stride == member.columns && member.row_floats == member.columns) {
            pool_.copy(to, from, bytes_of(member.rows * member.columns));
            continue;
        }
        for (int32_t row = 0; row < member.rows; ++row) {
            std::memcpy(to, from, bytes_of(member.columns));
            to += member.stride;
            from += member.row_floats;
        }
    }
}

// ----------------------------------------------------------------------------------------- a call

void Products::run(const ProductCall &call, bool timing, vcuda_prof &prof) {
    {
        const HostTimer timer(prof.cache_probe);
        check(call);
    }
    lay_out(call);
    Submission s;
    s.to.stream = device_.stream.get();
    s.to.sm_count = device_.sm_count;
    PhaseTimer timer(s.to.stream);
    if (timing) s.timer = &timer;
    try {
        reserve();
        send(call, prof);
        submit(s, call.k);
        const HostTimer waiting(prof.d2h_sync);
        fetch(prof);
        if (timing) timer.collect(prof);
        if (submit_overflowed(s, call.k)) {
            fetch(prof);
            if (timing) timer.collect(prof);
        }
        deliver(call);
    } catch (...) {
        settle(s.to.stream);  // the buffers are used again
        throw;
    }
    prof.launches += s.to.launches;
}

void Products::one(uint64_t key, int64_t index, const float *x, int32_t m, float *y, bool timing,
                   vcuda_prof &prof) {
    const vcuda_matrix &matrix = cache_.require(key).matrix;
    if (m < 1) throw Error("m is %d; it must be 1 or more", m);
    if (index < 0 || index >= matrix.stack) {
        throw Error("matrix %lld of the weight %s: it is a stack of %lld, numbered from 0",
                    ll(index), KeyName(key).text, ll(matrix.stack));
    }
    vcuda_product product{};
    product.struct_size = sizeof product;
    product.rows = m;
    product.wkey = key;
    product.index = index;
    product.stride = matrix.n;
    run({&product, 1, x, m, matrix.k, y, m * matrix.n}, timing, prof);
}

}  // namespace vcuda
