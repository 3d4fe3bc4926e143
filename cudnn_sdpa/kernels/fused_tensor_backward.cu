/* The gradients of attention on tensor cores, from the statistics of the forward pass: float16 and bfloat16. */
/*
 * The formulas are those of FlashAttention-2 (Dao, 2023), section 2.3.2. One kernel goes through the queries for each tile
 * of keys, over all heads that share it; another goes through the keys for each tile of queries. So nothing is added
 * atomically, and results are the same from run to run. While one tile is computed, the next is on its way.
 */
#include "fragments.cuh"

#if OF_KEYS /* else of queries: each is compiled for itself */

struct Tile {
  number head, row;
};

extern "C" __global__ void __launch_bounds__(THREADS) fused_grad_kv_tensor(const Attention a) {
  wait_for_previous();
  SHARED_MEMORY(memory);
  Bits* const keys = reinterpret_cast<Bits*>(memory);
  Bits* const values = keys + BM * LD;
  Bits* const stages = values + BM * LD;                                 /* two, each of queries and then gradients */
  float* const rows = reinterpret_cast<float*>(stages + 4 * BN * LD);    /* two, of what is known of BN queries */
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = warp * 16 * ROWS;
  const float scale = scale_of(a);
  const number tiles = (a.skv + BM - 1) / BM, all = tiles * a.batch * a.heads_kv, group = a.heads / a.heads_kv;
  for (number index = blockIdx.x; index < all; index += gridDim.x) {
    const number first = index % tiles * BM, head_kv = index / tiles % a.heads_kv, batch = index / tiles / a.heads_kv;
    const number begin = CAUSAL ? first / BN * BN : 0; /* the first query that sees a key of the tile */
    float grad_k[ROWS][CN][4] = {}, grad_v[ROWS][CN][4] = {};
    auto load_stage = [&](int stage, const Tile& tile) {
      Bits* const to = stages + stage * (2 * BN * LD);
      load_tile<BN>(to, a.q, batch, tile.head, tile.row, a.sq, a.dim);
      load_tile<BN>(to + BN * LD, a.grad_out, batch, tile.head, tile.row, a.sq, a.dim);
      for (int i = threadIdx.x; i < BN; i += THREADS) {
        const Row row = row_at(a, batch, tile.head, tile.row + i);
        float* const at = rows + stage * (3 * BN) + i;
        at[0] = row.highest, at[BN] = row.inverse, at[2 * BN] = row.delta;
      }
    };
    auto after = [&](Tile tile) {
      tile.row += BN;
      if (tile.row >= a.sq) tile.row = begin, ++tile.head;
      return tile;
    };
    const number end = begin < a.sq ? (head_kv + 1) * group : 0;
    Tile tile = {head_kv * group, begin};
    int stage = 0;
    load_tile<BM>(keys, a.k, batch, head_kv, first, a.skv, a.dim);
    load_tile<BM>(values, a.v, batch, head_kv, first, a.skv, a.dim);
    if (tile.head < end) load_stage(0, tile);
    commit_copies();
    for (; tile.head < end; stage ^= 1) {
      wait_for_copies<0>();
      __syncthreads(); /* this tile is there, and all warps are done with the one before, whose place the next takes */
      const Tile next = after(tile);
      if (next.head < end) load_stage(stage ^ 1, next);
      commit_copies();
      const Bits* const queries = stages + stage * (2 * BN * LD);
      const Bits* const grads = queries + BN * LD;
      const float* const known = rows + stage * (3 * BN);
      float scores[ROWS][RN][4] = {}, of_weights[ROWS][RN][4] = {};
      multiply_rows(scores, keys, own, queries);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int n = 0; n < RN; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) scores[r][n][i] *= scale * log2_e;
        }
      }
      if (!Scores(a, tile.row, first + own).are_all_seen(BN, 16 * ROWS)) {
        const Scores place(a, tile.row + lane % 4 * 2, first + own + lane / 4);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
          for (int n = 0; n < RN; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              scores[r][n][i] = place.masked(a, batch, tile.head, 8 * n + i % 2, 16 * r + i / 2 * 8, scores[r][n][i]);
            }
          }
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int n = 0; n < RN; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int query = 8 * n + lane % 4 * 2 + i % 2;
            scores[r][n][i] = exp2_fast(scores[r][n][i] - known[query]) * known[BN + query];
          }
        }
      }
      multiply_columns(grad_v, scores, grads);
      multiply_rows(of_weights, values, own, grads);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int n = 0; n < RN; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) scores[r][n][i] *= of_weights[r][n][i] - known[2 * BN + 8 * n + lane % 4 * 2 + i % 2];
        }
      }
      multiply_columns(grad_k, scores, queries);
      tile = next;
    }
    wait_for_copies<0>();
    float scales[ROWS][2], ones[ROWS][2];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) scales[r][0] = scales[r][1] = scale, ones[r][0] = ones[r][1] = 1.0f;
    write_rows(a.grad_k, batch, head_kv, first + own, a.skv, a.dim, grad_k, scales);
    write_rows(a.grad_v, batch, head_kv, first + own, a.skv, a.dim, grad_v, ones);
    __syncthreads(); /* the next tile takes the same memory */
  }
}

#else

extern "C" __global__ void __launch_bounds__(THREADS) fused_grad_q_tensor(const Attention a) {
  wait_for_previous();
  SHARED_MEMORY(memory);
  Bits* const queries = reinterpret_cast<Bits*>(memory);
  Bits* const grads = queries + BM * LD;
  Bits* const stages = grads + BM * LD; /* two, each of keys and then values */
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = warp * 16 * ROWS;
  const float scale = scale_of(a);
  const number tiles = (a.sq + BM - 1) / BM, all = tiles * a.batch * a.heads;
  for (number index = blockIdx.x; index < all; index += gridDim.x) {
    const Work work(index, tiles, a.heads, a.batch);
    const number first = work.tile * BM, head_kv = work.head / (a.heads / a.heads_kv);
    const number visible = a.grad_scores ? a.skv : visible_keys(a, first + BM);
    float grad_q[ROWS][CN][4] = {};
    Row row[ROWS][2];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) row[r][half] = row_at(a, work.batch, work.head, first + own + 16 * r + 8 * half + lane / 4);
    }
    load_tile<BM>(queries, a.q, work.batch, work.head, first, a.sq, a.dim);
    load_tile<BM>(grads, a.grad_out, work.batch, work.head, first, a.sq, a.dim);
    load_tile<BN>(stages, a.k, work.batch, head_kv, 0, a.skv, a.dim);
    load_tile<BN>(stages + BN * LD, a.v, work.batch, head_kv, 0, a.skv, a.dim);
    commit_copies();
    int stage = 0;
    for (number key = 0; key < visible; key += BN, stage ^= 1) {
      const Bits* const keys = stages + stage * (2 * BN * LD);
      wait_for_copies<0>();
      __syncthreads(); /* this tile is there, and all warps are done with the one before, whose place the next takes */
      if (key + BN < visible) {
        Bits* const next = stages + (stage ^ 1) * (2 * BN * LD);
        load_tile<BN>(next, a.k, work.batch, head_kv, key + BN, a.skv, a.dim);
        load_tile<BN>(next + BN * LD, a.v, work.batch, head_kv, key + BN, a.skv, a.dim);
      }
      commit_copies();
      float scores[ROWS][RN][4] = {}, of_weights[ROWS][RN][4] = {};
      multiply_rows(scores, queries, own, keys);
      multiply_rows(of_weights, grads, own, keys + BN * LD);
      const bool all_seen = Scores(a, first + own, key).are_all_seen(16 * ROWS, BN);
      const Scores place(a, first + own + lane / 4, key + lane % 4 * 2);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int n = 0; n < RN; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int i_row = 16 * r + i / 2 * 8, column = 8 * n + i % 2;
            const Row& known = row[r][i / 2];
            float score = scores[r][n][i] * (scale * log2_e);
            if (!all_seen) score = place.masked(a, work.batch, work.head, i_row, column, score);
            scores[r][n][i] = exp2_fast(score - known.highest) * known.inverse * (of_weights[r][n][i] - known.delta);
#if MASK >= 2
            if (a.grad_scores && place.have(i_row, column)) {
              store(a.grad_scores + row_number(a, work.batch, work.head, place.query + i_row) * a.skv + place.key + column, scores[r][n][i]);
            }
#endif
          }
        }
      }
      multiply_columns(grad_q, scores, keys);
    }
    wait_for_copies<0>();
    float scales[ROWS][2];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) scales[r][0] = scales[r][1] = scale;
    write_rows(a.grad_q, work.batch, work.head, first + own, a.sq, a.dim, grad_q, scales);
    __syncthreads(); /* the next tile takes the same memory */
  }
}

#endif
