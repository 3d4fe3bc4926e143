// The instructions of `paged.cu` on the CPU, behind `block.h`: barriers in shared memory, copies that arrive at them,
// named barriers, and products of warpgroups as the PTX ISA 8.5 lays them out (9.7.15.5).
//
// A copy is NaN until its thread waits for something, and then passes the turn. Products of a warpgroup are made where
// it waits for them, of what shared memory then holds.

typedef long long number;
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
static float2 make_float2(float x, float y) { return {x, y}; }
static float __int_as_float(int x) { return float_of_bits(x); }
static float __uint_as_float(unsigned x) { return float_of_bits(x); }
static int __float_as_int(float x) { return int(bits_of_float(x)); }
static float2 __ldcg(const float2* x) { return *x; }
static float4 __ldcg(const float4* x) { return *x; }
static float __fdividef(float x, float y) { return x / y; }
#define __log2f(x) std::log2(x)
template <class T>
static T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
static T max(T a, T b) {
  return a > b ? a : b;
}

// Warps.

template <class T>
static T from_lane(T x, int lane) {
  unsigned mine[2] = {};
  std::memcpy(mine, &x, sizeof(T));
  auto* all = exchange(mine, 2);
  std::memcpy(&x, all[lane][emulation::parity[emulation::current]], sizeof(T));
  return x;
}
template <class T>
static T __shfl_sync(unsigned, T x, int lane) {
  return from_lane(x, lane % 32);
}
template <class T>
static T __shfl_xor_sync(unsigned, T x, int lanes) {
  return from_lane(x, int(emulation::current % 32) ^ lanes);
}
template <class T>
static T __shfl_up_sync(unsigned, T x, int lanes) {
  const int lane = emulation::current % 32;
  return from_lane(x, lane < lanes ? lane : lane - lanes);
}
static bool __any_sync(unsigned, bool x) {
  const unsigned mine = x;
  auto* all = exchange(&mine, 1);
  bool found = false;
  for (int lane = 0; lane < 32; ++lane) found |= all[lane][emulation::parity[emulation::current]][0] != 0;
  return found;
}

// Copies and barriers.

namespace emulation {

struct MemoryBarrier {  // in the 8 bytes of an mbarrier
  unsigned short count, pending, phase, unused;
};

struct Event {  // of a thread, in order: a copy, or an arrival
  void* to;
  const void* from;
  int bytes;
  MemoryBarrier* barrier;
};

Barrier named_barriers[16];
std::vector<Event> events[most_threads];
bool refused[16];

inline void arrive(MemoryBarrier& barrier) {
  if (barrier.pending == 0) fail("one arrival too many");
  if (--barrier.pending == 0) barrier.pending = barrier.count, ++barrier.phase, ++waits;
}

inline void finish_copies() {
  for (const Event& event : events[current]) {
    if (event.barrier) {
      arrive(*event.barrier);
    } else {
      std::memset(event.to, 0, 16);
      std::memcpy(event.to, event.from, event.bytes);
    }
  }
  events[current].clear();
}

inline void pass_turn(bool always = false) {  // before a thread waits
  if (events[current].empty() && !always) return;
  ++waits;
  yield();
  finish_copies();
}

inline void wait_named(int number, unsigned count) {
  if (number >= 16) fail("there are 16 barriers");
  pass_turn();
  wait(named_barriers[number], count);
}

}  // namespace emulation

#define __cvta_generic_to_shared(p) (reinterpret_cast<const unsigned char*>(p) - emulation::shared)

static void copy_to(unsigned to, unsigned long long from, int bytes) {
  if (to % 16 || from % 16) emulation::fail("a misaligned copy");
  std::memset(emulation::shared + to, 0x7F, 16);
  emulation::counted[0] += bytes;
  emulation::events[emulation::current].push_back({emulation::shared + to, reinterpret_cast<void*>(from), bytes, nullptr});
}
static void barrier_init(unsigned long long* b, int count) {
  *reinterpret_cast<emulation::MemoryBarrier*>(b) = {(unsigned short)count, (unsigned short)count, 0, 0};
}
static void arrive(unsigned long long* b) { emulation::arrive(*reinterpret_cast<emulation::MemoryBarrier*>(b)); }
static void arrive_when_copied(unsigned long long* b) {
  emulation::events[emulation::current].push_back({nullptr, nullptr, 0, reinterpret_cast<emulation::MemoryBarrier*>(b)});
}
static void await(unsigned long long* b, int parity) {
  emulation::pass_turn();
  const auto& barrier = *reinterpret_cast<volatile emulation::MemoryBarrier*>(b);
  while ((barrier.phase & 1) == parity) emulation::yield();
}
static void warpgroup_sync(int barrier) { emulation::wait_named(barrier, 128); }
static void rows_sync(int role) { emulation::wait_named(2 + GROUPS + role / COLUMNS, 128 * COLUMNS); }
static int all_of(int barrier, int x) {
  using namespace emulation;
  if (!x) refused[barrier] = true;
  wait_named(barrier, 128);
  const int found = !refused[barrier];
  wait_named(barrier, 128);
  refused[barrier] = false;
  wait_named(barrier, 128);
  return found;
}
static void see_writes() {}
template <int, bool>
static void set_registers() {}

// Numbers.

#if DTYPE == 1 || CACHE
#define OPERAND(x) half_to_float(x)
static unsigned pack(float x, float y) { return pack_half(x, y); }
#else
#define OPERAND(x) bfloat16_to_float(x)
static unsigned pack(float x, float y) { return pack_bfloat16(x, y); }
#endif
#if DTYPE == 1
static unsigned pack_out(float x, float y) { return pack_half(x, y); }
static float low(unsigned x) { return half_to_float(x & 0xFFFF); }
#else
static unsigned pack_out(float x, float y) { return pack_bfloat16(x, y); }
static float low(unsigned x) { return bfloat16_to_float(x & 0xFFFF); }
#endif
static float exp2_(float x) { return exp2_fast(x); }
template <int K>
static void hold(float (&)[K][4]) {}

static float fp8_to_float(unsigned char bits) {
  const int mantissa_bits = CACHE == 1 ? 3 : 2, bias = CACHE == 1 ? 7 : 15;
  const int exponent = (bits & 127) >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
  if (CACHE == 1 ? (bits & 127) == 127 : exponent == 31) return CACHE == 1 || mantissa ? NAN : bits >> 7 ? -INFINITY : INFINITY;
  const float size = exponent ? std::ldexp(float((1 << mantissa_bits) + mantissa), exponent - bias - mantissa_bits)
                              : std::ldexp(float(mantissa), 1 - bias - mantissa_bits);
  return bits >> 7 ? -size : size;
}
static uint2 widened(unsigned four) {
  float x[4];
  for (int i = 0; i < 4; ++i) x[i] = fp8_to_float(four >> 8 * i & 255);
  return {pack_half(x[0], x[1]), pack_half(x[2], x[3])};
}

// Products of warps, and of warpgroups.

static void load4(unsigned (&r)[4], const unsigned short* at) { load_matrices(r, at); }
static void load4_trans(unsigned (&r)[4], const unsigned short* at) { load_matrices_transposed(r, at); }
#if DTYPE == 1 || CACHE
static void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { multiply_add_half(c, a, b0, b1); }
#else
static void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { multiply_add_bfloat16(c, a, b0, b1); }
#endif

namespace emulation {

struct Product {
  float (*c)[4];
  int columns;  // a multiple of 8
  bool is_of_registers, transposed, add;
  float a[2][16];  // the thread's rows, if they are in registers
  unsigned long long of_a, of_b;
};

std::vector<std::vector<Product>> products[most_threads];

// The number at an offset from where a descriptor points: 128-byte swizzling is a matter of addresses.
inline float number_of(unsigned long long descriptor, unsigned offset) {
  unsigned at = unsigned(descriptor & 0x3FFF) * 16 + offset;
  at ^= (at >> 7 & 7) << 4;
  if (at + 2 > shared_bytes) fail("a product of what is not in shared memory");
  return OPERAND(*reinterpret_cast<const unsigned short*>(shared + at));
}

inline void multiply(const Product& p) {
  const unsigned lane = current % 32, warp = current / 32 % 4, leading = unsigned(p.of_b >> 16 & 0x3FFF) * 16;
  if ((p.of_b >> 32 & 0x3FFF) * 16 != 1024 || p.of_b >> 62 != 1) fail("a descriptor of another layout");
  float a[2][16];
  for (int e = 0; e < 2; ++e)
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned row = warp * 16 + lane / 4 + 8 * e;
      a[e][k] = p.is_of_registers ? p.a[e][k] : number_of(p.of_a, row / 8 * 1024 + row % 8 * 128 + k * 2);
    }
  for (int i = 0; i < p.columns / 8; ++i)
    for (unsigned f = 0; f < 2; ++f) {
      const unsigned column = i * 8 + lane % 4 * 2 + f;
      float b[16];
      for (unsigned k = 0; k < 16; ++k)
        b[k] = number_of(
            p.of_b, p.transposed ? column / 64 * leading + k / 8 * 1024 + k % 8 * 128 + column % 64 * 2
                                 : column / 8 * 1024 + column % 8 * 128 + k * 2);
      for (int e = 0; e < 2; ++e) {
        float sum = p.add ? p.c[i][2 * e + f] : 0;
        for (int k = 0; k < 16; ++k) sum += a[e][k] * b[k];
        p.c[i][2 * e + f] = sum;
      }
    }
}

}  // namespace emulation

template <int TRANS, int K>
static void wgmma(float (&c)[K][4], const unsigned (&a)[4], unsigned long long b, int add) {
  emulation::Product made = {c, 8 * K, true, TRANS != 0, add != 0, {}, 0, b};
  auto* all = exchange(a, 4);
  const int lane = emulation::current % 32, turn = emulation::parity[emulation::current];
  for (int e = 0; e < 2; ++e)
    for (int k = 0; k < 16; ++k)
      made.a[e][k] = OPERAND((unsigned short)(all[lane / 4 * 4 + k % 8 / 2][turn][2 * (k / 8) + e] >> 16 * (k % 2)));
  emulation::products[emulation::current].back().push_back(made);
}
template <int K>
static void wgmma(float (&c)[K][4], unsigned long long a, unsigned long long b, int add) {
  emulation::products[emulation::current].back().push_back({c, 8 * K, false, false, add != 0, {}, a, b});
}
static void products_begin() {
  auto& groups = emulation::products[emulation::current];
  if (groups.empty()) groups.emplace_back();
}
static void products_commit() {
  if (WGMMA) emulation::products[emulation::current].emplace_back();
}
template <int K>
static void products_wait() {
  auto& groups = emulation::products[emulation::current];
  while (groups.size() > K + 1) {
    emulation::pass_turn(true);  // to threads that might take the operands away
    for (const auto& product : groups.front()) emulation::multiply(product);
    groups.erase(groups.begin());
  }
}
