#include <cstring>

#include "cases.h"

namespace {

constexpr int kIds = 8;

// Notes of the second rank
enum { kReadOnly = 2, kOther, kGone };

}  // namespace

void remote_keys(Ranks& ranks) {
    Pair pair(ranks, kIds);
    Buffer read_only(pair.nic, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
    Buffer gone(pair.nic, 4096);
    const uint32_t gone_key = gone.mr->rkey;
    EXPECT_EQUAL(verbs().dereg_mr(gone.mr), 0);
    ranks.note(kReadOnly, read_only.address());
    ranks.note(kOther, read_only.mr->rkey);
    ranks.note(kGone, gone_key);
    ranks.barrier();
    if (pair.sends()) {
        const Remote good = pair.at(0);
        const uint64_t end = good.address + pair.memory.bytes;
        const Remote wrong[kIds] = {
            {good.address, 0x00fffe5a},                             // never registered
            {good.address, good.rkey ^ 1},                          // wrong tag
            {good.address, pair.memory.mr->rkey},                   // this rank's own
            {good.address, static_cast<uint32_t>(ranks.note_of(1, kGone))},
            {end - 7, good.rkey},                                   // ends one byte too late
            {good.address - 1, good.rkey},                          // starts one too early
            {~uint64_t{0} - 3, good.rkey},                          // wraps around
            {ranks.note_of(1, kReadOnly), static_cast<uint32_t>(ranks.note_of(1, kOther))},
        };
        const uint64_t value = ~uint64_t{0};
        for (int id = 0; id < kIds; ++id) {
            pair.sender(id).write_inline(&value, sizeof value, wrong[id]);
            pair.sender(id).expect_error(kRemoteAccess);
            // The queue pair is in error: what follows is flushed
            pair.sender(id).write_inline(&value, sizeof value, good);
            pair.sender(id).expect_error(kFlushed);
        }
    }
    ranks.barrier();
    if (not pair.sends()) {
        for (size_t at = 0; at < pair.memory.bytes; ++at) EXPECT_EQUAL(*pair.memory.at(at), 0);
        EXPECT_EQUAL(*read_only.at(0), 0);
    }
}

void local_keys(Ranks& ranks) {
    Pair pair(ranks, 6);
    Buffer no_right(pair.nic, 64, 0);
    ranks.barrier();
    if (pair.sends()) {
        const uint32_t good = pair.memory.mr->lkey;
        const auto write_with = [&](int id, uint32_t lkey, size_t offset, uint32_t bytes) {
            pair.memory.mr->lkey = lkey;
            pair.sender(id).write(pair.memory, offset, bytes, pair.at(0));
            pair.memory.mr->lkey = good;
            pair.sender(id).expect_error(kLocalProtection);
        };
        fill(pair.memory.at(0), 4096, 1);
        write_with(0, 0x00fffe5a, 0, 64);
        write_with(1, pair.peer.rkey, 0, 64);
        write_with(2, good, pair.memory.bytes - 63, 64);
        write_with(3, good, 1, static_cast<uint32_t>(pair.memory.bytes));
        // A read may not go where this NIC may not write
        pair.sender(4).read(no_right, 0, 64, pair.at(0));
        pair.sender(4).expect_error(kLocalProtection);
        pair.sender(5).write(pair.memory, 0, 64, pair.at(0));
        pair.sender(5).write(pair.memory, pair.memory.bytes, 1, pair.at(64));
        pair.sender(5).expect_error(kLocalProtection);
    }
    ranks.barrier();
    if (not pair.sends()) {
        // What came before the error was done
        EXPECT(is_filled(pair.memory.at(0), 64, 1));
        EXPECT_EQUAL(*pair.memory.at(64), 0);
    }
}

// Not connected at all, and connected to a queue pair that is connected to another
void unconnected(Ranks& ranks) {
    Pair pair(ranks, 2);
    Sender early(pair.nic, 4), one_way(pair.nic, 6);
    early.to_init();
    ranks.barrier();
    if (pair.sends()) {
        const uint64_t value = 1;
        early.write_inline(&value, sizeof value, pair.at(0));
        early.expect_error(kNotConnected);
        ranks.note(0, pair.sender(0).qpn());
    } else {
        ranks.note(0, pair.sender(0).qpn());
        ranks.note(1, pair.nic.lid);
    }
    ranks.barrier();
    if (pair.sends()) {
        one_way.connect(static_cast<uint32_t>(ranks.note_of(1, 0)),
                        static_cast<uint16_t>(ranks.note_of(1, 1)));
        const uint64_t value = 2;
        one_way.write_inline(&value, sizeof value, pair.at(0));
        one_way.expect_error(kNotConnected);
        // The one that is connected is none the worse
        pair.sender(0).write_inline(&value, sizeof value, pair.at(8));
        pair.sender(0).finish();
    }
    ranks.barrier();
    if (not pair.sends()) {
        EXPECT_EQUAL(load_flag(pair.memory.at(0)), 0);
        EXPECT_EQUAL(load_flag(pair.memory.at(8)), 2);
    }
    ranks.barrier();
}

// A key is one NIC's; queue pairs of both NICs reach the peer
void two_nics(Ranks& ranks) {
    const int other = 1 - ranks.rank();
    Nic nics[2] = {Nic(0), Nic(1)};
    EXPECT(nics[0].lid != nics[1].lid);
    std::unique_ptr<uint8_t[]> memory(new uint8_t[4096]());
    ibv_mr* keys[2];
    std::unique_ptr<Sender> senders[2];
    for (int n = 0; n < 2; ++n) {
        keys[n] = verbs().reg_mr(nics[n].pd, memory.get(), 4096, kAllAccess);
        senders[n] = std::make_unique<Sender>(nics[n], static_cast<uint32_t>(other + 2 * n));
        ranks.note(n, keys[n]->rkey);
        ranks.note(2 + n, senders[n]->qpn());
        ranks.note(4 + n, nics[n].lid);
    }
    ranks.note(6, reinterpret_cast<uint64_t>(memory.get()));
    ranks.barrier();
    const auto note = [&](int place) { return ranks.note_of(other, place); };
    for (int n = 0; n < 2; ++n)
        senders[n]->connect(static_cast<uint32_t>(note(2 + n)),
                            static_cast<uint16_t>(note(4 + n)));
    ranks.barrier();
    for (int n = 0; n < 2; ++n) {
        const uint64_t value = static_cast<uint64_t>(100 + n);
        const Remote to = {note(6) + 8 * static_cast<uint64_t>(n), static_cast<uint32_t>(note(n))};
        senders[n]->write_inline(&value, sizeof value, to);
        senders[n]->finish();
    }
    ranks.barrier();
    EXPECT_EQUAL(load_flag(memory.get()), 100);
    EXPECT_EQUAL(load_flag(memory.get() + 8), 101);
    ranks.barrier();
    if (ranks.rank() == 0) {
        const uint64_t value = 5;
        senders[0]->write_inline(&value, sizeof value, {note(6), static_cast<uint32_t>(note(1))});
        senders[0]->expect_error(kRemoteAccess);
    }
    ranks.barrier();
    EXPECT_EQUAL(load_flag(memory.get()), 100);
}
