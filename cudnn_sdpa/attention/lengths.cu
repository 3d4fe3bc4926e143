/* Actual sequence lengths as cuDNN reads them, and for logit soft-capping the keys that each query sees.
 *
 * Blocks of 256 threads. All fields have 64 bits, so that a call is an array of numbers on the host.
 */
#include "launch.cuh"
#include "lengths.cuh"

extern "C" __global__ void correct_lengths(const Lengths a) {
  wait_for_previous();
  correct(a);
}

extern "C" __global__ void limit_rows(const Limits a) {
  wait_for_previous();
  number first = (number)blockIdx.x * blockDim.x + threadIdx.x, step = (number)gridDim.x * blockDim.x;
  for (number i = first; i < a.given.batch * a.rows; i += step) {
    number row = i % a.rows, q = queries(a.given, i / a.rows), kv = keys(a.given, i / a.rows);
    number diagonal = a.bottom_right ? row + kv - q : row;
    a.lowest[i] = (int)(diagonal > a.left ? diagonal - a.left : 0);
    a.highest[i] = (int)(row >= q ? -1 : diagonal + a.right < kv - 1 ? diagonal + a.right : kv - 1);
  }
}
