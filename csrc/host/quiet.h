// Threads of ours: no signal is for them, and a name says in tools whose they are.

#pragma once

#include <pthread.h>
#include <signal.h>

#include <cstdio>
#include <thread>

namespace gdscache {

// While this lives, threads that the caller starts begin with all signals blocked.
class SignalsBlocked {
public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

private:
    sigset_t before_;
};

// `what` has up to 10 characters.
inline void set_name(std::thread& thread, const char* what, size_t number) {
    char name[16];
    std::snprintf(name, sizeof name, "%s-%zu", what, number % 1000);
    pthread_setname_np(thread.native_handle(), name);
}

}  // namespace gdscache
