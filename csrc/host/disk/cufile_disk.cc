#include "cuda/cufile.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "disk/threads_disk.h"

namespace gdscache {
namespace {

// Entries of batches under way, over all threads of a disk. In compat mode each holds one of 64 buffers until it is
// reaped (cufile.json: posix_pool_slab_count), and a submit without a free buffer waits for ever. Threads need buffers
// too.
constexpr int kMostEntries = 32;
constexpr int kLeastEntries = 2;

using OfGpu = Stretch<std::optional<uint64_t>>;  // the base of its GPU memory; none: host memory

class CuFileCaller final : public Caller {
public:
    CuFileCaller(std::shared_ptr<const CuFiles> files, int64_t batched, std::shared_ptr<std::atomic<int>> free)
        : files_(std::move(files)), batched_(batched), free_(std::move(free)) {}

    int64_t transfer(const Piece& piece, const Call& call) override {
        return move_stretches(call, true, memory_, [&](const OfGpu& stretch, int64_t offset) {
            if (stretch.memory) return move(piece, stretch, offset);
            return system_call(piece, {stretch.vectors, stretch.count, offset, stretch.bytes});
        });
    }

    bool in_turn(const Piece& piece) const override { return keeps_lock(piece) && !memory_(piece.fragments[0]); }

    bool small(const Piece& piece) const override {
        if (!batched_ || piece.count > kMostEntries) return false;
        if (bytes_of(piece.fragments, piece.count) > batched_) return false;
        return std::all_of(piece.fragments, piece.fragments + piece.count, memory_);
    }

    void transfer_all(std::span<const Piece> pieces, const Told& told) override {
        const int room = free_->exchange(0);
        Batch batch;
        while (batch.ends.size() < pieces.size() && add(batch, pieces[batch.ends.size()], static_cast<size_t>(room))) {
        }
        const int used = static_cast<int>(batch.entries.size());
        free_->fetch_add(room - used);
        if (used < kLeastEntries || !enter() || !submit(batch)) batch.ends.clear();
        else reap(batch, told);
        free_->fetch_add(used);
        for (size_t n = batch.ends.size(); n < pieces.size(); ++n) {
            const Call whole{pieces[n].fragments, pieces[n].count, pieces[n].offset, 0};
            told(n, transfer(pieces[n], whole));
        }
    }

private:
    struct Batch {
        std::vector<CuFileEntry> entries;
        std::vector<std::optional<int64_t>> results;  // of each entry; none while it is under way
        std::vector<size_t> ends;                     // the end of each piece's entries
    };

    struct MemoryOf {
        std::optional<uint64_t> operator()(const iovec& one) const {
            return files.memory(reinterpret_cast<uint64_t>(one.iov_base), one.iov_len);
        }
        const CuFiles& files;
    };

    // Enter the context, for the life of the thread. False if the driver refuses; the next call tries again.
    bool enter() {
        if (entered_) return true;
        try {
            entered_.emplace(files_->cuda());
            files_->cuda().leave_captures_alone();
        } catch (const CudaError&) {  // a refused second call loses nothing
        }
        return entered_.has_value();
    }

    int64_t move(const Piece& piece, const OfGpu& stretch, int64_t offset) {
        const CuFileHandle file = files_->file(piece.fd);
        if (!file) return -EBADF;
        if (!enter()) return -EIO;
        return files_->move(piece.op == Op::kWrite, file, *stretch.memory, static_cast<size_t>(stretch.bytes), offset,
                            static_cast<int64_t>(stretch.address - *stretch.memory));
    }

    // Add a piece's stretches if there is room for all of them.
    bool add(Batch& batch, const Piece& piece, size_t room) const {
        const CuFileHandle file = files_->file(piece.fd);
        const size_t before = batch.entries.size();
        int64_t offset = piece.offset;
        for (uint32_t n = 0; file && n < piece.count;) {
            const OfGpu stretch = first_stretch(piece.fragments + n, piece.count - n, true, memory_);
            if (batch.entries.size() == room || !stretch.memory) break;
            batch.entries.push_back({1, reinterpret_cast<void*>(*stretch.memory), offset,
                                     static_cast<int64_t>(stretch.address - *stretch.memory),
                                     static_cast<size_t>(stretch.bytes), file, piece.op == Op::kWrite, nullptr});
            offset += stretch.bytes;
            n += stretch.count;
            if (n == piece.count) {
                batch.ends.push_back(batch.entries.size());
                return true;
            }
        }
        batch.entries.resize(before);
        return false;
    }

    // False if nothing of the batch is under way; this thread then makes no more batches.
    bool submit(Batch& batch) {
        const auto count = static_cast<unsigned>(batch.entries.size());
        for (size_t n = 0; n < count; ++n) batch.entries[n].cookie = reinterpret_cast<void*>(n + 1);
        try {
            if (!batch_) batch_ = OwnBatch(files_->open_batch(kMostEntries), {files_.get()});
            if (files_->submit(batch_.get(), batch.entries.data(), count)) {
                batch.results.resize(count);
                return true;
            }
            files_->cancel(batch_.get());
            batch_ = {};
        } catch (const CuFileError&) {
        }
        batched_ = 0;
        return false;
    }

    // Each entry's own end counts. While the library reports none, entries may still be under way and are waited for.
    void reap(Batch& batch, const Told& told) {
        std::vector<CuFileEvent> events(batch.entries.size());
        for (size_t left = batch.entries.size(); left != 0;) {
            const size_t before = left;
            const int found = files_->reap(batch_.get(), events.data(), static_cast<unsigned>(left));
            for (int n = 0; n < found; ++n) {
                const CuFileEvent& event = events[static_cast<size_t>(n)];
                const size_t entry = reinterpret_cast<size_t>(event.cookie) - 1;
                if (event.status == CuFileEvent::kWaiting || event.status == CuFileEvent::kPending) continue;
                if (entry >= batch.results.size() || batch.results[entry]) continue;
                batch.results[entry] = CuFiles::result(event);
                --left;
                const size_t piece = std::ranges::upper_bound(batch.ends, entry) - batch.ends.begin();
                if (const auto moved = answer(batch, piece)) told(piece, *moved);
            }
            if (left == before) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }

    // The bytes moved from a piece's beginning on, or its error; none while some of it is under way.
    static std::optional<int64_t> answer(const Batch& batch, size_t piece) {
        const size_t first = piece ? batch.ends[piece - 1] : 0;
        const auto results = std::span(batch.results).subspan(first, batch.ends[piece] - first);
        if (!std::ranges::all_of(results, [](const auto& one) { return one.has_value(); })) return std::nullopt;
        int64_t moved = 0;
        for (size_t n = 0; n < results.size(); ++n) {
            const auto bytes = static_cast<int64_t>(batch.entries[first + n].bytes);
            const int64_t result = *results[n] > bytes ? -EIO : *results[n];
            if (result < 0) return moved ? moved : result;
            moved += result;
            if (result < bytes) break;
        }
        return moved;
    }

    const std::shared_ptr<const CuFiles> files_;
    const MemoryOf memory_{*files_};
    int64_t batched_;
    const std::shared_ptr<std::atomic<int>> free_;  // free entries
    std::optional<Cuda::Entered> entered_;
    OwnBatch batch_;  // closed within the context
};

}  // namespace

int64_t move_once(std::shared_ptr<const CuFiles> files, const Piece& piece, const Call& call) {
    return CuFileCaller(std::move(files), 0, nullptr).transfer(piece, call);
}

std::unique_ptr<Disk> open_cufile_disk(int threads, std::shared_ptr<const CuFiles> files, int64_t batched) {
    const int64_t most = files->has_batches() ? batched : 0;
    const auto free = std::make_shared<std::atomic<int>>(kMostEntries);
    const MakeCaller make = [=, files = std::move(files)] { return std::make_unique<CuFileCaller>(files, most, free); };
    return open_threads_disk(threads, "cufile", make);
}

}  // namespace gdscache
