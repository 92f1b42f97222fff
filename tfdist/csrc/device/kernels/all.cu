// This file includes all kernels, so that they are compiled together.
#include "device/kernels/all_reduce.cu"
#include "device/kernels/codecs.cu"
#include "device/kernels/scatter.cu"
#include "device/kernels/select.cu"
