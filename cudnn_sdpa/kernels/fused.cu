/* Attention in one pass over the keys, on CUDA cores: the softmax is corrected as its maximum grows, so no score is kept.
 *
 * The algorithm is that of FlashAttention-2 (Dao, 2023), section 3.1. A block of THREADS threads computes BM queries,
 * BN keys at a time. While it works on scores, the values are on their way, and while it works on values, the next keys.
 * Two blocks share a multiprocessor: while one waits, the other computes.
 */
#include "registers.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2) fused_forward(const Attention a) {
  wait_for_previous();
  SHARED_MEMORY(memory);
  float* const queries = reinterpret_cast<float*>(memory);
  float* const keys = queries + BM * LD;
  float* const values = keys + BN * LD;
  float* const weights = values + BN * LD;
  const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
  const float scale = scale_of(a) * log2_e;
  const number tiles = (a.sq + BM - 1) / BM, all = tiles * a.batch * a.heads;
  for (number index = blockIdx.x; index < all; index += gridDim.x) {
    const Work work(index, tiles, a.heads, a.batch);
    const number first = work.tile * BM, head_kv = work.head / (a.heads / a.heads_kv);
    const number visible = visible_keys(a, first + BM);
    load_tile<BM>(queries, a.q, work.batch, work.head, first, a.sq, a.dim);
    load_tile<BN>(keys, a.k, work.batch, head_kv, 0, a.skv, a.dim);
    commit_copies();
    float sum[RM][CN][4] = {}, highest[RM], total[RM];
#pragma unroll
    for (int i = 0; i < RM; ++i) highest[i] = -infinity, total[i] = 0.0f;
    for (number key = 0; key < visible; key += BN) {
      load_tile<BN>(values, a.v, work.batch, head_kv, key, a.skv, a.dim);
      commit_copies();
      wait_for_copies<1>();
      __syncthreads(); /* the keys are there */
      float scores[RM][RN] = {};
      multiply_rows(scores, queries, keys, tx, ty);
      __syncthreads(); /* and may be replaced */
      if (key + BN < visible) load_tile<BN>(keys, a.k, work.batch, head_kv, key + BN, a.skv, a.dim);
      commit_copies();
      const bool all_seen = Scores(a, first, key).are_all_seen(BM, BN);
      const Scores place(a, first + ty, key + tx);
#pragma unroll
      for (int i = 0; i < RM; ++i) {
        float found = highest[i];
#pragma unroll
        for (int j = 0; j < RN; ++j) {
          scores[i][j] *= scale;
          if (!all_seen) scores[i][j] = place.masked(a, work.batch, work.head, TY * i, TX * j, scores[i][j]);
          found = fmaxf(found, scores[i][j]);
        }
        found = warp_reduce<Maximum, TX>(found);
        const float correction = safe_exp2(highest[i], found);
        highest[i] = found;
        float more = 0.0f;
#pragma unroll
        for (int j = 0; j < RN; ++j) {
          const float weight = safe_exp2(scores[i][j], found);
          more += weight;
          weights[(ty + TY * i) * LS + tx + TX * j] = weight;
        }
        total[i] = total[i] * correction + more;
#pragma unroll
        for (int c = 0; c < CN; ++c) {
#pragma unroll
          for (int d = 0; d < 4; ++d) sum[i][c][d] *= correction;
        }
      }
      wait_for_copies<1>();
      __syncthreads(); /* the values are there, and the weights */
      multiply_columns(sum, weights, values, tx, ty);
      __syncthreads(); /* and may be replaced */
    }
    wait_for_copies<0>();
    __syncthreads(); /* nothing is on its way to memory that the next tile takes */
    float inverse[RM];
#pragma unroll
    for (int i = 0; i < RM; ++i) {
      inverse[i] = safe_inverse(warp_reduce<Sum, TX>(total[i]));
      const number query = first + ty + TY * i;
      if (tx == 0 && query < a.sq) save_statistics(a, row_number(a, work.batch, work.head, query), highest[i], inverse[i]);
    }
    write_tile(a.out, work.batch, work.head, first, a.sq, a.dim, sum, inverse, tx, ty);
  }
}
