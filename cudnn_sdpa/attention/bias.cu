/* `attn_mask` as the bias that cuDNN adds to the scores: dense, a boolean mask as 0 and minus infinity.
 *
 * Any number of blocks of 256 threads. All fields have 64 bits, so that a call is an array of numbers on the host.
 */
#include "launch.cuh"
#include "lengths.cuh"

struct Mask {
  const char* base;
  number batch;    /* bytes from one batch entry, head, row and column to the next; 0 where the mask is repeated */
  number head;
  number row;
  number column;
  number heads;    /* of the bias */
  number rows;
  number columns;
  number elements; /* of the bias: (batch, heads, rows, columns), dense */
  number size;     /* of an element of the mask, in bytes: 1 for a boolean mask, whose bias has 2; others are copied */
  number masked;   /* minus infinity in the dtype of a boolean mask's bias */
  char* bias;
};

/* Where an element of the bias is: its batch entry, head, row and column. */
struct Position {
  number batch, head, row, column;
};

/* In 32 bits where they suffice: divisions of 64 bits would take longer than all else. */
template <class Index>
__device__ Position divided(const Mask& mask, Index element) {
  Index columns = (Index)mask.columns, rows = (Index)mask.rows, heads = (Index)mask.heads;
  Index row = element / columns, head = row / rows, batch = head / heads;
  return {(number)batch, (number)(head - batch * heads), (number)(row - head * rows), (number)(element - row * columns)};
}

__device__ const char* address_of(const Mask& mask, const Position& at) {
  return mask.base + at.batch * mask.batch + at.head * mask.head + at.row * mask.row + at.column * mask.column;
}

__device__ void to_next_row(const Mask& mask, Position& at) {
  at.column = 0;
  if (++at.row < mask.rows) return;
  at.row = 0;
  if (++at.head < mask.heads) return;
  at.head = 0, ++at.batch;
}

__device__ void read(const Mask& mask, const char* from, unsigned short& to) {
  to = mask.size == 1 ? (unsigned short)(*from ? 0 : mask.masked) : *(const unsigned short*)from;
}

__device__ void read(const Mask&, const char* from, unsigned& to) { to = *(const unsigned*)from; }

/* Each thread writes 16 bytes at a time: the elements of a row and, where that ends, of the next ones. */
template <class To>
__device__ void convert(const Mask& mask) {
  const int WIDE = 16 / sizeof(To);
  To* bias = (To*)mask.bias;
  number begin = ((number)blockIdx.x * blockDim.x + threadIdx.x) * WIDE, step = (number)gridDim.x * blockDim.x * WIDE;
  for (number first = begin; first < mask.elements; first += step) {
    union {
      uint4 all;
      To each[WIDE];
    } held;
    number left = mask.elements - first;
    Position at = mask.elements < (1ll << 32) ? divided(mask, (unsigned)first) : divided(mask, (unsigned long long)first);
    const char* from = address_of(mask, at);
#pragma unroll
    for (int i = 0; i < WIDE; ++i) {
      if (i < left) {
        read(mask, from, held.each[i]);
        from += mask.column;
        if (++at.column == mask.columns) {
          to_next_row(mask, at);
          from = address_of(mask, at);
        }
        if (left < WIDE) bias[first + i] = held.each[i];
      }
    }
    if (left >= WIDE) *(uint4*)(bias + first) = held.all;
  }
}

__device__ void convert_any(const Mask& mask) {
  if (mask.size == 4) {
    convert<unsigned>(mask);
  } else {
    convert<unsigned short>(mask);
  }
}

extern "C" __global__ void make_bias(const Mask mask) {
  wait_for_previous();
  convert_any(mask);
}

/* What would be two launches: one saves the host and the GPU the other. */
struct MaskAndLengths {
  Mask mask;
  Lengths lengths;
};

extern "C" __global__ void make_bias_and_lengths(const MaskAndLengths a) {
  wait_for_previous();
  correct(a.lengths);
  convert_any(a.mask);
}

struct MaskAndLimits {
  Mask mask;
  Limits limits;
};

extern "C" __global__ void make_bias_and_limits(const MaskAndLimits a) {
  wait_for_previous();
  limit(a.limits);
  convert_any(a.mask);
}
