/* Products of tiles in shared memory on tensor cores, kept in registers: float16 and bfloat16.
 *
 * A warp owns ROWS tiles of 16 rows. Its results are fragments of 16 x 8 numbers: a lane has two neighboring columns of
 * row lane / 4, and the same of the row 8 below. Rounded to 16 bits, two of them side by side are an operand of the next
 * product, so weights never leave registers. Rows in shared memory are padded by 16 bytes: the 8 rows of a matrix lie in
 * different banks.
 */
#ifndef CUDNN_SDPA_FRAGMENTS
#define CUDNN_SDPA_FRAGMENTS

#include "common.cuh"

typedef unsigned short Bits;

constexpr int WARPS = THREADS / 32;
constexpr int ROWS = BM / (16 * WARPS); /* tiles of 16 rows of a warp */
constexpr int STEPS = DP / 16;          /* of a product over head vectors */
constexpr int CN = DP / 8;              /* fragments of a head vector */
constexpr int RN = BN / 8;              /* fragments of a row of scores */
constexpr int LD = DP + 8;              /* from one head vector to the next */

__device__ __forceinline__ unsigned pack(float low, float high) {
#if DTYPE == 1
  return pack_half(low, high);
#else
  return pack_bfloat16(low, high);
#endif
}

__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if DTYPE == 1
  multiply_add_half(c, a, b0, b1);
#else
  multiply_add_bfloat16(c, a, b0, b1);
#endif
}

/* Rows `first` to `first + rows` of a tensor, zeros behind `limit` and behind the last column. */
template <int rows>
__device__ __forceinline__ void load_tile(Bits* tile, const Strided& x, number batch, number head, number first, number limit, number dim) {
#if VECTORS
  copy_tile<rows, DP, LD, THREADS>(tile, x, batch, head, first, limit, dim);
#else
  for (int i = threadIdx.x; i < rows * DP; i += THREADS) {
    const int row = i / DP, column = i % DP;
    const bool there = first + row < limit && column < dim;
    tile[row * LD + column] = there ? load(row_of<Bits>(x, batch, head, first + row) + column * x.column) : (Bits)0;
  }
#endif
}

/* 16 rows and 16 columns as a left operand. */
__device__ __forceinline__ void load_left(unsigned (&found)[4], const Bits* tile, int row, int column) {
  const int lane = threadIdx.x % 32;
  load_matrices(found, tile + (row + lane % 16) * LD + column + lane / 16 * 8);
}

/* 16 rows, over whose 16 columns a product sums, as right operands: words 0 and 1 of the first 8 rows, 2 and 3 of others. */
__device__ __forceinline__ void load_right(unsigned (&found)[4], const Bits* tile, int row, int column) {
  const int lane = threadIdx.x % 32;
  load_matrices(found, tile + (row + lane / 16 * 8 + lane % 8) * LD + column + lane / 8 % 2 * 8);
}

/* 16 rows, over which a product sums, as right operands: words 0 and 1 of the first 8 columns, 2 and 3 of others. */
__device__ __forceinline__ void load_right_transposed(unsigned (&found)[4], const Bits* tile, int row, int column) {
  const int lane = threadIdx.x % 32;
  load_matrices_transposed(found, tile + (row + lane % 16) * LD + column + lane / 16 * 8);
}

/* The head vectors of a warp's rows. */
struct Left {
  unsigned words[ROWS][STEPS][4];

  __device__ __forceinline__ void load(const Bits* tile, int first) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) load_left(words[r][step], tile, first + 16 * r, 16 * step);
    }
  }

  __device__ __forceinline__ void negate() {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[r][step][i] ^= 0x80008000u;
      }
    }
  }
};

/* sum += rows of the left operand times rows of `tile`, both head vectors. */
__device__ __forceinline__ void multiply_rows(float (&sum)[ROWS][RN][4], const Left& left, const Bits* tile) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
#pragma unroll
    for (int n = 0; n < RN / 2; ++n) {
      unsigned right[4];
      load_right(right, tile, 16 * n, 16 * step);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        multiply_add(sum[r][2 * n], left.words[r][step], right[0], right[1]);
        multiply_add(sum[r][2 * n + 1], left.words[r][step], right[2], right[3]);
      }
    }
  }
}

/* The same with a left operand that stays in shared memory, rows from `first` on. */
__device__ __forceinline__ void multiply_rows(float (&sum)[ROWS][RN][4], const Bits* left, int first, const Bits* tile) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    unsigned words[ROWS][4];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) load_left(words[r], left, first + 16 * r, 16 * step);
#pragma unroll
    for (int n = 0; n < RN / 2; ++n) {
      unsigned right[4];
      load_right(right, tile, 16 * n, 16 * step);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        multiply_add(sum[r][2 * n], words[r], right[0], right[1]);
        multiply_add(sum[r][2 * n + 1], words[r], right[2], right[3]);
      }
    }
  }
}

/* sum += weights, rounded to 16 bits, times head vectors. */
__device__ __forceinline__ void multiply_columns(float (&sum)[ROWS][CN][4], const float (&weights)[ROWS][RN][4], const Bits* tile) {
#pragma unroll
  for (int step = 0; step < RN / 2; ++step) {
    unsigned left[ROWS][4];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float(&one)[4] = weights[r][2 * step], (&other)[4] = weights[r][2 * step + 1];
      left[r][0] = pack(one[0], one[1]);
      left[r][1] = pack(one[2], one[3]);
      left[r][2] = pack(other[0], other[1]);
      left[r][3] = pack(other[2], other[3]);
    }
#pragma unroll
    for (int c = 0; c < CN / 2; ++c) {
      unsigned right[4];
      load_right_transposed(right, tile, 16 * step, 16 * c);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        multiply_add(sum[r][2 * c], left[r], right[0], right[1]);
        multiply_add(sum[r][2 * c + 1], left[r], right[2], right[3]);
      }
    }
  }
}

/* A warp's rows, each half of a fragment times a number, to rows from `first` on. */
__device__ __forceinline__ void write_rows(const Strided& to, number batch, number head, number first, number limit, number dim,
                                           const float (&sum)[ROWS][CN][4], const float (&factor)[ROWS][2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const number row = first + 16 * r + 8 * half + lane / 4;
      if (row >= limit) continue;
#pragma unroll
      for (int c = 0; c < CN; ++c) {
        const int column = 8 * c + lane % 4 * 2;
        const float low = sum[r][c][2 * half] * factor[r][half], high = sum[r][c][2 * half + 1] * factor[r][half];
#if VECTORS
        if (column < dim) store(reinterpret_cast<unsigned*>(row_of<Bits>(to, batch, head, row) + column), pack(low, high));
#else
        if (column < dim) write(to, batch, head, row, column, low);
        if (column + 1 < dim) write(to, batch, head, row, column + 1, high);
#endif
      }
    }
  }
}

#endif
