#include <cstdio>
#include <thread>

#include "cases.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

void delayed(Ranks& ranks) {
    Pair pair(ranks);
    if (pair.sends()) {
        const auto start = Clock::now();
        pair.sender().write(pair.memory, 0, 64, pair.at(0));
        pair.sender().finish();
        EXPECT(seconds_since(start) > 0.19);
    }
    ranks.barrier();
}

// The third completion is lost, and what comes after it on its queue pair, but not the data
void dropped_completion(Ranks& ranks) {
    Pair pair(ranks, 2);
    if (pair.sends()) {
        Sender& sender = pair.sender(0);
        uint64_t value = 0;
        for (; value < 2; ++value) {
            sender.write_inline(&value, sizeof value, pair.at(0), Ask::nothing);
            sender.finish();
        }
        for (; value < 4; ++value) {
            const uint16_t index = sender.write_inline(&value, sizeof value, pair.at(0));
            sender.ring();
            EXPECT(not sender.wait(index, 0.2));
        }
        pair.sender(1).nop();
        pair.sender(1).finish();
    }
    ranks.barrier();
    if (not pair.sends()) EXPECT_EQUAL(load_flag(pair.memory.at(0)), 3);
    ranks.barrier();
}

// Rank 1 dies at its second WQE; rank 0's writes to it then fail instead of hanging
void killed_peer(Ranks& ranks) {
    Pair pair(ranks);
    if (not pair.sends()) {
        pair.sender().nop();
        pair.sender().nop();
        pair.sender().ring();
        std::this_thread::sleep_for(std::chrono::duration<double>(patience()));
        fail(__FILE__, __LINE__, "this process is alive");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    pair.sender().write(pair.memory, 0, 64, pair.at(0));
    pair.sender().expect_error(kNotConnected);
}

// Shorter than the retry time: what waits goes through afterwards
void short_flap(Ranks& ranks) {
    Pair pair(ranks);
    if (pair.sends()) {
        const auto start = Clock::now();
        const uint64_t value = 9;
        pair.sender().nop();
        pair.sender().write_inline(&value, sizeof value, pair.at(0));
        pair.sender().ring();
        ibv_port_attr port = {};
        EXPECT(until([&] {
            verbs().query_port(pair.nic.context, 1, &port);
            return port.state == IBV_PORT_DOWN;
        }));
        pair.sender().finish();
        EXPECT(seconds_since(start) > 0.25);
        verbs().query_port(pair.nic.context, 1, &port);
        EXPECT_EQUAL(port.state, IBV_PORT_ACTIVE);
    }
    ranks.barrier();
    if (not pair.sends()) EXPECT_EQUAL(load_flag(pair.memory.at(0)), 9);
}

// Longer than the retry time: the queue pairs of both ends fail
void long_flap(Ranks& ranks) {
    Pair pair(ranks, 2);
    if (pair.sends()) {
        const uint64_t value = 9;
        pair.sender(0).nop();
        pair.sender(0).ring();
        EXPECT(pair.sender(0).wait(0));
        pair.sender(0).write_inline(&value, sizeof value, pair.at(0));
        pair.sender(0).expect_error(kNotConnected);
        ranks.barrier();
    } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        pair.sender(1).write(pair.memory, 0, 64, pair.at(64));
        pair.sender(1).expect_error(kNotConnected);
        ranks.barrier();
        EXPECT_EQUAL(load_flag(pair.memory.at(0)), 0);
    }
}

// From the third WQE on its queue pair stands still; the other one works
void exhausted_queue(Ranks& ranks) {
    Pair pair(ranks, 2);
    if (pair.sends()) {
        uint64_t value = 1;
        for (; value <= 3; ++value) pair.sender(0).write_inline(&value, sizeof value, pair.at(0));
        pair.sender(0).ring();
        EXPECT(pair.sender(0).wait(1));
        EXPECT(not pair.sender(0).wait(2, 0.2));
        pair.sender(1).write_inline(&value, sizeof value, pair.at(8));
        pair.sender(1).finish();
    }
    ranks.barrier();
    if (not pair.sends()) {
        EXPECT_EQUAL(load_flag(pair.memory.at(0)), 2);
        EXPECT_EQUAL(load_flag(pair.memory.at(8)), 4);
    }
}

// Writes once, then hangs as a run does whose kernels wait for ever
void sleeper(Ranks& ranks) {
    Pair pair(ranks, 2);
    pair.sender().write(pair.memory, 0, 64, pair.at(0));
    pair.sender().finish();
    ranks.barrier();
    if (ranks.rank() == 0) {
        std::puts("asleep");
        std::fflush(stdout);
    }
    std::this_thread::sleep_for(std::chrono::seconds(60));
}
