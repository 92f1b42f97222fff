/* The C interface of the core. Python uses it through ctypes to control the core. Programs without
   TensorFlow can use it to run collectives.

   A function that can fail returns 0 on success, and the value of a `tfdist::Code` on failure.
   After a failure, the same thread can get the error message with `tfd_error`. TensorFlow's tensors
   do not pass through this interface, because the ops in tf/ look up a communicator by its name. */
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
  const char* name; /* name by which ops find the communicator */
  int rank;         /* rank of this process */
  int size;         /* number of ranks in the group */
  /* For each rank, its name in error messages, such as "worker 1 (10.0.0.2:8470)". */
  const char* const* ranks;
  const int* hosts;   /* for each rank, a number that identifies its host */
  const int* control; /* for each rank, a connected stream socket; -1 for this rank */
  /* For each rank on another host, a second connected stream socket; -1 for the other ranks. */
  const int* data;
  /* The descriptor of this host's shared memory, or -1 if no other rank is on this host. The memory
     must be filled with zeros. `segment_bytes` is its size, as returned by `tfd_segment_bytes`. */
  int segment;
  size_t segment_bytes;
  double silence_warning_seconds; /* a warning names a rank that is silent for longer than this */
  double silence_timeout_seconds; /* a rank that is silent for longer than this counts as lost */
  double stall_seconds;           /* time without progress until a warning names missing ranks */
  double timeout_seconds;         /* time without progress until the group is aborted */
  double start_seconds;           /* time limit of the TLS handshakes */
  /* The algorithm of all all-reduces. If it is "", each all-reduce selects an algorithm by its size
     and the topology of the group. */
  const char* algorithm;
  /* The paths of PEM files for TLS. Either all three are given, or, if the sockets do not use TLS,
     all three are "" or NULL. */
  const char* tls_certificate;
  const char* tls_key;
  const char* tls_ca; /* the authority that has signed all ranks' certificates */
  /* A secret that all ranks must know to connect with TLS; "" or NULL if there is none. */
  const char* tls_secret;
  int gpus;               /* number of GPUs that this process uses */
  const int* gpu_numbers; /* for each GPU, its index among the GPUs visible to this process */
  const char* const* gpu_kernels; /* for each GPU, the file with its kernels; "" if there is none */
  const char* cuda_library;       /* path of the CUDA driver; "" or NULL for the system's driver */
  const char* nccl_library;       /* path of NCCL; "" or NULL if NCCL is not used */
  /* The transport between GPUs: "p2p", "nccl" or "host". "by_size" means that the size of the
     message determines the transport, and "" or NULL means that a measurement determines it. */
  const char* device_algorithm;
  size_t device_buffer_bytes; /* size of each of the two staging buffers; 0 for the default size */
  /* A stream socket to which the communicator sends a byte when it is aborted. The caller remains
     the owner of the descriptor. Zero or a negative number means that there is no socket. */
  int news;
} tfd_setup;

/* Returns the size of the memory that the ranks of a host share if the host has `ranks` ranks. */
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
   worker: the name of the worker to which it happened; "" if there is none. */
int tfd_abort(int64_t number, const char* event, const char* worker, const char* message);

/* Reports to the other ranks that this rank's step has failed. A rank that waits for this rank
   fails with this message. A rank that joins an operation later also fails with this message,
   unless its own step has also failed.
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

/* Closes all communicators of this process. They are closed concurrently, so that a communicator
   with pending operations does not delay the farewells of the others. */
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
   The time of a collective does not count while the step can continue with other work. */
typedef struct {
  uint64_t steps;   /* number of steps that have received their input */
  int64_t input_ns; /* time spent waiting for batches that have arrived */
  /* The start of the current wait for a batch, on the steady clock; 0 if there is no such wait. */
  int64_t input_since_ns;
  int64_t workers_ns; /* time spent waiting for other ranks to join */
  int64_t network_ns; /* time spent waiting for data to move */
  /* For each kind of collective or message, the number of successful ones. */
  uint64_t all_reduce;
  uint64_t reduce_scatter;
  uint64_t all_gather;
  uint64_t broadcast;
  uint64_t all_to_all;
  uint64_t barrier;
  uint64_t send;
  uint64_t receive;
  double bus_bytes; /* number of bytes that each link must carry for these operations */
  int64_t bus_ns;   /* duration of these operations after the arrival of the last rank */
} tfd_activity;
void tfd_get_activity(tfd_activity* activity);

/* The operating system's statistics of the TCP connection to a rank. All numbers are zero for ranks
   of this host. */
typedef struct {
  uint64_t acknowledged_bytes; /* bytes that were sent and acknowledged */
  uint64_t busy_us;            /* time during which data was in flight */
  uint64_t pending_bytes;      /* bytes that were written but not yet acknowledged */
  uint64_t bytes_per_second;   /* the recent delivery rate */
  uint32_t round_trip_us;      /* the smoothed round-trip time */
  uint32_t retransmits;        /* the number of retransmitted segments */
  uint32_t silent_ms;          /* the time since the last acknowledgment */
} tfd_link;
/* links: an array into which the function writes one element for each rank. */
int tfd_get_links(int64_t number, tfd_link* links);

/* Turns the recording of collectives and messages on or off. Recording is on by default, and needs
   to be turned off only to measure its cost. */
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
   (docs/guide/monitoring.md). For each communicator, the array contains at most the last `records`
   records. It omits records of operations that ended before the time `since_ns` of the steady
   clock. The result is valid until this thread's next call of this function. */
const char* tfd_state(size_t records, int64_t since_ns);

/* Makes this process write a flight log to `path` after errors, after stalls, and when it receives
   `signal` (0 for no signal). Call this function once.
   header: the members of the log's JSON object that describe this process. */
int tfd_flight_start(const char* path, const char* header, int signal);
/* Makes this process write its flight log to another path with another header. Drops the reasons,
   the state of the session and the stacks that have been recorded so far. */
void tfd_flight_move(const char* path, const char* header);
/* Requests that the flight log be written, for a reason outside of the core.
   kind: the kind of the reason.
   communicator: the name of the affected communicator.
   message: a text that explains the reason. */
void tfd_flight_ask(const char* kind, const char* communicator, const char* message);
/* Returns the last report of a stalled operation since the previous call, or "" if there is none.
   The report names the ranks for which the operation waits. The Python thread that provides the
   stacks also calls this function, and forwards the report to the other workers. The result is
   valid until this thread's next call of this function. */
const char* tfd_flight_stalled(void);
/* Sets the log's entry for the session's exchanges, in which the workers compare their programs and
   batches over the control connections. The entry is a JSON object like that of a communicator. */
void tfd_flight_set_session(const char* session);
/* Returns a file descriptor that becomes readable when the flight log needs the stacks of Python's
   threads. The caller must then read 8 bytes from it. Returns -1 before tfd_flight_start. */
int tfd_flight_stacks_wanted(void);
/* Adds the stacks of Python's threads to the flight log, as text. */
void tfd_flight_give_stacks(const char* stacks);
/* Waits until all requested writes of the flight log are complete, or until `seconds` seconds have
   passed. */
void tfd_flight_flush(double seconds);

/* Each of the following functions runs a collective or a message, and returns when it is complete.
   All counts are numbers of elements.
   dtype: 0 bool, 1 uint8, 2 int8, 3 int32, 4 int64, 5 float16, 6 bfloat16, 7 float32, 8 float64.
   op: 0 sum, 1 mean (only for floating types), 2 min, 3 max, 4 product.
   in, out: the input and the output. They may be the same memory in tfd_all_reduce, but not in the
   other functions. */
int tfd_all_reduce(int64_t number, const char* name, const void* in, void* out, size_t count,
                   int dtype, int op);
/* in: size * count elements, where `size` is the number of ranks.
   out: memory for `count` elements. */
int tfd_reduce_scatter(int64_t number, const char* name, const void* in, void* out, size_t count,
                       int dtype, int op);
/* counts: for each rank, the number of elements that it contributes. All ranks must pass the same
   counts.
   out: memory for the elements of all ranks. */
int tfd_all_gather(int64_t number, const char* name, const void* in, void* out,
                   const size_t* counts, int dtype);
int tfd_broadcast(int64_t number, const char* name, void* data, size_t count, int dtype, int root);
/* sent: for each rank, the number of elements to send to it.
   received: for each rank, the number of elements to receive from it. */
int tfd_all_to_all(int64_t number, const char* name, const void* in, const size_t* sent, void* out,
                   const size_t* received, int dtype);
int tfd_send(int64_t number, const char* name, const void* in, size_t count, int dtype, int to);
int tfd_receive(int64_t number, const char* name, void* out, size_t count, int dtype, int from);
int tfd_barrier(int64_t number, const char* name);

/* Creates a replay, through which Python controls the batches of a dataset's iterator. `*number`
   receives the number that identifies the replay in this process. Numbers begin at 1 and are never
   reused. */
int tfd_replay_create(int64_t* number);
/* Requests that the iterator return its last batch once more. */
int tfd_replay_request(int64_t number);
/* Returns the number of batches that the iterator has returned so far. A repeated batch counts only
   once. */
int tfd_replay_given(int64_t number, int64_t* given);
/* Fixes the number of rows that each worker receives per batch. This number is the share
   of one worker when `workers` workers divide one of the dataset's own batches. Such a batch has
   `batch` rows; if `batch` is 0, the first batch that is read determines this number. */
int tfd_replay_keep_rows(int64_t number, int64_t workers, int64_t batch);
/* Gets the numbers of rows of batches. Both numbers are 0 if they are not yet known.
   own: receives the number of rows in one of the dataset's own batches.
   rows: receives the number of rows in a batch for `workers` workers. */
int tfd_replay_batch(int64_t number, int64_t workers, int64_t* own, int64_t* rows);
/* Requests that the next batch have `rows` rows. */
int tfd_replay_want(int64_t number, int64_t rows);
/* Selects whether each worker receives whole batches instead of its part of each batch. */
int tfd_replay_give_whole(int64_t number, int whole);
/* Gets the position of the iterator that was used last. The dataset yields its first batch twice,
   because the workers compare the first copy before the epoch begins. This copy is not counted.
   before_last: whether to get the position before the iterator returned its last batch, instead of
   the current position.
   batches: receives the number of the dataset's own batches that have been read so far.
   rows: receives the number of rows in these batches.
   pending: receives the number of rows that have been read but not yet returned.
   pending_batches: receives the number of the dataset's own batches with pending rows. */
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
/* Encodes `count` values.
   error: the residual of error feedback, or NULL if error feedback is not used. It is added to `in`
   before encoding, and then replaced with the encoding error.
   seed: the seed for stochastic rounding. */
int tfd_encode(const tfd_codec* codec, const float* in, float* error, size_t count, void* out,
               uint32_t seed);
int tfd_decode(const tfd_codec* codec, const void* in, size_t count, float* out);

#ifdef __cplusplus
}
#endif
