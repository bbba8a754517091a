#include "segment.h"

#include <cerrno>
#include <cstring>
#include <ctime>

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "refuse.h"
#include "settings.h"

namespace fabric {
namespace {

constexpr size_t kPage = 4096;

constexpr size_t rounded(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Held by a living process over the byte of its rank: released by the kernel even by a zombie
bool lock_rank(int file, uint32_t rank, int command, bool* taken) {
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = rank;
    lock.l_len = 1;
    const bool done = fcntl(file, command, &lock) == 0;
    *taken = lock.l_type != F_UNLCK;
    return done;
}

}  // namespace

Segment::Segment() {
    const Settings& s = settings();
    file_ = open(s.segment.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file_ < 0) refuse("cannot open %s: %s", s.segment.c_str(), std::strerror(errno));
    const size_t bytes =
        rounded(sizeof(Tables)) + size_t{s.processes} * s.processes * rounded(sizeof(Ring));
    struct stat status = {};
    fstat(file_, &status);
    if (status.st_size != 0 and static_cast<size_t>(status.st_size) != bytes)
        refuse("%s was made for another number of processes or by another build",
               s.segment.c_str());
    if (ftruncate(file_, static_cast<off_t>(bytes)) != 0)
        refuse("cannot make %s of %zu bytes: %s", s.segment.c_str(), bytes, std::strerror(errno));
    if (const int error = posix_fallocate(file_, 0, rounded(sizeof(Tables))))
        refuse("no room for %s: %s", s.segment.c_str(), std::strerror(error));
    void* base =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
    if (base == MAP_FAILED) refuse("cannot map %s: %s", s.segment.c_str(), std::strerror(errno));
    // A forked child has neither the lock nor the NIC thread
    madvise(base, bytes, MADV_DONTFORK);
    tables_ = static_cast<Tables*>(base);

    const uint64_t geometry = uint64_t{s.processes} << 32 | s.nics;
    uint64_t seen = 0;
    if (not tables_->geometry.compare_exchange_strong(seen, geometry) and seen != geometry)
        refuse("%s belongs to %u processes with %u NICs, this one has %u with %u",
               s.segment.c_str(), static_cast<uint32_t>(seen >> 32), static_cast<uint32_t>(seen),
               s.processes, s.nics);
    bool taken = false;
    ProcessEntry& mine = tables_->processes[s.rank];
    if (not lock_rank(file_, s.rank, F_SETLK, &taken) or
        mine.liveness.load() != Liveness::absent)
        refuse("rank %u of %s is taken by process %u", s.rank, s.segment.c_str(),
               mine.pid.load());
    // The heads of this rank's rings, which it polls; their messages when it connects
    for (uint32_t peer = 0; peer < s.processes; ++peer)
        if (posix_fallocate(file_, static_cast<off_t>(ring_offset(peer, s.rank)), kPage) or
            posix_fallocate(file_, static_cast<off_t>(ring_offset(s.rank, peer)), kPage))
            refuse("no room in %s for the rings' heads", s.segment.c_str());
    mine.pid.store(static_cast<uint32_t>(getpid()));
    mine.liveness.store(Liveness::running);
}

size_t Segment::ring_offset(uint32_t source, uint32_t destination) const {
    const size_t number = size_t{source} * settings().processes + destination;
    return rounded(sizeof(Tables)) + number * rounded(sizeof(Ring));
}

Ring& Segment::ring(uint32_t source, uint32_t destination) {
    auto* base = reinterpret_cast<uint8_t*>(tables_);
    return *reinterpret_cast<Ring*>(base + ring_offset(source, destination));
}

void Segment::reserve_ring(uint32_t source, uint32_t destination) {
    const auto offset = static_cast<off_t>(ring_offset(source, destination));
    if (const int error = posix_fallocate(file_, offset, sizeof(Ring)))
        refuse("no room in %s for %zu bytes of messages from rank %u to rank %u: %s",
               settings().segment.c_str(), sizeof(Ring), source, destination,
               std::strerror(error));
}

bool Segment::alive(uint32_t rank) {
    const Liveness liveness = tables_->processes[rank].liveness.load();
    if (rank == settings().rank or liveness == Liveness::absent) return true;
    if (liveness == Liveness::gone) return false;
    bool taken = true;
    return not lock_rank(file_, rank, F_GETLK, &taken) or taken;
}

void Segment::leave() { tables_->processes[settings().rank].liveness.store(Liveness::gone); }

Segment& segment() {
    // Never destroyed: the NIC thread may outlive static destructors
    static Segment& once = *new Segment;
    return once;
}

QueuePairEntry* find_queue_pair(uint32_t qpn) {
    Tables& tables = segment().tables();
    if (qpn < kFirstQpn or qpn - kFirstQpn >= tables.queue_pairs_used.load()) return nullptr;
    return &tables.queue_pairs[qpn - kFirstQpn];
}

MemoryRegionEntry* find_memory_region(uint32_t key) {
    Tables& tables = segment().tables();
    const uint32_t index = key >> 8;
    if ((key & 0xff) != kKeyTag or index >= tables.memory_regions_used.load()) return nullptr;
    MemoryRegionEntry& entry = tables.memory_regions[index];
    return entry.live.load(std::memory_order_acquire) ? &entry : nullptr;
}

uint64_t now_ns() {
    timespec time = {};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1000000000u + static_cast<uint64_t>(time.tv_nsec);
}

}  // namespace fabric
