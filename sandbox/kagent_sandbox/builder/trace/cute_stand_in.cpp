// Stands in for the runtime library of CuTe DSL while host code is traced: no driver, no device.
//
// The DSL compiles a host function to machine code whose whole contact with CUDA is these symbols.
// Kernels are remembered with the binary that they are from. Launches and tensor maps are handed to
// Python, which records them.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

namespace {

struct Config {  // as cudaLaunchConfig_t
  unsigned grid[3];
  unsigned block[3];
  size_t shared;
  void* stream;
  const void* attributes;
  unsigned count;
};

struct Kernel {
  const void* binary;
  std::string name;
};

using OnLaunch = int (*)(const void* binary, const char* name, const Config*, void** arguments);
using OnTensorMap = int (*)(void* map, int dtype, unsigned rank, void* address,
                            const uint64_t* dims, const uint64_t* strides, const uint32_t* box,
                            const uint32_t* steps, int interleave, int swizzle, int promotion,
                            int fill);

constexpr int kInvalidValue = 1, kAttributes = 256;
OnLaunch on_launch = nullptr;
OnTensorMap on_tensor_map = nullptr;
int attributes[kAttributes];

int load(void** library, const void* binary) {
  *library = const_cast<void*>(binary);
  return 0;
}

int kernel_of(void** kernel, const void* library, const char* name) {
  *kernel = new Kernel{library, name};  // for as long as the process lives
  return 0;
}

}  // namespace

extern "C" {

void kagent_record(OnLaunch launch, OnTensorMap tensor_map) {
  on_launch = launch;
  on_tensor_map = tensor_map;
}

void kagent_answer(int attribute, int value) { attributes[attribute % kAttributes] = value; }

int _cudaLaunchKernelEx(const Config* config, const void* function, void** arguments) {
  const auto* kernel = static_cast<const Kernel*>(function);
  return on_launch ? on_launch(kernel->binary, kernel->name.c_str(), config, arguments) : kInvalidValue;
}

int _cuTensorMapEncodeTiled(void* map, int dtype, unsigned rank, void* address,
                            const uint64_t* dims, const uint64_t* strides, const uint32_t* box,
                            const uint32_t* steps, int interleave, int swizzle, int promotion,
                            int fill) {
  return on_tensor_map ? on_tensor_map(map, dtype, rank, address, dims, strides, box, steps,
                                       interleave, swizzle, promotion, fill)
                       : kInvalidValue;
}

int _cudaLibraryLoadData(void** library, const void* binary, void*, void*, unsigned, void*, void*,
                         unsigned) {
  return load(library, binary);
}
int _cuLibraryLoadData(void** library, const void* binary, void*, void*, unsigned, void*, void*,
                       unsigned) {
  return load(library, binary);
}
int _cudaLibraryGetKernel(void** kernel, const void* library, const char* name) {
  return kernel_of(kernel, library, name);
}
int _cuLibraryGetKernel(void** kernel, const void* library, const char* name) {
  return kernel_of(kernel, library, name);
}

int cuda_dialect_init_library_once(void** state, int (*init)(void**), int (*to_device)(void**, int),
                                   void*) {
  if (*state) return 0;
  void* library = nullptr;
  int status = init(&library);
  if (!status) status = to_device(&library, 0);
  if (!status) *state = library;
  return status;
}
void cuda_dialect_unload_library_once(void**) {}
void cuda_dialect_assert_success(int status) {
  if (status) abort();
}
void CuteDSLRT_TVMFFISetRaisedCudaError(void*, int) {}

int _cudaDeviceGetAttribute(int* value, int attribute, int) {
  *value = attributes[attribute % kAttributes];
  return 0;
}
int _cuKernelGetAttribute(int* value, int, void*, int) {
  *value = 0;
  return 0;
}
int _cudaGetDeviceCount(int* count) {
  *count = 1;
  return 0;
}
int _cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}
int _cuDeviceGet(int* device, int) {
  *device = 0;
  return 0;
}
int _cudaSetDevice(int) { return 0; }
int _cudaFuncSetAttribute(const void*, int, int) { return 0; }
int _cudaKernelSetAttributeForDevice(const void*, int, int, int) { return 0; }
int _cudaLibraryUnload(void*) { return 0; }
int _cuLibraryUnload(void*) { return 0; }

}  // extern "C"
