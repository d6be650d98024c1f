// SPDX-License-Identifier: Apache-2.0
// Collectives for a program that does not know Muster: this library is preloaded, so its functions replace those of
// MPI.
//
//  1. A call whose operation or kind of communicator Muster does not have uses MPI. These are the same on all ranks.
//  2. Any other call becomes a call of the communicator's process group on every rank. Datatypes may differ between
//     ranks, so a rank whose buffers or datatypes are not plain cannot inform the others. It makes an invalid call
//     instead.
//  3. An invalid call is the same error on all ranks, and no data has moved: then all of them use MPI.
//  4. A failure of the group becomes an MPI error, through the communicator's error handler.

#include <mpi.h>

#include <cstdio>
#include <new>
#include <numeric>
#include <vector>

#include "tests/pmpi/communicators.hpp"
#include "tests/pmpi/counts.hpp"
#include "tests/pmpi/plain.hpp"

namespace muster::pmpi {
namespace {

/// Another rank has sent another number of elements than this one expects.
struct OtherSize {};

int fail(Function function, MPI_Comm comm, int code, const char* words) noexcept {
  std::fprintf(stderr, "muster-pmpi: %s: %s\n", name_of(function), words);
  PMPI_Comm_call_errhandler(comm, code);
  return code;
}

template <class Theirs>
int through_mpi(Function function, const Theirs& theirs) {
  count(function, Way::mpi);
  return theirs();
}

/// Returns whether the error is the same on all ranks, and no data has moved.
bool is_refusal(const ProcessGroup& group, const Error& error) {
  return !group.group().error() && (error.kind() == ErrorKind::invalid_argument ||
                                    error.kind() == ErrorKind::unsupported || error.kind() == ErrorKind::rank_mismatch);
}

/// `ours` makes the group's call. If this rank's arguments are not plain, it makes none and returns false.
template <class Ours, class Theirs>
int run(Function function, MPI_Comm comm, const Ours& ours, const Theirs& theirs) {
  ProcessGroup* const group = group_of(comm);
  if (group == nullptr) return through_mpi(function, theirs);
  try {
    constexpr int no_rank = -1;
    if (!ours(*group)) group->broadcast({}, no_rank);
    count(function, Way::muster);
    return MPI_SUCCESS;
  } catch (const OtherSize&) {
    return fail(function, comm, MPI_ERR_TRUNCATE, "the ranks' counts do not fit each other");
  } catch (const Error& error) {
    if (is_refusal(*group, error)) return through_mpi(function, theirs);
    group->group().abort(error);  // the error may be only on this rank
    return fail(function, comm, error.kind() == ErrorKind::out_of_space ? MPI_ERR_NO_MEM : MPI_ERR_OTHER, error.what());
  } catch (const std::bad_alloc&) {
    group->group().abort(Error(ErrorKind::out_of_space, "out of memory"));
    return fail(function, comm, MPI_ERR_NO_MEM, "out of memory");
  }
}

/// Returns the data that this rank contributes. With MPI_IN_PLACE it is `in_place`, which is `out` or a part of it.
Elements given(const void* data, std::int64_t count, MPI_Datatype type, const Elements& in_place) {
  return data == MPI_IN_PLACE ? in_place : Elements(data, count, type);
}

/// Returns whether both have equally many bytes and are not the same memory, which only MPI_IN_PLACE allows.
bool fit(const Elements& in, const Elements& out, const void* data) {
  return in.is_plain() && out.is_plain() && in.bytes() == out.bytes() &&
         (data == MPI_IN_PLACE || !is_one_buffer(in, out));
}

}  // namespace
}  // namespace muster::pmpi

using namespace muster;
using namespace muster::pmpi;

#pragma GCC visibility push(default)
extern "C" {

int MPI_Barrier(MPI_Comm comm) {
  return run(
      Function::barrier, comm,
      [](ProcessGroup& group) {
        group.barrier();
        return true;
      },
      [&] { return PMPI_Barrier(comm); });
}

int MPI_Bcast(void* buffer, int count, MPI_Datatype type, int root, MPI_Comm comm) {
  return run(
      Function::bcast, comm,
      [&](ProcessGroup& group) {
        const Elements all(buffer, count, type);
        if (!all.is_plain()) return false;
        group.broadcast(writable(all.moved()), root);
        return true;
      },
      [&] { return PMPI_Bcast(buffer, count, type, root, comm); });
}

int MPI_Allreduce(const void* send, void* recv, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  const auto theirs = [&] { return PMPI_Allreduce(send, recv, count, type, op, comm); };
  const auto reduction = reduction_of(op, type_of(type));
  if (!reduction) return through_mpi(Function::allreduce, theirs);
  return run(
      Function::allreduce, comm,
      [&](ProcessGroup& group) {
        const Elements out(recv, count, type);
        const Elements in = given(send, count, type, out);
        if (!fit(in, out, send)) return false;
        if (send == MPI_IN_PLACE)
          group.all_reduce(writable(out.reduced()), *reduction);
        else
          group.all_reduce_into(writable(out.reduced()), in.reduced(), *reduction);
        return true;
      },
      theirs);
}

int MPI_Reduce(const void* send, void* recv, int count, MPI_Datatype type, MPI_Op op, int root, MPI_Comm comm) {
  const auto theirs = [&] { return PMPI_Reduce(send, recv, count, type, op, root, comm); };
  const auto reduction = reduction_of(op, type_of(type));
  if (!reduction) return through_mpi(Function::reduce, theirs);
  return run(
      Function::reduce, comm,
      [&](ProcessGroup& group) {
        const Elements out(recv, count, type);
        const Elements in = given(send, count, type, out);
        if (group.rank() != root) {
          if (!in.is_plain() || send == MPI_IN_PLACE) return false;
          group.reduce(Tensor::borrow(in.reduced()), root, *reduction);
          return true;
        }
        if (!fit(in, out, send)) return false;
        if (send != MPI_IN_PLACE) put(out, in.reduced());
        group.reduce(writable(out.reduced()), root, *reduction);
        return true;
      },
      theirs);
}

int MPI_Reduce_scatter_block(const void* send, void* recv, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  const auto theirs = [&] { return PMPI_Reduce_scatter_block(send, recv, count, type, op, comm); };
  const auto reduction = reduction_of(op, type_of(type));
  if (!reduction) return through_mpi(Function::reduce_scatter_block, theirs);
  return run(
      Function::reduce_scatter_block, comm,
      [&](ProcessGroup& group) {
        const Elements out(recv, count, type);
        const Elements in = given(send, count, type, out);
        if (!fit(in, out, send)) return false;
        put(out, group.reduce_scatter(in.times(group.size()).reduced(), 0, *reduction));
        return true;
      },
      theirs);
}

int MPI_Reduce_scatter(const void* send, void* recv, const int* counts, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  const auto theirs = [&] { return PMPI_Reduce_scatter(send, recv, counts, type, op, comm); };
  const auto reduction = reduction_of(op, type_of(type));
  if (!reduction) return through_mpi(Function::reduce_scatter, theirs);
  return run(
      Function::reduce_scatter, comm,
      [&](ProcessGroup& group) {
        if (counts == nullptr) return false;
        const std::vector<std::int64_t> sizes(counts, counts + group.size());
        const std::int64_t all = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
        const Elements out(recv, counts[group.rank()], type);
        const Elements in(send == MPI_IN_PLACE ? recv : send, all, type);
        if (!in.is_plain() || !out.is_plain() || (send != MPI_IN_PLACE && is_one_buffer(in, out))) return false;
        put(out, group.reduce_scatterv(in.reduced(), sizes, 0, *reduction));
        return true;
      },
      theirs);
}

int MPI_Allgather(const void* send, int count, MPI_Datatype type, void* recv, int recv_count, MPI_Datatype recv_type,
                  MPI_Comm comm) {
  return run(
      Function::allgather, comm,
      [&](ProcessGroup& group) {
        const Elements out(recv, recv_count, recv_type);
        const Elements in = given(send, count, type, out.behind(group.rank()));
        if (!fit(in, out, send)) return false;
        group.all_gather_into(writable(out.times(group.size()).moved()), in.moved());
        return true;
      },
      [&] { return PMPI_Allgather(send, count, type, recv, recv_count, recv_type, comm); });
}

int MPI_Allgatherv(const void* send, int count, MPI_Datatype type, void* recv, const int* recv_counts,
                   const int* displacements, MPI_Datatype recv_type, MPI_Comm comm) {
  return run(
      Function::allgatherv, comm,
      [&](ProcessGroup& group) {
        const Parts out(recv, recv_counts, displacements, group.size(), recv_type);
        if (!out.is_plain()) return false;
        const Elements own = out.part(group.rank());
        const Elements in = given(send, count, type, own);
        if (!fit(in, own, send)) return false;
        out.spread(group.all_gatherv(in.moved(), 0, out.bytes()));
        return true;
      },
      [&] { return PMPI_Allgatherv(send, count, type, recv, recv_counts, displacements, recv_type, comm); });
}

int MPI_Gather(const void* send, int count, MPI_Datatype type, void* recv, int recv_count, MPI_Datatype recv_type,
               int root, MPI_Comm comm) {
  return run(
      Function::gather, comm,
      [&](ProcessGroup& group) {
        if (group.rank() != root) {
          const Elements in(send, count, type);
          if (!in.is_plain() || send == MPI_IN_PLACE) return false;
          (void)group.gather(in.moved(), root);
          return true;
        }
        const Elements out(recv, recv_count, recv_type);
        const Elements in = given(send, count, type, out.behind(root));
        if (!fit(in, out, send)) return false;
        put(out, *group.gather(in.moved(), root));
        return true;
      },
      [&] { return PMPI_Gather(send, count, type, recv, recv_count, recv_type, root, comm); });
}

int MPI_Gatherv(const void* send, int count, MPI_Datatype type, void* recv, const int* recv_counts,
                const int* displacements, MPI_Datatype recv_type, int root, MPI_Comm comm) {
  return run(
      Function::gatherv, comm,
      [&](ProcessGroup& group) {
        if (group.rank() != root) {
          const Elements in(send, count, type);
          if (!in.is_plain() || send == MPI_IN_PLACE) return false;
          (void)group.gatherv(in.moved(), root);
          return true;
        }
        const Parts out(recv, recv_counts, displacements, group.size(), recv_type);
        if (!out.is_plain()) return false;
        const Elements own = out.part(root);
        const Elements in = given(send, count, type, own);
        if (!fit(in, own, send)) return false;
        const Tensor all = *group.gatherv(in.moved(), root);
        if (all.view().element_count() != out.all_bytes()) throw OtherSize();
        out.spread(all);
        return true;
      },
      [&] { return PMPI_Gatherv(send, count, type, recv, recv_counts, displacements, recv_type, root, comm); });
}

int MPI_Scatter(const void* send, int count, MPI_Datatype type, void* recv, int recv_count, MPI_Datatype recv_type,
                int root, MPI_Comm comm) {
  return run(
      Function::scatter, comm,
      [&](ProcessGroup& group) {
        if (group.rank() != root) {
          const Elements out(recv, recv_count, recv_type);
          if (!out.is_plain() || recv == MPI_IN_PLACE) return false;
          group.scatter(writable(out.moved()), {}, root);
          return true;
        }
        const Elements in(send, count, type);
        const Elements out = given(recv, recv_count, recv_type, in.behind(root));
        if (!fit(in, out, recv)) return false;
        std::vector<TensorView> parts;
        for (int rank = 0; rank < group.size(); ++rank) parts.push_back(in.behind(rank).moved());
        // The root's own part is not copied, because its memory may be read-only.
        group.scatter(recv == MPI_IN_PLACE ? Tensor::allocate(DType::u8, {in.bytes()}) : writable(out.moved()), parts,
                      root);
        return true;
      },
      [&] { return PMPI_Scatter(send, count, type, recv, recv_count, recv_type, root, comm); });
}

int MPI_Scatterv(const void* send, const int* counts, const int* displacements, MPI_Datatype type, void* recv,
                 int recv_count, MPI_Datatype recv_type, int root, MPI_Comm comm) {
  return run(
      Function::scatterv, comm,
      [&](ProcessGroup& group) {
        const bool is_root = group.rank() == root;
        const Elements out(recv, recv_count, recv_type);
        const bool keeps = is_root && recv == MPI_IN_PLACE;
        if ((!keeps && (!out.is_plain() || recv == MPI_IN_PLACE)) || root < 0 || root >= group.size()) return false;
        const std::vector<int> none(static_cast<std::size_t>(group.size()));
        Parts in(is_root ? send : nullptr, is_root ? counts : none.data(), is_root ? displacements : none.data(),
                 group.size(), is_root ? type : MPI_BYTE);
        if (!in.is_plain()) return false;
        if (keeps) in.drop(root);
        const Tensor own = group.all_to_allv(in.joined(), in.bytes());
        if (keeps) return true;
        if (static_cast<std::int64_t>(own.nbytes()) != out.bytes()) throw OtherSize();
        put(out, own);
        return true;
      },
      [&] { return PMPI_Scatterv(send, counts, displacements, type, recv, recv_count, recv_type, root, comm); });
}

int MPI_Alltoall(const void* send, int count, MPI_Datatype type, void* recv, int recv_count, MPI_Datatype recv_type,
                 MPI_Comm comm) {
  return run(
      Function::alltoall, comm,
      [&](ProcessGroup& group) {
        const Elements out(recv, recv_count, recv_type);
        const Elements in = given(send, count, type, out);
        if (!fit(in, out, send)) return false;
        put(out, group.all_to_all(in.times(group.size()).moved()));
        return true;
      },
      [&] { return PMPI_Alltoall(send, count, type, recv, recv_count, recv_type, comm); });
}

int MPI_Alltoallv(const void* send, const int* counts, const int* displacements, MPI_Datatype type, void* recv,
                  const int* recv_counts, const int* recv_displacements, MPI_Datatype recv_type, MPI_Comm comm) {
  return run(
      Function::alltoallv, comm,
      [&](ProcessGroup& group) {
        const Parts out(recv, recv_counts, recv_displacements, group.size(), recv_type);
        const Parts in = send == MPI_IN_PLACE ? out : Parts(send, counts, displacements, group.size(), type);
        if (!in.is_plain() || !out.is_plain()) return false;
        std::vector<std::int64_t> received;
        const Tensor all = group.all_to_allv(in.joined(), in.bytes(), &received);
        if (received != out.bytes()) throw OtherSize();
        out.spread(all);
        return true;
      },
      [&] {
        return PMPI_Alltoallv(send, counts, displacements, type, recv, recv_counts, recv_displacements, recv_type,
                              comm);
      });
}

}  // extern "C"
#pragma GCC visibility pop
