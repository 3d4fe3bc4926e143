/* Products of tiles in shared memory on CUDA cores, kept in registers: float32 of any size.
 *
 * A block has 16 rows of TX threads. A thread owns the rows ty, ty + 16, ... of a tile, and of their columns those that
 * begin at tx: tx, tx + TX, ... of scores, and 4 tx to 4 tx + 3 of every 4 TX of a head vector. So the rows that a warp
 * writes are those that it reads, and 8 lanes read 8 different banks of 16 bytes. Rows are padded by 16 bytes.
 */
#ifndef CUDNN_SDPA_REGISTERS
#define CUDNN_SDPA_REGISTERS

#include "common.cuh"

constexpr int TY = 16;
constexpr int TX = THREADS / TY;
constexpr int RM = BM / TY;       /* rows of a thread */
constexpr int RN = BN / TX;       /* columns of scores of a thread */
constexpr int CN = DP / (4 * TX); /* groups of 4 columns of a head vector of a thread */
constexpr int LD = DP + 4;        /* from one head vector to the next */
constexpr int LS = BN + 4;        /* from one row of scores to the next */

__device__ __forceinline__ vec4 at(const float* row) { return *reinterpret_cast<const vec4*>(row); }

/* Rows `first` to `first + rows` of a tensor in float32, zeros behind `limit` and behind the last column. */
template <int rows>
__device__ __forceinline__ void load_tile(float* tile, const Strided& x, number batch, number head, number first, number limit, number dim) {
#if VECTORS && DTYPE == 0
  copy_tile<rows, DP, LD, THREADS>(tile, x, batch, head, first, limit, dim);
#else
  for (int i = threadIdx.x; i < rows * DP; i += THREADS) {
    const int row = i / DP, column = i % DP;
    const bool there = first + row < limit && column < dim;
    tile[row * LD + column] = there ? read(row_of<Element>(x, batch, head, first + row) + column * x.column) : 0.0f;
  }
#endif
}

/* sum += rows of `a` times rows of `b`, both head vectors. */
__device__ __forceinline__ void multiply_rows(float (&sum)[RM][RN], const float* a, const float* b, int tx, int ty) {
#pragma unroll 4
  for (int d = 0; d < DP; d += 4) {
    vec4 rows[RM];
#pragma unroll
    for (int i = 0; i < RM; ++i) rows[i] = at(a + (ty + TY * i) * LD + d);
#pragma unroll
    for (int j = 0; j < RN; ++j) {
      const vec4 other = at(b + (tx + TX * j) * LD + d);
#pragma unroll
      for (int i = 0; i < RM; ++i) {
        sum[i][j] = fmaf(rows[i].x, other.x, sum[i][j]);
        sum[i][j] = fmaf(rows[i].y, other.y, sum[i][j]);
        sum[i][j] = fmaf(rows[i].z, other.z, sum[i][j]);
        sum[i][j] = fmaf(rows[i].w, other.w, sum[i][j]);
      }
    }
  }
}

__device__ __forceinline__ void add_scaled(float (&sum)[4], float factor, const vec4& x) {
  sum[0] = fmaf(factor, x.x, sum[0]);
  sum[1] = fmaf(factor, x.y, sum[1]);
  sum[2] = fmaf(factor, x.z, sum[2]);
  sum[3] = fmaf(factor, x.w, sum[3]);
}

/* sum += weights times head vectors. */
__device__ __forceinline__ void multiply_columns(float (&sum)[RM][CN][4], const float* weights, const float* b, int tx, int ty) {
#pragma unroll 2
  for (int key = 0; key < BN; key += 4) {
    vec4 rows[RM];
#pragma unroll
    for (int i = 0; i < RM; ++i) rows[i] = at(weights + (ty + TY * i) * LS + key);
#pragma unroll
    for (int c = 0; c < CN; ++c) {
      const float* column = b + key * LD + 4 * (TX * c + tx);
      const vec4 x0 = at(column), x1 = at(column + LD), x2 = at(column + 2 * LD), x3 = at(column + 3 * LD);
#pragma unroll
      for (int i = 0; i < RM; ++i) {
        add_scaled(sum[i][c], rows[i].x, x0);
        add_scaled(sum[i][c], rows[i].y, x1);
        add_scaled(sum[i][c], rows[i].z, x2);
        add_scaled(sum[i][c], rows[i].w, x3);
      }
    }
  }
}

/* A thread's part of a tile, each row times a number, to rows from `first` on. */
__device__ __forceinline__ void write_tile(const Strided& to, number batch, number head, number first, number limit, number dim,
                                           const float (&sum)[RM][CN][4], const float (&factor)[RM], int tx, int ty) {
#pragma unroll
  for (int i = 0; i < RM; ++i) {
    const number row = first + ty + TY * i;
    if (row >= limit) continue;
#pragma unroll
    for (int c = 0; c < CN; ++c) {
      const int column = 4 * (TX * c + tx);
      const float(&x)[4] = sum[i][c];
#if VECTORS && DTYPE == 0
      if (column < dim) {
        vec4* at = reinterpret_cast<vec4*>(row_of<float>(to, batch, head, row) + column);
        store(at, vec4{x[0] * factor[i], x[1] * factor[i], x[2] * factor[i], x[3] * factor[i]});
      }
#else
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        if (column + d < dim) write(to, batch, head, row, column + d, x[d] * factor[i]);
      }
#endif
    }
  }
}

#endif
