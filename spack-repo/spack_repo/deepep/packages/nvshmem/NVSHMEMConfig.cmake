# For find_package(NVSHMEM): the binary distribution has no CMake configuration of its own.
# Targets, named as in NVSHMEM's source builds:
#   nvshmem::nvshmem_host    host library (shared)
#   nvshmem::nvshmem_device  device library (static; link with CUDA separable compilation)
get_filename_component(_nvshmem_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

set(NVSHMEM_INCLUDE_DIR "${_nvshmem_prefix}/include")
set(NVSHMEM_LIBRARY_DIR "${_nvshmem_prefix}/lib")

if(NOT TARGET nvshmem::nvshmem_host)
  add_library(nvshmem::nvshmem_host SHARED IMPORTED)
  set_target_properties(nvshmem::nvshmem_host PROPERTIES
    IMPORTED_LOCATION "${NVSHMEM_LIBRARY_DIR}/libnvshmem_host.so.3"
    IMPORTED_SONAME "libnvshmem_host.so.3"
    INTERFACE_INCLUDE_DIRECTORIES "${NVSHMEM_INCLUDE_DIR}")
endif()

if(NOT TARGET nvshmem::nvshmem_device)
  add_library(nvshmem::nvshmem_device STATIC IMPORTED)
  set_target_properties(nvshmem::nvshmem_device PROPERTIES
    IMPORTED_LOCATION "${NVSHMEM_LIBRARY_DIR}/libnvshmem_device.a"
    INTERFACE_INCLUDE_DIRECTORIES "${NVSHMEM_INCLUDE_DIR}")
endif()

unset(_nvshmem_prefix)
