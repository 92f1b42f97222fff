/* A rank of the backends `mpi` and `impi`: calls MPI_Allreduce. */
#include "rank.h"

#include <mpi.h>

static const char* reduce(const float* in, float* out, size_t count) {
  const void* from = in == out ? MPI_IN_PLACE : in;
  int code = MPI_Allreduce(from, out, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  return code == MPI_SUCCESS ? NULL : "MPI_Allreduce failed";
}

/* Arguments: the path of the control socket; and 1 to reduce in place, otherwise 0. */
int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, size;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  rank_program program = {rank, all_factors(size), atoi(argv[2]), reduce};
  rank_serve(argv[1], &program);
  MPI_Finalize();
  return 0;
}
