// Objects behind the pointers that verbs and mlx5dv hand out; each begins with its public part
#pragma once

#include <cstdint>

#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>

#include "uar.h"

namespace fabric {

struct Device {
    ibv_device base;
    uint32_t nic;
};

struct Context {
    // What ibv_open_device returns points at base.context
    verbs_context base;
    uint32_t nic;
};

// NIC of a context, of a protection domain
uint32_t nic_of(const ibv_context* context);
inline uint32_t nic_of(const ibv_pd* pd) { return nic_of(pd->context); }

struct AddressHandle {
    ibv_ah base;
    mlx5_wqe_av address_vector;
};

// A number for an object of this process, never 0
uint32_t next_number();

struct SharedReceiveQueue {
    ibv_srq base;
    uint32_t srqn;
};

struct VerbsCompletionQueue {
    ibv_cq base;
    uint32_t cqn;
};

struct ProtectionDomain {
    ibv_pd base;
    uint32_t pdn;
};

}  // namespace fabric

// Opaque in mlx5dv.h
struct mlx5dv_devx_obj {
    ibv_context* context;
    uint16_t command;  // that created it
    uint32_t number;   // cqn or qpn
};
