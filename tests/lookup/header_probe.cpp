// Prints what print_header_facts says
#include "compare.h"

#include <typeinfo>

int main() {
    // The name of the type tells v2 from a later one, and v1 headers cannot name v2 at all
    print_header_facts(typeid(nvshmemi_ibgda_device_state_t).name());
}
