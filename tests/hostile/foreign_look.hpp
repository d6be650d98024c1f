// SPDX-License-Identifier: Apache-2.0
#pragma once
// The result of opening a third-party HDF5 file, and its cost.

#include <fmt/core.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include "muster/error.hpp"
#include "src/checkpoint/thirdparty/hdf5/file.hpp"
#include "src/inspect/output.hpp"

namespace muster::test {

struct Look {
  /// "error KIND: WORDS", "tensor NAME", "text KEY", "issue PATH: WORDS", "unreadable NAME: WORDS", "broken NAME".
  std::vector<std::string> lines;
  std::string end;               ///< how the process ended, if it did not succeed
  double seconds = 0;            ///< wall-clock time
  double cpu_seconds = 0;        ///< of that process and of the reader that it waited for
  std::uint64_t peak_bytes = 0;  ///< of the larger of both
};

/// Reads the beginning and the end of every tensor, about as much as a person would view.
inline void read_ends(const ForeignHdf5& file, std::vector<std::string>& lines) {
  constexpr std::uint64_t piece = std::uint64_t{256} << 10;
  std::vector<std::byte> memory;
  for (std::size_t i = 0; i < file.tensors().size(); ++i) {
    const TensorEntry& tensor = file.tensors()[i];
    const std::string name = inspect::printable(tensor.name);
    if (byte_size(tensor.dtype, tensor.shape) != tensor.bytes || file.find(tensor.name) != i)
      lines.push_back("broken " + name);
    try {
      const std::uint64_t length = std::min(piece, tensor.bytes);
      (void)file.read_piece(i, 0, length, memory);
      (void)file.read_piece(i, tensor.bytes - length, length, memory);
    } catch (const Error& error) {
      lines.push_back("unreadable " + name + ": " + error.what());
    }
  }
}

inline std::vector<std::string> look(const std::string& path, const ForeignHdf5Options& options) {
  std::vector<std::string> lines;
  try {
    const auto file = ForeignHdf5::open(path, options);
    for (const TensorEntry& tensor : file->tensors()) lines.push_back("tensor " + inspect::printable(tensor.name));
    for (const auto& [key, value] : file->metadata()) lines.push_back("text " + inspect::printable(key));
    for (const Omission& issue : file->omissions())
      lines.push_back("issue " + inspect::printable(issue.name) + ": " + issue.reason);
    read_ends(*file, lines);
  } catch (const Error& error) {
    lines.push_back(fmt::format("error {}: {}", to_string(error.kind()), error.what()));
  }
  return lines;
}

/// Runs in a separate process, to measure its memory and to survive a crash.
inline Look look_from_outside(const std::string& path, const ForeignHdf5Options& options) {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) throw std::runtime_error("pipe");
  const auto began = std::chrono::steady_clock::now();
  const pid_t child = ::fork();
  if (child < 0) throw std::runtime_error("fork");
  if (child == 0) {
    ::close(ends[0]);
    for (const std::string& line : look(path, options)) {
      const std::string ended = line + '\n';
      for (std::size_t done = 0; done < ended.size();) {
        const ssize_t written = ::write(ends[1], ended.data() + done, ended.size() - done);
        if (written <= 0) ::_exit(2);
        done += static_cast<std::size_t>(written);
      }
    }
    ::_exit(0);
  }
  ::close(ends[1]);
  std::string text;
  std::array<char, 65536> buffer{};
  for (ssize_t got = 0; (got = ::read(ends[0], buffer.data(), buffer.size())) > 0;)
    text.append(buffer.data(), static_cast<std::size_t>(got));
  ::close(ends[0]);
  int status = 0;
  rusage used{};
  ::wait4(child, &status, 0, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  Look result;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  result.cpu_seconds = seconds(used.ru_utime) + seconds(used.ru_stime);
  result.peak_bytes = static_cast<std::uint64_t>(used.ru_maxrss) * 1024;
  if (WIFSIGNALED(status)) result.end = fmt::format("ended by signal {}", WTERMSIG(status));
  if (WIFEXITED(status) && WEXITSTATUS(status) != 0) result.end = fmt::format("ended with {}", WEXITSTATUS(status));
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    result.lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return result;
}

}  // namespace muster::test
