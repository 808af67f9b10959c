#include "disk/ring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <vector>

namespace gdscache {
namespace {

constexpr long kSetup = 425, kEnter = 426, kRegister = 427;  // the same on every architecture
constexpr unsigned kClamp = 1u << 4;
constexpr unsigned kGetEvents = 1u << 0, kExtArg = 1u << 3;
constexpr unsigned kSingleMmap = 1u << 0, kHasExtArg = 1u << 8;  // features: Linux 5.4 and 5.11
constexpr unsigned kAsync = 1u << 4;
constexpr unsigned kMaxWorkers = 19;  // Linux 5.15
constexpr off_t kOffEntries = 0x10000000;

struct Offsets {
    uint32_t head, tail, mask, entries;
    uint32_t words[6];  // submission: flags, dropped, array; completion: overflow, completions, flags
};

struct Params {
    uint32_t sq_entries, cq_entries, flags, sq_thread[2], features, wq_fd, reserved[3];
    Offsets sq, cq;
};

struct Entry {
    uint8_t opcode, flags;
    uint16_t priority;
    int32_t fd;
    uint64_t offset, address;
    uint32_t length, rw_flags;
    uint64_t data, others[3];
};

struct Timespec {
    int64_t seconds, nanoseconds;
};

struct Patience {
    uint64_t mask;
    uint32_t mask_size, reserved;
    uint64_t timespec;
};

static_assert(sizeof(Params) == 120 && sizeof(Entry) == 64 && sizeof(Completion) == 16 && sizeof(Patience) == 24);

uint32_t acquire(const uint32_t* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
void release(uint32_t* at, uint32_t value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }

[[noreturn]] void refuse(const char* what, int error) {
    throw Error(error, std::string(what) + " answers " + std::strerror(error));
}

}  // namespace

std::unique_ptr<Ring> Ring::open(unsigned entries, unsigned workers) {
    std::unique_ptr<Ring> ring(new Ring);
    Params params{};
    params.flags = kClamp;
    ring->fd_ = Descriptor(static_cast<int>(syscall(kSetup, entries, &params)));
    if (!ring->fd_) refuse("io_uring_setup", errno);
    if (!(params.features & kSingleMmap) || !(params.features & kHasExtArg) || params.sq_entries < entries) {
        throw Error(EINVAL, "this kernel's io_uring is too old, or too small");
    }
    unsigned limits[2] = {workers, workers};
    if (syscall(kRegister, ring->fd_.get(), kMaxWorkers, limits, 2) < 0) refuse("io_uring_register", errno);
    ring->map(&params);
    ring->try_it();
    return ring;
}

void Ring::map(const void* given) {
    const Params& params = *static_cast<const Params*>(given);
    const uint32_t array = params.sq.words[2], completions = params.cq.words[1];
    const size_t words = std::max<size_t>(array + sizeof(uint32_t) * params.sq_entries,
                                          completions + sizeof(Completion) * params.cq_entries);
    const auto mapped = [&](size_t bytes, off_t offset) {
        void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_.get(), offset);
        if (at == MAP_FAILED) refuse("mmap of an io_uring", errno);
        madvise(at, bytes, MADV_DONTFORK);  // a child has no use for it
        return Mapped(at, {bytes});
    };
    rings_ = mapped(words, 0);
    entries_ = mapped(sizeof(Entry) * params.sq_entries, kOffEntries);
    uint8_t* const base = static_cast<uint8_t*>(rings_.get());
    const auto word = [&](uint32_t offset) { return reinterpret_cast<uint32_t*>(base + offset); };
    submit_tail_ = word(params.sq.tail);
    submit_mask_ = *word(params.sq.mask);
    complete_head_ = word(params.cq.head);
    complete_tail_ = word(params.cq.tail);
    complete_mask_ = *word(params.cq.mask);
    completions_ = reinterpret_cast<const Completion*>(base + completions);
    for (uint32_t n = 0; n < params.sq_entries; n++) word(array)[n] = n;
}

// A kernel may take requests and still block them by a rule, or give wrong answers.
void Ring::try_it() {
    const Descriptor file(static_cast<int>(syscall(SYS_memfd_create, "gdscache-ring", 1u /* MFD_CLOEXEC */)));
    if (!file) refuse("memfd_create", errno);
    std::vector<uint8_t> page(kAlignment), got(kAlignment);
    for (size_t n = 0; n < page.size(); n++) page[n] = static_cast<uint8_t>(n * 7 + n / 256);
    bool good = write(file.get(), page.data(), page.size()) == kAlignment;
    if (good) {
        put(Code::kRead, file.get(), 0, got.data(), kAlignment, 1, true);
        int answer;
        do answer = enter(1, -1);
        while (answer == -EINTR || answer == -EAGAIN || answer == -EBUSY);
        if (answer < 0) refuse("io_uring_enter", -answer);
        const Completion* const ended = front();
        good = ended && ended->data == 1 && ended->result == kAlignment && page == got;
        if (ended) pop();
    }
    if (!good) throw Error(EIO, "io_uring reads other bytes than were written");
}

void Ring::put(Code code, int fd, int64_t offset, const void* address, uint32_t length, uint64_t data, bool worker) {
    const uint32_t tail = *submit_tail_;  // only this thread writes it
    Entry& entry = static_cast<Entry*>(entries_.get())[tail & submit_mask_];
    entry = {};
    entry.opcode = static_cast<uint8_t>(code);
    entry.flags = worker ? kAsync : 0;
    entry.fd = fd;
    entry.offset = static_cast<uint64_t>(offset);
    entry.address = reinterpret_cast<uint64_t>(address);
    entry.length = length;
    entry.data = data;
    release(submit_tail_, tail + 1);
    queued_++;
}

const uint64_t* Ring::take_back() {
    if (!queued_) return nullptr;
    queued_--;
    const uint32_t tail = *submit_tail_ - 1;
    release(submit_tail_, tail);
    return &static_cast<const Entry*>(entries_.get())[tail & submit_mask_].data;
}

int Ring::enter(unsigned wait, double seconds) {
    Timespec until{};
    Patience patience{};
    unsigned flags = kGetEvents;
    const bool bounded = wait && seconds >= 0;
    if (bounded) {
        const double whole = std::floor(std::min(seconds, 1e9));
        until = {static_cast<int64_t>(whole), static_cast<int64_t>((std::min(seconds, 1e9) - whole) * 1e9)};
        patience.timespec = reinterpret_cast<uint64_t>(&until);
        flags |= kExtArg;
    }
    for (;;) {
        const long taken = syscall(kEnter, fd_.get(), queued_, wait, flags, bounded ? &patience : nullptr,
                                   bounded ? sizeof patience : size_t{0});
        if (taken < 0) return -errno;
        queued_ -= static_cast<unsigned>(taken);
        if (!queued_) return 0;
        if (!taken) return -EAGAIN;
    }
}

const Completion* Ring::front() const {
    const uint32_t head = *complete_head_;  // only this thread writes it
    return head == acquire(complete_tail_) ? nullptr : completions_ + (head & complete_mask_);
}

void Ring::pop() { release(complete_head_, *complete_head_ + 1); }

}  // namespace gdscache
