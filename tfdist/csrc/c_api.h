/* The C interface of the core. Python uses it through ctypes to control the core. Programs without
   TensorFlow can use it to run collectives.

   If a function can fail, it returns 0 on success, and the value of a `tfdist::Code` on failure.
   The calling thread can then get the message with `tfd_error`. The tensors of TensorFlow do not
   pass through this interface: the ops in tf/ look up a communicator by its name. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Selects the vector unit for all computation: "baseline", "avx2" or "avx512", or "" for the best
   one that this processor supports. Call this function before the first communicator is created. */
int tfd_use_vector_unit(const char* name);

/* Returns the name of the vector unit in use. */
const char* tfd_vector_unit(void);

/* The settings of a communicator. tfd_create takes ownership of all descriptors except `news`, even
   if it fails. */
typedef struct {
  const char* name;         /* name by which ops find the communicator */
  int rank;                 /* rank of this process */
  int size;                 /* number of ranks in the group */
  const char* const* ranks; /* for each rank, its name in messages: "worker 1 (10.0.0.2:8470)" */
  const int* hosts;         /* for each rank, a number that identifies its host */
  const int* control;       /* for each rank, a connected stream socket; -1 for this rank */
  const int* data;          /* the same for each rank on another host; otherwise -1 */
  int segment;              /* descriptor of this host's shared memory; -1 if it has one rank */
  size_t segment_bytes;     /* its size, tfd_segment_bytes(ranks of this host); filled with 0 */
  double silence_warning_seconds; /* a warning names a rank that is silent for longer */
  double silence_timeout_seconds; /* a rank that is silent for longer counts as lost */
  double stall_seconds;           /* time without progress until a warning names missing ranks */
  double timeout_seconds;         /* time without progress until the group is aborted */
  double start_seconds;           /* time limit of the TLS handshakes */
  const char* algorithm;          /* for all all-reduces; "" selects it by size and topology */
  const char* tls_certificate; /* paths of PEM files; the sockets use TLS if all three are given, */
  const char* tls_key;         /* and no encryption if all three are "" or NULL */
  const char* tls_ca;          /* the authority that has signed all ranks' certificates */
  const char* tls_secret;      /* secret that ranks prove to know in TLS; "" or NULL for none */
  int gpus;                    /* number of GPUs that this process uses */
  const int* gpu_numbers;      /* for each GPU, its index among the GPUs visible to this process */
  const char* const* gpu_kernels; /* for each GPU, the file of its kernels; "" for none */
  const char* cuda_library;       /* path of the CUDA driver; "" or NULL for the system's driver */
  const char* nccl_library;       /* path of NCCL; "" or NULL if NCCL is not used */
  const char* device_algorithm;   /* "p2p", "nccl", "host", "by_size"; "" or NULL to measure */
  size_t device_buffer_bytes;     /* size of each of the two staging buffers; 0 for the default */
  /* A stream socket. The communicator sends it a byte when the communicator is aborted. The caller
     remains the owner of the descriptor. Zero or a negative number means no socket. */
  int news;
} tfd_setup;

/* Returns the size of the memory that `ranks` ranks of a host share. */
size_t tfd_segment_bytes(int ranks);

/* Checks that OpenSSL can use these files for TLS. */
int tfd_check_tls(const char* certificate, const char* key, const char* ca);

/* Checks that a GPU can be used with this driver.
   number: the index of the GPU among the GPUs visible to this process.
   cuda_library: the path of the driver, or "" for the system's driver. */
int tfd_check_gpu(int number, const char* cuda_library);

/* Creates a communicator. `*number` receives the number that identifies it in this process. Numbers
   begin at 1 and are never reused. */
int tfd_create(const tfd_setup* setup, int64_t* number);

/* Fails all pending and later collectives with this message, on this rank and on the other ranks.
   event: what happened: "lost", "silent", "left", "failed" or "other".
   worker: the worker to which it happened, as named in messages; "" if there is none. */
int tfd_abort(int64_t number, const char* event, const char* worker, const char* message);

/* Reports to the other ranks that this rank's step has failed. A rank that waits for this rank
   fails with this message. A rank that joins a later operation fails with it as well, unless its
   own step has also failed.
   event, worker: as for `tfd_abort`. */
int tfd_step_failed(int64_t number, const char* event, const char* worker, const char* message);

/* Returns why a communicator has been aborted, as a JSON object (`aborted` in
   docs/guide/monitoring.md). Returns "null" if it has not been aborted, or if it is closed. The
   result is valid until this thread's next call of this function. */
const char* tfd_cause(int64_t number);

/* Closes a communicator. Waits for its pending operations, notifies the other ranks, and frees all
   resources. After an abort, the pending operations fail immediately. Closing a communicator twice
   is not an error. */
int tfd_close(int64_t number);

/* Closes all communicators of this process concurrently, so that the pending operations of one
   communicator do not delay the farewells of the others. */
int tfd_close_all(void);

/* Returns the message of this thread's last failed call. The message is valid until this thread's
   next failed call. */
const char* tfd_error(void);

/* The traffic of a communicator since it was created. */
typedef struct {
  uint64_t collectives;
  uint64_t shared_bytes;   /* copied into the memory that the ranks of this host share */
  uint64_t sent_bytes;     /* written to the data sockets */
  uint64_t received_bytes; /* read from the data sockets */
  uint64_t device_bytes;   /* moved between GPUs without passing through host memory */
} tfd_statistics;
int tfd_get_statistics(int64_t number, tfd_statistics* statistics);

/* The time that this process's steps have spent waiting since the process started, in nanoseconds.
   Collectives that run concurrently with other work of the step do not count. */
typedef struct {
  uint64_t steps;   /* number of steps that have received their input */
  int64_t input_ns; /* time spent waiting for batches that have arrived */
  int64_t
      input_since_ns;  /* start of the current wait for a batch, on the steady clock; 0 if none */
  int64_t workers_ns;  /* time spent waiting for other ranks to join */
  int64_t network_ns;  /* time spent waiting for data to move */
  uint64_t all_reduce; /* numbers of successful collectives and messages, by kind */
  uint64_t reduce_scatter;
  uint64_t all_gather;
  uint64_t broadcast;
  uint64_t all_to_all;
  uint64_t barrier;
  uint64_t send;
  uint64_t receive;
  double bus_bytes; /* number of bytes that each link must carry for them */
  int64_t bus_ns;   /* their duration, from the arrival of the last rank */
} tfd_activity;
void tfd_get_activity(tfd_activity* activity);

/* The operating system's statistics of the TCP connection to a rank. All numbers are zero for ranks
   of this host. */
typedef struct {
  uint64_t acknowledged_bytes; /* sent and acknowledged */
  uint64_t busy_us;            /* time with data in flight */
  uint64_t pending_bytes;      /* written but not acknowledged */
  uint64_t bytes_per_second;   /* recent delivery rate */
  uint32_t round_trip_us;      /* smoothed */
  uint32_t retransmits;        /* retransmitted segments */
  uint32_t silent_ms;          /* time since the last acknowledgment */
} tfd_link;
/* links: receives one element for each rank. */
int tfd_get_links(int64_t number, tfd_link* links);

/* Selects whether later collectives and messages are recorded. Recording is on by default. Turn it
   off only to measure its cost. */
void tfd_record(int on);

/* Starts (1) or stops (0) the recording of spans of this process's activity. Starting removes the
   earlier spans. */
void tfd_record_spans(int on);
/* Adds a span, if spans are recorded. Times are nanoseconds of the steady clock. */
void tfd_add_span(const char* lane, const char* name, int64_t begin_ns, int64_t end_ns);
/* Returns the spans as a JSON array of [lane, name, begin, end]. The result is valid until this
   thread's next call of this function. */
const char* tfd_spans(void);
/* Returns the current time of the steady clock, in nanoseconds. */
int64_t tfd_clock(void);

/* Returns the states of all communicators of this process, with their records, as a JSON array
   (docs/guide/monitoring.md). The array contains at most the last `records` records of each
   communicator, without the records that ended before the time `since_ns` of the steady clock. The
   result is valid until this thread's next call of this function. */
const char* tfd_state(size_t records, int64_t since_ns);

/* Makes this process write a flight log to `path` after errors, after stalls, and when it receives
   `signal` (0 for no signal). Call this function once.
   header: the members of the log's JSON object that describe this process. */
int tfd_flight_start(const char* path, const char* header, int signal);
/* Makes this process write its flight log to another path with another header, and drops the
   reasons that have been recorded so far. */
void tfd_flight_move(const char* path, const char* header);
/* Requests that the flight log be written, for a reason outside of the core.
   kind, communicator, message: the kind of the reason, the name of the communicator, and a message.
 */
void tfd_flight_ask(const char* kind, const char* communicator, const char* message);
/* Returns the last report of a stalled operation since the previous call, with the ranks for which
   the operation waits, or "" if there is none. The thread that provides the stacks also calls this
   function, and informs the other workers. The result is valid until this thread's next call of
   this function. */
const char* tfd_flight_stalled(void);
/* Sets the log's entry about the session's exchanges. It is a JSON object like a communicator's
   object. */
void tfd_flight_set_session(const char* session);
/* Returns a descriptor that becomes readable when the flight log needs the stacks of Python's
   threads. 8 bytes must be read from it each time. Returns -1 before tfd_flight_start. */
int tfd_flight_stacks_wanted(void);
/* Adds the stacks of Python's threads to the flight log, as text. */
void tfd_flight_give_stacks(const char* stacks);
/* Waits until all requested writes of the flight log are complete, but at most `seconds` seconds.
 */
void tfd_flight_flush(double seconds);

/* The following functions run a collective or a message, and return when it is complete. All counts
   are numbers of elements.
   dtype: 0 bool, 1 uint8, 2 int8, 3 int32, 4 int64, 5 float16, 6 bfloat16, 7 float32, 8 float64.
   op: 0 sum, 1 mean (only for floating types), 2 min, 3 max, 4 product.
   in, out: may be the same memory in tfd_all_reduce, but not in the other functions. */
int tfd_all_reduce(int64_t number, const char* name, const void* in, void* out, size_t count,
                   int dtype, int op);
/* in: size * count elements, where `size` is the number of ranks; out: count elements. */
int tfd_reduce_scatter(int64_t number, const char* name, const void* in, void* out, size_t count,
                       int dtype, int op);
/* counts: for each rank, its number of elements, the same on all ranks; out: the sum of `counts`
   elements. */
int tfd_all_gather(int64_t number, const char* name, const void* in, void* out,
                   const size_t* counts, int dtype);
int tfd_broadcast(int64_t number, const char* name, void* data, size_t count, int dtype, int root);
/* sent, received: for each rank, the number of elements that are sent to it, and the number of
   elements that are received from it. */
int tfd_all_to_all(int64_t number, const char* name, const void* in, const size_t* sent, void* out,
                   const size_t* received, int dtype);
int tfd_send(int64_t number, const char* name, const void* in, size_t count, int dtype, int to);
int tfd_receive(int64_t number, const char* name, void* out, size_t count, int dtype, int from);
int tfd_barrier(int64_t number, const char* name);

/* Creates a replay, through which Python controls the batches of a dataset's iterator. `*number`
   receives the number that identifies the replay in this process. Numbers begin at 1 and are never
   reused. */
int tfd_replay_create(int64_t* number);
/* Makes the iterator return its last batch once more. */
int tfd_replay_request(int64_t number);
/* Returns the number of batches that have been returned so far, not counting repetitions. */
int tfd_replay_given(int64_t number, int64_t* given);
/* Fixes the number of rows per batch for each worker. This number becomes the worker's share when
   `workers` workers divide one of the dataset's own batches, which has `batch` rows. If `batch` is
   0, the first batch that is read determines it. */
int tfd_replay_keep_rows(int64_t number, int64_t workers, int64_t batch);
/* Returns the number of rows of the dataset's own batches, and the number of rows of a batch for
   `workers` workers. Both numbers are 0 if they are not yet known. */
int tfd_replay_batch(int64_t number, int64_t workers, int64_t* own, int64_t* rows);
/* Makes the next batch have `rows` rows. */
int tfd_replay_want(int64_t number, int64_t rows);
/* Selects whether each worker receives whole batches instead of its part of them. */
int tfd_replay_give_whole(int64_t number, int whole);
/* Returns the position of the iterator that was read last: its current position, or its position
   before it returned its last batch. The iterator reads the first batch twice, and the first of
   these two reads is not counted.
   batches, rows: the number of the dataset's own batches read so far, and of the rows in them.
   pending, pending_batches: the number of rows that have been read but not yet returned, and the
   number of the dataset's own batches with such rows. */
int tfd_replay_rows(int64_t number, int before_last, int64_t* batches, int64_t* rows,
                    int64_t* pending, int64_t* pending_batches);
/* Closes a replay. Datasets that already use it can continue to use it. */
int tfd_replay_close(int64_t number);

/* A lossy encoding of float32 values. codec/codec.h explains the fields; `form` is the value of a
   tfdist::Encoding. */
typedef struct {
  int form;
  int bits;
  int stochastic;
  int euclidean;
  int unit;
  float clip;
  int block;
} tfd_codec;

/* Computes the size of `count` encoded values, in bytes. */
int tfd_encoded_bytes(const tfd_codec* codec, size_t count, size_t* bytes);
/* error: the residual of error feedback. It is added to `in` before encoding, and then replaced
   with the encoding error. NULL if there is no error feedback.
   seed: the seed of stochastic rounding. */
int tfd_encode(const tfd_codec* codec, const float* in, float* error, size_t count, void* out,
               uint32_t seed);
int tfd_decode(const tfd_codec* codec, const void* in, size_t count, float* out);

#ifdef __cplusplus
}
#endif
