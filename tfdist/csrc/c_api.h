/* The core as C functions: control from Python through ctypes, and collectives without TensorFlow.

   A function that can fail returns 0, or the value of a `tfdist::Code`; `tfd_error` then gives the
   message to the thread that called. Data for TensorFlow goes through the ops in tf/, which find a
   communicator by its name. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Chooses the vector unit that everything is computed with ("baseline", "avx2", "avx512"), "" for
   the best that this processor has; before the first communicator. */
int tfd_use_vector_unit(const char* name);

/* Its name. */
const char* tfd_vector_unit(void);

/* How a communicator reaches its ranks. Descriptors are taken over, also where the call fails. */
typedef struct {
  const char* name;         /* of the group, for messages */
  int rank;                 /* of this process */
  int size;                 /* ranks in the group */
  const char* const* ranks; /* what messages call each rank: "worker 1 (10.0.0.2:8470)" */
  const int* hosts;         /* for each rank a number that its host alone has */
  const int* control;       /* for each rank a connected stream socket; -1 for this process */
  const int* data;          /* for each rank of another host a connected stream socket; else -1 */
  int segment;          /* a descriptor of the memory shared by this host's ranks; -1 if alone */
  size_t segment_bytes; /* its size: tfd_segment_bytes(ranks of this host), all of it zero */
  double silence_warning_seconds; /* a rank that is silent for longer is named in a warning */
  double silence_timeout_seconds; /* and for longer than this it is lost */
  double stall_seconds;        /* after so long in one collective a warning names who is missing */
  double timeout_seconds;      /* after so long in one collective the communicator is aborted */
  double start_seconds;        /* how long the TLS handshakes may take */
  const char* algorithm;       /* "" to choose by size and topology, or one name for all */
  const char* tls_certificate; /* with these paths of PEM files all sockets go on in TLS; */
  const char* tls_key;         /* "" or NULL for all three to leave them in the clear */
  const char* tls_ca;          /* who signs the certificates of all ranks */
  const char* tls_secret;      /* which all ranks prove to have, in TLS; "" or NULL for none */
  int gpus;                    /* for memory on GPUs: how many this process uses; 0 for none */
  const int* gpu_numbers;      /* of each, among those that this process sees */
  const char* const*
      gpu_kernels;          /* for each the file with the kernels compiled for it; "" for none */
  const char* cuda_library; /* the driver; "" or NULL for the system's */
  const char* nccl_library; /* "" or NULL for none */
  const char* device_algorithm; /* "own", "nccl" or "host"; "" or NULL for whichever is best */
  size_t device_buffer_bytes;   /* of each of two staging buffers; 0 for the usual */
} tfd_setup;

/* The size of the shared memory for this many ranks of one host. */
size_t tfd_segment_bytes(int ranks);

/* Whether TLS can be had here with these files, which all exist. */
int tfd_check_tls(const char* certificate, const char* key, const char* ca);

/* Whether the GPU of this number can be used, with this driver; "" for the system's. */
int tfd_check_gpu(int number, const char* cuda_library);

/* Makes a communicator; *number is its number in this process, from 1, never used again. */
int tfd_create(const tfd_setup* setup, int64_t* number);

/* Fails all pending and later collectives, here and on the other ranks, with this message. */
int tfd_abort(int64_t number, const char* message);

/* Says that this rank's step has failed. The other ranks fail with this message where they wait for
   it, and where it goes on without them; they do not where their steps have failed as well. */
int tfd_step_failed(int64_t number, const char* message);

/* Ends a communicator: waits for what is pending, tells the others, frees everything. After an
   abort there is nothing to wait for. Closing twice is no error. */
int tfd_close(int64_t number);

/* Ends all communicators of this process at the same time, so that what is pending in one of them
   does not keep the others from telling that this process ends. */
int tfd_close_all(void);

/* The message of this thread's last failed call; valid until its next one. */
const char* tfd_error(void);

/* What has crossed the links so far. */
typedef struct {
  uint64_t collectives;
  uint64_t shared_bytes;   /* copied into the memory shared with this host's ranks */
  uint64_t sent_bytes;     /* written to the data sockets */
  uint64_t received_bytes; /* read from the data sockets */
  uint64_t device_bytes; /* of operations between GPUs that did not go through the host's memory */
} tfd_statistics;
int tfd_get_statistics(int64_t number, tfd_statistics* statistics);

/* What this process's training has waited for so far, in nanoseconds; time in which it went on
   beside its collectives is not counted. */
typedef struct {
  uint64_t steps;   /* that have got their input */
  int64_t input_ns; /* waiting for batches that have come */
  int64_t
      input_since_ns;  /* when the wait for the next batch began, on the steady clock; 0 for none */
  int64_t workers_ns;  /* waiting for other ranks to join */
  int64_t network_ns;  /* waiting for data that moved */
  uint64_t all_reduce; /* collectives and messages that have ended well, by kind */
  uint64_t reduce_scatter;
  uint64_t all_gather;
  uint64_t broadcast;
  uint64_t all_to_all;
  uint64_t barrier;
  uint64_t send;
  uint64_t receive;
  double
      bus_bytes;  /* of them: the bytes of all values, times the share that each link must carry */
  int64_t bus_ns; /* how long they took once all ranks had come */
} tfd_activity;
void tfd_get_activity(tfd_activity* activity);

/* What the kernel counts of the TCP connection to each rank; all zero for ranks of this host. */
typedef struct {
  uint64_t acknowledged_bytes; /* sent, and known to have come */
  uint64_t busy_us;            /* with something on its way */
  uint64_t pending_bytes;      /* written, and not known to have come */
  uint64_t bytes_per_second;   /* as acknowledged lately */
  uint32_t round_trip_us;      /* smoothed */
  uint32_t retransmits;        /* segments */
  uint32_t silent_ms;          /* since the last acknowledgment */
} tfd_link;
int tfd_get_links(int64_t number, tfd_link* links);

/* Whether collectives and messages that begin from now on are recorded. They are, unless it is to
   be measured what that costs. */
void tfd_record(int on);

/* Keeps spans of what this process does from now on (1), forgetting those before, or no longer (0).
 */
void tfd_record_spans(int on);
/* Adds one, if they are kept; times are nanoseconds of the steady clock. */
void tfd_add_span(const char* lane, const char* name, int64_t begin_ns, int64_t end_ns);
/* Those kept, a JSON array of [lane, name, begin, end]; valid until this thread's next call. */
const char* tfd_spans(void);
/* The steady clock now, in nanoseconds. */
int64_t tfd_clock(void);

/* What all communicators of this process know and have recorded, a JSON array (docs/monitoring.md);
   of the last `records` of each, those that have not ended before `since_ns` of the steady clock.
   Valid until this thread's next call. */
const char* tfd_state(size_t records, int64_t since_ns);

/* Has a flight log written to `path` on errors, stalls and the signal (0 for none); once.
   header: members of the log's JSON object that tell of this process. */
int tfd_flight_start(const char* path, const char* header, int signal);
/* Has it written elsewhere from now on, with another header and without the reasons so far. */
void tfd_flight_move(const char* path, const char* header);
/* Has it written for a reason from outside of the core: its kind, of which communicator, and why.
 */
void tfd_flight_ask(const char* kind, const char* communicator, const char* message);
/* What a collective or a message of this process has waited in for long since the last call, and
   for whom; "" for nothing. Whoever is asked for stacks asks for this, too, and tells the other
   workers. Valid until this thread's next call. */
const char* tfd_flight_stalled(void);
/* What it says of the exchanges of the session: an object like that of a communicator, as JSON. */
void tfd_flight_set_session(const char* session);
/* A descriptor that can be read, 8 bytes at a time, whenever the stacks of Python's threads are
   wanted for the flight log; -1 before tfd_flight_start. */
int tfd_flight_stacks_wanted(void);
void tfd_flight_give_stacks(const char* stacks);
/* Waits until the flight log is as it was last asked for, or for so long. */
void tfd_flight_flush(double seconds);

/* dtype: 0 bool, 1 uint8, 2 int8, 3 int32, 4 int64, 5 float16, 6 bfloat16, 7 float32, 8 float64.
   op: 0 sum, 1 mean (floating types), 2 min, 3 max, 4 product.
   Counts are elements. `in` and `out` may be the same. Each call waits for its end. */
int tfd_all_reduce(int64_t number, const char* name, const void* in, void* out, size_t count,
                   int dtype, int op);
/* in: size * count elements; out: count. */
int tfd_reduce_scatter(int64_t number, const char* name, const void* in, void* out, size_t count,
                       int dtype, int op);
/* counts: for each rank what it gives, the same on all ranks; out: their sum. */
int tfd_all_gather(int64_t number, const char* name, const void* in, void* out,
                   const size_t* counts, int dtype);
int tfd_broadcast(int64_t number, const char* name, void* data, size_t count, int dtype, int root);
/* sent, received: for each rank the elements that go to it, and that come from it. */
int tfd_all_to_all(int64_t number, const char* name, const void* in, const size_t* sent, void* out,
                   const size_t* received, int dtype);
int tfd_send(int64_t number, const char* name, const void* in, size_t count, int dtype, int to);
int tfd_receive(int64_t number, const char* name, void* out, size_t count, int dtype, int from);
int tfd_barrier(int64_t number, const char* name);

/* What datasets pass through that can give their last batch again; *number is its number in this
   process, from 1, never used again. */
int tfd_replay_create(int64_t* number);
/* Has the next batch be the last one again. */
int tfd_replay_request(int64_t number);
/* The number of batches so far, without repetitions. */
int tfd_replay_given(int64_t number, int64_t* given);
/* From now on a worker's part of a batch has as many rows as when so many workers share one of the
   dataset's own, of `batch` rows; the first one that is read tells their number if that is 0. */
int tfd_replay_keep_rows(int64_t number, int64_t workers, int64_t batch);
/* The rows of the dataset's own batches, and of a batch for so many workers; 0 if not known yet. */
int tfd_replay_batch(int64_t number, int64_t workers, int64_t* own, int64_t* rows);
/* Has the next batch have so many rows. */
int tfd_replay_want(int64_t number, int64_t rows);
// Whether a worker is given whole batches from now on, instead of its part of them.
int tfd_replay_give_whole(int64_t number, int whole);
/* Of the iterator that was read last, now or before its last batch was given, and without the first
   batch, which is read twice: how many of the dataset's own batches it has read, their rows, how
   many of these are still to be given, and in how many of the dataset's own batches these are. */
int tfd_replay_rows(int64_t number, int before_last, int64_t* batches, int64_t* rows,
                    int64_t* pending, int64_t* pending_batches);
/* Datasets that have passed through it keep what they need. */
int tfd_replay_close(int64_t number);

/* A lossy encoding of float32; see codec/codec.h for what each field means. */
typedef struct {
  int form;
  int bits;
  int stochastic;
  int euclidean;
  int unit;
  float clip;
  int block;
} tfd_codec;

/* The size of so many values. */
int tfd_encoded_bytes(const tfd_codec* codec, size_t count, size_t* bytes);
/* error: added to `in`, then holds what was lost; NULL for none. seed: of what is random. */
int tfd_encode(const tfd_codec* codec, const float* in, float* error, size_t count, void* out,
               uint32_t seed);
int tfd_decode(const tfd_codec* codec, const void* in, size_t count, float* out);

#ifdef __cplusplus
}
#endif
