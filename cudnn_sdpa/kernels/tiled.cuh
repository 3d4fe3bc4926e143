/* Products of tiles of 64 x 64 numbers, whose operands pass through shared memory 16 columns at a time: any head dim.
 *
 * A block has 256 threads, and each of them 4 x 4 numbers of the product.
 */
#ifndef CUDNN_SDPA_TILED
#define CUDNN_SDPA_TILED

#include "common.cuh"

constexpr int TILE = 64, STEP = 16, SIDE = 16, OF_THREAD = TILE / SIDE;
constexpr int LD = TILE + 4; /* rows are padded by 16 bytes, so that columns lie in different banks */

/* sum += `STEP` rows of `a` times as many of `b`: 4 x 4 products of a thread. */
__device__ __forceinline__ void multiply(float (&sum)[OF_THREAD][OF_THREAD], const float* a, const float* b, int tx, int ty) {
#pragma unroll
  for (int step = 0; step < STEP; ++step) {
    const vec4 left = *reinterpret_cast<const vec4*>(a + step * LD + OF_THREAD * ty);
    const vec4 right = *reinterpret_cast<const vec4*>(b + step * LD + OF_THREAD * tx);
    const float rows[OF_THREAD] = {left.x, left.y, left.z, left.w}, columns[OF_THREAD] = {right.x, right.y, right.z, right.w};
#pragma unroll
    for (int i = 0; i < OF_THREAD; ++i) {
#pragma unroll
      for (int j = 0; j < OF_THREAD; ++j) sum[i][j] = fmaf(rows[i], columns[j], sum[i][j]);
    }
  }
}

/* sum += head vectors of queries times those of keys, with which `x` begins at row `query` and `y` at row `key`. */
__device__ __forceinline__ void multiply_heads(float (&sum)[OF_THREAD][OF_THREAD], const Strided& x, const Strided& y, number batch,
                                               number head, number head_kv, number query, number key, number sq, number skv,
                                               number dim, float* queries, float* keys) {
  const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
  for (number d = 0; d < dim; d += STEP) {
    for (int i = threadIdx.x; i < TILE * STEP; i += 256) {
      const int row = i / STEP, step = i % STEP;
      const bool there = d + step < dim;
      const Element* of_query = row_of<Element>(x, batch, head, query + row) + (d + step) * x.column;
      const Element* of_key = row_of<Element>(y, batch, head_kv, key + row) + (d + step) * y.column;
      queries[step * LD + row] = there && query + row < sq ? read(of_query) : 0.0f;
      keys[step * LD + row] = there && key + row < skv ? read(of_key) : 0.0f;
    }
    __syncthreads();
    multiply(sum, queries, keys, tx, ty);
    __syncthreads();
  }
}

/* A thread's part of a tile of head vectors, times a number. */
__device__ __forceinline__ void write_heads(const Strided& to, number batch, number head, number row, number column, number rows,
                                            number columns, const float (&sum)[OF_THREAD][OF_THREAD], float factor) {
#pragma unroll
  for (int i = 0; i < OF_THREAD; ++i) {
#pragma unroll
    for (int j = 0; j < OF_THREAD; ++j) {
      const number at = row + OF_THREAD * (threadIdx.x / SIDE) + i, d = column + OF_THREAD * (threadIdx.x % SIDE) + j;
      if (at < rows && d < columns) write(to, batch, head, at, d, sum[i][j] * factor);
    }
  }
}

/* The rows of `to` are those of `x`, weighted by all scores of a query and added. */
__device__ __forceinline__ void add_rows(const Attention& a, const float* scores, const Strided& x, const Strided& to, float factor,
                                         float* weights, float* values) {
  const number rows = (a.sq + TILE - 1) / TILE, columns = (a.dim + TILE - 1) / TILE;
  for (number index = blockIdx.x; index < rows * columns * a.heads * a.batch; index += gridDim.x) {
    const number column = index % columns * TILE, query = index / columns % rows * TILE;
    const number head = index / columns / rows % a.heads, batch = index / columns / rows / a.heads;
    const number keys = visible_keys(a, query + TILE);
    float sum[OF_THREAD][OF_THREAD] = {};
    for (number key = 0; key < keys; key += STEP) {
      for (int i = threadIdx.x; i < TILE * STEP; i += 256) {
        const int row = i / STEP, step = i % STEP, of_value = i % TILE, of_key = i / TILE;
        const float* weight = scores + row_number(a, batch, head, query + row) * a.skv + key + step;
        const Element* value = row_of<Element>(x, batch, head / (a.heads / a.heads_kv), key + of_key);
        weights[step * LD + row] = query + row < a.sq && key + step < keys ? load(weight) : 0.0f;
        const bool there = key + of_key < keys && column + of_value < a.dim;
        values[of_key * LD + of_value] = there ? read(value + (column + of_value) * x.column) : 0.0f;
      }
      __syncthreads();
      multiply(sum, weights, values, threadIdx.x % SIDE, threadIdx.x / SIDE);
      __syncthreads();
    }
    write_heads(to, batch, head, query, column, a.sq, a.dim, sum, factor);
  }
}

#endif
