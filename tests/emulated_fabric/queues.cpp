#include <cstring>
#include <thread>

#include "cases.h"

// WQEs of one and of two WQEBBs, at every place of a ring of 16
void ring_wrap(Ranks& ranks) {
    Pair pair(ranks, 1, 4);
    Buffer old(pair.nic, 8);
    for (uint32_t round = 0; round < 40; ++round) {
        const uint64_t value = 0x0101010101010101u * (round + 1);
        uint8_t data[40];
        fill(data, sizeof data, round);
        if (pair.sends()) {
            Sender& sender = pair.sender();
            sender.write_inline(data, sizeof data, pair.at(64), Ask::nothing);
            sender.masked_compare_swap(8, 0, 0, value, ~uint64_t{0}, old, pair.at(0));
            // An odd number of WQEBBs a round: the wide WQEs start at odd places too
            sender.nop();
            sender.finish();
        }
        ranks.barrier();
        if (not pair.sends()) {
            EXPECT_EQUAL(load_flag(pair.memory.at(0)), value);
            EXPECT(is_filled(pair.memory.at(64), sizeof data, round));
        }
        ranks.barrier();
    }
}

// More WQEs than an index of 16 bits counts
void index_wrap(Ranks& ranks) {
    Pair pair(ranks, 1, 10);
    if (not pair.sends()) {
        ranks.barrier();
        EXPECT_EQUAL(load_flag(pair.memory.at(8)), 70000 / 500 - 1);
        return;
    }
    Sender& sender = pair.sender();
    for (uint64_t batch = 0; batch < 70000 / 500; ++batch) {
        for (int n = 0; n < 498; ++n) sender.nop();
        sender.write_inline(&batch, sizeof batch, pair.at(8));
        sender.finish();
    }
    ranks.barrier();
}

// The doorbell comes before the WQE's last words: they are waited for
void late_wqe(Ranks& ranks) {
    Pair pair(ranks);
    if (pair.sends()) {
        Sender& sender = pair.sender();
        sender.nop();
        sender.ring_as(sender.qpn(), 2);
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        const uint64_t value = 4711;
        const uint16_t index = sender.write_inline(&value, sizeof value, pair.at(0));
        EXPECT(sender.wait(index));
        EXPECT_EQUAL(sender.completion_opcode(), MLX5_CQE_REQ);
    }
    ranks.barrier();
    if (not pair.sends()) EXPECT_EQUAL(load_flag(pair.memory.at(0)), 4711);
}

// A fenced write sends what the read before it brings
void fence(Ranks& ranks) {
    Pair pair(ranks);
    if (not pair.sends()) fill(pair.memory.at(0), 50000, 3);
    ranks.barrier();
    if (pair.sends()) {
        Sender& sender = pair.sender();
        sender.read(pair.memory, 0, 50000, pair.at(0), Ask::nothing);
        sender.write(pair.memory, 0, 50000, pair.at(100000), Ask::fenced_completion);
        sender.finish();
    }
    ranks.barrier();
    if (not pair.sends()) EXPECT(is_filled(pair.memory.at(100000), 50000, 3));
}

// Whoever sees the flag sees the data that was sent before it
void flag_after_data(Ranks& ranks) {
    constexpr uint32_t bytes = 1500000;
    Pair pair(ranks, 1, 6, 4u << 20);
    constexpr size_t flag = 3u << 20, answer = flag + 64;
    for (uint64_t round = 1; round <= 20; ++round) {
        if (pair.sends()) {
            std::memset(pair.memory.at(0), static_cast<int>(round), bytes);
            pair.sender().write(pair.memory, 0, bytes, pair.at(0), Ask::nothing);
            if (round % 2)
                pair.sender().write_inline(&round, sizeof round, pair.at(flag));
            else
                pair.sender().masked_fetch_add(8, 1, 0, pair.memory, pair.at(flag));
            pair.sender().ring();
            EXPECT(until([&] { return load_flag(pair.memory.at(answer)) == round; }));
        } else {
            EXPECT(until([&] { return load_flag(pair.memory.at(flag)) == round; }));
            // The last bytes first: they are copied last
            for (size_t at = bytes; at-- > 0;)
                if (pair.memory.memory[at] != static_cast<uint8_t>(round))
                    fail(__FILE__, __LINE__,
                         "flag " + std::to_string(round) + " before byte " + std::to_string(at));
            pair.sender().write_inline(&round, sizeof round, pair.at(answer));
            pair.sender().finish();
        }
    }
    ranks.barrier();
}

// A doorbell page or a WQE that names another queue pair
void foreign(Ranks& ranks) {
    Pair pair(ranks, 2);
    if (pair.sends()) {
        const uint64_t value = 1;
        pair.sender(0).write_inline(&value, sizeof value, pair.at(0));
        pair.sender(0).ring_as(pair.sender(1).qpn(), 1);
        EXPECT(not pair.sender(0).wait(0, 0.2));
        pair.sender(0).finish();
        pair.sender(1).number_in_wqes = pair.sender(0).qpn();
        pair.sender(1).write_inline(&value, sizeof value, pair.at(8));
        pair.sender(1).expect_error(kLocalOperation);
    }
    ranks.barrier();
    if (not pair.sends()) {
        EXPECT_EQUAL(load_flag(pair.memory.at(0)), 1);
        EXPECT_EQUAL(load_flag(pair.memory.at(8)), 0);
    }
}
