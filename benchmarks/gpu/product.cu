// A kernel that stands in for a matrix product. Only the speed of fused multiply-adds limits it: it
// uses the GPU's multiprocessors, but not its memory. Each thread computes eight independent sums,
// so that it does not have to wait for the result of a multiply-add before it starts the next one.
extern "C" __global__ void benchmark_product(float* out, int times, float by, float plus) {
  float sums[8];
  for (int i = 0; i < 8; ++i) sums[i] = static_cast<float>(threadIdx.x + i);
  for (int n = 0; n < times; ++n) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = __fmaf_rn(sums[i], by, plus);
  }
  float sum = 0;
  for (int i = 0; i < 8; ++i) sum += sums[i];
  if (sum == 0.5f) *out = sum;  // Never happens, but the compiler must keep the sums.
}
