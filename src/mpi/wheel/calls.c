/* SPDX-License-Identifier: Apache-2.0 */
/* libmuster-mpi-mpich or libmuster-mpi-openmpi, by the mpi.h that this file includes. The library is not linked with
 * MPI, because the MPI of a machine has one of several file names. Its symbols are those of the MPI that the process
 * has loaded before it. */
#include "src/mpi/wheel/calls.h"

#include <mpi.h>
#include <stddef.h>
#include <string.h>

#define SAME(constant, here) _Static_assert((int)(constant) == (int)(here), "calls.h")
SAME(MPI_SUCCESS, muster_mpi_success);
SAME(MPI_THREAD_SINGLE, muster_mpi_thread_single);
SAME(MPI_THREAD_FUNNELED, muster_mpi_thread_funneled);
SAME(MPI_THREAD_SERIALIZED, muster_mpi_thread_serialized);
SAME(MPI_THREAD_MULTIPLE, muster_mpi_thread_multiple);
_Static_assert(MPI_MAX_ERROR_STRING <= muster_mpi_max_error_string, "calls.h");
_Static_assert(MPI_MAX_LIBRARY_VERSION_STRING <= muster_mpi_max_library_version_string, "calls.h");

/* Functions between the two forms of a handle. */
#define HANDLE(type, name)                                                               \
  _Static_assert(sizeof(type) <= sizeof(void*), "a handle of MPI is at most a pointer"); \
  static inline type name##_of(void* stored) {                                           \
    type handle;                                                                         \
    memcpy(&handle, &stored, sizeof handle);                                             \
    return handle;                                                                       \
  }                                                                                      \
  static inline void* stored_##name(type handle) {                                       \
    void* stored = NULL;                                                                 \
    memcpy(&stored, &handle, sizeof handle);                                             \
    return stored;                                                                       \
  }

HANDLE(MPI_Comm, comm)
HANDLE(MPI_Datatype, datatype)
HANDLE(MPI_Op, op)
HANDLE(MPI_Errhandler, errhandler)
HANDLE(MPI_Request, request)
HANDLE(MPI_Message, message)

static int cancel(void** request) {
  return MPI_Cancel((MPI_Request*)request);
}

static muster_mpi_on_delete* when_deleted;

static int on_delete(MPI_Comm comm, int key, void* value, void* state) {
  return when_deleted(stored_comm(comm), key, value, state);
}

static int comm_create_keyval(muster_mpi_on_delete* function, int* key, void* state) {
  when_deleted = function;
  return MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, on_delete, key, state);
}

static int comm_free(void** comm) {
  return MPI_Comm_free((MPI_Comm*)comm);
}

static int comm_get_attr(void* comm, int key, void* value, int* flag) {
  return MPI_Comm_get_attr(comm_of(comm), key, value, flag);
}

static int comm_get_errhandler(void* comm, void** handler) {
  return MPI_Comm_get_errhandler(comm_of(comm), (MPI_Errhandler*)handler);
}

static int comm_idup(void* comm, void** copy, void** request) {
  return MPI_Comm_idup(comm_of(comm), (MPI_Comm*)copy, (MPI_Request*)request);
}

static int comm_rank(void* comm, int* rank) {
  return MPI_Comm_rank(comm_of(comm), rank);
}

static int comm_set_attr(void* comm, int key, void* value) {
  return MPI_Comm_set_attr(comm_of(comm), key, value);
}

static int comm_set_errhandler(void* comm, void* handler) {
  return MPI_Comm_set_errhandler(comm_of(comm), errhandler_of(handler));
}

static int comm_size(void* comm, int* size) {
  return MPI_Comm_size(comm_of(comm), size);
}

static int comm_test_inter(void* comm, int* flag) {
  return MPI_Comm_test_inter(comm_of(comm), flag);
}

static int errhandler_free(void** handler) {
  return MPI_Errhandler_free((MPI_Errhandler*)handler);
}

static int iallreduce(const void* from, void* to, int count, void* type, void* operation, void* comm, void** request) {
  return MPI_Iallreduce(from, to, count, datatype_of(type), op_of(operation), comm_of(comm), (MPI_Request*)request);
}

static int improbe(int source, int tag, void* comm, int* flag, void** message, struct muster_mpi_status* status) {
  MPI_Status found;
  const int code = MPI_Improbe(source, tag, comm_of(comm), flag, (MPI_Message*)message, &found);
  if (code != MPI_SUCCESS || !*flag) return code;
  status->MPI_SOURCE = found.MPI_SOURCE;
  status->MPI_TAG = found.MPI_TAG;
  return MPI_Get_count(&found, MPI_BYTE, &status->bytes);
}

static int imrecv(void* to, int count, void* type, void** message, void** request) {
  return MPI_Imrecv(to, count, datatype_of(type), (MPI_Message*)message, (MPI_Request*)request);
}

static int irecv(void* to, int count, void* type, int source, int tag, void* comm, void** request) {
  return MPI_Irecv(to, count, datatype_of(type), source, tag, comm_of(comm), (MPI_Request*)request);
}

static int isend(const void* from, int count, void* type, int to, int tag, void* comm, void** request) {
  return MPI_Isend(from, count, datatype_of(type), to, tag, comm_of(comm), (MPI_Request*)request);
}

static int issend(const void* from, int count, void* type, int to, int tag, void* comm, void** request) {
  return MPI_Issend(from, count, datatype_of(type), to, tag, comm_of(comm), (MPI_Request*)request);
}

static int request_free(void** request) {
  return MPI_Request_free((MPI_Request*)request);
}

static int test(void** request, int* flag) {
  return MPI_Test((MPI_Request*)request, flag, MPI_STATUS_IGNORE);
}

static int wait(void** request) {
  return MPI_Wait((MPI_Request*)request, MPI_STATUS_IGNORE);
}

const struct muster_mpi_calls* muster_mpi_table(void) {
  static struct muster_mpi_calls calls;
  /* The handles of Open MPI are addresses of objects in it, which no constant expression contains. */
  calls = (struct muster_mpi_calls){
      .comm_null = stored_comm(MPI_COMM_NULL),
      .comm_self = stored_comm(MPI_COMM_SELF),
      .comm_world = stored_comm(MPI_COMM_WORLD),
      .request_null = stored_request(MPI_REQUEST_NULL),
      .message_null = stored_message(MPI_MESSAGE_NULL),
      .errhandler_null = stored_errhandler(MPI_ERRHANDLER_NULL),
      .errors_return = stored_errhandler(MPI_ERRORS_RETURN),
      .byte = stored_datatype(MPI_BYTE),
      .integer = stored_datatype(MPI_INT),
      .max = stored_op(MPI_MAX),
      .bor = stored_op(MPI_BOR),
      .any_source = MPI_ANY_SOURCE,
      .any_tag = MPI_ANY_TAG,
      .tag_ub = MPI_TAG_UB,
      .keyval_invalid = MPI_KEYVAL_INVALID,
      .cancel = cancel,
      .comm_create_keyval = comm_create_keyval,
      .comm_free = comm_free,
      .comm_get_attr = comm_get_attr,
      .comm_get_errhandler = comm_get_errhandler,
      .comm_idup = comm_idup,
      .comm_rank = comm_rank,
      .comm_set_attr = comm_set_attr,
      .comm_set_errhandler = comm_set_errhandler,
      .comm_size = comm_size,
      .comm_test_inter = comm_test_inter,
      .errhandler_free = errhandler_free,
      .error_string = MPI_Error_string,
      .finalize = MPI_Finalize,
      .finalized = MPI_Finalized,
      .get_library_version = MPI_Get_library_version,
      .iallreduce = iallreduce,
      .improbe = improbe,
      .imrecv = imrecv,
      .init_thread = MPI_Init_thread,
      .initialized = MPI_Initialized,
      .irecv = irecv,
      .is_thread_main = MPI_Is_thread_main,
      .isend = isend,
      .issend = issend,
      .query_thread = MPI_Query_thread,
      .request_free = request_free,
      .test = test,
      .wait = wait,
  };
  return &calls;
}
