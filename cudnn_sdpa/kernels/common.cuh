/* What all attention kernels share: their argument, the dtypes, masks, reductions of warps and blocks.
 *
 * Each kernel is compiled for one DTYPE (0 float32, 1 float16, 2 bfloat16), one MASK (0 none, 1 boolean, 2 to 4 additive
 * in float32, float16 or bfloat16) and with or without CAUSAL. Scores are kept times log2(e), since the GPU computes
 * powers of 2. All fields have 64 bits, so that a call is an array of numbers on the host.
 */
#ifndef CUDNN_SDPA_COMMON
#define CUDNN_SDPA_COMMON

#include "primitives.cuh"

typedef long long number;

/* A tensor of four dimensions: elements from one entry to the next, 0 where it is broadcast. */
struct Strided {
  char* base;
  number batch, head, row, column;
};

struct Attention {
  Strided q, k, v, mask, out, grad_out, grad_q, grad_k, grad_v;
  float* statistics;   /* (B, Hq, Sq, 2): the highest score times log2(e), and 1 over the sum; 0 and 0 if all is masked */
  float* scores;       /* (B, Hq, Sq, Skv), then the weights; naive and tiled */
  float* delta;        /* (B, Hq, Sq): the sum of grad_out times out */
  float* grad_scores;  /* (B, Hq, Sq, Skv), before the scale; null unless the mask's gradient is needed */
  float* lse;          /* (B, Hq, Sq): the log-sum-exp of the scores, minus infinity if all is masked; of `sdpa` */
  number batch, heads, heads_kv, sq, skv, dim;
  number scale;        /* the bits of a float */
};

constexpr float log2_e = 1.4426950408889634f;
constexpr float most_mask = 2e38f; /* finite values of a mask count as no more: beyond, times log2(e), float32 ends */
#define infinity float_of_bits(0x7F800000u)

/* Dtypes. */

struct Half {
  unsigned short bits;
};
struct Bfloat16 {
  unsigned short bits;
};

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(Half x) { return half_to_float(x.bits); }
__device__ __forceinline__ float as_float(Bfloat16 x) { return bfloat16_to_float(x.bits); }
__device__ __forceinline__ void round_to(float x, float& found) { found = x; }
__device__ __forceinline__ void round_to(float x, Half& found) { found.bits = float_to_half(x); }
__device__ __forceinline__ void round_to(float x, Bfloat16& found) { found.bits = float_to_bfloat16(x); }

#if DTYPE == 0
typedef float Element;
#elif DTYPE == 1
typedef Half Element;
#else
typedef Bfloat16 Element;
#endif

__device__ __forceinline__ float read(const float* at) { return load(at); }
__device__ __forceinline__ float read(const Half* at) { return half_to_float(load(&at->bits)); }
__device__ __forceinline__ float read(const Bfloat16* at) { return bfloat16_to_float(load(&at->bits)); }

template <class T>
__device__ __forceinline__ T* row_of(const Strided& x, number batch, number head, number row) {
  return reinterpret_cast<T*>(x.base) + batch * x.batch + head * x.head + row * x.row;
}

__device__ __forceinline__ void write(const Strided& x, number batch, number head, number row, number column, float value) {
  Element rounded;
  round_to(value, rounded);
  store(row_of<Element>(x, batch, head, row) + column * x.column, rounded);
}

/* Copies rows `first` to `first + rows` of a tensor, of DIM numbers each, to shared memory, where they are LD apart, 16
 * bytes at a time; zeros behind `limit` and behind column `dim`. A thread has one column of every few rows. */
template <int rows, int DIM, int LD, int threads, class T>
__device__ __forceinline__ void copy_tile(T* tile, const Strided& x, number batch, number head, number first, number limit, number dim) {
  constexpr int width = 16 / sizeof(T), at_once = threads / (DIM / width);
  static_assert(rows % at_once == 0, "all threads copy as often");
  const int row = threadIdx.x / (DIM / width), column = threadIdx.x % (DIM / width) * width;
  const bool within = column < dim;
  const int end = !within ? 0 : limit - first < rows ? (int)(limit - first) : rows;
  const T* const nowhere = reinterpret_cast<const T*>(x.base);
  const T* const from = within ? row_of<T>(x, batch, head, first + row) + column : nowhere;
  const number apart = at_once * x.row;
  T* const to = tile + row * LD + column;
#pragma unroll
  for (int n = 0; n < rows / at_once; ++n) {
    const bool there = row + n * at_once < end;
    copy_async(to + n * at_once * LD, there ? from + n * apart : nowhere, there ? 16 : 0);
  }
}

/* Scores. */

__device__ __forceinline__ float scale_of(const Attention& a) {
  return float_of_bits((unsigned)a.scale);
}

/* The number of keys that a causal mask leaves the queries before `end`, as each sees the keys up to its own place. */
__device__ __forceinline__ number visible_keys(const Attention& a, number end) {
#if CAUSAL
  return end < a.skv ? end : a.skv;
#else
  return a.skv;
#endif
}

#if MASK == 2
typedef float MaskElement;
#elif MASK == 3
typedef Half MaskElement;
#elif MASK == 4
typedef Bfloat16 MaskElement;
#endif

/* A score times log2(e), with the mask. */
__device__ __forceinline__ float with_mask(const Attention& a, number batch, number head, number query, number key, float score) {
#if MASK == 1
  const unsigned char* at = row_of<unsigned char>(a.mask, batch, head, query) + key * a.mask.column;
  return load(at) ? score : -infinity;
#elif MASK >= 2
  const float more = read(row_of<MaskElement>(a.mask, batch, head, query) + key * a.mask.column);
  if (more * log2_e == -infinity) return -infinity; /* finite values that float32 ends before mask a key, as in cuDNN */
  return fmaf(more > most_mask && more < infinity ? most_mask : more, log2_e, score);
#else
  return score;
#endif
}

/* The same; minus infinity where the query does not see the key. */
__device__ __forceinline__ float masked(const Attention& a, number batch, number head, number query, number key, float score) {
  if (query >= a.sq || key >= a.skv || (CAUSAL && key > query)) return -infinity;
  return with_mask(a, batch, head, query, key, score);
}

/* A number in 32 bits: beyond 2^20, which no tile reaches, another is as good. */
__device__ __forceinline__ int clamped(number x) {
  constexpr number most = 1 << 20;
  return (int)(x > most ? most : x < -most ? -most : x);
}

/* Scores of a tile, from that of a query and a key on: how many queries and keys there are, and which are seen, all in 32
 * bits. For a thread, so that its scores lie at constant distances, or for more of the tile. */
struct Scores {
  number query, key;
  int queries, keys, diagonal;

  __device__ __forceinline__ Scores(const Attention& a, number query, number key)
      : query(query), key(key), queries(clamped(a.sq - query)), keys(clamped(a.skv - key)), diagonal(clamped(query - key)) {}

  /* Whether the tensors have so many rows and columns of scores, all of which are seen. */
  __device__ __forceinline__ bool are_all_seen(int rows, int columns) const {
    return !MASK && rows <= queries && columns <= keys && (!CAUSAL || columns - 1 <= diagonal);
  }

  /* Whether the tensors have this one. */
  __device__ __forceinline__ bool have(int row, int column) const { return row < queries && column < keys; }

  /* This score times log2(e), with the mask; minus infinity where the query does not see the key. */
  __device__ __forceinline__ float masked(const Attention& a, number batch, number head, int row, int column, float score) const {
    if (!have(row, column) || (CAUSAL && column - row > diagonal)) return -infinity;
    return with_mask(a, batch, head, query + row, key + column, score);
  }
};

/* exp(x - highest), both times log2(e); 0 also where all scores of a row are minus infinity. */
__device__ __forceinline__ float safe_exp2(float x, float highest) {
  return exp2_fast(x - (highest == -infinity ? 0.0f : highest));
}

/* 1 over the sum of a row, 0 if no key is seen. */
__device__ __forceinline__ float safe_inverse(float sum) {
  return sum == 0.0f ? 0.0f : 1.0f / sum;
}

__device__ __forceinline__ number row_number(const Attention& a, number batch, number head, number query) {
  return (batch * a.heads + head) * a.sq + query;
}

__device__ __forceinline__ void save_statistics(const Attention& a, number row, float highest, float inverse) {
  if (a.lse != nullptr) store(a.lse + row, highest == -infinity ? highest : (highest - log2f(inverse)) / log2_e);
  if (a.statistics == nullptr) return; /* there will be no backward pass, or one that has the log-sum-exp */
  store(a.statistics + 2 * row, highest == -infinity ? 0.0f : highest);
  store(a.statistics + 2 * row + 1, inverse);
}

/* The tile of a block: which of `tiles`, of which head and batch entry. Causal masks leave late tiles of queries the
 * most keys, so these come first. */
struct Work {
  number tile, head, batch;

  __device__ __forceinline__ Work(number index, number tiles, number heads, number batches) {
#if CAUSAL
    const number all = heads * batches;
    tile = tiles - 1 - index / all;
    head = index % all % heads;
    batch = index % all / heads;
#else
    tile = index % tiles;
    head = index / tiles % heads;
    batch = index / tiles / heads;
#endif
  }
};

/* What the backward pass knows of a query. */
struct Row {
  float highest, inverse, delta;
};

__device__ __forceinline__ Row row_at(const Attention& a, number batch, number head, number query) {
  if (query >= a.sq) return {0.0f, 0.0f, 0.0f};
  const number row = row_number(a, batch, head, query);
  return {load(a.statistics + 2 * row), load(a.statistics + 2 * row + 1), load(a.delta + row)};
}

/* Reductions. */

struct Sum {
  __device__ static float of(float a, float b) { return a + b; }
  __device__ static float none() { return 0.0f; }
};

struct Maximum {
  __device__ static float of(float a, float b) { return fmaxf(a, b); }
  __device__ static float none() { return -infinity; }
};

/* Over groups of `lanes` lanes, a power of 2; all lanes get the result. */
template <class Operation, int lanes = 32>
__device__ __forceinline__ float warp_reduce(float x) {
#pragma unroll
  for (int apart = lanes / 2; apart > 0; apart /= 2) x = Operation::of(x, shuffle_xor(x, apart));
  return x;
}

/* Over a block of at most 1024 threads; all threads get the result. `shared` has room for 32 numbers. */
template <class Operation>
__device__ __forceinline__ float block_reduce(float x, float* shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  x = warp_reduce<Operation>(x);
  __syncthreads(); /* for readers of an earlier reduction */
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  x = lane < warps ? shared[lane] : Operation::none();
  return warp_reduce<Operation>(x);
}

#endif
