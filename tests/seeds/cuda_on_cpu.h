// Runs a CUDA kernel on the CPU, one cluster at a time, to check what it computes without a GPU.
//
// Every thread is a fibre. A fibre runs until it needs others: at a barrier, a shuffle, or one of
// the warp-wide instructions below, which stand in for the kernel's own inline PTX and follow the
// layouts of the PTX manual (ldmatrix, mma.m16n8k16). A warp goes on as long as it can before the
// next one does: as far ahead as may be. Two things that hardware leaves open are set from outside,
// so that a kernel that relies on one of them fails with the other: which warps and threads are
// first, and whether an asynchronous copy happens at once or as late as it may: when a thread waits
// for its own, and when no thread can go on, for one that a barrier counts.
//
// Every block of a cluster has shared memory of its own, which is NaN at first. A launch fails, and
// says why, where threads wait for what never comes, where a barrier is not there yet or another
// block not any more, where shared memory is too small, where an access is not aligned, and where a
// copy, or a load by a function of its own, is from outside of the tensors.
//
// Blocks run one after the other, so that an atomic operation is what it would be alone.
//
// Not covered: float16 (in whose place 8-bit floats become bfloat16), what lanes do after
// a divergent exit, fences, and time.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#define __CUDA_ARCH__ 900
#define __device__ inline
#define __global__
#define __launch_bounds__(...)
#define __forceinline__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define CUDART_INF_F INFINITY
#define __expf expf
#define __logf logf
using std::max;
using std::min;

struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Address {  // of elements of any type
  void* to;
  template <class T> operator T*() const { return static_cast<T*>(to); }
};
struct Index { unsigned x, y, z; };
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

static __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __floats2bfloat162_rn(__bfloat162float(a.x) - __bfloat162float(b.x),
                               __bfloat162float(a.y) - __bfloat162float(b.y));
}

static __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __floats2bfloat162_rn(fmaxf(__bfloat162float(a.x), __bfloat162float(b.x)),
                               fmaxf(__bfloat162float(a.y), __bfloat162float(b.y)));
}

static unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }

struct __half2 { __half x, y; };
static float __half2float(__half) { abort(); }
static __half __float2half_rn(float) { abort(); }
static float2 __half22float2(__half2) { abort(); }
static __half2 __floats2half2_rn(float, float) { abort(); }
static __half2 __hmax2(__half2, __half2) { abort(); }
static __half2 __hsub2(__half2, __half2) { abort(); }
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
constexpr size_t STATIC = 24 << 10;  // of a block's shared memory: its `__shared__` variables
constexpr size_t SHARED = 256 << 10;
constexpr int MOST_BLOCKS = 16;  // of a cluster

struct Copy { void* to; const void* from; int bytes; bool inside; };
struct Barrier { int bytes; short arrivals; unsigned char parity, made; };  // what it waits for
struct Transfer { void* to; std::vector<char> data; Barrier* counter; };
struct Lane { unsigned registers[6]; const void* pointer; };
struct Meeting { int arrived = 0, size = 0; long generation = 0; };

struct Fibre {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK]};
  std::vector<std::vector<Copy>> groups;  // committed, not yet waited for
  std::vector<Copy> open;
  long arrived = 0;  // at the cluster's barrier: its generation then
  bool done = false;
};

alignas(128) static char memory[MOST_BLOCKS][SHARED];  // shared memory of a cluster's blocks
static size_t variables_end;  // of what `__shared__` variables have of it
static std::vector<Fibre> fibres;
static std::vector<Meeting> warps;
static std::vector<Lane> lanes;
static std::vector<Meeting> blocks;  // of the cluster
static std::vector<int> running;     // threads of each of its blocks
static Meeting cluster;
static std::vector<Transfer> late;
static int block_threads;
static int cluster_start;  // its first block
static ucontext_t scheduler;
static const std::function<void()>* body;
static int current;
static bool late_copies;
static bool progress;  // whether a thread has had what it waits for
static const char* failure;

static int rank() { return current / block_threads; }

[[noreturn]] static void fail(const char* reason) {
  failure = reason;
  setcontext(&scheduler);
  abort();
}

static void resume(int fibre) {
  current = fibre;
  threadIdx = {unsigned(fibre % block_threads), 0, 0};
  blockIdx.x = cluster_start + fibre / block_threads;
}

template <class Condition>
static void wait_until(Condition met) {
  const int me = current;
  while (!met()) {
    swapcontext(&fibres[me].context, &scheduler);
    resume(me);
  }
  progress = true;
}

static long arrive(Meeting& m) {
  const long generation = m.generation;
  if (++m.arrived == m.size) {
    m.arrived = 0;
    ++m.generation;
  }
  return generation;
}

static void meet(Meeting& m) {
  const long generation = arrive(m);
  wait_until([&] { return m.generation != generation; });
}

static Lane& mine() { return lanes[current]; }
static const Lane& of(int lane) { return lanes[current / 32 * 32 + lane]; }
static void meet_warp() { meet(warps[current / 32]); }

static void check_aligned(const void* at, size_t bytes) {
  if ((uintptr_t)at % bytes) fail("an access is not aligned");
}

// First and last address of each tensor that the kernel is given, with gaps between its rows.
static std::vector<std::pair<uintptr_t, uintptr_t>> tensors;

static void check_inside(const void* at, size_t bytes) {
  for (const auto& [begin, end] : tensors)
    if ((uintptr_t)at >= begin && (uintptr_t)at + bytes <= end) return;
  fail("a load is from outside of tensors");
}

// --- copies ---

static void perform(const Copy& c) {
  if (c.inside)
    memcpy(c.to, c.from, c.bytes);
  else
    memset(c.to, 0, c.bytes);
}

static void copy(void* to, const void* from, int bytes, bool inside) {
  check_aligned(to, bytes);
  check_aligned(from, bytes);
  if (inside) check_inside(from, bytes);
  const Copy c{to, from, bytes, inside};
  if (late_copies)
    fibres[current].open.push_back(c);
  else
    perform(c);
}

static Barrier* made(unsigned long long* at) {
  Barrier* b = reinterpret_cast<Barrier*>(at);
  if (b->made != 1) fail("a barrier is used that is not there yet");
  return b;
}

static void turn(Barrier* b) {
  if (b->arrivals == 0 && b->bytes == 0) {
    b->parity ^= 1;
    b->arrivals = 1;
  }
}

static void land(const Transfer& t) {
  memcpy(t.to, t.data.data(), t.data.size());
  t.counter->bytes -= t.data.size();
  turn(t.counter);
}

static void transfer(void* to, const void* from, int bytes, unsigned long long* counter) {
  const char* first = static_cast<const char*>(from);
  late.push_back({to, {first, first + bytes}, made(counter)});
  if (late_copies) return;
  land(late.back());
  late.pop_back();
}

// --- shared memory ---

template <class T>  // a type of its own for each `__shared__`
static T& variable() {
  static const size_t at = std::exchange(variables_end, (variables_end + sizeof(T) + 127) & ~127);
  if (variables_end > STATIC) fail("too many variables in shared memory");
  return *reinterpret_cast<T*>(memory[rank()] + at);
}

template <class T>
static T* dynamic() { return reinterpret_cast<T*>(memory[rank()] + STATIC); }

template <class T>
static T* remote(T* local, int block) {  // the same place in another block of the cluster
  if (running[block] == 0) fail("shared memory is used of a block that has ended");
  return (T*)((char*)local + (block - rank()) * int64_t(SHARED));
}

// --- a launch ---

static void start() {
  progress = true;
  (*body)();
  fibres[current].done = progress = true;
  --running[rank()];
}

static void run_cluster(int block_size, int size, bool reversed) {
  const int threads = block_size * size;
  block_threads = block_size;
  if (fibres.size() < threads) fibres.resize(threads);
  lanes.assign(threads, {});
  warps.assign(threads / 32, {});
  for (Meeting& w : warps) w.size = 32;
  blocks.assign(size, {});
  for (Meeting& b : blocks) b.size = block_size;
  running.assign(size, block_size);
  late.clear();
  cluster = {};
  cluster.size = threads;
  for (int i = 0; i < threads; ++i) {
    Fibre& f = fibres[i];
    f.groups.clear();
    f.open.clear();
    f.done = false;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = &scheduler;
    makecontext(&f.context, start, 0);
  }
  for (int left = threads; left > 0;) {
    bool any = false;
    left = 0;
    for (int w = 0; w < threads / 32; ++w) {
      do {
        progress = false;
        for (int i = w * 32; i < w * 32 + 32; ++i) {
          resume(reversed ? threads - 1 - i : i);
          if (fibres[current].done) continue;
          swapcontext(&scheduler, &fibres[current].context);
          if (failure) return;
          ++left;
        }
        any |= progress;
      } while (progress);
    }
    if (left == 0 || any) continue;
    if (late.empty()) {
      failure = "threads wait for what never comes";
      return;
    }
    land(late.back());  // in no order that may be relied on
    late.pop_back();
  }
  if (!late.empty()) failure = "a block has ended before its copies were there";
}

static const char* run(int grid_x, int grid_y, int threads, int size, int shared, bool late,
                       bool reversed, const std::function<void()>& kernel) {
  body = &kernel;
  late_copies = late;
  failure = nullptr;
  gridDim = {unsigned(grid_x), unsigned(grid_y), 1};
  if (size > MOST_BLOCKS || STATIC + shared > SHARED) return "too large a cluster, or block";
  for (int y = 0; y < grid_y; ++y)
    for (int x = 0; x < grid_x; x += size) {
      for (int i = 0; i < size; ++i) memset(memory[i], 0xff, SHARED);  // NaN
      cluster_start = x;
      blockIdx.y = y;
      run_cluster(threads, size, reversed);
      for (int i = 0; i < size && !failure; ++i)
        for (size_t at = STATIC + shared; at < SHARED; ++at)
          if (memory[i][at] != char(0xff)) failure = "a block wrote past its shared memory";
      if (failure) return failure;
    }
  return nullptr;
}

}  // namespace emulated

// --- instructions -------------------------------------------------------------------------------

static unsigned thread_now() { return threadIdx.x; }
static unsigned block_now() { return blockIdx.x; }
static unsigned cluster_rank() { return emulated::rank(); }

static void __syncthreads() { emulated::meet(emulated::blocks[emulated::rank()]); }
static void __syncwarp() { emulated::meet_warp(); }

static void cluster_arrive() {
  emulated::fibres[emulated::current].arrived = emulated::arrive(emulated::cluster);
}
static void cluster_wait() {
  const long arrived = emulated::fibres[emulated::current].arrived;
  emulated::wait_until([&] { return emulated::cluster.generation != arrived; });
}

static void barrier_init(unsigned long long* at) {
  *reinterpret_cast<emulated::Barrier*>(at) = {0, 1, 0, 1};
}
static void barrier_expect(unsigned long long* at, unsigned bytes) {
  emulated::Barrier* b = emulated::made(at);
  b->bytes += bytes;
  --b->arrivals;
  emulated::turn(b);
}
static void barrier_wait(unsigned long long* at, unsigned parity) {
  emulated::Barrier* b = emulated::made(at);
  emulated::wait_until([&] { return b->parity != parity; });
}
static void cluster_barrier_wait(unsigned long long* at) { barrier_wait(at, 0); }

template <class T>
static void send(T* local, unsigned rank, T value, unsigned long long* counter) {
  emulated::transfer(emulated::remote(local, rank), &value, sizeof(T),
                     emulated::remote(counter, rank));
}
template <class T>
static T load_remote(const T* local, int rank) { return *emulated::remote(local, rank); }

static void bulk_load(void* to, const void* from, unsigned bytes, unsigned long long* counter) {
  emulated::check_aligned(to, 16);
  emulated::check_aligned(from, 16);
  emulated::check_inside(from, bytes);
  if (bytes % 16) emulated::fail("a bulk copy has no multiple of 16 bytes");
  emulated::transfer(to, from, bytes, counter);
}
static void prefetch(const void* from, unsigned bytes) {
  emulated::check_aligned(from, 16);
  if (bytes % 16) emulated::fail("a prefetch has no multiple of 16 bytes");
}

template <class T>
static T* aligned(T* at) {
  emulated::check_aligned(at, sizeof(T));
  return at;
}
template <class T>
static T __ldcs(const T* from) {
  emulated::check_inside(from, sizeof(T));
  return *aligned(from);
}
template <class T>
static T __ldg(const T* from) { return __ldcs(from); }
template <class T>
static void __stcs(T* to, T value) { *aligned(to) = value; }

static unsigned __byte_perm(unsigned a, unsigned b, unsigned selected) {
  const uint64_t both = uint64_t(b) << 32 | a;
  unsigned word = 0;
  for (int i = 0; i < 4; ++i)
    word |= unsigned(both >> (selected >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return word;
}

// A constant that the compiler is not to know.
template <unsigned BITS>
static unsigned opaque() { return BITS; }

// Two elements of 16 bits.
template <class T>
static void pack(const float* v, unsigned& word) {
  if (sizeof(T) == 4)
    word = __float_as_uint(v[0]);
  else
    word = __float2bfloat16_rn(v[0]).bits | unsigned(__float2bfloat16_rn(v[1]).bits) << 16;
}
template <class T>
static uint4 pack(const float* v) {
  unsigned u[4];
  for (int i = 0; i < 4; ++i) pack<T>(v + i * (4 / sizeof(T)), u[i]);
  return {u[0], u[1], u[2], u[3]};
}

// The larger of 4 bytes of elements, each with its counterpart.
template <class T>
static unsigned larger(unsigned a, unsigned b) {
  if (sizeof(T) == 4) return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
  __nv_bfloat162 x, y;
  memcpy(&x, &a, 4);
  memcpy(&y, &b, 4);
  x = __hmax2(x, y);
  memcpy(&a, &x, 4);
  return a;
}

template <class T>
static T __shfl_xor_sync(unsigned, T x, int distance) {
  static_assert(sizeof(T) == 4);
  memcpy(emulated::mine().registers, &x, 4);
  emulated::meet_warp();
  T other;
  memcpy(&other, emulated::of(emulated::current % 32 ^ distance).registers, 4);
  emulated::meet_warp();
  return other;
}

static int atomicAdd(int* at, int n) { return std::exchange(*at, *at + n); }

static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static float exp2_approx(float x) { return x < -126.0f ? 0.0f : exp2f(x); }
static float ex2(float x) { return exp2_approx(x); }

template <class T>
static void copy_async(T* to, const T* from, bool inside) { emulated::copy(to, from, 16, inside); }

// Zeros where nothing is left of the row.
template <int BYTES, int FETCH>
static void copy_bytes(uint4* to, int at, const void* from, int left) {
  if (left > 0 && left < BYTES) emulated::fail("a copy reads past the row's end");
  emulated::copy((char*)to + at, from, BYTES, left > 0);
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

template <class T>  // which type has its own instruction
static void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, T) {
  multiply_add(c, a, b0, b1);
}

// Two numbers of 8 bits (e4m3), which bfloat16 has, too.
static unsigned decode(unsigned short two) {
  unsigned pair = 0;
  for (int i = 0; i < 2; ++i) {
    const int bits = two >> 8 * i & 0xff, exponent = bits >> 3 & 15, digits = bits & 7;
    float x = exponent ? ldexpf(8 + digits, exponent - 10) : ldexpf(digits, -9);
    if ((bits & 0x7f) == 0x7f) x = NAN;
    pair |= unsigned(__float2bfloat16_rn(bits & 0x80 ? -x : x).bits) << 16 * i;
  }
  return pair;
}
