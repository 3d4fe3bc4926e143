/* Attention of new queries on a paged KV cache: decodes, drafts and chunks of prompts, in any mixture.
 *
 * Rows of a tile are (query, head of the group) of one key head: they share each read of K and V. An item of work is a
 * row tile and a part of its keys. The grid has as many blocks as the GPU runs at a time; each makes its own list of items
 * from the lengths on the device. One warpgroup loads keys and values, others compute. The last block to finish a part of
 * a row tile merges all of its parts, in the order of the keys.
 *
 * Macros: DTYPE (1: float16, 2: bfloat16) of queries and output; CACHE (0: as queries, 1: E4M3, 2: E5M2); D, DV; G, the
 * query heads of a key head; PS, the page size; GROUPS warpgroups that compute, of 64 rows; COLUMNS of them share the rows,
 * and divide the columns of the values; tiles of N keys, STAGES of them in shared memory, RAW ones in FP8; BLOCKS of a
 * multiprocessor; LEAST tiles of a part; SOFTCAP, TREE: whether there is a soft cap, a tree mask; WGMMA: Hopper's
 * instructions.
 *
 * With COLUMNS = 2 shared memory has tiles of one kind, as wide as keys: values that are the first numbers of their keys
 * (multi-head latent attention) are read there, and others take turns with the keys.
 */
#include "launch.cuh"

typedef long long number;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short half_t; /* the bits of a float16 or bfloat16 */
typedef unsigned char byte_t;

#undef INFINITY
#define INFINITY __int_as_float(0x7f800000)

/* Sizes and strides; strides are in elements. Packed queries have q_b = 0, o_b = 0, l_b = 0. */
struct Sizes {
  number batch;
  number tokens;     /* rows of q and out, of all sequences */
  number queries;    /* rows of each sequence; 0: packed by `ends` */
  number heads_kv;
  number pages;
  number width;      /* columns of the tables */
  number q_b;
  number q_t;
  number q_h;
  number k_p;
  number k_h;
  number k_s;
  number v_p;
  number v_h;
  number v_s;
  number table_k_b;
  number table_v_b;
  number o_b;
  number o_t;
  number o_h;
  number l_b;
  number l_t;
  number l_h;
  number left;       /* keys to the left of the diagonal; negative: all */
  number right;      /* to the right; negative: all */
  number top_left;   /* whether the diagonal begins at the first query and key */
  number tree_t;
  number tree_n;     /* columns of the tree mask */
  number k_scale_h;
  number v_scale_h;
  number softcap;    /* the bits of a float */
  number fixed;      /* keys of a part, of sequences of one row tile; 0: by the load */
};

struct Paged {
  const half_t* q;
  const byte_t* k;
  const byte_t* v;
  const int* table_k;
  const int* table_v;
  const int* lengths;
  const int* ends;       /* (batch + 1,): first rows of the sequences; null: `queries` each */
  const int* counts;     /* (batch,): rows of each that are queries; null: all */
  const float* sinks;
  const byte_t* tree;    /* which new keys a row sees */
  const float* k_scale;
  const float* v_scale;
  half_t* out;
  float* lse;
  float* partial;        /* rows of parts: DVP sums of weighted values of each */
  float* sums;           /* 2 of each: maximum, to the base 2, and sum of weights */
  u64* ready;            /* COLUMNS of each; of the first row of a warpgroup: `token`, once its rows are there */
  number token;          /* chosen at random: memory that was never written does not hold it */
  number scale;          /* the bits of a float */
  Sizes sizes;
};

constexpr int M = 64 * GROUPS / COLUMNS;
constexpr int DP = (D + 63) / 64 * 64, DVP = (DV + 63) / 64 * 64; /* in shared memory */
constexpr int DVC = DVP / COLUMNS; /* columns of a warpgroup */
constexpr int ELEMENT = CACHE ? 1 : 2;
constexpr bool Q_SHARED = D > 192; /* queries in shared memory, where registers do not hold them */
/* Weights are multiplied by 2^SHIFT: as float16, small ones keep more of their bits. */
constexpr int SHIFT = CACHE ? 7 : 0;
constexpr float LOG2E = 1.4426950408889634f;
#if DTYPE == 1 || CACHE
#define MMA "f16"
#else
#define MMA "bf16"
#endif
#if DTYPE == 1
#define HALF "f16"
#else
#define HALF "bf16"
#endif

extern __shared__ __align__(1024) unsigned char shared[];

__device__ __forceinline__ int min_(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int max_(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int within(int x, int least, int most) { return max_(least, min_(x, most)); }

/* Sequences and their tiles. */

struct Sequence {
  int first;    /* its first row, of packed queries */
  int count;    /* its queries */
  int length;   /* its keys */
  int tiles;    /* of rows */
};

__device__ __forceinline__ Sequence sequence_of(const Paged& a, int b) {
  Sequence s;
  if (a.ends) {
    const int end = within(a.ends[b + 1], 0, (int)a.sizes.tokens);
    s.first = within(a.ends[b], 0, end);
    s.count = end - s.first;
  } else {
    s.first = 0;
    s.count = a.counts ? within(a.counts[b], 0, (int)a.sizes.queries) : (int)a.sizes.queries;
  }
  const number room = a.sizes.width * PS;
  s.length = within(a.lengths[b], 0, room < 0x7fffffff - N ? (int)room : 0x7fffffff - N);
  s.tiles = (s.count * G + M - 1) / M;
  return s;
}

/* The key on the diagonal of the first query. */
__device__ __forceinline__ int diagonal_of(const Paged& a, int length, int count) {
  return a.sizes.top_left ? 0 : length - count;
}

/* The first key that a query sees, and the end of those. */
__device__ __forceinline__ int least_of(const Paged& a, int diagonal, int query) {
  return a.sizes.left < 0 ? 0 : (int)max(0ll, diagonal + query - a.sizes.left);
}
__device__ __forceinline__ int limit_of(const Paged& a, int length, int diagonal, int query) {
  return a.sizes.right < 0 ? length : (int)max(0ll, min((number)length, diagonal + query + a.sizes.right + 1));
}

/* The most tiles of keys that a row tile of a sequence reads. */
__device__ __forceinline__ int span_of(const Paged& a, const Sequence& s) {
  const int all = (s.length + N - 1) / N;
  if (a.sizes.left < 0 || a.sizes.right < 0) return all;
  return (int)min((number)all, (a.sizes.left + a.sizes.right + (M + G - 1) / G + N) / N + 1);
}

/* Stages of shared memory that a tile of keys and its values take: one where values are the first numbers of their keys. */
__device__ __forceinline__ int stages_of(const Paged& a) {
  const Sizes& s = a.sizes;
  const bool is_one = a.k == a.v && a.table_k == a.table_v && s.table_k_b == s.table_v_b && s.k_p == s.v_p;
  return COLUMNS == 1 || (is_one && (s.heads_kv == 1 || s.k_h == s.v_h) && (PS == 1 || s.k_s == s.v_s)) ? 1 : 2;
}

/* Instructions. */

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u32 pack(float x, float y) { /* as operands of products */
  u32 r;
  asm("cvt.rn." MMA "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
  return r;
}
__device__ __forceinline__ u32 pack_out(float x, float y) {
  u32 r;
  asm("cvt.rn." HALF "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x));
  return r;
}
__device__ __forceinline__ float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float low(u32 x) {
#if DTYPE == 1
  float y;
  asm("{\n.reg .f16 a, b;\nmov.b32 {a, b}, %1;\ncvt.f32.f16 %0, a;\n}" : "=f"(y) : "r"(x));
  return y;
#else
  return __uint_as_float(x << 16);
#endif
}
__device__ __forceinline__ float high(u32 x) {
#if DTYPE == 1
  return low(x >> 16);
#else
  return __uint_as_float(x & 0xffff0000u);
#endif
}

__device__ __forceinline__ void barrier_init(u64* b, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(address(b)), "r"(count));
}
__device__ __forceinline__ void arrive(u64* b) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(address(b)) : "memory");
}
__device__ __forceinline__ void arrive_when_copied(u64* b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(address(b)) : "memory");
}
__device__ __forceinline__ void await(u64* b, int parity) {
#if WGMMA
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:\n}\n" ::"r"(
          address(b)),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:\n}\n" ::"r"(
          address(b)),
      "r"(parity)
      : "memory");
#endif
}
__device__ __forceinline__ void warpgroup_sync(int barrier) {
  asm volatile("bar.sync %0, 128;\n" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void rows_sync(int role) { /* of the warpgroups that share rows */
  asm volatile("bar.sync %0, %1;\n" ::"r"(2 + GROUPS + role / COLUMNS), "n"(128 * COLUMNS) : "memory");
}
__device__ __forceinline__ void see_writes() { /* of threads and asynchronous copies, before WGMMA reads */
#if WGMMA
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
}
template <int REGISTERS, bool MORE>
__device__ __forceinline__ void set_registers() {
#if WGMMA
  if (MORE) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
  else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
#endif
}

/* Where a chunk of 8 elements is in a tile of ROWS rows: panels of 64 elements, swizzled by 128 bytes as WGMMA reads. */
template <int ROWS>
__device__ __forceinline__ int place(int row, int chunk) {
  return ((chunk >> 3) * ROWS + row) * 64 + ((chunk ^ row) & 7) * 8;
}

#define F4(x, i) "+f"(x[i][0]), "+f"(x[i][1]), "+f"(x[i][2]), "+f"(x[i][3])

/* Keeps the compiler from moving what computes `c` past this point. */
template <int K>
__device__ __forceinline__ void hold(float (&c)[K][4]) {
#pragma unroll
  for (int i = 0; i < K; i++) asm volatile("" : F4(c, i)::"memory");
}

#if WGMMA

/* Of a tile in shared memory; `further` is that many bytes on. All lanes have the same. */
__device__ __forceinline__ u64 descriptor(u32 at, u32 leading) { /* 8 rows are 1024 bytes apart */
  const u32 lower = (at & 0x3ffff) >> 4 | leading >> 4 << 16;
  return (u64)__shfl_sync(~0u, lower, 0) | (u64)64 << 32 | (u64)1 << 62;
}
__device__ __forceinline__ u64 further(u64 of, int bytes) { return of + (bytes >> 4); }
#define F16(x, i) F4(x, i), F4(x, i + 1), F4(x, i + 2), F4(x, i + 3)
#define F32(x, i) F16(x, i), F16(x, i + 4)
#define F64(x, i) F32(x, i), F32(x, i + 8)
#define R8(a) "%" #a "0,%" #a "1,%" #a "2,%" #a "3,%" #a "4,%" #a "5,%" #a "6,%" #a "7,%" #a "8,%" #a "9"
#define R32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9," R8(1) "," R8(2) ",%30,%31"
#define R64 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9," R8(1) "," R8(2) "," R8(3) "," R8(4) "," R8(5) ",%60,%61,%62,%63"

/* c += a b, where the 64 rows of `a` are in registers; c = a b unless `add`. TRANS: rows of b are those of the sum. */
template <int TRANS>
__device__ __forceinline__ void wgmma(float (&c)[8][4], const u32 (&a)[4], u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." MMA "." MMA " {" R32 "}, {%32,%33,%34,%35}, %36, p, 1, 1, %38;\n}\n"
      : F32(c, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANS));
}
template <int TRANS>
__device__ __forceinline__ void wgmma(float (&c)[16][4], const u32 (&a)[4], u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." MMA "." MMA " {" R64 "}, {%64,%65,%66,%67}, %68, p, 1, 1, %70;\n}\n"
      : F64(c, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANS));
}
/* `a` in shared memory. */
__device__ __forceinline__ void wgmma(float (&c)[8][4], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." MMA "." MMA " {" R32 "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
      : F32(c, 0)
      : "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void wgmma(float (&c)[16][4], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." MMA "." MMA " {" R64 "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
      : F64(c, 0)
      : "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int K>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(K) : "memory");
}

/* x = q k^T for a tile of keys. */
__device__ __forceinline__ void multiply_keys(
    float (&x)[N / 8][4], const u32 (&q)[Q_SHARED ? 1 : DP / 16][4], const half_t* q_shared, const half_t* k) {
  const u64 keys = descriptor(address(k), 16), queries = Q_SHARED ? descriptor(address(q_shared), 16) : 0;
#pragma unroll
  for (int i = 0; i < DP / 16; i++) {
    const u64 b = further(keys, i / 4 * N * 128 + i % 4 * 32);
    if (Q_SHARED) wgmma(x, further(queries, i / 4 * 64 * 128 + i % 4 * 32), b, i > 0);
    else wgmma<0>(x, q[Q_SHARED ? 0 : i], b, i > 0);
  }
}

/* acc += w v for a tile of values, 128 columns at a time. */
__device__ __forceinline__ void add_values(float (&acc)[DVC / 8][4], const u32 (&w)[N / 16][4], const half_t* v) {
  const u64 values = descriptor(address(v), N * 128);
#pragma unroll
  for (int j = 0; j < N / 16; j++) {
    const u64 rows = further(values, j * 16 * 128);
#pragma unroll
    for (int p = 0; p < DVC / 128; p++)
      wgmma<1>(reinterpret_cast<float(&)[16][4]>(acc[p * 16]), w[j], further(rows, 2 * p * N * 128), 1);
    if (DVC % 128)
      wgmma<1>(
          reinterpret_cast<float(&)[8][4]>(acc[DVC / 128 * 16]), w[j],
          further(rows, DVC / 128 * 2 * N * 128), 1);
  }
}

#else

__device__ __forceinline__ void load4(u32 (&r)[4], const half_t* at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address(at))
               : "memory");
}
__device__ __forceinline__ void load4_trans(u32 (&r)[4], const half_t* at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address(at))
               : "memory");
}
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA "." MMA ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void products_begin() {}
__device__ __forceinline__ void products_commit() {}
template <int K>
__device__ __forceinline__ void products_wait() {}

__device__ __forceinline__ void multiply_keys(
    float (&x)[N / 8][4], const u32 (&q)[Q_SHARED ? 1 : DP / 16][4], const half_t* q_shared, const half_t* k) {
  const int lane = threadIdx.x % 32, row = lane % 8, matrix = lane / 8, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int j = 0; j < N / 8; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) x[j][e] = 0;
#pragma unroll
  for (int i = 0; i < DP / 16; i++) {
    u32 a[4];
    if (Q_SHARED) load4(a, q_shared + place<64>(warp * 16 + (matrix & 1) * 8 + row, 2 * i + matrix / 2));
    else
#pragma unroll
      for (int e = 0; e < 4; e++) a[e] = q[Q_SHARED ? 0 : i][e];
#pragma unroll
    for (int j = 0; j < N / 16; j++) {
      u32 b[4];
      load4(b, k + place<N>(j * 16 + matrix / 2 * 8 + row, 2 * i + (matrix & 1)));
      mma(x[2 * j], a, b[0], b[1]);
      mma(x[2 * j + 1], a, b[2], b[3]);
    }
  }
}

__device__ __forceinline__ void add_values(float (&acc)[DVC / 8][4], const u32 (&w)[N / 16][4], const half_t* v) {
  const int lane = threadIdx.x % 32, row = lane % 8, matrix = lane / 8;
#pragma unroll
  for (int j = 0; j < N / 16; j++)
#pragma unroll
    for (int c = 0; c < DVC / 16; c++) {
      u32 b[4];
      load4_trans(b, v + place<N>(j * 16 + (matrix & 1) * 8 + row, 2 * c + matrix / 2));
      mma(acc[2 * c], w[j], b[0], b[1]);
      mma(acc[2 * c + 1], w[j], b[2], b[3]);
    }
}

#endif

/* Shared memory. */

struct Item {
  int h, r;              /* the key head and the row tile */
  int parts, slot, part; /* parts of its keys; if there are several, the place of the first one's rows; which this is */
  int tile, tiles;       /* tiles of keys: the first one, and how many; -1: no more items */
  int b, first, count, length;
};

constexpr int RING = 3;
constexpr int K_BYTES = CACHE ? (D + 127) / 128 * 128 : DP * 2, V_BYTES = CACHE ? (DV + 127) / 128 * 128 : DVP * 2;
constexpr int COPIED = CACHE ? RAW : STAGES; /* tiles that the loader has under way */

struct Shared {
  half_t k[STAGES][N * DP];
#if COLUMNS == 1
  half_t v[STAGES][N * DVP];
#endif
#if CACHE
  byte_t raw_k[RAW][N * K_BYTES];
  byte_t raw_v[RAW][N * V_BYTES];
#endif
  half_t q[Q_SHARED ? GROUPS / COLUMNS : 1][Q_SHARED ? 64 * DP : 8];
#if CACHE
  u64 raw_full_k[RAW], raw_full_v[RAW], raw_empty_k[RAW], raw_empty_v[RAW];
#endif
  u64 full_k[STAGES], full_v[STAGES], empty_k[STAGES], empty_v[STAGES], item_full[RING], item_empty[RING];
  u64 rows[2][2][N]; /* addresses of keys and of values; odd: none */
  Item items[RING];
  number loads[2][4];
  int scan[2][4], found[8];
};

static_assert(sizeof(Shared) <= SHARED, "shared memory");
static_assert(COLUMNS == 1 || (COLUMNS == 2 && !CACHE && Q_SHARED && DV == DVP && DVC % 64 == 0 && DV <= D), "columns of values");

constexpr int THREADS = 128 * (GROUPS + 1 + (CACHE ? 2 : 0)); /* FP8 keys and values have a warpgroup each */

/* The loader: makes the list of items, and copies their keys and values. */

__device__ __forceinline__ void load_items(const Paged& a, Shared& x) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int batch = (int)a.sizes.batch, heads = (int)a.sizes.heads_kv;
  /* The load of the call gives the tiles of keys of a part. */
  Sequence mine = {0, 0, 0, 0};
  number tiles = 0, load = 0;
  for (int i = thread; i < batch; i += 128) { /* the last sequences first: long prompts come behind decodes */
    const Sequence s = sequence_of(a, batch - 1 - i);
    if (i == thread) mine = s;
    tiles += a.sizes.fixed > 0 ? s.count : s.tiles;
    load += (number)s.tiles * span_of(a, s);
  }
  for (int o = 16; o; o /= 2) {
    tiles += __shfl_xor_sync(~0u, tiles, o);
    load += __shfl_xor_sync(~0u, load, o);
  }
  if (lane == 0) x.loads[0][warp] = tiles, x.loads[1][warp] = load;
  warpgroup_sync(1);
  tiles = 0, load = 0;
  for (int w = 0; w < 4; w++) tiles += x.loads[0][w], load += x.loads[1][w];
  tiles *= heads, load *= heads;
  const int blocks = gridDim.x;
  number part = a.sizes.fixed / N;
  if (part > 0 && tiles > a.sizes.tokens * heads) part = 0x7fffffff; /* sequences overlap: there is no room for their parts */
  if (part <= 0) { /* row tiles that are split have at most 2 * blocks parts in all: the scratch memory has room for them */
    /* In floating point: a division of 64-bit integers is a hundred instructions. */
    if (2 * tiles <= blocks) part = (number)ceilf((float)load / (float)(blocks - (int)tiles));
    else part = (number)ceilf((float)load * 1.15f / (float)blocks);
    if (part < LEAST) part = LEAST;
#if COLUMNS > 1 /* one block merges all parts of a row tile: 128 of their rows take it about as long as a tile of keys */
    if (tiles) part = max(part, (number)sqrtf((float)load / tiles * min_(G, M) / 128));
#endif
  }
  const u32 tiles_of_part = (u32)min(part, 0x7fffffffll);
  int group = 0, first = 0, slot0 = 0, parts = 1;
  struct {
    int items, slots;
  } before = {0, 0}, behind = {0, 0}; /* this group of 128 sequences */
  auto enter = [&](int g) {
    group = g;
    const int i = g * 128 + thread;
    if (g) {
      mine = Sequence{0, 0, 0, 0};
      if (i < batch) mine = sequence_of(a, batch - 1 - i);
    }
    const int span = span_of(a, mine), row_tiles = mine.tiles * heads;
    parts = span > part && (a.sizes.fixed <= 0 || mine.tiles == 1) ? (int)((span + tiles_of_part - 1) / tiles_of_part) : 1;
    const int own[2] = {row_tiles * parts, parts > 1 ? mine.count * G * heads * parts : 0};
    int sum[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      sum[e] = own[e];
      for (int o = 1; o < 32; o *= 2) {
        const int y = __shfl_up_sync(~0u, sum[e], o);
        if (lane >= o) sum[e] += y;
      }
      if (lane == 31) x.scan[e][warp] = sum[e];
    }
    warpgroup_sync(1);
    int base[2] = {before.items, before.slots}, all[2] = {before.items, before.slots};
    for (int w = 0; w < 4; w++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int y = x.scan[e][w];
        if (w < warp) base[e] += y;
        all[e] += y;
      }
    first = base[0] + sum[0] - own[0], slot0 = base[1] + sum[1] - own[1];
    behind = {all[0], all[1]};
  };
  enter(0);
  const int groups = (batch + 127) / 128;

  const u32 own = thread / 8 * 128 + ((thread ^ thread / 8) & 7) * 16; /* 8 threads copy 128 bytes of a row */
  auto copy = [&](u32 to, const u64* rows, int bytes, int panels) {
    u64 from[N / 16];
#pragma unroll
    for (int i = 0; i < N / 16; i++) from[i] = rows[thread / 8 + i * 16];
#pragma unroll
    for (int i = 0; i < N / 16; i++) {
      const u64 y = (from[i] & ~1ull) + thread % 8 * 16;
#pragma unroll
      for (int e = 0; e < panels; e++) {
        int size = from[i] & 1 ? 0 : 16;
        if (bytes % 128) size = min_(size, max_(bytes - e * 128 - thread % 8 * 16, 0));
        asm volatile(
            "cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;\n" ::"r"(to + i * 2048 + e * N * 128),
            "l"(y + e * 128), "r"(size));
      }
    }
  };
  int given = 0, loaded = 0; /* items, and tiles of keys */
  auto give = [&](const Item& item) {
    if (thread == 0) {
      if (given >= RING) await(x.item_empty + given % RING, (given / RING - 1) & 1);
      x.items[given % RING] = item;
      arrive(x.item_full + given % RING);
    }
    given++;
  };
  for (int item = blockIdx.x;; item += gridDim.x) {
    while (item >= behind.items && group + 1 < groups) {
      before = behind;
      warpgroup_sync(1);
      enter(group + 1);
    }
    if (item >= behind.items) break;
    warpgroup_sync(1); /* `found` and `rows` of the item before */
    if (item >= first && item < first + mine.tiles * heads * parts) {
      int* f = x.found;
      f[0] = batch - 1 - (group * 128 + thread), f[1] = item - first, f[2] = parts, f[3] = slot0;
      f[4] = mine.first, f[5] = mine.count, f[6] = mine.length;
    }
    warpgroup_sync(1);
    const int b = x.found[0], own_parts = x.found[2], count = x.found[5], length = x.found[6];
    const int row_tiles = (count * G + M - 1) / M, h = x.found[1] % heads, rest = x.found[1] / heads;
    const int r = row_tiles - 1 - rest % row_tiles, p = rest / row_tiles; /* later rows have more keys */
    const int diagonal = diagonal_of(a, length, count), oldest = r * M / G, newest = min_((r * M + M - 1) / G, count - 1);
    const int least = least_of(a, diagonal, oldest), limit = TREE ? length : limit_of(a, length, diagonal, newest);
    const int from = least / N, span = max_(0, (limit + N - 1) / N - from);
    const int each = span / own_parts, longer = span % own_parts; /* the first parts have a tile more */
    const int tile = from + p * each + min_(p, longer), tiles = each + (p < longer);
    const int slot = x.found[3] + (h * count * G + r * M) * own_parts;
    give(Item{h, r, own_parts, slot, p, tile, tiles, b, x.found[4], count, length});
    const bool is_one_table = a.table_v == a.table_k && a.sizes.table_v_b == a.sizes.table_k_b;
    int page_k = -1, page_v = -1, offset = 0;
    auto look_up = [&](int n) {
      page_k = page_v = -1;
      if (n < tiles && thread < N) {
        const int key = (tile + n) * N + thread;
        if (key >= least && key < length) { /* others may be no one's, and hold NaN */
          page_k = a.table_k[b * a.sizes.table_k_b + key / PS];
          page_v = is_one_table ? page_k : a.table_v[b * a.sizes.table_v_b + key / PS];
          offset = key % PS;
        }
      }
    };
    auto keep = [&](int n) {
      if (thread < N && n < tiles) {
        const bool has_k = (u32)page_k < (u32)a.sizes.pages, has_v = (u32)page_v < (u32)a.sizes.pages;
        const number k = page_k * a.sizes.k_p + h * a.sizes.k_h + offset * a.sizes.k_s;
        const number v = page_v * a.sizes.v_p + h * a.sizes.v_h + offset * a.sizes.v_s;
        x.rows[n & 1][0][thread] = has_k ? (u64)(a.k + k * ELEMENT) : (u64)a.k | 1;
        x.rows[n & 1][1][thread] = has_v ? (u64)(a.v + v * ELEMENT) : (u64)a.v | 1;
      }
    };
    look_up(0);
    keep(0);
    look_up(1);
#if CACHE
    const u32 all_k = address(x.raw_k), all_v = address(x.raw_v);
    u64 *const full_k = x.raw_full_k, *const full_v = x.raw_full_v, *const empty_k = x.raw_empty_k, *const empty_v = x.raw_empty_v;
#else
    const u32 all_k = address(x.k);
    u64 *const full_k = x.full_k, *const empty_k = x.empty_k;
#if COLUMNS == 1
    const u32 all_v = address(x.v);
    u64 *const full_v = x.full_v, *const empty_v = x.empty_v;
#endif
#endif
    for (int n = 0; n < tiles; n++, loaded++) {
      warpgroup_sync(1);
      const int stage = loaded % COPIED, round = loaded / COPIED;
      if (round) await(empty_k + stage, (round - 1) & 1);
      copy(all_k + stage * N * K_BYTES + own, x.rows[n & 1][0], D * ELEMENT, K_BYTES / 128);
      arrive_when_copied(full_k + stage);
#if COLUMNS == 1
      if (round) await(empty_v + stage, (round - 1) & 1);
      copy(all_v + stage * N * V_BYTES + own, x.rows[n & 1][1], DV * ELEMENT, V_BYTES / 128);
      arrive_when_copied(full_v + stage);
#else
      if (stages_of(a) == 2) {
        loaded++;
        const int next = loaded % COPIED;
        if (loaded >= COPIED) await(empty_k + next, (loaded / COPIED - 1) & 1);
        copy(all_k + next * N * K_BYTES + own, x.rows[n & 1][1], DV * ELEMENT, V_BYTES / 128);
        arrive_when_copied(full_k + next);
      }
#endif
      keep(n + 1);
      look_up(n + 2); /* pages of the tile after the next one: nothing waits for them */
    }
  }
  give(Item{0, 0, 0, 0, 0, 0, -1, 0, 0, 0, 0});
  /* Rows that are no query: zeros. */
  const number heads_q = (number)heads * G, rows = a.sizes.tokens;
  const int start = a.ends ? within(a.ends[0], 0, (int)rows) : 0, end = a.ends ? within(a.ends[batch], start, (int)rows) : 0;
  const number idle = a.ends ? rows - (end - start) : a.counts ? rows : 0;
  for (number at = blockIdx.x * 4 + warp; at < idle * heads_q; at += (number)gridDim.x * 4) {
    number token = at / heads_q, b = 0;
    const number head = at % heads_q;
    if (a.ends) {
      if (token >= start) token += end - start;
    } else {
      b = token / a.sizes.queries, token %= a.sizes.queries;
      if (token < a.counts[b]) continue;
    }
    half_t* out = a.out + b * a.sizes.o_b + token * a.sizes.o_t + head * a.sizes.o_h;
    for (int d = lane; d < DV; d += 32) out[d] = 0;
    if (a.lse && lane == 0) /* a row of a sequence has its sink; a token of none has nothing */
      a.lse[b * a.sizes.l_b + token * a.sizes.l_t + head * a.sizes.l_h] = a.sinks && !a.ends ? a.sinks[head] : -INFINITY;
  }
  asm volatile("cp.async.wait_all;\n" ::: "memory");
}

/* The items of a block, one after the other, as their readers see them. */
template <class Do>
__device__ __forceinline__ void for_each_item(Shared& x, Do each) {
  for (int given = 0;; given++) {
    await(x.item_full + given % RING, given / RING & 1);
    const volatile Item& item = x.items[given % RING]; /* read again where it is needed, which frees registers */
    if (item.tiles < 0) return;
    each(item);
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(x.item_empty + given % RING);
  }
}

#if CACHE

/* FP8 keys and values to float16, which holds all of them exactly. */
__device__ __forceinline__ uint2 widened(u32 four) {
  uint2 r;
#if CACHE == 1
#define FP8 "e4m3x2"
#else
#define FP8 "e5m2x2"
#endif
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2." FP8 " %0, a;\ncvt.rn.f16x2." FP8 " %1, b;\n}"
      : "=r"(r.x), "=r"(r.y)
      : "r"(four));
  return r;
}

template <int BYTES, int PADDED>
__device__ __forceinline__ void widen(half_t* to, const byte_t* from) {
  const int thread = threadIdx.x % 128, chunk = thread % 8;
#pragma unroll
  for (int panel = 0; panel < BYTES / 128; panel++) {
    if (panel * 128 + chunk * 16 >= PADDED) continue;
#pragma unroll 4
    for (int row = thread / 8; row < N; row += 16) {
      const uint4 y = *reinterpret_cast<const uint4*>(from + (panel * N + row) * 128 + ((chunk ^ row) & 7) * 16);
      const uint2 e[4] = {widened(y.x), widened(y.y), widened(y.z), widened(y.w)};
      const int second = chunk >> 2 & 1; /* lanes begin with different halves, so that banks differ */
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const bool upper = (half ^ second) != 0;
        uint4 z;
        z.x = upper ? e[2].x : e[0].x, z.y = upper ? e[2].y : e[0].y, z.z = upper ? e[3].x : e[1].x, z.w = upper ? e[3].y : e[1].y;
        *reinterpret_cast<uint4*>(to + place<N>(row, panel * 16 + 2 * chunk + upper)) = z;
      }
    }
  }
}

template <int BYTES, int PADDED, int SIZE, int RAW_SIZE>
__device__ __forceinline__ void widen_items(
    Shared& x, half_t (&to)[STAGES][SIZE], const byte_t (&from)[RAW][RAW_SIZE], u64* raw_full, u64* raw_empty, u64* full, u64* empty) {
  int done = 0;
  for_each_item(x, [&](const volatile Item& item) {
    const int tiles = item.tiles;
    for (int n = 0; n < tiles; n++, done++) {
      const int raw = done % RAW, stage = done % STAGES, round = done / STAGES;
      await(raw_full + raw, done / RAW & 1);
      if (round) await(empty + stage, (round - 1) & 1);
      widen<BYTES, PADDED>(to[stage], from[raw]);
      see_writes();
      arrive(full + stage);
      arrive(raw_empty + raw);
    }
  });
}

#endif

/* Parts of a row tile. */

/* The rows of an item's tile that are queries. */
__device__ __forceinline__ int rows_of(const volatile Item& t) { return min_(M, t.count * G - t.r * M); }

/* Says that this warpgroup's rows of a part are written, and whether those of all other parts are: for one of them at
 * least. Where it is for several, they merge the same numbers. */
__device__ __forceinline__ bool all_ready(const Paged& a, const volatile Item& t, int role) {
  const int row = role / COLUMNS * 64, of_part = rows_of(t) * COLUMNS;
  if (rows_of(t) <= row) return false;
  warpgroup_sync(2 + role);
  int ready = 1;
  if (threadIdx.x % 128 < 32) {
    volatile u64* const first = a.ready + (t.slot + row) * COLUMNS + role % COLUMNS;
    const int lane = threadIdx.x % 32;
    if (lane == 0) {
      asm volatile("fence.acq_rel.gpu;\n" ::: "memory"); /* what all threads wrote before the barrier */
      first[t.part * of_part] = (u64)a.token;
    }
    __syncwarp();
    asm volatile("fence.sc.gpu;\n" ::: "memory"); /* of two that write, then read, one sees the other's */
    for (int c = lane; c < t.parts; c += 32) ready &= first[c * of_part] == (u64)a.token;
    asm volatile("fence.acq_rel.gpu;\n" ::: "memory"); /* what the others wrote, for the warps behind the barrier */
  }
  int all;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.s32 p, %1, 0;\nbarrier.red.and.pred q, %2, 128, p;\nselp.s32 %0, 1, 0, q;\n}\n"
      : "=r"(all)
      : "r"(ready), "r"(2 + role)
      : "memory");
  return all;
}

/* Merges this warpgroup's rows in the order of the parts: a warp takes every fourth row, AT_ONCE of them at a time. Most
 * blocks run this once at most, and wait for each line of instructions: the loops are short. */
template <int AT_ONCE>
__device__ __noinline__ void merge(const Paged& a, const volatile Item& t, int role) {
  constexpr int WIDTH = DVC % 128 ? 2 : 4, WORDS = DVC / 32 / WIDTH, OWN = WORDS * WIDTH; /* values of a lane */
  constexpr int STEP = WORDS * AT_ONCE > 8 ? 1 : WORDS == 3 ? 4 : 16 / (WORDS * AT_ONCE); /* parts whose values are on their way */
  static_assert(32 % STEP == 0, "lanes have the weights of 32 parts");
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, parts = t.parts, h = t.h, first_query = t.first;
  const int first = role / COLUMNS * 64, column = role % COLUMNS, of_part = rows_of(t), rows = min_(64, of_part - first);
  const int slot = t.slot + first, first_index = t.r * M + first + warp;
  const float2* const sums = reinterpret_cast<const float2*>(a.sums) + slot + warp;
  const float* const partial = a.partial + (number)(slot + warp) * DVP + column * DVC + lane * WIDTH;
  const float* const sinks = a.sinks;
  const number o_t = a.sizes.o_t, o_h = a.sizes.o_h, l_t = a.sizes.l_t, l_h = a.sizes.l_h;
  half_t* const out = a.out + t.b * a.sizes.o_b + column * DVC + lane * WIDTH;
  float* const lse = a.lse ? a.lse + t.b * a.sizes.l_b : nullptr;
#pragma unroll 1
  for (int c = threadIdx.x % 128; c < parts; c += 128) a.ready[(number)(slot + c * of_part) * COLUMNS + column] = 0; /* for replays */
#pragma unroll 1
  for (int row0 = 0; row0 + warp < rows; row0 += 4 * AT_ONCE) {
    float top[AT_ONCE], total[AT_ONCE], acc[AT_ONCE][OWN];
    float2 known[AT_ONCE]; /* the sums of a part of this lane */
    int row[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) row[i] = min_(row0 + 4 * i, rows - 1 - warp);
    auto look = [&](int i, int c) { return c < parts ? __ldcg(sums + c * of_part + row[i]) : make_float2(-INFINITY, 0); };
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      known[i] = look(i, lane);
      top[i] = known[i].x, total[i] = 0;
#pragma unroll
      for (int e = 0; e < OWN; e++) acc[i][e] = 0;
    }
#pragma unroll 1
    for (int c = lane + 32; c < parts; c += 32)
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) top[i] = fmaxf(top[i], look(i, c).x);
#pragma unroll 1
    for (int o = 16; o; o /= 2)
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], o));
#pragma unroll 1
    for (int c0 = 0; c0 < parts; c0 += 32) {
      float weight[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        if (c0) known[i] = look(i, c0 + lane);
        weight[i] = known[i].y == 0 ? 0 : exp2_(known[i].x - top[i]); /* parts without keys have no sums */
        total[i] += weight[i] * known[i].y;
      }
#pragma unroll 1
      for (int c1 = c0; c1 < min_(c0 + 32, parts); c1 += STEP) {
        float y[STEP][AT_ONCE][OWN];
#pragma unroll
        for (int u = 0; u < STEP; u++)
#pragma unroll
          for (int i = 0; i < AT_ONCE; i++) {
            const float* const from = partial + (number)(min_(c1 + u, parts - 1) * of_part + row[i]) * DVP;
#pragma unroll
            for (int e = 0; e < WORDS; e++) {
              float(&z)[OWN] = y[u][i];
              if (WIDTH == 4) {
                const float4 four = __ldcg(reinterpret_cast<const float4*>(from) + e * 32);
                z[e * WIDTH] = four.x, z[e * WIDTH + 1] = four.y, z[e * WIDTH + WIDTH - 2] = four.z, z[e * WIDTH + WIDTH - 1] = four.w;
              } else {
                const float2 two = __ldcg(reinterpret_cast<const float2*>(from) + e * 32);
                z[e * WIDTH] = two.x, z[e * WIDTH + 1] = two.y;
              }
            }
          }
#pragma unroll
        for (int u = 0; u < STEP; u++)
#pragma unroll
          for (int i = 0; i < AT_ONCE; i++) {
            const float w = __shfl_sync(~0u, weight[i], c1 + u - c0); /* 0 beyond the last part */
            if (w != 0) /* the sums of a part without keys may be no numbers */
#pragma unroll
              for (int e = 0; e < OWN; e++) acc[i][e] += w * y[u][i][e];
          }
      }
    }
#pragma unroll 1
    for (int o = 16; o; o /= 2)
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) total[i] += __shfl_xor_sync(~0u, total[i], o);
#pragma unroll 1
    for (int i = 0; i < AT_ONCE && row0 + 4 * i + warp < rows; i++) { /* the row is the first of the registers */
      const int index = first_index + row0 + 4 * i, head = h * G + index % G;
      const number query = first_query + index / G;
      float sum = total[0], up = top[0], factor = 1;
      if (sinks) {
        const float y = sinks[head] * LOG2E;
        up = fmaxf(fmaxf(up, y), -3e38f); /* both may be minus infinity */
        factor = exp2_(top[0] - up);
        sum = sum * factor + exp2_(y - up);
      }
      const float inverse = sum == 0 ? 0 : __fdividef(factor, sum);
      u32* const to = reinterpret_cast<u32*>(out + query * o_t + head * o_h);
#pragma unroll
      for (int e = 0; e < OWN; e += 2)
        if (DV == DVP || (e / WIDTH * 32 + lane) * WIDTH < DV)
          to[e / WIDTH * 16 * WIDTH + e % WIDTH / 2] = pack_out(acc[0][e] * inverse, acc[0][e + 1] * inverse);
      if (lse && lane == 0 && column == 0) lse[query * l_t + head * l_h] = sum == 0 ? -INFINITY : (up + __log2f(sum)) * (1 / LOG2E);
#pragma unroll
      for (int k = 1; k < AT_ONCE; k++) {
        top[k - 1] = top[k], total[k - 1] = total[k];
#pragma unroll
        for (int e = 0; e < OWN; e++) acc[k - 1][e] = acc[k][e];
      }
    }
  }
}

/* A warpgroup that computes 64 rows of each item, or its columns of them. Those that share rows compute all of their scores. */

__device__ __forceinline__ void attend(const Paged& a, Shared& x_, int role) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const float given_scale = __int_as_float((int)a.scale), cap = __int_as_float((int)a.sizes.softcap);
  const float scale = fmaxf(fabsf(given_scale), 1e-30f) * LOG2E;
  const int group = role / COLUMNS, column = role % COLUMNS, row0 = group * 64 + warp * 16 + lane / 4;
  half_t* const q_shared = x_.q[Q_SHARED ? group : 0];
  const int each = stages_of(a); /* with COLUMNS > 1, of a tile's keys and values */
  int done = 0;
  for_each_item(x_, [&](const volatile Item& t) {
    u32 q[Q_SHARED ? 1 : DP / 16][4], w[N / 16][4];
    float acc[DVC / 8][4], x[N / 8][4];
    float top[2], sum[2], less[2], unit[2]; /* `unit`: from scores to exponents of 2 */
    int limit[2], least[2];
    const int tiles = t.tiles, first_tile = t.tile;
    const int live_rows = t.count * G - t.r * M - group * 64 - warp * 16; /* of this warp's 16 */
    const bool any_live = live_rows > 0, both_live = !CACHE || GROUPS > 1 || live_rows > 8;
    if (Q_SHARED) rows_sync(role); /* the item before has read its queries */
    {
      const int h = t.h, r = t.r, count = t.count, length = t.length, diagonal = diagonal_of(a, length, count);
      float factor = 1;
#if CACHE
      if (a.k_scale) factor = a.k_scale[h * a.sizes.k_scale_h];
#endif
      const u32 sign = given_scale < 0 != factor < 0 ? 0x80008000u : 0;
      const half_t* const rows = a.q + t.b * a.sizes.q_b + t.first * a.sizes.q_t + (number)h * G * a.sizes.q_h + lane % 4 * 2;
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = r * M + row0 + 8 * e, query = row / G;
        const bool live = query < count;
        const half_t* const y = rows + (live ? query * a.sizes.q_t + row % G * a.sizes.q_h : 0);
        const bool writes = COLUMNS == 1 || e == column; /* in shared memory: others write the rest */
        u32 words[DP / 8];
#pragma unroll
        for (int i = 0; i < DP / 8; i++)
          words[i] = writes && live && (D == DP || i < D / 8) ? *reinterpret_cast<const u32*>(y + i * 8) ^ sign : 0;
        unit[e] = scale * fabsf(factor);
#if CACHE && DTYPE == 2
        /* As float16, times a power of 2 that makes the largest query of the row 1 to 2. */
        float most = 0;
#pragma unroll
        for (int i = 0; i < DP / 8; i++) most = fmaxf(most, fmaxf(fabsf(low(words[i])), fabsf(high(words[i]))));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const int exponent = within(__float_as_int(most) >> 23 & 255, 1, 253) - 127;
        const float less_ = __int_as_float((127 - exponent) << 23);
        unit[e] *= __int_as_float((127 + exponent) << 23);
#pragma unroll
        for (int i = 0; i < DP / 8; i++) words[i] = pack(low(words[i]) * less_, high(words[i]) * less_);
#endif
        if (unit[e] == 0) unit[e] = 1e-37f; /* masked scores times 0 would be NaN */
        if (writes)
#pragma unroll
        for (int i = 0; i < DP / 8; i++) {
          if (Q_SHARED) *reinterpret_cast<u32*>(q_shared + place<64>(warp * 16 + lane / 4 + 8 * e, i) + lane % 4 * 2) = words[i];
          else q[Q_SHARED ? 0 : i / 2][e + i % 2 * 2] = words[i];
        }
        /* Rows that are none have no bounds: they need no masks. Those of a tree see nothing: the mask has no row of them. */
        limit[e] = !live ? (TREE ? 0 : 0x7fffffff) : TREE ? length : limit_of(a, length, diagonal, query);
        least[e] = live ? least_of(a, diagonal, query) : 0;
        top[e] = -INFINITY, sum[e] = 0;
      }
    }
#pragma unroll
    for (int i = 0; i < DVC / 8; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) acc[i][e] = 0;
    if (Q_SHARED) see_writes(), rows_sync(role);

    auto scores = [&](int n) { /* begins to multiply q and the keys of a tile */
      const int place = (done + n) * each, stage = place % STAGES;
      await(x_.full_k + stage, place / STAGES & 1);
      see_writes();
      products_begin();
      multiply_keys(x, q, q_shared, x_.k[stage]);
      products_commit();
    };
    auto weigh = [&](int n) { /* begins to add the values of a tile */
#if COLUMNS == 1
      const int stage = (done + n) % STAGES;
      await(x_.full_v + stage, (done + n) / STAGES & 1);
      const half_t* const v = x_.v[stage];
#else
      const int place = (done + n + 1) * each - 1, stage = place % STAGES;
      await(x_.full_k + stage, place / STAGES & 1);
      const half_t* const v = x_.k[stage] + column * DVC * N;
#endif
      see_writes();
      products_begin();
      add_values(acc, w, v);
      products_commit();
    };
    auto release = [&](u64* empty, int place) {
      __syncwarp();
      if (lane == 0) arrive(empty + place % STAGES);
    };
    auto soften = [&](int n) { /* scores to weights, in place */
      less[0] = less[1] = 1;
      hold(x);
      if (!any_live) return; /* the other warps have the registers' bandwidth */
      const int key0 = (first_tile + n) * N;
      if (SOFTCAP)
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) x[j][e] = cap * tanhf(x[j][e] * (unit[e / 2] / (LOG2E * cap)));
      const bool whole = key0 + N <= (TREE ? min_(t.length - t.count, t.length) : min_(limit[0], limit[1])) && key0 >= max_(least[0], least[1]);
      if (!whole) {
        const int old = TREE ? t.length - t.count : 0; /* keys that are not new */
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int key = key0 + j * 8 + lane % 4 * 2 + (e & 1);
            bool seen = key < limit[e / 2] && key >= least[e / 2];
            if (TREE && seen && key >= old)
              seen = key - old < a.sizes.tree_n && a.tree[(t.first + (t.r * M + row0 + e / 2 * 8) / G) * a.sizes.tree_t + key - old];
            if (!seen) x[j][e] = -INFINITY;
          }
      }
      float most[2] = {top[0], top[1]}, safe[2], to_exponent[2];
#pragma unroll
      for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (e < 2 || both_live) most[e / 2] = fmaxf(most[e / 2], x[j][e]);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        if (e && !both_live) continue; /* FP8 to float16 is on the unit of exponentials, too */
        most[e] = fmaxf(most[e], __shfl_xor_sync(~0u, most[e], 1));
        most[e] = fmaxf(most[e], __shfl_xor_sync(~0u, most[e], 2));
        to_exponent[e] = SOFTCAP ? LOG2E : unit[e];
        if ((most[e] - top[e]) * to_exponent[e] > 8) { /* weights stay below 2^8 otherwise: sums need no rescaling */
          less[e] = exp2_((top[e] - most[e]) * to_exponent[e]);
          top[e] = most[e];
        }
        safe[e] = top[e] == -INFINITY ? 0.f : top[e] * to_exponent[e] - SHIFT;
        sum[e] *= less[e];
      }
#pragma unroll
      for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if (e > 1 && !both_live) continue;
          x[j][e] = exp2_(fmaf(x[j][e], to_exponent[e / 2], -safe[e / 2]));
          sum[e / 2] += x[j][e];
        }
      hold(x); /* before the wait for the values, which the compiler would put first */
    };
    auto rescale = [&]() {
      hold(acc);
      if (__any_sync(~0u, less[0] != 1.f || less[1] != 1.f))
#pragma unroll
        for (int i = 0; i < DVC / 8; i++) acc[i][0] *= less[0], acc[i][1] *= less[0], acc[i][2] *= less[1], acc[i][3] *= less[1];
    };
    auto narrow = [&]() {
#pragma unroll
      for (int j = 0; j < N / 16; j++) {
        w[j][0] = pack(x[2 * j][0], x[2 * j][1]), w[j][1] = pack(x[2 * j][2], x[2 * j][3]);
        w[j][2] = pack(x[2 * j + 1][0], x[2 * j + 1][1]), w[j][3] = pack(x[2 * j + 1][2], x[2 * j + 1][3]);
      }
    };
#if COLUMNS > 1
    for (int n = 0; n < tiles; n++) { /* one tile after the other: two at a time would leave none to the loader */
      scores(n);
      products_wait<0>();
      if (each == 2) release(x_.empty_k, 2 * (done + n));
      soften(n);
      rescale();
      narrow();
      weigh(n);
      products_wait<0>();
      hold(acc);
      release(x_.empty_k, (done + n + 1) * each - 1);
    }
    done += tiles;
#else
    for (int n = 0; n < tiles; n++) { /* values of one tile are added while weights of the next are made */
      scores(n);
      if (n) {
        weigh(n - 1);
        products_wait<1>();
      } else {
        products_wait<0>();
      }
      release(x_.empty_k, done + n);
      soften(n);
      products_wait<0>();
      if (n) release(x_.empty_v, done + n - 1);
      rescale();
      narrow();
    }
    if (tiles) {
      weigh(tiles - 1);
      products_wait<0>();
      hold(acc);
      release(x_.empty_v, done + tiles - 1);
      done += tiles;
    }
#endif

    float factor_v = 1;
    const int h = t.h;
#if CACHE
    if (a.v_scale) factor_v = a.v_scale[h * a.sizes.v_scale_h];
#endif
#pragma unroll
    for (int e = 0; e < 2; e++) {
      sum[e] += __shfl_xor_sync(~0u, sum[e], 1);
      sum[e] += __shfl_xor_sync(~0u, sum[e], 2);
      const float most = top[e] == -INFINITY ? -INFINITY : top[e] * (SOFTCAP ? LOG2E : unit[e]) - SHIFT;
      const int row = row0 + 8 * e, index = t.r * M + row, query = index / G, head = h * G + index % G;
      if (query >= t.count) continue;
      if (t.parts == 1) {
        float total = sum[e], up = most, factor = 1;
        if (a.sinks) {
          const float y = a.sinks[head] * LOG2E;
          up = fmaxf(fmaxf(most, y), -3e38f); /* both may be minus infinity */
          factor = exp2_(most - up);
          total = total * factor + exp2_(y - up);
        }
        const float inverse = total == 0 ? 0 : factor / total * factor_v;
        half_t* y = a.out + t.b * a.sizes.o_b + (t.first + query) * a.sizes.o_t + head * a.sizes.o_h + column * DVC + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < DVC / 8; i++)
          if (DV == DVP || i < DV / 8)
            *reinterpret_cast<u32*>(y + i * 8) = pack_out(acc[i][2 * e] * inverse, acc[i][2 * e + 1] * inverse);
        if (a.lse && lane % 4 == 0 && column == 0)
          a.lse[t.b * a.sizes.l_b + (t.first + query) * a.sizes.l_t + head * a.sizes.l_h] =
              total == 0 ? -INFINITY : (up + log2f(total)) / LOG2E;
      } else {
        const number place = t.slot + (number)t.part * rows_of(t) + row;
        float* y = a.partial + place * DVP + column * DVC + lane % 4 * 2;
        if (tiles)
#pragma unroll
          for (int i = 0; i < DVC / 8; i++)
            *reinterpret_cast<float2*>(y + i * 8) = make_float2(acc[i][2 * e] * factor_v, acc[i][2 * e + 1] * factor_v);
        if (lane % 4 == 0) *reinterpret_cast<float2*>(a.sums + place * 2) = make_float2(most, sum[e]);
      }
    }
    if (t.parts > 1 && all_ready(a, t, role)) {
      if (rows_of(t) - group * 64 <= 4) merge<1>(a, t, role);
      else merge<4>(a, t, role);
    }
  });
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) paged_attention(const __grid_constant__ Paged a) {
  wait_for_previous();
  Shared& x = *reinterpret_cast<Shared*>(shared);
  const int role = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(x.full_k + i, 128), barrier_init(x.full_v + i, 128);
      barrier_init(x.empty_k + i, 4 * GROUPS), barrier_init(x.empty_v + i, 4 * GROUPS);
    }
#if CACHE
    for (int i = 0; i < RAW; i++) {
      barrier_init(x.raw_full_k + i, 128), barrier_init(x.raw_full_v + i, 128);
      barrier_init(x.raw_empty_k + i, 128), barrier_init(x.raw_empty_v + i, 128);
    }
#endif
    for (int i = 0; i < RING; i++) barrier_init(x.item_full + i, 1), barrier_init(x.item_empty + i, (THREADS - 128) / 32);
  }
  __syncthreads();
  if (role == 0) {
    set_registers<LOAD_REGISTERS, false>();
    load_items(a, x);
#if CACHE
  } else if (role == GROUPS + 1) {
    set_registers<LOAD_REGISTERS, false>();
    widen_items<K_BYTES, DP>(x, x.k, x.raw_k, x.raw_full_k, x.raw_empty_k, x.full_k, x.empty_k);
  } else if (role == GROUPS + 2) {
    set_registers<LOAD_REGISTERS, false>();
    widen_items<V_BYTES, DVP>(x, x.v, x.raw_v, x.raw_full_v, x.raw_empty_v, x.full_v, x.empty_v);
#endif
  } else {
    set_registers<COMPUTE_REGISTERS, true>();
    attend(a, x, role - 1);
  }
}
