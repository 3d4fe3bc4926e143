/* The attention to all keys, from the results for parts of them: a row of the output by the threads of its words.
 *
 * DTYPE: 0 for float16, 1 for bfloat16, 2 for float32.
 */
#include "primitives.cuh"

typedef long long number;

#define PARTS 64 /* as in merge_states.py */

#if DTYPE == 2
typedef float element;
#else
typedef unsigned short element;
#endif

struct Merge {
  const char* outs[64];
  const char* lses[64];
  number parts;
  number rows;           /* of all dimensions but the last */
  number middle;         /* sizes of the second and of the third of three dimensions, which make the rows */
  number inner;
  number dim;
  number from[3];        /* bytes from row to row of an output along each of them */
  number lse[3];         /* of an LSE */
  number into[3];        /* of the result */
  number is_wide;        /* whether 16 bytes are read and written at a time */
  char* out;
  float* total;          /* (rows,) */
};

__device__ __forceinline__ float to_float(element x) {
#if DTYPE == 0
  return half_to_float(x);
#elif DTYPE == 1
  return bfloat16_to_float(x);
#else
  return x;
#endif
}

__device__ __forceinline__ element from_float(float x) {
#if DTYPE == 0
  return float_to_half(x);
#elif DTYPE == 1
  return float_to_bfloat16(x);
#else
  return x;
#endif
}

struct alignas(16) Word {
  element at[16 / sizeof(element)];
};

__device__ __forceinline__ number quotient(number a, number b) {
  return (a | b) >> 32 ? a / b : (number)((unsigned)a / (unsigned)b);
}

/* Some elements of a row, all of the same word. */
template <class Unit, int COUNT>
__device__ void merge(const Merge& a, number row, number unit) {
  const number of_outer = quotient(row, a.inner), last = row - of_outer * a.inner;
  const number outer = quotient(of_outer, a.middle), mid = of_outer - outer * a.middle;
  const number from = outer * a.from[0] + mid * a.from[1] + last * a.from[2] + unit * (number)sizeof(Unit);
  const number of_lse = outer * a.lse[0] + mid * a.lse[1] + last * a.lse[2];
  const number into = outer * a.into[0] + mid * a.into[1] + last * a.into[2] + unit * (number)sizeof(Unit);
  float most = -float_of_bits(0x7F800000u), sum = 0.0f;
  for (number part = 0; part < a.parts; ++part) {
    const float lse = *(const float*)(a.lses[part] + of_lse);
    if (lse > most || lse != lse) most = lse; /* nothing is larger than NaN, and NaN stays */
  }
  const bool is_finite = most - most == 0.0f;
  for (number part = 0; part < a.parts; ++part) {
    sum += expf(*(const float*)(a.lses[part] + of_lse) - most); /* not used if the largest one is not finite */
  }
  const float total = is_finite ? most + logf(sum) : most;
  float merged[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) merged[i] = 0.0f;
  for (number part = 0; part < a.parts; ++part) {
    const float lse = *(const float*)(a.lses[part] + of_lse);
    if (lse == -float_of_bits(0x7F800000u)) continue; /* whatever its output holds */
    const float weight = expf(lse - total);
    const Unit found = *(const Unit*)(a.outs[part] + from);
    const element* const elements = (const element*)&found;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) merged[i] += weight * to_float(elements[i]);
  }
  Unit made;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) ((element*)&made)[i] = from_float(merged[i]);
  *(Unit*)(a.out + into) = made;
  if (unit == 0) a.total[row] = total;
}

extern "C" __global__ void merge_states(const Merge a) {
  wait_for_previous();
  const int wide = 16 / sizeof(element);
  const number units = a.is_wide ? a.dim / wide : a.dim, all = a.rows * units, step = (number)gridDim.x * blockDim.x;
  for (number i = (number)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += step) {
    const number row = quotient(i, units), unit = i - row * units;
    if (a.is_wide) {
      merge<Word, wide>(a, row, unit);
    } else {
      merge<element, 1>(a, row, unit);
    }
  }
}
