// SPDX-License-Identifier: Apache-2.0
// Random exchanges whose outcome can be compared between two builds: exchanges SEED FIRST LAST [RECORD]
//
// Each job is 2 to 5 forked ranks that gather, merge, stream, export and send messages to each other, with mistakes now
// and then. Some jobs end with a rank that is killed, leaves, is cancelled or does not come. The log has a line for
// each rank and exchange: the digest of what came, or the kind of the error and the rank that it blames. It has no
// times and no words, so the same seed gives the same log in every build that behaves alike (compare.sh).
//
// RECORD is a file with the digest of each job's log. Jobs that differ from it are printed and fail the program; with
// MUSTER_ACCEPT_GOLDEN=1 the file is written.

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#define DOCTEST_CONFIG_IMPLEMENT
#include "doctest/doctest.h"
#include "tests/differential/draw.hpp"
#include "tests/differential/rank_part.hpp"
#include "tests/support/forked_ranks.hpp"
#include "tests/support/kills.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace muster::test;
using namespace std::chrono_literals;

namespace {

/// How a job ends.
enum class End { well, kill_between, kill_within, leave, late, cancel };

std::string play(Job job) {
  Draw draw{job.seed, job.number};
  job.ranks = 2 + draw.below(4);
  const int steps = 3 + draw.below(7);
  const int ending = draw.below(16);
  const End end = ending < 5 ? static_cast<End>(ending + 1) : End::well;
  const int victim = draw.below(job.ranks);
  const std::chrono::microseconds delay(draw.below(8000));
  const TemporaryDirectory directory;
  job.directory = directory.path();

  const GroupOf group(job.ranks);
  Ranks ranks(job.ranks, [&](int rank) {
    RankPart part(job, group.join(rank));
    for (int i = 0; i < steps; ++i)
      if (!part.step()) break;
    const bool is_victim = rank == victim;
    // Else the end could overtake what the last exchange says.
    if (end != End::well) part.barrier();
    if (is_victim && end == End::kill_between) ::raise(SIGKILL);
    if (is_victim && end == End::kill_within) kill_self_after(delay);
    if (end == End::kill_between || end == End::kill_within || (end == End::leave && !is_victim))
      part.step_until_failure();
    if (end == End::late || end == End::cancel) part.wait_for_absent(victim, end == End::cancel);
    part.end();
    say(part.log());
  });
  std::string log = "job " + std::to_string(job.number) + ", " + std::to_string(job.ranks) + " ranks\n";
  const std::vector<Ended> ended = ranks.wait();
  for (std::size_t rank = 0; rank < ended.size(); ++rank) {
    log += "rank " + std::to_string(rank) + ": status " + std::to_string(ended[rank].exit_status) + ", signal " +
           std::to_string(ended[rank].signal) + "\n";
    log += ended[rank].words;
    if (!log.ends_with('\n')) log += '\n';
  }
  return log;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc < 4 || argc > 5) throw std::runtime_error("usage: exchanges SEED FIRST LAST [RECORD]");
    const char* program = std::getenv("MUSTER_PROGRAM");
    if (program == nullptr) throw std::runtime_error("MUSTER_PROGRAM is not set");
    const std::uint64_t seed = std::stoull(argv[1]);
    const std::uint64_t first = std::stoull(argv[2]);
    const std::uint64_t last = std::stoull(argv[3]);
    const bool has_record = argc == 5;
    const bool accepts = has_record && std::getenv("MUSTER_ACCEPT_GOLDEN") != nullptr;
    std::map<std::uint64_t, std::string> record;
    if (has_record && !accepts) {
      std::ifstream file(argv[4]);
      for (std::uint64_t number = 0; file >> number;) file >> record[number];
    }
    std::ofstream written;
    if (accepts) written.open(argv[4]);
    int differing = 0;
    for (std::uint64_t number = first; number <= last; ++number) {
      const std::string log = play({.seed = seed, .number = number, .ranks = 0, .directory = {}, .program = program});
      Digest digest;
      digest.text(log);
      if (accepts) written << number << " " << digest.digits() << "\n";
      if (accepts || (has_record && record[number] == digest.digits())) continue;
      std::fputs(log.c_str(), stdout);
      ++differing;
    }
    if (!has_record || differing == 0) return 0;
    std::printf("%d jobs are not as recorded: tests/differential/compare.sh shows where\n", differing);
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "exchanges: %s\n", error.what());
    return 2;
  }
}
