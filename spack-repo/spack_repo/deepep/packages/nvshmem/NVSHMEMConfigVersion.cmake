# A later release of the same major version satisfies a request, as NVSHMEM's own rule for its host library
set(PACKAGE_VERSION "@NVSHMEM_VERSION@")
string(REGEX MATCH "^[0-9]+" _nvshmem_major "${PACKAGE_VERSION}")

if(PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION
   OR (PACKAGE_FIND_VERSION AND NOT PACKAGE_FIND_VERSION_MAJOR EQUAL _nvshmem_major))
  set(PACKAGE_VERSION_COMPATIBLE FALSE)
else()
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
  if(PACKAGE_VERSION VERSION_EQUAL PACKAGE_FIND_VERSION)
    set(PACKAGE_VERSION_EXACT TRUE)
  endif()
endif()

unset(_nvshmem_major)
