/* `attn_mask` as the bias that cuDNN adds to the scores: dense, a boolean mask as 0 and minus infinity.
 *
 * Any number of blocks of 256 threads. All fields have 64 bits, so that a call is an array of numbers on the host.
 */

typedef long long number;

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

template <class Index>
__device__ const char* begin_of(const Mask& mask, Index row) {
  Index rows = (Index)mask.rows, heads = (Index)mask.heads, head = row / rows;
  return mask.base + head / heads * mask.batch + head % heads * mask.head + row % rows * mask.row;
}

__device__ void read(const Mask& mask, const unsigned char* from, unsigned short& to) {
  to = (unsigned short)(*from ? 0 : mask.masked);
}

__device__ void read(const Mask&, const unsigned short* from, unsigned short& to) { to = *from; }

__device__ void read(const Mask&, const unsigned* from, unsigned& to) { to = *from; }

/* Each thread writes 16 bytes at a time: the elements of a row and, where that ends, of the next ones. */
template <class From, class To, class Index>
__device__ void convert(const Mask& mask) {
  const int WIDE = 16 / sizeof(To);
  Index elements = (Index)mask.elements, columns = (Index)mask.columns;
  Index step = (Index)gridDim.x * blockDim.x * WIDE;
  To* bias = (To*)mask.bias;
  for (Index first = ((Index)blockIdx.x * blockDim.x + threadIdx.x) * WIDE; first < elements; first += step) {
    union {
      uint4 all;
      To each[WIDE];
    } held;
    Index row = first / columns, column = first % columns;
    const char* from = begin_of(mask, row) + column * mask.column;
#pragma unroll
    for (int i = 0; i < WIDE; ++i) {
      if (first + i < elements) {
        if (column == columns) column = 0, from = begin_of(mask, ++row);
        read(mask, (const From*)from, held.each[i]);
        ++column, from += mask.column;
      }
    }
    if (first + WIDE <= elements) {
      *(uint4*)(bias + first) = held.all;
    } else {
#pragma unroll
      for (int i = 0; i < WIDE; ++i) {
        if (first + i < elements) bias[first + i] = held.each[i];
      }
    }
  }
}

/* With indices of 32 bits where they suffice: divisions of 64 bits would take longer than the rest. */
template <class From, class To>
__device__ void convert_any(const Mask& mask) {
  if (mask.elements < (1ll << 31)) {
    convert<From, To, unsigned>(mask);
  } else {
    convert<From, To, unsigned long long>(mask);
  }
}

extern "C" __global__ void make_bias(const Mask mask) {
  if (mask.size == 1) {
    convert_any<unsigned char, unsigned short>(mask);
  } else if (mask.size == 2) {
    convert_any<unsigned short, unsigned short>(mask);
  } else {
    convert_any<unsigned, unsigned>(mask);
  }
}
