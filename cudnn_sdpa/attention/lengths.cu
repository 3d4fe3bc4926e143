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
  limit(a);
}
