#include "cuda/cufile.h"

#include "disk/threads_disk.h"

namespace gdscache {
namespace {

using OfGpu = Stretch<std::optional<uint64_t>>;  // the base of its GPU memory; none: host memory

class CuFileCaller final : public Caller {
public:
    explicit CuFileCaller(std::shared_ptr<const CuFiles> files) : files_(std::move(files)) {}

    int64_t transfer(const Piece& piece, const Call& call) override {
        const auto memory = [this](const iovec& one) { return memory_of(one); };
        return move_stretches(call, true, memory, [&](const OfGpu& stretch, int64_t offset) {
            if (stretch.memory) return move(piece, stretch, offset);
            return system_call(piece, {stretch.vectors, stretch.count, offset, stretch.bytes});
        });
    }

    bool in_turn(const Piece& piece) const override { return keeps_lock(piece) && !memory_of(piece.fragments[0]); }

private:
    std::optional<uint64_t> memory_of(const iovec& one) const {
        return files_->memory(reinterpret_cast<uint64_t>(one.iov_base), one.iov_len);
    }

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

    const std::shared_ptr<const CuFiles> files_;
    std::optional<Cuda::Entered> entered_;
};

}  // namespace

int64_t move_once(std::shared_ptr<const CuFiles> files, const Piece& piece, const Call& call) {
    return CuFileCaller(std::move(files)).transfer(piece, call);
}

std::unique_ptr<Disk> open_cufile_disk(int threads, const std::shared_ptr<const CuFiles>& files) {
    return open_threads_disk(threads, "cufile", [files] { return std::make_unique<CuFileCaller>(files); });
}

}  // namespace gdscache
