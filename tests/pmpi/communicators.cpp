// SPDX-License-Identifier: Apache-2.0
#include "tests/pmpi/communicators.hpp"

#include <fmt/core.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <random>
#include <string>

#include "src/group/local_group.hpp"
#include "src/group/watchdog.hpp"

namespace muster::pmpi {
namespace {

// All ranks have already entered the call.
constexpr std::chrono::seconds meeting_timeout{60};
// MPI has no deadline. Dead ranks are detected without one.
constexpr std::chrono::hours waiting_timeout{24};
// The longest time without MPI progress while a rank waits.
constexpr std::chrono::microseconds between_looks{100};

struct Attribute {
  std::unique_ptr<ProcessGroup> group;
};

int drop(MPI_Comm, int, void* attribute, void*) {
  delete static_cast<Attribute*>(attribute);
  return MPI_SUCCESS;
}

int make_key() noexcept {
  int key = MPI_KEYVAL_INVALID;
  PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, drop, &key, nullptr);
  return key;
}

/// Testing a request that never completes makes MPI progress all others.
std::chrono::nanoseconds let_mpi_go_on() {
  static const MPI_Request never = [] {
    MPI_Request request = MPI_REQUEST_NULL;
    PMPI_Grequest_start([](void*, MPI_Status*) { return MPI_SUCCESS; }, [](void*) { return MPI_SUCCESS; },
                        [](void*, int) { return MPI_SUCCESS; }, nullptr, &request);
    return request;
  }();
  int is_complete = 0;
  PMPI_Request_get_status(never, &is_complete, MPI_STATUS_IGNORE);
  return between_looks;
}

bool is_on_one_host(MPI_Comm comm, int size) noexcept {
  MPI_Comm host = MPI_COMM_NULL;
  int here = 0;
  if (PMPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host) != MPI_SUCCESS) return false;
  PMPI_Comm_size(host, &here);
  PMPI_Comm_free(&host);
  return here == size;
}

/// Throws the errors of local_group() and ProcessGroup.
std::unique_ptr<ProcessGroup> meet(const std::string& key, int rank, int size) {
  auto group = std::make_unique<ProcessGroup>(
      *local_group({.key = key, .rank = rank, .size = size, .timeout = meeting_timeout, .numbers = {}}));
  SyncGroup& ranks = group->group();
  ranks.set_timeout(std::getenv("MUSTER_TIMEOUT") == nullptr ? waiting_timeout : group::default_timeout());
  static_cast<group::LocalGroup&>(group::inside(ranks)).while_waiting(let_mpi_go_on);
  return group;
}

std::unique_ptr<ProcessGroup> make_group(MPI_Comm comm) {
  int is_inter = 0;
  int size = 0;
  int rank = 0;
  if (PMPI_Comm_test_inter(comm, &is_inter) != MPI_SUCCESS || is_inter != 0) return nullptr;
  PMPI_Comm_size(comm, &size);
  PMPI_Comm_rank(comm, &rank);
  if (size == 1 || !is_on_one_host(comm, size)) return nullptr;
  std::array<unsigned, 4> numbers{};
  if (std::random_device random; rank == 0)
    for (unsigned& number : numbers) number = random();
  PMPI_Bcast(numbers.data(), static_cast<int>(sizeof numbers), MPI_BYTE, 0, comm);
  std::unique_ptr<ProcessGroup> group;
  int is_made = 1;
  try {
    std::string key = "pmpi";
    for (const unsigned number : numbers) key += fmt::format("-{:08x}", number);
    group = meet(key, rank, size);
  } catch (const std::exception& error) {
    fmt::print(stderr, "muster-pmpi: a communicator's collectives go through MPI: {}\n", error.what());
    is_made = 0;
  }
  PMPI_Allreduce(MPI_IN_PLACE, &is_made, 1, MPI_INT, MPI_MIN, comm);
  if (is_made == 0) return nullptr;
  return group;
}

}  // namespace

ProcessGroup* group_of(MPI_Comm comm) noexcept {
  static const int key = make_key();
  Attribute* attribute = nullptr;
  int is_there = 0;
  if (comm == MPI_COMM_NULL || PMPI_Comm_get_attr(comm, key, static_cast<void*>(&attribute), &is_there) != MPI_SUCCESS)
    return nullptr;
  if (is_there == 0) {
    attribute = new Attribute{make_group(comm)};
    PMPI_Comm_set_attr(comm, key, attribute);
  }
  return attribute->group.get();
}

}  // namespace muster::pmpi
