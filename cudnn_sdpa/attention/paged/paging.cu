/* Attention over pages: what cuDNN reads besides the pages, kept within the table and the cache, and gathered pages.
 *
 * Blocks of 256 threads. All fields have 64 bits, so that a call is an array of numbers on the host.
 */
#include "slots.cuh"

/* A step that decodes: every query is a sequence of its own, with the keys that it sees. */
struct Decode {
  const int* lengths_kv; /* (batch,) */
  const int* lengths_q;  /* (batch,) or null: all queries are there */
  number batch;
  number queries;        /* of each sequence */
  number made;           /* rows of the plan, at least batch * queries; those beyond see no key */
  number max_kv_len;      /* that the table has room for */
  number page_size;
  number pages;          /* of the cache */
  number right;          /* the last key that is seen, counted from the diagonal; -1: no bound */
  number bottom_right;   /* whether the diagonal ends at the last query and key */
  int* keys;             /* (made,): how many each row sees */
  const int* table_k;
  const int* table_v;
  number row_k;          /* from one row of a table to the next */
  number row_v;
  int* to_k;             /* (made, width), or null: tables are not copied */
  int* to_v;
  number width;
  const char* q;
  number q_batch;        /* bytes from one sequence, query and head to the next */
  number q_row;
  number q_head;
  number heads;
  number words;          /* of 16 bytes, of one head */
  uint4* to_q;           /* (made, heads, words), or null: q is not copied */
};

extern "C" __global__ void prepare_decode(const Decode a) {
  wait_for_previous();
  for (number row = blockIdx.x; row < a.made; row += gridDim.x) {
    number keys = 0, b = row / a.queries, i = row % a.queries;
    int is_there = b < a.batch;
    if (is_there) {
      number length = within(a.lengths_kv[b], 0, a.max_kv_len);
      number present = a.lengths_q ? within(a.lengths_q[b], 0, a.queries) : a.queries;
      if (i < present) {
        number diagonal = (a.bottom_right ? length - present : 0) + i;
        keys = a.right < 0 ? length : within(diagonal + a.right + 1, 0, length);
      }
    }
    if (threadIdx.x == 0) a.keys[row] = (int)keys;
    if (a.to_k) {
      number used = (keys + a.page_size - 1) / a.page_size;
      for (number page = threadIdx.x; page < used; page += blockDim.x) {
        a.to_k[row * a.width + page] = (int)within(a.table_k[b * a.row_k + page], 0, a.pages - 1);
        if (a.to_v != a.to_k) a.to_v[row * a.width + page] = (int)within(a.table_v[b * a.row_v + page], 0, a.pages - 1);
      }
    }
    if (a.to_q) {
      for (number part = threadIdx.x; part < a.heads * a.words; part += blockDim.x) {
        uint4 value = make_uint4(0, 0, 0, 0);
        if (is_there) {
          const char* head = a.q + b * a.q_batch + i * a.q_row + part / a.words * a.q_head;
          value = ((const uint4*)head)[part % a.words];
        }
        a.to_q[row * a.heads * a.words + part] = value;
      }
    }
  }
}

/* Keys or values in pages. */
struct Pages {
  const char* base;
  number page;           /* bytes from one page, token and head to the next */
  number token;
  number head;
  number words;          /* of 16 bytes, of one head */
  const int* table;
  number row;            /* from one row of the table to the next */
  uint4* to;             /* (tokens, heads, words): the sequences end to end */
};

/* Gathers pages into packed sequences. */
struct Gather {
  const int* lengths_kv; /* (batch,) */
  const int* lengths_q;  /* (batch,) or null */
  number batch;
  number queries;
  number max_kv_len;
  number page_bits;      /* the page size is 2 to this power */
  number pages;
  number heads;
  int* ends_q;           /* (batch + 1,), or (2 * batch + 1,) with lengths_q: absent queries are sequences without keys */
  int* ends_kv;
  Pages of[2];
};

#define TOKENS 16        /* that a block copies at a time */
#define AT_ONCE 4        /* loads of a thread that are under way together */
#define TILE 128         /* keys that cuDNN's kernels read at a time: what follows the last one must be numbers */

/* Copies some tokens of a sequence, from `first` on, to `to` and behind it. */
__device__ void copy_tokens(const Gather& a, const Pages& pages, number b, unsigned first, unsigned tokens, uint4* to) {
  unsigned words = (unsigned)pages.words, heads = (unsigned)a.heads, of_token = heads * words, all = tokens * of_token;
  unsigned bits = (unsigned)a.page_bits, slot = (1u << bits) - 1;
  int last = (int)(a.pages - 1);
  const int* row = pages.table + b * pages.row;
  /* The places of a thread's units are counted on: divisions for each would take as long as the copy. */
  unsigned step = blockDim.x, word_step = step % words, head_step = step / words % heads, token_step = step / of_token;
  unsigned unit = threadIdx.x, word = unit % words, head = unit / words % heads, token = first + unit / of_token;
  while (unit < all) {
    uint4 held[AT_ONCE];
    unsigned start = unit;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (unit < all) {
        int page = row[token >> bits];
        page = page < 0 ? 0 : page > last ? last : page;
        const char* from = pages.base + page * pages.page + (token & slot) * pages.token + head * pages.head;
        held[i] = ((const uint4*)from)[word];
      }
      unit += step, word += word_step, head += head_step, token += token_step;
      if (word >= words) word -= words, ++head;
      if (head >= heads) head -= heads, ++token;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (start + i * step < all) to[start + i * step] = held[i];
    }
  }
}

/* Where a sequence begins; writes where it ends, once, and what follows the last one. */
__device__ number begin_of(const Gather& a, number b, number length, number part, number parts) {
  __shared__ unsigned long long before;
  if (threadIdx.x == 0) before = 0;
  __syncthreads();
  unsigned long long mine = 0;
  for (number c = threadIdx.x; c < b; c += blockDim.x) mine += within(a.lengths_kv[c], 0, a.max_kv_len);
  if (mine) atomicAdd(&before, mine);
  __syncthreads();
  number begin = (number)before;
  if (part == 0 && threadIdx.x == 0) {
    number first = b * a.queries, last = first + a.queries, end = begin + length;
    if (b == 0) a.ends_q[0] = a.ends_kv[0] = 0;
    if (a.lengths_q) {
      a.ends_q[2 * b + 1] = (int)(first + within(a.lengths_q[b], 0, a.queries));
      a.ends_q[2 * b + 2] = (int)last;
      a.ends_kv[2 * b + 1] = a.ends_kv[2 * b + 2] = (int)end;
    } else {
      a.ends_q[b + 1] = (int)last;
      a.ends_kv[b + 1] = (int)end;
    }
  }
  if (b == a.batch - 1) {
    number end = begin + length, rows = a.batch * a.max_kv_len;
    number tail = end + TILE < rows ? TILE : rows - end;
    for (int which = 0; which < 2; ++which) {
      number of_token = a.heads * a.of[which].words;
      for (number unit = part * blockDim.x + threadIdx.x; unit < tail * of_token; unit += parts * blockDim.x) {
        a.of[which].to[end * of_token + unit] = make_uint4(0, 0, 0, 0);
      }
    }
  }
  return begin;
}

/* Of two blocks one copies keys and one values. */
extern "C" __global__ void gather_pages(const Gather a) {
  wait_for_previous();
  unsigned which = blockIdx.x & 1, batch = (unsigned)a.batch;
  number b = (blockIdx.x >> 1) % batch, part = (blockIdx.x >> 1) / batch, parts = (gridDim.x >> 1) / batch;
  number length = within(a.lengths_kv[b], 0, a.max_kv_len);
  number begin = begin_of(a, b, length, 2 * part + which, 2 * parts);
  const Pages& pages = a.of[which];
  for (number first = part * TOKENS; first < length; first += parts * TOKENS) {
    unsigned tokens = (unsigned)(length - first < TOKENS ? length - first : TOKENS);
    uint4* to = pages.to + (begin + first) * a.heads * pages.words;
    copy_tokens(a, pages, b, (unsigned)first, tokens, to);
  }
}

/* New keys or values, and the pages that they go to. */
struct Move {
  const char* from;
  number batch;          /* bytes from one sequence, token and head to the next */
  number row;
  number head;
  number dim;            /* elements of one head */
  char* to;
  number page;           /* bytes from one page, slot, head and element to the next */
  number slot;
  number to_head;
  number to_element;
  const float* scale;    /* FP8 stores value / scale; null: 1 */
  number scale_step;     /* elements from one head's scale to the next: 0 if all heads share one */
  number is_wide;        /* whether the strides let 16 bytes be read, and what becomes of them be written, at a time */
};

struct Append {
  const char* slot_mapping; /* (tokens,), or null: the slots follow from lengths and tables */
  number slot_bytes;     /* of a slot's number: 4 or 8 */
  const int* lengths_kv; /* (batch,), the new tokens included */
  const int* lengths_q;  /* (batch,): how many tokens are new */
  const int* table;
  number table_row;      /* from one row of the table to the next */
  number columns;
  number batch;
  number tokens;         /* new ones of each sequence, at most */
  number page_size;
  number pages;
  number heads;
  number size;           /* bytes of a new element */
  number fp8;            /* bits of the exponent of FP8 that 16 bits become; 0: elements are copied */
  number is_bfloat16;
  number at_once;        /* tokens of a block */
  Move of[2];
};

__device__ float to_float(unsigned bits, int is_bfloat16) {
  Bits x;
  if (is_bfloat16) {
    x.bits = bits << 16;
    return x.value;
  }
  x.bits = (bits & 0x7fffu) << 13;
  if (x.bits >= 0x0f800000u) {
    x.bits |= 0x7f800000u; /* infinity or NaN */
  } else {
    x.value *= 5.192296858534828e33f; /* 2^112, between the biases of the exponents; exact, also for subnormals */
  }
  x.bits |= (bits & 0x8000u) << 16;
  return x.value;
}

/* Some elements of a head: 16 bytes if they are wide, otherwise one. */
__device__ void append_part(const Append& a, const Move& move, const char* from, char* to, unsigned head, int is_wide) {
  if (a.fp8) {
    const Divisor scale(move.scale ? move.scale[head * move.scale_step] : 1.0f);
    if (!is_wide) {
      float value = scale.of(to_float(*(const unsigned short*)from, (int)a.is_bfloat16));
      *to = (char)to_fp8_pair(value, value, (unsigned)a.fp8);
      return;
    }
    uint4 values = *(const uint4*)from;
    unsigned words[4] = {values.x, values.y, values.z, values.w};
    unsigned long long made = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low = scale.of(to_float(words[i] & 0xffffu, (int)a.is_bfloat16));
      float high = scale.of(to_float(words[i] >> 16, (int)a.is_bfloat16));
      made |= (unsigned long long)to_fp8_pair(low, high, (unsigned)a.fp8) << 16 * i;
    }
    *(unsigned long long*)to = made;
  } else if (is_wide) {
    *(uint4*)to = *(const uint4*)from;
  } else {
    for (int byte = 0; byte < a.size; ++byte) to[byte] = from[byte];
  }
}

extern "C" __global__ void append_tokens(const Append a) {
  wait_for_previous();
  unsigned parts[2], units[2], wide[2]; /* of one head and of one token */
  for (int which = 0; which < 2; ++which) {
    const Move& move = a.of[which];
    number apart = ((number)move.from & 15) | ((number)move.to & (a.fp8 ? 7 : 15));
    wide[which] = move.is_wide && !apart ? 16 / (unsigned)a.size : 1;
    parts[which] = (unsigned)move.dim / wide[which];
    units[which] = (unsigned)a.heads * parts[which];
  }
  number all = a.batch * a.tokens;
  for (number first = blockIdx.x * a.at_once; first < all; first += gridDim.x * a.at_once) {
    unsigned of_token = units[0] + units[1], count = (unsigned)within(all - first, 0, a.at_once) * of_token;
    for (unsigned unit = threadIdx.x; unit < count; unit += blockDim.x) {
      number i = first + unit / of_token, b = a.slot_mapping ? 0 : quotient(i, a.tokens), token = i - b * a.tokens;
      number slot = slot_of(a, b, token);
      if (slot < 0) continue;
      number page = quotient(slot, a.page_size);
      if (page >= a.pages) continue;
      unsigned rest = unit % of_token, which = rest >= units[0];
      if (which) rest -= units[0];
      const Move& move = a.of[which];
      unsigned head = rest / parts[which];
      number element = (number)(rest % parts[which]) * wide[which];
      const char* from = move.from + b * move.batch + token * move.row + head * move.head + element * a.size;
      char* to = move.to + page * move.page + (slot - page * a.page_size) * move.slot + head * move.to_head;
      append_part(a, move, from, to + element * move.to_element, head, wide[which] > 1);
    }
  }
}

/* Page tables as FlashInfer has them: the pages of all sequences end to end. */
struct Csr {
  const int* ends;       /* (batch + 1,): where the pages of each sequence begin and end */
  const int* ids;        /* (all,) */
  const int* last;       /* (batch,): tokens in the last page of each */
  number batch;
  number all;
  number page_size;
  number columns;
  number row;            /* from one row of the table to the next */
  int* table;            /* (batch, columns) */
  int* lengths;          /* (batch,) */
};

extern "C" __global__ void table_of_csr(const Csr a) {
  wait_for_previous();
  for (number b = blockIdx.x; b < a.batch; b += gridDim.x) {
    number begin = within(a.ends[b], 0, a.all), all = within(a.ends[b + 1] - begin, 0, a.all - begin);
    number pages = within(all, 0, a.columns), last = all > a.columns ? a.page_size : within(a.last[b], 0, a.page_size);
    for (number page = threadIdx.x; page < pages; page += blockDim.x) a.table[b * a.row + page] = a.ids[begin + page];
    if (threadIdx.x == 0) a.lengths[b] = pages ? (int)((pages - 1) * a.page_size + last) : 0;
  }
}
