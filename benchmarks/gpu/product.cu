// Stands for a matrix product: bound by fused multiply-adds, which take a GPU's multiprocessors and
// none of its memory. Each thread has eight independent sums, so that it need not wait for one.
extern "C" __global__ void benchmark_product(float* out, int times, float by, float plus) {
  float sums[8];
  for (int i = 0; i < 8; ++i) sums[i] = static_cast<float>(threadIdx.x + i);
  for (int n = 0; n < times; ++n) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = __fmaf_rn(sums[i], by, plus);
  }
  float sum = 0;
  for (int i = 0; i < 8; ++i) sum += sums[i];
  if (sum == 0.5f) *out = sum;  // never, which the compiler does not know
}
