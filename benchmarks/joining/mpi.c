/* Measures the start of Open MPI's ranks. The argument is a folder with a FIFO `go`. Each rank
 * creates a file in the folder, to show that it has started. It then waits until the benchmark
 * opens the FIFO. */
#include <fcntl.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static double monotonic(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static double cpu_seconds(void) {
  struct rusage used;
  getrusage(RUSAGE_SELF, &used);
  return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
         1e-6 * (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

int main(int argc, char** argv) {
  char path[4096];
  if (argc != 2) return 2;
  snprintf(path, sizeof(path), "%s/%d", argv[1], (int)getpid());
  close(open(path, O_CREAT | O_WRONLY, 0600));
  snprintf(path, sizeof(path), "%s/go", argv[1]);
  close(open(path, O_RDONLY));  /* Waits until the benchmark opens the FIFO, too. */
  double begin = monotonic(), cpu = cpu_seconds();
  MPI_Init(&argc, &argv);
  MPI_Barrier(MPI_COMM_WORLD);
  double end = monotonic(), first, last;
  cpu = cpu_seconds() - cpu;
  MPI_Reduce(&begin, &first, 1, MPI_DOUBLE, MPI_MIN, 0, MPI_COMM_WORLD);
  MPI_Reduce(&end, &last, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  int rank, ranks;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (rank == 0) {
    printf("ROW {\"ranks\": %d, \"seconds\": %.6f, \"cpu_s\": %.6f}\n", ranks, last - first, cpu);
  }
  MPI_Finalize();
  return 0;
}
