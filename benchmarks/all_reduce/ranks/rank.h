/* A rank in C: connects to the driver and executes its commands; see team.py. */
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

typedef struct {
  int rank;
  int factor;   /* the expected result is the pattern times this factor */
  int in_place; /* whether `out` and `in` are the same buffer */
  /* Reduces once. Returns NULL, or an error message. */
  const char* (*reduce)(const float* in, float* out, size_t count);
} rank_program;

static inline int all_factors(int size) { return size * (size + 1) / 2; }

/* The values are small integers, so that sums are exact. Their period is a prime number, so that
   the check detects values at wrong positions. */
static inline float pattern(size_t i) { return (float)(i % 251 + 1); }

static double rank_clock(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static FILE* rank_connect(const char* path, int rank) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  strncpy(address.sun_path, path, sizeof address.sun_path - 1);
  int connected = socket(AF_UNIX, SOCK_STREAM, 0);
  if (connect(connected, (struct sockaddr*)&address, sizeof address)) {
    perror(path);
    exit(1);
  }
  dprintf(connected, "%d\n", rank);
  return fdopen(connected, "r");
}

static float* rank_allocate(size_t count) {
  size_t bytes = (count * sizeof(float) + 63) / 64 * 64;
  float* data = (float*)aligned_alloc(64, bytes);
  if (data) memset(data, 0, bytes);
  return data;
}

/* Executes commands until the driver closes the connection. */
static void rank_serve(const char* path, const rank_program* program) {
  FILE* commands = rank_connect(path, program->rank);
  int answers = fileno(commands);
  char line[64];
  size_t count = 0, number;
  float *in = NULL, *out = NULL;
  while (fgets(line, sizeof line, commands)) {
    const char* error = NULL;
    if (sscanf(line, "check %zu", &number) == 1) {
      if (number / sizeof(float) != count) {
        if (out != in) free(out);
        free(in);
        count = number / sizeof(float);
        in = rank_allocate(count);
        out = program->in_place ? in : rank_allocate(count);
        if (!in || !out) {
          dprintf(answers, "error no memory\n");
          break;
        }
      }
      for (size_t i = 0; i < count; i++) in[i] = (program->rank + 1) * pattern(i);
      error = program->reduce(in, out, count);
      size_t wrong = 0;
      for (size_t i = 0; i < count; i++) wrong += out[i] != program->factor * pattern(i);
      /* The sum of zeros is zero, so the values do not grow if they are reduced in place. */
      memset(in, 0, count * sizeof(float));
      if (!error) dprintf(answers, "%zu\n", wrong);
    } else if (sscanf(line, "time %zu", &number) == 1) {
      /* A barrier, so that all ranks begin at the same time. */
      error = program->reduce(in, out, 1);
      double start = rank_clock();
      for (size_t i = 0; i < number && !error; i++) error = program->reduce(in, out, count);
      double seconds = rank_clock() - start;
      if (!error) dprintf(answers, "%.9g\n", seconds);
    }
    if (error) dprintf(answers, "error %s\n", error);
  }
  if (out != in) free(out);
  free(in);
  fclose(commands);
}
