/* Slots of new tokens in pages: given for each, or from page tables and lengths.
 *
 * An argument has `slot_mapping` and `slot_bytes`, or a null pointer and `lengths_kv`, `lengths_q`, `table`, `table_row` and
 * `columns`; and `page_size`.
 */
#include "launch.cuh"

typedef long long number;

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
