// What harness.h declares for every program of this folder
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include <sched.h>

#include "harness.h"

Board* the_board = nullptr;

double patience() {
    static const char* const given = std::getenv("SELF_TEST_SECONDS");
    return given ? std::atof(given) : 15;
}

void (*around_barrier)() = nullptr;

void fail(const char* file, int line, const std::string& what) {
    const char* rank = std::getenv("EMULATED_FABRIC_RANK");
    const char* name = std::strrchr(file, '/');
    std::fprintf(stderr, "self test: rank %s: %s:%d: %s\n", rank ? rank : "?",
                 name ? name + 1 : file, line, what.c_str());
    if (the_board) the_board->failed.store(1);
    std::_Exit(1);
}

void pause_briefly(bool long_since) {
    // One rank has said why; the others need not wait for it
    if (the_board and the_board->failed.load()) std::_Exit(1);
    const timespec nap = {0, 50000};
    if (long_since)
        nanosleep(&nap, nullptr);
    else
        sched_yield();
}

void Ranks::barrier() {
    const uint32_t all = ++barriers_ * static_cast<uint32_t>(count_);
    if (around_barrier) around_barrier();
    board_->arrived.fetch_add(1);
    if (not until([&] { return board_->arrived.load() >= all; }, 2 * patience()))
        fail(__FILE__, __LINE__, "the other ranks did not come to the barrier");
    if (around_barrier) around_barrier();
}
