/* Attention in three kernels that reuse what they read: tiles of operands lie in shared memory, results in registers. */
/*
 * A block of 256 threads computes 64 x 64 scores or outputs, each thread 4 x 4 of them; a block of 128 threads computes
 * one row of the softmax. Any number of blocks.
 */
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

extern "C" __global__ void __launch_bounds__(256) tiled_qk(const Attention a) {
  SHARED_MEMORY(memory);
  float* const queries = reinterpret_cast<float*>(memory); /* STEP columns of TILE rows, column by column */
  float* const keys = queries + STEP * LD;
  const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
  const number rows = (a.sq + TILE - 1) / TILE, columns = (a.skv + TILE - 1) / TILE;
  const float scale = scale_of(a) * log2_e;
  for (number index = blockIdx.x; index < rows * columns * a.heads * a.batch; index += gridDim.x) {
    const number key = index % columns * TILE, query = index / columns % rows * TILE;
    const number head = index / columns / rows % a.heads, batch = index / columns / rows / a.heads;
    if (key >= visible_keys(a, query + TILE)) continue; /* no query of the tile sees a key of it, and none is read */
    float sum[OF_THREAD][OF_THREAD] = {};
    for (number d = 0; d < a.dim; d += STEP) {
      for (int i = threadIdx.x; i < TILE * STEP; i += 256) {
        const int row = i / STEP, step = i % STEP;
        const bool there = d + step < a.dim;
        const Element* q = row_of<Element>(a.q, batch, head, query + row) + (d + step) * a.q.column;
        const Element* k = row_of<Element>(a.k, batch, head / (a.heads / a.heads_kv), key + row) + (d + step) * a.k.column;
        queries[step * LD + row] = there && query + row < a.sq ? read(q) : 0.0f;
        keys[step * LD + row] = there && key + row < a.skv ? read(k) : 0.0f;
      }
      __syncthreads();
      multiply(sum, queries, keys, tx, ty);
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < OF_THREAD; ++i) {
#pragma unroll
      for (int j = 0; j < OF_THREAD; ++j) {
        const number row = query + OF_THREAD * ty + i, column = key + OF_THREAD * tx + j;
        if (row >= a.sq || column >= a.skv) continue;
        const float score = masked(a, batch, head, row, column, sum[i][j] * scale);
        store(a.scores + row_number(a, batch, head, row) * a.skv + column, score);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(128) tiled_softmax(const Attention a) {
  SHARED_MEMORY(memory);
  float* const shared = reinterpret_cast<float*>(memory);
  for (number row = blockIdx.x; row < a.batch * a.heads * a.sq; row += gridDim.x) {
    const number query = row % a.sq, keys = visible_keys(a, query + 1);
    const number end = visible_keys(a, query / TILE * TILE + TILE); /* of what its tile of queries reads */
    float* const scores = a.scores + row * a.skv;
    float highest = -infinity, sum = 0.0f;
    for (number key = threadIdx.x; key < keys; key += blockDim.x) highest = fmaxf(highest, load_back(scores + key));
    highest = block_reduce<Maximum>(highest, shared);
    for (number key = threadIdx.x; key < keys; key += blockDim.x) sum += safe_exp2(load_back(scores + key), highest);
    const float inverse = safe_inverse(block_reduce<Sum>(sum, shared));
    for (number key = threadIdx.x; key < end; key += blockDim.x) {
      store(scores + key, key < keys ? safe_exp2(load_back(scores + key), highest) * inverse : 0.0f);
    }
    if (threadIdx.x == 0) save_statistics(a, row, highest, inverse);
  }
}

extern "C" __global__ void __launch_bounds__(256) tiled_av(const Attention a) {
  SHARED_MEMORY(memory);
  float* const weights = reinterpret_cast<float*>(memory); /* STEP keys of TILE queries, key by key */
  float* const values = weights + STEP * LD;
  const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
  const number rows = (a.sq + TILE - 1) / TILE, columns = (a.dim + TILE - 1) / TILE;
  for (number index = blockIdx.x; index < rows * columns * a.heads * a.batch; index += gridDim.x) {
    const number column = index % columns * TILE, query = index / columns % rows * TILE;
    const number head = index / columns / rows % a.heads, batch = index / columns / rows / a.heads;
    const number keys = visible_keys(a, query + TILE);
    float sum[OF_THREAD][OF_THREAD] = {};
    for (number key = 0; key < keys; key += STEP) {
      for (int i = threadIdx.x; i < TILE * STEP; i += 256) {
        const int row = i / STEP, step = i % STEP, of_value = i % TILE, of_key = i / TILE;
        const float* weight = a.scores + row_number(a, batch, head, query + row) * a.skv + key + step;
        const Element* v = row_of<Element>(a.v, batch, head / (a.heads / a.heads_kv), key + of_key);
        weights[step * LD + row] = query + row < a.sq && key + step < keys ? load(weight) : 0.0f;
        const bool there = key + of_key < keys && column + of_value < a.dim;
        values[of_key * LD + of_value] = there ? read(v + (column + of_value) * a.v.column) : 0.0f;
      }
      __syncthreads();
      multiply(sum, weights, values, tx, ty);
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < OF_THREAD; ++i) {
#pragma unroll
      for (int j = 0; j < OF_THREAD; ++j) {
        const number row = query + OF_THREAD * ty + i, d = column + OF_THREAD * tx + j;
        if (row < a.sq && d < a.dim) write(a.out, batch, head, row, d, sum[i][j]);
      }
    }
  }
}
