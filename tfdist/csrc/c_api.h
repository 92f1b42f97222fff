/* The core as C functions: control from Python through ctypes, and collectives without TensorFlow.

   A function that can fail returns 0 on success and the value of a `tfdist::Code` on failure;
   `tfd_error` then returns the message to the calling thread. TensorFlow's data passes through the
   ops in tf/, which look up a communicator by name. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Selects the vector unit for all computation: "baseline", "avx2" or "avx512", or "" for the best
   one of this processor. Call it before creating the first communicator. */
int tfd_use_vector_unit(const char* name);

/* Returns the name of the vector unit in use. */
const char* tfd_vector_unit(void);

/* Settings of a communicator. tfd_create takes ownership of all descriptors except `news`, even if
   it fails. */
typedef struct {
  const char* name;         /* the group's name; ops find the communicator by it */
  int rank;                 /* rank of this process */
  int size;                 /* number of ranks in the group */
  const char* const* ranks; /* each rank's name in messages: "worker 1 (10.0.0.2:8470)" */
  const int* hosts;         /* per rank: a number unique to its host */
  const int* control;       /* per rank: a connected stream socket; -1 for this process */
  const int* data;          /* per rank on another host: a connected stream socket; else -1 */
  int segment;              /* descriptor of this host's shared memory; -1 for a single rank */
  size_t segment_bytes;     /* its size: tfd_segment_bytes(ranks of this host); zero-filled */
  double silence_warning_seconds; /* a rank silent for longer is named in a warning */
  double silence_timeout_seconds; /* a rank silent for longer is considered lost */
  double stall_seconds;           /* time without progress before a warning names missing ranks */
  double timeout_seconds;         /* time without progress before the communicator is aborted */
  double start_seconds;           /* time limit of the TLS handshakes */
  const char* algorithm;       /* name of one algorithm for all; "" selects by size and topology */
  const char* tls_certificate; /* paths of PEM files: if all three are given, sockets use TLS; */
  const char* tls_key;         /* "" or NULL for all three: unencrypted */
  const char* tls_ca;          /* the authority that signs all ranks' certificates */
  const char* tls_secret;      /* secret that ranks prove to have in TLS; "" or NULL for none */
  int gpus;                    /* number of GPUs this process uses for device memory; 0 for none */
  const int* gpu_numbers;      /* per GPU: its number among the GPUs visible to this process */
  const char* const* gpu_kernels; /* per GPU: the file of kernels compiled for it; "" for none */
  const char* cuda_library;       /* the CUDA driver; "" or NULL for the system's */
  const char* nccl_library;       /* "" or NULL for none */
  const char* device_algorithm;   /* "p2p", "nccl", "host" or "by_size"; "" or NULL measures */
  size_t device_buffer_bytes;     /* size of each of two staging buffers; 0 for the default */
  int news; /* a stream socket that gets a byte when the communicator is aborted. The caller
               remains its owner. Zero or negative for none. */
} tfd_setup;

/* Returns the size of the shared memory for `ranks` ranks on one host. */
size_t tfd_segment_bytes(int ranks);

/* Checks that TLS works with these files, which must exist. */
int tfd_check_tls(const char* certificate, const char* key, const char* ca);

/* Checks that GPU `number` is usable with this driver; "" for the system's. */
int tfd_check_gpu(int number, const char* cuda_library);

/* Creates a communicator. *number identifies it in this process, from 1, and is never reused. */
int tfd_create(const tfd_setup* setup, int64_t* number);

/* Fails all pending and later collectives with this message, here and on the other ranks.
   event: what happened: "lost", "silent", "left", "failed" or "other".
   worker: the worker to which it happened, as named in messages; "" for none. */
int tfd_abort(int64_t number, const char* event, const char* worker, const char* message);

/* Reports that this rank's step has failed. Another rank fails with this message if it waits for
   this rank or joins a later operation, unless its own step has failed as well.
   event, worker: as for `tfd_abort`. */
int tfd_step_failed(int64_t number, const char* event, const char* worker, const char* message);

/* Returns why a communicator has been aborted as a JSON object (`aborted` in
   docs/guide/monitoring.md); "null" if it has not been aborted, or is closed. Valid until this
   thread's next call. */
const char* tfd_cause(int64_t number);

/* Closes a communicator: waits for pending operations, which fail at once after an abort, notifies
   the other ranks, and frees all resources. Closing twice is not an error. */
int tfd_close(int64_t number);

/* Closes all communicators of this process concurrently, so that pending operations of one do not
   delay the farewells of the others. */
int tfd_close_all(void);

/* Returns the message of this thread's last failed call; valid until its next failed call. */
const char* tfd_error(void);

/* The traffic of a communicator so far. */
typedef struct {
  uint64_t collectives;
  uint64_t shared_bytes;   /* copied into the memory shared with this host's ranks */
  uint64_t sent_bytes;     /* written to the data sockets */
  uint64_t received_bytes; /* read from the data sockets */
  uint64_t device_bytes;   /* moved between GPUs without passing through host memory */
} tfd_statistics;
int tfd_get_statistics(int64_t number, tfd_statistics* statistics);

/* The time this process's training has spent waiting so far, in nanoseconds. Collectives that ran
   concurrently with other work do not count. */
typedef struct {
  uint64_t steps;   /* steps that have received their input */
  int64_t input_ns; /* waiting for batches that have since arrived */
  int64_t
      input_since_ns;  /* start of the current wait for a batch, on the steady clock; 0 for none */
  int64_t workers_ns;  /* waiting for other ranks to join */
  int64_t network_ns;  /* waiting for data to move */
  uint64_t all_reduce; /* successful collectives and messages, by kind */
  uint64_t reduce_scatter;
  uint64_t all_gather;
  uint64_t broadcast;
  uint64_t all_to_all;
  uint64_t barrier;
  uint64_t send;
  uint64_t receive;
  double bus_bytes; /* their bytes, times the share that each link must carry */
  int64_t bus_ns;   /* their duration after all ranks had arrived */
} tfd_activity;
void tfd_get_activity(tfd_activity* activity);

/* The operating system's statistics of the TCP connection to a rank; all zero for ranks of this
   host. */
typedef struct {
  uint64_t acknowledged_bytes; /* sent and acknowledged */
  uint64_t busy_us;            /* time with data in flight */
  uint64_t pending_bytes;      /* written but not acknowledged */
  uint64_t bytes_per_second;   /* recent delivery rate */
  uint32_t round_trip_us;      /* smoothed */
  uint32_t retransmits;        /* retransmitted segments */
  uint32_t silent_ms;          /* time since the last acknowledgment */
} tfd_link;
/* links: one for each rank. */
int tfd_get_links(int64_t number, tfd_link* links);

/* Turns the recording of later collectives and messages on or off. It is on by default; turn it
   off only to measure its cost. */
void tfd_record(int on);

/* Starts (1) or stops (0) keeping spans of this process's activity. Starting drops earlier spans.
 */
void tfd_record_spans(int on);
/* Adds a span if spans are kept; times are nanoseconds of the steady clock. */
void tfd_add_span(const char* lane, const char* name, int64_t begin_ns, int64_t end_ns);
/* Returns the spans as a JSON array of [lane, name, begin, end]; valid until this thread's next
   call. */
const char* tfd_spans(void);
/* Returns the current time of the steady clock, in nanoseconds. */
int64_t tfd_clock(void);

/* Returns the state and the records of all communicators of this process as a JSON array
   (docs/guide/monitoring.md). It includes the last `records` records of each communicator, except
   records that ended before `since_ns` of the steady clock. Valid until this thread's next call. */
const char* tfd_state(size_t records, int64_t since_ns);

/* Starts writing a flight log to `path` on errors, on stalls and on `signal` (0 for none). Call it
   once. header: members of the log's JSON object that describe this process. */
int tfd_flight_start(const char* path, const char* header, int signal);
/* Moves the flight log to another path, replaces its header and drops the reasons so far. */
void tfd_flight_move(const char* path, const char* header);
/* Requests a flight log for a reason outside the core, given its kind, communicator and message. */
void tfd_flight_ask(const char* kind, const char* communicator, const char* message);
/* Returns a description of operations that have stalled since the last call, and of the ranks they
   wait for; "" for none. The thread that provides stacks also calls this and informs the other
   workers. Valid until this thread's next call. */
const char* tfd_flight_stalled(void);
/* Sets the log's entry for the session's exchanges: a JSON object like a communicator's. */
void tfd_flight_set_session(const char* session);
/* Returns a descriptor that becomes readable, 8 bytes at a time, when the flight log needs the
   stacks of Python's threads; -1 before tfd_flight_start. */
int tfd_flight_stacks_wanted(void);
/* Adds the stacks to the flight log, as text. */
void tfd_flight_give_stacks(const char* stacks);
/* Waits until the last requested flight log has been written, at most `seconds`. */
void tfd_flight_flush(double seconds);

/* dtype: 0 bool, 1 uint8, 2 int8, 3 int32, 4 int64, 5 float16, 6 bfloat16, 7 float32, 8 float64.
   op: 0 sum, 1 mean (floating types), 2 min, 3 max, 4 product.
   Counts are in elements. Each call blocks until completion.
   in, out: may be the same memory in tfd_all_reduce, but not in the other functions. */
int tfd_all_reduce(int64_t number, const char* name, const void* in, void* out, size_t count,
                   int dtype, int op);
/* in: size * count elements; out: count. */
int tfd_reduce_scatter(int64_t number, const char* name, const void* in, void* out, size_t count,
                       int dtype, int op);
/* counts: each rank's number of elements, the same on all ranks; out: the sum of counts. */
int tfd_all_gather(int64_t number, const char* name, const void* in, void* out,
                   const size_t* counts, int dtype);
int tfd_broadcast(int64_t number, const char* name, void* data, size_t count, int dtype, int root);
/* sent, received: per rank, the number of elements sent to it and received from it. */
int tfd_all_to_all(int64_t number, const char* name, const void* in, const size_t* sent, void* out,
                   const size_t* received, int dtype);
int tfd_send(int64_t number, const char* name, const void* in, size_t count, int dtype, int to);
int tfd_receive(int64_t number, const char* name, void* out, size_t count, int dtype, int from);
int tfd_barrier(int64_t number, const char* name);

/* Creates a replay: with it, a dataset's iterator can return its last batch again.
 *number identifies it in this process, from 1, and is never reused. */
int tfd_replay_create(int64_t* number);
/* Makes the iterator return the previous batch once more. */
int tfd_replay_request(int64_t number);
/* Returns the number of batches returned so far, not counting repetitions. */
int tfd_replay_given(int64_t number, int64_t* given);
/* Fixes a worker's rows per batch, from now on, to its share when `workers` workers divide one of
   the dataset's own batches of `batch` rows. If `batch` is 0, the first batch read determines it.
 */
int tfd_replay_keep_rows(int64_t number, int64_t workers, int64_t batch);
/* Returns the rows of the dataset's own batches and of a batch for `workers` workers; 0 if not yet
   known. */
int tfd_replay_batch(int64_t number, int64_t workers, int64_t* own, int64_t* rows);
/* Makes the next batch have `rows` rows. */
int tfd_replay_want(int64_t number, int64_t rows);
/* Selects whether a worker receives whole batches from now on, instead of its part of them. */
int tfd_replay_give_whole(int64_t number, int whole);
/* Returns the position of the iterator read last, either now or before its last batch was returned.
   The first batch is read twice, and its first reading does not count.
   batches, rows: the dataset's own batches read so far, and their rows.
   pending, pending_batches: rows not yet returned, and the dataset's own batches that hold them. */
int tfd_replay_rows(int64_t number, int before_last, int64_t* batches, int64_t* rows,
                    int64_t* pending, int64_t* pending_batches);
/* Closes a replay. Datasets that already use it continue to do so. */
int tfd_replay_close(int64_t number);

/* A lossy encoding of float32; codec/codec.h explains the fields. */
typedef struct {
  int form;
  int bits;
  int stochastic;
  int euclidean;
  int unit;
  float clip;
  int block;
} tfd_codec;

/* Computes the encoded size of `count` values. */
int tfd_encoded_bytes(const tfd_codec* codec, size_t count, size_t* bytes);
/* error: residual, added to `in`, then replaced by the encoding error; NULL for none.
   seed: seed of stochastic rounding. */
int tfd_encode(const tfd_codec* codec, const float* in, float* error, size_t count, void* out,
               uint32_t seed);
int tfd_decode(const tfd_codec* codec, const void* in, size_t count, float* out);

#ifdef __cplusplus
}
#endif
