#include <cstring>

#include "cases.h"

namespace {

template <typename T>
T value_at(uint8_t* memory) {
    return __atomic_load_n(reinterpret_cast<T*>(memory), __ATOMIC_ACQUIRE);
}

uint64_t operand_at(uint8_t* memory, int bytes) {
    return bytes == 4 ? value_at<uint32_t>(memory) : value_at<uint64_t>(memory);
}

}  // namespace

void write(Ranks& ranks) {
    Pair pair(ranks);
    constexpr uint32_t bytes = 4096;
    fill(pair.memory.at(0), bytes, static_cast<uint32_t>(ranks.rank()));
    pair.sender().write(pair.memory, 0, bytes, pair.at(bytes));
    pair.sender().finish();
    ranks.barrier();
    EXPECT(is_filled(pair.memory.at(bytes), bytes, static_cast<uint32_t>(1 - ranks.rank())));
    EXPECT_EQUAL(*pair.memory.at(2 * bytes), 0);
}

// Sizes around what one message holds, and more than all slots together
void split_write(Ranks& ranks) {
    Pair pair(ranks, 1, 6, 8u << 20);
    constexpr size_t half = 4u << 20;
    uint32_t seed = 0;
    constexpr uint32_t sizes[] = {1,     7,     8,     9,      32767,
                                  32768, 32769, 65536, 400000, 3500001};
    for (const uint32_t bytes : sizes) {
        ++seed;
        if (pair.sends()) {
            fill(pair.memory.at(0), bytes, seed);
            pair.sender().write(pair.memory, 0, bytes, pair.at(half));
            pair.sender().finish();
        }
        ranks.barrier();
        if (not pair.sends()) {
            EXPECT(is_filled(pair.memory.at(half), bytes, seed));
            EXPECT_EQUAL(*pair.memory.at(half + bytes), 0);
            std::memset(pair.memory.at(half), 0, bytes);
        }
        ranks.barrier();
    }
}

void inline_write(Ranks& ranks) {
    Pair pair(ranks);
    uint32_t seed = 0;
    for (const uint32_t bytes : {4u, 8u, 12u, 28u, 29u, 44u, 256u, 900u}) {
        uint8_t data[1024];
        fill(data, bytes, ++seed);
        if (pair.sends()) {
            pair.sender().write_inline(data, bytes, pair.at(64), Ask::nothing);
            pair.sender().finish();
        }
        ranks.barrier();
        if (not pair.sends()) {
            EXPECT(is_filled(pair.memory.at(64), bytes, seed));
            EXPECT_EQUAL(*pair.memory.at(64 + bytes), 0);
            std::memset(pair.memory.at(64), 0, bytes);
        }
        ranks.barrier();
    }
}

void write_with_immediate(Ranks& ranks) {
    Pair pair(ranks);
    if (pair.sends()) {
        fill(pair.memory.at(0), 100, 5);
        pair.sender().write(pair.memory, 0, 100, pair.at(0), Ask::completion,
                            MLX5_OPCODE_RDMA_WRITE_IMM);
        pair.sender().finish();
    }
    ranks.barrier();
    if (not pair.sends()) EXPECT(is_filled(pair.memory.at(0), 100, 5));
}

void read(Ranks& ranks) {
    Pair pair(ranks);
    fill(pair.memory.at(0), 200000, static_cast<uint32_t>(10 + ranks.rank()));
    ranks.barrier();
    for (const uint32_t bytes : {10u, 8u, 100001u}) {
        const uint16_t index = pair.sender().read(pair.memory, 300000, bytes, pair.at(0));
        pair.sender().ring();
        EXPECT(pair.sender().wait(index));
        EXPECT_EQUAL(pair.sender().completion_opcode(), MLX5_CQE_REQ);
        EXPECT(is_filled(pair.memory.at(300000), bytes,
                         static_cast<uint32_t>(11 - ranks.rank())));
    }
    ranks.barrier();
}

void atomics(Ranks& ranks) {
    Pair pair(ranks);
    constexpr uint64_t first = 0x1122334455667788u;
    std::memcpy(pair.memory.at(8), &first, 8);
    Buffer old(pair.nic, 8);
    ranks.barrier();
    if (pair.sends()) {
        const auto finished_old = [&] {
            pair.sender().finish();
            return value_at<uint64_t>(old.at(0));
        };
        pair.sender().fetch_add(0x100, old, pair.at(8));
        EXPECT_EQUAL(finished_old(), first);
        pair.sender().compare_swap(1, 2, old, pair.at(8));
        EXPECT_EQUAL(finished_old(), first + 0x100);
        pair.sender().compare_swap(first + 0x100, 77, old, pair.at(8));
        EXPECT_EQUAL(finished_old(), first + 0x100);
    }
    ranks.barrier();
    if (not pair.sends()) EXPECT_EQUAL(value_at<uint64_t>(pair.memory.at(8)), 77);
}

// Addition, exclusive or, and two fields of one word, as the boundary says
void masked_fetch_add(Ranks& ranks) {
    Pair pair(ranks);
    Buffer old(pair.nic, 8);
    const auto add = [&](int bytes, uint64_t start, uint64_t operand, uint64_t boundary,
                         uint64_t expected) {
        if (not pair.sends()) {
            std::memset(pair.memory.at(0), 0x5a, 24);
            std::memcpy(pair.memory.at(8), &start, static_cast<size_t>(bytes));
        }
        ranks.barrier();
        if (pair.sends()) {
            std::memset(old.at(0), 0, 8);
            pair.sender().masked_fetch_add(bytes, operand, boundary, old, pair.at(8));
            pair.sender().finish();
            EXPECT_EQUAL(operand_at(old.at(0), bytes), start);
        }
        ranks.barrier();
        if (not pair.sends()) {
            EXPECT_EQUAL(operand_at(pair.memory.at(8), bytes), expected);
            EXPECT_EQUAL(*pair.memory.at(7), 0x5a);
            EXPECT_EQUAL(*pair.memory.at(8 + static_cast<size_t>(bytes)), 0x5a);
        }
        ranks.barrier();
    };
    add(4, 0xffff0001, 0x00010203, 0, 0x00000204);
    add(4, 7, 0xffffffff, 0, 6);
    add(4, 0xf0f0f0f0, 0xffff0000, 0xffffffff, 0x0f0ff0f0);
    add(4, 0x0000ffff, 0x00010001, 0x80008000, 0x00010000);
    add(8, 0x00000000ffffffff, 1, 0, 0x0000000100000000);
    add(8, 0x1122334455667788, 0x0102030405060708, 0, 0x122436485a6c7e90);
    add(8, 0xff00ff00ff00ff00, 0xffffffff00000000, ~uint64_t{0}, 0x00ff00ffff00ff00);
    add(8, 0x00000000ffffffff, 0x0000000100000001, 0x8000000080000000, 0x0000000100000000);
}

void masked_compare_swap(Ranks& ranks) {
    Pair pair(ranks);
    Buffer old(pair.nic, 8);
    const auto swap = [&](int bytes, uint64_t start, uint64_t compare, uint64_t compare_mask,
                          uint64_t operand, uint64_t swap_mask, uint64_t expected) {
        if (not pair.sends()) {
            std::memset(pair.memory.at(0), 0x5a, 24);
            std::memcpy(pair.memory.at(8), &start, static_cast<size_t>(bytes));
        }
        ranks.barrier();
        if (pair.sends()) {
            const uint16_t last = pair.sender().masked_compare_swap(
                bytes, compare, compare_mask, operand, swap_mask, old, pair.at(8));
            pair.sender().ring();
            EXPECT(pair.sender().wait(last));
            EXPECT_EQUAL(pair.sender().completion_opcode(), MLX5_CQE_REQ);
            EXPECT_EQUAL(operand_at(old.at(0), bytes), start);
        }
        ranks.barrier();
        if (not pair.sends()) {
            EXPECT_EQUAL(operand_at(pair.memory.at(8), bytes), expected);
            EXPECT_EQUAL(*pair.memory.at(8 + static_cast<size_t>(bytes)), 0x5a);
        }
        ranks.barrier();
    };
    constexpr uint64_t all4 = 0xffffffff, all8 = ~uint64_t{0};
    swap(4, 5, 0, 0, 0x01020304, all4, 0x01020304);
    swap(4, 0x01020304, 0x01020304, all4, 9, all4, 9);
    swap(4, 0x01020304, 0x01020305, all4, 9, all4, 0x01020304);
    swap(4, 0xaabbccdd, 0x000000dd, 0xff, 0x11111111, 0xff00, 0xaabb11dd);
    swap(8, 1, 0, 0, 0x0102030405060708, all8, 0x0102030405060708);
    swap(8, 0x0102030405060708, 0x0102030405060708, all8, 4, all8, 4);
    swap(8, 0x0102030405060708, 0x0102030405060709, all8, 4, all8, 0x0102030405060708);
    swap(8, all8, 0xff, 0xff, 0, 0x00ffff0000000000, 0xff0000ffffffffff);
}

// WQEs that move nothing complete behind those that do
void nothing(Ranks& ranks) {
    Pair pair(ranks, 1, 4);
    for (int round = 0; round < 40; ++round) {
        pair.sender().nop();
        pair.sender().dump(pair.memory);
        pair.sender().finish();
    }
    ranks.barrier();
}

// Only WQEs that ask for it complete, in order, under their own index
void completion(Ranks& ranks) {
    Pair pair(ranks);
    if (not pair.sends()) {
        ranks.barrier();
        return;
    }
    Sender& sender = pair.sender();
    const uint16_t first = sender.write(pair.memory, 0, 100, pair.at(0));
    sender.ring();
    EXPECT(sender.wait(first));
    const uint16_t silent = sender.write(pair.memory, 0, 100, pair.at(0), Ask::nothing);
    sender.ring();
    EXPECT(not sender.wait(silent, 0.05));
    EXPECT_EQUAL(sender.completed_index(), first);
    const uint16_t last = sender.write(pair.memory, 0, 100, pair.at(0));
    sender.ring();
    EXPECT(sender.wait(last));
    EXPECT_EQUAL(sender.completion_opcode(), MLX5_CQE_REQ);
    EXPECT_EQUAL(sender.completion_qpn(), sender.qpn());
    ranks.barrier();
}
