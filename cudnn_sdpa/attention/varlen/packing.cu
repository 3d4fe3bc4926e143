/* Where packed sequences begin and end, as plans read it, and zeros for the rows that they do not write; for queries on
 * pages also their keys, kept within the table and the cache.
 *
 * Any number of blocks of 256 threads. All fields have 64 bits, so that a call is an array of numbers on the host.
 */
#include "slots.cuh"

/* Rows of an output that may need a value. They are made of words of 4 bytes. */
struct Rows {
  char* base;
  number row;        /* bytes from one row to the next */
  number head;       /* bytes from one head to the next */
  number heads;
  number words;      /* of one head of one row */
  number value;      /* of each word */
  number of_keys;    /* whether there is a row for each key, and not for each query */
};

struct Packing {
  const int* ends_q; /* 0, then where each sequence ends */
  const int* ends_kv;
  number given;      /* sequences of the call */
  number made;       /* sequences of the plan: those beyond the call's have no rows */
  number rows_q;     /* of the tensors: no sequence ends beyond them */
  number rows_kv;
  int* lengths_q;    /* (made,) */
  int* lengths_kv;
  number* begins;    /* (tables, made + 1) */
  number tables;
  int* begins_q;     /* (made + 1,), rows where sequences of queries begin, which never decrease; null if not wanted */
  int* begins_kv;
  number outputs;
  number everything; /* whether all rows get a value, and not only those of sequences without a counterpart */
  number stride[10]; /* of each table: elements from one row to the next */
  number is_of_keys[10];
  Rows output[4];
};

__device__ number end(const int* ends, number which, number given, number rows) {
  return within(ends[which < given ? which : given], 0, rows);
}

/* The last row where a sequence up to this one begins. */
__device__ number last_begin(const int* ends, number which, number given, number rows) {
  number found = 0;
  for (number i = 0; i <= which && i <= given; ++i) {
    number begin = end(ends, i, given, rows);
    found = begin > found ? begin : found;
  }
  return found;
}

__device__ void fill_rows(const Rows& rows, number from, number to) {
  unsigned value = (unsigned)rows.value;
  int wide = rows.words % 4 == 0;
  unsigned parts = (unsigned)(wide ? rows.words / 4 : rows.words);
  unsigned all = (unsigned)rows.heads * parts;
  for (number row = from + blockIdx.x; row < to; row += gridDim.x) {
    for (unsigned part = threadIdx.x; part < all; part += blockDim.x) {
      char* head = rows.base + row * rows.row + (number)(part / parts) * rows.head;
      if (wide) {
        ((uint4*)head)[part % parts] = make_uint4(value, value, value, value);
      } else {
        ((unsigned*)head)[part % parts] = value;
      }
    }
  }
}

__device__ void fill(const Packing& packing, number of_keys, number from, number to) {
  for (int i = 0; i < packing.outputs; ++i) {
    if (packing.output[i].of_keys == of_keys) fill_rows(packing.output[i], from, to);
  }
}

extern "C" __global__ void fill_packing(const Packing packing) {
  wait_for_previous();
  number given = packing.given, made = packing.made;
  for (number i = (number)blockIdx.x * blockDim.x + threadIdx.x; i <= made; i += (number)gridDim.x * blockDim.x) {
    number begin_q = end(packing.ends_q, i, given, packing.rows_q);
    number begin_kv = end(packing.ends_kv, i, given, packing.rows_kv);
    for (int table = 0; table < packing.tables; ++table) {
      packing.begins[table * (made + 1) + i] = packing.stride[table] * (packing.is_of_keys[table] ? begin_kv : begin_q);
    }
    if (packing.begins_q) {
      packing.begins_q[i] = (int)last_begin(packing.ends_q, i, given, packing.rows_q);
      packing.begins_kv[i] = (int)last_begin(packing.ends_kv, i, given, packing.rows_kv);
    }
    if (i < made) { /* offsets that decrease make no length below 0 */
      number length_q = end(packing.ends_q, i + 1, given, packing.rows_q) - begin_q;
      number length_kv = end(packing.ends_kv, i + 1, given, packing.rows_kv) - begin_kv;
      packing.lengths_q[i] = (int)(length_q > 0 ? length_q : 0);
      packing.lengths_kv[i] = (int)(length_kv > 0 ? length_kv : 0);
    }
  }
  if (packing.outputs == 0) return;
  if (packing.everything) {
    fill(packing, 0, 0, packing.rows_q);
    fill(packing, 1, 0, packing.rows_kv);
    return;
  }
  fill(packing, 0, 0, end(packing.ends_q, 0, given, packing.rows_q));
  fill(packing, 1, 0, end(packing.ends_kv, 0, given, packing.rows_kv));
  fill(packing, 0, end(packing.ends_q, given, given, packing.rows_q), packing.rows_q);
  fill(packing, 1, end(packing.ends_kv, given, given, packing.rows_kv), packing.rows_kv);
  if (packing.ends_q == packing.ends_kv) return; /* no sequence without a counterpart */
  for (number first = 0; first < given; first += blockDim.x) {
    number mine = first + threadIdx.x;
    int alone = 0;
    if (mine < given) {
      number length_q = end(packing.ends_q, mine + 1, given, packing.rows_q) - end(packing.ends_q, mine, given, packing.rows_q);
      number length_kv = end(packing.ends_kv, mine + 1, given, packing.rows_kv) - end(packing.ends_kv, mine, given, packing.rows_kv);
      alone = (length_q > 0) != (length_kv > 0);
    }
    if (!__syncthreads_or(alone)) continue;
    for (number i = first; i < given && i < first + blockDim.x; ++i) {
      number begin_q = end(packing.ends_q, i, given, packing.rows_q);
      number end_q = end(packing.ends_q, i + 1, given, packing.rows_q);
      number begin_kv = end(packing.ends_kv, i, given, packing.rows_kv);
      number end_kv = end(packing.ends_kv, i + 1, given, packing.rows_kv);
      if (end_q > begin_q && end_kv <= begin_kv) fill(packing, 0, begin_q, end_q);
      if (end_kv > begin_kv && end_q <= begin_q) fill(packing, 1, begin_kv, end_kv);
    }
  }
}

/* Packed queries on pages. */
struct Chunks {
  const int* ends;       /* where the queries of each sequence begin, and the last ones end */
  const int* lengths;    /* (batch,): keys of each sequence */
  const int* table;
  number table_row;      /* from one row of the table to the next */
  number batch;
  number tokens;
  number max_kv_len;     /* that the table has room for */
  number page_size;
  number pages;          /* of the cache */
  number left;           /* keys that a query sees before its own; -1: all. None before those of the first is read */
  number keys_of_entry;  /* of the table that is made: page_size, or 1 if sequences begin anywhere in a page */
  number entries;        /* from the first entry of a page to that of the next */
  number width;
  int* begins;           /* (batch + 1,), which never decrease */
  int* keys;             /* (batch,) */
  int* made;             /* the table, (batch, width) */
  Rows out;
};

/* Of `gridDim.x / batch` blocks each has a part of a sequence's table. */
extern "C" __global__ void prepare_chunks(const Chunks a) {
  wait_for_previous();
  number b = blockIdx.x % a.batch, part = blockIdx.x / a.batch, parts = gridDim.x / a.batch;
  number begin = last_begin(a.ends, b, a.batch, a.tokens), next = end(a.ends, b + 1, a.batch, a.tokens);
  if (next < begin) next = begin;
  number length = within(a.lengths[b], 0, a.max_kv_len), new_tokens = next - begin;
  number first = a.left < 0 ? 0 : within(length - new_tokens - a.left, 0, length);
  number keys = new_tokens ? within(length - first, 0, a.width * a.keys_of_entry) : 0;
  if (threadIdx.x == 0 && part == 0) {
    a.begins[b] = (int)begin;
    a.begins[b + 1] = (int)next; /* as the next sequence's block has it */
    a.keys[b] = (int)keys;
  }
  unsigned of_entry = (unsigned)a.keys_of_entry, size = (unsigned)a.page_size;
  for (number i = part * blockDim.x + threadIdx.x; i * of_entry < keys; i += parts * blockDim.x) {
    unsigned key = (unsigned)(first + i * of_entry);
    number page = within(a.table[b * a.table_row + key / size], 0, a.pages - 1);
    a.made[b * a.width + i] = (int)(page * a.entries + key % size);
  }
  fill_rows(a.out, 0, end(a.ends, 0, a.batch, a.tokens));
  fill_rows(a.out, last_begin(a.ends, a.batch, a.batch, a.tokens), a.tokens);
}
