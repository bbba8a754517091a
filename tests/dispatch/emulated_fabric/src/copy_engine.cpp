#include "copy_engine.h"

#include <cstring>

#include "refuse.h"
#include "settings.h"

namespace fabric {
namespace {

constexpr size_t kStaging = 4u << 20;

template <typename T>
bool store_as(uint64_t to, const void* from, size_t bytes) {
    if (bytes != sizeof(T) or to % sizeof(T) != 0) return false;
    T value;
    std::memcpy(&value, from, sizeof value);
    __atomic_store_n(reinterpret_cast<T*>(to), value, __ATOMIC_RELEASE);
    return true;
}

class MemcpyEngine : public CopyEngine {
public:
    MemcpyEngine() : MemcpyEngine(new uint8_t[kStaging]) {}
    bool on_device(const void*) override { return false; }

protected:
    bool queues(bool) const override { return true; }
    void start(const Copy&) override {}
    void finish(const std::vector<Copy>& copies) override {
        for (const Copy& copy : copies) {
            auto* memory = reinterpret_cast<void*>(copy.address);
            if (copy.is_read)
                std::memcpy(copy.staged, memory, copy.bytes);
            else
                std::memcpy(memory, copy.staged, copy.bytes);
        }
    }

private:
    explicit MemcpyEngine(uint8_t* staging) : CopyEngine(staging, kStaging), staging_(staging) {}
    std::unique_ptr<uint8_t[]> staging_;
};

}  // namespace

uint8_t* CopyEngine::stage(size_t bytes) {
    const size_t aligned = (bytes + 15) / 16 * 16;
    if (aligned > staging_bytes_) refuse("a copy of %zu bytes exceeds the staging buffer", bytes);
    if (used_ + aligned > staging_bytes_) synchronize();
    uint8_t* staged = staging_ + used_;
    used_ += aligned;
    return staged;
}

void CopyEngine::read(void* to, uint64_t from, size_t bytes, bool on_device) {
    if (bytes == 0) return;
    if (not queues(on_device)) {
        std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
        return;
    }
    const Copy copy{true, from, stage(bytes), to, bytes};
    copies_.push_back(copy);
    start(copy);
}

void CopyEngine::write(uint64_t to, const void* from, size_t bytes, bool on_device) {
    if (bytes == 0) return;
    if (not queues(on_device)) {
        std::memcpy(reinterpret_cast<void*>(to), from, bytes);
        return;
    }
    const Copy copy{false, to, stage(bytes), nullptr, bytes};
    std::memcpy(copy.staged, from, bytes);
    copies_.push_back(copy);
    start(copy);
}

void CopyEngine::store_word(uint64_t to, const void* from, size_t bytes, bool on_device) {
    if (on_device) {
        write(to, from, bytes, true);
        return;
    }
    if (store_as<uint64_t>(to, from, bytes) or store_as<uint32_t>(to, from, bytes) or
        store_as<uint16_t>(to, from, bytes))
        return;
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
}

void CopyEngine::synchronize() {
    if (copies_.empty()) return;
    finish(copies_);
    for (const Copy& copy : copies_)
        if (copy.is_read) std::memcpy(copy.to, copy.staged, copy.bytes);
    copies_.clear();
    used_ = 0;
}

CopyEngine& copy_engine() {
    // Never destroyed: the NIC thread may outlive static destructors
    static CopyEngine& once =
        *(settings().cuda ? make_cuda_engine() : std::make_unique<MemcpyEngine>()).release();
    return once;
}

}  // namespace fabric
