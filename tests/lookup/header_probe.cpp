// Prints: device state type, whether it is v1, its size, offset of num_rc_per_pe, version
#include "lookup.h"

#include <cstdio>
#include <typeinfo>

int main() {
    using State = nvshmemi_ibgda_device_state_t;
    // The name of the type tells v2 from a later one, and v1 headers cannot name v2 at all
    std::printf("%s %d %zu %zu %d\n",
                typeid(State).name(),
                static_cast<int>(std::is_same_v<State, nvshmemi_ibgda_device_state_v1>),
                sizeof(State),
                offsetof(State, num_rc_per_pe),
                static_cast<int>(NVSHMEM_VENDOR_VERSION));
}
