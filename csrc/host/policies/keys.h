// Keys of pages, and tables by key.

#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "base/error.h"

namespace gdscache {

// 32 bytes. All zero: no key.
struct Key {
    Key() = default;
    // `size`: at most 32; the rest is zero.
    Key(const void* bytes, size_t size) { std::memcpy(words, bytes, size); }

    bool operator==(const Key&) const = default;
    bool none() const { return !(words[0] | words[1] | words[2] | words[3]); }
    uint64_t hash() const {
        return words[0] * 0x9E3779B97F4A7C15u + words[1] * 0xC2B2AE3D27D4EB4Fu + words[2] * 0x165667B19E3779F9u +
               words[3] * 0x85EBCA77C2B2AE63u;
    }

    uint64_t words[4] = {};
};

// Rows by their keys. A row has an id until it is dropped; ids are reused.
//
// `Row` has the fields `key`, `before` and `after`; `Row::Name`: the type of its key, with `hash()`.
template <typename Row>
class Table {
public:
    using Name = decltype(Row::key);
    static constexpr uint32_t kNone = UINT32_MAX;

    Row& operator[](uint32_t id) { return chunks_[id / kChunk][id % kChunk]; }
    const Row& operator[](uint32_t id) const { return chunks_[id / kChunk][id % kChunk]; }
    size_t size() const { return made_ - free_.size(); }

    // The id of a key's row, or `kNone`.
    uint32_t find(const Name& key) const {
        const uint32_t hash = top(key);
        for (size_t cell = home(hash);; cell = wrap(cell + 1)) {
            const Cell& one = cells_[cell];
            if (one.id == kNone || (one.hash == hash && (*this)[one.id].key == key)) return one.id;
        }
    }
    // The ids of all these keys. Throws if one, or `kNone`, is not `good`, or with `once` comes twice. Needs `Row::named`.
    std::vector<uint32_t> find_all(auto&& keys, bool once, const char* why, auto good) {
        std::vector<uint32_t> ids;
        bool all = true;
        for (const Name& key : keys) {
            const uint32_t id = find(key);
            all = all && good(id) && !std::exchange((*this)[id].named, once);
            if (all) ids.push_back(id);
        }
        for (const uint32_t id : ids) (*this)[id].named = false;
        require(all, why);
        return ids;
    }
    // A row for a key that has none.
    uint32_t add(const Name& key) {
        if (8 * (size() + 1) > 7 * cells_.size()) widen();
        uint32_t id = made_;
        if (free_.empty()) {
            if (made_ % kChunk == 0) chunks_.push_back(std::make_unique<Row[]>(kChunk));
            ++made_;
        } else {
            id = free_.back();
            free_.pop_back();
        }
        (*this)[id].key = key;
        place({id, top(key)});
        return id;
    }
    void drop(uint32_t id) {
        size_t hole = home(top((*this)[id].key));
        while (cells_[hole].id != id) hole = wrap(hole + 1);
        // Later entries that may lie in the hole move there.
        for (size_t cell = wrap(hole + 1); cells_[cell].id != kNone; cell = wrap(cell + 1)) {
            if (wrap(cell - home(cells_[cell].hash)) < wrap(cell - hole)) continue;
            cells_[hole] = cells_[cell];
            hole = cell;
        }
        cells_[hole] = {};
        (*this)[id] = {};
        free_.push_back(id);
    }

private:
    static constexpr uint32_t kChunk = 1024;

    size_t wrap(size_t cell) const { return cell & (cells_.size() - 1); }
    // With a part of the hash, so that few other rows are compared.
    struct Cell {
        uint32_t id = kNone, hash = 0;
    };
    static uint32_t top(const Name& key) { return static_cast<uint32_t>(key.hash() >> 32); }
    size_t home(uint32_t hash) const { return hash >> shift_; }
    void place(Cell one) {
        size_t cell = home(one.hash);
        while (cells_[cell].id != kNone) cell = wrap(cell + 1);
        cells_[cell] = one;
    }
    void widen() {
        std::vector<Cell> old(2 * cells_.size());
        old.swap(cells_);
        --shift_;
        for (const Cell& one : old) {
            if (one.id != kNone) place(one);
        }
    }

    std::vector<std::unique_ptr<Row[]>> chunks_;
    std::vector<uint32_t> free_;
    uint32_t made_ = 0;
    std::vector<Cell> cells_ = std::vector<Cell>(16);
    int shift_ = 28;
};

// Rows of a table in a doubly linked list.
template <typename Row>
class List {
public:
    static constexpr uint32_t kNone = Table<Row>::kNone;

    uint32_t first() const { return first_; }
    int64_t size() const { return size_; }
    void push_back(Table<Row>& rows, uint32_t id) { insert(rows, id, last_, kNone); }
    void push_front(Table<Row>& rows, uint32_t id) { insert(rows, id, kNone, first_); }
    void remove(Table<Row>& rows, uint32_t id) {
        const Row& row = rows[id];
        (row.before == kNone ? first_ : rows[row.before].after) = row.after;
        (row.after == kNone ? last_ : rows[row.after].before) = row.before;
        --size_;
    }

private:
    void insert(Table<Row>& rows, uint32_t id, uint32_t before, uint32_t after) {
        rows[id].before = before;
        rows[id].after = after;
        (before == kNone ? first_ : rows[before].after) = id;
        (after == kNone ? last_ : rows[after].before) = id;
        ++size_;
    }

    uint32_t first_ = kNone, last_ = kNone;
    int64_t size_ = 0;
};

}  // namespace gdscache
