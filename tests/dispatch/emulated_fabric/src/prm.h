// Fields of the command mailboxes that NVSHMEM fills or reads, by their names in the PRM.
//
// An offset is in bytes from the start of the mailbox or context. Each field is big-endian; where
// it is not whole bytes, the mask says which bits of the byte or word count.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fabric::prm {

enum Command : uint16_t {
    kQueryHcaCap = 0x100,
    kCreateCq = 0x400,
    kCreateQp = 0x500,
    kRst2InitQp = 0x502,
    kInit2RtrQp = 0x503,
    kRtr2RtsQp = 0x504,
};

// Every mailbox
namespace mailbox {
constexpr size_t kOpcode = 0x00;  // u16, input
constexpr size_t kOpMod = 0x06;   // u16, input
constexpr size_t kNumber = 0x09;  // u24: cqn or qpn, input of a modify and output of a create
constexpr size_t kBytes = 0x10;   // a mailbox without anything behind its header
}  // namespace mailbox

namespace query_hca_cap {
constexpr size_t kCapability = 0x10;
// op_mod: type of capability in bits 15..1, maximum or current in bit 0
constexpr uint16_t kGeneralCurrent = 0x0001;
constexpr uint16_t kAtomicCurrent = 0x0007;
}  // namespace query_hca_cap

// cmd_hca_cap, from the start of the capability
namespace general_cap {
constexpr size_t kCqeVersion = 0x3f;  // low nibble
constexpr uint8_t kCqeVersion1 = 0x01;
constexpr size_t kCompactAddressVector = 0x40;  // top bit
constexpr uint8_t kCompactAddressVectorBit = 0x80;
constexpr size_t kLogBfRegSize = 0x4d;  // low 5 bits, log2 of bytes
constexpr uint8_t kLogBfRegSize512 = 0x09;
constexpr size_t kEnd = 0x4e;
}  // namespace general_cap

// atomic_caps, from the start of the capability
namespace atomic_cap {
constexpr size_t kAtomicOperations = 0x12;  // u16
constexpr uint16_t kCompareSwap = 0x1, kFetchAdd = 0x2;
constexpr uint16_t kMaskedCompareSwap = 0x4, kMaskedFetchAdd = 0x8;
constexpr size_t kAtomicSizeQp = 0x16;  // u16, bit n: operands of 2^n bytes
constexpr size_t kAtomicSizeDc = 0x1a;  // u16, as above
constexpr uint16_t kSize4 = 0x4, kSize8 = 0x8;
constexpr size_t kEnd = 0x1c;
}  // namespace atomic_cap

namespace create_cq {
constexpr size_t kContext = 0x10;
constexpr size_t kCqUmemOffset = 0x50;  // u64, bytes
constexpr size_t kCqUmemId = 0x58;      // u32
constexpr size_t kBytes = 0x5c;         // at least
}  // namespace create_cq

// cqc, from the start of the context
namespace cqc {
constexpr size_t kFlags = 0x00;  // u16 with cqe_sz, cc and oi
constexpr uint16_t kCqeSz = 0x00e0, kCqeSz64 = 0x0000;
constexpr uint16_t kCc = 0x0010, kOi = 0x0004;
constexpr size_t kLogCqSize = 0x0c;  // low 5 bits
}  // namespace cqc

namespace create_qp {
constexpr size_t kQpc = 0x18;
constexpr size_t kWqUmemOffset = 0x100;  // u64, bytes
constexpr size_t kWqUmemId = 0x108;      // u32
constexpr size_t kBytes = 0x10c;         // at least
}  // namespace create_qp

namespace modify_qp {
constexpr size_t kQpc = 0x18;
constexpr size_t kBytes = kQpc + 0xe8;
}  // namespace modify_qp

// qpc, from the start of the context
namespace qpc {
constexpr size_t kSt = 0x01;  // u8
constexpr uint8_t kStRc = 0x00, kStDci = 0x05;
constexpr size_t kLogSqSize = 0x0a;  // bits 6..3, log2 of WQEBBs
constexpr size_t kUarPage = 0x0d;    // u24
constexpr size_t kUserIndex = 0x11;  // u24
constexpr size_t kRemoteQpn = 0x15;  // u24
constexpr size_t kPrimaryAddressPath = 0x18;
constexpr size_t kRlid = kPrimaryAddressPath + 0x06;  // u16
constexpr size_t kCqnSnd = 0x7d;                      // u24
}  // namespace qpc

// The value that follows MLX5_OPCODE_TSO and lies outside mlx5dv.h's enumeration
constexpr uint8_t kOpcodeDump = 0x23;

}  // namespace fabric::prm
