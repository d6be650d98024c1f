// SPDX-License-Identifier: Apache-2.0
// Too little memory is an error on all ranks before the first byte moves, with needed and available bytes; never
// SIGBUS, never a dead process.

#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>

#include "doctest/doctest.h"
#include "muster/gather.hpp"
#include "muster/gather_each.hpp"
#include "muster/shared_arena.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/patterns.hpp"

using namespace muster;
using namespace muster::test;

namespace {

const std::vector<int> four = {0, 1, 2, 3};

/// In a child: a /dev/shm of `kib` that only it and its children see.
bool shrink_dev_shm(int kib) {
  if (::unshare(CLONE_NEWNS) != 0) return false;
  if (::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return false;
  const std::string size = "size=" + std::to_string(kib) + "k";
  return ::mount("none", "/dev/shm", "tmpfs", 0, size.c_str()) == 0;
}

/// Runs a test in a child of its own, which may change its surroundings; its words when it cannot be run here.
std::string in_child(const std::function<void()>& body) {
  Ranks child(1, [&](int) { body(); });
  const Ended ended = child.wait().front();
  if (ended.words.starts_with("skipped: ")) return ended.words;
  CHECK_MESSAGE(ended.ok(), "status ", ended.exit_status, ", signal ", ended.signal, ": ", ended.words);
  return {};
}

void gather_whole(SyncGroup& group, std::int64_t bytes) {
  const Tensor mine = Tensor::allocate(DType::u8, {bytes});
  fill(mine.mutable_data(), mine.nbytes(), static_cast<std::uint64_t>(group.rank()));
  const GatheredTensors all = get_tensors_parallel(mine, four, group);
  for (const auto& [rank, tensor] : all.present())
    RANK_CHECK(is_pattern(tensor, DType::u8, {bytes}, static_cast<std::uint64_t>(rank)));
}

/// All ranks must get the same `no space` with figures, and go on afterwards.
void expect_no_space(SyncGroup& group, std::int64_t bytes, const char* limited_by) {
  const Tensor mine = pattern(DType::u8, {bytes}, 1);
  bool refused = false;
  try {
    (void)get_tensors_parallel(mine, four, group);
  } catch (const Error& error) {
    const std::string words = error.what();
    if (error.kind() != ErrorKind::no_space) throw;
    refused = true;
    if (words.find("needed") == std::string::npos || words.find(limited_by) == std::string::npos)
      throw RankFailure(words);
  }
  RANK_CHECK(refused);
  gather_whole(group, 1000);
}

void all_well(const std::vector<Ended>& all) {
  for (const Ended& ended : all)
    if (!ended.ok())
      throw RankFailure("a rank ended with status " + std::to_string(ended.exit_status) + ", signal " +
                        std::to_string(ended.signal) + ": " + ended.words);
}

#define SKIP_IF(words)                                               \
  do {                                                               \
    if (const std::string why = (words); !why.empty()) MESSAGE(why); \
  } while (false)

}  // namespace

TEST_CASE("/dev/shm of 1 MiB: a gather of 256 MiB works") {
  SKIP_IF(in_child([] {
    if (!shrink_dev_shm(1024)) throw RankFailure("skipped: no right to mount a small /dev/shm");
    all_well(try_ranks(4, [](SyncGroup& group) { gather_whole(group, 64 << 20); }));
  }));
}

TEST_CASE("/dev/shm of 1 MiB and POSIX memory forced: a clear error on all ranks") {
  SKIP_IF(in_child([] {
    // Room for the group's control block, not for a tensor.
    if (!shrink_dev_shm(2048)) throw RankFailure("skipped: no right to mount a small /dev/shm");
    ::setenv("MUSTER_SHM", "posix", 1);
    all_well(try_ranks(4, [](SyncGroup& group) { expect_no_space(group, 4 << 20, "/dev/shm"); }));
  }));
}

TEST_CASE("/dev/shm of 8 MiB and POSIX memory forced: a stream cuts its budget to what is there") {
  SKIP_IF(in_child([] {
    if (!shrink_dev_shm(8192)) throw RankFailure("skipped: no right to mount a small /dev/shm");
    ::setenv("MUSTER_SHM", "posix", 1);
    all_well(try_ranks(4, [](SyncGroup& group) {
      std::uint64_t given = 0;
      std::uint64_t received = 0;
      const auto source = [&]() -> std::optional<Config> {
        if (given == 6) return std::nullopt;
        return Config::object({{"w", pattern(DType::u8, {3000, 1000}, given++)}});
      };
      const auto consume = [&](LayerPart& part) {
        for (const auto& [rank, config] : part.present()) received += config.at("w").as_tensor().nbytes();
      };
      for (const std::uint64_t budget : {256_MiB, 1_MiB, 256_MiB}) {
        given = received = 0;
        const StreamReport report = gather_each(source, four, group, consume, {.memory_budget = budget});
        RANK_CHECK(report.part_bytes < 2_MiB);
        RANK_CHECK(received == (group.rank() == 0 ? 4 * 6 * 3'000'000 : 0));
      }
    }));
  }));
}

TEST_CASE("/dev/shm without room for a stream: a clear error on all ranks, and the group goes on") {
  SKIP_IF(in_child([] {
    if (!shrink_dev_shm(1400)) throw RankFailure("skipped: no right to mount a small /dev/shm");
    ::setenv("MUSTER_SHM", "posix", 1);
    all_well(try_ranks(4, [](SyncGroup& group) {
      bool refused = false;
      try {
        gather_each([] { return std::nullopt; }, four, group, [](LayerPart&) {});
      } catch (const Error& error) {
        refused = error.kind() == ErrorKind::no_space;
        if (!refused) throw;
      }
      RANK_CHECK(refused);
      gather_whole(group, 1000);
    }));
  }));
}

TEST_CASE("a rendezvous without room in /dev/shm is an error, not SIGBUS") {
  SKIP_IF(in_child([] {
    if (!shrink_dev_shm(64)) throw RankFailure("skipped: no right to mount a small /dev/shm");
    ::setenv("MUSTER_SHM", "posix", 1);
    for (const Ended& ended : try_ranks(2, [](SyncGroup&) {})) {
      RANK_CHECK(ended.exit_status == 1);
      RANK_CHECK(ended.words.find("/dev/shm") != std::string::npos);
    }
  }));
}

TEST_CASE("a file size limit (RLIMIT_FSIZE) is an error, not SIGXFSZ") {
  SKIP_IF(in_child([] {
    const rlimit small{8 << 20, 8 << 20};
    RANK_CHECK(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    all_well(try_ranks(4, [](SyncGroup& group) { expect_no_space(group, 32 << 20, "RLIMIT_FSIZE"); }));
  }));
}

TEST_CASE("a group that a file size limit (RLIMIT_FSIZE) does not allow is an error on all ranks, not SIGXFSZ") {
  for (const auto& [group, shm] : {std::pair("local", "memfd"), {"local", "posix"}, {"file", "memfd"}}) {
    CAPTURE(group);
    CAPTURE(shm);
    SKIP_IF(in_child([group = group, shm = shm] {
      ::setenv("MUSTER_SHM", shm, 1);
      ::setenv("MUSTER_TEST_GROUP", group, 1);
      const rlimit none{0, RLIM_INFINITY};
      RANK_CHECK(::setrlimit(RLIMIT_FSIZE, &none) == 0);
      for (const Ended& ended : try_ranks(2, [](SyncGroup&) {}))
        if (ended.exit_status != 1 || ended.words.find("RLIMIT_FSIZE") == std::string::npos)
          throw RankFailure("signal " + std::to_string(ended.signal) + ": " + ended.words);
    }));
  }
}

TEST_CASE("an address space limit (RLIMIT_AS) on the first rank is an error on all ranks") {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  MESSAGE("skipped: sanitizers need the address space");
#else
  SKIP_IF(in_child([] {
    all_well(try_ranks(4, [](SyncGroup& group) {
      if (group.rank() == 0) {
        const rlimit small{512 << 20, 512 << 20};
        RANK_CHECK(::setrlimit(RLIMIT_AS, &small) == 0);
      }
      // Only the senders have much: the first rank cannot map it.
      const Config mine = Config::object(
          {{"w", group.rank() == 0 ? pattern(DType::u8, {1}, 0) : Tensor::allocate(DType::u8, {200 << 20})}});
      bool refused = false;
      try {
        (void)get_configs_parallel(&mine, four, group);
      } catch (const Error& error) {
        refused = error.kind() == ErrorKind::no_space && error.rank() == 0;
        if (!refused) throw;
      }
      RANK_CHECK(refused);
      gather_whole(group, 1000);
    }));
  }));
#endif
}

TEST_CASE("a cgroup that is too small is an error on all ranks") {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  MESSAGE("skipped: the sanitizers' own memory would fill the cgroup");
#else
  SKIP_IF(in_child([] {
    // Version 1 and 2 name things differently; either may be read-only here.
    const std::string dir = "/sys/fs/cgroup/memory/muster-test-" + std::to_string(::getpid());
    const std::string unified = "/sys/fs/cgroup/muster-test-" + std::to_string(::getpid());
    struct Remove {
      std::string path;
      ~Remove() { ::rmdir(path.c_str()); }
    };
    std::string used;
    for (const auto& [path, limit] : {std::pair{dir, "/memory.limit_in_bytes"}, std::pair{unified, "/memory.max"}}) {
      if (::mkdir(path.c_str(), 0755) != 0) continue;
      std::ofstream file(path + limit);
      file << (192 << 20);
      file.close();
      std::ofstream procs(path + "/cgroup.procs");
      procs << ::getpid();
      procs.close();
      if (file.good() && procs.good()) {
        used = path;
        break;
      }
      ::rmdir(path.c_str());
    }
    if (used.empty()) throw RankFailure("skipped: no cgroup can be made here");
    const Remove remove{used};
    // 4 ranks hold 24 MiB each; the senders would need another 72 in shared memory twice over.
    all_well(try_ranks(4, [](SyncGroup& group) { expect_no_space(group, 40 << 20, "cgroup"); }));
    // Out again, so that the group is empty when it is removed.
    std::ofstream(used.substr(0, used.rfind('/')) + "/cgroup.procs") << ::getpid();
  }));
#endif
}

TEST_CASE("an arena larger than the machine is refused with figures") {
  try {
    const SharedArena arena(std::uint64_t{1} << 50);
    FAIL("made");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::no_space);
    CHECK(std::string(error.what()).find("needed 1125899906842624 bytes, available") != std::string::npos);
  }
}

TEST_CASE("a full arena says how much is free, and how much waits for leases") {
  SharedArena arena(1 << 20);
  const Tensor first = arena.allocate(DType::u8, {600000});
  try {
    (void)arena.allocate(DType::u8, {600000});
    FAIL("made");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::no_space);
    CHECK(std::string(error.what()).find("needed 600000 bytes in one piece") != std::string::npos);
  }
}
