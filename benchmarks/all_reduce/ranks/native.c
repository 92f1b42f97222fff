/* Calls tfdist's core in a loop in C, so that the measured time contains no calls from Python. */
#include "c_api.h"
#include "rank.h"

static int64_t communicator;

static const char* reduce(const float* in, float* out, size_t count) {
  const int float32 = 7, sum = 0;
  int code = tfd_all_reduce(communicator, "all_reduce", in, out, count, float32, sum);
  return code ? tfd_error() : NULL;
}

/* Creates a communicator from the connections of a mesh, and executes the driver's commands until
   the driver closes the connection. Returns NULL, or an error message. */
const char* serve(const char* path, int in_place, int rank, int size, const char* const* ranks,
                  const int* hosts, const int* control, const int* data, int segment,
                  size_t segment_bytes) {
  tfd_setup setup = {
      .name = "all_reduce",
      .rank = rank,
      .size = size,
      .ranks = ranks,
      .hosts = hosts,
      .control = control,
      .data = data,
      .segment = segment,
      .segment_bytes = segment_bytes,
      .silence_warning_seconds = 60,
      .silence_timeout_seconds = 60,
      .start_seconds = 60,
      .stall_seconds = 60,
      .timeout_seconds = 60,
      .algorithm = "",
  };
  if (tfd_create(&setup, &communicator)) return tfd_error();
  rank_program program = {rank, all_factors(size), in_place, reduce};
  rank_serve(path, &program);
  return tfd_close(communicator) ? tfd_error() : NULL;
}
