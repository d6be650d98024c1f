// SPDX-License-Identifier: Apache-2.0
#include "tests/support/pmi_server.hpp"

#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <stdexcept>
#include <string>

namespace muster::test {
namespace {

/// The value of KEY=VALUE in a line of such words; of the last word, all that follows.
std::string field(const std::string& line, const std::string& key, bool to_end = false) {
  const std::string mark = key + "=";
  std::size_t at = line.rfind(mark, 0) == 0 ? 0 : line.find(" " + mark);
  if (at == std::string::npos) return {};
  at = line.find('=', at) + 1;
  return line.substr(at, to_end ? std::string::npos : line.find(' ', at) - at);
}

class Server {
 public:
  explicit Server(std::vector<int> ends) : ends_(std::move(ends)), texts_(ends_.size()) {
    values_["PMI_process_mapping"] = "(vector,(0,1," + std::to_string(ends_.size()) + "))";
  }

  void run() {
    std::size_t open = ends_.size();
    while (open > 0) {
      std::vector<pollfd> polls;
      for (const int end : ends_) polls.push_back({end, POLLIN, 0});
      if (::poll(polls.data(), polls.size(), -1) < 0) continue;
      for (std::size_t rank = 0; rank < polls.size(); ++rank) {
        if (polls[rank].revents == 0) continue;
        char buffer[4096];
        const ssize_t got = ::read(ends_[rank], buffer, sizeof buffer);
        if (got <= 0) {
          ::close(ends_[rank]);
          ends_[rank] = -1;
          --open;
          continue;
        }
        texts_[rank].append(buffer, static_cast<std::size_t>(got));
        for (std::size_t end = 0; (end = texts_[rank].find('\n')) != std::string::npos;) {
          const std::string line = texts_[rank].substr(0, end);
          texts_[rank].erase(0, end + 1);
          answer(rank, line);
        }
      }
    }
  }

 private:
  void say(std::size_t rank, const std::string& words) const {
    const std::string line = words + "\n";
    if (ends_[rank] >= 0 && ::send(ends_[rank], line.data(), line.size(), MSG_NOSIGNAL) < 0) return;
  }

  void answer(std::size_t rank, const std::string& line) {
    const std::string command = field(line, "cmd");
    if (command == "init") {
      say(rank, "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0");
    } else if (command == "get_maxes") {
      say(rank, "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024");
    } else if (command == "get_appnum") {
      say(rank, "cmd=appnum appnum=0");
    } else if (command == "get_universe_size") {
      say(rank, "cmd=universe_size size=" + std::to_string(ends_.size()));
    } else if (command == "get_my_kvsname") {
      say(rank, "cmd=my_kvsname kvsname=kvs_0");
    } else if (command == "put") {
      values_[field(line, "key")] = field(line, "value", true);
      say(rank, "cmd=put_result rc=0 msg=success");
    } else if (command == "get") {
      const auto found = values_.find(field(line, "key"));
      say(rank, found == values_.end() ? "cmd=get_result rc=-1 msg=none value=unknown"
                                       : "cmd=get_result rc=0 msg=success value=" + found->second);
    } else if (command == "barrier_in") {
      if (++arrived_ < ends_.size()) return;
      arrived_ = 0;
      for (std::size_t other = 0; other < ends_.size(); ++other) say(other, "cmd=barrier_out rc=0");
    } else if (command == "finalize") {
      say(rank, "cmd=finalize_ack rc=0");
    }
  }

  std::vector<int> ends_;
  std::vector<std::string> texts_;
  std::map<std::string, std::string> values_;
  std::size_t arrived_ = 0;
};

}  // namespace

PmiServer::PmiServer(int size) {
  std::vector<int> ours;
  for (int rank = 0; rank < size; ++rank) {
    int ends[2] = {-1, -1};
    if (::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) throw std::runtime_error("socketpair");
    ours.push_back(ends[0]);
    ends_.push_back(ends[1]);
  }
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) throw std::runtime_error("fork");
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(3);
    for (const int end : ends_) ::close(end);
    Server(ours).run();
    ::_exit(0);
  }
  for (const int end : ours) ::close(end);
}

PmiServer::~PmiServer() {
  for (const int end : ends_) ::close(end);
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void PmiServer::enter(int rank) const {
  for (std::size_t other = 0; other < ends_.size(); ++other)
    if (other != static_cast<std::size_t>(rank)) ::close(ends_[other]);
  ::setenv("PMI_FD", std::to_string(ends_[static_cast<std::size_t>(rank)]).c_str(), 1);
  ::setenv("PMI_RANK", std::to_string(rank).c_str(), 1);
  ::setenv("PMI_SIZE", std::to_string(ends_.size()).c_str(), 1);
}

}  // namespace muster::test
