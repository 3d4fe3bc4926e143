/* Slots of new tokens in pages: given for each, or from page tables and lengths; and their numbers in FP8.
 *
 * An argument has `slot_mapping` and `slot_bytes`, or a null pointer and `lengths_kv`, `lengths_q`, `table`, `table_row` and
 * `columns`; and `page_size`.
 */
#include "launch.cuh"

typedef long long number;

__device__ number within(number value, number least, number most) {
  return value < least ? least : value > most ? most : value;
}

__device__ number quotient(number a, number b) {
  return (a | b) >> 32 ? a / b : (number)((unsigned)a / (unsigned)b);
}

/* Where a token goes; negative: nowhere. */
template <class Argument>
__device__ number slot_of(const Argument& a, number b, number token) {
  if (a.slot_mapping)
    return a.slot_bytes == 8 ? ((const number*)a.slot_mapping)[token] : (number)((const int*)a.slot_mapping)[token];
  number added = a.lengths_q[b], position = a.lengths_kv[b] - added + token;
  if (token >= added || position < 0) return -1;
  number column = quotient(position, a.page_size);
  if (column >= a.columns) return -1;
  number page = a.table[b * a.table_row + column];
  return page < 0 ? -1 : page * a.page_size + position - column * a.page_size;
}

union Bits {
  unsigned bits;
  float value;
};

/* To the nearest number of FP8, ties to even; the largest one beyond it, and NaN for NaN. As integers, for GPUs without
 * an instruction for it; PyTorch's conversion gives the same bits. */
__device__ unsigned to_fp8(float value, unsigned exponent) {
  unsigned mantissa = 7 - exponent, dropped = 23 - mantissa, bias = (1u << (exponent - 1)) - 1;
  unsigned largest = exponent == 4 ? 0x43e00000u : 0x47600000u; /* 448, 57344 */
  Bits x, least;
  x.value = value;
  unsigned sign = x.bits >> 24 & 0x80u;
  x.bits &= 0x7fffffffu;
  if (x.bits > 0x7f800000u) return sign | 0x7f;
  if (x.bits > largest) x.bits = largest;
  if (x.bits < (128 - bias) << 23) { /* subnormal: the sum's last bit is the smallest number */
    least.bits = (128 - bias + dropped) << 23;
    x.value += least.value;
    return sign | (x.bits - least.bits);
  }
  x.bits += ((bias - 127) << 23) + (1u << (dropped - 1)) - 1 + (x.bits >> dropped & 1);
  return sign | x.bits >> dropped;
}

/* Two of them, the first in the lower bits; the sign of NaN is any. */
__device__ inline unsigned to_fp8_pair(float low, float high, unsigned exponent) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  unsigned short pair;
  if (exponent == 4) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  }
  return pair;
#else
  return to_fp8(low, exponent) | to_fp8(high, exponent) << 8;
#endif
}

/* Divides by a scale: a product with one over it, and a correction, which take a third of a division's code. A power of 2
 * before keeps the scale, and one over it, within what float32 holds. */
struct Divisor {
  float power, scale, one_over;

  __device__ inline explicit Divisor(float given) {
    Bits x;
    x.value = given;
    const unsigned exponent = x.bits >> 23 & 255u;
    x.bits = exponent < 254 ? (254 - exponent) << 23 : 1u << 23;
    power = x.value;
    scale = exponent < 255 ? given * power : 1.0f; /* a product with one over infinity or NaN is the quotient */
    one_over = 1.0f / (exponent < 255 ? scale : given);
  }

  __device__ inline float of(float x) const {
    x *= power;
    const float near = x * one_over, corrected = fmaf(fmaf(-near, scale, x), one_over, near);
    return fabsf(near) > 0.0f && fabsf(near) < 1e38f ? corrected : near; /* keeps the sign of 0; larger quotients saturate anyway */
  }
};
