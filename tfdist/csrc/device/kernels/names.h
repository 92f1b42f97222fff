// Lists of kernels: their names, and their template arguments.
#pragma once

// The encodings for which there are kernels.

// Each encoding is listed as F(name, encoding).
#define TFDIST_FOR_ALL_ENCODINGS(F) \
  F(half, HalfEncoding)             \
  F(bfloat16, Bfloat16Encoding)     \
  F(float8, Float8Encoding)         \
  F(levels2, LevelsEncoding<2>)     \
  F(levels4, LevelsEncoding<4>)     \
  F(levels8, LevelsEncoding<8>)     \
  F(powers, PowersEncoding)         \
  F(means, MeansEncoding)           \
  F(signs, SignsEncoding)

// The reductions for which there are kernels.

// Each reduction is listed as F(name, type of the values, reduction, type of the partial results).
// There are no kernels for bools, because bools can use the kernels for uint8. The sum of bools is
// their logical OR, which is the maximum of their bytes. The product of bools is their logical AND,
// which is the minimum of their bytes.
#define TFDIST_FOR_REDUCTIONS_OF(F, name, T, S) \
  F(name##_sum, T, Sum, S)                      \
  F(name##_min, T, Min, S)                      \
  F(name##_max, T, Max, S)                      \
  F(name##_product, T, Product, S)
#define TFDIST_FOR_ALL_REDUCTIONS(F)                     \
  TFDIST_FOR_REDUCTIONS_OF(F, uint8, uint8_t, uint8_t)   \
  TFDIST_FOR_REDUCTIONS_OF(F, int8, int8_t, int8_t)      \
  TFDIST_FOR_REDUCTIONS_OF(F, int32, int32_t, int32_t)   \
  TFDIST_FOR_REDUCTIONS_OF(F, int64, int64_t, int64_t)   \
  TFDIST_FOR_REDUCTIONS_OF(F, float16, Float16, float)   \
  TFDIST_FOR_REDUCTIONS_OF(F, bfloat16, Bfloat16, float) \
  TFDIST_FOR_REDUCTIONS_OF(F, float32, float, float)     \
  TFDIST_FOR_REDUCTIONS_OF(F, float64, double, double)   \
  F(float16_mean, Float16, Sum, float)                   \
  F(bfloat16_mean, Bfloat16, Sum, float)                 \
  F(float32_mean, float, Sum, double)                    \
  F(float64_mean, double, Sum, double)
