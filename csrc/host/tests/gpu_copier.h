// A `Rig` (executor_rig.h) whose foreign planes and memory are those of the fake driver's GPU, in the same bytes.

#pragma once

#include "gpu/gpu_server.h"
#include "tests/executor_caller.h"
#include "tests/gpu_rig.h"

namespace gdscache::test {

class GpuCopier : public Copier {
public:
    static constexpr int64_t kFence = 4;  // slots of a registration, as in the rig's reserve

    GpuCopier(const Driver& driver, Kernels kernels, bool pinned)
        : driver_(driver), wanted_(kernels), pinned_(pinned) {}
    ~GpuCopier() override { end(); }

    void prepare(Rig& rig, std::vector<Place>& places) override {
        GpuPlanes planes;
        planes.layers = rig.limits.layers;
        planes.page_blocks = rig.limits.page_blocks;
        planes.blocks = rig.pool.blocks;
        planes.extent_bytes = rig.limits.extent_bytes;
        planes.bounds = rig.limits.bounds;
        planes.first_plane = rig.first_plane;
        std::vector<int64_t> words, plane_words;
        for (int32_t n = 0; n < planes.layers; n++) {
            const PlaneMemory& plane = rig.planes[n];
            const int64_t bytes = rig.limits.bounds[n + 1] - rig.limits.bounds[n], run = plane.block_stride;
            adopt(plane.base, static_cast<size_t>(run * planes.blocks));
            const auto base = static_cast<int64_t>(reinterpret_cast<uint64_t>(plane.base) | kDeviceBit);
            planes.planes.push_back({base, run, plane.token_stride, run, 1, 0, bytes});
            words.insert(words.end(), {n, 1, rig.limits.bounds[n], bytes});
            plane_words.insert(plane_words.end(), {base, run, plane.token_stride, run, 1, bytes});
        }
        words.insert(words.end(), plane_words.begin(), plane_words.end());
        table_ = std::make_unique<Bytes>(words.size() * 8);
        std::memcpy(table_->data(), words.data(), words.size() * 8);
        PageKernels kernels{};
        const uint64_t table = table_->give_to_device(driver_);
        driver_.vector(4);
        const auto loaded = [&](int32_t which) { return driver_.kernel(which); };
        if (wanted_ != Kernels::kNone) {
            kernels = {loaded(kGather),
                       loaded(kScatter),
                       loaded(kGatherSums),
                       loaded(kScatterSums),
                       table,
                       4,
                       3,
                       wanted_ >= Kernels::kSums,
                       wanted_ == Kernels::kLooks};
        }
        for (const int32_t space : {kCpu, kBounce}) {
            if (!pinned_) continue;
            places[space].pinned = true;
            places[space].fence = kFence;
            const int64_t slots = places[space].slots;
            for (int64_t slot = 0; slot < slots; slot += kFence) {
                const int64_t count = std::min(kFence, slots - slot);
                driver_.pin(rig.at(space, slot), static_cast<size_t>(count * rig.limits.extent_bytes));
                told_.push_back(rig.at(space, slot));
            }
        }
        adopt(rig.memory[kForeignCpu].data(), rig.memory[kForeignCpu].size());
        places[kForeignCpu].memory =
            reinterpret_cast<uint8_t*>(reinterpret_cast<uint64_t>(rig.memory[kForeignCpu].data()) | kDeviceBit);
        cuda_.emplace(driver_.path.c_str(), driver_.context());
        const Cuda::Entered entered(*cuda_);
        gpu_.emplace(*cuda_, std::move(planes), kernels, ChunkSizes{},
                     static_cast<size_t>(6 * rig.limits.extent_bytes));
    }

    void begin(Rig& rig) override { server_.emplace(*rig.executor, *gpu_); }
    void await(int64_t point) override { gpu_->await(point); }
    bool all() const override { return false; }

    void end() override {
        server_.reset();
        if (gpu_) {
            const Cuda::Entered entered(*cuda_);
            gpu_.reset();
        }
        for (void* const one : std::exchange(told_, {})) driver_.forget(one);
        table_.reset();
    }

    Gpu& gpu() { return *gpu_; }

private:
    void adopt(uint8_t* memory, size_t bytes) {
        driver_.device(memory, bytes);
        told_.push_back(memory);
    }

    const Driver& driver_;
    const Kernels wanted_;
    const bool pinned_;
    std::unique_ptr<Bytes> table_;
    std::vector<void*> told_;
    std::optional<Cuda> cuda_;
    std::optional<Gpu> gpu_;
    std::optional<GpuServer> server_;
};

}  // namespace gdscache::test
