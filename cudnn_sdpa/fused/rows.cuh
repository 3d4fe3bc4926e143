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

template <int dtype>
__device__ __forceinline__ float to_float(typename Dtype<dtype>::element x) {
  if (dtype == 0) return half_to_float((unsigned short)x);
  if (dtype == 1) return bfloat16_to_float((unsigned short)x);
  return (float)x;
}

template <int dtype>
__device__ __forceinline__ typename Dtype<dtype>::element to_element(float x) {
  if (dtype == 0) return float_to_half(x);
  if (dtype == 1) return float_to_bfloat16(x);
  return (typename Dtype<dtype>::element)x;
}

template <>
__device__ __forceinline__ float to_float<2>(float x) {
  return x;
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
  typedef typename Word<word_bytes>::type word;
  union {
    word word_at[words];
    element at[UNIT];
  };

  __device__ __forceinline__ Raw() {}

  __device__ __forceinline__ void read(const void* base, number unit) {
#pragma unroll
    for (int i = 0; i < words; ++i) word_at[i] = load((const word*)base + unit * words + i);
  }

  __device__ __forceinline__ void write(void* base, number unit) const {
#pragma unroll
    for (int i = 0; i < words; ++i) store((word*)base + unit * words + i, word_at[i]);
  }

  __device__ __forceinline__ float value(int i) const { return to_float<dtype>(at[i]); }

  __device__ __forceinline__ void set(int i, float x) { at[i] = to_element<dtype>(x); }
};

__device__ __forceinline__ float float_of(number bits) {
  return float_of_bits((unsigned)bits);
}

__device__ __forceinline__ float sigmoid(float x) {
  return 1.0f / (1.0f + exp2_fast(-1.4426950408889634f * x));
}
