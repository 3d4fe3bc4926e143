/* Rows of numbers in units of up to 16 bytes.
 *
 * DTYPE and WDTYPE: 0 for float16, 1 for bfloat16, 2 for float32; of rows, and of weights. UNIT: numbers of a unit.
 */
#include "primitives.cuh"

typedef long long number;

template <int dtype>
struct Dtype {
  typedef unsigned short element;
};
template <>
struct Dtype<2> {
  typedef float element;
};

template <int bytes>
struct Word {
  typedef vec4 type;
};
template <>
struct Word<8> {
  typedef unsigned long long type;
};
template <>
struct Word<4> {
  typedef unsigned type;
};
template <>
struct Word<2> {
  typedef unsigned short type;
};
template <>
struct Word<1> {
  typedef unsigned char type;
};

template <int dtype>
__device__ __forceinline__ float to_float(typename Dtype<dtype>::element x) {
  return dtype == 0 ? half_to_float((unsigned short)x) : bfloat16_to_float((unsigned short)x);
}
template <>
__device__ __forceinline__ float to_float<2>(float x) {
  return x;
}

template <int dtype>
__device__ __forceinline__ typename Dtype<dtype>::element to_element(float x) {
  return dtype == 0 ? float_to_half(x) : float_to_bfloat16(x);
}
template <>
__device__ __forceinline__ float to_element<2>(float x) {
  return x;
}

/* A unit as it is in memory: one word, or two of weights that are wider than the rows. */
template <int dtype>
struct Raw {
  typedef typename Dtype<dtype>::element element;
  static const int bytes = UNIT * sizeof(element), word_bytes = bytes > 16 ? 16 : bytes, words = bytes / word_bytes;
  static const bool is_paired = dtype < 2 && UNIT > 1;
  typedef typename Word<word_bytes>::type word;
  union {
    word word_at[words];
    unsigned pair_at[UNIT > 1 ? UNIT / 2 : 1];
    element at[UNIT];
  };

  __device__ __forceinline__ Raw() {}

  __device__ __forceinline__ void read(const void* base, number unit) {
    const word* const from = (const word*)base + unit * words;
#pragma unroll
    for (int i = 0; i < words; ++i) word_at[i] = load(from + i);
  }

  __device__ __forceinline__ void write(void* base, number unit) const {
#pragma unroll
    for (int i = 0; i < words; ++i) store((word*)base + unit * words + i, word_at[i]);
  }

  __device__ __forceinline__ void get(float (&x)[UNIT]) const {
#pragma unroll
    for (int j = 0; j < UNIT; ++j) {
      if (is_paired && dtype == 1) { /* the upper half is a float with bits that do not count */
        x[j] = float_of_bits(j % 2 ? pair_at[j / 2] & 0xFFFF0000u : pair_at[j / 2] << 16);
      } else {
        x[j] = to_float<dtype>(at[j]);
      }
    }
  }

  __device__ __forceinline__ void set(const float (&x)[UNIT]) {
#pragma unroll
    for (int j = 0; j < UNIT; j += is_paired ? 2 : 1) {
      if (is_paired) {
        const float low = x[j], high = x[(j + 1) % UNIT];
        pair_at[j / 2] = dtype == 0 ? pack_half(low, high) : pack_bfloat16(low, high);
      } else {
        at[j] = to_element<dtype>(x[j]);
      }
    }
  }
};

/* Has a unit come from memory into the cache. */
template <int dtype>
__device__ __forceinline__ void fetch(const void* base, number unit) {
  prefetch((const typename Dtype<dtype>::element*)base + unit * UNIT);
}

__device__ __forceinline__ float float_of(number bits) {
  return float_of_bits((unsigned)bits);
}

__device__ __forceinline__ float sigmoid(float x) {
  return divide_fast(1.0f, 1.0f + exp2_fast(-1.4426950408889634f * x));
}

/* Writes a unit in E4M3. */
__device__ __forceinline__ void write_fp8(void* base, number unit, const float (&x)[UNIT], float one_over_scale) {
  union {
    Word<UNIT>::type word;
    unsigned short pair_at[UNIT > 1 ? UNIT / 2 : 1];
  };
#pragma unroll
  for (int j = 0; j < UNIT; j += 2)
    pair_at[j / 2] = pack_e4m3(x[j] * one_over_scale, j + 1 < UNIT ? x[(j + 1) % UNIT] * one_over_scale : 0.0f);
  store((Word<UNIT>::type*)base + unit, word);
}

struct Sum {
  static __device__ __forceinline__ float of(float x, float y) { return x + y; }
};

/* Of numbers that are not negative; NaN stays. */
struct Largest {
  static __device__ __forceinline__ float of(float x, float y) { return y > x || y != y ? y : x; }
};

/* A sum, or the like, over neighboring threads, of which there is a power of 2; each gets it. Within a warp no shared
 * memory is used. No memory of `parts` is used by two calls without a barrier between them. */
template <class Both, int threads, class Number>
__device__ __forceinline__ Number over_threads(Number x, Number* parts) {
#pragma unroll
  for (int apart = (threads < 32 ? threads : 32) / 2; apart > 0; apart /= 2) x = Both::of(x, shuffle_xor(x, apart));
  if (threads <= 32) return x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = threads > 32 ? threads / 32 : 1;
  if (lane == 0) parts[warp] = x;
  __syncthreads();
  x = parts[threadIdx.x / threads * warps + lane % warps]; /* there are at most 32: each part is in several lanes */
#pragma unroll
  for (int apart = warps / 2; apart > 0; apart /= 2) x = Both::of(x, shuffle_xor(x, apart));
  return x;
}

/* The sum of a column over blocks (blocks, columns), by all threads of a block, which has a thread for each of 32
 * columns and several parts; the first part gets it. Shared memory: a float for each thread. */
__device__ __forceinline__ float sum_over_blocks(const float* partial, number blocks, number columns, number column) {
  SHARED_MEMORY(of_parts);
  float* const sums = reinterpret_cast<float*>(of_parts);
  const int part = threadIdx.x / 32, parts = blockDim.x / 32;
  float sum = 0.0f;
  if (column < columns)
    for (number block = part; block < blocks; block += parts) sum += load(partial + block * columns + column);
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int other = 1; part == 0 && other < parts; ++other) sum += sums[other * 32 + threadIdx.x];
  return sum;
}
