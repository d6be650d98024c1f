// SPDX-License-Identifier: Apache-2.0
#include "src/checkpoint/thirdparty/hdf5/reader.hpp"

#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <vector>

#include "src/os/fd.hpp"

namespace muster::hdf5 {

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool is_sanitized = true;
#else
constexpr bool is_sanitized = false;
#endif

#if defined(__x86_64__)
constexpr std::uint32_t this_architecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr std::uint32_t this_architecture = AUDIT_ARCH_AARCH64;
#else
constexpr std::uint32_t this_architecture = 0;
#endif

// Allowed with any arguments.
constexpr std::array allowed = {
    SYS_munmap,        SYS_mremap,          SYS_brk,         SYS_madvise,      SYS_futex,
    SYS_clock_gettime, SYS_gettimeofday,    SYS_getrandom,   SYS_rt_sigreturn, SYS_rt_sigprocmask,
    SYS_exit,          SYS_exit_group,      SYS_getpid,      SYS_gettid,       SYS_sched_yield,
    SYS_rt_sigaction,  SYS_restart_syscall, SYS_sigaltstack,
};

// This program never makes these calls.
constexpr std::array deadly = {
    SYS_execve,         SYS_execveat, SYS_clone,      SYS_ptrace,           SYS_socket,
    SYS_socketpair,     SYS_bind,     SYS_connect,    SYS_process_vm_readv, SYS_process_vm_writev,
    SYS_mount,          SYS_bpf,      SYS_kexec_load, SYS_init_module,
#ifdef SYS_clone3
    SYS_clone3,
#endif
#ifdef SYS_fork
    SYS_fork,           SYS_vfork,
#endif
#ifdef SYS_io_uring_setup
    SYS_io_uring_setup,
#endif
};

/// Instructions of the seccomp filter, in the order of execution.
class Program {
 public:
  void load_call() { load(offsetof(seccomp_data, nr)); }
  /// Loads the low half of an argument.
  void load_argument(int number) {
    load(offsetof(seccomp_data, args) + static_cast<std::size_t>(number) * 8 + low_half);
  }
  void load(std::size_t offset) { add(BPF_LD | BPF_W | BPF_ABS, static_cast<std::uint32_t>(offset)); }
  void give(std::uint32_t verdict) { add(BPF_RET | BPF_K, verdict); }
  /// Skips the next `count` instructions if the loaded value equals (does not equal) `value`, or has (none of) its
  /// bits.
  void skip_if_equal(std::uint32_t value, std::uint8_t count) { add(BPF_JMP | BPF_JEQ | BPF_K, value, count, 0); }
  void skip_unless_equal(std::uint32_t value, std::uint8_t count) { add(BPF_JMP | BPF_JEQ | BPF_K, value, 0, count); }
  void skip_if_any(std::uint32_t bits, std::uint8_t count) { add(BPF_JMP | BPF_JSET | BPF_K, bits, count, 0); }
  void skip_if_none(std::uint32_t bits, std::uint8_t count) { add(BPF_JMP | BPF_JSET | BPF_K, bits, 0, count); }
  std::vector<sock_filter>& instructions() { return instructions_; }

 private:
  static constexpr std::size_t low_half = std::endian::native == std::endian::little ? 0 : 4;
  void add(std::uint32_t code, std::uint32_t value, std::uint8_t yes = 0, std::uint8_t no = 0) {
    instructions_.push_back({static_cast<std::uint16_t>(code), yes, no, value});
  }
  std::vector<sock_filter> instructions_;
};

/// Allows a call only if its first argument is this descriptor.
void allow_on(Program& program, long call, int descriptor) {
  program.skip_unless_equal(static_cast<std::uint32_t>(call), 4);
  program.load_argument(0);
  program.skip_unless_equal(static_cast<std::uint32_t>(descriptor), 1);
  program.give(SECCOMP_RET_ALLOW);
  program.give(SECCOMP_RET_ERRNO | EPERM);
}

Program make_program(const FenceOptions& options) {
  Program program;
  program.load(offsetof(seccomp_data, arch));
  // Call numbers of another architecture mean other calls.
  program.skip_if_equal(this_architecture, 1);
  program.give(SECCOMP_RET_KILL_PROCESS);
  program.load_call();
  for (const long call : deadly) {
    program.skip_unless_equal(static_cast<std::uint32_t>(call), 1);
    program.give(SECCOMP_RET_KILL_PROCESS);
  }
  for (const long call : allowed) {
    program.skip_unless_equal(static_cast<std::uint32_t>(call), 1);
    program.give(SECCOMP_RET_ALLOW);
  }
  allow_on(program, SYS_pread64, options.input);
  allow_on(program, SYS_read, options.socket);
  allow_on(program, SYS_write, options.socket);
  // Allows only anonymous memory that is not executable.
  program.skip_unless_equal(static_cast<std::uint32_t>(SYS_mmap), 6);
  program.load_argument(2);
  program.skip_if_any(PROT_EXEC, 3);
  program.load_argument(3);
  program.skip_if_none(MAP_ANONYMOUS, 1);
  program.give(SECCOMP_RET_ALLOW);
  program.give(SECCOMP_RET_ERRNO | EPERM);
  program.skip_unless_equal(static_cast<std::uint32_t>(SYS_mprotect), 4);
  program.load_argument(2);
  program.skip_if_any(PROT_EXEC, 1);
  program.give(SECCOMP_RET_ALLOW);
  program.give(SECCOMP_RET_ERRNO | EPERM);
  program.give(SECCOMP_RET_ERRNO | EPERM);
  return program;
}

bool set_limit(int what, std::uint64_t value, std::uint64_t more = 0) noexcept {
  const rlimit limit{value, value + more};
  // NOLINTNEXTLINE(bugprone-narrowing-conversions): glibc has an enumeration of its own for this in C++
  return ::setrlimit(static_cast<__rlimit_resource>(what), &limit) == 0;
}

std::uint64_t address_space() noexcept {
  std::FILE* file = std::fopen("/proc/self/statm", "re");
  if (file == nullptr) return 0;
  unsigned long long pages = 0;
  const int read = std::fscanf(file, "%llu", &pages);
  std::fclose(file);
  return read == 1 ? pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) : 0;
}

bool filter_calls(const FenceOptions& options) noexcept {
  if constexpr (this_architecture == 0) return false;
  Program program = make_program(options);
  const sock_fprog filter{static_cast<unsigned short>(program.instructions().size()), program.instructions().data()};
  return ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

}  // namespace

void drop_inheritance(const FenceOptions& options) noexcept {
  const auto first = static_cast<unsigned>(std::max(options.input, options.socket)) + 1;
  os::close_range(first);
}

std::uint8_t raise_fence(const FenceOptions& options) noexcept {
  std::uint8_t flags = 0;
  const std::uint64_t now = is_sanitized ? 0 : address_space();
  set_limit(RLIMIT_CORE, 0);
  set_limit(RLIMIT_FSIZE, 0);
  set_limit(RLIMIT_NPROC, 0);
  set_limit(RLIMIT_MEMLOCK, 0);
  // SIGXCPU reports the cause, a second before SIGKILL.
  set_limit(RLIMIT_CPU, options.cpu_seconds, 1);
  if (!is_sanitized && now != 0 && set_limit(RLIMIT_AS, now + options.address_bytes)) flags |= fence_address_space;
  // Descriptors that are already open remain usable.
  if (set_limit(RLIMIT_NOFILE, 0)) flags |= fence_no_new_descriptors;
  ::prctl(PR_SET_DUMPABLE, 0);
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && filter_calls(options)) flags |= fence_seccomp;
  return flags;
}

namespace {

constexpr std::size_t held_at_most = std::size_t{64} << 10;
// Reserved for the last record.
constexpr std::uint64_t spare = 1024;

}  // namespace

bool write_all(int descriptor, std::span<const std::byte> bytes) noexcept {
  while (!bytes.empty()) {
    const ssize_t done = ::write(descriptor, bytes.data(), bytes.size());
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(done));
  }
  return true;
}

RecordBytes& RecordBytes::number(std::uint64_t value) {
  while (value >= 0x80) {
    bytes_.push_back(static_cast<char>(static_cast<unsigned char>(value | 0x80U)));
    value >>= 7U;
  }
  bytes_.push_back(static_cast<char>(static_cast<unsigned char>(value)));
  return *this;
}

RecordBytes& RecordBytes::text(std::string_view value) {
  number(value.size());
  bytes_ += value;
  return *this;
}

ReportWriter::ReportWriter(int descriptor) : descriptor_(descriptor), held_(foreign_report_magic) {}

void ReportWriter::record(const RecordBytes& record) {
  if (is_broken_ || written_ + held_.size() + record.bytes().size() > most_report_bytes - spare) throw ReportFull{};
  held_ += record.bytes();
  if (held_.size() >= held_at_most) flush();
}

void ReportWriter::issue(std::string_view path, std::string_view words, bool is_lost) {
  record(RecordBytes(ForeignRecord::issue).text(path).text(words.substr(0, longest_words)).number(is_lost ? 1 : 0));
}

void ReportWriter::flush() {
  write_out();
  if (is_broken_) throw ReportFull{};
}

void ReportWriter::finish(const RecordBytes& last) noexcept {
  held_ += last.bytes();
  write_out();
}

void ReportWriter::write_out() noexcept {
  if (!is_broken_) is_broken_ = !write_all(descriptor_, std::as_bytes(std::span(held_)));
  written_ += held_.size();
  held_.clear();
}

}  // namespace muster::hdf5
