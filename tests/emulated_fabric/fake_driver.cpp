// Stands in for libcuda.so.1: reports the flags that a registration arrives with
#include <cstring>

#include <cuda.h>

extern "C" {

unsigned int last_flags = 0;

static CUresult register_host(void*, size_t, unsigned int flags) {
    last_flags = flags;
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress_v2(const char* symbol, void** function, int, cuuint64_t,
                             CUdriverProcAddressQueryResult*) {
    *function = std::strcmp(symbol, "cuMemHostRegister") == 0
                    ? reinterpret_cast<void*>(register_host)
                    : reinterpret_cast<void*>(cuGetProcAddress_v2);
    return CUDA_SUCCESS;
}

}
