// Big-endian fields of command mailboxes, WQEs and CQEs
#pragma once

#include <cstdint>
#include <cstring>

#include <endian.h>

namespace fabric {

template <typename T>
T load(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <typename T>
void store(void* to, T value) {
    std::memcpy(to, &value, sizeof value);
}

inline uint16_t load_be16(const void* from) { return be16toh(load<uint16_t>(from)); }
inline uint32_t load_be32(const void* from) { return be32toh(load<uint32_t>(from)); }
inline uint64_t load_be64(const void* from) { return be64toh(load<uint64_t>(from)); }

inline uint32_t load_be24(const void* from) {
    const auto* byte = static_cast<const uint8_t*>(from);
    return uint32_t{byte[0]} << 16 | uint32_t{byte[1]} << 8 | byte[2];
}

inline void store_be16(void* to, uint16_t value) { store(to, htobe16(value)); }
inline void store_be32(void* to, uint32_t value) { store(to, htobe32(value)); }

inline void store_be24(void* to, uint32_t value) {
    auto* byte = static_cast<uint8_t*>(to);
    byte[0] = static_cast<uint8_t>(value >> 16);
    byte[1] = static_cast<uint8_t>(value >> 8);
    byte[2] = static_cast<uint8_t>(value);
}

}  // namespace fabric
