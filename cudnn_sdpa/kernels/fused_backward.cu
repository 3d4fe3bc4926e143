/* The gradients of attention on CUDA cores, from the statistics of the forward pass. */
/* No score is kept and nothing is added atomically, so results are the same from run to run.
 *
 * The formulas are those of FlashAttention-2 (Dao, 2023), section 2.3.2. One kernel goes through the queries for each tile
 * of keys, over all heads that share it; another goes through the keys for each tile of queries.
 */
#include "registers.cuh"

#if OF_KEYS /* else of queries: each is compiled for itself */

extern "C" __global__ void __launch_bounds__(THREADS) fused_grad_kv(const Attention a) {
  wait_for_previous();
  SHARED_MEMORY(memory);
  float* const keys = reinterpret_cast<float*>(memory);
  float* const values = keys + BM * LD;
  float* const queries = values + BM * LD;
  float* const grads = queries + BN * LD;
  float* const weights = grads + BN * LD;
  float* const grad_scores = weights + BM * LS;
  const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
  const float scale = scale_of(a);
  const number tiles = (a.skv + BM - 1) / BM, all = tiles * a.batch * a.heads_kv, group = a.heads / a.heads_kv;
  for (number index = blockIdx.x; index < all; index += gridDim.x) {
    const number first = index % tiles * BM, head_kv = index / tiles % a.heads_kv, batch = index / tiles / a.heads_kv;
    load_tile<BM>(keys, a.k, batch, head_kv, first, a.skv, a.dim);
    load_tile<BM>(values, a.v, batch, head_kv, first, a.skv, a.dim);
    float grad_k[RM][CN][4] = {}, grad_v[RM][CN][4] = {};
    for (number head = head_kv * group; head < (head_kv + 1) * group; ++head) {
      for (number query = CAUSAL ? first / BN * BN : 0; query < a.sq; query += BN) {
        load_tile<BN>(queries, a.q, batch, head, query, a.sq, a.dim);
        load_tile<BN>(grads, a.grad_out, batch, head, query, a.sq, a.dim);
        commit_copies();
        wait_for_copies<0>();
        __syncthreads();
        float scores[RM][RN] = {}, of_weights[RM][RN] = {};
        multiply_rows(scores, keys, queries, tx, ty);
        multiply_rows(of_weights, values, grads, tx, ty);
        const bool all_seen = Scores(a, query, first).are_all_seen(BN, BM);
        const Scores place(a, query + tx, first + ty);
#pragma unroll
        for (int j = 0; j < RN; ++j) {
          const Row row = row_at(a, batch, head, query + tx + TX * j);
#pragma unroll
          for (int i = 0; i < RM; ++i) {
            const int to = (ty + TY * i) * LS + tx + TX * j;
            float score = scores[i][j] * (scale * log2_e);
            if (!all_seen) score = place.masked(a, batch, head, TX * j, TY * i, score);
            const float weight = exp2_fast(score - row.highest) * row.inverse;
            weights[to] = weight;
            grad_scores[to] = weight * (of_weights[i][j] - row.delta);
          }
        }
        __syncwarp();
        multiply_columns(grad_v, weights, grads, tx, ty);
        multiply_columns(grad_k, grad_scores, queries, tx, ty);
        __syncthreads();
      }
    }
    commit_copies(); /* where no query sees a key of the tile */
    wait_for_copies<0>();
    __syncthreads();
    float scales[RM], ones[RM];
#pragma unroll
    for (int i = 0; i < RM; ++i) scales[i] = scale, ones[i] = 1.0f;
    write_tile(a.grad_k, batch, head_kv, first, a.skv, a.dim, grad_k, scales, tx, ty);
    write_tile(a.grad_v, batch, head_kv, first, a.skv, a.dim, grad_v, ones, tx, ty);
  }
}

#else

extern "C" __global__ void __launch_bounds__(THREADS) fused_grad_q(const Attention a) {
  wait_for_previous();
  SHARED_MEMORY(memory);
  float* const queries = reinterpret_cast<float*>(memory);
  float* const grads = queries + BM * LD;
  float* const keys = grads + BM * LD;
  float* const values = keys + BN * LD;
  float* const grad_scores = values + BN * LD;
  const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
  const float scale = scale_of(a);
  const number tiles = (a.sq + BM - 1) / BM, all = tiles * a.batch * a.heads;
  for (number index = blockIdx.x; index < all; index += gridDim.x) {
    const Work work(index, tiles, a.heads, a.batch);
    const number first = work.tile * BM, head_kv = work.head / (a.heads / a.heads_kv);
    const number visible = a.grad_scores ? a.skv : visible_keys(a, first + BM);
    load_tile<BM>(queries, a.q, work.batch, work.head, first, a.sq, a.dim);
    load_tile<BM>(grads, a.grad_out, work.batch, work.head, first, a.sq, a.dim);
    Row row[RM];
#pragma unroll
    for (int i = 0; i < RM; ++i) row[i] = row_at(a, work.batch, work.head, first + ty + TY * i);
    float grad_q[RM][CN][4] = {};
    for (number key = 0; key < visible; key += BN) {
      load_tile<BN>(keys, a.k, work.batch, head_kv, key, a.skv, a.dim);
      load_tile<BN>(values, a.v, work.batch, head_kv, key, a.skv, a.dim);
      commit_copies();
      wait_for_copies<0>();
      __syncthreads();
      float scores[RM][RN] = {}, of_weights[RM][RN] = {};
      multiply_rows(scores, queries, keys, tx, ty);
      multiply_rows(of_weights, grads, values, tx, ty);
      const bool all_seen = Scores(a, first, key).are_all_seen(BM, BN);
      const Scores place(a, first + ty, key + tx);
#pragma unroll
      for (int i = 0; i < RM; ++i) {
#pragma unroll
        for (int j = 0; j < RN; ++j) {
          float score = scores[i][j] * (scale * log2_e);
          if (!all_seen) score = place.masked(a, work.batch, work.head, TY * i, TX * j, score);
          const float found = exp2_fast(score - row[i].highest) * row[i].inverse * (of_weights[i][j] - row[i].delta);
          grad_scores[(ty + TY * i) * LS + tx + TX * j] = found;
#if MASK >= 2
          if (a.grad_scores && place.have(TY * i, TX * j)) {
            store(a.grad_scores + row_number(a, work.batch, work.head, place.query + TY * i) * a.skv + place.key + TX * j, found);
          }
#endif
        }
      }
      __syncwarp();
      multiply_columns(grad_q, grad_scores, keys, tx, ty);
      __syncthreads();
    }
    wait_for_copies<0>();
    __syncthreads();
    float scales[RM];
#pragma unroll
    for (int i = 0; i < RM; ++i) scales[i] = scale;
    write_tile(a.grad_q, work.batch, work.head, first, a.sq, a.dim, grad_q, scales, tx, ty);
  }
}

#endif
