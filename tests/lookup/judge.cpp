// Reads jobs, one a line, and prints for each, on one line, what Counts::print says
#include "compare.h"

nvshmemi_ibgda_device_state_t nvshmemi_ibgda_device_state_d;
nvshmemi_device_host_state_t nvshmemi_device_state_d;

namespace {

uintptr_t address(const QueuePair* qp) { return reinterpret_cast<uintptr_t>(qp); }

void judge(const Job& job) {
    std::vector<QueuePair> table(job.slots());
    std::vector<Switch> switches(switches_of(job));
    fill(nvshmemi_ibgda_device_state_d, job, table.data(), switches.data());
    nvshmemi_device_state_d.npes = job.npes;

    Owners owners(job);
    for (int rank = 0; rank < job.npes; ++rank) {
        nvshmemi_device_state_d.mype = rank;
        for (int pe = 0; pe < job.npes; ++pe) {
            if (pe == rank) continue;
            // The counters of releases up to 3.7 have eight bits and wrap
            for (Switch& counter : switches) counter = 0;
            for (const QueuePair* qp : nvshmem_rcs(pe))
                owners.note(index_of(address(qp), address(table.data())), pe);
        }
    }
    owners.require_complete();

    Counts counts;
    for (int rank = 0; rank < job.npes; ++rank) {
        nvshmemi_device_state_d.mype = rank;
        counts.add(job, rank, owners, [&](int pe, int id) {
            return index_of(address(deepep_rc(pe, id)), address(table.data()));
        });
    }
    counts.print();
}

}  // namespace

int main() {
    for (Job job; job.read();) judge(job);
}
