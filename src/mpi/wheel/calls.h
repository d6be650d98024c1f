/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MUSTER_MPI_CALLS_H
#define MUSTER_MPI_CALLS_H
/* The parts of MPI that Muster uses, as one table. MPICH and Open MPI have different types and constants, so a wheel
 * has one library for each of them, which makes this table (calls.c). load.cpp selects the library at run time.
 *
 * A handle of MPI is an int or a pointer. This table stores either kind in the first bytes of a pointer, and zeros in
 * the others. So MPI can write handles in place, for example when an operation ends, and handles can be compared. */

#ifdef __cplusplus
extern "C" {
#endif

struct muster_mpi_status {
  int MPI_SOURCE;
  int MPI_TAG;
  int bytes;
};

typedef int muster_mpi_on_delete(void* comm, int key, void* value, void* state);

struct muster_mpi_calls {
  void *comm_null, *comm_self, *comm_world;
  void *request_null, *message_null, *errhandler_null, *errors_return;
  void *byte, *integer;
  void *max, *bor;
  int any_source, any_tag, tag_ub, keyval_invalid;

  int (*cancel)(void** request);
  /* One function of one process: a second call replaces the function of the first. */
  int (*comm_create_keyval)(muster_mpi_on_delete* on_delete, int* key, void* state);
  int (*comm_free)(void** comm);
  int (*comm_get_attr)(void* comm, int key, void* value, int* flag);
  int (*comm_get_errhandler)(void* comm, void** handler);
  int (*comm_idup)(void* comm, void** copy, void** request);
  int (*comm_rank)(void* comm, int* rank);
  int (*comm_set_attr)(void* comm, int key, void* value);
  int (*comm_set_errhandler)(void* comm, void* handler);
  int (*comm_size)(void* comm, int* size);
  int (*comm_test_inter)(void* comm, int* flag);
  int (*errhandler_free)(void** handler);
  int (*error_string)(int code, char* text, int* length);
  int (*finalize)(void);
  int (*finalized)(int* flag);
  int (*get_library_version)(char* text, int* length);
  int (*iallreduce)(const void* from, void* to, int count, void* type, void* operation, void* comm, void** request);
  int (*improbe)(int source, int tag, void* comm, int* flag, void** message, struct muster_mpi_status* status);
  int (*imrecv)(void* to, int count, void* type, void** message, void** request);
  int (*init_thread)(int* count, char*** arguments, int required, int* provided);
  int (*initialized)(int* flag);
  int (*irecv)(void* to, int count, void* type, int source, int tag, void* comm, void** request);
  int (*is_thread_main)(int* flag);
  int (*isend)(const void* from, int count, void* type, int to, int tag, void* comm, void** request);
  int (*issend)(const void* from, int count, void* type, int to, int tag, void* comm, void** request);
  int (*query_thread)(int* provided);
  int (*request_free)(void** request);
  int (*test)(void** request, int* flag);
  int (*wait)(void** request);
};

/* The only exported function of libmuster-mpi-mpich and libmuster-mpi-openmpi. */
const struct muster_mpi_calls* muster_mpi_table(void);

/* Constants that MPICH and Open MPI share, or the larger one of two. calls.c compares them. */
enum {
  muster_mpi_success = 0,
  muster_mpi_thread_single = 0,
  muster_mpi_thread_funneled = 1,
  muster_mpi_thread_serialized = 2,
  muster_mpi_thread_multiple = 3,
  muster_mpi_max_error_string = 512,
  muster_mpi_max_library_version_string = 8192
};

#ifdef __cplusplus
}
#endif
#endif
