// The toolkit's cuda.h declares host functions, which NVRTC refuses. Kernels need one type of it.
#pragma once
#include <stddef.h>
#include <stdint.h>
typedef struct __align__(64) CUtensorMap_st {
  unsigned long long opaque[16];
} CUtensorMap;
