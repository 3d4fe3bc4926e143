// Blocks of CUDA threads on the CPU: each thread is a fiber, blocks run one after the other.
//
// A fiber runs until it waits for others of its warp or block. Shared memory is full of NaN when a block begins. Copies
// that a kernel has started arrive when it waits for them, and not before; until then NaN is there. Words of tensor cores
// are exchanged as the PTX ISA 8.5 lays them out (9.7.14.5.8, mma.m16n8k16; 9.7.14.5.15, ldmatrix). Threads can run in
// either order, so that a result that depends on it shows.
#define CUDNN_SDPA_PRIMITIVES

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define SHARED_MEMORY(name) unsigned char* const name = emulation::shared

namespace emulation {

struct Place {
  unsigned x, y, z;
};

struct Copy {
  void* to;
  const void* from;
  int bytes;
};

constexpr int most_threads = 1024, stack_bytes = 128 << 10, shared_bytes = 256 << 10;

struct Fiber {
  ucontext_t context;
  jmp_buf at;
  bool started, ended;
  std::vector<std::vector<Copy>> groups;
};

struct Barrier {
  unsigned arrived, generation;
};

alignas(1024) unsigned char shared[shared_bytes];
Fiber* fibers;
unsigned char* stacks;
unsigned threads, current, reversed_order;
unsigned long waits;  // that have ended, to notice when none does any more
ucontext_t scheduler_context;
jmp_buf scheduler;
Barrier block_barrier, warp_barriers[most_threads / 32];
unsigned words[most_threads][2][8];  // of each thread, for the collective operation before and for the current one
unsigned parity[most_threads];
long long counted[2];  // bytes read and written in global memory
void (*body)();

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulated kernel: %s (thread %u)\n", what, current);
  std::abort();
}

inline void yield() {
  if (!_setjmp(fibers[current].at)) _longjmp(scheduler, 1);
}

inline void wait(Barrier& barrier, unsigned count) {
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.generation;
    ++waits;
    return;
  }
  while (barrier.generation == generation) yield();
}

inline void entry() {
  body();
  if (!fibers[current].groups.empty()) {
    for (auto& group : fibers[current].groups) {
      if (!group.empty()) fail("a thread ends while copies are on their way");
    }
  }
  fibers[current].ended = true;
  ++waits;
  _longjmp(scheduler, 1);
}

inline void run(unsigned count) {
  if (fibers == nullptr) {
    fibers = new Fiber[most_threads];
    stacks = static_cast<unsigned char*>(std::malloc(size_t(stack_bytes) * most_threads));
  }
  threads = count;
  block_barrier = {};
  for (auto& barrier : warp_barriers) barrier = {};
  for (unsigned i = 0; i < shared_bytes / 4; ++i) reinterpret_cast<unsigned*>(shared)[i] = 0x7FFFFFFFu;  // NaN in all dtypes
  for (unsigned i = 0; i < count; ++i) {
    fibers[i].started = fibers[i].ended = false;
    fibers[i].groups.assign(1, {});
    parity[i] = 0;
  }
  volatile unsigned left = count;
  while (left) {
    const unsigned long before = waits;
    for (volatile unsigned turn = 0; turn < count; ++turn) {
      current = reversed_order ? count - 1 - turn : turn;
      Fiber& fiber = fibers[current];
      if (fiber.ended) continue;
      if (!_setjmp(scheduler)) {
        if (fiber.started) _longjmp(fiber.at, 1);
        fiber.started = true;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks + size_t(stack_bytes) * current;
        fiber.context.uc_stack.ss_size = stack_bytes;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, entry, 0);
        setcontext(&fiber.context);
      }
      if (fibers[current].ended) --left;
    }
    if (left && waits == before) fail("threads wait for others that never come");
  }
}

}  // namespace emulation

static emulation::Place threadIdx_of() { return {emulation::current, 0, 0}; }
#define threadIdx threadIdx_of()
static emulation::Place blockIdx = {0, 0, 0}, gridDim = {1, 1, 1}, blockDim = {1, 1, 1};

static void __syncthreads() { emulation::wait(emulation::block_barrier, emulation::threads); }
static void __syncwarp() { emulation::wait(emulation::warp_barriers[emulation::current / 32], 32); }

// Exchanges words among the lanes of a warp; gives those of all its lanes.
static unsigned (*exchange(const unsigned* mine, int count))[2][8] {
  using namespace emulation;
  const unsigned turn = parity[current] ^= 1;
  for (int i = 0; i < count; ++i) words[current][turn][i] = mine[i];
  __syncwarp();
  return words + current / 32 * 32;
}

// Global memory.

struct alignas(16) vec4 {
  float x, y, z, w;
};

template <class T>
static void check_aligned(const T* address) {
  if (reinterpret_cast<uintptr_t>(address) % alignof(T)) emulation::fail("a misaligned address");
}

template <class T>
static T load(const T* from) {
  check_aligned(from);
  emulation::counted[0] += sizeof(T);
  return *from;
}

template <class T>
static void store(T* to, T value) {
  check_aligned(to);
  emulation::counted[1] += sizeof(T);
  *to = value;
}

// Numbers.

static float float_of_bits(unsigned bits) {
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}

static unsigned bits_of_float(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

static float exp2_fast(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }  // subnormal numbers are flushed

static float divide_fast(float x, float y) { return x / y; }
static void keep(float&) {}
static void prefetch(const void*) {}
static float rsqrt_fast(float x) { return 1.0f / std::sqrt(x); }

static float half_to_float(unsigned short bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                     : exponent     ? std::ldexp(1024.0f + fraction, exponent - 25)
                                    : std::ldexp(float(fraction), -24);
  return bits >> 15 ? -size : size;
}

static unsigned short float_to_half(float x) {
  const unsigned short sign = std::signbit(x) << 15;
  if (std::isnan(x)) return 0x7FFF;
  const float size = std::fabs(x);
  if (size >= 65520.0f) return sign | 0x7C00;
  if (size < std::ldexp(1.0f, -14)) return sign | (unsigned short)std::nearbyint(std::ldexp(size, 24));
  int exponent;
  std::frexp(size, &exponent);  // size is in [2^(exponent - 1), 2^exponent)
  const int fraction = int(std::nearbyint(std::ldexp(size, 11 - exponent)));  // from 1024 to 2048
  return sign | (unsigned short)(((exponent + 14) << 10) + (fraction - 1024));
}

static float bfloat16_to_float(unsigned short bits) { return float_of_bits(unsigned(bits) << 16); }

static unsigned short float_to_bfloat16(float x) {
  if (std::isnan(x)) return 0x7FFF;
  const unsigned bits = bits_of_float(x);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

static unsigned pack_half(float low, float high) { return float_to_half(low) | unsigned(float_to_half(high)) << 16; }
static unsigned pack_bfloat16(float low, float high) {
  return float_to_bfloat16(low) | unsigned(float_to_bfloat16(high)) << 16;
}

static unsigned char float_to_e4m3(float x) {
  const unsigned char sign = std::signbit(x) << 7;
  if (std::isnan(x)) return 0x7F;
  const float size = std::fabs(x);
  if (size >= 448.0f) return sign | 0x7E;
  if (size < std::ldexp(1.0f, -6)) return sign | (unsigned char)std::nearbyint(std::ldexp(size, 9));
  int exponent;
  std::frexp(size, &exponent);
  const int fraction = int(std::nearbyint(std::ldexp(size, 4 - exponent)));  // from 8 to 16
  return sign | (unsigned char)(((exponent + 6) << 3) + (fraction - 8));
}

static unsigned short pack_e4m3(float low, float high) {
  return float_to_e4m3(low) | (unsigned short)(float_to_e4m3(high) << 8);
}

// Warps.

static float shuffle_xor(float x, int lanes) {
  const unsigned mine = bits_of_float(x);
  auto* all = exchange(&mine, 1);
  return float_of_bits(all[(emulation::current % 32) ^ lanes][emulation::parity[emulation::current]][0]);
}

// Asynchronous copies.

static void copy_async(void* to, const void* from, int bytes) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16) emulation::fail("a misaligned copy");
  std::memset(to, 0x7F, 16);
  emulation::counted[0] += bytes;
  emulation::fibers[emulation::current].groups.back().push_back({to, from, bytes});
}

static void commit_copies() { emulation::fibers[emulation::current].groups.emplace_back(); }

template <int pending>
static void wait_for_copies() {
  auto& groups = emulation::fibers[emulation::current].groups;
  while (groups.size() - 1 > pending) {
    for (const auto& copy : groups.front()) {
      std::memset(copy.to, 0, 16);
      std::memcpy(copy.to, copy.from, copy.bytes);
    }
    groups.erase(groups.begin());
  }
}

// Tensor cores.

static unsigned short number_at(uintptr_t row, int column) {
  return reinterpret_cast<const unsigned short*>(row)[column];
}

static void load_of_matrices(unsigned (&found)[4], const void* row, bool transposed) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(row);
  if (address % 16) emulation::fail("a misaligned row of a matrix");
  const unsigned mine[2] = {unsigned(address), unsigned(address >> 32)};
  auto* all = exchange(mine, 2);
  const int lane = emulation::current % 32, turn = emulation::parity[emulation::current];
  for (int matrix = 0; matrix < 4; ++matrix) {
    unsigned short pair[2];
    for (int i = 0; i < 2; ++i) {
      const int row_of = transposed ? lane % 4 * 2 + i : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + i;
      const unsigned* given = all[8 * matrix + row_of][turn];
      pair[i] = number_at(given[0] | uintptr_t(given[1]) << 32, column);
    }
    found[matrix] = pair[0] | unsigned(pair[1]) << 16;
  }
  __syncwarp();  // memory may change from here on
}

static void load_matrices(unsigned (&found)[4], const void* row) { load_of_matrices(found, row, false); }
static void load_matrices_transposed(unsigned (&found)[4], const void* row) { load_of_matrices(found, row, true); }

template <float of(unsigned short)>
static void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const unsigned mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  auto* all = exchange(mine, 6);
  const int lane = emulation::current % 32, turn = emulation::parity[emulation::current];
  const int group = lane / 4, pair = lane % 4;
  for (int i = 0; i < 4; ++i) {  // c0 and c1 in row `group`, c2 and c3 eight rows below
    const int column = 2 * pair + i % 2;
    float sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const int quad = k % 8 / 2, upper = k / 8, shift = 16 * (k % 2);
      const unsigned of_a = all[4 * group + quad][turn][2 * upper + i / 2];
      const unsigned of_b = all[4 * column + quad][turn][4 + upper];
      sum += of((unsigned short)(of_a >> shift)) * of((unsigned short)(of_b >> shift));
    }
    c[i] = sum;
  }
}

static void multiply_add_half(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  multiply_add<half_to_float>(c, a, b0, b1);
}
static void multiply_add_bfloat16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  multiply_add<bfloat16_to_float>(c, a, b0, b1);
}

// What Python calls.

struct Words {
  unsigned long long words[192];
};

extern "C" void run_blocks(void (*kernel)(Words), const Words* given, unsigned blocks, unsigned threads, int reversed) {
  static Words argument;
  static void (*function)(Words);
  argument = *given, function = kernel;
  gridDim.x = blocks, blockDim.x = threads;
  emulation::reversed_order = reversed;
  emulation::body = [] { function(argument); };
  for (unsigned block = 0; block < blocks; ++block) {
    blockIdx.x = block;
    emulation::run(threads);
  }
}

extern "C" long long count_of(int written) {
  const long long found = emulation::counted[written];
  emulation::counted[written] = 0;
  return found;
}
