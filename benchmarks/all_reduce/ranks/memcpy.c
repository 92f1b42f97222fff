/* A rank of the backend `memcpy`: copies memory instead of reducing. */
#include "rank.h"

static const char* copy(const float* in, float* out, size_t count) {
  memcpy(out, in, count * sizeof(float));
  __asm__ volatile("" ::"r"(out) : "memory"); /* So that the compiler keeps the copy. */
  return NULL;
}

int main(int argc, char** argv) {
  (void)argc;
  int rank = atoi(argv[2]);
  rank_program program = {rank, rank + 1, 0, copy};
  rank_serve(argv[1], &program);
  return 0;
}
