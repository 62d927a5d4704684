// Runs a CUDA kernel on the CPU, one block at a time, to check what it computes without a GPU.
//
// Every thread of a block is a fibre. A fibre runs until it needs others: at a barrier, a shuffle,
// or one of the warp-wide instructions below, which stand in for the kernel's own inline PTX and
// follow the layouts of the PTX manual (ldmatrix, mma.m16n8k16). Two things that hardware leaves
// open are set from outside, so that a kernel that relies on one of them fails with the other: the
// order in which threads run, and whether an asynchronous copy happens at once or as late as it may.
//
// The blocks of a cluster run side by side, and share one copy of each `__shared__` variable: right
// for those of which every block is sent the same. What they are sent arrives at once, and waiting
// for it is a barrier of the whole cluster.
//
// Not covered: atomics, float16, what lanes do after a divergent exit, and time.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __device__ static
#define __global__
#define __launch_bounds__(...)
#define __forceinline__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define CUDART_INF_F INFINITY
#define __expf expf
#define __logf logf
using std::min;

struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
struct float2 { float x, y; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
struct Address {  // of elements of any type
  void* to;
  template <class T> operator T*() const { return static_cast<T*>(to); }
};
struct Index { int x, y, z; };
static Index blockIdx, threadIdx, gridDim;

// --- bfloat16 -----------------------------------------------------------------------------------

struct __nv_bfloat16 { uint16_t bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
struct __half { uint16_t bits; };

static float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

static __nv_bfloat16 __float2bfloat16_rn(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return {0x7fff};
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

static __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}

static unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }

struct __half2 { __half x, y; };
static float __half2float(__half) { abort(); }
static __half __float2half_rn(float) { abort(); }
static float2 __half22float2(__half2) { abort(); }
static __half __ushort_as_half(unsigned short) { abort(); }
static unsigned short __half_as_ushort(__half) { abort(); }

static float __uint_as_float(unsigned x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
static unsigned __float_as_uint(float x) {
  unsigned y;
  memcpy(&y, &x, 4);
  return y;
}

// --- fibres -------------------------------------------------------------------------------------

namespace emulated {

constexpr size_t STACK = 128 << 10;
constexpr size_t SHARED = 256 << 10;

struct Copy { void* to; const void* from; bool inside; };
struct Lane { unsigned registers[6]; const void* pointer; };
struct Meeting { int arrived = 0, size = 0; long generation = 0; };

struct Fibre {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(STACK);
  std::vector<std::vector<Copy>> groups;  // committed, not yet waited for
  std::vector<Copy> open;
  bool done = false;
};

static std::vector<Fibre> fibres;
static std::vector<Meeting> warps;
static std::vector<Lane> lanes;
static std::vector<Meeting> blocks;  // of the cluster
static Meeting cluster;
static int block_threads;
static ucontext_t scheduler;
static const std::function<void()>* body;
static int current;
static bool late_copies;

static int cluster_start;  // its first block

static void resume(int fibre) {
  current = fibre;
  threadIdx = {fibre % block_threads, 0, 0};
  blockIdx.x = cluster_start + fibre / block_threads;
}

static void yield() {
  const int me = current;
  swapcontext(&fibres[me].context, &scheduler);
  resume(me);
}

static void meet(Meeting& m) {
  const long generation = m.generation;
  if (++m.arrived == m.size) {
    m.arrived = 0;
    ++m.generation;
    return;
  }
  while (m.generation == generation) yield();
}

static Lane& mine() { return lanes[current]; }
static const Lane& of(int lane) { return lanes[current / 32 * 32 + lane]; }
static void meet_warp() { meet(warps[current / 32]); }

static void perform(const Copy& c) {
  if (c.inside)
    memcpy(c.to, c.from, 16);
  else
    memset(c.to, 0, 16);
}

static void start() {
  (*body)();
  fibres[current].done = true;
}

static void run_cluster(int block_size, int size, bool reversed) {
  const int threads = block_size * size;
  block_threads = block_size;
  fibres = std::vector<Fibre>(threads);
  lanes.assign(threads, {});
  warps.assign(threads / 32, {});
  for (Meeting& w : warps) w.size = 32;
  blocks.assign(size, {});
  for (Meeting& b : blocks) b.size = block_size;
  cluster = {};
  cluster.size = threads;
  for (Fibre& f : fibres) {
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = &scheduler;
    makecontext(&f.context, start, 0);
  }
  for (int left = threads; left > 0;) {
    left = 0;
    for (int i = 0; i < threads; ++i) {
      resume(reversed ? threads - 1 - i : i);
      if (fibres[current].done) continue;
      swapcontext(&scheduler, &fibres[current].context);
      ++left;
    }
  }
}

}  // namespace emulated

alignas(128) uint4 shared[emulated::SHARED / 16];  // what a kernel's `extern __shared__` names

namespace emulated {
static void run(int grid_x, int grid_y, int threads, int cluster, bool late, bool reversed,
                const std::function<void()>& kernel) {
  body = &kernel;
  late_copies = late;
  gridDim = {grid_x, grid_y, 1};
  for (int y = 0; y < grid_y; ++y)
    for (int x = 0; x < grid_x; x += cluster) {
      memset(shared, 0xff, sizeof(shared));  // NaN
      cluster_start = x;
      blockIdx.y = y;
      run_cluster(threads, cluster, reversed);
    }
}
}  // namespace emulated

// --- instructions -------------------------------------------------------------------------------

static unsigned thread_now() { return threadIdx.x; }
static unsigned block_now() { return blockIdx.x; }
static unsigned cluster_rank() { return emulated::current / emulated::block_threads; }

static void __syncthreads() { emulated::meet(emulated::blocks[cluster_rank()]); }
static void __syncwarp() { emulated::meet_warp(); }

static void cluster_arrive() {}
static void cluster_wait() {}
static void barrier_init(unsigned long long*) {}
static void barrier_expect(unsigned long long*, unsigned) {}
static void send(float* to, unsigned, float value, unsigned long long*) { *to = value; }
static void barrier_wait(unsigned long long*, unsigned) { emulated::meet(emulated::cluster); }

template <class T>
static T* aligned(T* at) {
  if ((uintptr_t)at % sizeof(T)) {
    fprintf(stderr, "an access of %zu bytes is not aligned\n", sizeof(T));
    abort();
  }
  return at;
}
template <class T>
static T __ldcs(const T* from) { return *aligned(from); }
template <class T>
static T __ldg(const T* from) { return *aligned(from); }
template <class T>
static void __stcs(T* to, T value) { *aligned(to) = value; }

// Two elements of 16 bits.
template <class T>
static void pack(const float* v, unsigned& word) {
  if (sizeof(T) == 4)
    word = __float_as_uint(v[0]);
  else
    word = __float2bfloat16_rn(v[0]).bits | unsigned(__float2bfloat16_rn(v[1]).bits) << 16;
}

static float __shfl_xor_sync(unsigned, float x, int distance) {
  memcpy(emulated::mine().registers, &x, 4);
  emulated::meet_warp();
  float other;
  memcpy(&other, emulated::of(emulated::current % 32 ^ distance).registers, 4);
  emulated::meet_warp();
  return other;
}

static float exp2_approx(float x) { return x < -126.0f ? 0.0f : exp2f(x); }

template <class T>
static void copy_async(T* to, const T* from, bool inside) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16) {
    fprintf(stderr, "a copy of 16 bytes is not aligned\n");
    abort();
  }
  const emulated::Copy copy{to, from, inside};
  if (emulated::late_copies)
    emulated::fibres[emulated::current].open.push_back(copy);
  else
    emulated::perform(copy);
}

static void copy_commit() {
  auto& me = emulated::fibres[emulated::current];
  me.groups.push_back(std::move(me.open));
  me.open.clear();
}

template <int PENDING>
static void copy_wait() {
  auto& groups = emulated::fibres[emulated::current].groups;
  while (groups.size() > PENDING) {
    for (const emulated::Copy& c : groups.front()) emulated::perform(c);
    groups.erase(groups.begin());
  }
}

static unsigned element(const void* row, int i) {
  uint16_t bits;
  memcpy(&bits, (const char*)row + 2 * i, 2);
  return bits;
}

template <class T>
static void load_matrices(unsigned (&to)[4], const T* row) {
  emulated::mine().pointer = row;
  emulated::meet_warp();
  const int g = emulated::current % 32 / 4, t = emulated::current % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    const void* from = emulated::of(8 * i + g).pointer;
    to[i] = element(from, t) | element(from, t + 1) << 16;
  }
  emulated::meet_warp();
}

template <class T>
static void load_matrices_transposed(unsigned (&to)[4], const T* row) {
  emulated::mine().pointer = row;
  emulated::meet_warp();
  const int g = emulated::current % 32 / 4, t = emulated::current % 4 * 2;
  for (int i = 0; i < 4; ++i)
    to[i] = element(emulated::of(8 * i + t).pointer, g) |
            element(emulated::of(8 * i + t + 1).pointer, g) << 16;
  emulated::meet_warp();
}

// Half `k % 2` of a register: the even element is in the low half.
static float half_of(unsigned pair, int k) {
  return __bfloat162float({uint16_t(pair >> 16 * (k % 2))});
}

static void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  unsigned* mine = emulated::mine().registers;
  for (int i = 0; i < 4; ++i) mine[i] = a[i];
  mine[4] = b0;
  mine[5] = b1;
  emulated::meet_warp();
  for (int i = 0; i < 4; ++i) {
    const int row = emulated::current % 32 / 4 + i / 2 * 8;
    const int column = emulated::current % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int pair = k % 8 / 2;
      const unsigned left = emulated::of(row % 8 * 4 + pair).registers[row / 8 + k / 8 * 2];
      const unsigned right = emulated::of(column * 4 + pair).registers[4 + k / 8];
      c[i] += half_of(left, k) * half_of(right, k);
    }
  }
  emulated::meet_warp();
}
