/* Actual sequence lengths as cuDNN reads them, and the keys that each query sees. All fields have 64 bits. */
#ifndef CUDNN_SDPA_LENGTHS
#define CUDNN_SDPA_LENGTHS

typedef long long number;

__device__ number within(number value, number least, number most) {
  return value < least ? least : value > most ? most : value;
}

/* What kernels are given. */
struct Given {
  const int* q;      /* (batch,), or null: all queries are there */
  const int* kv;     /* (batch,), or null: all keys are there */
  number batch;
  number max_q;      /* no sequence has more queries */
  number max_kv;
};

__device__ number queries(const Given& given, number b) {
  return given.q ? within(given.q[b], 0, given.max_q) : given.max_q;
}

__device__ number keys(const Given& given, number b) {
  return given.kv ? within(given.kv[b], 0, given.max_kv) : given.max_kv;
}

struct Lengths {
  Given given;
  int* seq_len_q;    /* (batch,), or null: the plan reads no lengths of queries */
  int* seq_len_kv;   /* (batch,), or null: the plan reads full lengths of keys */
};

/* cuDNN 9.19 writes nothing for a sequence without keys. It is passed as one without queries, whose rows cuDNN fills.
 * Decode engines ignore lengths of queries: there, a sequence without queries is passed as one without keys.
 */
__device__ void correct(const Lengths& a) {
  number first = (number)blockIdx.x * blockDim.x + threadIdx.x, step = (number)gridDim.x * blockDim.x;
  for (number b = first; b < a.given.batch; b += step) {
    number q = queries(a.given, b), kv = keys(a.given, b);
    if (!a.seq_len_q) {
      a.seq_len_kv[b] = (int)(q > 0 ? kv : 0);
      continue;
    }
    a.seq_len_q[b] = (int)(kv > 0 ? q : 0);
    if (a.seq_len_kv) a.seq_len_kv[b] = (int)(kv > 0 ? kv : 1);
  }
}

struct Limits {
  Given given;
  number rows;         /* of the plan, of each sequence */
  number left;         /* a query sees the keys from `left` before to `right` after the diagonal */
  number right;
  number bottom_right; /* whether the diagonal ends at the last query and key of each sequence */
  int* lowest;         /* (batch, rows): the first key that each query sees */
  int* highest;        /* the last one; -1 where there is no query */
};

__device__ void limit(const Limits& a) {
  number first = (number)blockIdx.x * blockDim.x + threadIdx.x, step = (number)gridDim.x * blockDim.x;
  for (number i = first; i < a.given.batch * a.rows; i += step) {
    number row = i % a.rows, q = queries(a.given, i / a.rows), kv = keys(a.given, i / a.rows);
    number diagonal = a.bottom_right ? row + kv - q : row;
    a.lowest[i] = (int)(diagonal > a.left ? diagonal - a.left : 0);
    a.highest[i] = (int)(row >= q ? -1 : diagonal + a.right < kv - 1 ? diagonal + a.right : kv - 1);
  }
}

#endif
