/* The gradients of attention with head dims beyond those of the fused form, in kernels that keep all weights. */
/*
 * The first computes the weights again and the gradients of the scores; the others multiply them by the operands. Nothing
 * is added atomically, so results are the same from run to run. A block of 256 threads computes 64 x 64 numbers.
 */
#include "tiled.cuh"

extern "C" __global__ void __launch_bounds__(256) tiled_grad_scores(const Attention a) {
  wait_for_previous();
  SHARED_MEMORY(memory);
  float* const left = reinterpret_cast<float*>(memory);
  float* const right = left + STEP * LD;
  const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
  const number rows = (a.sq + TILE - 1) / TILE, columns = (a.skv + TILE - 1) / TILE;
  const float scale = scale_of(a) * log2_e;
  for (number index = blockIdx.x; index < rows * columns * a.heads * a.batch; index += gridDim.x) {
    const number key = index % columns * TILE, query = index / columns % rows * TILE;
    const number head = index / columns / rows % a.heads, batch = index / columns / rows / a.heads;
    const number head_kv = head / (a.heads / a.heads_kv);
    const number dim = key < visible_keys(a, query + TILE) ? a.dim : 0; /* zeros are written where no query sees a key */
    float scores[OF_THREAD][OF_THREAD] = {}, of_weights[OF_THREAD][OF_THREAD] = {};
    multiply_heads(scores, a.q, a.k, batch, head, head_kv, query, key, a.sq, a.skv, dim, left, right);
    multiply_heads(of_weights, a.grad_out, a.v, batch, head, head_kv, query, key, a.sq, a.skv, dim, left, right);
#pragma unroll
    for (int i = 0; i < OF_THREAD; ++i) {
      const number i_query = query + OF_THREAD * ty + i;
      const Row row = row_at(a, batch, head, i_query);
#pragma unroll
      for (int j = 0; j < OF_THREAD; ++j) {
        const number i_key = key + OF_THREAD * tx + j;
        if (i_query >= a.sq || i_key >= a.skv) continue;
        const float score = masked(a, batch, head, i_query, i_key, scores[i][j] * scale);
        const float weight = exp2_fast(score - row.highest) * row.inverse;
        const number place = row_number(a, batch, head, i_query) * a.skv + i_key;
        store(a.scores + place, weight);
        store(a.grad_scores + place, weight * (of_weights[i][j] - row.delta));
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(256) tiled_grad_q(const Attention a) {
  wait_for_previous();
  SHARED_MEMORY(memory);
  float* const weights = reinterpret_cast<float*>(memory);
  add_rows(a, a.grad_scores, a.k, a.grad_q, scale_of(a), weights, weights + STEP * LD);
}

/* The rows of `to` are those of `x`, weighted by all scores of a key, of all heads that share it, and added. */
__device__ __forceinline__ void add_queries(const Attention& a, const float* scores, const Strided& x, const Strided& to,
                                            float factor, float* weights, float* queries) {
  const number rows = (a.skv + TILE - 1) / TILE, columns = (a.dim + TILE - 1) / TILE, group = a.heads / a.heads_kv;
  for (number index = blockIdx.x; index < rows * columns * a.heads_kv * a.batch; index += gridDim.x) {
    const number column = index % columns * TILE, key = index / columns % rows * TILE;
    const number head_kv = index / columns / rows % a.heads_kv, batch = index / columns / rows / a.heads_kv;
    float sum[OF_THREAD][OF_THREAD] = {};
    for (number head = head_kv * group; head < (head_kv + 1) * group; ++head) {
      for (number query = CAUSAL ? key : 0; query < a.sq; query += STEP) {
        for (int i = threadIdx.x; i < TILE * STEP; i += 256) {
          const int place = i % TILE, step = i / TILE;
          const bool there = query + step < a.sq;
          const float* weight = scores + row_number(a, batch, head, query + step) * a.skv + key + place;
          const Element* from = row_of<Element>(x, batch, head, query + step) + (column + place) * x.column;
          weights[step * LD + place] = there && key + place < a.skv ? load(weight) : 0.0f;
          queries[step * LD + place] = there && column + place < a.dim ? read(from) : 0.0f;
        }
        __syncthreads();
        multiply(sum, weights, queries, threadIdx.x % SIDE, threadIdx.x / SIDE);
        __syncthreads();
      }
    }
    write_heads(to, batch, head_kv, key, column, a.skv, a.dim, sum, factor);
  }
}

extern "C" __global__ void __launch_bounds__(256) tiled_grad_k(const Attention a) {
  wait_for_previous();
  SHARED_MEMORY(memory);
  float* const weights = reinterpret_cast<float*>(memory);
  add_queries(a, a.grad_scores, a.q, a.grad_k, scale_of(a), weights, weights + STEP * LD);
}

extern "C" __global__ void __launch_bounds__(256) tiled_grad_v(const Attention a) {
  wait_for_previous();
  SHARED_MEMORY(memory);
  float* const weights = reinterpret_cast<float*>(memory);
  add_queries(a, a.scores, a.grad_out, a.grad_v, 1.0f, weights, weights + STEP * LD);
}
