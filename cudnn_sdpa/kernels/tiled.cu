/* Attention in three kernels that reuse what they read: tiles of operands are in shared memory, results in registers. */
/*
 * A block of 256 threads computes 64 x 64 scores or outputs, each thread 4 x 4 of them; a block of 128 threads computes
 * one row of the softmax. Any number of blocks.
 */
#include "tiled.cuh"

extern "C" __global__ void __launch_bounds__(256) tiled_qk(const Attention a) {
  wait_for_previous();
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
    const number head_kv = head / (a.heads / a.heads_kv);
    multiply_heads(sum, a.q, a.k, batch, head, head_kv, query, key, a.sq, a.skv, a.dim, queries, keys);
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
  wait_for_previous();
  SHARED_MEMORY(memory);
  float* const shared = reinterpret_cast<float*>(memory);
  for (number row = blockIdx.x; row < a.batch * a.heads * a.sq; row += gridDim.x) {
    const number query = row % a.sq, keys = visible_keys(a, query + 1);
    const number end = visible_keys(a, query / TILE * TILE + TILE); /* of what its tile of queries reads */
    float* const scores = a.scores + row * a.skv;
    float highest = -infinity, sum = 0.0f;
    for (number key = threadIdx.x; key < keys; key += blockDim.x) highest = fmaxf(highest, load(scores + key));
    highest = block_reduce<Maximum>(highest, shared);
    for (number key = threadIdx.x; key < keys; key += blockDim.x) sum += safe_exp2(load(scores + key), highest);
    const float inverse = safe_inverse(block_reduce<Sum>(sum, shared));
    for (number key = threadIdx.x; key < end; key += blockDim.x) {
      store(scores + key, key < keys ? safe_exp2(load(scores + key), highest) * inverse : 0.0f);
    }
    if (threadIdx.x == 0) save_statistics(a, row, highest, inverse);
  }
}

extern "C" __global__ void __launch_bounds__(256) tiled_av(const Attention a) {
  wait_for_previous();
  SHARED_MEMORY(memory);
  float* const weights = reinterpret_cast<float*>(memory); /* STEP keys of TILE queries, key by key */
  add_rows(a, a.scores, a.v, a.out, 1.0f, weights, weights + STEP * LD);
}
