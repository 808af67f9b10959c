// Threads of ours: all signals blocked, named for tools; copying threads give way to others.

#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

namespace gdscache {

// While this lives, threads that the caller starts have all signals blocked.
class SignalsBlocked {
public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(SignalsBlocked&&) = delete;

private:
    sigset_t before_;
};

// Start one more thread. `what` has up to 10 characters. Throws std::system_error if the system has no more threads.
template <typename... Call>
void start(std::vector<std::thread>& threads, const char* what, size_t number, Call... call) {
    const SignalsBlocked blocked;
    char name[16];
    std::snprintf(name, sizeof name, "%s-%zu", what, number % 1000);
    pthread_setname_np(threads.emplace_back(call...).native_handle(), name);
}

// Let waking threads have this one's core at once: a scheduler that knows lengths of turns (EEVDF, of Linux 6.12)
// interrupts long turns for short ones. The thread's share of the core stays the same.
inline void give_way() {
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } wanted{};
    wanted.size = sizeof wanted;
    if (syscall(SYS_sched_getattr, 0, &wanted, sizeof wanted, 0) != 0 || wanted.policy != SCHED_OTHER) return;
    wanted.runtime = 100'000'000;
    syscall(SYS_sched_setattr, 0, &wanted, 0);  // without effect on other schedulers
}

}  // namespace gdscache
