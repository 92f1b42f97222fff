// All kernels, compiled together.
#include "device/kernels/all_reduce.cu"
#include "device/kernels/codecs.cu"
#include "device/kernels/scatter.cu"
#include "device/kernels/select.cu"
