/* SPDX-License-Identifier: Apache-2.0 */
#pragma once
// The part of <mpi.h> that Muster uses, for wheels: each name is an entry of the table of the MPI that was found at run
// time (calls.h). The names that need that table throw Error(unsupported) if there is no MPI (load.hpp).

#include "src/mpi/wheel/calls.h"
#include "src/mpi/wheel/load.hpp"

using MPI_Comm = void*;
using MPI_Errhandler = void*;
using MPI_Message = void*;
using MPI_Request = void*;
using MPI_Status = muster_mpi_status;

#define MPI_SUCCESS muster_mpi_success
#define MPI_THREAD_SINGLE muster_mpi_thread_single
#define MPI_THREAD_FUNNELED muster_mpi_thread_funneled
#define MPI_THREAD_SERIALIZED muster_mpi_thread_serialized
#define MPI_THREAD_MULTIPLE muster_mpi_thread_multiple
#define MPI_MAX_ERROR_STRING muster_mpi_max_error_string
#define MPI_MAX_LIBRARY_VERSION_STRING muster_mpi_max_library_version_string
#define MPI_STATUS_IGNORE nullptr
#define MPI_COMM_NULL_COPY_FN nullptr

#define MPI_COMM_NULL (::muster::mpi::calls().comm_null)
#define MPI_COMM_SELF (::muster::mpi::calls().comm_self)
#define MPI_COMM_WORLD (::muster::mpi::calls().comm_world)
#define MPI_REQUEST_NULL (::muster::mpi::calls().request_null)
#define MPI_MESSAGE_NULL (::muster::mpi::calls().message_null)
#define MPI_ERRHANDLER_NULL (::muster::mpi::calls().errhandler_null)
#define MPI_ERRORS_RETURN (::muster::mpi::calls().errors_return)
#define MPI_BYTE (::muster::mpi::calls().byte)
#define MPI_INT (::muster::mpi::calls().integer)
#define MPI_MAX (::muster::mpi::calls().max)
#define MPI_BOR (::muster::mpi::calls().bor)
#define MPI_ANY_SOURCE (::muster::mpi::calls().any_source)
#define MPI_ANY_TAG (::muster::mpi::calls().any_tag)
#define MPI_TAG_UB (::muster::mpi::calls().tag_ub)
#define MPI_KEYVAL_INVALID (::muster::mpi::calls().keyval_invalid)

#define MPI_Cancel (::muster::mpi::calls().cancel)
#define MPI_Comm_free (::muster::mpi::calls().comm_free)
#define MPI_Comm_get_attr (::muster::mpi::calls().comm_get_attr)
#define MPI_Comm_get_errhandler (::muster::mpi::calls().comm_get_errhandler)
#define MPI_Comm_idup (::muster::mpi::calls().comm_idup)
#define MPI_Comm_rank (::muster::mpi::calls().comm_rank)
#define MPI_Comm_set_attr (::muster::mpi::calls().comm_set_attr)
#define MPI_Comm_set_errhandler (::muster::mpi::calls().comm_set_errhandler)
#define MPI_Comm_size (::muster::mpi::calls().comm_size)
#define MPI_Comm_test_inter (::muster::mpi::calls().comm_test_inter)
#define MPI_Errhandler_free (::muster::mpi::calls().errhandler_free)
#define MPI_Error_string (::muster::mpi::calls().error_string)
#define MPI_Finalize (::muster::mpi::calls().finalize)
#define MPI_Finalized (::muster::mpi::calls().finalized)
#define MPI_Get_library_version (::muster::mpi::calls().get_library_version)
#define MPI_Iallreduce (::muster::mpi::calls().iallreduce)
#define MPI_Improbe (::muster::mpi::calls().improbe)
#define MPI_Imrecv (::muster::mpi::calls().imrecv)
#define MPI_Init_thread (::muster::mpi::calls().init_thread)
#define MPI_Irecv (::muster::mpi::calls().irecv)
#define MPI_Is_thread_main (::muster::mpi::calls().is_thread_main)
#define MPI_Isend (::muster::mpi::calls().isend)
#define MPI_Issend (::muster::mpi::calls().issend)
#define MPI_Query_thread (::muster::mpi::calls().query_thread)
#define MPI_Request_free (::muster::mpi::calls().request_free)

/// Needs no MPI, and loads none.
inline int MPI_Initialized(int* flag) noexcept {
  const muster_mpi_calls* const table = ::muster::mpi::calls_in_process();
  if (table != nullptr) return table->initialized(flag);
  *flag = 0;
  return MPI_SUCCESS;
}

inline int MPI_Comm_create_keyval(void*, muster_mpi_on_delete* on_delete, int* key, void* state) {
  return ::muster::mpi::calls().comm_create_keyval(on_delete, key, state);
}

inline int MPI_Get_count(const MPI_Status* status, void*, int* count) {
  *count = status->bytes;
  return MPI_SUCCESS;
}

inline int MPI_Test(MPI_Request* request, int* flag, MPI_Status*) {
  return ::muster::mpi::calls().test(request, flag);
}

inline int MPI_Wait(MPI_Request* request, MPI_Status*) {
  return ::muster::mpi::calls().wait(request);
}
