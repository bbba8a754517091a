#include <thread>

#include "cases.h"

// Every rank to every other over queue pairs as NVSHMEM numbers them: pe + npes * id
void many_peers(Ranks& ranks) {
    constexpr int ids = 2;
    constexpr size_t block = 50000;
    const int npes = ranks.count();
    Nic nic;
    Buffer memory(nic, block * 2 * kMaxRanks);
    std::vector<std::unique_ptr<Sender>> senders(static_cast<size_t>(ids * npes));
    for (int slot = 0; slot < ids * npes; ++slot) {
        if (slot % npes == ranks.rank()) continue;
        senders[static_cast<size_t>(slot)] =
            std::make_unique<Sender>(nic, static_cast<uint32_t>(slot));
        ranks.note(slot, senders[static_cast<size_t>(slot)]->qpn());
    }
    ranks.note(kMaxNotes - 1, nic.lid);
    ranks.note(kMaxNotes - 2, memory.address());
    ranks.note(kMaxNotes - 3, memory.mr->rkey);
    ranks.barrier();
    const auto from = [&](int rank) { return memory.at(block * static_cast<size_t>(rank)); };
    for (int slot = 0; slot < ids * npes; ++slot) {
        const int pe = slot % npes;
        if (pe == ranks.rank()) continue;
        senders[static_cast<size_t>(slot)]->connect(
            static_cast<uint32_t>(ranks.note_of(pe, slot - pe + ranks.rank())),
            static_cast<uint16_t>(ranks.note_of(pe, kMaxNotes - 1)));
    }
    ranks.barrier();
    // Halves over the two ids; the block of a rank holds what that rank sent here
    uint8_t* own = memory.at(block * kMaxRanks);
    fill(own, block, static_cast<uint32_t>(ranks.rank()));
    for (int slot = 0; slot < ids * npes; ++slot) {
        const int pe = slot % npes;
        if (pe == ranks.rank()) continue;
        const size_t offset = slot < npes ? 0 : block / 2;
        Sender& sender = *senders[static_cast<size_t>(slot)];
        sender.write(memory, block * kMaxRanks + offset, block / 2,
                     {ranks.note_of(pe, kMaxNotes - 2) +
                          block * static_cast<size_t>(ranks.rank()) + offset,
                      static_cast<uint32_t>(ranks.note_of(pe, kMaxNotes - 3))});
        sender.nop();
        sender.ring();
    }
    for (auto& sender : senders)
        if (sender) sender->finish();
    ranks.barrier();
    for (int pe = 0; pe < npes; ++pe)
        if (pe != ranks.rank())
            EXPECT(is_filled(from(pe), block, static_cast<uint32_t>(pe)));
    ranks.barrier();
}

// Producers in several threads of both ranks, each with a queue pair, on one counter
void many_threads(Ranks& ranks) {
    constexpr int threads = 4, rounds = 30;
    Pair pair(ranks, threads);
    std::vector<std::thread> producers;
    for (int id = 0; id < threads; ++id)
        producers.emplace_back([&, id] {
            Buffer old(pair.nic, 8);
            const size_t place = 4096 * static_cast<size_t>(1 + id);
            Buffer data(pair.nic, 4096);
            for (int round = 0; round < rounds; ++round) {
                fill(data.at(0), 4096, static_cast<uint32_t>(100 * id + round));
                pair.sender(id).write(data, 0, 4096, pair.at(place), Ask::nothing);
                pair.sender(id).masked_fetch_add(8, static_cast<uint64_t>(1 + id), 0, old,
                                                 pair.at(0));
                pair.sender(id).finish();
            }
        });
    for (std::thread& producer : producers) producer.join();
    ranks.barrier();
    EXPECT_EQUAL(load_flag(pair.memory.at(0)), rounds * (1 + 2 + 3 + 4));
    for (int id = 0; id < threads; ++id)
        EXPECT(is_filled(pair.memory.at(4096 * static_cast<size_t>(1 + id)), 4096,
                         static_cast<uint32_t>(100 * id + rounds - 1)));
    ranks.barrier();
}
