// DeepEP's lookup, cut verbatim out of csrc/kernels/ibgda_device.cuh
#include "lookup.h"

#define EP_STATIC_ASSERT(cond, reason) static_assert(cond, reason)

namespace deep_ep {
#include "deepep_cut.inc"
}  // namespace deep_ep

QueuePair* deepep_rc(int pe, int id) {
    return deep_ep::ibgda_get_rc(pe, id);
}
