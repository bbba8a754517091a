// How the NIC reaches memory: the CUDA driver for device memory, memcpy for the rest.
//
// Copies are queued and done, in order, at synchronize(). Both engines stage the bytes: the CUDA
// driver needs pinned memory to copy without waiting, and memcpy then keeps the same rules, so
// that a missing synchronize() shows in the self test as well.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace fabric {

class CopyEngine {
public:
    virtual ~CopyEngine() = default;

    // Is this device memory? Refuses managed memory, which has no fixed place
    virtual bool on_device(const void* address) = 0;
    // Called once by the NIC thread before its first copy
    virtual void enter_thread() {}

    // Queues a copy; `to` holds the bytes after synchronize()
    void read(void* to, uint64_t from, size_t bytes, bool on_device);
    // Queues a copy; `from` may be reused at once
    void write(uint64_t to, const void* from, size_t bytes, bool on_device);
    // Stores a word of up to 8 bytes as one access, behind what synchronize() has finished
    void store_word(uint64_t to, const void* from, size_t bytes, bool on_device);
    void synchronize();

protected:
    struct Copy {
        bool is_read;
        uint64_t address;  // in the process's memory
        uint8_t* staged;
        void* to;  // of a read
        size_t bytes;
    };

    CopyEngine(uint8_t* staging, size_t bytes) : staging_(staging), staging_bytes_(bytes) {}

    // Are copies of this memory queued, or done at once?
    virtual bool queues(bool on_device) const = 0;
    virtual void start(const Copy& copy) = 0;
    virtual void finish(const std::vector<Copy>& copies) = 0;

private:
    uint8_t* stage(size_t bytes);

    uint8_t* staging_;
    size_t staging_bytes_, used_ = 0;
    std::vector<Copy> copies_;
};

// The engine that settings() name; made at the first call, by a thread with a CUDA context
CopyEngine& copy_engine();

std::unique_ptr<CopyEngine> make_cuda_engine();

}  // namespace fabric
