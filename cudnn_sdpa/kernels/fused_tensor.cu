/* Attention in one pass over the keys, on tensor cores: float16 and bfloat16. */
/*
 * The algorithm is that of FlashAttention-2 (Dao, 2023), section 3.1. A block computes BM queries, BN keys at a time; each
 * warp its own rows, which it keeps in registers: queries, scores, weights, and output. While one tile of keys and values
 * is computed, the next is on its way.
 */
#include "fragments.cuh"

/* Scores are multiplied by the scale within exp2, which is one instruction less, unless a mask is added to them. */
constexpr bool FOLDED = MASK < 2;

/* A scale of 0 leaves a masked score minus infinity, too. */
constexpr float SMALLEST = 1e-30f;

extern "C" __global__ void __launch_bounds__(THREADS) fused_forward_tensor(const Attention a) {
  wait_for_previous();
  SHARED_MEMORY(memory);
  Bits* const queries = reinterpret_cast<Bits*>(memory);
  Bits* const stages = queries + BM * LD; /* two, each of keys and then values */
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float given = scale_of(a) * log2_e, factor = fmaxf(fabsf(given), SMALLEST);
  const number tiles = (a.sq + BM - 1) / BM, all = tiles * a.batch * a.heads;
  for (number index = blockIdx.x; index < all; index += gridDim.x) {
    const Work work(index, tiles, a.heads, a.batch);
    const number first = work.tile * BM, head_kv = work.head / (a.heads / a.heads_kv);
    const number visible = visible_keys(a, first + BM), mine = first + warp * 16 * ROWS;
    load_tile<BM>(queries, a.q, work.batch, work.head, first, a.sq, a.dim);
    load_tile<BN>(stages, a.k, work.batch, head_kv, 0, a.skv, a.dim);
    load_tile<BN>(stages + BN * LD, a.v, work.batch, head_kv, 0, a.skv, a.dim);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    Left left;
    left.load(queries, warp * 16 * ROWS);
    if (given < 0.0f) left.negate();
    float sum[ROWS][CN][4] = {}, highest[ROWS][2], total[ROWS][2];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) highest[r][half] = -infinity, total[r][half] = 0.0f;
    }
    int stage = 0;
    for (number key = 0; key < visible; key += BN, stage ^= 1) {
      const Bits* const keys = stages + stage * (2 * BN * LD);
      if (key > 0) {
        wait_for_copies<0>();
        __syncthreads(); /* this tile is there, and all warps are done with the one before, whose place the next takes */
      }
      if (key + BN < visible) {
        Bits* const next = stages + (stage ^ 1) * (2 * BN * LD);
        load_tile<BN>(next, a.k, work.batch, head_kv, key + BN, a.skv, a.dim);
        load_tile<BN>(next + BN * LD, a.v, work.batch, head_kv, key + BN, a.skv, a.dim);
      }
      commit_copies();
      float scores[ROWS][RN][4] = {};
      multiply_rows(scores, left, keys);
      if (!FOLDED) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
          for (int n = 0; n < RN; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[r][n][i] *= factor;
          }
        }
      }
      if (!Scores(a, mine, key).are_all_seen(16 * ROWS, BN)) {
        const Scores place(a, mine + lane / 4, key + lane % 4 * 2);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
          for (int n = 0; n < RN; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int row = 16 * r + i / 2 * 8, column = 8 * n + i % 2;
              scores[r][n][i] = place.masked(a, work.batch, work.head, row, column, scores[r][n][i]);
            }
          }
        }
      }
      const float multiplier = FOLDED ? factor : 1.0f;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float found = highest[r][half];
#pragma unroll
          for (int n = 0; n < RN; ++n) found = fmaxf(found, fmaxf(scores[r][n][2 * half], scores[r][n][2 * half + 1]));
          found = warp_reduce<Maximum, 4>(found);
          const float base = found == -infinity ? 0.0f : found * multiplier;
          const float correction = exp2_fast(fmaf(highest[r][half], multiplier, -base));
          highest[r][half] = found;
          float more = 0.0f;
#pragma unroll
          for (int n = 0; n < RN; ++n) {
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
              scores[r][n][i] = exp2_fast(fmaf(scores[r][n][i], multiplier, -base));
              more += scores[r][n][i];
            }
          }
          total[r][half] = total[r][half] * correction + more;
#pragma unroll
          for (int c = 0; c < CN; ++c) sum[r][c][2 * half] *= correction, sum[r][c][2 * half + 1] *= correction;
        }
      }
      multiply_columns(sum, scores, keys + BN * LD);
    }
    wait_for_copies<0>();
    float inverse[ROWS][2];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        inverse[r][half] = safe_inverse(warp_reduce<Sum, 4>(total[r][half]));
        const number query = mine + 16 * r + 8 * half + lane / 4;
        const float scaled = highest[r][half] * (FOLDED ? factor : 1.0f);
        if (lane % 4 == 0 && query < a.sq) save_statistics(a, row_number(a, work.batch, work.head, query), scaled, inverse[r][half]);
      }
    }
    write_rows(a.out, work.batch, work.head, mine, a.sq, a.dim, sum, inverse);
    __syncthreads(); /* the next tile takes the same memory */
  }
}
