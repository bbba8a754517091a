#include "uar.h"

#include <algorithm>
#include <mutex>

#include <sys/mman.h>

#include "byte_order.h"
#include "nic.h"
#include "refuse.h"

namespace fabric {
namespace {

constexpr size_t kPage = 4096;

std::vector<UarPage*>& pages() {
    static std::vector<UarPage*>& once = *new std::vector<UarPage*>;
    return once;
}

}  // namespace

Doorbell decode_doorbell(uint64_t word) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&word);
    return {load_be32(bytes + 4) >> 8, static_cast<uint16_t>(load_be32(bytes) >> 8)};
}

UarPage* allocate_uar(uint32_t nic) {
    void* memory =
        mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) refuse("no memory for a UAR page");
    auto* page = new UarPage;
    page->doorbell = static_cast<uint64_t*>(memory);
    page->nic = nic;
    static uint32_t last_id = 0;
    const NicLock lock;
    page->page_id = ++last_id;
    pages().push_back(page);
    return page;
}

void free_uar(UarPage* page) {
    const NicLock lock;
    auto& all = pages();
    const auto at = std::find(all.begin(), all.end(), page);
    if (at == all.end()) refuse("mlx5dv_devx_free_uar of a page that does not exist");
    if (not page->queue_pairs.empty())
        refuse("mlx5dv_devx_free_uar of page %u, which a queue pair still uses", page->page_id);
    all.erase(at);
    munmap(page->doorbell, kPage);
    delete page;
}

UarPage* find_uar(uint32_t page_id) {
    for (UarPage* page : pages())
        if (page->page_id == page_id) return page;
    return nullptr;
}

const std::vector<UarPage*>& uar_pages() { return pages(); }

bool is_uar(const void* address) {
    const NicLock lock;
    const auto wanted = reinterpret_cast<uintptr_t>(address);
    return std::any_of(pages().begin(), pages().end(), [&](const UarPage* page) {
        return wanted - reinterpret_cast<uintptr_t>(page->doorbell) < kPage;
    });
}

}  // namespace fabric
