/* Rotary position embedding of heads, of which RMSNorm comes first where there is a weight; and the gradients.
 *
 * OF_ROW threads share a head, a power of 2 up to 32, and compute HEADS heads of a token one after the other, with the
 * same angles. A head has SLOTS slots of two units: ROTATED ones of features that are rotated together, then those of
 * features that are not. Each thread has HELD slots. A block has THREADS threads; of those that sum gradients of weights
 * a multiprocessor has BLOCKS. INTERLEAVED: a pair is two neighboring features, not one of each half. FP8: results are in
 * E4M3 with a given scale for queries and one for keys. APPEND: keys, and values as they are, go into the slots of
 * tokens; with FP8, the bits of its exponent, divided by scales of their own. Other macros: see rows.cuh.
 */
#include "rows.cuh"
#include "slots.cuh"

#define ROWS (THREADS / OF_ROW)
#define DIM (2 * UNIT * SLOTS)

/* Heads in any order of memory; units from one to the next. */
struct Heads {
  void* base;
  number batch;
  number head;
  number token;
};

struct Rope {
  Heads q;               /* backward: null if no head is normalized, as is k */
  Heads k;
  Heads grad_q;          /* backward: of the results */
  Heads grad_k;
  Heads out_q;           /* or the gradient of q */
  Heads out_k;
  const float* cos;      /* (batch or 1, tokens, rotated / 2) */
  const float* sin;
  const void* q_weight;  /* null: these heads are not normalized */
  const void* k_weight;
  void* grad_q_weight;
  void* grad_k_weight;
  const float* q_scale;  /* with FP8, as are the next three */
  const float* k_scale;
  float* q_amax;
  float* k_amax;
  float* partial;        /* (blocks, dim): the sums of each block over its heads; with FP8 (blocks, 2): its amax */
  Heads v;               /* with APPEND, as is all up to the pages */
  const float* v_scale;  /* with FP8, as is k_scale; or null: 1 */
  number k_scale_step;   /* from one head's scale to the next: 0 if all heads share one */
  number v_scale_step;
  Heads out_v;           /* pages, as is out_k: a batch entry is a page */
  const char* slot_mapping;
  const int* lengths_kv;
  const int* lengths_q;
  const int* table;
  number slot_bytes;
  number table_row;
  number columns;
  number page_size;
  number pages;
  number batch;
  number tokens;
  number heads_q;
  number heads_k;
  number cos_batch;      /* units from the angles of a sequence to those of the next; 0 if they are the same */
  number blocks;         /* whose sums are there */
  number blocks_q;       /* backward: those of queries, before those of keys */
  number eps;            /* the bits of a float, as is the next one */
  number shift;          /* is added to the weights */
};

/* By value: an address would have the argument copied to memory of the thread. */
__device__ __forceinline__ Heads heads_of(bool is_q, Heads q, Heads k) {
  return {is_q ? q.base : k.base, is_q ? q.batch : k.batch, is_q ? q.head : k.head, is_q ? q.token : k.token};
}

/* Of a token: queries, keys, and values if these go into pages, too. */
__device__ __forceinline__ number all_heads(const Rope& a) {
  return a.heads_q + (1 + APPEND) * a.heads_k;
}

/* The units of a slot. */
struct Slot {
  number first, second;

  __device__ __forceinline__ explicit Slot(int slot) {
    const bool is_apart = !INTERLEAVED && slot < ROTATED;
    first = is_apart ? slot : 2 * slot, second = first + (is_apart ? ROTATED : 1);
  }
};

/* Both units of a slot. */
struct Pairs {
  float first[UNIT], second[UNIT];

  __device__ __forceinline__ void rotate(const float (&cos)[UNIT], const float (&sin)[UNIT], float sign) {
#pragma unroll
    for (int j = 0; j < UNIT; ++j) {
      float& x = !INTERLEAVED ? first[j] : 2 * j < UNIT ? first[2 * j] : second[2 * j - UNIT];
      float& y = !INTERLEAVED ? second[j] : 2 * j + 1 < UNIT ? first[2 * j + 1] : second[2 * j + 1 - UNIT];
      const float was = x;
      x = was * cos[j] - sign * y * sin[j], y = y * cos[j] + sign * was * sin[j];
    }
  }
};

struct RawPairs {
  Raw<DTYPE> first, second;

  __device__ __forceinline__ void read(const void* base, number row, const Slot& slot) {
    first.read(base, row + slot.first), second.read(base, row + slot.second);
  }

  __device__ __forceinline__ void get(Pairs& pairs) const { first.get(pairs.first), second.get(pairs.second); }

  __device__ __forceinline__ void write(void* base, number row, const Slot& slot, const Pairs& pairs) {
    first.set(pairs.first), second.set(pairs.second);
    first.write(base, row + slot.first), second.write(base, row + slot.second);
  }
};

#if FP8 && APPEND
/* Divided by the scale; in pages, which may begin anywhere. */
__device__ __forceinline__ void write_to_page(void* base, number unit, const float (&x)[UNIT], const Divisor& scale) {
  union {
    Word<UNIT>::type word;
    unsigned char at[UNIT];
  };
#pragma unroll
  for (int j = 0; j < UNIT; j += 2) {
    const int next = j + 1 < UNIT ? j + 1 : j;
    const unsigned pair = to_fp8_pair(scale.of(x[j]), scale.of(x[next]), FP8);
    at[next] = (unsigned char)(pair >> 8), at[j] = (unsigned char)pair;
  }
  if ((number)base % UNIT) {
    for (int j = 0; j < UNIT; ++j) store((unsigned char*)base + unit * UNIT + j, at[j]);
  } else {
    store((Word<UNIT>::type*)base + unit, word);
  }
}
#endif

struct RawWeights {
  Raw<WDTYPE> first, second;

  __device__ __forceinline__ void read(const void* base, const Slot& slot) {
    first.read(base, slot.first), second.read(base, slot.second);
  }

  __device__ __forceinline__ void get(Pairs& pairs, float shift) const {
    first.get(pairs.first), second.get(pairs.second);
#pragma unroll
    for (int j = 0; j < UNIT; ++j) pairs.first[j] += shift, pairs.second[j] += shift;
  }
};

/* The heads that a group of threads computes. */
struct Group {
  number batch, token, head;

  __device__ __forceinline__ Group(const Rope& a, number index) {
    const number groups = (all_heads(a) + HEADS - 1) / HEADS, of_tokens = quotient(index, groups);
    batch = quotient(of_tokens, a.tokens), token = of_tokens - batch * a.tokens;
    head = (index - of_tokens * groups) * HEADS;
  }

  static __device__ __forceinline__ number count(const Rope& a) {
    return a.batch * a.tokens * ((all_heads(a) + HEADS - 1) / HEADS);
  }

  __device__ __forceinline__ number row(const Rope& a, const Heads& of, number at) const {
    return batch * of.batch + token * of.token + number_of(a, at) * of.head;
  }

  /* Among the queries, the keys or the values. */
  static __device__ __forceinline__ number number_of(const Rope& a, number at) {
    const number of_k = at - a.heads_q;
    return at < a.heads_q ? at : APPEND && of_k >= a.heads_k ? of_k - a.heads_k : of_k;
  }
};

struct Angles {
  Raw<2> cos[HELD], sin[HELD];

  __device__ __forceinline__ void read(const void* of_cos, const void* of_sin, number first, int lane) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      const int slot = lane + i * OF_ROW;
      if (slot < ROTATED) cos[i].read(of_cos, first + slot), sin[i].read(of_sin, first + slot);
    }
  }

  __device__ __forceinline__ void rotate(int i, int slot, Pairs& pairs, float sign) const {
    float of_cos[UNIT], of_sin[UNIT];
    cos[i].get(of_cos), sin[i].get(of_sin);
    if (slot < ROTATED) pairs.rotate(of_cos, of_sin, sign);
  }
};

/* The sum over the threads of a head. */
__device__ __forceinline__ float sum_of_head(float x) {
  return over_threads<Sum, OF_ROW>(x, (float*)nullptr);
}

__device__ __forceinline__ float square_of(const Pairs& x) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < UNIT; ++j) sum += x.first[j] * x.first[j], sum += x.second[j] * x.second[j];
  return sum;
}

__device__ __forceinline__ float largest_of(const Pairs& x) {
  float most = 0.0f;
#pragma unroll
  for (int j = 0; j < UNIT; ++j) most = Largest::of(Largest::of(most, fabsf(x.first[j])), fabsf(x.second[j]));
  return most;
}

#define FOR_SLOTS(i, slot)                         \
  _Pragma("unroll") for (int i = 0; i < HELD; ++i) \
    for (int slot = lane + i * OF_ROW; slot < SLOTS; slot = SLOTS)

#define FOR_HEADS(h) _Pragma("unroll") for (int h = 0; h < HEADS; ++h)

/* Rotates forward, or backward the gradients of results, which are those of q and k if no head is normalized. */
template <bool is_backward>
__device__ __forceinline__ void rotate_all(const Rope& a) {
  const int lane = threadIdx.x % OF_ROW;
  const number asked = (number)blockIdx.x * ROWS + threadIdx.x / OF_ROW, count = Group::count(a);
  const bool is_there = asked < count;
  const Group group(a, is_there ? asked : count - 1);
  const float shift = float_of(a.shift);
  RawPairs raw[HEADS][HELD];
  FOR_HEADS(h) {
    const number head = group.head + h;
    if (head >= all_heads(a)) break;
    Heads from = heads_of(head < a.heads_q, is_backward ? a.grad_q : a.q, is_backward ? a.grad_k : a.k);
    if (APPEND) from = heads_of(head < a.heads_q + a.heads_k, from, a.v);
    FOR_SLOTS(i, slot) raw[h][i].read(from.base, group.row(a, from, head), Slot(slot));
  }
  Angles angles;
  angles.read(a.cos, a.sin, group.batch * a.cos_batch + group.token * ROTATED, lane);
#if APPEND
  const number place = slot_of(a, group.batch, group.token);
#endif
#if FP8 && !APPEND
  const float over_q = 1.0f / load(a.q_scale), over_k = a.k_scale ? 1.0f / load(a.k_scale) : 1.0f;
  float most_q = 0.0f, most_k = 0.0f;
#endif
  FOR_HEADS(h) {
    const number head = group.head + h;
    const bool is_head = is_there && head < all_heads(a), is_q = head < a.heads_q;
    const bool is_v = APPEND && head >= a.heads_q + a.heads_k;
    const void* const weight = is_v ? nullptr : is_q ? a.q_weight : a.k_weight;
    float scale = 1.0f;
    if (!is_backward && (a.q_weight || a.k_weight)) {
      float sum = 0.0f;
      if (is_head)
        FOR_SLOTS(i, slot) {
          Pairs x;
          raw[h][i].get(x);
          sum += square_of(x);
        }
      sum = sum_of_head(sum);
      if (weight) scale = rsqrt_fast(sum / (float)DIM + float_of(a.eps));
    }
    if (!is_head) continue;
#if APPEND
    const Heads to = heads_of(is_q, a.out_q, heads_of(is_v, a.out_v, a.out_k));
    const number page = quotient(place, a.page_size);
    if (!is_q && (place < 0 || page >= a.pages)) continue;
    const number of_kind = Group::number_of(a, head);
    const number row = is_q ? group.row(a, to, head)
                            : page * to.batch + (place - page * a.page_size) * to.token + of_kind * to.head;
#if FP8
    const float* const scales = is_v ? a.v_scale : a.k_scale;
    const Divisor of_page(is_q || !scales ? 1.0f : load(scales + of_kind * (is_v ? a.v_scale_step : a.k_scale_step)));
#endif
#else
    const Heads to = heads_of(is_q, a.out_q, a.out_k);
    const number row = group.row(a, to, head);
#endif
    FOR_SLOTS(i, slot) {
      Pairs x;
      raw[h][i].get(x);
      if (!is_backward && weight) {
        RawWeights read;
        read.read(weight, Slot(slot));
        Pairs factor;
        read.get(factor, shift);
#pragma unroll
        for (int j = 0; j < UNIT; ++j)
          x.first[j] *= scale * factor.first[j], x.second[j] *= scale * factor.second[j];
      }
      if (!is_v) angles.rotate(i, slot, x, is_backward ? -1.0f : 1.0f);
#if FP8 && APPEND
      if (is_q) {
        raw[h][i].write(to.base, row, Slot(slot), x);
      } else { /* rounded first, as `rope` does */
        const Slot at(slot);
        raw[h][i].first.set(x.first), raw[h][i].second.set(x.second);
        raw[h][i].get(x);
        write_to_page(to.base, row + at.first, x.first, of_page);
        write_to_page(to.base, row + at.second, x.second, of_page);
      }
#elif FP8
      const Slot at(slot);
      write_fp8(to.base, row + at.first, x.first, is_q ? over_q : over_k);
      write_fp8(to.base, row + at.second, x.second, is_q ? over_q : over_k);
      const float most = largest_of(x);
      if (is_q) { /* no index, which would put them into memory */
        most_q = Largest::of(most_q, most);
      } else {
        most_k = Largest::of(most_k, most);
      }
#else
      raw[h][i].write(to.base, row, Slot(slot), x);
#endif
    }
  }
#if FP8 && !APPEND
  SHARED_MEMORY(memory);
  float* const parts = reinterpret_cast<float*>(memory);
  most_q = over_threads<Largest, THREADS>(most_q, parts);
  most_k = over_threads<Largest, THREADS>(most_k, parts + THREADS / 32);
  if (threadIdx.x < 2) store(a.partial + 2 * (number)blockIdx.x + threadIdx.x, threadIdx.x ? most_k : most_q);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) rotate(const Rope a) {
  wait_for_previous();
  rotate_all<false>(a);
}

#if FP8 && !APPEND
/* The amax of all blocks: a block for queries, and one for keys. */
extern "C" __global__ void __launch_bounds__(512) largest_of_blocks(const Rope a) {
  wait_for_previous();
  SHARED_MEMORY(memory);
  float most = 0.0f;
  for (number block = threadIdx.x; block < a.blocks; block += 512)
    most = Largest::of(most, load(a.partial + 2 * block + blockIdx.x));
  most = over_threads<Largest, 512>(most, reinterpret_cast<float*>(memory));
  if (threadIdx.x == 0) store(blockIdx.x ? a.k_amax : a.q_amax, most);
}
#elif !APPEND
extern "C" __global__ void __launch_bounds__(THREADS) rotate_back(const Rope a) {
  wait_for_previous();
  rotate_all<true>(a);
}

/* The tokens of a group of threads, which computes the same heads of each. All is less than 2^31: a plan's tensors have
 * no more numbers. */
struct Walk {
  unsigned head, batch, token; /* where it begins */
  unsigned batches, tokens;    /* from one of its tokens to the next */
  unsigned first, apart;       /* the same, in tokens of the whole batch */

  __device__ __forceinline__ Walk(const Rope& a, bool is_q) {
    const unsigned groups = unsigned(is_q ? a.heads_q : a.heads_k) / HEADS;
    const unsigned blocks = is_q ? a.blocks_q : a.blocks - a.blocks_q, block = blockIdx.x - (is_q ? 0 : a.blocks_q);
    const unsigned index = block * ROWS + threadIdx.x / OF_ROW;
    first = index / groups, apart = blocks * ROWS / groups;
    head = (index - first * groups) * HEADS;
    batch = first / (unsigned)a.tokens, token = first - batch * (unsigned)a.tokens;
    batches = apart / (unsigned)a.tokens, tokens = apart - batches * (unsigned)a.tokens;
  }
};

/* Where the current token is: at a thread's first unit, whose number `unit` is. */
struct Place {
  void* base;
  int unit;
  unsigned at, head, step, wrap;

  __device__ __forceinline__ Place(const Rope& a, const Walk& walk, const Heads& of, int unit)
      : base(of.base), unit(unit), head(of.head), wrap(of.batch - a.tokens * of.token) {
    at = walk.batch * of.batch + walk.token * of.token + walk.head * of.head + unit;
    step = walk.batches * of.batch + walk.tokens * of.token;
  }

  __device__ __forceinline__ number row(int h) const { return (number)(at + h * head) - unit; }

  __device__ __forceinline__ void advance(bool is_wrapped) { at += step + (is_wrapped ? wrap : 0); }
};

/* Two sums for each head over its threads, side by side, so that none waits for another. */
__device__ __forceinline__ void sum_over_heads(float (&x)[HEADS], float (&y)[HEADS]) {
#pragma unroll
  for (int apart = OF_ROW / 2; apart > 0; apart /= 2) {
    float of_x[HEADS], of_y[HEADS];
    FOR_HEADS(h) of_x[h] = shuffle_xor(x[h], apart), of_y[h] = shuffle_xor(y[h], apart);
    FOR_HEADS(h) x[h] += of_x[h], y[h] += of_y[h];
  }
}

/* Gradients of heads of which some are normalized, and of the weights: first blocks of queries, then of keys. What the
 * next token needs is read before the current one is computed. */
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gradients(const Rope a) {
  wait_for_previous();
  const int lane = threadIdx.x % OF_ROW;
  const bool is_q = blockIdx.x < a.blocks_q;
  const void* const weight = is_q ? a.q_weight : a.k_weight;
  Walk walk(a, is_q);
  const int unit = Slot(lane).first;
  Place x(a, walk, heads_of(is_q, a.q, a.k), unit), grad(a, walk, heads_of(is_q, a.grad_q, a.grad_k), unit);
  Place out(a, walk, heads_of(is_q, a.out_q, a.out_k), unit), angle(a, walk, {nullptr, a.cos_batch, 0, ROTATED}, lane);
  const unsigned tokens = a.tokens, count = a.batch * tokens;
  RawPairs raw[HEADS][HELD], raw_grad[HEADS][HELD];
  Angles angles;
  const auto read = [&] {
    FOR_HEADS(h) FOR_SLOTS(i, slot) {
      if (weight) raw[h][i].read(x.base, x.row(h), Slot(slot));
      raw_grad[h][i].read(grad.base, grad.row(h), Slot(slot));
    }
    angles.read(a.cos, a.sin, angle.row(0), lane);
  };
  bool is_there = walk.first < walk.apart && walk.first < count;
  if (is_there) read();
  Pairs factors[HELD], of_weight[HELD] = {};
  FOR_SLOTS(i, slot) {
    RawWeights weights;
    if (weight) weights.read(weight, Slot(slot));
    weights.get(factors[i], float_of(a.shift));
  }
  for (unsigned begin = 0; begin < count; begin += walk.apart) {
    Pairs heads[HEADS][HELD], grads[HEADS][HELD];
    FOR_HEADS(h) FOR_SLOTS(i, slot) {
      raw[h][i].get(heads[h][i]), raw_grad[h][i].get(grads[h][i]);
      angles.rotate(i, slot, grads[h][i], -1.0f);
    }
    walk.token += walk.tokens;
    const bool is_wrapped = walk.token >= tokens, was_there = is_there;
    if (is_wrapped) walk.token -= tokens;
    x.advance(is_wrapped), grad.advance(is_wrapped), angle.advance(is_wrapped);
    is_there = is_there && walk.first + walk.apart < count - begin;
    if (is_there) read();
    float squares[HEADS], products[HEADS];
    FOR_HEADS(h) {
      squares[h] = products[h] = 0.0f;
      FOR_SLOTS(i, slot) {
        squares[h] += square_of(heads[h][i]);
#pragma unroll
        for (int j = 0; j < UNIT; ++j) {
          products[h] += grads[h][i].first[j] * factors[i].first[j] * heads[h][i].first[j];
          products[h] += grads[h][i].second[j] * factors[i].second[j] * heads[h][i].second[j];
        }
      }
    }
    if (weight) sum_over_heads(squares, products);
    if (was_there)
      FOR_HEADS(h) {
        const float scale = rsqrt_fast(squares[h] * (1.0f / DIM) + float_of(a.eps));
        const float along = scale * products[h] * (1.0f / DIM);
        FOR_SLOTS(i, slot) {
          Pairs& of_head = grads[h][i];
          if (weight) {
#pragma unroll
            for (int j = 0; j < UNIT; ++j) {
              const float first = scale * heads[h][i].first[j], second = scale * heads[h][i].second[j];
              of_weight[i].first[j] += of_head.first[j] * first;
              of_weight[i].second[j] += of_head.second[j] * second;
              of_head.first[j] = scale * (of_head.first[j] * factors[i].first[j] - first * along);
              of_head.second[j] = scale * (of_head.second[j] * factors[i].second[j] - second * along);
            }
          }
          RawPairs().write(out.base, out.row(h), Slot(slot), of_head);
        }
      }
    out.advance(is_wrapped);
  }
  /* The sums of the block's groups, (ROWS, DIM), each written by its thread and then added up. */
  SHARED_MEMORY(memory);
  float* const sums = reinterpret_cast<float*>(memory);
  FOR_SLOTS(i, slot) {
    float* const mine = sums + threadIdx.x / OF_ROW * DIM;
#pragma unroll
    for (int j = 0; j < UNIT; ++j) {
      mine[Slot(slot).first * UNIT + j] = of_weight[i].first[j];
      mine[Slot(slot).second * UNIT + j] = of_weight[i].second[j];
    }
  }
  __syncthreads();
  for (int column = threadIdx.x; column < DIM; column += THREADS) {
    float sum = 0.0f;
    for (int other = 0; other < ROWS; ++other) sum += sums[other * DIM + column];
    store(a.partial + (number)blockIdx.x * DIM + column, sum);
  }
}

/* The sums of all blocks: a block for each 32 columns, first of q's weight, then of k's. */
extern "C" __global__ void __launch_bounds__(512) sum_blocks(const Rope a) {
  wait_for_previous();
  const unsigned of_kind = (DIM + 31) / 32, is_k = blockIdx.x >= of_kind;
  void* const to = is_k ? a.grad_k_weight : a.grad_q_weight;
  if (!to) return;
  const number column = (blockIdx.x - is_k * of_kind) * 32 + threadIdx.x % 32;
  const float* const partial = a.partial + is_k * a.blocks_q * DIM;
  const float sum = sum_over_blocks(partial, is_k ? a.blocks - a.blocks_q : a.blocks_q, DIM, column);
  if (threadIdx.x < 32 && column < DIM) store((Dtype<WDTYPE>::element*)to + column, to_element<WDTYPE>(sum));
}
#endif
