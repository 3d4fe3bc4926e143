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
