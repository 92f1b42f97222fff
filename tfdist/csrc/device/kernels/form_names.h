// The forms of a codec for which there are kernels.
#pragma once

// F(name, form).
#define TFDIST_FOR_ALL_FORMS(F) \
  F(half, HalfForm)             \
  F(bfloat16, Bfloat16Form)     \
  F(float8, Float8Form)         \
  F(levels2, LevelsForm<2>)     \
  F(levels4, LevelsForm<4>)     \
  F(levels8, LevelsForm<8>)     \
  F(powers, PowersForm)         \
  F(means, MeansForm)           \
  F(signs, SignsForm)
