#include "memory_region.h"

#include <mutex>
#include <vector>

#include "copy_engine.h"
#include "defects.h"
#include "refuse.h"
#include "settings.h"

namespace fabric {
namespace {

std::mutex umems_mutex;

std::vector<Umem>& umems() {
    static std::vector<Umem>& once = *new std::vector<Umem>;
    return once;
}

}  // namespace

const char* text(Reason reason) {
    switch (reason) {
        case Reason::none: return "no error";
        case Reason::unknown_key: return "nobody registered this key";
        case Reason::key_of_other_rank: return "the key belongs to another rank";
        case Reason::key_of_other_nic: return "the key belongs to another NIC";
        case Reason::out_of_range: return "the address is outside the memory region";
        case Reason::no_right: return "the memory region was registered without this right";
        case Reason::unknown_queue_pair: return "nobody made the remote queue pair";
        case Reason::queue_pair_of_other_rank: return "the remote queue pair is another rank's";
        case Reason::not_connected: return "the queue pair is not connected both ways";
        case Reason::misaligned_atomic: return "the atomic's address is not aligned";
        case Reason::malformed_wqe: return "the WQE's size does not fit its opcode";
        case Reason::other_queue_pairs_wqe: return "the WQE names another queue pair or index";
        case Reason::peer_is_gone: return "the peer's process is gone";
        case Reason::port_is_down: return "a port was down beyond the retry time";
        case Reason::earlier_error: return "flushed after an earlier error";
    }
    return "unnamed";
}

uint32_t register_region(uint32_t nic, void* address, size_t bytes, uint64_t iova, int access) {
    Tables& tables = segment().tables();
    const bool on_device = copy_engine().on_device(address);
    const uint32_t index = tables.memory_regions_used.fetch_add(1);
    if (index >= kMaxMemoryRegions)
        refuse("more than %u memory regions in one fabric", kMaxMemoryRegions);
    MemoryRegionEntry& entry = tables.memory_regions[index];
    entry.rank = settings().rank;
    entry.nic = nic;
    entry.access = static_cast<uint32_t>(access);
    entry.on_device = on_device;
    entry.iova = iova;
    entry.address = reinterpret_cast<uint64_t>(address);
    entry.length = bytes;
    entry.live.store(1, std::memory_order_release);
    return key_of(index);
}

void deregister_region(uint32_t key) {
    MemoryRegionEntry* entry = find_memory_region(key);
    if (not entry or entry->rank != settings().rank)
        refuse("ibv_dereg_mr of a region with key 0x%x, which this process does not hold", key);
    entry->live.store(0, std::memory_order_release);
}

Access check_access(uint32_t key, uint32_t rank, uint32_t nic, uint64_t iova, uint64_t bytes,
                    uint32_t right) {
    const MemoryRegionEntry* entry = find_memory_region(key);
    if (has(Defect::ignored_rkey) and right != 0) {
        // Wherever the address lies, if it lies in one of this rank's regions or not
        const bool device = entry and entry->on_device;
        return {Reason::none, device, iova};
    }
    if (not entry) return {Reason::unknown_key};
    if (entry->rank != rank) return {Reason::key_of_other_rank};
    if (entry->nic != nic) return {Reason::key_of_other_nic};
    if (iova < entry->iova or bytes > entry->length or iova - entry->iova > entry->length - bytes)
        return {Reason::out_of_range};
    if ((entry->access & right) != right) return {Reason::no_right};
    return {Reason::none, entry->on_device != 0, entry->address + (iova - entry->iova)};
}

uint32_t register_umem(const Umem& umem) {
    const std::lock_guard<std::mutex> lock(umems_mutex);
    umems().push_back(umem);
    return static_cast<uint32_t>(umems().size());
}

void deregister_umem(uint32_t id) {
    const std::lock_guard<std::mutex> lock(umems_mutex);
    if (id == 0 or id > umems().size() or not umems()[id - 1].address)
        refuse("mlx5dv_devx_umem_dereg of umem %u, which does not exist", id);
    umems()[id - 1] = {};
}

Umem umem_part(uint32_t id, uint32_t nic, uint64_t offset, uint64_t bytes, const char* what) {
    const std::lock_guard<std::mutex> lock(umems_mutex);
    if (id == 0 or id > umems().size() or not umems()[id - 1].address)
        refuse("%s names umem %u, which does not exist", what, id);
    Umem part = umems()[id - 1];
    if (part.nic != nic) refuse("%s names umem %u of another NIC", what, id);
    if (offset > part.bytes or bytes > part.bytes - offset)
        refuse("%s needs %llu bytes from byte %llu on of umem %u, which has %zu", what,
               static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(offset),
               id, part.bytes);
    part.address += offset;
    part.bytes = bytes;
    return part;
}

}  // namespace fabric
