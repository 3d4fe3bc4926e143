/* The beginning of a kernel.
 *
 * From compute capability 9.0 on, launches may begin before what is ahead in the stream has ended (programmatic dependent
 * launches; PTX ISA 8.5, 9.7.13.13), which saves the host half a microsecond each. So a kernel first waits for what is
 * ahead, and for what that writes; which has waited itself, if it was launched in this way. Nothing is read by `__ldg`:
 * it takes memory for constant while the kernel exists.
 */
#ifndef CUDNN_SDPA_LAUNCH
#define CUDNN_SDPA_LAUNCH

__device__ inline void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif
